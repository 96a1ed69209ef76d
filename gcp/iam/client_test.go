package iam_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/oauth2"
	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/iam"
	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
	sandbox "github.com/sluicehpc/sluice/sandbox/iam"
	"github.com/sluicehpc/sluice/sandbox/storage"
)

// cloud is IAM and Cloud Storage over HTTP; before, if set, sees each request first.
type cloud struct {
	*sandbox.Server
	t      *testing.T
	url    string
	before func(w http.ResponseWriter, r *http.Request) (done bool)
}

func newCloud(t *testing.T) *cloud {
	t.Helper()
	c := &cloud{t: t, Server: sandbox.New(sandbox.Options{Project: project})}
	buckets, err := storage.New(storage.Options{Dir: t.TempDir(), Project: project, IAM: c.Server})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { buckets.Close() })
	for _, b := range []string{"research-a", "research-b"} {
		if err := buckets.CreateBucket(b); err != nil {
			t.Fatal(err)
		}
	}
	hs := httptest.NewServer(discoverytest.Client(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case c.before != nil && c.before(w, r):
		case sandbox.Handles(r.URL.EscapedPath()):
			c.ServeHTTP(w, r)
		default:
			buckets.ServeHTTP(w, r)
		}
	}), "storage", "iam", "iamcredentials", "sts", "cloudresourcemanager"))
	t.Cleanup(hs.Close)
	c.url = hs.URL
	return c
}

