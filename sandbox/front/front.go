// Package front stands before the sandbox's services: it injects the faults of the HTTP chain, and keeps clients that are slow or
// send nonsense from harming anything.
package front

import (
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/sandbox/faults"
)

// Limits bounds what a client may take. The zero value is Defaults.
type Limits struct {
	Header time.Duration // for a request's header to arrive
	Stall  time.Duration // between two pieces of a body
	Body   time.Duration // for the whole body, but of uploads
	Reply  time.Duration // for the whole exchange; an upload or download is part of it
	URL    int           // bytes of a request's URL
}

// Defaults are generous: nothing that the product or Google's libraries do comes near.
var Defaults = Limits{Header: 10 * time.Second, Stall: 30 * time.Second, Body: time.Minute, Reply: time.Hour, URL: 16 << 10}

// Front is what all services share.
type Front struct {
	Faults *faults.Set  // or nil
	Clock  clock.Clock  // the cloud's, for Date headers; nil: clock.System
	Log    *slog.Logger // nil: nowhere
	Limits Limits
}

func (f *Front) limits() Limits {
	if f.Limits == (Limits{}) {
		return Defaults
	}
	return f.Limits
}

// Server returns a server with the limits that only a server can keep.
func (f *Front) Server(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: f.limits().Header, IdleTimeout: 5 * time.Minute, MaxHeaderBytes: 64 << 10,
		DisableGeneralOptionsHandler: true, // a service answers, in its form
	}
}

// Handler puts the front before a service of package faults ("compute" …).
func (f *Front) Handler(service string, next http.Handler) http.Handler {
	h := &handler{Front: *f, service: service, next: next}
	h.Limits = f.limits()
	if h.Clock == nil {
		h.Clock = clock.System
	}
	if h.Log == nil {
		h.Log = slog.New(slog.DiscardHandler)
	}
	return h
}

type handler struct {
	Front
	service string
	next    http.Handler
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	defer h.survive(w, r)
	w.Header().Set("Date", h.Clock.Now().UTC().Format(http.TimeFormat))
	if len(r.RequestURI) > h.Limits.URL {
		h.refuse(w, r, http.StatusRequestURITooLong, "The requested URL is too large to process.")
		return
	}
	method := faults.MethodOf(h.service, r)
	defer h.bound(w, r, method)()
	if !h.knownContent(w, r, method) {
		return
	}

	if hit, ok := h.Faults.Take(faults.APILatency, h.service, method); ok {
		d := hit.Latency()
		hit.Note(line(r), fmt.Sprintf("waited %v", d.Round(time.Millisecond)))
		select {
		case <-h.Clock.After(d):
		case <-r.Context().Done():
			return
		}
	}
	if hit, ok := h.Faults.Take(faults.APIStatus, h.service, method); ok {
		hit.Note(line(r), "answered "+hit.Value)
		_, _ = io.CopyN(io.Discard, r.Body, drain) // a client that still sends would see a broken connection instead
		h.refuse(w, r, hit.Int(), "")
		return
	}
	if hit, ok := h.Faults.Take(faults.APILost, h.service, method); ok {
		h.lose(hit, w, r)
		return
	}
	h.next.ServeHTTP(w, r)
}

// drain is how much of a refused request's body is read, in bytes: a chunk of an upload with room to spare.
const drain = 32 << 20

// line is the request as the journal shows it.
func line(r *http.Request) string {
	const longest = 400
	text := r.Method + " " + r.URL.RequestURI()
	if len(text) > longest {
		text = text[:longest] + "…"
	}
	return strings.ToValidUTF8(text, "?")
}

// survive answers for a service that panics, so that the connection and the sandbox live on.
func (h *handler) survive(w http.ResponseWriter, r *http.Request) {
	p := recover()
	if p == nil {
		return
	}
	if p == http.ErrAbortHandler {
		panic(p)
	}
	h.Log.Error("a service panicked", "service", h.service, "request", line(r), "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
	h.refuse(w, r, http.StatusInternalServerError, "")
}

// bound keeps the time that the exchange may take. What it returns ends it.
func (h *handler) bound(w http.ResponseWriter, r *http.Request, method string) (end func()) {
	if h.service == "metadata" {
		return func() {} // wait_for_change may wait for ever, and there are no bodies
	}
	now := time.Now()
	control := http.NewResponseController(w)
	// Errors: a recorder in a test has no deadlines.
	_ = control.SetWriteDeadline(now.Add(h.Limits.Reply))
	b := &patientBody{ReadCloser: r.Body, control: control, stall: h.Limits.Stall, end: now.Add(h.Limits.Body)}
	if h.service == "storage" && method == "objects.insert" {
		b.end = now.Add(h.Limits.Reply)
	}
	r.Body = b
	return func() {
		if !b.done {
			// The server reads a little of what is left before it takes the next request.
			_ = control.SetReadDeadline(time.Now().Add(min(h.Limits.Stall, 5*time.Second)))
		}
	}
}

// patientBody is a request's body, read with deadlines.
type patientBody struct {
	io.ReadCloser
	control *http.ResponseController
	stall   time.Duration
	end     time.Time
	done    bool
}

func (b *patientBody) Read(p []byte) (int, error) {
	if b.done {
		return b.ReadCloser.Read(p)
	}
	deadline := time.Now().Add(b.stall)
	if deadline.After(b.end) {
		deadline = b.end
	}
	_ = b.control.SetReadDeadline(deadline)
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.done = true
		// From here on the server reads to see whether the client goes away: that may take as long as the reply.
		_ = b.control.SetReadDeadline(time.Time{})
	}
	return n, err
}

// knownContent refuses a body of a type that Google's services do not take.
func (h *handler) knownContent(w http.ResponseWriter, r *http.Request, method string) bool {
	upload := h.service == "storage" && (method == "objects.insert" || method == "other")
	given := r.Header.Get("Content-Type")
	if given == "" || r.ContentLength == 0 || upload || h.service == "metadata" || h.service == "iam" && method == "token" {
		return true
	}
	media, _, err := mime.ParseMediaType(given)
	switch {
	case err == nil && (media == "application/json" || strings.HasSuffix(media, "+json")):
		return true
	case media == "application/x-www-form-urlencoded":
		h.refuse(w, r, http.StatusBadRequest, "This API does not support parsing form-encoded input.")
	default:
		h.refuse(w, r, http.StatusBadRequest, "Unsupported content with type: "+given)
	}
	return false
}
