package remote

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/trust"
)

// echo answers with the request's body; "refuse" and "wait" do what they say.
func echo(ctx context.Context, req api.Request) (any, error) {
	switch req.Op {
	case "refuse":
		return nil, &api.Error{Code: api.CodeNotFound, Message: "no such job", Hint: "ask squeue"}
	case "wait":
		<-ctx.Done()
		return nil, ctx.Err()
	case "big":
		return strings.Repeat("x", api.MaxMessage), nil
	}
	return req.Body, nil
}

// daemon is a sluiced over real TCP and TLS that can be stopped and started again.
type daemon struct {
	t       *testing.T
	ca      *trust.CA
	address string
	stop    func()
	revoked atomic.Bool
}

func newDaemon(t *testing.T) *daemon {
	t.Helper()
	ca, err := trust.OpenCA(t.TempDir(), "c", clock.System)
	if err != nil {
		t.Fatal(err)
	}
	return &daemon{t: t, ca: ca}
}

func (d *daemon) start(h Handler) {
	d.t.Helper()
	if d.address == "" {
		d.address = "127.0.0.1:0"
	}
	l, err := net.Listen("tcp", d.address)
	if err != nil {
		d.t.Fatal(err)
	}
	d.address = l.Addr().String()
	ctx, cancel := context.WithCancel(d.t.Context())
	done := make(chan error, 1)
	s := Server{TLS: d.ca.ServerTLS([]string{"localhost"}), Admit: func(c *x509.Certificate) (Handler, error) {
		if d.revoked.Load() || c.Subject.CommonName != "n1" {
			return nil, api.Errorf(api.CodeUnenrolled, "revoked")
		}
		return h, nil
	}, Enrol: func(_ context.Context, from string, req api.Request) (any, error) {
		return api.Certificate{Chain: []byte(from)}, nil
	}}
	go func() { done <- s.Serve(ctx, l) }()
	var once sync.Once
	d.stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				d.t.Errorf("Serve: %v", err)
			}
		})
	}
	d.t.Cleanup(d.stop)
}

// credentials are an agent's, with a certificate of ca.
func credentials(t *testing.T, ca *trust.CA) *trust.Credentials {
	t.Helper()
	c, err := trust.LoadCredentials(filepath.Join(t.TempDir(), "agent.pem"), "1")
	if err != nil {
		t.Fatal(err)
	}
	request, _, err := c.Request()
	if err != nil {
		t.Fatal(err)
	}
	key, _, err := trust.ParseRequest(request)
	if err != nil {
		t.Fatal(err)
	}
	chain, _, err := ca.Sign(key, trust.Agent{Cluster: "c", Role: api.RoleCompute, Instance: "1", Node: "n1"})
	if err == nil {
		err = c.Accept(chain, ca.Fingerprint())
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// client calls d; c may be nil.
func (d *daemon) client(c *trust.Credentials) *Client {
	d.t.Helper()
	config, err := trust.ClientTLS(d.ca.Fingerprint(), c)
	if err != nil {
		d.t.Fatal(err)
	}
	client, err := NewClient(d.address, config)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(client.Close)
	return client
}

func TestCallOverTLS(t *testing.T) {
	d := newDaemon(t)
	c := dial(t, d)

	var got api.JobID
	if err := c.Call(t.Context(), "echo", api.JobID{JobID: 7}, &got); err != nil {
		t.Fatal(err)
	}
	if want := (api.JobID{JobID: 7}); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
	err := c.Call(t.Context(), "refuse", nil, nil)
	want := &api.Error{Code: api.CodeNotFound, Message: "no such job", Hint: "ask squeue"}
	var ae *api.Error
	if !errors.As(err, &ae) || cmp.Diff(want, ae) != "" {
		t.Errorf("got %v, want %v", err, want)
	}
	if err := c.Call(t.Context(), "big", nil, nil); err == nil || errors.Is(err, ErrUnreachable) {
		t.Errorf("an answer above the limit: got %v, want an error of its own", err)
	}
}

func TestCallEndsWithItsContext(t *testing.T) {
	d := newDaemon(t)
	c := dial(t, d)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := c.Call(ctx, "wait", nil, nil); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrUnreachable) {
		t.Errorf("got %v, want the deadline and not unreachable", err)
	}
}

func TestHandlerSeesCallerHangUp(t *testing.T) {
	ended, began := make(chan struct{}), make(chan struct{})
	d := newDaemon(t)
	d.start(func(ctx context.Context, _ api.Request) (any, error) {
		close(began)
		<-ctx.Done()
		close(ended)
		return nil, ctx.Err()
	})
	c := d.client(credentials(t, d.ca))
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-began; cancel() }()
	c.Call(ctx, "x", nil, nil)
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("the handler's context did not end")
	}
}