// as is a client with an account's credentials.
func (c *cloud) as(email string) *iam.Client {
	c.t.Helper()
	token, _, err := c.Mint(email, nil, time.Hour)
	if err != nil {
		c.t.Fatal(err)
	}
	client, err := iam.NewClient(c.t.Context(), gcp.Endpoints{IAM: c.url, Storage: c.url}, option.WithTokenSource(oauth2.StaticTokenSource(&oauth2.Token{AccessToken: token})))
	if err != nil {
		c.t.Fatal(err)
	}
	return client
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// accounts makes sluiced's account and one for data, as a cluster has them.
func (c *cloud) accounts() (controller, data string) {
	c.t.Helper()
	ctx, admin := c.t.Context(), c.as(c.Admin())
	var err error
	controller, err = admin.CreateServiceAccount(ctx, project, "sluiced", "")
	must(c.t, err)
	data, err = admin.CreateServiceAccount(ctx, project, "research-data", "")
	must(c.t, err)
	must(c.t, admin.GrantBucket(ctx, "research-a", iam.Binding{Role: iam.ObjectUser, Members: []string{"serviceAccount:" + data}}))
	return controller, data
}

// read asks for an object or a listing and returns the status.
func (c *cloud) read(path string, token *oauth2.Token) int {
	c.t.Helper()
	req, err := http.NewRequestWithContext(c.t.Context(), "GET", c.url+path, nil)
	must(c.t, err)
	token.SetAuthHeader(req)
	resp, err := http.DefaultClient.Do(req)
	must(c.t, err)
	resp.Body.Close()
	return resp.StatusCode
}

func TestDataToken(t *testing.T) {
	c := newCloud(t)
	controller, data := c.accounts()
	client := c.as(controller)
	// Prefixes are users' words. Each must open what it says, and nothing else.
	for _, prefix := range []string{"in/", "", `"`, `\`, `x") || resource.name.startsWith("`, `") || "a" == ("a`, "ümlaut\u2028/\x01", "a'b", "%2F", "..", "\U0010FFFF", strings.Repeat("é", 100) + "/"} {
		want := iam.DataToken{Account: data, Bucket: "research-a", Prefix: prefix}
		_, err := client.DataToken(t.Context(), want)
		if gcp.Code(err) != 403 || !strings.Contains(err.Error(), "iam.serviceAccounts.getAccessToken") || !strings.Contains(err.Error(), data) {
			t.Fatalf("without the right on the account: %v", err)
		}
		token, err := c.as(c.Admin()).DataToken(t.Context(), want)
		must(t, err)
		if left := time.Until(token.Expiry); left > iam.DefaultDataLifetime || left < iam.DefaultDataLifetime-time.Minute {
			t.Errorf("prefix %q: the token lives for %v", prefix, left)
		}
		list := func(bucket, prefix string) int {
			return c.read("/storage/v1/b/"+bucket+"/o?prefix="+url.QueryEscape(prefix), token)
		}
		outside := 403
		if prefix == "" {
			outside = 200
		}
		got := []int{list("research-a", prefix), list("research-a", prefix+"deeper"), list("research-a", "other/"), list("research-a", ""), list("research-b", prefix)}
		if diff := cmp.Diff([]int{200, 200, outside, outside, 403}, got); diff != "" {
			t.Errorf("prefix %q: listings (-want +got):\n%s", prefix, diff)
		}
	}
	for what, d := range map[string]iam.DataToken{
		"a prefix that is not UTF-8":       {Account: data, Bucket: "research-a", Prefix: "a\xff"},
		"a prefix that is too long":        {Account: data, Bucket: "research-a", Prefix: strings.Repeat("x", 1024)},
		"a bucket with a slash":            {Account: data, Bucket: "research-a/objects/x"},
		"no bucket":                        {Account: data},
		"an account that is a path":        {Account: "../" + data, Bucket: "research-a"},
		"an account with a verb behind it": {Account: data + ":delete", Bucket: "research-a"},
		"a longer life than there is":      {Account: data, Bucket: "research-a", Lifetime: 2 * time.Hour},
	} {
		if _, err := c.as(c.Admin()).DataToken(t.Context(), d); err == nil {
			t.Errorf("%s was taken", what)
		}
	}
}

func TestWriteToken(t *testing.T) {
	c := newCloud(t)
	_, data := c.accounts()
	for write, want := range map[bool][]int{false: {403, 403}, true: {200, 403}} {
		token, err := c.as(c.Admin()).DataToken(t.Context(), iam.DataToken{Account: data, Bucket: "research-a", Prefix: "out/", Write: write})
		must(t, err)
		var got []int
		for _, name := range []string{"out/x", "x"} {
			req, err := http.NewRequestWithContext(t.Context(), "POST", c.url+"/upload/storage/v1/b/research-a/o?uploadType=media&name="+url.QueryEscape(name), strings.NewReader("x"))
			must(t, err)
			token.SetAuthHeader(req)
			resp, err := http.DefaultClient.Do(req)
			must(t, err)
			resp.Body.Close()
			got = append(got, resp.StatusCode)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("write %t (-want +got):\n%s", write, diff)
		}
	}
}

func TestDataSourceMintsOnce(t *testing.T) {
	c := newCloud(t)
	_, data := c.accounts()
	var minted atomic.Int32
	c.before = func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, ":generateAccessToken") {
			minted.Add(1)
		}
		return false
	}
	source := c.as(c.Admin()).DataSource(t.Context(), iam.DataToken{Account: data, Bucket: "research-a", Prefix: "in/"})
	first, err := source.Token()
	must(t, err)
	second, err := source.Token()
	must(t, err)
	if first.AccessToken != second.AccessToken || minted.Load() != 1 {
		t.Errorf("%d tokens were minted for two uses", minted.Load())
	}
	// A token that is nearly over is replaced.
	source = c.as(c.Admin()).DataSource(t.Context(), iam.DataToken{Account: data, Bucket: "research-a", Lifetime: time.Second})
	first, err = source.Token()
	must(t, err)
	for deadline := time.Now().Add(10 * time.Second); ; {
		second, err = source.Token()
		must(t, err)
		if second.AccessToken != first.AccessToken {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("a token that is over is used on")
		}
	}
}

func TestMissingPermissions(t *testing.T) {
	c := newCloud(t)
	controller, data := c.accounts()
	ctx, admin, client := t.Context(), c.as(c.Admin()), c.as(controller)
	want := []string{"lustre.instances.exportData", "lustre.instances.importData"}
	role, err := admin.CreateRole(ctx, project, "some", "Some", []string{"lustre.instances.importData"})
	must(t, err)
	must(t, admin.GrantProject(ctx, project, iam.Binding{Role: role, Members: []string{"serviceAccount:" + controller}}))
	missing, err := client.TestProject(ctx, project, want)
	must(t, err)
	if diff := cmp.Diff([]string{"lustre.instances.exportData"}, missing); diff != "" {
		t.Errorf("on the project (-want +got):\n%s", diff)
	}
	must(t, admin.GrantAccount(ctx, data, iam.Binding{Role: "roles/iam.serviceAccountTokenCreator", Members: []string{"serviceAccount:" + controller}}))
	missing, err = client.TestAccount(ctx, data, iam.Names(iam.DataAccountPermissions))
	must(t, err)
	if diff := cmp.Diff([]string{"iam.serviceAccounts.actAs"}, missing); diff != "" {
		t.Errorf("on the account (-want +got):\n%s", diff)
	}
	token, err := admin.GenerateAccessToken(ctx, data, nil, 0)
	must(t, err)
	missing, err = client.TestBucket(ctx, "research-a", []string{"storage.objects.get", "storage.buckets.delete"}, token)
	must(t, err)
	if diff := cmp.Diff([]string{"storage.buckets.delete"}, missing); diff != "" {
		t.Errorf("on the bucket (-want +got):\n%s", diff)
	}
	// More than the service takes in a call.
	many := make([]string, 250)
	for i := range many {
		many[i] = want[i%2]
	}
	missing, err = client.TestProject(ctx, project, many)
	must(t, err)
	if len(missing) != 125 {
		t.Errorf("%d of 250 are missing, want 125", len(missing))
	}
}

// TestGrantsMeet: two who change a policy at the same time both have their way.
func TestGrantsMeet(t *testing.T) {
	c := newCloud(t)
	controller, data := c.accounts()
	ctx := t.Context()
	for what, grant := range map[string]func(*iam.Client, iam.Binding) error{
		"project": func(cl *iam.Client, b iam.Binding) error { return cl.GrantProject(ctx, project, b) },
		"account": func(cl *iam.Client, b iam.Binding) error { return cl.GrantAccount(ctx, data, b) },
		"bucket":  func(cl *iam.Client, b iam.Binding) error { return cl.GrantBucket(ctx, "research-a", b) },
	} {
		other := c.as(c.Admin())
		between := true
		c.before = func(_ http.ResponseWriter, r *http.Request) bool {
			if between && (strings.HasSuffix(r.URL.Path, ":setIamPolicy") || r.Method == "PUT") {
				between = false
				must(t, grant(other, iam.Binding{Role: "roles/viewer", Members: []string{"serviceAccount:" + controller}}))
			}
			return false
		}
		must(t, grant(c.as(c.Admin()), iam.Binding{Role: "roles/editor", Members: []string{"serviceAccount:" + controller}}))
		if between {
			t.Fatalf("%s: nothing came between", what)
		}
		resource := map[string]string{"project": "projects/" + project, "account": c.Account(data), "bucket": sandbox.Bucket("research-a")}[what]
		p, err := c.GetPolicy(resource, 3)
		must(t, err)
		roles := map[string]bool{}
		for _, b := range p.Bindings {
			roles[b.Role] = true
		}
		if !roles["roles/viewer"] || !roles["roles/editor"] {
			t.Errorf("%s: the policy is %v", what, p.Bindings)
		}
	}
}

func TestAnswersThatAreNone(t *testing.T) {
	c := newCloud(t)
	_, data := c.accounts()
	admin := c.as(c.Admin())
	for what, answer := range map[string]string{"no token": "{}", "no JSON": "<html>", "nothing": ""} {
		c.before = func(w http.ResponseWriter, _ *http.Request) bool {
			fmt.Fprint(w, answer)
			return true
		}
		if _, err := admin.GenerateAccessToken(t.Context(), data, nil, 0); err == nil {
			t.Errorf("%s was taken for a token", what)
		}
		if _, err := admin.Downscope(t.Context(), &oauth2.Token{AccessToken: "x"}, iam.Boundary{}); err == nil {
			t.Errorf("%s was taken for a downscoped token", what)
		}
	}
	c.before = nil
	// OAuth's form of an error is understood.
	_, err := admin.Downscope(t.Context(), &oauth2.Token{AccessToken: "x"}, iam.Boundary{Rules: []iam.Rule{{Resource: "//storage.googleapis.com/projects/_/buckets/research-a", Permissions: []string{"inRole:" + iam.ObjectViewer}}}})
	if err == nil || !strings.Contains(err.Error(), "invalid_grant: The subject token is invalid") {
		t.Errorf("a token that is none: %v", err)
	}
	// A service that is overloaded is asked again.
	var asked atomic.Int32
	c.before = func(w http.ResponseWriter, _ *http.Request) bool {
		if asked.Add(1) > 2 {
			return false
		}
		w.WriteHeader(503)
		return true
	}
	if _, err := admin.GenerateAccessToken(t.Context(), data, nil, 0); err != nil || asked.Load() != 3 {
		t.Errorf("after two 503: %v, asked %d times", err, asked.Load())
	}
}

// FuzzBoundary: whatever a prefix is, its condition is one of the two texts that it should be, or an error.
func FuzzBoundary(f *testing.F) {
	f.Add("research-a", "in/")
	f.Add("research-a", `x") || true || ("`)
	f.Fuzz(func(t *testing.T, bucket, prefix string) {
		b, err := iam.DataToken{Account: "a@b", Bucket: bucket, Prefix: prefix}.Boundary()
		if err != nil {
			return
		}
		text, err := json.Marshal(b)
		must(t, err)
		var back iam.Boundary
		must(t, json.Unmarshal(text, &back))
		if diff := cmp.Diff(b, back); diff != "" {
			t.Error(diff)
		}
		if (b.Rules[0].Condition == nil) != (prefix == "") {
			t.Error(errors.New("a prefix without a condition, or a condition without a prefix"))
		}
	})
}
