package lustre_test

import (
	"strings"
	"testing"

	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
	"github.com/sluicehpc/sluice/sandbox/lustre"
)

// TestRoutes has every route of the server; what goes over them is held against the description in all tests (see newWorld).
func TestRoutes(t *testing.T) {
	var routes []string
	for key := range lustre.MethodPermissions() { // METHOD SEGMENTS [COLLECTION[:VERB]]
		part := append(strings.Fields(key), "")
		collection, verb, hasVerb := strings.Cut(part[2], ":")
		whole := []string{"projects", "{project}", "locations", "{location}", collection, "{id}"}
		path := "/v1/" + strings.Join(whole[:part[1][0]-'0'], "/")
		if hasVerb {
			path += ":" + verb
		}
		routes = append(routes, part[0]+" "+path)
	}
	discoverytest.Routes(t, routes, "lustre")
}
