package remote

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
)

// ErrUnreachable is wrapped by Call when the right sluiced does not answer at
// the address. It is api/local's, so that callers ask one question.
var ErrUnreachable = local.ErrUnreachable

// dialTimeout bounds the connect and, again, the TLS handshake; the wait for
// the answer is bounded by the caller's ctx alone.
const dialTimeout = 5 * time.Second

// Client calls one sluiced and keeps its connections open. All methods may be
// called at the same time.
type Client struct {
	address string
	http    *http.Client
}

// NewClient makes a client of the sluiced at address (host:port); config says
// which sluiced is the right one and who calls. It does not connect yet.
func NewClient(address string, config *tls.Config) (*Client, error) {
	if _, port, err := net.SplitHostPort(address); err != nil || port == "" {
		return nil, fmt.Errorf("address of sluiced %q is not host:port", address)
	}
	transport := &http.Transport{
		// No proxy: sluiced is in the same network.
		DialContext:         (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSHandshakeTimeout: dialTimeout,
		MaxIdleConnsPerHost: 4,
		IdleConnTimeout:     time.Minute, // below the server's, so that the client closes first
		TLSClientConfig:     config,
	}
	return &Client{address: address, http: &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Call sends one request and decodes the answer's body into out (unless nil).
// A refusal by sluiced is an *api.Error; a sluiced that is away, is not the
// right one, does not take the caller's certificate, or goes away before it answered, is ErrUnreachable. ctx bounds
// the whole call. A call may reach sluiced twice when a kept connection breaks.
func (c *Client) Call(ctx context.Context, op string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return fmt.Errorf("encode %s: %w", op, err)
	}
	msg, err := json.Marshal(api.Request{Version: api.Version, Op: op, Body: body})
	if err != nil {
		return fmt.Errorf("encode %s: %w", op, err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+c.address+path(op), bytes.NewReader(msg))
	if err != nil {
		return fmt.Errorf("%s on %s: %w", op, c.address, err)
	}
	req.Header.Set("Content-Type", "application/json")
	// An empty value is not sent, but lets the transport repeat the call on a
	// new connection when sluiced was restarted behind a kept one.
	req.Header["Idempotency-Key"] = []string{}

	unreachable := func(err error) error {
		if ctx.Err() != nil {
			return fmt.Errorf("%s on %s: %w", op, c.address, ctx.Err())
		}
		return fmt.Errorf("%w: %s on %s: %w", ErrUnreachable, op, c.address, err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return unreachable(err)
	}
	defer resp.Body.Close()
	reply, err := io.ReadAll(io.LimitReader(resp.Body, api.MaxMessage+1))
	if err != nil {
		return unreachable(err)
	}
	if len(reply) > api.MaxMessage {
		return fmt.Errorf("answer to %s from %s is longer than %d bytes", op, c.address, api.MaxMessage)
	}
	var answer api.Response
	if err := json.Unmarshal(reply, &answer); err != nil {
		return unreachable(fmt.Errorf("HTTP status %s, and the answer is not sluiced's: %w", resp.Status, err))
	}
	if answer.Error != nil {
		return answer.Error
	}
	if resp.StatusCode != http.StatusOK {
		return unreachable(fmt.Errorf("HTTP status %s", resp.Status))
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(answer.Body, out); err != nil {
		return fmt.Errorf("answer to %s from %s: %w", op, c.address, err)
	}
	return nil
}
