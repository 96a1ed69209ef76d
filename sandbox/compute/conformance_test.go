package compute

import (
	"strings"
	"testing"

	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
)

// TestRoutes has every route of the server; what goes over them is held against the description in all tests (see newWorld).
func TestRoutes(t *testing.T) {
	var routes []string
	for _, pattern := range newGuarded(t).server.methods {
		method, path, _ := strings.Cut(pattern, " ")
		routes = append(routes, method+" "+projectPrefix+path)
	}
	discoverytest.Routes(t, routes, "compute")
}
