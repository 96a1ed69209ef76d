package front_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/front"
)

// service echoes bodies and remembers what it handled.
type service struct {
	mu      sync.Mutex
	handled []string
	ended   chan error // of reading each body
}

func (s *service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	s.mu.Lock()
	s.handled = append(s.handled, r.Method+" "+r.URL.Path)
	s.mu.Unlock()
	select {
	case s.ended <- err:
	default:
	}
	if strings.HasSuffix(r.URL.Path, "/panic") {
		panic("a bug")
	}
	fmt.Fprintf(w, "handled %d bytes of %s", len(body), r.Method)
}

func (s *service) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.handled)
}

type world struct {
	faults  *faults.Set
	service *service
	url     string
	address string
	http    *http.Client
}

// start serves a service with a front; the client opens a connection a request, as a reused one is tried again by itself.
func start(t *testing.T, name string, limits front.Limits) *world {
	t.Helper()
	w := &world{faults: new(faults.Set), service: &service{ended: make(chan error, 100)}}
	f := &front.Front{Faults: w.faults, Clock: w.faults.Clock(clock.System), Limits: limits}
	server := httptest.NewUnstartedServer(nil)
	server.Config = f.Server(f.Handler(name, w.service))
	server.Start()
	t.Cleanup(server.Close)
	w.url, w.address = server.URL, server.Listener.Addr().String()
	w.http = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	return w
}

func (w *world) set(t *testing.T, key, value string) {
	t.Helper()
	if err := w.faults.Set(key, value); err != nil {
		t.Fatal(err)
	}
}

