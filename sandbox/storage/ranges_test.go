package storage

import (
	"testing"

	gcs "cloud.google.com/go/storage"
)

var versioned = gcs.BucketAttrsToUpdate{VersioningEnabled: true}

func TestParseRange(t *testing.T) {
	for _, c := range []struct {
		header string
		size   int64
		want   byteRange
		ok     bool
		err    error
	}{
		{"", 10, byteRange{}, false, nil},
		{"bytes=0-0", 10, byteRange{0, 1}, true, nil},
		{"bytes=2-5", 10, byteRange{2, 4}, true, nil},
		{"bytes=2-", 10, byteRange{2, 8}, true, nil},
		{"bytes=2-500", 10, byteRange{2, 8}, true, nil},
		{"bytes=-3", 10, byteRange{7, 3}, true, nil},
		{"bytes=-30", 10, byteRange{0, 10}, true, nil},
		{"bytes=-0", 10, byteRange{}, false, errRange},
		{"bytes=10-", 10, byteRange{}, false, errRange},
		{"bytes=0-", 0, byteRange{}, false, errRange},
		{"bytes=-1", 0, byteRange{}, false, errRange},
		{"bytes=5-2", 10, byteRange{}, false, nil},
		{"bytes=0-1,3-4", 10, byteRange{}, false, nil},
		{"bytes=a-b", 10, byteRange{}, false, nil},
		{"bytes=-", 10, byteRange{}, false, nil},
		{"bytes=+1-2", 10, byteRange{}, false, nil},
		{"lines=0-1", 10, byteRange{}, false, nil},
		{"bytes=99999999999999999999-", 10, byteRange{}, false, nil},
		{"bytes=0-9223372036854775807", 10, byteRange{0, 10}, true, nil},
	} {
		got, ok, err := parseRange(c.header, c.size)
		if got != c.want || ok != c.ok || err != c.err {
			t.Errorf("%q of %d: got %v, %v, %v, want %v, %v, %v", c.header, c.size, got, ok, err, c.want, c.ok, c.err)
		}
	}
}

func TestParseContentRange(t *testing.T) {
	for header, want := range map[string]contentRange{
		"bytes 0-99/100":  {0, 99, 100},
		"bytes 100-199/*": {100, 199, -1},
		"bytes */100":     {-1, -1, 100},
		"bytes */0":       {-1, -1, 0},
		"bytes */*":       {-1, -1, -1},
	} {
		if got, err := parseContentRange(header); err != nil || got != want {
			t.Errorf("%q: got %v, %v, want %v", header, got, err, want)
		}
	}
	for _, bad := range []string{"", "bytes", "bytes ", "bytes 0-99", "0-99/100", "bytes 99-0/100", "bytes 0-100/100", "bytes -99/100", "bytes 0-/100", "bytes /", "bytes 0-0/", "bytes=0-1/2", "bytes */-1", "bytes 0-9223372036854775807/*"} {
		if got, err := parseContentRange(bad); err == nil {
			t.Errorf("%q: got %v, want an error", bad, got)
		}
	}
}

func FuzzParseRange(f *testing.F) {
	f.Add("bytes=0-99", int64(100))
	f.Add("bytes=-5", int64(3))
	f.Fuzz(func(t *testing.T, header string, size int64) {
		if size < 0 {
			return
		}
		r, ok, err := parseRange(header, size)
		if ok && (err != nil || r.start < 0 || r.length < 1 || r.length > size || r.start > size-r.length) {
			t.Errorf("%q of %d: got %v, %v", header, size, r, err)
		}
	})
}

func FuzzParseContentRange(f *testing.F) {
	f.Add("bytes 0-99/100")
	f.Add("bytes 0-99/*")
	f.Add("bytes */*")
	f.Fuzz(func(t *testing.T, header string) {
		r, err := parseContentRange(header)
		if err != nil {
			return
		}
		if r.total < -1 || r.start < -1 || r.start >= 0 && (r.end < r.start || r.total >= 0 && r.end >= r.total) || r.start < 0 && r.end != -1 {
			t.Errorf("%q: got %+v", header, r)
		}
	})
}
