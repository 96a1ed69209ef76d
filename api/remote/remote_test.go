package remote

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/api"
)

var key = []byte("0123456789abcdef0123456789abcdef")

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
	dir     string
	address string
	stop    func()
}

func (d *daemon) start(h func(context.Context, api.Request) (any, error)) string {
	d.t.Helper()
	cert, fp, err := Certificate(d.dir, []string{"localhost", "127.0.0.1"})
	if err != nil {
		d.t.Fatal(err)
	}
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
	go func() { done <- Server{Key: key, Handle: h}.Serve(ctx, l, cert) }()
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
	return fp
}

func client(t *testing.T, address, fp string, key []byte) *Client {
	t.Helper()
	c, err := NewClient(Options{Address: address, Fingerprint: fp, Key: key})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func TestCallOverTLS(t *testing.T) {
	d := &daemon{t: t, dir: t.TempDir()}
	fp := d.start(echo)
	c := client(t, d.address, strings.ToUpper(fp), key)

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
	d := &daemon{t: t, dir: t.TempDir()}
	c := dial(t, d)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := c.Call(ctx, "wait", nil, nil); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrUnreachable) {
		t.Errorf("got %v, want the deadline and not unreachable", err)
	}
}

func TestHandlerSeesCallerHangUp(t *testing.T) {
	ended, began := make(chan struct{}), make(chan struct{})
	d := &daemon{t: t, dir: t.TempDir()}
	fp := d.start(func(ctx context.Context, _ api.Request) (any, error) {
		close(began)
		<-ctx.Done()
		close(ended)
		return nil, ctx.Err()
	})
	c := client(t, d.address, fp, key)
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
	d := &daemon{t: t, dir: t.TempDir()}
	c := dial(t, d)
	for range 3 {
		if err := c.Call(t.Context(), "echo", api.Ack{}, nil); err != nil {
			t.Fatal(err)
		}
		d.stop()
		if err := c.Call(t.Context(), "echo", api.Ack{}, nil); !errors.Is(err, ErrUnreachable) {
			t.Fatalf("while sluiced is away: got %v, want ErrUnreachable", err)
		}
		d.start(echo) // same directory: same fingerprint
	}
}

func TestWhoIsRefused(t *testing.T) {
	d := &daemon{t: t, dir: t.TempDir()}
	fp := d.start(echo)
	other := strings.Repeat("ab", 32)

	if err := client(t, d.address, fp, []byte("another key")).Call(t.Context(), "echo", nil, nil); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("wrong key: got %v, want denied", err)
	}
	err := client(t, d.address, other, key).Call(t.Context(), "echo", nil, nil)
	if !errors.Is(err, ErrUnreachable) || !strings.Contains(err.Error(), fp) || !strings.Contains(err.Error(), other) {
		t.Errorf("wrong fingerprint: got %v, want ErrUnreachable that names both", err)
	}
	if _, err := tls.Dial("tcp", d.address, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12}); err == nil {
		t.Error("TLS 1.2 was accepted")
	}
}

func TestNewClientRefuses(t *testing.T) {
	good := Options{Address: "10.0.0.2:8443", Fingerprint: strings.Repeat("ab", 32), Key: key}
	for name, change := range map[string]func(*Options){
		"no port":           func(o *Options) { o.Address = "10.0.0.2" },
		"no address":        func(o *Options) { o.Address = "" },
		"short fingerprint": func(o *Options) { o.Fingerprint = "abcd" },
		"no hex":            func(o *Options) { o.Fingerprint = strings.Repeat("xy", 32) },
		"empty key":         func(o *Options) { o.Key = nil },
	} {
		o := good
		change(&o)
		if _, err := NewClient(o); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := NewClient(good); err != nil {
		t.Error(err)
	}
}

func TestCertificateIsKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tls")
	if _, err := Fingerprint(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("before the first start: got %v, want fs.ErrNotExist", err)
	}
	_, first, err := Certificate(dir, []string{"controller", "10.128.0.2"})
	if err != nil {
		t.Fatal(err)
	}
	_, second, err := Certificate(dir, nil)
	if err != nil || first != second {
		t.Errorf("second call: got %s, %v, want %s", second, err, first)
	}
	if fp, err := Fingerprint(dir); err != nil || fp != first {
		t.Errorf("Fingerprint: got %s, %v, want %s", fp, err, first)
	}
	path := filepath.Join(dir, pemName)
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := st.Mode().Perm(); got != 0o600 {
		t.Errorf("mode %v, want 0600", got)
	}
	if err := os.WriteFile(path, []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Certificate(dir, nil); err == nil {
		t.Error("a damaged certificate was replaced or accepted")
	}
}

// post sends a raw body with the right token.
func post(t testing.TB, h http.Handler, method, path string, body io.Reader) (int, api.Response) {
	t.Helper()
	tok, err := token(key)
	if err != nil {
		t.Fatal(err)
	}
	req := httptest.NewRequest(method, path, body)
	req.Header.Set("Authorization", "Bearer "+tok)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	var resp api.Response
	if err := json.Unmarshal(w.Body.Bytes(), &resp); err != nil {
		t.Fatalf("answer %q: %v", w.Body, err)
	}
	return w.Code, resp
}

func TestHostileRequests(t *testing.T) {
	h, err := Server{Key: key, Handle: echo}.Handler()
	if err != nil {
		t.Fatal(err)
	}
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
	h, err := Server{Key: key, Handle: echo}.Handler()
	if err != nil {
		t.Fatal(err)
	}
	body := &counting{Reader: zeros{}}
	for _, auth := range []string{"", "Bearer ", "Bearer 00", "Basic eA=="} {
		req := httptest.NewRequest("POST", Path, body)
		req.Header.Set("Authorization", auth)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req)
		if w.Code != http.StatusUnauthorized || body.n != 0 {
			t.Errorf("%q: got %d after %d bytes, want 401 after 0", auth, w.Code, body.n)
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
	d := &daemon{t: t, dir: t.TempDir()}
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
	d := &daemon{t: t, dir: t.TempDir()}
	fp := d.start(echo)
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
	if err := client(t, d.address, fp, key).Call(t.Context(), "echo", api.JobID{JobID: 7}, nil); err != nil {
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
	h, err := Server{Key: key, Handle: echo}.Handler()
	if err != nil {
		f.Fatal(err)
	}
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
	fp := d.start(echo)
	return client(t, d.address, fp, key)
}
