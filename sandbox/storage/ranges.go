package storage

import (
	"math"
	"strconv"
	"strings"
)

// byteRange is a part of an object: [start, start+length).
type byteRange struct{ start, length int64 }

// parseRange reads a Range header for an object of size bytes. ok is false when the whole object is to be served: there is no
// header, it asks for several ranges, or it is not understood. It returns errRange when no byte is in the range.
func parseRange(header string, size int64) (r byteRange, ok bool, err error) {
	spec, found := strings.CutPrefix(header, "bytes=")
	if !found || strings.Contains(spec, ",") {
		return r, false, nil
	}
	first, last, found := strings.Cut(strings.TrimSpace(spec), "-")
	if !found {
		return r, false, nil
	}
	if first == "" {
		n, ok := digits(last)
		if !ok {
			return r, false, nil
		}
		if n == 0 || size == 0 {
			return r, false, errRange
		}
		n = min(n, size)
		return byteRange{size - n, n}, true, nil
	}
	start, ok := digits(first)
	end := int64(math.MaxInt64)
	if ok && last != "" {
		end, ok = digits(last)
	}
	if !ok || start > end {
		return r, false, nil
	}
	if start >= size {
		return r, false, errRange
	}
	end = min(end, size-1)
	return byteRange{start, end - start + 1}, true, nil
}

// contentRange is the Content-Range header of an upload. start is -1 where it only asks for the state ("bytes */…"),
// total is -1 where the size is not known yet ("…/*").
type contentRange struct{ start, end, total int64 }

// parseContentRange reads "bytes 0-99/100", "bytes 0-99/*", "bytes */100" or "bytes */*"; end is inclusive.
func parseContentRange(header string) (contentRange, error) {
	bad := invalid("Failed to parse Content-Range header: %q.", header)
	spec, ok := strings.CutPrefix(header, "bytes ")
	part, total, found := strings.Cut(spec, "/")
	if !ok || !found {
		return contentRange{}, bad
	}
	r := contentRange{-1, -1, -1}
	if total != "*" {
		if r.total, ok = digits(total); !ok {
			return contentRange{}, bad
		}
	}
	if part == "*" {
		return r, nil
	}
	first, last, _ := strings.Cut(part, "-")
	var ok1, ok2 bool
	r.start, ok1 = digits(first)
	r.end, ok2 = digits(last)
	if !ok1 || !ok2 || r.start > r.end || r.end == math.MaxInt64 || r.total >= 0 && r.end >= r.total {
		return contentRange{}, bad
	}
	return r, nil
}

// digits reads a number that is nothing but digits.
func digits(s string) (int64, bool) {
	for _, c := range []byte(s) {
		if c < '0' || c > '9' {
			return 0, false
		}
	}
	n, err := strconv.ParseInt(s, 10, 64)
	return n, err == nil
}
