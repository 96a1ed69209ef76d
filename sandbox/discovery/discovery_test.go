package discovery_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/sandbox/discovery"
	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
)

const (
	instances = "/compute/v1/projects/sluice-sandbox/zones/us-central1-a/instances"
	operation = `"kind":"compute#operation","id":"17","name":"operation-1","selfLink":"https://www.googleapis.com/compute/v1/projects/sluice-sandbox/zones/us-central1-a/operations/operation-1"`
	lustres   = "/v1/projects/sluice-sandbox/locations/us-central1-a/instances"
	lustre    = `"filesystem":"scratch","capacityGib":"18000","network":"projects/p/global/networks/n"`
	account   = "/v1/projects/-/serviceAccounts/a@p.iam.gserviceaccount.com"
	notFound  = `{"error":{"code":404,"message":"m","errors":[{"message":"m","domain":"global","reason":"notFound"}]}}`
)

// exchange is one call as the checker sees it.
type exchange struct {
	method, url string // "" is GET
	body        string
	contentType string // "" is application/json
	status      int    // 0 is 200
	reply       string
	replyType   string // "" is application/json
}

// violations are what the checker says of the exchanges, in order, as "request|reply: where what".
func violations(t *testing.T, c *discovery.Checker, exchanges ...exchange) []string {
	t.Helper()
	var found []string
	for _, e := range exchanges {
		if e.method == "" {
			e.method = http.MethodGet
		}
		h := c.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			if e.replyType == "" {
				e.replyType = "application/json; charset=UTF-8"
			}
			if e.reply != "" {
				w.Header().Set("Content-Type", e.replyType)
			}
			if e.status != 0 {
				w.WriteHeader(e.status)
			}
			io.WriteString(w, e.reply)
		}), func(v discovery.Violation) {
			side := "request"
			if v.Reply {
				side = "reply"
			}
			found = append(found, fmt.Sprintf("%s: %s %s", side, v.Where, v.What))
		})
		r := httptest.NewRequest(e.method, e.url, strings.NewReader(e.body))
		if e.body != "" {
			if e.contentType == "" {
				e.contentType = "application/json"
			}
			r.Header.Set("Content-Type", e.contentType)
		}
		h.ServeHTTP(httptest.NewRecorder(), r)
	}
	return found
}

