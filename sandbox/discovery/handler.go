package discovery

import (
	"bytes"
	"io"
	"net/http"
)

// maxKept is how much of a body is kept for the check, in bytes. Longer JSON is not checked.
const maxKept = 8 << 20

// maxUpload is how much is kept of an upload: its metadata comes first.
const maxUpload = 1 << 20

// Handler returns next with every exchange checked; report gets what is wrong, one at a time for each exchange, before the
// connection is free for the next one.
func (c *Checker) Handler(next http.Handler, report func(Violation)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u := *r.URL
		e := &exchange{method: r.Method, url: &u, header: r.Header.Clone()}
		limit := maxKept
		if segments, err := split(u.EscapedPath()); err == nil {
			for _, route := range c.root.find(segments)[http.MethodPost] {
				if route.form == upload {
					limit = maxUpload
				}
			}
		}
		if e.continuesUpload() {
			limit = 0
		}
		body := &keeper{in: r.Body, limit: limit}
		r.Body = body
		out := &recorder{ResponseWriter: w}
		defer func() { // also after a panic, by which a handler cuts the connection
			if out.status == 0 && out.returned {
				out.status = http.StatusOK
			}
			if out.status > 0 && out.status < 300 && !body.ended && limit > 0 {
				_, _ = io.CopyN(io.Discard, body, int64(limit)) // what the handler did not look at is still said
			}
			e.body, e.whole = body.kept.Bytes(), body.ended && !body.cut
			e.status, e.replyHeader = out.status, out.Header()
			e.reply, e.replyWhole = out.kept.Bytes(), !out.cut && out.returned
			for _, v := range c.check(e) {
				report(v)
			}
		}()
		next.ServeHTTP(out, r)
		out.returned = true
	})
}

// keeper keeps the beginning of a request's body while it is read.
type keeper struct {
	in    io.ReadCloser
	limit int
	kept  bytes.Buffer
	cut   bool // there was more
	ended bool
}

func (k *keeper) Read(p []byte) (int, error) {
	n, err := k.in.Read(p)
	k.cut = keep(&k.kept, p[:n], k.limit) || k.cut
	k.ended = k.ended || err == io.EOF
	return n, err
}

func (k *keeper) Close() error { return k.in.Close() }

// keep adds p to b, up to limit bytes in all, and says whether something was left out.
func keep(b *bytes.Buffer, p []byte, limit int) bool {
	room := limit - b.Len()
	b.Write(p[:min(len(p), max(room, 0))])
	return len(p) > room
}

// recorder keeps a reply that is JSON.
type recorder struct {
	http.ResponseWriter
	status   int
	returned bool
	kept     bytes.Buffer
	cut      bool
}

func (r *recorder) WriteHeader(status int) {
	if r.status == 0 && status >= 200 {
		r.status = status
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(p []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	if mediaType(r.Header()) == "application/json" {
		r.cut = keep(&r.kept, p, maxKept) || r.cut
	}
	return r.ResponseWriter.Write(p)
}

// ReadFrom lets data of objects go from file to socket without a detour.
func (r *recorder) ReadFrom(src io.Reader) (int64, error) {
	if mediaType(r.Header()) == "application/json" {
		return io.Copy(struct{ io.Writer }{r}, src)
	}
	if r.status == 0 {
		r.status = http.StatusOK
	}
	return io.Copy(r.ResponseWriter, src)
}

// Unwrap is for http.ResponseController.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }
