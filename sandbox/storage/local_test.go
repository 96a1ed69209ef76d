package storage

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	gcs "cloud.google.com/go/storage"
	"github.com/google/go-cmp/cmp"
)

func create(t testing.TB, s *Server, bucket, name, data string, opts CreateOptions) (ObjectInfo, error) {
	t.Helper()
	w, err := s.Create(bucket, name, opts)
	if err != nil {
		return ObjectInfo{}, err
	}
	defer w.Abort()
	if _, err := io.WriteString(w, data); err != nil {
		return ObjectInfo{}, err
	}
	return w.Commit()
}

func read(t testing.TB, s *Server, bucket, name string, generation int64) string {
	t.Helper()
	r, _, err := s.Open(bucket, name, generation)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	data, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestLocal(t *testing.T) {
	s := newServer(t, t.TempDir())
	if err := s.CreateBucket("bucket"); err != nil {
		t.Fatal(err)
	}
	meta := map[string]string{"k": "v"}
	one, err := create(t, s, "bucket", "d/x", "one", CreateOptions{Preconditions: Preconditions{GenerationMatch: new(int64(0))}, ContentType: "text/x", Metadata: meta})
	if err != nil {
		t.Fatal(err)
	}
	want := ObjectInfo{Bucket: "bucket", Name: "d/x", Generation: one.Generation, Metageneration: 1, Size: 3, CRC32C: crc32.Checksum([]byte("one"), castagnoli),
		MD5: one.MD5, Updated: one.Updated, ContentType: "text/x", Metadata: meta}
	if d := cmp.Diff(want, one); d != "" {
		t.Errorf("created (-want +got):\n%s", d)
	}
	if got, err := s.Stat("bucket", "d/x", 0); err != nil || !cmp.Equal(got, one, cmp.Comparer(func(a, b time.Time) bool { return a.UnixMicro() == b.UnixMicro() })) {
		t.Errorf("Stat: got %+v, %v, want %+v", got, err, one)
	}
	if _, err := create(t, s, "bucket", "d/x", "two", CreateOptions{Preconditions: Preconditions{GenerationMatch: new(int64(0))}}); !errors.Is(err, ErrPrecondition) {
		t.Errorf("second create: got %v, want ErrPrecondition", err)
	}
	if _, err := create(t, s, "bucket", "d/x", "two", CreateOptions{CRC32C: new(uint32(1))}); err == nil {
		t.Error("create with a wrong CRC32C succeeded")
	}
	for _, missing := range [][2]string{{"bucket", "none"}, {"none", "d/x"}} {
		if _, _, err := s.Open(missing[0], missing[1], 0); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("Open %v: got %v, want fs.ErrNotExist", missing, err)
		}
		if _, err := s.List(missing[0], ""); missing[0] == "none" && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("List: got %v, want fs.ErrNotExist", err)
		}
	}
	// An open reader reads on when its object is replaced.
	r, _, err := s.Open("bucket", "d/x", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := create(t, s, "bucket", "d/x", "three", CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if data, err := io.ReadAll(r); err != nil || string(data) != "one" {
		t.Errorf("replaced while open: got %q, %v", data, err)
	}
	if _, _, err := s.Open("bucket", "d/x", one.Generation); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("old generation: got %v, want fs.ErrNotExist", err)
	}
	w, err := s.Create("bucket", "aborted", CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(w, "data")
	w.Abort()
	w.Abort()
	if _, err := w.Commit(); err == nil {
		t.Error("commit after abort succeeded")
	}
	infos, err := s.List("bucket", "d")
	if err != nil || len(infos) != 1 || infos[0].Size != 5 {
		t.Errorf("List: got %+v, %v", infos, err)
	}
	if n := dataFiles(t, s.dir); n != 1 {
		t.Errorf("%d data files are left, want 1", n)
	}
}

func TestCorrupt(t *testing.T) {
	s := newServer(t, t.TempDir())
	e := &env{target: target{newClient(t, endpoint(serve(t, s))...), ""}, ctx: t.Context(), name: "bucket"}
	e.b = e.client.Bucket("bucket")
	err := all(
		func() error { return s.CreateBucket("bucket") },
		func() error { return e.put("x", "data") },
		func() error { _, err := e.b.Object("copy").CopierFrom(e.b.Object("x")).Run(e.ctx); return err },
		func() error { return s.Corrupt("bucket", "x", 2) },
		func() error { return e.has(e.b.Object("copy"), "data") },
	)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.get(e.b.Object("x")); err == nil || !strings.Contains(err.Error(), "bad CRC") {
		t.Errorf("read of a corrupted object: got %v, want a bad CRC", err)
	}
	if err := s.Corrupt("bucket", "x", 4); err == nil {
		t.Error("corrupting past the end succeeded")
	}
}

// TestReopen has everything that a bucket and an object can have, and finds it again.
func TestReopen(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a b%3F?_pragma=x&#é")
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	open := func() *Server {
		s, err := New(Options{Dir: dir, Project: testProject, Now: func() time.Time { return now }})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := open()
	if err := s.CreateBucket("bucket"); err != nil {
		t.Fatal(err)
	}
	if _, err := New(Options{Dir: dir, Project: testProject}); err == nil {
		t.Error("a second server opened the same directory")
	}
	var before []ObjectInfo
	for i := range 3 { // the clock stands still, generations go on
		o, err := create(t, s, "bucket", fmt.Sprint("x", i), "data", CreateOptions{Metadata: map[string]string{"i": fmt.Sprint(i)}})
		if err != nil {
			t.Fatal(err)
		}
		before = append(before, o)
	}
	if before[0].Generation != now.UnixMicro() || before[2].Generation != now.UnixMicro()+2 {
		t.Errorf("generations %d, %d with the clock at %d", before[0].Generation, before[2].Generation, now.UnixMicro())
	}
	garbage := filepath.Join(dir, "data", "ab", "ab"+strings.Repeat("0", 30))
	if err := os.WriteFile(garbage, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	now = now.Add(-time.Hour) // and even when it goes back
	s = open()
	defer s.Close()
	after, err := s.List("bucket", "")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(before, after); d != "" {
		t.Errorf("after reopening (-before +after):\n%s", d)
	}
	o, err := create(t, s, "bucket", "x9", "data", CreateOptions{})
	if err != nil || o.Generation <= before[2].Generation {
		t.Errorf("generation %d after %d, %v", o.Generation, before[2].Generation, err)
	}
	if _, err := os.Stat(garbage); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that nobody owns is still there: %v", err)
	}
}

// TestCutUpload breaks connections in the middle of uploads of every kind.
func TestCutUpload(t *testing.T) {
	s := newServer(t, t.TempDir())
	url := serve(t, s)
	if err := s.CreateBucket("bucket"); err != nil {
		t.Fatal(err)
	}
	e := &env{target: target{newClient(t, endpoint(url)...), url}, ctx: t.Context(), name: "bucket"}
	e.b = e.client.Bucket("bucket")
	resumable, err := e.startResumable("resumable")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ method, url, contentType string }{
		"media":     {"POST", url + "/upload/storage/v1/b/bucket/o?uploadType=media&name=media", "text/plain"},
		"multipart": {"POST", url + "/upload/storage/v1/b/bucket/o?uploadType=multipart&name=multipart", "multipart/related; boundary=b"},
		"resumable": {"PUT", resumable, "text/plain"},
	} {
		for _, length := range []int64{1 << 20, -1} { // with a Content-Length, and chunked
			pr, pw := io.Pipe()
			r, err := http.NewRequestWithContext(t.Context(), c.method, c.url, pr)
			if err != nil {
				t.Fatal(err)
			}
			r.ContentLength = length
			r.Header.Set("Content-Type", c.contentType)
			go func() {
				if name == "multipart" {
					io.WriteString(pw, "--b\r\nContent-Type: application/json\r\n\r\n{}\r\n--b\r\nContent-Type: text/plain\r\n\r\n")
				}
				io.WriteString(pw, randomData(300_000))
				pw.CloseWithError(errors.New("cut"))
			}()
			if res, err := http.DefaultTransport.RoundTrip(r); err == nil {
				t.Errorf("%s: got %s, want a broken request", name, res.Status)
				res.Body.Close()
			}
		}
		if err := e.missing(name); err != nil {
			t.Error(err)
		}
	}
	// The cut resumable upload kept its whole block and can go on.
	data := randomData(300_000)
	eventually(t, func() error { return e.chunk(resumable, "bytes */*", "", 308, "bytes=0-262143") })
	if err := e.chunk(resumable, "bytes 262144-299999/300000", data[1<<18:], 200, ""); err != nil {
		t.Error(err)
	}
	if got := read(t, s, "bucket", "resumable", 0); got != data {
		t.Error("the upload that went on has other data")
	}
	eventually(t, func() error { return equal("data files", dataFiles(t, s.dir), 1) })
}

// eventually waits until f returns nil.
func eventually(t *testing.T, f func() error) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Error(err)
			return
		}
		time.Sleep(time.Millisecond) // between two looks
	}
}

