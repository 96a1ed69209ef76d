package storage

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
	"github.com/sluicehpc/sluice/sandbox/iam"
)

// guarded is a server with IAM.
type guarded struct {
	t   *testing.T
	url string
	iam *iam.Server
}

func newGuarded(t *testing.T) *guarded {
	t.Helper()
	g := &guarded{t: t, iam: iam.New(iam.Options{Project: testProject})}
	s, err := New(Options{Dir: t.TempDir(), Project: testProject, IAM: g.iam})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	hs := httptest.NewServer(discoverytest.Server(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if iam.Handles(r.URL.EscapedPath()) {
			g.iam.ServeHTTP(w, r)
			return
		}
		s.ServeHTTP(w, r)
	}), "storage", "iam", "iamcredentials", "sts", "cloudresourcemanager"))
	t.Cleanup(hs.Close)
	g.url = hs.URL
	g.want(200, "POST", "/storage/v1/b?project="+testProject, g.admin(), `{"name":"corpus"}`)
	g.want(200, "POST", "/storage/v1/b?project="+testProject, g.admin(), `{"name":"other"}`)
	for _, name := range []string{"in/a", "in/b", "out/a", "in2"} {
		for _, bucket := range []string{"corpus", "other"} {
			g.want(200, "POST", "/upload/storage/v1/b/"+bucket+"/o?uploadType=media&name="+url.QueryEscape(name), g.admin(), bucket+" "+name)
		}
	}
	return g
}

// token is one of an account of the testProject, which is made when it is missing.
func (g *guarded) token(id string) string {
	g.t.Helper()
	email := g.email(id)
	if !g.iam.Exists(email) {
		g.want(200, "POST", "/v1/projects/"+testProject+"/serviceAccounts", g.admin(), `{"accountId":"`+id+`"}`)
	}
	token, _, err := g.iam.Mint(email, nil, time.Hour)
	if err != nil {
		g.t.Fatal(err)
	}
	return token
}

func (g *guarded) email(id string) string { return id + "@" + testProject + ".iam.gserviceaccount.com" }

func (g *guarded) admin() string {
	token, _, err := g.iam.Mint(g.iam.Admin(), nil, time.Hour)
	if err != nil {
		g.t.Fatal(err)
	}
	return token
}

// grant gives a role on a bucket to an account.
func (g *guarded) grant(bucket, role, id string) {
	g.t.Helper()
	p, err := g.iam.GetPolicy(iam.Bucket(bucket), 3)
	if err != nil {
		g.t.Fatal(err)
	}
	p.Bindings = append(p.Bindings, iam.Binding{Role: role, Members: []string{"serviceAccount:" + g.email(id)}})
	if _, err := g.iam.SetPolicy(iam.Bucket(bucket), p); err != nil {
		g.t.Fatal(err)
	}
}

