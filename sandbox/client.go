package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/oauth2"
)

// maxAnswer bounds what is read from the control socket, in bytes.
const maxAnswer = 16 << 20

// Client talks to the control socket of a running sandbox.
type Client struct {
	name string
	pid  int
	http *http.Client
}

// Open returns a client of the sandbox ("" is DefaultName). It returns ErrNotRunning when its outer process is not there.
func Open(name string) (*Client, error) {
	if name == "" {
		name = DefaultName
	}
	p, err := pathsOf(name)
	if err != nil {
		return nil, err
	}
	r, err := readRecord(p.record())
	if errors.Is(err, ErrNotRunning) {
		return nil, fmt.Errorf("%w: %s; `sluice sandbox up --name %s` starts it", ErrNotRunning, name, name)
	}
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", name, err)
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) { return dialUnix(ctx, p.control()) }
	return &Client{
		name: name, pid: r.Pid,
		http: &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}, Timeout: 30 * time.Second},
	}, nil
}

// dialUnix connects to a socket whose path may be longer than a socket address can hold.
func dialUnix(ctx context.Context, path string) (net.Conn, error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	var d net.Dialer
	return d.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)))
}

// listenUnix listens on a socket whose path may be longer than a socket address can hold.
func listenUnix(path string) (*net.UnixListener, error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)), Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false) // the name above holds no longer
	return l, nil
}

// call sends a request; in (or nil) and out (or nil) are JSON.
func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://sandbox"+path, body)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("asking sandbox %s: %w", c.name, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("asking sandbox %s: %w", c.name, err)
	}
	if resp.StatusCode >= 300 {
		return errors.New(strings.TrimSpace(string(text)))
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(text, out); err != nil {
		return fmt.Errorf("the answer of sandbox %s: %w", c.name, err)
	}
	return nil
}

// Status describes the sandbox now.
func (c *Client) Status(ctx context.Context) (*Status, error) {
	var s Status
	if err := c.call(ctx, http.MethodGet, "/status", nil, &s); err != nil {
		return nil, err
	}
	s.Pid = c.pid
	return &s, nil
}

// Token returns an access token of the workstation's admin, who owns the project, for calls from outside. It lives for an hour.
func (c *Client) Token(ctx context.Context) (*oauth2.Token, error) {
	t := new(oauth2.Token)
	if err := c.call(ctx, http.MethodPost, "/token", nil, t); err != nil {
		return nil, err
	}
	return t, nil
}

// TokenSource gives Token's tokens, a new one when the old one's hour is over, until ctx ends.
func (c *Client) TokenSource(ctx context.Context) oauth2.TokenSource {
	return oauth2.ReuseTokenSource(nil, tokenSource{ctx, c})
}

type tokenSource struct {
	ctx    context.Context // oauth2.TokenSource's Token has none
	client *Client
}

func (s tokenSource) Token() (*oauth2.Token, error) { return s.client.Token(s.ctx) }

// Console returns what a VM has written to its console so far (the last 256 KiB), also of one that has ended lately.
func (c *Client) Console(ctx context.Context, vm string) (string, error) {
	var text string
	err := c.call(ctx, http.MethodGet, "/vms/"+url.PathEscape(vm)+"/console", nil, &text)
	return text, err
}

// pidOf returns the VM's PID 1 as the outer process numbers it.
func (c *Client) pidOf(ctx context.Context, vm string) (int, error) {
	var pids map[string]int
	if err := c.call(ctx, http.MethodGet, "/pids", nil, &pids); err != nil {
		return 0, err
	}
	pid, ok := pids[vm]
	if !ok {
		return 0, fmt.Errorf("%w: %s", ErrNoVM, vm)
	}
	return pid, nil
}

// GetStatus describes the sandbox ("" is DefaultName). It returns ErrNotRunning when there is none.
func GetStatus(ctx context.Context, name string) (*Status, error) {
	c, err := Open(name)
	if err != nil {
		return nil, err
	}
	return c.Status(ctx)
}
