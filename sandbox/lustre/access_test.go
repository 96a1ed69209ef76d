package lustre_test

import (
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/oauth2"
	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/gcp"
	api "github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/sandbox/iam"
	"github.com/sluicehpc/sluice/sandbox/lustre"
)

// guarded is a world with IAM.
type guarded struct {
	*world
	iam *iam.Server
}

func newGuarded(t *testing.T) *guarded {
	g := &guarded{iam: iam.New(iam.Options{})}
	g.world = newWorld(t, func(o *lustre.Options) { o.IAM = g.iam })
	g.world.Client = g.client(g.iam.Admin())
	return g
}

// account makes a service account and returns its email.
func (g *guarded) account(id string) string {
	g.t.Helper()
	r := httptest.NewRequest("POST", "/v1/projects/"+project+"/serviceAccounts", strings.NewReader(`{"accountId":"`+id+`"}`))
	r.Header.Set("Authorization", "Bearer "+g.token(g.iam.Admin()))
	w := httptest.NewRecorder()
	if g.iam.ServeHTTP(w, r); w.Code != 200 {
		g.t.Fatalf("make %s: %d %s", id, w.Code, w.Body)
	}
	return id + "@" + project + ".iam.gserviceaccount.com"
}

func (g *guarded) token(email string) string {
	g.t.Helper()
	token, _, err := g.iam.Mint(email, nil, time.Hour)
	if err != nil {
		g.t.Fatal(err)
	}
	return token
}

func (g *guarded) client(email string) *api.Client {
	g.t.Helper()
	c, err := api.NewClient(g.t.Context(), option.WithEndpoint(g.url), option.WithTokenSource(oauth2.StaticTokenSource(&oauth2.Token{AccessToken: g.token(email)})))
	if err != nil {
		g.t.Fatal(err)
	}
	return c
}

func (g *guarded) grant(resource, role, email string) {
	g.t.Helper()
	p, err := g.iam.GetPolicy(resource, 3)
	if err != nil {
		g.t.Fatal(err)
	}
	p.Bindings = append(p.Bindings, iam.Binding{Role: role, Members: []string{"serviceAccount:" + email}})
	if _, err := g.iam.SetPolicy(resource, p); err != nil {
		g.t.Fatal(err)
	}
}

func TestEveryMethodAsksForAPermission(t *testing.T) {
	g := newGuarded(t)
	nobody := g.token(g.account("nobody-at-all"))
	paths := map[string]string{
		"3": "/v1/projects/" + project + "/locations", "4": "/v1/" + parent, "5 instances": "/v1/" + parent + "/instances", "5 operations": "/v1/" + parent + "/operations",
		"6 instances": "/v1/" + scratch, "6 operations": "/v1/" + parent + "/operations/operation-x",
	}
	for key, permission := range lustre.MethodPermissions() {
		if !slices.Contains(iam.KnownPermissions(), permission) {
			t.Errorf("%s has the permission %q", key, permission)
		}
		method, rest, _ := strings.Cut(key, " ")
		rest, verb, _ := strings.Cut(rest, ":")
		path := paths[rest]
		if verb != "" {
			path += ":" + verb
		}
		for token, want := range map[string]string{"": "CREDENTIALS_MISSING", "ya29.wrong": "ACCESS_TOKEN_TYPE_UNSUPPORTED", nobody: "IAM_PERMISSION_DENIED"} {
			r := httptest.NewRequest(method, path, strings.NewReader("{"))
			if token != "" {
				r.Header.Set("Authorization", "Bearer "+token)
			}
			w := httptest.NewRecorder()
			g.server.ServeHTTP(w, r)
			code := 401
			if token == nobody {
				code = 403
			}
			if w.Code != code || !strings.Contains(w.Body.String(), want) || code == 403 && !strings.Contains(w.Body.String(), `"permission": "`+permission+`"`) {
				t.Errorf("%s %s with token %q: %d %s", method, path, token, w.Code, w.Body)
			}
		}
	}
}

