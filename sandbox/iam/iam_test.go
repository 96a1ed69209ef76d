package iam_test

import (
	"bytes"
	"crypto"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
	"github.com/sluicehpc/sluice/sandbox/iam"
)

const project = "sluice-sandbox"

// clock is set by the test.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) After(time.Duration) <-chan time.Time { return nil }

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// world is an IAM over HTTP.
type world struct {
	*iam.Server
	t     *testing.T
	url   string
	clock *clock
}

func newWorld(t *testing.T) *world {
	t.Helper()
	c := &clock{now: time.Now()}
	w := &world{Server: iam.New(iam.Options{Clock: c}), t: t, clock: c}
	s := httptest.NewServer(discoverytest.Server(t, w.Server, "iam", "iamcredentials", "sts", "cloudresourcemanager"))
	t.Cleanup(s.Close)
	w.url = s.URL
	return w
}

// token is an access token of an account, which the world makes if it is missing.
func (w *world) token(email string) string {
	w.t.Helper()
	w.account(email)
	token, _, err := w.Mint(email, nil, time.Hour)
	if err != nil {
		w.t.Fatal(err)
	}
	return token
}

func (w *world) admin() string { return w.token(w.Admin()) }

// email makes an account of the project and returns its email.
func (w *world) account(email string) string {
	w.t.Helper()
	if !w.Exists(email) {
		id, _, _ := strings.Cut(email, "@")
		w.want(200, "POST", "/v1/projects/"+project+"/serviceAccounts", w.admin(), map[string]any{"accountId": id})
	}
	return email
}

func email(id string) string { return id + "@" + project + ".iam.gserviceaccount.com" }

func accountPath(email string) string { return "/v1/projects/-/serviceAccounts/" + email }

