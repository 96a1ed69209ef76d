package front

import (
	"fmt"
	"net/http"
	"strconv"

	"github.com/sluicehpc/sluice/sandbox/faults"
)

// lose cuts the connection where the fault says.
func (h *handler) lose(hit faults.Hit, w http.ResponseWriter, r *http.Request) {
	switch hit.Value {
	case "request":
		hit.Note(line(r), "cut before it was handled")
	case "reply":
		lost := &lostReply{header: w.Header()}
		h.next.ServeHTTP(lost, r)
		hit.Note(line(r), fmt.Sprintf("handled with status %d, the reply of %d bytes lost", lost.status(), lost.size))
	case "half":
		half := &halfReply{ResponseWriter: w}
		h.next.ServeHTTP(half, r)
		_ = http.NewResponseController(w).Flush() // the client may be gone
		hit.Note(line(r), fmt.Sprintf("cut after %d bytes of the reply", half.sent))
	}
	panic(http.ErrAbortHandler) // net/http cuts the connection
}

// lostReply swallows a reply.
type lostReply struct {
	header http.Header
	code   int
	size   int64
}

func (l *lostReply) Header() http.Header { return l.header }

func (l *lostReply) WriteHeader(code int) {
	if l.code == 0 && code >= 200 {
		l.code = code
	}
}

func (l *lostReply) Write(p []byte) (int, error) {
	l.size += int64(len(p))
	return len(p), nil
}

func (l *lostReply) status() int {
	if l.code == 0 {
		return http.StatusOK
	}
	return l.code
}

// halfReply sends half of a reply: of its Content-Length when it has one, else of the first piece.
type halfReply struct {
	http.ResponseWriter
	sent  int64
	limit int64 // of sent; 0: not known yet
}

func (h *halfReply) Write(p []byte) (int, error) {
	if h.limit == 0 {
		n, err := strconv.ParseInt(h.Header().Get("Content-Length"), 10, 64)
		if err != nil {
			n = int64(len(p))
			h.Header().Set("Content-Length", strconv.FormatInt(n, 10)) // or the client could not see that it is half
		}
		h.limit = n/2 + 1
	}
	n := min(int64(len(p)), h.limit-h.sent)
	h.sent += n
	if n > 0 {
		_, _ = h.ResponseWriter.Write(p[:n]) // the client may be gone
	}
	return len(p), nil
}
