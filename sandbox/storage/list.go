package storage

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"net/http"
	"strings"

	raw "google.golang.org/api/storage/v1"
)

// position is a place in a listing: what comes next is the first entry with a name from name on and, if it has just
// that name, a generation above generation.
type position struct {
	name       string
	generation int64
}

// token is the position as a page token.
func (p position) token() string {
	return base64.URLEncoding.EncodeToString(append(binary.BigEndian.AppendUint64(nil, uint64(p.generation)), p.name...))
}

func decodeToken(token string) (position, error) {
	if token == "" {
		return position{}, nil
	}
	b, err := base64.URLEncoding.DecodeString(token)
	if err != nil || len(b) < 8 {
		return position{}, invalid("Invalid value for pageToken.")
	}
	return position{string(b[8:]), int64(binary.BigEndian.Uint64(b))}, nil
}

// query says which part of a bucket to list.
type query struct {
	bucket                      string
	prefix, delimiter           string
	startOffset, endOffset      string // inclusive, exclusive; "" is none
	glob                        *glob  // or nil
	trailingDelimiter, versions bool
	from                        position
	limit                       int // of items and prefixes together, at least 1
}

// page is one page of a listing.
type page struct {
	items    []*object
	prefixes []string
	next     *position // nil at the end
}

// list reads one page. It reads no more of the index than the page needs: below a prefix that is rolled up it skips on to what follows.
func (s *Server) list(ctx context.Context, q query) (*page, error) {
	if _, err := findBucket(ctx, s.db, q.bucket); err != nil {
		return nil, err
	}
	start, end := max(q.from.name, q.prefix, q.startOffset), successor(q.prefix)
	if q.glob != nil {
		start = max(start, q.glob.prefix)
		end = earlier(end, successor(q.glob.prefix))
	}
	end = earlier(end, q.endOffset)
	p := &page{}
	for {
		more, err := s.scan(ctx, q, p, start, end)
		if err != nil || more == "" {
			return p, err
		}
		start = more
	}
}

// scan lists names from start (inclusive) to end (exclusive, "" is none) until the page is full or a prefix was rolled
// up; then it returns where to go on, or "" when there is nothing left to do.
func (s *Server) scan(ctx context.Context, q query, p *page, start, end string) (string, error) {
	// A name is a BLOB; a zero-length start would be bound as NULL, and nothing is before "".
	where, args := `bucket = ?`, []any{q.bucket}
	if start != "" {
		where, args = where+` AND name >= ?`, append(args, []byte(start))
	}
	if end != "" {
		where, args = where+` AND name < ?`, append(args, []byte(end))
	}
	if !q.versions {
		where += ` AND retired = 0`
	}
	rows, err := s.db.QueryContext(ctx, `SELECT `+objectColumns+` FROM objects WHERE `+where+` ORDER BY name, generation`, args...)
	if err != nil {
		return "", err
	}
	defer rows.Close()
	var last position
	for rows.Next() {
		o, err := scanObject(rows)
		if err != nil {
			return "", err
		}
		if o.name == q.from.name && o.generation <= q.from.generation {
			continue
		}
		prefix := ""
		if q.delimiter != "" {
			if i := strings.Index(o.name[len(q.prefix):], q.delimiter); i >= 0 {
				prefix = o.name[:len(q.prefix)+i+len(q.delimiter)]
			}
		}
		asItem := (prefix == "" || q.trailingDelimiter && prefix == o.name) && (q.glob == nil || q.glob.match(o.name))
		asPrefix := prefix != "" && (q.glob == nil || q.glob.match(prefix)) &&
			(len(p.prefixes) == 0 || p.prefixes[len(p.prefixes)-1] != prefix) &&
			!(q.from.name == prefix && q.from.generation > 0) // the page before had it
		had, more := len(p.items)+len(p.prefixes), count(asItem)+count(asPrefix)
		if had > 0 && more > 0 && had+more > q.limit {
			p.next = &position{name: o.name}
			if last.name == o.name {
				p.next = &last
			}
			return "", rows.Close()
		}
		last = position{o.name, o.generation}
		if asPrefix {
			p.prefixes = append(p.prefixes, prefix)
		}
		if asItem {
			p.items = append(p.items, o)
		}
		if prefix != "" && !(q.trailingDelimiter && prefix == o.name) {
			next := successor(prefix)
			if next == "" || end != "" && next >= end {
				return "", rows.Close()
			}
			return next, rows.Close()
		}
	}
	return "", rows.Err()
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

// successor is the first string, byte by byte, after all that begin with prefix; "" when there is none.
func successor(prefix string) string {
	for i := len(prefix) - 1; i >= 0; i-- {
		if prefix[i] < 0xff {
			return prefix[:i] + string([]byte{prefix[i] + 1})
		}
	}
	return ""
}

// earlier is the smaller of two ends, where "" is none.
func earlier(a, b string) string {
	if a == "" || b != "" && b < a {
		return b
	}
	return a
}

func (s *Server) listObjects(c *call) error {
	q := query{
		bucket: c.bucket, prefix: c.q.Get("prefix"), delimiter: c.q.Get("delimiter"),
		startOffset: c.q.Get("startOffset"), endOffset: c.q.Get("endOffset"),
		trailingDelimiter: c.q.Get("includeTrailingDelimiter") == "true", versions: c.q.Get("versions") == "true",
	}
	if c.q.Get("softDeleted") == "true" {
		return &apiError{http.StatusNotImplemented, "notImplemented", "The sandbox keeps no soft-deleted objects."}
	}
	var err error
	if pattern := c.q.Get("matchGlob"); pattern != "" {
		if q.delimiter != "" && q.delimiter != "/" {
			return invalid("When listing with a glob pattern, the only supported delimiter is '/'.")
		}
		if q.glob, err = compileGlob(pattern); err != nil {
			return err
		}
	}
	if q.limit, err = pageSize(c.q.Get("maxResults")); err != nil {
		return err
	}
	if q.from, err = decodeToken(c.q.Get("pageToken")); err != nil {
		return err
	}
	p, err := s.list(c.r.Context(), q)
	if err != nil {
		return err
	}
	out := &raw.Objects{Kind: "storage#objects", Prefixes: p.prefixes}
	for _, o := range p.items {
		out.Items = append(out.Items, o.json(c))
	}
	if p.next != nil {
		out.NextPageToken = p.next.token()
	}
	return c.reply(out)
}