// do makes a call; token "" is none, body a string or what becomes JSON.
func (w *world) do(method, path, token string, body any) (int, map[string]any) {
	w.t.Helper()
	var r io.Reader
	switch body := body.(type) {
	case nil:
	case string:
		r = strings.NewReader(body)
	default:
		b, err := json.Marshal(body)
		if err != nil {
			w.t.Fatal(err)
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequest(method, w.url+path, r)
	if err != nil {
		w.t.Fatal(err)
	}
	if strings.HasPrefix(path, "/v1/token") {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	out := map[string]any{}
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
		w.t.Fatalf("%s %s: %d, and no JSON: %v", method, path, resp.StatusCode, err)
	}
	return resp.StatusCode, out
}

// want makes a call and wants a status.
func (w *world) want(status int, method, path, token string, body any) map[string]any {
	w.t.Helper()
	got, out := w.do(method, path, token, body)
	if got != status {
		w.t.Fatalf("%s %s: got %d %v, want %d", method, path, got, out, status)
	}
	return out
}

// may reports whether a token is allowed an access. name "" lists.
func (w *world) may(token, permission, resource string) error {
	r := httptest.NewRequest("GET", "/", nil)
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	return w.Authorize(r, permission, resource)
}

func (w *world) mayList(token, bucket, prefix string) error {
	r := httptest.NewRequest("GET", "/", nil)
	r.Header.Set("Authorization", "Bearer "+token)
	return w.AuthorizeList(r, bucket, prefix)
}

// grant adds a binding to the policy of a resource.
func (w *world) grant(resource, role, member string) {
	w.t.Helper()
	p, err := w.GetPolicy(resource, 3)
	if err != nil {
		w.t.Fatal(err)
	}
	p.Version = 3
	p.Bindings = append(p.Bindings, iam.Binding{Role: role, Members: []string{member}})
	if _, err := w.SetPolicy(resource, p); err != nil {
		w.t.Fatal(err)
	}
}

func reasonOf(err error) string {
	switch err := err.(type) {
	case nil:
		return ""
	case *iam.Error:
		return fmt.Sprintf("%d %s", err.Code(), err.Reason)
	default:
		return err.Error()
	}
}

func TestTokensOpenOnlyTheirAccountsDoors(t *testing.T) {
	w := newWorld(t)
	mover, other := w.account(email("mover-account")), w.account(email("other-account"))
	w.grant(iam.Bucket("corpus"), "roles/storage.objectViewer", "serviceAccount:"+mover)
	object := iam.Object("corpus", "a/b")
	token := w.token(mover)
	short, _, _ := w.Mint(mover, []string{"https://www.googleapis.com/auth/devstorage.read_only"}, time.Hour)
	logging, _, _ := w.Mint(mover, []string{"https://www.googleapis.com/auth/logging.write"}, time.Hour)
	for _, c := range []struct {
		what, token, permission, resource, want string
	}{
		{"the account that has the role", token, "storage.objects.get", object, ""},
		{"a right that the role has not", token, "storage.objects.delete", object, "403 IAM_PERMISSION_DENIED"},
		{"another bucket", token, "storage.objects.get", iam.Object("corpus-2", "a/b"), "403 IAM_PERMISSION_DENIED"},
		{"a bucket whose name begins so", token, "storage.objects.get", iam.Object("corpus2", "a"), "403 IAM_PERMISSION_DENIED"},
		{"another account's token", w.token(other), "storage.objects.get", object, "403 IAM_PERMISSION_DENIED"},
		{"the owner", w.admin(), "storage.objects.get", object, ""},
		{"no token", "", "storage.objects.get", object, "401 CREDENTIALS_MISSING"},
		{"an unknown token", "ya29.x", "storage.objects.get", object, "401 ACCESS_TOKEN_TYPE_UNSUPPORTED"},
		{"a token and more", token + " ", "storage.objects.get", object, ""},
		{"two tokens", token + "," + token, "storage.objects.get", object, "401 ACCESS_TOKEN_TYPE_UNSUPPORTED"},
		{"a reading scope", short, "storage.objects.get", object, ""},
		{"a scope of another service", logging, "storage.objects.get", object, "403 ACCESS_TOKEN_SCOPE_INSUFFICIENT"},
		{"a foreign project", w.admin(), "compute.instances.get", "projects/other/zones/z/instances/i", "403 IAM_PERMISSION_DENIED"},
		{"a project whose name begins so", w.admin(), "compute.instances.get", "projects/sluice-sandbox2/zones/z/instances/i", "403 IAM_PERMISSION_DENIED"},
	} {
		if got := reasonOf(w.may(c.token, c.permission, c.resource)); got != c.want {
			t.Errorf("%s: got %q, want %q", c.what, got, c.want)
		}
	}

	w.clock.advance(time.Hour)
	if got, want := reasonOf(w.may(token, "storage.objects.get", object)), "401 ACCESS_TOKEN_EXPIRED"; got != want {
		t.Errorf("an expired token: got %q, want %q", got, want)
	}
	token = w.token(mover)
	w.want(200, "POST", accountPath(mover)+":disable", w.admin(), nil)
	if got, want := reasonOf(w.may(token, "storage.objects.get", object)), "401 ACCESS_TOKEN_TYPE_UNSUPPORTED"; got != want {
		t.Errorf("a disabled account's token: got %q, want %q", got, want)
	}
	w.want(200, "POST", accountPath(mover)+":enable", w.admin(), nil)
	if err := w.may(token, "storage.objects.get", object); err != nil {
		t.Errorf("an account that was enabled again: %v", err)
	}

	// An account made again under a deleted one's name inherits neither its tokens nor its roles.
	w.want(200, "DELETE", accountPath(mover), w.admin(), nil)
	again := w.token(mover)
	if got, want := reasonOf(w.may(token, "storage.objects.get", object)), "401 ACCESS_TOKEN_TYPE_UNSUPPORTED"; got != want {
		t.Errorf("a deleted account's token: got %q, want %q", got, want)
	}
	if got, want := reasonOf(w.may(again, "storage.objects.get", object)), "403 IAM_PERMISSION_DENIED"; got != want {
		t.Errorf("a new account of an old name: got %q, want %q", got, want)
	}
}

func TestEveryRouteHasAPermission(t *testing.T) {
	for route, permission := range iam.RoutePermissions() {
		if permission == "" {
			t.Errorf("%s needs no permission", route)
		}
		if !strings.HasPrefix(permission, "(") && !slices.Contains(iam.KnownPermissions(), permission) {
			t.Errorf("%s needs %q, which no role can hold", route, permission)
		}
	}
}

func TestEveryRouteRefusesStrangers(t *testing.T) {
	w := newWorld(t)
	nobody := w.token(email("nobody-at-all"))
	expand := strings.NewReplacer("{project}", project, "{account}", email("nobody-at-all"), "{role}", "somerole")
	for route, permission := range iam.RoutePermissions() {
		method, path, _ := strings.Cut(expand.Replace(route), " ")
		if permission == "(everybody)" {
			continue
		}
		for _, token := range []string{"", "ya29.wrong"} {
			out := w.want(401, method, path, token, nil)
			if status := out["error"].(map[string]any)["status"]; status != "UNAUTHENTICATED" {
				t.Errorf("%s without a token: status %v", route, status)
			}
		}
		if permission == "(every account)" {
			continue
		}
		out := w.want(403, method, path, nobody, nil)["error"].(map[string]any)
		info := out["details"].([]any)[0].(map[string]any)
		got := []any{out["status"], info["reason"], info["metadata"].(map[string]any)["permission"]}
		if diff := cmp.Diff([]any{"PERMISSION_DENIED", "IAM_PERMISSION_DENIED", permission}, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", route, diff)
		}
	}
}

func TestGenerateAccessToken(t *testing.T) {
	w := newWorld(t)
	data, caller := w.account(email("research-data")), w.account(email("sluiced"))
	w.grant("projects/"+project+"/serviceAccounts/"+data, "roles/iam.serviceAccountTokenCreator", "serviceAccount:"+caller)
	w.grant(iam.Bucket("corpus"), "roles/storage.objectViewer", "serviceAccount:"+data)
	path := accountPath(data) + ":generateAccessToken"
	scope := []string{"https://www.googleapis.com/auth/cloud-platform"}
	for _, c := range []struct {
		what, path, token string
		body              any
		want              int
	}{
		{"no role on the account", path, w.token(email("somebody-else")), map[string]any{"scope": scope}, 403},
		{"a role on another account", accountPath(email("somebody-else")) + ":generateAccessToken", w.token(caller), map[string]any{"scope": scope}, 403},
		{"the account itself", path, w.token(data), map[string]any{"scope": scope}, 403},
		{"an account that is not there", accountPath(email("not-there")) + ":generateAccessToken", w.token(caller), map[string]any{"scope": scope}, 403},
		{"the same, by the owner", accountPath(email("not-there")) + ":generateAccessToken", w.admin(), map[string]any{"scope": scope}, 404},
		{"a service's own account", accountPath(w.LustreAgent()) + ":generateAccessToken", w.admin(), map[string]any{"scope": scope}, 404},
		{"more than an hour", path, w.token(caller), map[string]any{"scope": scope, "lifetime": "3601s"}, 400},
		{"no time at all", path, w.token(caller), map[string]any{"scope": scope, "lifetime": "0s"}, 400},
		{"less than no time", path, w.token(caller), map[string]any{"scope": scope, "lifetime": "-1s"}, 400},
		{"a number without a unit", path, w.token(caller), map[string]any{"scope": scope, "lifetime": "60"}, 400},
		{"no scope", path, w.token(caller), map[string]any{}, 400},
		{"a scope that is none", path, w.token(caller), map[string]any{"scope": []string{"all"}}, 400},
		{"a field that is none", path, w.token(caller), map[string]any{"scope": scope, "lifetimes": "1s"}, 400},
		{"a project's name for the wildcard", strings.Replace(path, "/-/", "/"+project+"/", 1), w.token(caller), map[string]any{"scope": scope}, 400},
		{"no JSON", path, w.token(caller), "{", 400},
		{"two values", path, w.token(caller), `{"scope":["` + scope[0] + `"]} {}`, 400},
		{"an hour", path, w.token(caller), map[string]any{"scope": scope, "lifetime": "3600s"}, 200},
		{"an encoded @", strings.Replace(path, "@", "%40", 1), w.token(caller), map[string]any{"scope": scope}, 200},
	} {
		if got, out := w.do("POST", c.path, c.token, c.body); got != c.want {
			t.Errorf("%s: got %d %v, want %d", c.what, got, out, c.want)
		}
	}
	out := w.want(200, "POST", path, w.token(caller), map[string]any{"scope": scope, "lifetime": "300s"})
	token := out["accessToken"].(string)
	if err := w.may(token, "storage.objects.get", iam.Object("corpus", "x")); err != nil {
		t.Errorf("the token: %v", err)
	}
	if expires, err := time.Parse(time.RFC3339, out["expireTime"].(string)); err != nil || expires.Sub(w.clock.Now()).Abs() > 301*time.Second {
		t.Errorf("it expires at %v, %v", out["expireTime"], err)
	}
	w.clock.advance(5 * time.Minute)
	if got, want := reasonOf(w.may(token, "storage.objects.get", iam.Object("corpus", "x"))), "401 ACCESS_TOKEN_EXPIRED"; got != want {
		t.Errorf("after five minutes: got %q, want %q", got, want)
	}
}

// exchange downscopes a token.
func (w *world) exchange(status int, token string, rules ...any) string {
	w.t.Helper()
	options, err := json.Marshal(map[string]any{"accessBoundary": map[string]any{"accessBoundaryRules": rules}})
	if err != nil {
		w.t.Fatal(err)
	}
	const kind = "urn:ietf:params:oauth:token-type:access_token"
	out := w.want(status, "POST", "/v1/token", "", url.Values{
		"grant_type": {"urn:ietf:params:oauth:grant-type:token-exchange"}, "subject_token": {token},
		"subject_token_type": {kind}, "requested_token_type": {kind}, "options": {string(options)},
	}.Encode())
	if status != 200 {
		if out["error"] == "" || out["error_description"] == "" {
			w.t.Errorf("the refusal is %v", out)
		}
		return ""
	}
	return out["access_token"].(string)
}

func rule(bucket, role, expression string) map[string]any {
	r := map[string]any{"availableResource": "//storage.googleapis.com/projects/_/buckets/" + bucket, "availablePermissions": []string{"inRole:" + role}}
	if expression != "" {
		r["availabilityCondition"] = map[string]string{"expression": expression}
	}
	return r
}

func TestDownscopedToken(t *testing.T) {
	w := newWorld(t)
	data := w.account(email("research-data"))
	for _, bucket := range []string{"corpus", "other"} {
		w.grant(iam.Bucket(bucket), "roles/storage.objectAdmin", "serviceAccount:"+data)
	}
	w.grant("projects/"+project, "roles/compute.admin", "serviceAccount:"+data)
	const expression = `resource.name.startsWith("projects/_/buckets/corpus/objects/in/") || api.getAttribute("storage.googleapis.com/objectListPrefix", "").startsWith("in/")`
	token := w.exchange(200, w.token(data), rule("corpus", "roles/storage.objectViewer", expression))
	const denied = "403 IAM_PERMISSION_DENIED"
	for _, c := range []struct{ what, permission, resource, want string }{
		{"below the prefix", "storage.objects.get", iam.Object("corpus", "in/a"), ""},
		{"a name with dots", "storage.objects.get", iam.Object("corpus", "in/../out/a"), ""}, // a name, not a path
		{"beside the prefix", "storage.objects.get", iam.Object("corpus", "in2"), denied},
		{"above it", "storage.objects.get", iam.Object("corpus", "in"), denied},
		{"in another case", "storage.objects.get", iam.Object("corpus", "IN/a"), denied},
		{"a name that has the prefix inside", "storage.objects.get", iam.Object("corpus", "x/projects/_/buckets/corpus/objects/in/a"), denied},
		{"another bucket", "storage.objects.get", iam.Object("other", "in/a"), denied},
		{"a permission that its role has not", "storage.objects.create", iam.Object("corpus", "in/a"), denied},
		{"the bucket", "storage.buckets.get", iam.Bucket("corpus"), denied},
		{"the bucket's policy", "storage.buckets.getIamPolicy", iam.Bucket("corpus"), denied},
		{"another service", "compute.instances.list", "projects/" + project, denied},
		{"an account", "iam.serviceAccounts.getAccessToken", "projects/" + project + "/serviceAccounts/" + data, denied},
	} {
		if got := reasonOf(w.may(token, c.permission, c.resource)); got != c.want {
			t.Errorf("%s: got %q, want %q", c.what, got, c.want)
		}
	}
	for prefix, want := range map[string]string{"in/": "", "in/sub/": "", "in": denied, "": denied, "out/": denied, "In/": denied} {
		if got := reasonOf(w.mayList(token, "corpus", prefix)); got != want {
			t.Errorf("list %q: got %q, want %q", prefix, got, want)
		}
	}
	if got := reasonOf(w.mayList(token, "other", "in/")); got != denied {
		t.Errorf("list of another bucket: got %q", got)
	}

	// The boundary is the most, not a gift.
	poor := w.exchange(200, w.token(email("nobody-at-all")), rule("corpus", "roles/storage.objectAdmin", ""))
	if got := reasonOf(w.may(poor, "storage.objects.get", iam.Object("corpus", "in/a"))); got != denied {
		t.Errorf("a token of an account without a role: got %q", got)
	}
	two := w.exchange(200, w.token(data), rule("corpus", "roles/storage.objectViewer", ""), rule("other", "roles/storage.objectCreator", ""))
	for _, c := range []struct{ permission, bucket, want string }{
		{"storage.objects.get", "corpus", ""}, {"storage.objects.create", "other", ""},
		{"storage.objects.create", "corpus", denied}, {"storage.objects.get", "other", denied},
	} {
		if got := reasonOf(w.may(two, c.permission, iam.Object(c.bucket, "x"))); got != c.want {
			t.Errorf("two rules, %s in %s: got %q, want %q", c.permission, c.bucket, got, c.want)
		}
	}

	w.exchange(400, token, rule("corpus", "roles/storage.objectAdmin", ""))    // no way up
	w.exchange(400, "ya29.x", rule("corpus", "roles/storage.objectAdmin", "")) // unknown
	w.exchange(400, w.token(data))                                             // no rule
	w.exchange(400, w.token(data), rule("corpus", "roles/none", ""))
	w.exchange(400, w.token(data), rule("corpus", "roles/storage.objectViewer", "resource.name.startsWith("))
	w.exchange(400, w.token(data), rule("corpus", "roles/storage.objectViewer", strings.Repeat(" ", 2049)+"resource.name == ''"))
	w.exchange(400, w.token(data), rule("corpus/objects/x", "roles/storage.objectViewer", ""))
	w.exchange(400, w.token(data), map[string]any{"availableResource": "//storage.googleapis.com/projects/_/buckets/corpus", "availablePermissions": []string{"storage.objects.get"}})
	var many []any
	for range 11 {
		many = append(many, rule("corpus", "roles/storage.objectViewer", ""))
	}
	w.exchange(400, w.token(data), many...)

	// It ends with its source.
	source, _, _ := w.Mint(data, nil, time.Minute)
	token = w.exchange(200, source, rule("corpus", "roles/storage.objectViewer", ""))
	w.clock.advance(time.Minute)
	if got, want := reasonOf(w.may(token, "storage.objects.get", iam.Object("corpus", "x"))), "401 ACCESS_TOKEN_EXPIRED"; got != want {
		t.Errorf("after its source's end: got %q, want %q", got, want)
	}
	w.exchange(400, source, rule("corpus", "roles/storage.objectViewer", ""))
}

func TestPolicies(t *testing.T) {
	w := newWorld(t)
	a := w.account(email("account-a"))
	project := "/v1/projects/" + project
	get := func() map[string]any { return w.want(200, "POST", project+":getIamPolicy", w.admin(), nil) }
	set := func(status int, policy any) map[string]any {
		t.Helper()
		return w.want(status, "POST", project+":setIamPolicy", w.admin(), map[string]any{"policy": policy})
	}
	owner := map[string]any{"role": "roles/owner", "members": []string{"serviceAccount:" + w.Admin()}}
	binding := func(role string, members ...string) map[string]any {
		return map[string]any{"role": role, "members": members}
	}

	first := get()
	set(200, map[string]any{"bindings": []any{owner, binding("roles/lustre.viewer", "serviceAccount:"+strings.ToUpper(a))}, "etag": first["etag"]})
	if err := w.may(w.token(a), "lustre.instances.list", "projects/sluice-sandbox/locations/z/instances"); err != nil {
		t.Errorf("what the policy gives: %v", err)
	}
	stale := set(409, map[string]any{"bindings": []any{owner}, "etag": first["etag"]})
	if got := stale["error"].(map[string]any)["status"]; got != "ABORTED" {
		t.Errorf("a stale etag: %v", got)
	}
	if err := w.may(w.token(a), "lustre.instances.list", "projects/sluice-sandbox/locations/z/instances"); err != nil {
		t.Errorf("after a refused change: %v", err)
	}
	for what, policy := range map[string]any{
		"an account that is not there":     map[string]any{"bindings": []any{owner, binding("roles/viewer", "serviceAccount:"+email("not-there"))}},
		"a role that is not there":         map[string]any{"bindings": []any{owner, binding("roles/lustre.king", "serviceAccount:"+a)}},
		"a member without a kind":          map[string]any{"bindings": []any{owner, binding("roles/viewer", a)}},
		"a member of a kind that is none":  map[string]any{"bindings": []any{owner, binding("roles/viewer", "robot:"+a)}},
		"a member with a line end":         map[string]any{"bindings": []any{owner, binding("roles/viewer", "user:a@b\nserviceAccount:"+a)}},
		"projectOwner on a project":        map[string]any{"bindings": []any{owner, binding("roles/viewer", "projectOwner:sluice-sandbox")}},
		"a version that is none":           map[string]any{"version": 2, "bindings": []any{owner}},
		"a condition in version 1":         map[string]any{"bindings": []any{owner, map[string]any{"role": "roles/viewer", "members": []string{"allUsers"}, "condition": map[string]string{"title": "t", "expression": "resource.name == 'x'"}}}},
		"a condition that is no condition": map[string]any{"version": 3, "bindings": []any{owner, map[string]any{"role": "roles/viewer", "members": []string{"allUsers"}, "condition": map[string]string{"title": "t", "expression": "true ||"}}}},
		"a field that is none":             map[string]any{"bindings": []any{owner}, "owner": a},
		"an etag that is none":             map[string]any{"bindings": []any{owner}, "etag": "§"},
	} {
		if got, out := w.do("POST", project+":setIamPolicy", w.admin(), map[string]any{"policy": policy}); got != 400 {
			t.Errorf("%s: got %d %v, want 400", what, got, out)
		}
	}
	w.want(400, "POST", project+":setIamPolicy", w.admin(), map[string]any{})

	// A condition limits, and is not lost by who does not know of conditions.
	set(200, map[string]any{"version": 3, "bindings": []any{owner, map[string]any{
		"role": "roles/storage.objectUser", "members": []string{"serviceAccount:" + a},
		"condition": map[string]string{"title": "research", "expression": `resource.name.startsWith("projects/_/buckets/research-")`},
	}}})
	for bucket, want := range map[string]string{"research-corpus": "", "private": "403 IAM_PERMISSION_DENIED"} {
		if got := reasonOf(w.may(w.token(a), "storage.objects.create", iam.Object(bucket, "x"))); got != want {
			t.Errorf("gs://%s under a condition: got %q, want %q", bucket, got, want)
		}
		if got := reasonOf(w.mayList(w.token(a), bucket, "x")); got != want {
			t.Errorf("list gs://%s under a condition: got %q, want %q", bucket, got, want)
		}
	}
	if w.want(200, "POST", project+":getIamPolicy", w.admin(), map[string]any{"options": map[string]int{"requestedPolicyVersion": 3}})["version"] != 3.0 {
		t.Error("the policy with a condition is not of version 3")
	}
	set(400, get()) // version 1 shows the binding under a role's name that cannot be set

	// The account's own policy.
	w.want(403, "POST", accountPath(a)+":setIamPolicy", w.token(a), map[string]any{"policy": map[string]any{}})
	w.want(200, "POST", accountPath(a)+":setIamPolicy", w.admin(), map[string]any{"policy": map[string]any{"bindings": []any{binding("roles/iam.serviceAccountUser", "serviceAccount:"+email("account-a"))}}})
	if err := w.may(w.token(a), "iam.serviceAccounts.actAs", "projects/sluice-sandbox/serviceAccounts/"+a); err != nil {
		t.Errorf("act as itself: %v", err)
	}
}

func TestEverybody(t *testing.T) {
	w := newWorld(t)
	stranger := w.token(email("nobody-at-all"))
	w.grant(iam.Bucket("public"), "roles/storage.objectViewer", "allUsers")
	w.grant(iam.Bucket("members"), "roles/storage.objectViewer", "allAuthenticatedUsers")
	for _, c := range []struct{ token, bucket, want string }{
		{"", "public", ""}, {stranger, "public", ""}, {"ya29.x", "public", "401 ACCESS_TOKEN_TYPE_UNSUPPORTED"},
		{"", "members", "401 CREDENTIALS_MISSING"}, {stranger, "members", ""}, {"ya29.x", "members", "401 ACCESS_TOKEN_TYPE_UNSUPPORTED"},
	} {
		if got := reasonOf(w.may(c.token, "storage.objects.get", iam.Object(c.bucket, "x"))); got != c.want {
			t.Errorf("token %q, bucket %s: got %q, want %q", c.token, c.bucket, got, c.want)
		}
	}
	w.ForgetBucket("public")
	if got, want := reasonOf(w.may("", "storage.objects.get", iam.Object("public", "x"))), "401 CREDENTIALS_MISSING"; got != want {
		t.Errorf("a new bucket of the old name: got %q, want %q", got, want)
	}
}

func TestTestPermissions(t *testing.T) {
	w := newWorld(t)
	a := w.token(email("account-a"))
	path := "/v1/projects/" + project + ":testIamPermissions"
	ask := func(status int, token string, permissions ...string) any {
		t.Helper()
		return w.want(status, "POST", path, token, map[string]any{"permissions": permissions})["permissions"]
	}
	w.grant("projects/"+project, "roles/lustre.viewer", "serviceAccount:"+email("account-a"))
	if diff := cmp.Diff([]any{"lustre.instances.get"}, ask(200, a, "lustre.instances.create", "lustre.instances.get", "compute.instances.get")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := ask(200, a, "compute.instances.get"); got != nil {
		t.Errorf("an account without the permission has %v", got)
	}
	for _, odd := range []string{"", "*", "lustre.*", "lustre.instances.*", "lustre", "lustre.instances.Get", "lustre.instances.get ", "roles/owner", "lustre.instances.get\x00", strings.Repeat("x", 1<<16)} {
		ask(400, a, "lustre.instances.get", odd)
	}
	ask(400, a)
	w.want(403, "POST", "/v1/projects/other-project:testIamPermissions", w.admin(), map[string]any{"permissions": []string{"lustre.instances.get"}})
	w.want(200, "POST", "/v1/projects/100000000001:testIamPermissions", a, map[string]any{"permissions": []string{"lustre.instances.get"}})
}

func TestRoles(t *testing.T) {
	w := newWorld(t)
	a := w.token(email("account-a"))
	roles := "/v1/projects/" + project + "/roles"
	create := func(status int, id string, permissions ...string) {
		t.Helper()
		w.want(status, "POST", roles, w.admin(), map[string]any{"roleId": id, "role": map[string]any{"title": id, "includedPermissions": permissions, "stage": "GA"}})
	}
	create(200, "controller", "compute.instances.get", "lustre.instances.importData")
	create(409, "controller", "compute.instances.get")
	create(400, "no", "compute.instances.get")
	create(400, "a/../b", "compute.instances.get")
	create(400, "kings", "compute.instances.rule")
	create(400, "stars", "compute.*")
	w.grant("projects/"+project, "projects/"+project+"/roles/controller", "serviceAccount:"+email("account-a"))
	instance := "projects/" + project + "/zones/z/instances/i"
	if err := w.may(a, "compute.instances.get", instance); err != nil {
		t.Errorf("the role's permission: %v", err)
	}
	w.want(200, "PATCH", roles+"/controller?updateMask=includedPermissions", w.admin(), map[string]any{"includedPermissions": []string{"lustre.instances.importData"}})
	if got, want := reasonOf(w.may(a, "compute.instances.get", instance)), "403 IAM_PERMISSION_DENIED"; got != want {
		t.Errorf("a permission that was taken from the role: got %q, want %q", got, want)
	}
	if got := w.want(200, "GET", roles+"/controller", w.admin(), nil); got["title"] != "controller" || len(got["includedPermissions"].([]any)) != 1 {
		t.Errorf("the role is %v", got)
	}
	w.want(400, "PATCH", roles+"/controller?updateMask=name", w.admin(), map[string]any{})
	w.want(200, "DELETE", roles+"/controller", w.admin(), nil)
	if got, want := reasonOf(w.may(a, "lustre.instances.importData", "projects/"+project)), "403 IAM_PERMISSION_DENIED"; got != want {
		t.Errorf("a deleted role's permission: got %q, want %q", got, want)
	}
	if got := w.want(200, "GET", "/v1/roles/storage.objectUser", a, nil); got["name"] != "roles/storage.objectUser" {
		t.Errorf("a predefined role is %v", got)
	}
	if got := w.want(200, "GET", "/v1/roles?pageSize=3&view=FULL", a, nil); len(got["roles"].([]any)) != 3 || got["nextPageToken"] != "3" {
		t.Errorf("three predefined roles are %v", got)
	}
	for _, q := range []string{"pageSize=-1", "pageToken=99999", "pageToken=x"} {
		w.want(400, "GET", "/v1/roles?"+q, a, nil)
	}
}

func TestIdentityToken(t *testing.T) {
	w := newWorld(t)
	account := w.account(email("sluice-node"))
	token, err := w.IdentityToken(account, "sluice:enroll:x", true, map[string]any{"google": map[string]any{"compute_engine": map[string]any{"instance_id": "17"}}})
	if err != nil {
		t.Fatal(err)
	}
	header, claims := verify(t, w, token)
	if header["alg"] != "RS256" || header["kid"] == "" {
		t.Errorf("header %v", header)
	}
	if claims["sub"] != claims["azp"] || strings.Trim(claims["sub"].(string), "0123456789") != "" {
		t.Errorf("sub %v, azp %v", claims["sub"], claims["azp"])
	}
	delete(claims, "sub")
	delete(claims, "azp")
	now := float64(w.clock.Now().Unix())
	want := map[string]any{
		"iss": "https://accounts.google.com", "aud": "sluice:enroll:x", "iat": now, "exp": now + 3600, "email": account, "email_verified": true,
		"google": map[string]any{"compute_engine": map[string]any{"instance_id": "17"}},
	}
	if diff := cmp.Diff(want, claims); diff != "" {
		t.Errorf("claims (-want +got):\n%s", diff)
	}

	path := accountPath(account) + ":generateIdToken"
	w.want(403, "POST", path, w.token(account), map[string]any{"audience": "x"})
	w.want(400, "POST", path, w.admin(), map[string]any{})
	_, claims = verify(t, w, w.want(200, "POST", path, w.admin(), map[string]any{"audience": "x"})["token"].(string))
	if _, ok := claims["google"]; ok || claims["email"] != nil {
		t.Errorf("a generated token claims %v", claims)
	}
}

// verify checks a token's signature with the key set.
func verify(t *testing.T, w *world, token string) (header, claims map[string]any) {
	t.Helper()
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		t.Fatalf("token %q", token)
	}
	decode := func(s string) []byte {
		b, err := base64.RawURLEncoding.DecodeString(s)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for i, to := range []*map[string]any{&header, &claims} {
		if err := json.Unmarshal(decode(parts[i]), to); err != nil {
			t.Fatal(err)
		}
	}
	for _, k := range w.want(200, "GET", "/oauth2/v3/certs", "", nil)["keys"].([]any) {
		k := k.(map[string]any)
		if k["kid"] != header["kid"] {
			continue
		}
		key := &rsa.PublicKey{N: new(big.Int).SetBytes(decode(k["n"].(string))), E: int(new(big.Int).SetBytes(decode(k["e"].(string))).Int64())}
		sum := sha256.Sum256([]byte(parts[0] + "." + parts[1]))
		if err := rsa.VerifyPKCS1v15(key, crypto.SHA256, sum[:], decode(parts[2])); err != nil {
			t.Fatal(err)
		}
		return header, claims
	}
	t.Fatalf("no key %v", header["kid"])
	return nil, nil
}

func TestAccounts(t *testing.T) {
	w := newWorld(t)
	accounts := "/v1/projects/" + project + "/serviceAccounts"
	for _, id := range []string{"", "short", "9digits", "ends-with-", "Upper-Case", "with@at-sign", strings.Repeat("x", 31)} {
		w.want(400, "POST", accounts, w.admin(), map[string]any{"accountId": id})
	}
	made := w.want(200, "POST", accounts, w.admin(), map[string]any{"accountId": "account-a", "serviceAccount": map[string]string{"displayName": "A"}})
	w.want(409, "POST", accounts, w.admin(), map[string]any{"accountId": "account-a"})
	byID := w.want(200, "GET", accounts+"/"+made["uniqueId"].(string), w.admin(), nil)
	if diff := cmp.Diff(made, byID); diff != "" {
		t.Errorf("by its number (-want +got):\n%s", diff)
	}
	w.want(200, "PATCH", accounts+"/"+email("account-a"), w.admin(), map[string]any{"serviceAccount": map[string]string{"displayName": "B"}, "updateMask": "displayName"})
	w.want(400, "PATCH", accounts+"/"+email("account-a"), w.admin(), map[string]any{"updateMask": "email"})
	if got := w.want(200, "GET", accounts+"/"+email("account-a"), w.admin(), nil)["displayName"]; got != "B" {
		t.Errorf("its display name is %v", got)
	}
	if got := len(w.want(200, "GET", accounts, w.admin(), nil)["accounts"].([]any)); got != 3 {
		t.Errorf("the project has %d accounts, want 3: the admin's, Compute Engine's and the new one", got)
	}
	w.want(404, "GET", accounts+"/"+email("not-there"), w.admin(), nil)
	w.want(404, "GET", accounts+"/"+email("not-there")+"/keys", w.admin(), nil)
	w.want(404, "POST", accounts+"/"+email("account-a")+":sign", w.admin(), nil)
	w.want(404, "GET", "/v1/projects/"+project+"%2FserviceAccounts", w.admin(), nil)
}