func TestRestartBehindAKeptConnection(t *testing.T) {
	d := newDaemon(t)
	c := dial(t, d)
	for range 3 {
		if err := c.Call(t.Context(), "echo", api.Ack{}, nil); err != nil {
			t.Fatal(err)
		}
		d.stop()
		if err := c.Call(t.Context(), "echo", api.Ack{}, nil); !errors.Is(err, ErrUnreachable) {
			t.Fatalf("while sluiced is away: got %v, want ErrUnreachable", err)
		}
		d.start(echo)
	}
}

func TestWhoIsRefused(t *testing.T) {
	d := newDaemon(t)
	d.start(echo)
	other := newDaemon(t)
	calls := func(c *trust.Credentials) error { return d.client(c).Call(t.Context(), "echo", nil, nil) }
	if err := calls(credentials(t, d.ca)); err != nil {
		t.Fatal(err)
	}
	if err := calls(nil); api.CodeOf(err) != api.CodeUnenrolled {
		t.Errorf("no certificate: got %v, want unenrolled", err)
	}
	if err := calls(credentials(t, other.ca)); !errors.Is(err, ErrUnreachable) {
		t.Errorf("another authority's certificate: got %v, want unreachable", err)
	}
	// Revoked while its connection is open.
	c := d.client(credentials(t, d.ca))
	if err := c.Call(t.Context(), "echo", nil, nil); err != nil {
		t.Fatal(err)
	}
	d.revoked.Store(true)
	if err := c.Call(t.Context(), "echo", nil, nil); api.CodeOf(err) != api.CodeUnenrolled {
		t.Errorf("a revoked certificate: got %v, want unenrolled", err)
	}

	config, err := trust.ClientTLS(other.ca.Fingerprint(), nil)
	if err != nil {
		t.Fatal(err)
	}
	wrong, err := NewClient(d.address, config)
	if err != nil {
		t.Fatal(err)
	}
	err = wrong.Call(t.Context(), "echo", nil, nil)
	if !errors.Is(err, ErrUnreachable) || !strings.Contains(err.Error(), d.ca.Fingerprint()) || !strings.Contains(err.Error(), other.ca.Fingerprint()) {
		t.Errorf("another sluiced than pinned: got %v, want ErrUnreachable that names both", err)
	}
	for _, address := range []string{"", "10.0.0.2", "10.0.0.2:"} {
		if _, err := NewClient(address, config); err == nil {
			t.Errorf("address %q: no error", address)
		}
	}
}

// Without a certificate nothing but enrolment is answered, and with any other
// operation not that either.
func TestEnrolment(t *testing.T) {
	d := newDaemon(t)
	d.start(echo)
	var got api.Certificate
	if err := d.client(nil).Call(t.Context(), api.OpAgentEnrol, api.EnrolRequest{}, &got); err != nil || string(got.Chain) != "127.0.0.1" {
		t.Errorf("got %q, %v, want the caller's address", got.Chain, err)
	}
	h := Server{Enrol: func(context.Context, string, api.Request) (any, error) { return api.Ack{}, nil }}.Handler()
	for name, tt := range map[string]struct {
		body   io.Reader
		status int
		fails  bool
	}{
		"enrolment":         {strings.NewReader(`{"v":1,"op":"agent.enroll"}`), 200, false},
		"one version older": {strings.NewReader(`{"v":0,"op":"agent.enroll"}`), 200, false},
		"one version newer": {strings.NewReader(`{"v":2,"op":"agent.enroll"}`), 200, false},
		"a later version":   {strings.NewReader(`{"v":3,"op":"agent.enroll"}`), 400, true},
		"another operation": {strings.NewReader(`{"v":1,"op":"agent.report"}`), 200, true},
		"too long":          {io.MultiReader(strings.NewReader(`{"v":1,"op":"`), io.LimitReader(zeros{}, maxEnrol)), 413, true},
	} {
		req := httptest.NewRequest("POST", EnrolPath, tt.body)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req)
		var resp api.Response
		if err := json.Unmarshal(w.Body.Bytes(), &resp); err != nil || w.Code != tt.status || (resp.Error != nil) != tt.fails {
			t.Errorf("%s: got %d %s, %v", name, w.Code, w.Body, err)
		}
	}
}

// post sends a raw body as an agent whose certificate was verified.
func post(t testing.TB, h http.Handler, method, path string, body io.Reader) (int, api.Response) {
	t.Helper()
	req := httptest.NewRequest(method, path, body)
	leaf := &x509.Certificate{}
	req.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{leaf}, VerifiedChains: [][]*x509.Certificate{{leaf}}}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	var resp api.Response
	if err := json.Unmarshal(w.Body.Bytes(), &resp); err != nil {
		t.Fatalf("answer %q: %v", w.Body, err)
	}
	return w.Code, resp
}

// admitAll has every certificate's holder answered by echo.
var admitAll = Server{Admit: func(*x509.Certificate) (Handler, error) { return echo, nil }}