func TestViolations(t *testing.T) {
	c := discovery.New(discoverytest.Load(t, "compute", "storage", "iam", "iamcredentials", "sts", "cloudresourcemanager", "monitoring", "lustre")...)
	insert := func(body string) exchange {
		return exchange{method: "POST", url: instances, body: body, reply: "{" + operation + "}"}
	}
	get := func(reply string) exchange {
		return exchange{url: instances + "/a", reply: `{"kind":"compute#instance","name":"a"` + reply + "}"}
	}
	refused := func(status int, body string) exchange {
		return exchange{url: lustres + "/a", status: status, reply: body}
	}
	for _, tt := range []struct {
		name string
		e    exchange
		want []string
	}{
		{"a good call", insert(`{"name":"a","machineType":"zones/z/machineTypes/m","disks":[{"boot":true}]}`), nil},
		{"unknown route", exchange{url: "/compute/v1/projects/sluice-sandbox/zones/us-central1-a/machines", status: 404, reply: notFound}, []string{"request: path no such route"}},
		{"wrong method", exchange{method: "PUT", url: instances, status: 405}, []string{"request: method this route has only GET, POST"}},
		{"unknown parameter", exchange{url: instances + "?limit=3", reply: `{"kind":"compute#instanceList"}`}, []string{"request: query limit no such parameter"}},
		{"parameter's type", exchange{url: instances + "?maxResults=many", reply: `{"kind":"compute#instanceList"}`}, []string{`request: query maxResults "many" is no integer uint32`}},
		{"parameter twice", exchange{url: instances + "?filter=a&filter=b", reply: `{"kind":"compute#instanceList"}`}, []string{"request: query filter is given more than once"}},
		{"parameter's value", exchange{url: "/storage/v1/b/bkt/o?projection=most", reply: `{"kind":"storage#objects"}`}, []string{`request: query projection "most" is none of its values`}},
		{"path's pattern", exchange{url: "/compute/v1/projects/sluice-sandbox/zones/us_central/instances", reply: `{"kind":"compute#instanceList"}`},
			[]string{`request: path zone "us_central" does not match [a-z](?:[-a-z0-9]{0,61}[a-z0-9])?`}},
		{"missing parameter", exchange{url: "/storage/v1/b", reply: `{"kind":"storage#buckets"}`}, []string{"request: query project is required"}},
		{"selection of fields", exchange{url: "/storage/v1/b/bkt/o?fields=items(name,owner/entity,colour),prefixes", reply: `{"items":[{"name":"x"}]}`},
			[]string{`request: query fields "colour": no such field`}},

		{"field of a request", insert(`{"name":"a","scheduling":{"spot":true}}`), []string{"request: body.scheduling.spot no such field"}},
		{"type in a request", insert(`{"name":"a","tags":["x"]}`), []string{"request: body.tags is an array, want object"}},
		{"value in a request", insert(`{"name":"a","scheduling":{"provisioningModel":"CHEAP"}}`), []string{`request: body.scheduling.provisioningModel "CHEAP" is none of its values`}},
		{"pattern in a request", insert(`{"name":"A_1"}`), []string{`request: body.name "A_1" does not match [a-z](?:[-a-z0-9]{0,61}[a-z0-9])?`}},
		{"missing in a request", insert(`{"machineType":"m"}`), []string{"request: body.name is required"}},
		{"missing, newer service", exchange{method: "POST", url: account + ":generateAccessToken", body: `{"lifetime":"1h"}`, reply: `{}`},
			[]string{`request: body.lifetime "1h" is no google-duration`, "request: body.scope is required"}},
		{"not JSON", insert(`name=a`), []string{"request: body is no JSON: invalid character 'a' in literal null (expecting 'u')"}},
		{"content type", exchange{method: "POST", url: instances, body: `{"name":"a"}`, contentType: "text/plain", reply: "{" + operation + "}"},
			[]string{`request: header Content-Type is "text/plain", want application/json`}},
		{"body of a read", exchange{url: instances, body: `{}`, reply: `{"kind":"compute#instanceList"}`}, []string{"request: body this method has none"}},
		{"form of a token exchange", exchange{method: "POST", url: "/v1/token", contentType: "application/x-www-form-urlencoded", body: "grant_type=g&subject_token=t&colour=red",
			reply: `{"access_token":"x","expires_in":"3600"}`},
			[]string{"request: body.colour no such field", "request: body.requestedTokenType is required", "request: body.subjectTokenType is required", "reply: body.expires_in is a string, want integer"}},
		{"multipart upload", exchange{method: "POST", url: "/upload/storage/v1/b/bkt/o?uploadType=multipart&name=x", contentType: "multipart/related; boundary=B",
			body: "--B\r\nContent-Type: application/json\r\n\r\n{\"colour\":1}\r\n--B\r\n\r\ndata\r\n--B--\r\n", reply: `{"kind":"storage#object"}`},
			[]string{"request: body.colour no such field"}},

		{"field of a reply", get(`,"colour":"red"`), []string{"reply: body.colour no such field"}},
		{"number as a number", get(`,"id":17`), []string{"reply: body.id is a number: uint64 must be a string"}},
		{"string for an integer", get(`,"disks":[{"index":"0"}]`), []string{"reply: body.disks[0].index is a string, want integer"}},
		{"value in a reply", get(`,"status":"BOOTING"`), []string{`reply: body.status "BOOTING" is none of its values`}},
		{"null in a reply", get(`,"labels":null`), []string{"reply: body.labels is null"}},
		{"no kind", exchange{url: instances + "/a", reply: `{"name":"a"}`}, []string{"reply: body.kind is missing"}},
		{"wrong kind", get(`,"metadata":{"kind":"compute#meta"}`), []string{`reply: body.metadata.kind is "compute#meta", want "compute#metadata"`}},
		{"wrong selfLink", get(`,"selfLink":"https://www.googleapis.com/compute/v1/projects/sluice-sandbox/zones/us-central1-a/disks/a"`),
			[]string{`reply: body.selfLink "https://www.googleapis.com/compute/v1/projects/sluice-sandbox/zones/us-central1-a/disks/a" is not the address of a Instance`}},
		{"no kind in a list", exchange{url: instances, reply: `{"kind":"compute#instanceList","items":[{"name":"a"}]}`}, []string{"reply: body.items[0].kind is missing"}},
		{"time", exchange{url: "/storage/v1/b/bkt", reply: `{"kind":"storage#bucket","timeCreated":"today"}`}, []string{`reply: body.timeCreated "today" is no date-time`}},
		{"body where there is none", exchange{method: "DELETE", url: "/storage/v1/b/bkt", reply: `{}`}, []string{"reply: status is 200, want 204 without a body"}},
		{"object's data", exchange{url: "/storage/v1/b/bkt/o/a%2Fb?alt=media", reply: "bytes", replyType: "text/plain"}, nil},
		{"XML read", exchange{url: "/bkt/a/b?generation=1&colour=red", status: 404, reply: notFound},
			[]string{"request: query colour no such parameter", `reply: Content-Type is "application/json", errors are application/xml`}},

		{"Google's error", refused(403, `{"error":{"code":403,"message":"m","status":"PERMISSION_DENIED","details":[{"@type":"type.googleapis.com/google.rpc.ErrorInfo","reason":"IAM_PERMISSION_DENIED","domain":"iam.googleapis.com","metadata":{"permission":"p"}}]}}`), nil},
		{"error in words", exchange{url: lustres + "/a", status: 503, reply: "sorry", replyType: "text/html"}, []string{`reply: header Content-Type is "text/html", want application/json`}},
		{"error's code", refused(403, `{"error":{"code":500,"message":"m","status":"INTERNAL"}}`), []string{"reply: body.error.code is 500, the status is 403", `reply: body.error.status is "INTERNAL", the status is 403`}},
		{"error without status", refused(404, `{"error":{"code":404,"message":"m"}}`), []string{"reply: body.error.status is missing"}},
		{"error without errors", exchange{url: instances, status: 404, reply: `{"error":{"code":404,"message":"m","reason":"r"}}`}, []string{"reply: body.error.reason no such field", "reply: body.error.errors is missing"}},
		{"error's detail", refused(403, `{"error":{"code":403,"message":"m","status":"PERMISSION_DENIED","details":[{"@type":"type.googleapis.com/google.rpc.Trouble"},{"reason":"X"}]}}`),
			[]string{`reply: body.error.details[0].@type "type.googleapis.com/google.rpc.Trouble" is no message of this API`, "reply: body.error.details[1].@type is missing"}},

		{"Lustre's output", exchange{method: "POST", url: lustres + "?instanceId=i", body: "{" + lustre + `,"state":"ACTIVE"}`, reply: `{}`}, []string{"request: body.state is output only"}},
		{"Lustre's missing id", exchange{method: "POST", url: lustres, body: "{" + lustre + "}", reply: `{}`}, []string{"request: query instanceId is required"}},
		{"Lustre's immutable field in a mask", exchange{method: "PATCH", url: lustres + "/i?updateMask=capacityGib,filesystem,colour", body: "{" + lustre + "}", reply: `{}`},
			[]string{`request: query updateMask "filesystem" cannot be changed`, `request: query updateMask "colour": no such field`}},
		{"Lustre's operation", exchange{url: "/v1/projects/p/locations/z/operations/o", reply: `{"metadata":{"@type":"type.googleapis.com/google.cloud.lustre.v1.OperationMetadata","progress":1},"response":{"@type":"type.googleapis.com/google.cloud.lustre.v1.Disk"}}`},
			[]string{"reply: body.metadata.progress no such field", `reply: body.response.@type "type.googleapis.com/google.cloud.lustre.v1.Disk" is no message of this API`}},
		{"a verb that Lustre lacks", exchange{method: "POST", url: lustres + "/i:archiveData", body: `{}`, status: 404, reply: `{"error":{"code":404,"message":"m","status":"NOT_FOUND"}}`},
			[]string{"request: method this route has only DELETE, GET, PATCH"}},
		{"the project's policy", exchange{method: "POST", url: "/v1/projects/p:getIamPolicy", body: `{}`, reply: `{"bindings":[{"role":"r","members":["m"],"condition":{"if":"x"}}]}`},
			[]string{"reply: body.bindings[0].condition.if no such field"}},
		{"time series", exchange{url: "/v3/projects/p/timeSeries?filter=f&interval.endTime=now&interval.startTime=2026-01-02T03:04:05Z&view=FULL", reply: `{"timeSeries":[{"points":[{"value":{"int64Value":1}}]}]}`},
			[]string{`request: query interval.endTime "now" is no google-datetime`, "reply: body.timeSeries[0].points[0].value.int64Value is a number: int64 must be a string"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if d := cmp.Diff(tt.want, violations(t, c, tt.e)); d != "" {
				t.Errorf("(-want +got)\n%s", d)
			}
		})
	}
}

// TestImmutable has a server that changes what never changes.
func TestImmutable(t *testing.T) {
	c := discovery.New(discoverytest.Load(t, "lustre")...)
	read := func(capacity, throughput, uid string) exchange {
		return exchange{url: lustres + "/i", reply: fmt.Sprintf(`{"name":"i","uid":%q,"capacityGib":%q,"perUnitStorageThroughput":%q}`, uid, capacity, throughput)}
	}
	done := exchange{url: "/v1/projects/p/locations/z/operations/o",
		reply: `{"done":true,"response":{"@type":"type.googleapis.com/google.cloud.lustre.v1.Instance","name":"i","uid":"1","perUnitStorageThroughput":"250"}}`}
	got := violations(t, c, read("18000", "500", "1"), read("27000", "500", "1"), read("18000", "1000", "2"))
	if got != nil {
		t.Errorf("grown, or made anew: %q", got)
	}
	got = violations(t, c, read("27000", "1000", "1"), done)
	want := []string{
		`reply: body.perUnitStorageThroughput was "500" and is "1000", but never changes`,
		`reply: body.response.perUnitStorageThroughput was "500" and is "250", but never changes`,
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

// TestCut has a handler that cuts the connection and one that does not read.
func TestCut(t *testing.T) {
	c := discovery.New(discoverytest.Load(t, "lustre")...)
	var found []string
	report := func(v discovery.Violation) { found = append(found, fmt.Sprint(v.Status, " ", v.Where)) }
	request := func() *http.Request {
		return httptest.NewRequest("POST", lustres+"?instanceId=i&colour=red", strings.NewReader("{"+lustre+`,"smell":1}`))
	}
	func() {
		defer func() {
			if recover() != http.ErrAbortHandler {
				t.Error("the panic did not pass")
			}
		}()
		c.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }), report).
			ServeHTTP(httptest.NewRecorder(), request())
	}()
	func() { // in the middle of a reply: half a body is no violation
		defer func() { _ = recover() }()
		c.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, `{"name":`)
			panic(http.ErrAbortHandler)
		}), report).ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", lustres+"/i", nil))
	}()
	c.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, "{}")
	}), report).ServeHTTP(httptest.NewRecorder(), request())
	if d := cmp.Diff([]string{"0 query colour", "200 query colour", "200 body.smell"}, found); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

func TestMethods(t *testing.T) {
	rt := discovery.NewRouter(discoverytest.Load(t, "storage", "iam", "iamcredentials")...)
	for _, tt := range []struct {
		method, path string
		want         []string
	}{
		{"POST", "/storage/v1/b/{bucket}/o/{object}/compose", []string{"storage.objects.compose"}},
		{"POST", "/upload/storage/v1/b/{bucket}/o", []string{"storage.objects.insert"}},
		{"GET", "/download/storage/v1/b/{bucket}/o/{object}", []string{"storage.objects.get"}},
		{"POST", "/v1/projects/{p}/serviceAccounts/{a}:signBlob", []string{"iam.projects.serviceAccounts.signBlob", "iamcredentials.projects.serviceAccounts.signBlob"}},
		{"POST", "/storage/v1/b/{bucket}/o/{object}/shred", nil},
	} {
		if d := cmp.Diff(tt.want, rt.Methods(tt.method, tt.path)); d != "" {
			t.Errorf("%s %s (-want +got)\n%s", tt.method, tt.path, d)
		}
	}
}

func TestParse(t *testing.T) {
	for _, bad := range []string{"", "[]", "{}", `{"id":"x"}`} {
		if _, err := discovery.Parse(strings.NewReader(bad)); err == nil {
			t.Errorf("%q was taken for a document", bad)
		}
	}
	if _, err := discovery.LoadAll(t.TempDir()); err == nil {
		t.Error("an empty directory has all documents")
	}
	dir, err := discoverytest.ModuleDir()
	if err != nil {
		t.Fatal(err)
	}
	if all, err := discovery.LoadAll(dir); err != nil || len(all) != len(discovery.Files)+2 {
		t.Errorf("got %d documents, %v", len(all), err)
	}
}

// FuzzCheck reads what clients and servers may send.
func FuzzCheck(f *testing.F) {
	c := discovery.New(discoverytest.Load(f, "lustre", "storage", "sts")...)
	f.Add("POST", lustres+"?instanceId=i", "application/json", "{"+lustre+"}", 200, "{}")
	f.Add("POST", "/upload/storage/v1/b/b/o?uploadType=multipart", "multipart/related; boundary=B", "--B\r\n\r\n{}\r\n--B--", 400, notFound)
	f.Add("PATCH", lustres+"/i?updateMask=labels.x,y&fields=a(b/c,*),d", "", "null", 404, `{"error":{"code":404,"details":[1]}}`)
	f.Add("GET", "/v1/projects/p/locations/z/operations/o", "", "", 200, `{"metadata":{"@type":"x"},"response":[]}`)
	f.Fuzz(func(t *testing.T, method, url, contentType, body string, status int, reply string) {
		r, err := http.NewRequest(method, url, strings.NewReader(body))
		if err != nil || status < 200 || status > 599 {
			return
		}
		r.Header.Set("Content-Type", contentType)
		c.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			io.WriteString(w, reply)
		}), func(v discovery.Violation) { _ = v.String() }).ServeHTTP(httptest.NewRecorder(), r)
	})
}
