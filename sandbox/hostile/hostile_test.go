package hostile

import (
	"bufio"
	"bytes"
	"net/http"
	"net/http/httptest"
	"testing"
)

// Most of what is sent reaches a server: net/http refuses the rest itself.
func TestRequestsReachAServer(t *testing.T) {
	paths := []string{"/v1/projects/p/x"}
	all := append(Requests(paths, []string{"{}"}), Long(paths)...)
	n := 0
	for _, raw := range all {
		if _, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(raw))); err == nil {
			n++
		}
	}
	if n < len(all)*3/4 {
		t.Errorf("%d of %d requests can be read", n, len(all))
	}
}

func TestJudge(t *testing.T) {
	const jsonType, xmlType = "application/json; charset=UTF-8", "application/xml; charset=UTF-8"
	for _, tt := range []struct {
		name, service, path, contentType string
		code                             int
		body                             string
		good                             bool
	}{
		{"compute", "compute", "/", jsonType, 404, `{"error":{"code":404,"message":"m","errors":[{"message":"m","domain":"global","reason":"notFound"}]}}`, true},
		{"another code", "compute", "/", jsonType, 404, `{"error":{"code":400,"message":"m","errors":[{"message":"m","domain":"global","reason":"notFound"}]}}`, false},
		{"no reason", "compute", "/", jsonType, 404, `{"error":{"code":404,"message":"m"}}`, false},
		{"text", "compute", "/", "text/plain", 404, "404 page not found\n", false},
		{"no body", "lustre", "/", jsonType, 404, "", false},
		{"lustre", "lustre", "/", jsonType, 400, `{"error":{"code":400,"message":"m","status":"INVALID_ARGUMENT"}}`, true},
		{"no status", "lustre", "/", jsonType, 400, `{"error":{"code":400,"message":"m"}}`, false},
		{"internal error", "lustre", "/", jsonType, 500, `{"error":{"code":500,"message":"m","status":"INTERNAL"}}`, false},
		{"XML", "storage", "/b/o", xmlType, 404, `<Error><Code>NoSuchKey</Code><Message>m</Message></Error>`, true},
		{"XML without words", "storage", "/b/o", xmlType, 404, `<Error><Code>NoSuchKey</Code></Error>`, false},
		{"OAuth", "iam", "/v1/token", jsonType, 400, `{"error":"invalid_request","error_description":"d"}`, true},
		{"OAuth elsewhere", "iam", "/v1/roles", jsonType, 400, `{"error":"invalid_request","error_description":"d"}`, false},
		{"redirect", "compute", "/", "text/html", 307, "", false},
		{"success", "compute", "/", jsonType, 200, `{"a":1}`, true},
		{"broken success", "compute", "/", jsonType, 200, `{"a":`, false},
	} {
		w := httptest.NewRecorder()
		w.Header().Set("Content-Type", tt.contentType)
		w.WriteHeader(tt.code)
		w.WriteString(tt.body)
		if err := judge(tt.service, httptest.NewRequest("GET", tt.path, nil), w); (err == nil) != tt.good {
			t.Errorf("%s: %v, want good %v", tt.name, err, tt.good)
		}
	}
}
