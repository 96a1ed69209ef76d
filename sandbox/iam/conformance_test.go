package iam_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
	"github.com/sluicehpc/sluice/sandbox/iam"
)

// TestRoutes has every route of the server; what goes over them is held against the descriptions in all tests (see newWorld).
func TestRoutes(t *testing.T) {
	discoverytest.Routes(t, slices.Collect(maps.Keys(iam.RoutePermissions())), "iam", "iamcredentials", "sts", "cloudresourcemanager")
}