// TestTransfersAreDoneAsAnAccount: what a transfer may read and write is its account's right, not the caller's.
func TestTransfersAreDoneAsAnAccount(t *testing.T) {
	g := newGuarded(t)
	g.create()
	g.put("in/a", "data")
	caller, data, agent := g.account("sluiced"), g.account("research-data"), g.iam.LustreAgent()
	bucket, projectName := iam.Bucket(bucketID), "projects/"+project
	g.grant(projectName, "roles/lustre.admin", caller)
	g.grant(projectName, "roles/storage.admin", caller) // which does not help
	c := g.client(caller)
	run := func(account string) error {
		t.Helper()
		r := importOf("gs://corpus/in/", "/")
		r.ServiceAccount = account
		op, err := c.ImportData(t.Context(), r)
		if err != nil {
			return err
		}
		_, err = c.Wait(g.ctx(), op.Name, nil)
		return err
	}
	refused := func(what string, err error, words ...string) {
		t.Helper()
		if err == nil {
			t.Errorf("%s: nothing was refused", what)
			return
		}
		for _, word := range words {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("%s: %v; want %q in it", what, err, word)
			}
		}
	}

	refused("an agent without rights", run(""), agent+" does not have storage.objects.list access", "code 7")
	g.grant(bucket, "roles/storage.objectViewer", agent)
	if err := run(""); err != nil {
		t.Errorf("an agent with rights: %v", err)
	}
	err := run(data)
	refused("an account that the caller cannot act as", err, "iam.serviceAccounts.actAs")
	if gcp.Code(err) != 403 {
		t.Errorf("it is HTTP %d", gcp.Code(err))
	}
	g.grant(g.iam.Account(data), "roles/iam.serviceAccountUser", caller)
	refused("an account whose token the agent cannot get", run(data), agent+" cannot get a token of "+data, "code 7")
	g.grant(g.iam.Account(data), "roles/iam.serviceAccountTokenCreator", agent)
	refused("an account without rights", run(data), data+" does not have storage.objects.list access", "code 7")
	g.grant(bucket, "roles/storage.objectUser", data)
	if err := run("projects/-/serviceAccounts/" + data); err != nil {
		t.Errorf("an account with rights: %v", err)
	}
	refused("an account that is not there", run("not-there@"+project+".iam.gserviceaccount.com"), "iam.serviceAccounts.actAs")

	// An account that may create but not delete replaces nothing; one that may only list reads nothing.
	drop := g.account("drop-account")
	for _, role := range []string{"roles/storage.legacyBucketReader", "roles/storage.objectCreator"} {
		g.grant(bucket, role, drop)
	}
	g.grant(g.iam.Account(drop), "roles/iam.serviceAccountUser", caller)
	g.grant(g.iam.Account(drop), "roles/iam.serviceAccountTokenCreator", agent)
	r := importOf("gs://corpus/in/", "/")
	r.ServiceAccount = drop
	g.put("in/b", "new")
	op, err := c.ImportData(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if op = g.wait(op); counters(op).ObjectsFailedCount != 1 || op.Metadata.Transfer.ErrorSummaries[0].ErrorCode != "PERMISSION_DENIED" {
		t.Errorf("an account that may only list: %+v", op.Metadata.Transfer)
	}
	g.put("out/a", "old, and longer")
	out := &api.ExportDataRequest{Name: scratch, LustrePath: &api.LustrePath{Path: "/"}, GcsPath: &api.GcsPath{URI: "gs://corpus/out/"}, ServiceAccount: drop}
	if op, err = c.ExportData(t.Context(), out); err != nil {
		t.Fatal(err)
	}
	if op = g.wait(op); counters(op).ObjectsFailedCount != 1 {
		t.Errorf("an account that may only create: %+v", op.Metadata.Transfer)
	}
	if got := g.objects("out/")["out/a"]; got != "old, and longer" {
		t.Errorf("it made %q of the object", got)
	}
	refused("a bucket that is not there", func() error {
		op, err := c.ImportData(t.Context(), importOf("gs://not-there/in/", "/"))
		if err == nil {
			_, err = c.Wait(g.ctx(), op.Name, nil)
		}
		return err
	}(), "code 5")
}
