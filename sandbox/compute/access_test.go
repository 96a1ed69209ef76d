package compute

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
	"github.com/sluicehpc/sluice/sandbox/iam"
)

// still are VMs that only say yes.
type still struct{ VMs }

func (still) Start(context.Context, Machine) error { return nil }

// guarded is a server with IAM.
type guarded struct {
	*testing.T
	server *Server
	iam    *iam.Server
	// checked is server, held against Google's description.
	checked http.Handler
}

const (
	guardedProject = "projects/sluice-sandbox"
	nodeAccount    = "sluice-node@sluice-sandbox.iam.gserviceaccount.com"
	callerAccount  = "sluiced@sluice-sandbox.iam.gserviceaccount.com"
)

func newGuarded(t *testing.T) *guarded {
	g := &guarded{T: t, iam: iam.New(iam.Options{})}
	var err error
	if g.server, err = New(Config{VMs: still{}, IAM: g.iam, Caller: g.iam.Caller}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.server.Close)
	g.checked = discoverytest.Server(t, g.server, "compute")
	if err := g.server.AddImage("debian-13", "debian", ""); err != nil {
		t.Fatal(err)
	}
	for _, email := range []string{nodeAccount, callerAccount, "nobody-at-all@sluice-sandbox.iam.gserviceaccount.com"} {
		id, _, _ := strings.Cut(email, "@")
		g.ask(g.iam, 200, "POST", "/v1/"+guardedProject+"/serviceAccounts", g.iam.Admin(), map[string]string{"accountId": id})
	}
	return g
}

// ask makes a call as an account, or as nobody.
func (g *guarded) ask(h http.Handler, want int, method, path, email string, body any) map[string]any {
	g.Helper()
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			g.Fatal(err)
		}
	}
	if h == http.Handler(g.server) {
		h = g.checked
	}
	r := httptest.NewRequest(method, path, strings.NewReader(string(text)))
	switch {
	case strings.Contains(email, "@"):
		token, _, err := g.iam.Mint(email, nil, time.Hour)
		if err != nil {
			g.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+token)
	case email != "":
		r.Header.Set("Authorization", "Bearer "+email)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	answer, err := io.ReadAll(w.Body)
	if err != nil {
		g.Fatal(err)
	}
	if w.Code != want {
		g.Errorf("%s %s as %q: got %d %s, want %d", method, path, email, w.Code, answer, want)
	}
	out := map[string]any{}
	_ = json.Unmarshal(answer, &out) // there may be none
	return out
}

func TestEveryMethodAsksForAPermission(t *testing.T) {
	g := newGuarded(t)
	expand := strings.NewReplacer("{zone}", "us-central1-a", "{region}", "us-central1", "{name}", "thing")
	for _, pattern := range g.server.methods {
		permission := permissions[pattern]
		if !slices.Contains(iam.KnownPermissions(), permission) {
			t.Errorf("%s has the permission %q", pattern, permission)
		}
		method, path, _ := strings.Cut(expand.Replace(pattern), " ")
		for _, project := range []string{"sluice-sandbox", "100000000001"} {
			whole := "/compute/v1/projects/" + project + path
			for _, token := range []string{"", "ya29.wrong"} {
				e := g.ask(g.server, 401, method, whole, token, nil)["error"].(map[string]any)
				if e["status"] != "UNAUTHENTICATED" {
					t.Errorf("%s: %v", pattern, e)
				}
			}
			message := fmt.Sprintf("Required '%s' permission for '%s%s'", permission, guardedProject, path)
			want := map[string]any{"error": map[string]any{"code": 403.0, "message": message, "errors": []any{
				map[string]any{"message": message, "domain": "global", "reason": "forbidden"},
			}}}
			if diff := cmp.Diff(want, g.ask(g.server, 403, method, whole, "nobody-at-all@sluice-sandbox.iam.gserviceaccount.com", nil)); diff != "" {
				t.Errorf("%s (-want +got):\n%s", pattern, diff)
			}
		}
	}
	for pattern := range permissions {
		if !slices.Contains(g.server.methods, pattern) {
			t.Errorf("there is a permission for %q, but no such method", pattern)
		}
	}
	g.ask(g.server, 403, "GET", "/compute/v1/projects/other-project/zones", g.iam.Admin(), nil)
}

// setRole gives the caller a role of its own with just these permissions.
func (g *guarded) setRole(permissions []string) {
	g.Helper()
	path := "/v1/" + guardedProject + "/roles"
	role := map[string]any{"title": "caller", "includedPermissions": permissions}
	r := httptest.NewRequest("GET", path+"/caller", nil)
	token, _, _ := g.iam.Mint(g.iam.Admin(), nil, time.Hour)
	r.Header.Set("Authorization", "Bearer "+token)
	w := httptest.NewRecorder()
	if g.iam.ServeHTTP(w, r); w.Code == 200 {
		g.ask(g.iam, 200, "PATCH", path+"/caller?updateMask=includedPermissions", g.iam.Admin(), role)
		return
	}
	g.ask(g.iam, 200, "POST", path, g.iam.Admin(), map[string]any{"roleId": "caller", "role": role})
	p, err := g.iam.GetPolicy(guardedProject, 3)
	if err != nil {
		g.Fatal(err)
	}
	p.Bindings = append(p.Bindings, iam.Binding{Role: guardedProject + "/roles/caller", Members: []string{"serviceAccount:" + callerAccount}})
	if _, err := g.iam.SetPolicy(guardedProject, p); err != nil {
		g.Fatal(err)
	}
}