func (w *world) do(t *testing.T, method, path, body string) (*http.Response, string, error) {
	t.Helper()
	r, err := http.NewRequest(method, w.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	resp, err := w.http.Do(r)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp, string(text), err
}

const instances = "/compute/v1/projects/p/zones/z/instances"

func TestStatusInTheServicesForm(t *testing.T) {
	for _, tt := range []struct{ service, path, status, contentType, want string }{
		{"compute", instances, "503", "application/json", `{"error":{"code":503,"message":"The service is currently unavailable.","errors":[{"message":"The service is currently unavailable.","domain":"global","reason":"backendError"}]}}`},
		{"compute", instances, "403", "application/json", `{"error":{"code":403,"message":"Rate Limit Exceeded","errors":[{"message":"Rate Limit Exceeded","domain":"usageLimits","reason":"rateLimitExceeded"}]}}`},
		{"storage", "/storage/v1/b/x/o", "429", "application/json", `{"error":{"code":429,"message":"Too many requests. Please retry later.","errors":[{"message":"Too many requests. Please retry later.","domain":"usageLimits","reason":"rateLimitExceeded"}]}}`},
		{"storage", "/bucket/object", "503", "application/xml", "<Error><Code>ServiceUnavailable</Code><Message>The service is currently unavailable.</Message></Error>"},
		{"lustre", "/v1/projects/p/locations/z/instances", "429", "application/json", `{"error":{"code":429,"message":"Too many requests. Please retry later.","status":"RESOURCE_EXHAUSTED"}}`},
		{"iam", "/v1/projects/p/roles", "504", "application/json", `{"error":{"code":504,"message":"Deadline exceeded.","status":"DEADLINE_EXCEEDED"}}`},
		{"metadata", "/computeMetadata/v1/instance/id", "503", "text/html", "503 The service is currently unavailable."},
		{"compute", instances, "502", "text/html", "<!DOCTYPE html>"},
	} {
		t.Run(tt.service+" "+tt.status, func(t *testing.T) {
			w := start(t, tt.service, front.Limits{})
			w.set(t, "api."+tt.service+".status", tt.status+",count=1")
			resp, body, err := w.do(t, "GET", tt.path, "")
			if err != nil {
				t.Fatal(err)
			}
			if fmt.Sprint(resp.StatusCode) != tt.status || !strings.HasPrefix(resp.Header.Get("Content-Type"), tt.contentType) {
				t.Errorf("status %s, type %s", resp.Status, resp.Header.Get("Content-Type"))
			}
			if tt.contentType == "application/json" {
				var got, want any
				if err := errors.Join(json.Unmarshal([]byte(body), &got), json.Unmarshal([]byte(tt.want), &want)); err != nil {
					t.Fatalf("%v: %s", err, body)
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("body (-want +got):\n%s", diff)
				}
			} else if !strings.Contains(body, tt.want) {
				t.Errorf("body %q, want %q in it", body, tt.want)
			}
			if n := w.service.count(); n != 0 {
				t.Errorf("the service handled %d requests", n)
			}
			if resp, _, err := w.do(t, "GET", tt.path, ""); err != nil || resp.StatusCode != 200 {
				t.Errorf("after the fault: %v, %v", resp, err)
			}
			log := w.faults.Log().Entries
			if e := log[1]; e.Request != "GET "+tt.path || e.What != "answered "+tt.status {
				t.Errorf("journal: %+v", e)
			}
		})
	}
}

func TestLost(t *testing.T) {
	for _, tt := range []struct {
		value   string
		handled int
		body    string // what of the reply arrives
		note    string
	}{
		{"request", 0, "", "cut before it was handled"},
		{"reply", 1, "", "handled with status 200, the reply of 23 bytes lost"},
		{"half", 1, "handled 2 by", "cut after 12 bytes of the reply"},
	} {
		t.Run(tt.value, func(t *testing.T) {
			w := start(t, "compute", front.Limits{})
			w.set(t, "api.compute.instances.insert.lost", tt.value+",count=1")
			resp, body, err := w.do(t, "POST", instances, "{}")
			if err == nil || body != tt.body {
				t.Errorf("the client got %v with %q, and error %v", resp, body, err)
			}
			if got := w.service.count(); got != tt.handled {
				t.Errorf("%d handled, want %d", got, tt.handled)
			}
			log := w.faults.Log().Entries
			if e := log[len(log)-1]; e.What != tt.note {
				t.Errorf("journal: %+v, want %q", e, tt.note)
			}
			if _, body, err := w.do(t, "POST", instances, "{}"); err != nil || body != "handled 2 bytes of POST" {
				t.Errorf("after the fault: %q, %v", body, err)
			}
		})
	}
}

func TestLatencyIsOfTheNamedMethodOnly(t *testing.T) {
	w := start(t, "compute", front.Limits{})
	w.set(t, "api.compute.instances.list.latency", "1h")
	if _, _, err := w.do(t, "POST", instances, "{}"); err != nil {
		t.Error(err)
	}
	w.set(t, "api.compute.instances.list.latency", "1ms")
	if _, _, err := w.do(t, "GET", instances, ""); err != nil {
		t.Error(err)
	}
	log := w.faults.Log().Entries
	if e := log[len(log)-1]; e.What != "waited 1ms" {
		t.Errorf("journal: %+v", e)
	}
}

func TestDateIsTheClouds(t *testing.T) {
	w := start(t, "compute", front.Limits{})
	w.set(t, "clock.skew", "-2h")
	resp, _, err := w.do(t, "GET", instances, "")
	if err != nil {
		t.Fatal(err)
	}
	at, err := http.ParseTime(resp.Header.Get("Date"))
	if d := time.Since(at); err != nil || d < 2*time.Hour || d > 2*time.Hour+time.Minute {
		t.Errorf("Date %s: %v behind, want 2h; %v", resp.Header.Get("Date"), d, err)
	}
}

func TestAPanicIsAnError(t *testing.T) {
	w := start(t, "lustre", front.Limits{})
	resp, body, err := w.do(t, "GET", "/v1/projects/p/panic", "")
	if err != nil || resp.StatusCode != 500 || !strings.Contains(body, `"INTERNAL"`) {
		t.Errorf("got %v, %q, %v", resp, body, err)
	}
}

// send writes raw bytes and returns what comes back until the server cuts the connection.
func (w *world) send(t *testing.T, raw string) (answer string, took time.Duration) {
	t.Helper()
	began := time.Now()
	c, err := net.Dial("tcp", w.address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, raw); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(bufio.NewReader(c))
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		t.Fatalf("the server holds on to a client that sends nothing; so far: %q", text)
	}
	return string(text), time.Since(began)
}

