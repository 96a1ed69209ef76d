package storage

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

func TestGlob(t *testing.T) {
	for _, c := range []struct {
		pattern string
		match   []string
		no      []string
	}{
		{"foo*bar", []string{"foobar", "foo1bar", "foo\nbar"}, []string{"foo/bar", "xfoobar", "foobarx"}},
		{"foo**bar", []string{"foobar", "foo/bar", "foo/1/2/bar"}, []string{"foo/ba"}},
		{"foo?bar", []string{"foo1bar", "fooébar"}, []string{"foobar", "foo/bar"}},
		{"[a-c]x", []string{"ax", "cx"}, []string{"dx", "-x"}},
		{"[!a-c]x", []string{"dx", "éx"}, []string{"ax", "/x"}},
		{"[^a]", []string{"b"}, []string{"a", "/"}},
		{"[]a]", []string{"]", "a"}, []string{"b"}},
		{"[a-]", []string{"a", "-"}, []string{"b"}},
		{`[\]\-]`, []string{"]", "-"}, []string{`\`}},
		{"[+-9]", []string{"+", "5"}, []string{"/"}},
		{"[/]", nil, []string{"/", "a"}},
		{"a{b,c*,}d", []string{"abd", "acd", "acxd", "ad"}, []string{"axd", "ac/d"}},
		{"{a,{b,c}}", []string{"a", "b", "c"}, []string{"d"}},
		{`\*\{`, []string{"*{"}, []string{"x{"}},
		{"a,b}", []string{"a,b}"}, nil},
		{"a.c+", []string{"a.c+"}, []string{"abc+", "a.cc"}},
		{"", []string{""}, []string{"a"}},
		{"**/*.txt", []string{"a/b.txt", "a/b/c.txt"}, []string{"b.txt"}},
	} {
		g, err := compileGlob(c.pattern)
		if err != nil {
			t.Errorf("%q: %v", c.pattern, err)
			continue
		}
		for _, name := range c.match {
			if !g.match(name) {
				t.Errorf("%q does not match %q", c.pattern, name)
			}
		}
		for _, name := range c.no {
			if g.match(name) {
				t.Errorf("%q matches %q", c.pattern, name)
			}
		}
	}
	for _, bad := range []string{"[", "[a", "[!", "[]", "[z-a]", "{a", "{a,{b}", `a\`, "\xff", strings.Repeat("x", 1025), strings.Repeat("{", 600) + strings.Repeat("}", 600)} {
		if _, err := compileGlob(bad); err == nil {
			t.Errorf("%.20q is accepted", bad)
		}
	}
}

// simpleMatch is the definition of *, ** and ? without anything clever.
func simpleMatch(pattern, name []rune) bool {
	if len(pattern) == 0 {
		return len(name) == 0
	}
	if pattern[0] == '*' {
		rest, across := pattern[1:], false
		if len(rest) > 0 && rest[0] == '*' {
			rest, across = rest[1:], true
		}
		for i := 0; ; i++ {
			if simpleMatch(rest, name[i:]) {
				return true
			}
			if i == len(name) || !across && name[i] == '/' {
				return false
			}
		}
	}
	return len(name) > 0 && (pattern[0] == name[0] || pattern[0] == '?' && name[0] != '/') && simpleMatch(pattern[1:], name[1:])
}

func FuzzGlob(f *testing.F) {
	f.Add("a*/**b?", "a1/2/3b4")
	f.Add("[!a-z]{x,y}\\*", "0x*")
	f.Add("***", "//")
	f.Add("[*-0]", "/")
	f.Fuzz(func(t *testing.T, pattern, name string) {
		g, err := compileGlob(pattern)
		if err != nil {
			return
		}
		if !utf8.ValidString(name) {
			return // no object is called so
		}
		got := g.match(name)
		if got && !strings.HasPrefix(name, g.prefix) {
			t.Errorf("%q matches %q, which does not begin with %q", pattern, name, g.prefix)
		}
		if strings.ContainsAny(pattern, `[]{},\`) || len(pattern) > 20 || len(name) > 40 {
			return
		}
		if want := simpleMatch([]rune(pattern), []rune(name)); got != want {
			t.Errorf("%q on %q: got %v, want %v", pattern, name, got, want)
		}
	})
}

// simpleList is the definition of a listing: items, then prefixes, in order.
func simpleList(names []string, q query) (items, prefixes []string) {
	for _, name := range names {
		if !strings.HasPrefix(name, q.prefix) || name < q.startOffset || q.endOffset != "" && name >= q.endOffset {
			continue
		}
		prefix := ""
		if q.delimiter != "" {
			if i := strings.Index(name[len(q.prefix):], q.delimiter); i >= 0 {
				prefix = name[:len(q.prefix)+i+len(q.delimiter)]
			}
		}
		if prefix != "" && !slices.Contains(prefixes, prefix) && (q.glob == nil || q.glob.match(prefix)) {
			prefixes = append(prefixes, prefix)
		}
		if (prefix == "" || q.trailingDelimiter && prefix == name) && (q.glob == nil || q.glob.match(name)) {
			items = append(items, name)
		}
	}
	return items, prefixes
}

// pages lists through page tokens.
func pages(t *testing.T, s *Server, q query) (items, prefixes []string) {
	t.Helper()
	for range 10_000 {
		p, err := s.list(t.Context(), q)
		if err != nil {
			t.Fatalf("%+v: %v", q, err)
		}
		if n := len(p.items) + len(p.prefixes); n > max(q.limit, 2) {
			t.Errorf("%+v: a page of %d", q, n)
		}
		for _, o := range p.items {
			items = append(items, o.name)
		}
		prefixes = append(prefixes, p.prefixes...)
		if p.next == nil {
			return items, prefixes
		}
		if q.from, err = decodeToken(p.next.token()); err != nil {
			t.Fatal(err)
		}
	}
	t.Fatalf("%+v: the listing does not end", q)
	return nil, nil
}

func FuzzList(f *testing.F) {
	s, err := New(Options{Dir: f.TempDir(), Project: testProject})
	if err != nil {
		f.Fatal(err)
	}
	defer s.Close()
	if err := s.CreateBucket("bucket"); err != nil {
		f.Fatal(err)
	}
	names := []string{"a", "a!", "a/", "a//b", "a/b", "a/b/", "a/b/c", "a/c", "a0", "b", "b/c/d", "b/c/e", "ba", "c--d", "c--e--f", "é", "é/x", "\ufffd", "\ufffd/x", "\U0010ffff", "\U0010ffff/x", "\x00", "\x00/"}
	for _, name := range names {
		if _, err := create(f, s, "bucket", name, name, CreateOptions{}); err != nil {
			f.Fatal(err)
		}
	}
	slices.Sort(names)
	f.Add("", "", "", "", "", uint8(2), false)
	f.Add("a", "/", "", "", "", uint8(1), true)
	f.Add("a/", "/", "a/b", "b", "", uint8(3), true)
	f.Add("", "/", "", "", "**/", uint8(2), false)
	f.Add("c", "--", "", "", "", uint8(1), true)
	f.Add("\U0010ffff", "/", "", "", "", uint8(1), true)
	f.Add("\xff", "", "", "", "", uint8(1), true)
	f.Add("\xea", "0", "", "", "", uint8(1), true)
	f.Add("a", "b", "", "", "", uint8(0), true)
	f.Add("\ufffd", "/", "", "", "", uint8(1), true)
	f.Add("", "\xff", "\xff", "", "a*", uint8(1), true)
	f.Fuzz(func(t *testing.T, prefix, delimiter, start, end, pattern string, limit uint8, trailing bool) {
		q := query{bucket: "bucket", prefix: prefix, delimiter: delimiter, startOffset: start, endOffset: end, limit: int(limit) + 1, trailingDelimiter: trailing}
		if pattern != "" {
			g, err := compileGlob(pattern)
			if err != nil {
				return
			}
			q.glob = g
		}
		wantItems, wantPrefixes := simpleList(names, q)
		items, prefixes := pages(t, s, q)
		if d := cmp.Diff(wantItems, items); d != "" {
			t.Errorf("%+v: items (-want +got):\n%s", q, d)
		}
		if d := cmp.Diff(wantPrefixes, prefixes); d != "" {
			t.Errorf("%+v: prefixes (-want +got):\n%s", q, d)
		}
	})
}

// TestListVersions pages through noncurrent versions with every page size.
func TestListVersions(t *testing.T) {
	s := newServer(t, t.TempDir())
	if err := s.CreateBucket("bucket"); err != nil {
		t.Fatal(err)
	}
	c := newClient(t, endpoint(serve(t, s))...)
	if _, err := c.Bucket("bucket").Update(t.Context(), versioned); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		for _, name := range []string{"a/", "a/b", "b", "c/d"} {
			if _, err := create(t, s, "bucket", name, name, CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for limit := 1; limit < 15; limit++ {
		q := query{bucket: "bucket", delimiter: "/", trailingDelimiter: true, versions: true, limit: limit}
		items, prefixes := pages(t, s, q)
		if d := cmp.Diff([]string{"a/", "a/", "a/", "b", "b", "b"}, items); d != "" {
			t.Errorf("limit %d: items (-want +got):\n%s", limit, d)
		}
		if d := cmp.Diff([]string{"a/", "c/"}, prefixes); d != "" {
			t.Errorf("limit %d: prefixes (-want +got):\n%s", limit, d)
		}
		q.delimiter = ""
		if items, _ := pages(t, s, q); len(items) != 12 || !slices.IsSorted(items) {
			t.Errorf("limit %d: got %q", limit, items)
		}
	}
}

// TestListManyObjects lists a bucket of a million objects under SLUICE_CAMPAIGN=1, of 50,000 else. The times are reported, not judged.
func TestListManyObjects(t *testing.T) {
	dirs, each := 50, 1000
	if os.Getenv("SLUICE_CAMPAIGN") == "1" {
		dirs = 1000
	}
	s := newServer(t, t.TempDir())
	if err := s.CreateBucket("bucket"); err != nil {
		t.Fatal(err)
	}
	_, err := s.writer.Exec(`INSERT INTO objects (`+objectColumns+`)
		WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < ?)
		SELECT 'bucket', CAST(printf('d%04d/f%04d', i / ?, i % ?) AS BLOB), i + 1, 1, 10, 0, zeroblob(16), 1, 0, 0, 0, hex(randomblob(16)), '{"contentType":"text/plain"}' FROM n`,
		dirs*each, each, each)
	if err != nil {
		t.Fatal(err)
	}
	timed := func(what string, q query, wantItems, wantPrefixes int) {
		t.Helper()
		start := time.Now()
		q.bucket = "bucket"
		items, prefixes := pages(t, s, q)
		if len(items) != wantItems || len(prefixes) != wantPrefixes {
			t.Errorf("%s: got %d items and %d prefixes, want %d and %d", what, len(items), len(prefixes), wantItems, wantPrefixes)
		}
		t.Logf("%-30s %6d entries in %v", what, len(items)+len(prefixes), time.Since(start).Round(time.Millisecond))
	}
	timed("everything, pages of 1000", query{limit: 1000}, dirs*each, 0)
	timed("top level", query{limit: 1000, delimiter: "/"}, 0, dirs)
	timed("one directory", query{limit: 1000, prefix: "d0042/", delimiter: "/"}, each, 0)
	g, err := compileGlob("d00{10,20}/f*0")
	if err != nil {
		t.Fatal(err)
	}
	timed("a glob", query{limit: 1000, glob: g}, 2*each/10, 0)
	start := time.Now()
	if infos, err := s.List("bucket", ""); err != nil || len(infos) != dirs*each {
		t.Errorf("List: got %d objects, %v, want %d", len(infos), err, dirs*each)
	}
	t.Logf("%-30s %6d entries in %v", "List", dirs*each, time.Since(start).Round(time.Millisecond))
	timed("a name", query{limit: 1000, prefix: "d0042/f0042"}, 1, 0)
	var plan string
	err = s.db.QueryRow(`EXPLAIN QUERY PLAN SELECT `+objectColumns+` FROM objects WHERE bucket = ? AND name >= ? AND retired = 0 ORDER BY name, generation`, "bucket", []byte("d")).Scan(new(int), new(int), new(int), &plan)
	if err != nil || !strings.HasPrefix(plan, "SEARCH") {
		t.Errorf("plan %q, %v: want a search", plan, err)
	}
}
