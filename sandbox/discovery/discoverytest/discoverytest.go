// Package discoverytest fails tests whose exchanges Google's API descriptions do not allow.
package discoverytest

import (
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/sluicehpc/sluice/sandbox/discovery"
)

// ModuleDir returns the directory of the module google.golang.org/api, whose packages have Google's documents beside them.
var ModuleDir = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "google.golang.org/api").Output()
	if err != nil {
		return "", fmt.Errorf("finding google.golang.org/api: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
})

var (
	mu     sync.Mutex // guards loaded
	loaded = map[string]*discovery.API{}
)

// Load returns descriptions by the names that discovery.Load has, and "prose".
func Load(t testing.TB, names ...string) []*discovery.API {
	t.Helper()
	dir, err := ModuleDir()
	if err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	var apis []*discovery.API
	for _, name := range append(names, "prose") {
		if loaded[name] == nil {
			if loaded[name], err = discovery.Load(dir, name); err != nil {
				t.Fatal(err)
			}
		}
		apis = append(apis, loaded[name])
	}
	return apis
}

// Strict checks what goes through h, the server's replies and the clients' requests alike, until the test ends.
func Strict(t testing.TB, h http.Handler, names ...string) http.Handler {
	return wrap(t, h, names, func(discovery.Violation) bool { return true })
}

// Server does the same for tests that also send what is wrong on purpose: that must be refused.
func Server(t testing.TB, h http.Handler, names ...string) http.Handler {
	return wrap(t, h, names, func(v discovery.Violation) bool { return !v.Refused() })
}

// Client checks the requests alone, where h only plays a server.
func Client(t testing.TB, h http.Handler, names ...string) http.Handler {
	return wrap(t, h, names, func(v discovery.Violation) bool { return !v.Reply })
}

// Routes fails the test for each route ("METHOD /path/{name}") that the APIs do not have.
func Routes(t testing.TB, routes []string, names ...string) {
	t.Helper()
	if len(routes) == 0 {
		t.Error("no routes to check")
	}
	rt := discovery.NewRouter(Load(t, names...)...)
	for _, r := range routes {
		method, path, _ := strings.Cut(r, " ")
		if len(rt.Methods(method, path)) == 0 {
			t.Errorf("%s: Google has no such route", r)
		}
	}
}

func wrap(t testing.TB, h http.Handler, names []string, counts func(discovery.Violation) bool) http.Handler {
	var (
		mu    sync.Mutex // guards found, seen
		found []discovery.Violation
		seen  = map[string]bool{}
	)
	t.Cleanup(func() { // runs after the server that a test starts with the handler has closed
		mu.Lock()
		defer mu.Unlock()
		for _, v := range found {
			t.Errorf("not as Google describes it: %v", v)
		}
	})
	return discovery.New(Load(t, names...)...).Handler(h, func(v discovery.Violation) {
		mu.Lock()
		defer mu.Unlock()
		if counts(v) && !seen[v.Key()] {
			seen[v.Key()] = true
			found = append(found, v)
		}
	})
}
