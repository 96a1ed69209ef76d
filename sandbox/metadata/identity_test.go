package metadata_test

import (
	"encoding/json"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// echo signs nothing: its tokens are what would be signed.
type echo struct{}

func (echo) IdentityToken(email, audience string, withEmail bool, more map[string]any) (string, error) {
	text, err := json.Marshal(map[string]any{"of": email, "aud": audience, "email": withEmail, "more": more})
	return string(text), err
}

func TestIdentity(t *testing.T) {
	w := newWorld(t)
	in, err := w.api.Instances.Get("sluice-sandbox", "us-central1-a", "vm-1").Do()
	if err != nil {
		t.Fatal(err)
	}
	created, err := time.Parse(time.RFC3339, in.CreationTimestamp)
	if err != nil {
		t.Fatal(err)
	}
	engine := map[string]any{
		"project_id": "sluice-sandbox", "project_number": 100000000001.0, "zone": "us-central1-a", "instance_name": "vm-1",
		"instance_id": strconv.FormatUint(in.Id, 10), "instance_creation_timestamp": float64(created.Unix()),
	}
	licensed := map[string]any{"license_id": []any{}}
	for k, v := range engine {
		licensed[k] = v
	}
	const admin = "admin@sluice-sandbox.iam.gserviceaccount.com"
	claims := func(of string, full bool, engine map[string]any) map[string]any {
		c := map[string]any{"of": of, "aud": "a/b?c", "email": full, "more": nil}
		if engine != nil {
			c["more"] = map[string]any{"google": map[string]any{"compute_engine": engine}}
		}
		return c
	}
	for _, c := range []struct {
		what, address, account, query string
		code                          int
		want                          map[string]any
	}{
		{"in full", vmAddress, "default", "audience=a/b%3Fc&format=full", 200, claims(vmEmail, true, engine)},
		{"by the account's name", vmAddress, vmEmail, "audience=a/b%3Fc&format=full", 200, claims(vmEmail, true, engine)},
		{"with licenses", vmAddress, "default", "audience=a/b%3Fc&format=full&licenses=TRUE", 200, claims(vmEmail, true, licensed)},
		{"standard", vmAddress, "default", "audience=a/b%3Fc&format=standard", 200, claims(vmEmail, false, nil)},
		{"by default", vmAddress, "default", "audience=a/b%3Fc", 200, claims(vmEmail, false, nil)},
		{"the workstation is no VM", "127.0.0.1", "default", "audience=a/b%3Fc&format=full", 200, claims(admin, true, nil)},
		{"no audience", vmAddress, "default", "format=full", 400, nil},
		{"an empty audience", vmAddress, "default", "audience=", 400, nil},
		{"another account", vmAddress, admin, "audience=x", 404, nil},
		{"a stranger", strangers, "default", "audience=x", 403, nil},
	} {
		url := fmt.Sprintf("%s/computeMetadata/v1/instance/service-accounts/%s/identity?%s", w.url, c.account, c.query)
		got := get(t, from(t, c.address), url, flavor, "Google")
		if got.status != c.code {
			t.Errorf("%s: got %d %s, want %d", c.what, got.status, got.body, c.code)
			continue
		}
		if c.want == nil {
			continue
		}
		var token map[string]any
		if err := json.Unmarshal([]byte(got.body), &token); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(c.want, token); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.what, diff)
		}
	}
	if got := get(t, from(t, vmAddress), w.url+"/computeMetadata/v1/instance/service-accounts/default/identity?audience=x"); got.status != 403 {
		t.Errorf("without the header: %d", got.status)
	}
}