// TestConcurrent does everything at once to few names. Whatever is read must be whole, and in the end every object has its data and nothing else is left.
func TestConcurrent(t *testing.T) {
	s := newServer(t, t.TempDir())
	url := serve(t, s)
	client := newClient(t, endpoint(url)...)
	if err := s.CreateBucket("bucket"); err != nil {
		t.Fatal(err)
	}
	b := client.Bucket("bucket")
	b.Update(t.Context(), versioned)
	names := []string{"a", "a/b", "a/b/c", "d"}
	steps := 30
	if os.Getenv("SLUICE_CAMPAIGN") == "1" {
		steps = 1000
	}
	var wg sync.WaitGroup
	for worker := range 12 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(7, uint64(worker)))
			e := &env{target: target{client, url}, ctx: t.Context(), name: "bucket", b: b}
			for range steps {
				name, other := names[rng.IntN(len(names))], names[rng.IntN(len(names))]
				var what string
				var err error
				switch what = []string{"put", "read", "delete", "copy", "move", "compose", "list", "patch", "local", "versioning"}[rng.IntN(10)]; what {
				case "put":
					err = e.put(name, randomData(rng.IntN(600_000)), chunks([]int{0, 1 << 18, 1 << 24}[rng.IntN(3)]))
				case "read":
					_, err = e.get(b.Object(name)) // compares the CRC32C
				case "delete":
					err = b.Object(name).Delete(e.ctx)
				case "copy":
					_, err = b.Object(other).CopierFrom(b.Object(name)).Run(e.ctx)
				case "move":
					if name != other {
						_, err = b.Object(name).Move(e.ctx, gcs.MoveObjectDestination{Object: other})
					}
				case "compose":
					_, err = b.Object(other).ComposerFrom(b.Object(name), b.Object(other)).Run(e.ctx)
				case "list":
					_, err = e.list(&gcs.Query{Versions: rng.IntN(2) == 0, Delimiter: "/"})
				case "patch":
					_, err = b.Object(name).Update(e.ctx, gcs.ObjectAttrsToUpdate{ContentType: "text/x"})
				case "local":
					_, err = create(t, s, "bucket", name, "local", CreateOptions{})
				case "versioning":
					_, err = b.Update(e.ctx, gcs.BucketAttrsToUpdate{VersioningEnabled: rng.IntN(2) == 0})
				}
				if err != nil && code(err, 404) != nil && !(what == "move" && code(err, 409) == nil) {
					t.Errorf("%s %s %s: %v", what, name, other, err)
				}
			}
		})
	}
	wg.Wait()
	p, err := s.list(t.Context(), query{bucket: "bucket", versions: true, limit: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range p.items {
		data := read(t, s, o.bucket, o.name, o.generation)
		if int64(len(data)) != o.size || crc32.Checksum([]byte(data), castagnoli) != o.crc32c {
			t.Errorf("%s generation %d has %d bytes, want %d and its CRC32C", o.name, o.generation, len(data), o.size)
		}
	}
	eventually(t, func() error { return equal("data files", dataFiles(t, s.dir), len(p.items)) })
}

// TestNothingOutsideDir stores hostile names and looks at what is on the disk.
func TestNothingOutsideDir(t *testing.T) {
	dir := t.TempDir()
	s := newServer(t, filepath.Join(dir, "inner", "store"))
	if err := s.CreateBucket("bucket"); err != nil {
		t.Fatal(err)
	}
	names := hostileNames()
	for _, name := range names {
		if _, err := create(t, s, "bucket", name, name, CreateOptions{}); err != nil {
			t.Fatalf("%q: %v", name, err)
		}
	}
	infos, err := s.List("bucket", "")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, o := range infos {
		got = append(got, o.Name)
	}
	slices.Sort(names)
	if d := cmp.Diff(names, got); d != "" {
		t.Errorf("names (-want +got):\n%s", d)
	}
	files := 0
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			files++
			if rel, _ := filepath.Rel(s.dir, path); strings.HasPrefix(rel, "..") {
				t.Errorf("%s is outside the store", path)
			} else if strings.HasPrefix(rel, "data") {
				if _, err := parseDataID(d.Name()); err != nil {
					t.Errorf("a data file is called %q", d.Name())
				}
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := dataFiles(t, s.dir); n != len(names) {
		t.Errorf("%d data files, want %d", n, len(names))
	}
}
