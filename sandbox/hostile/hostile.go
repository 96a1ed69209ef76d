// Package hostile has requests that mean harm, for the tests of every server: none may crash or hang it, and all errors have
// Google's form.
package hostile

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/sandbox/front"
)

// Target is a server to be attacked.
type Target struct {
	// Service is its name in package faults.
	Service string
	// Paths are of methods and things that it has, as a client sends them.
	Paths []string
	// Bodies are correct ones, to be broken.
	Bodies []string
	// Header is sent with each request, for example a token; or nil.
	Header map[string]string
	// Address is the client's; default 192.0.2.1:1234.
	Address string
	// Patience is after how long the client goes away; default 30 s.
	Patience time.Duration
	Handler  http.Handler
}

// longest is what one request may take. Methods that wait end with the client's patience, which is shorter.
const longest = 60 * time.Second

// Test attacks the target with all of Requests and Long.
func Test(t *testing.T, target Target) {
	for _, raw := range append(Requests(target.Paths, target.Bodies), Long(target.Paths)...) {
		target.Attack(t, raw)
	}
}

// Fuzz attacks the target with what the fuzzer makes of a few requests; many would only keep it busy before it begins.
func Fuzz(f *testing.F, target Target) {
	for i, path := range target.Paths {
		f.Add(Request("GET", path, "", ""))
		if len(target.Bodies) > 0 {
			f.Add(Request("POST", path, jsonType, target.Bodies[i%len(target.Bodies)]))
		}
	}
	for _, uri := range uris(target.Paths[len(target.Paths)/2]) {
		if len(uri) < 500 {
			f.Add(Request("GET", uri, "", ""))
		}
	}
	f.Fuzz(func(t *testing.T, raw []byte) { target.Attack(t, raw) })
}

// Attack sends one request, as it stands on the wire, and judges the answer.
func (target Target) Attack(t testing.TB, raw []byte) {
	t.Helper()
	r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(raw)))
	if err != nil {
		return // net/http answers these itself
	}
	patience := target.Patience
	if patience == 0 {
		patience = longest / 2
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r = r.WithContext(ctx)
	for name, value := range target.Header {
		r.Header.Set(name, value)
	}
	if r.RemoteAddr = target.Address; r.RemoteAddr == "" {
		r.RemoteAddr = "192.0.2.1:1234"
	}
	var log bytes.Buffer
	h := (&front.Front{Log: slog.New(slog.NewTextHandler(&log, nil))}).Handler(target.Service, target.Handler)
	w := httptest.NewRecorder()
	done := make(chan any, 1)
	go func() {
		defer func() { done <- recover() }()
		h.ServeHTTP(w, r)
	}()
	select {
	case p := <-done:
		if p != nil {
			t.Fatalf("the server panicked: %v\n%.2000q", p, raw)
		}
	case <-time.After(longest):
		t.Fatalf("no answer within %v\n%.2000q", longest, raw)
	}
	if err := judge(target.Service, r, w); err != nil {
		t.Errorf("%v\nrequest: %.2000q\nanswer: %d %.2000s\n%s", err, raw, w.Code, w.Body, log.String())
	}
}

// judge says what is wrong with an answer.
func judge(service string, r *http.Request, w *httptest.ResponseRecorder) error {
	code, contentType, body := w.Code, w.Header().Get("Content-Type"), w.Body.Bytes()
	switch {
	case code == http.StatusInternalServerError:
		return fmt.Errorf("an internal error")
	case code < 200 || code > 599:
		return fmt.Errorf("status %d", code)
	case strings.ContainsAny(contentType, "\r\n"):
		return fmt.Errorf("content type %q", contentType)
	case code >= 300 && code < 400 && code != http.StatusNotModified && service != "metadata" && service != "storage":
		return fmt.Errorf("a redirect")
	case r.Method == http.MethodHead || code == http.StatusNoContent || code == http.StatusNotModified:
		return nil
	case code < 400:
		if strings.HasPrefix(contentType, "application/json") && len(body) > 0 && !json.Valid(body) {
			return fmt.Errorf("an answer that is no JSON")
		}
		return nil
	case service == "metadata":
		if len(body) == 0 {
			return fmt.Errorf("an error without words")
		}
		return nil
	case service == "storage" && strings.HasPrefix(contentType, "application/xml"):
		var e struct {
			XMLName xml.Name `xml:"Error"`
			Code    string
			Message string
		}
		if err := xml.Unmarshal(body, &e); err != nil || e.Code == "" || e.Message == "" {
			return fmt.Errorf("not Cloud Storage's XML error: %w", err)
		}
		return nil
	}
	var e struct {
		Error json.RawMessage
	}
	var inner struct {
		Code    int
		Message string
		Status  string
		Errors  []struct{ Message, Domain, Reason string }
	}
	if err := json.Unmarshal(body, &e); err != nil {
		return fmt.Errorf("not Google's error: %w", err)
	}
	if service == "iam" && strings.HasPrefix(r.URL.Path, "/v1/token") && len(e.Error) > 0 && e.Error[0] == '"' {
		return nil // the token service speaks OAuth
	}
	if err := json.Unmarshal(e.Error, &inner); err != nil {
		return fmt.Errorf("not Google's error: %w", err)
	}
	legacy := service == "compute" || service == "storage"
	switch {
	case !strings.HasPrefix(contentType, "application/json"):
		return fmt.Errorf("content type %q", contentType)
	case inner.Code != code || inner.Message == "":
		return fmt.Errorf("code %d, message %q", inner.Code, inner.Message)
	case legacy && (len(inner.Errors) == 0 || inner.Errors[0].Reason == "" || inner.Errors[0].Domain == ""):
		return fmt.Errorf("no reason")
	case !legacy && inner.Status == "":
		return fmt.Errorf("no status")
	}
	return nil
}