// downscope bounds a token to what a role may do below a prefix of a bucket.
func (g *guarded) downscope(token, bucket, prefix, role string) string {
	g.t.Helper()
	options, _ := json.Marshal(map[string]any{"accessBoundary": map[string]any{"accessBoundaryRules": []any{map[string]any{
		"availableResource":    "//storage.googleapis.com/projects/_/buckets/" + bucket,
		"availablePermissions": []string{"inRole:" + role},
		"availabilityCondition": map[string]string{"expression": fmt.Sprintf(
			`resource.name.startsWith("projects/_/buckets/%s/objects/%s") || api.getAttribute("storage.googleapis.com/objectListPrefix", "").startsWith("%[2]s")`, bucket, prefix)},
	}}}})
	const kind = "urn:ietf:params:oauth:token-type:access_token"
	resp, err := http.PostForm(g.url+"/v1/token", url.Values{
		"grant_type": {"urn:ietf:params:oauth:grant-type:token-exchange"}, "subject_token": {token},
		"subject_token_type": {kind}, "requested_token_type": {kind}, "options": {string(options)},
	})
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	var out struct {
		AccessToken string `json:"access_token"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil || out.AccessToken == "" {
		g.t.Fatalf("downscoping: %d, %v", resp.StatusCode, err)
	}
	return out.AccessToken
}

// do makes a call as the bytes of its path are.
func (g *guarded) do(method, path, token, body string) (*http.Response, string) {
	g.t.Helper()
	req, err := http.NewRequest(method, g.url+path, strings.NewReader(body))
	if err != nil {
		g.t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		g.t.Fatal(err)
	}
	return resp, string(text)
}

func (g *guarded) want(status int, method, path, token, body string) string {
	g.t.Helper()
	resp, text := g.do(method, path, token, body)
	if resp.StatusCode != status {
		g.t.Errorf("%s %s: got %d %s, want %d", method, path, resp.StatusCode, text, status)
	}
	return text
}

func TestEveryRouteAsksForAPermission(t *testing.T) {
	g := newGuarded(t)
	nobody := g.token("nobody-at-all")
	expand := strings.NewReplacer("{project}", testProject, "{bucket}", "corpus", "{object}", "in%2Fa", "{bucket2}", "other", "{object2}", "x")
	routes := []struct{ route, permission string }{
		{"GET /{bucket}/in/a", "storage.objects.get"}, {"HEAD /{bucket}/in/a", "storage.objects.get"}, // the XML API
	}
	for _, p := range prefixes {
		for _, r := range p.routes {
			routes = append(routes, struct{ route, permission string }{r.method + " " + p.path + r.path, r.permission})
		}
	}
	for _, r := range routes {
		route, permission := r.route, r.permission
		method, path, _ := strings.Cut(expand.Replace(route), " ")
		if permission == "" || permission[0] != '(' && !strings.HasPrefix(permission, "storage.") && !strings.HasPrefix(permission, "resourcemanager.") {
			t.Errorf("%s has the permission %q", route, permission)
		}
		switch {
		case strings.Contains(path, "/upload/") && method == "POST":
			path += "?uploadType=media&name=x"
		case strings.HasSuffix(path, "/b"):
			path += "?project=" + testProject
		}
		g.want(401, method, path, "", "{}")
		g.want(401, method, path, "ya29.wrong", "{}")
		if strings.HasPrefix(permission, "(") || strings.Contains(path, "/upload/") && method != "POST" {
			continue // those know the object from the upload
		}
		g.want(403, method, path, nobody, "{}")
	}
}

func TestRefusalsHaveTheServicesForm(t *testing.T) {
	g := newGuarded(t)
	nobody := g.token("nobody-at-all")
	for _, c := range []struct {
		what, path, token string
		code              int
		message, reason   string
	}{
		{"no token", "/storage/v1/b/corpus/o/in%2Fa", "", 401, "Anonymous caller does not have storage.objects.get access to the Google Cloud Storage object. Permission 'storage.objects.get' denied on resource (or it may not exist).", "required"},
		{"an unknown token", "/storage/v1/b/corpus", "ya29.wrong", 401, "Invalid Credentials", "authError"},
		{"an object", "/storage/v1/b/corpus/o/in%2Fa", nobody, 403, g.email("nobody-at-all") + " does not have storage.objects.get access to the Google Cloud Storage object. Permission 'storage.objects.get' denied on resource (or it may not exist).", "forbidden"},
		{"a bucket", "/storage/v1/b/corpus/o", nobody, 403, g.email("nobody-at-all") + " does not have storage.objects.list access to the Google Cloud Storage bucket. Permission 'storage.objects.list' denied on resource (or it may not exist).", "forbidden"},
	} {
		var got map[string]any
		if err := json.Unmarshal([]byte(g.want(c.code, "GET", c.path, c.token, "")), &got); err != nil {
			t.Errorf("%s: %v", c.what, err)
		}
		item := map[string]any{"message": c.message, "domain": "global", "reason": c.reason}
		if c.code == 401 {
			item["location"], item["locationType"] = "Authorization", "header"
		}
		want := map[string]any{"error": map[string]any{"code": float64(c.code), "message": c.message, "errors": []any{item}}}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.what, diff)
		}
	}
	for _, c := range []struct {
		token string
		code  int
		want  string
	}{
		{"", 401, "<Code>AuthenticationRequired</Code><Message>Authentication required.</Message>"},
		{"ya29.wrong", 401, "<Code>AuthenticationRequired</Code><Message>Authentication required.</Message>"},
		{nobody, 403, "<Code>AccessDenied</Code><Message>Access denied.</Message><Details>" + g.email("nobody-at-all") + " does not have storage.objects.get access"},
	} {
		if got := g.want(c.code, "GET", "/corpus/in/a", c.token, ""); !strings.Contains(got, c.want) {
			t.Errorf("XML: got %s, want %s", got, c.want)
		}
	}
	g.want(404, "GET", "/storage/v1/b/not-there/o", nobody, "")
	g.want(401, "GET", "/storage/v1/b/not-there/o", "", "")
}

// bounded is a token that may do what a role may below in/ of a bucket, of an account that may do everything to two.
func (g *guarded) bounded(role string) string {
	g.t.Helper()
	data := g.token("research-data")
	for _, bucket := range []string{"corpus", "other"} {
		g.grant(bucket, "roles/storage.objectAdmin", "research-data")
	}
	return g.downscope(data, "corpus", "in/", role)
}

func TestReaderStaysInItsPrefix(t *testing.T) {
	g := newGuarded(t)
	token := g.bounded("roles/storage.objectViewer")
	for _, c := range []struct {
		what, method, path string
		want               int
	}{
		{"an object", "GET", "/storage/v1/b/corpus/o/in%2Fa", 200},
		{"its data", "GET", "/storage/v1/b/corpus/o/in%2Fa?alt=media", 200},
		{"its data in XML", "GET", "/corpus/in/a", 200},
		{"its data in XML, encoded", "GET", "/corpus/in%2Fa", 200},
		{"the listing", "GET", "/storage/v1/b/corpus/o?prefix=in/", 200},
		{"a part of the listing", "GET", "/storage/v1/b/corpus/o?prefix=in/a", 200},
		{"a wider listing", "GET", "/storage/v1/b/corpus/o?prefix=in", 403},
		{"the whole listing", "GET", "/storage/v1/b/corpus/o", 403},
		{"an empty prefix", "GET", "/storage/v1/b/corpus/o?prefix=", 403},
		{"two prefixes", "GET", "/storage/v1/b/corpus/o?prefix=out/&prefix=in/", 400},
		{"two prefixes, the other way", "GET", "/storage/v1/b/corpus/o?prefix=in/&prefix=out/", 400},
		{"a glob without the prefix", "GET", "/storage/v1/b/corpus/o?matchGlob=in/**", 403},
		{"an offset without the prefix", "GET", "/storage/v1/b/corpus/o?startOffset=in/&endOffset=in0", 403},
		{"another object", "GET", "/storage/v1/b/corpus/o/out%2Fa", 403},
		{"another object in XML", "GET", "/corpus/out/a", 403},
		{"a path with dots", "GET", "/corpus/in/../out/a", 403},
		{"a name with dots", "GET", "/storage/v1/b/corpus/o/in%2F..%2Fout%2Fa", 403}, // a name that is not there, and no right to know it
		{"a name encoded twice", "GET", "/storage/v1/b/corpus/o/in%252Fa", 403},
		{"a name with a zero byte", "GET", "/storage/v1/b/corpus/o/out%2Fa%00in%2F", 403},
		{"the prefix as a query", "GET", "/storage/v1/b/corpus/o/out%2Fa?prefix=in/", 403},
		{"another bucket", "GET", "/storage/v1/b/other/o/in%2Fa", 403},
		{"another bucket in XML", "GET", "/other/in/a", 403},
		{"another bucket with an encoded slash", "GET", "/other%2Fin/a", 404},
		{"another bucket's listing", "GET", "/storage/v1/b/other/o?prefix=in/", 403},
		{"the bucket", "GET", "/storage/v1/b/corpus", 403},
		{"the bucket's policy", "GET", "/storage/v1/b/corpus/iam", 403},
		{"the project's buckets", "GET", "/storage/v1/b?project=" + testProject, 403},
		{"a delete", "DELETE", "/storage/v1/b/corpus/o/in%2Fa", 403},
		{"an upload", "POST", "/upload/storage/v1/b/corpus/o?uploadType=media&name=in/c", 403},
		{"a download path", "GET", "/download/storage/v1/b/corpus/o/out%2Fa?alt=media", 403},
	} {
		if resp, body := g.do(c.method, c.path, token, ""); resp.StatusCode != c.want {
			t.Errorf("%s: got %d %s, want %d", c.what, resp.StatusCode, body, c.want)
		}
	}
	// A page token of a wider listing does not widen this one.
	wide := g.want(200, "GET", "/storage/v1/b/corpus/o?maxResults=3", g.admin(), "")
	var page struct{ NextPageToken string }
	if err := json.Unmarshal([]byte(wide), &page); err != nil || page.NextPageToken == "" {
		t.Fatalf("%v: %s", err, wide)
	}
	if got := g.want(200, "GET", "/storage/v1/b/corpus/o?prefix=in/&pageToken="+url.QueryEscape(page.NextPageToken), token, ""); strings.Contains(got, "out/a") {
		t.Errorf("with a foreign page token: %s", got)
	}
}

func TestWriterStaysInItsPrefix(t *testing.T) {
	g := newGuarded(t)
	token := g.bounded("roles/storage.objectUser")
	multipart := func(metadata string) string {
		return "--x\r\nContent-Type: application/json\r\n\r\n" + metadata + "\r\n--x\r\nContent-Type: text/plain\r\n\r\ndata\r\n--x--\r\n"
	}
	const upload = "/upload/storage/v1/b/corpus/o?uploadType="
	for _, c := range []struct {
		what, path, body string
		want             int
	}{
		{"an upload", upload + "media&name=in/new", "x", 200},
		{"an upload outside", upload + "media&name=out/new", "x", 403},
		{"two names", upload + "media&name=out/new&name=in/new", "x", 400},
		{"a resumable upload outside", upload + "resumable&name=out/new", "{}", 403},
		{"a name in the metadata", upload + "resumable", `{"name":"out/new"}`, 403},
		{"two names, one in the metadata", upload + "resumable&name=out/new", `{"name":"in/new"}`, 403},
		{"a compose outside", "/storage/v1/b/corpus/o/out%2Fnew/compose", `{"sourceObjects":[{"name":"in/a"}]}`, 403},
		{"a compose of what is outside", "/storage/v1/b/corpus/o/in%2Fnew/compose", `{"sourceObjects":[{"name":"in/a"},{"name":"out/a"}]}`, 403},
		{"a compose", "/storage/v1/b/corpus/o/in%2Fnew/compose", `{"sourceObjects":[{"name":"in/a"},{"name":"in/b"}]}`, 200},
		{"a rewrite from outside", "/storage/v1/b/corpus/o/out%2Fa/rewriteTo/b/corpus/o/in%2Fnew", "{}", 403},
		{"a rewrite from another bucket", "/storage/v1/b/other/o/in%2Fa/rewriteTo/b/corpus/o/in%2Fnew", "{}", 403},
		{"a rewrite to outside", "/storage/v1/b/corpus/o/in%2Fa/rewriteTo/b/corpus/o/out%2Fnew", "{}", 403},
		{"a rewrite to another bucket", "/storage/v1/b/corpus/o/in%2Fa/rewriteTo/b/other/o/in%2Fnew", "{}", 403},
		{"a rewrite", "/storage/v1/b/corpus/o/in%2Fa/rewriteTo/b/corpus/o/in%2Fnew", "{}", 200},
		{"a copy from outside", "/storage/v1/b/corpus/o/out%2Fa/copyTo/b/corpus/o/in%2Fnew", "{}", 403},
		{"a copy to outside", "/storage/v1/b/corpus/o/in%2Fa/copyTo/b/corpus/o/out%2Fnew", "{}", 403},
		{"a move from outside", "/storage/v1/b/corpus/o/out%2Fa/moveTo/o/in%2Fnew2", "", 403},
		{"a move to outside", "/storage/v1/b/corpus/o/in%2Fb/moveTo/o/out%2Fnew", "", 403},
		{"a move", "/storage/v1/b/corpus/o/in%2Fb/moveTo/o/in%2Fnew2", "", 200},
	} {
		if resp, body := g.do("POST", c.path, token, c.body); resp.StatusCode != c.want {
			t.Errorf("%s: got %d %s, want %d", c.what, resp.StatusCode, body, c.want)
		}
	}
	for name, want := range map[string]int{"in/m": 200, "out/m": 403} {
		req, _ := http.NewRequest("POST", g.url+upload+"multipart", strings.NewReader(multipart(`{"name":"`+name+`"}`)))
		req.Header.Set("Content-Type", "multipart/related; boundary=x")
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("a multipart upload of %s: got %d, want %d", name, resp.StatusCode, want)
		}
	}
	// Somebody else's upload cannot be gone on with, nor ended.
	resp, _ := g.do("POST", upload+"resumable&name=out/new", g.admin(), "{}")
	session := strings.TrimPrefix(resp.Header.Get("Location"), g.url)
	g.want(403, "PUT", session, token, "x")
	g.want(403, "DELETE", session, token, "")
	g.want(401, "PUT", session, "", "x")
	g.want(200, "PUT", session, g.admin(), "x")
}

func TestCreatorCannotReplace(t *testing.T) {
	g := newGuarded(t)
	creator := g.token("creator-account")
	g.grant("corpus", "roles/storage.objectCreator", "creator-account")
	const upload = "/upload/storage/v1/b/corpus/o?uploadType=media&name="
	g.want(200, "POST", upload+"drop/1", creator, "x")
	g.want(403, "POST", upload+"drop/1", creator, "y")
	g.want(412, "POST", upload+"drop/1&ifGenerationMatch=0", creator, "y")
	// What appears between the check and the end of an upload is safe as well.
	resp, _ := g.do("POST", "/upload/storage/v1/b/corpus/o?uploadType=resumable&name=drop/2", creator, "{}")
	g.want(200, "POST", upload+"drop/2", g.admin(), "mine")
	g.want(403, "PUT", strings.TrimPrefix(resp.Header.Get("Location"), g.url), creator, "theirs")
	if got := g.want(200, "GET", "/corpus/drop/2", g.admin(), ""); got != "mine" {
		t.Errorf("the object is now %q", got)
	}
	g.want(403, "GET", "/corpus/drop/1", creator, "")
	g.want(403, "GET", "/storage/v1/b/corpus/o", creator, "")
}

func TestWhatIsNotThereLooksForbidden(t *testing.T) {
	g := newGuarded(t)
	reader := g.token("reader-account")
	g.grant("corpus", "roles/storage.legacyObjectReader", "reader-account")
	g.want(200, "GET", "/storage/v1/b/corpus/o/in%2Fa", reader, "")
	for _, path := range []string{"/storage/v1/b/corpus/o/not-there", "/corpus/not-there", "/storage/v1/b/corpus/o/in%2Fa?generation=1"} {
		if got := g.want(403, "GET", path, reader, ""); !strings.Contains(got, "storage.objects.list") && !strings.Contains(got, "AccessDenied") {
			t.Errorf("GET %s: %s", path, got)
		}
	}
	g.want(404, "GET", "/storage/v1/b/corpus/o/not-there", g.admin(), "")
}

func TestBucketPolicy(t *testing.T) {
	g := newGuarded(t)
	reader, admin := g.token("reader-account"), g.admin()
	const path = "/storage/v1/b/corpus/iam"
	var policy map[string]any
	if err := json.Unmarshal([]byte(g.want(200, "GET", path, admin, "")), &policy); err != nil {
		t.Fatal(err)
	}
	if policy["kind"] != "storage#policy" || policy["resourceId"] != "projects/_/buckets/corpus" || policy["version"] != 1.0 {
		t.Errorf("the policy is %v", policy)
	}
	first := policy["etag"]
	set := func(status int, p map[string]any) {
		t.Helper()
		body, _ := json.Marshal(p)
		g.want(status, "PUT", path, admin, string(body))
	}
	member := "serviceAccount:" + g.email("reader-account")
	policy["bindings"] = append(policy["bindings"].([]any), map[string]any{"role": "roles/storage.objectViewer", "members": []string{member}})
	set(200, policy)
	g.want(200, "GET", "/corpus/in/a", reader, "")
	set(412, policy) // its etag is that of before
	policy["etag"] = first
	policy["bindings"] = []any{}
	set(412, policy)
	g.want(200, "GET", "/corpus/in/a", reader, "")
	set(400, map[string]any{"bindings": []any{map[string]any{"role": "roles/storage.king", "members": []string{member}}}})
	set(400, map[string]any{"bindings": []any{map[string]any{"role": "roles/storage.objectViewer", "members": []string{"somebody"}}}})
	set(200, map[string]any{"bindings": []any{map[string]any{"role": "roles/storage.objectViewer", "members": []string{"allUsers"}}}})
	g.want(200, "GET", "/corpus/in/a", "", "")
	g.want(200, "GET", "/storage/v1/b/corpus/o?prefix=in/", "", "")
	g.want(401, "GET", "/corpus/in/a", "ya29.wrong", "")
	g.want(401, "DELETE", "/storage/v1/b/corpus/o/in%2Fa", "", "")
	g.want(403, "PUT", path, reader, `{"bindings":[]}`)

	test := func(token string, permissions ...string) string {
		return g.want(200, "GET", path+"/testPermissions?"+url.Values{"permissions": permissions}.Encode(), token, "")
	}
	if got := test(reader, "storage.objects.get", "storage.objects.delete"); !strings.Contains(got, "storage.objects.get") || strings.Contains(got, "delete") {
		t.Errorf("the reader may %s", got)
	}
	for _, odd := range []string{"storage.objects.*", "", "x", "storage.objects.get\n"} {
		g.want(400, "GET", path+"/testPermissions?"+url.Values{"permissions": {odd}}.Encode(), reader, "")
	}
	g.want(404, "GET", "/storage/v1/b/not-there/iam", admin, "")
	g.want(404, "GET", "/storage/v1/b/not-there/iam/testPermissions?permissions=storage.objects.get", reader, "")

	// A bucket made again begins anew.
	g.want(200, "POST", "/storage/v1/b?project="+testProject, admin, `{"name":"brief"}`)
	g.grant("brief", "roles/storage.objectAdmin", "reader-account")
	g.want(200, "GET", "/storage/v1/b/brief/o", reader, "")
	g.want(204, "DELETE", "/storage/v1/b/brief", admin, "")
	g.want(200, "POST", "/storage/v1/b?project="+testProject, admin, `{"name":"brief"}`)
	g.want(403, "GET", "/storage/v1/b/brief/o", reader, "")
}