func TestSlowClientsAreCutOff(t *testing.T) {
	limits := front.Limits{Header: 100 * time.Millisecond, Stall: 100 * time.Millisecond, Body: time.Second, Reply: time.Minute, URL: 1000}
	t.Run("header", func(t *testing.T) {
		w := start(t, "compute", limits)
		w.send(t, "GET "+instances+" HTTP/1.1\r\nHost: x\r\nX-Slow: ")
	})
	for _, name := range []string{"compute", "lustre", "iam"} {
		t.Run("body of "+name, func(t *testing.T) {
			w := start(t, name, limits)
			w.send(t, "POST /v1/projects/p/x HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nten bytes.")
			if err := <-w.service.ended; err == nil {
				t.Error("the service read the whole body")
			}
		})
	}
	t.Run("drops of a body", func(t *testing.T) {
		w := start(t, "compute", limits)
		c, err := net.Dial("tcp", w.address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n", instances)
		drop := time.NewTicker(20 * time.Millisecond)
		defer drop.Stop()
		for {
			select {
			case err := <-w.service.ended:
				if err == nil {
					t.Error("the service read the whole body")
				}
				return
			case <-drop.C:
				_, _ = io.WriteString(c, "x") // the server may have cut it
			}
		}
	})
	t.Run("a service that does not read it", func(t *testing.T) {
		w := start(t, "compute", limits)
		w.set(t, "api.compute.status", "503")
		answer, _ := w.send(t, "POST "+instances+" HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nten bytes.")
		if !strings.Contains(answer, "503") {
			t.Errorf("answer %q", answer)
		}
	})
}

// A handler may take longer than a body: the deadline of the body must not end it.
func TestTheReplyMayTakeLongerThanTheBody(t *testing.T) {
	limits := front.Limits{Header: time.Minute, Stall: 50 * time.Millisecond, Body: 50 * time.Millisecond, Reply: time.Minute, URL: 1000}
	f := &front.Front{Limits: limits}
	ended := make(chan error, 1)
	server := httptest.NewServer(f.Handler("compute", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		timer := time.NewTimer(300 * time.Millisecond)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-r.Context().Done():
		}
		ended <- r.Context().Err()
	})))
	defer server.Close()
	resp, err := http.Post(server.URL+instances, "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if err := <-ended; err != nil {
		t.Errorf("the request ended while it was handled: %v", err)
	}
}

func TestBadRequests(t *testing.T) {
	w := start(t, "lustre", front.Limits{})
	for _, tt := range []struct{ name, raw, want string }{
		{"long URL", "GET /v1/" + strings.Repeat("x", 20000) + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", `"code": 414`},
		{"long header", "GET /v1/ HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 100<<10) + "\r\nConnection: close\r\n\r\n", "431"},
		{"form", "POST /v1/ HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: 3\r\nConnection: close\r\n\r\na=b", "form-encoded input"},
		{"text", "POST /v1/ HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: 3\r\nConnection: close\r\n\r\na=b", "Unsupported content with type: text/plain"},
		{"OPTIONS *", "OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "handled 0 bytes of OPTIONS"},
		{"absolute form", "GET http://lustre.googleapis.com/v1/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "handled 0 bytes of GET"},
		{"no HTTP", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "400"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if answer, _ := w.send(t, tt.raw); !strings.Contains(answer, tt.want) {
				t.Errorf("answer %.300q, want %q in it", answer, tt.want)
			}
		})
	}
}