// TestMakingAnInstanceNeedsEveryPermission takes each permission away alone.
func TestMakingAnInstanceNeedsEveryPermission(t *testing.T) {
	g := newGuarded(t)
	all := []string{
		"compute.disks.create", "compute.images.useReadOnly", "compute.instanceTemplates.useReadOnly", "compute.instances.create",
		"compute.instances.setLabels", "compute.instances.setMetadata", "compute.instances.setServiceAccount", "compute.instances.setTags",
		"compute.subnetworks.use", "compute.subnetworks.useExternalIp", "iam.serviceAccounts.actAs",
	}
	properties := func(account string) map[string]any {
		return map[string]any{
			"machineType": "n2-standard-2", "labels": map[string]string{"a": "b"}, "tags": map[string]any{"items": []string{"t"}},
			"metadata":          map[string]any{"items": []any{map[string]string{"key": "k", "value": "v"}}},
			"disks":             []any{map[string]any{"boot": true, "initializeParams": map[string]string{"sourceImage": "global/images/family/debian"}}},
			"networkInterfaces": []any{map[string]any{"accessConfigs": []any{map[string]string{"type": "ONE_TO_ONE_NAT"}}}},
			"serviceAccounts":   []any{map[string]any{"email": account, "scopes": []string{"https://www.googleapis.com/auth/cloud-platform"}}},
		}
	}
	const zone = "/compute/v1/" + guardedProject + "/zones/us-central1-a"
	g.ask(g.server, 200, "POST", "/compute/v1/"+guardedProject+"/global/instanceTemplates", g.iam.Admin(), map[string]any{"name": "tmpl", "properties": properties(nodeAccount)})
	n := 0
	insert := func(want int, account string) map[string]any {
		t.Helper()
		n++
		in := properties(account)
		in["name"], in["machineType"] = fmt.Sprintf("vm-%d", n), "zones/us-central1-a/machineTypes/n2-standard-2"
		return g.ask(g.server, want, "POST", zone+"/instances?sourceInstanceTemplate=global/instanceTemplates/tmpl", callerAccount, in)
	}
	bulk := func(want int) map[string]any {
		t.Helper()
		n++
		return g.ask(g.server, want, "POST", zone+"/instances/bulkInsert", callerAccount, map[string]any{
			"count": "1", "namePattern": fmt.Sprintf("b%d-#", n), "sourceInstanceTemplate": "global/instanceTemplates/tmpl", "instanceProperties": properties(nodeAccount),
		})
	}
	g.setRole(all)
	insert(200, nodeAccount)
	bulk(200)
	for i, permission := range all {
		g.setRole(slices.Delete(slices.Clone(all), i, i+1))
		for _, answer := range []map[string]any{insert(403, nodeAccount), bulk(403)} {
			if e, _ := answer["error"].(map[string]any); e == nil || !strings.Contains(fmt.Sprint(e["message"]), "'"+permission+"'") {
				t.Errorf("without %s: %v", permission, answer)
			}
		}
	}

	// With the right to act as one account, not as another; as one's own project's owner, not as one that is not there.
	g.setRole(slices.DeleteFunc(slices.Clone(all), func(p string) bool { return p == actAs }))
	if _, err := g.iam.SetPolicy(g.iam.Account(nodeAccount), iam.Policy{Bindings: []iam.Binding{{Role: "roles/iam.serviceAccountUser", Members: []string{"serviceAccount:" + callerAccount}}}}); err != nil {
		t.Fatal(err)
	}
	insert(200, nodeAccount)
	insert(403, g.iam.Admin())
	insert(403, "default")
	insert(403, "not-there@sluice-sandbox.iam.gserviceaccount.com")
	g.ask(g.server, 403, "POST", "/compute/v1/"+guardedProject+"/global/instanceTemplates", callerAccount, map[string]any{"name": "t2", "properties": properties(g.iam.Admin())})
	g.setRole(all)
	insert(404, "not-there@sluice-sandbox.iam.gserviceaccount.com")
}

// TestStartupScriptOfAnotherAccountsVM: whoever may change a VM's metadata has it run what they like, as its account.
func TestStartupScriptOfAnotherAccountsVM(t *testing.T) {
	g := newGuarded(t)
	g.setRole([]string{"compute.instances.setMetadata", "compute.instances.get", "compute.projects.setCommonInstanceMetadata"})
	const zone = "/compute/v1/" + guardedProject + "/zones/us-central1-a"
	g.ask(g.server, 200, "POST", zone+"/instances", g.iam.Admin(), map[string]any{
		"name": "controller", "machineType": "zones/us-central1-a/machineTypes/n2-standard-2",
		"disks":             []any{map[string]any{"boot": true, "initializeParams": map[string]string{"sourceImage": "global/images/family/debian"}}},
		"networkInterfaces": []any{map[string]any{}},
		"serviceAccounts":   []any{map[string]any{"email": g.iam.Admin()}},
	})
	vm := g.ask(g.server, 200, "GET", zone+"/instances/controller", callerAccount, nil)
	meta := map[string]any{"fingerprint": vm["metadata"].(map[string]any)["fingerprint"], "items": []any{map[string]string{"key": "startup-script", "value": "id"}}}
	g.ask(g.server, 403, "POST", zone+"/instances/controller/setMetadata", callerAccount, meta)
	g.ask(g.server, 403, "POST", "/compute/v1/"+guardedProject+"/setCommonInstanceMetadata", callerAccount, meta)
	g.ask(g.server, 200, "POST", zone+"/instances/controller/setMetadata", g.iam.Admin(), meta)
}
