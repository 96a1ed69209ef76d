package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
)

// TestViolations has good calls to every service, each answered well and with every injected error, and a bad one.
func TestViolations(t *testing.T) {
	needRoot(t)
	const name = "test-violations"
	dir, err := discoverytest.ModuleDir()
	if err != nil {
		t.Fatal(err)
	}
	o := options(name)
	o.CheckAPIs = dir
	up, err := Up(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := Down(context.Background(), name); err != nil && !errors.Is(err, ErrNotRunning) {
			t.Error(err)
		}
	})
	c, err := Open(name)
	if err != nil {
		t.Fatal(err)
	}
	token, err := c.Token(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ask := func(method, path string) int {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), method, up.HostEndpoints.Compute+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		token.SetAuthHeader(r)
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			return 0
		}
		defer answer.Body.Close()
		_, _ = io.Copy(io.Discard, answer.Body)
		return answer.StatusCode
	}
	want := func(paths ...string) {
		t.Helper()
		found, err := c.Violations(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, v := range found {
			got = append(got, fmt.Sprintf("%s %v %s", v.API, v.Reply, v.Where))
		}
		if d := cmp.Diff(paths, got); d != "" {
			t.Fatalf("violations (-want +got)\n%s", d)
		}
	}
	filter := url.Values{"filter": {`metric.type="lustre.googleapis.com/instance/free_bytes"`}, "interval.endTime": {"2026-01-02T03:04:05Z"}, "view": {"FULL"}}
	calls := map[string]int{
		"/compute/v1/projects/sluice-sandbox/zones":                       200,
		"/compute/v1/projects/sluice-sandbox/zones/us-central1-z":         400,
		"/storage/v1/b?project=sluice-sandbox":                            200,
		"/storage/v1/b/no-such-bucket/o/x":                                404,
		"/no-such-bucket/x":                                               404,
		"/v1/projects/sluice-sandbox/locations":                           200,
		"/v1/projects/sluice-sandbox/locations/us-central1-a/instances/x": 404,
		"/v1/projects/sluice-sandbox/serviceAccounts":                     200,
		"/v1/projects/sluice-sandbox":                                     200,
		"/oauth2/v3/certs":                                                200,
		"/v3/projects/sluice-sandbox/timeSeries?" + filter.Encode():       200,
	}
	for path, code := range calls {
		if got := ask("GET", path); got != code {
			t.Errorf("GET %s: got %d, want %d", path, got, code)
		}
	}
	want()
	for _, fault := range strings.Fields("status=403 status=408 status=429 status=500 status=502 status=503 status=504 lost=request lost=reply lost=half") {
		key, value, _ := strings.Cut(fault, "=")
		key = "api.*." + key
		if err := c.SetFault(t.Context(), key, value); err != nil {
			t.Fatal(err)
		}
		for path, code := range calls {
			if got := ask("GET", path); key == "api.*.status" && fmt.Sprint(got) != value {
				t.Errorf("GET %s: got %d instead of %d and not the fault %s", path, got, code, fault)
			}
		}
		if err := c.ClearFault(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
	want()
	for range 2 { // one cause is told once
		ask("GET", "/compute/v1/projects/sluice-sandbox/zones?limit=3")
	}
	want("compute.zones.list false query limit")
}

func TestNothingIsCheckedUnasked(t *testing.T) {
	testUp(t, "test-unchecked")
	c, err := Open("test-unchecked")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Violations(t.Context()); err == nil || !strings.Contains(err.Error(), "does not check") {
		t.Errorf("got %v", err)
	}
}