func TestHostileRequests(t *testing.T) {
	h := admitAll.Handler()
	huge := io.MultiReader(strings.NewReader(`{"v":1,"op":"echo","body":"`), io.LimitReader(zeros{}, api.MaxMessage))
	for name, tt := range map[string]struct {
		method, path string
		body         io.Reader
		status       int
	}{
		"not JSON":      {"POST", Path, strings.NewReader("{"), 400},
		"two values":    {"POST", Path, strings.NewReader(`{"v":1}{"v":1}`), 400},
		"wrong type":    {"POST", Path, strings.NewReader(`{"v":"1","op":7}`), 400},
		"deep nesting":  {"POST", Path, strings.NewReader(strings.Repeat("[", 1<<20)), 400},
		"empty":         {"POST", Path, strings.NewReader(""), 400},
		"old version":   {"POST", Path, strings.NewReader(`{"v":-1,"op":"echo"}`), 400},
		"new version":   {"POST", Path, strings.NewReader(`{"v":99,"op":"echo"}`), 400},
		"too long":      {"POST", Path, huge, 413},
		"GET":           {"GET", Path, nil, 405},
		"another path":  {"POST", "/v1/call/../../etc", strings.NewReader("{}"), 404},
		"well-formed":   {"POST", Path, strings.NewReader(`{"v":1,"op":"echo","body":{}}`), 200},
		"unknown field": {"POST", Path, strings.NewReader(`{"v":1,"op":"echo","new":1,"body":{}}`), 200},
	} {
		t.Run(name, func(t *testing.T) {
			status, resp := post(t, h, tt.method, tt.path, tt.body)
			if status != tt.status || (resp.Error == nil) != (tt.status == 200) {
				t.Errorf("got %d %v, want %d", status, resp.Error, tt.status)
			}
		})
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = '0'
	}
	return len(p), nil
}

// A stranger's body is not read at all.
func TestStrangersBodyIsNotRead(t *testing.T) {
	h := admitAll.Handler()
	body := &counting{Reader: zeros{}}
	for name, state := range map[string]*tls.ConnectionState{
		"no TLS": nil, "no certificate": {}, "a certificate that was not verified": {PeerCertificates: []*x509.Certificate{{}}},
	} {
		req := httptest.NewRequest("POST", Path, body)
		req.TLS = state
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req)
		if w.Code != http.StatusUnauthorized || body.n != 0 {
			t.Errorf("%s: got %d after %d bytes, want 401 after 0", name, w.Code, body.n)
		}
	}
}

type counting struct {
	io.Reader
	n int
}

func (c *counting) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n += n
	return n, err
}

func TestManyCallsAtOnce(t *testing.T) {
	d := newDaemon(t)
	c := dial(t, d)
	var wg sync.WaitGroup
	for i := range uint32(50) {
		wg.Go(func() {
			var got api.JobID
			if err := c.Call(t.Context(), "echo", api.JobID{JobID: i}, &got); err != nil || got.JobID != i {
				t.Errorf("call %d: got %v, %v", i, got, err)
			}
		})
	}
	wg.Wait()
}

// A flood of connections that prove nothing keeps neither its own address nor
// another's out, and does not pile up.
func TestFloodOfStrangers(t *testing.T) {
	d := newDaemon(t)
	c := dial(t, d)
	const flood = 10 * maxStrangers
	var open []net.Conn
	defer func() {
		for _, c := range open {
			c.Close()
		}
	}()
	for range flood {
		c, err := net.Dial("tcp", d.address)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
	}
	if err := c.Call(t.Context(), "echo", api.JobID{JobID: 7}, nil); err != nil {
		t.Errorf("a call in the flood: %v", err)
	}
	closed := 0
	for _, c := range open[:flood-maxStrangers] {
		c.SetReadDeadline(time.Now().Add(readTimeout / 2))
		if _, err := c.Read(make([]byte, 1)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			closed++
		} else {
			break
		}
	}
	if want := flood - maxStrangers; closed != want {
		t.Errorf("%d connections were closed, want %d", closed, want)
	}
}

func FuzzAnswer(f *testing.F) {
	f.Add([]byte(`{"v":1,"op":"echo","body":{"job_id":1}}`))
	f.Add([]byte(`{"v":1,"op":"refuse"}`))
	f.Add([]byte(`{"v":1e9}`))
	f.Add([]byte("\x00"))
	h := admitAll.Handler()
	f.Fuzz(func(t *testing.T, body []byte) {
		if bytes.Contains(body, []byte("wait")) || bytes.Contains(body, []byte(`\u`)) {
			return // that operation waits for its caller
		}
		post(t, h, "POST", Path, bytes.NewReader(body)) // fails unless the answer is an api.Response
	})
}

// dial starts d and returns a client of it.
func dial(t *testing.T, d *daemon) *Client {
	t.Helper()
	d.start(echo)
	return d.client(credentials(t, d.ca))
}