// Request writes one request as it stands on the wire.
func Request(method, uri, contentType, body string) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: www.googleapis.com\r\n", method, uri)
	if contentType != "" {
		fmt.Fprintf(&b, "Content-Type: %s\r\n", contentType)
	}
	if body != "" {
		fmt.Fprintf(&b, "Content-Length: %d\r\n", len(body))
	}
	b.WriteString("\r\n" + body)
	return b.Bytes()
}

const jsonType = "application/json"

// Requests are short ones.
func Requests(paths, good []string) [][]byte {
	all := [][]byte{Request("OPTIONS", "*", "", ""), Request("GET", "*", "", ""), Request("CONNECT", "www.googleapis.com:443", "", "")}
	for _, path := range paths {
		for _, method := range []string{"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "BREW"} {
			all = append(all, Request(method, path, "", ""))
		}
		for _, uri := range uris(path) {
			all = append(all, Request("GET", uri, "", ""), Request("DELETE", uri, "", ""))
		}
		for _, body := range append(broken(), good...) {
			all = append(all, Request("POST", path, jsonType, body), Request("PATCH", path, jsonType, body))
		}
		for _, contentType := range []string{"text/plain", "application/x-www-form-urlencoded", "multipart/related; boundary=x", "multipart/related", "application/json; charset=utf-16", ";;;", "\x00"} {
			all = append(all, Request("POST", path, contentType, `{"name":"x"}`))
		}
		all = append(all,
			[]byte("POST "+path+" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"name\":"),            // a body that ends early
			[]byte("POST "+path+" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n{}"), // chunks that lie
			[]byte("GET "+path+" HTTP/1.1\r\nHost: x\r\nRange: bytes=5-2,99999999999999999999-\r\nIf-None-Match: \x80\r\nAuthorization: Bearer \xff\r\n\r\n"),
			[]byte("POST "+path+" HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Type: application/json\r\nContent-Length: 3\r\n\r\n\x1f\x8b\x08"),
		)
	}
	return all
}

// uris are variants of a path that lead astray.
func uris(path string) []string {
	return []string{
		"http://compute.googleapis.com" + path, "https://evil:99999" + path, path + "/", "/" + path, path + "//", strings.ReplaceAll(path, "/", "//"),
		path + "/..", path + "/../../../../../../etc/passwd", path + "/%2e%2e/%2e%2e/%2e%2e/etc/passwd", path + "%2f..%2f..%2fetc%2fpasswd",
		path + "/%00", path + "%00", path + "/%ff%fe", path + "/%0d%0aX-Evil:%201", path + "/a%2Fb%2F..%2F", path + "/*", path + "/-", path + "/:", path + ":importData",
		path + "/" + strings.Repeat("x", 3000), path + "/" + strings.Repeat("a/", 500), path + ";a=b",
		path + "?filter=" + strings.Repeat("(", 500), path + "?filter=name%20eq%20%22(a%2B)%2B%24%22", path + "?filter=%00", path + "?maxResults=-1", path + "?maxResults=99999999999999999999",
		path + "?pageToken=%ff", path + "?pageSize=x&pageToken=eyJ9", path + "?requestId=0", path + "?updateMask=**", path + "?prefix=%00&delimiter=&matchGlob=" + strings.Repeat("%7B", 200),
		path + "?alt=media&generation=-1", path + "?ifGenerationMatch=x", path + "?uploadType=resumable&upload_id=../../x", path + "?%zz=1&;&=", path + "?wait_for_change=true&timeout_sec=99999999999",
		path + "?recursive=true&alt=xml", path + "?start=-99999999999999999999", path + "?userProject=%00&fields=" + strings.Repeat("a(", 200),
	}
}

// broken are bodies that are not what they should be.
func broken() []string {
	return []string{
		"{", "}", "null", "[]", `"x"`, "0", "{}{}", "{} x", `{"name":`, `{"name":"a","name":"b"}`, `{"NAME":"a"}`, `{"noSuchField":1}`, `{"name":{"a":[1,2,{"b":null}]}}`,
		`{"name":1e999}`, `{"name":99999999999999999999999}`, `{"count":-1,"capacityGib":"-9223372036854775808"}`, `{"name":"\ud800"}`, "{\"name\":\"\xff\xfe\"}", `{"name":"\u0000"}`, "\xef\xbb\xbf{}",
		`{"labels":{"":""},"metadata":{"items":[null,{"key":null,"value":null}]}}`, `{"disks":[null],"networkInterfaces":[null],"serviceAccounts":[null]}`, `{"bindings":[null,{"members":[null]}]}`,
		strings.Repeat("[", 20000), strings.Repeat(`{"a":`, 12000), `{"name":"` + strings.Repeat("x", 20000) + `"}`, "<xml/>", "a=b&c=d",
	}
}

// Long are those that are too long to be fuzzed with.
func Long(paths []string) [][]byte {
	var all [][]byte
	for _, path := range paths {
		all = append(all,
			Request("GET", path+"/"+strings.Repeat("x", 100<<10), "", ""),
			Request("GET", path+"?filter="+strings.Repeat("a%3Db%20OR%20", 2000), "", ""),
			Request("POST", path, jsonType, `{"description":"`+strings.Repeat("x", 9<<20)+`"}`),
			Request("POST", path, jsonType, "{"+strings.Repeat(`"a":1,`, 100000)+`"b":1}`),
			Request("PATCH", path, jsonType, strings.Repeat("[", 1<<20)),
		)
	}
	return all
}
