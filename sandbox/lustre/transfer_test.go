package lustre_test

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sluicehpc/sluice/gcp"
	api "github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/sandbox/lustre"
	"github.com/sluicehpc/sluice/sandbox/storage"
)

func counters(op *api.Operation) api.TransferCounters { return op.Metadata.Transfer.Counters }

func TestImport(t *testing.T) {
	w := newWorld(t)
	w.create()
	w.put("c4/train/a.txt", "aaa")
	w.put("c4/train/deep/er/b.txt", "bb")
	w.put("c4/empty", "")
	w.put("c4/ümlaut \t\"name\"", "u")
	w.put("c4/", "") // the placeholder that consoles make
	w.put("c4x/not", "this one")
	if err := os.Mkdir(filepath.Join(w.data(), "data"), 0o755); err != nil {
		t.Fatal(err)
	}
	op := w.wait(w.importFrom("gs://corpus/c4/", "/data"))
	want := map[string]string{"train/a.txt": "aaa", "train/deep/er/b.txt": "bb", "empty": "", "ümlaut \t\"name\"": "u"}
	if d := cmp.Diff(want, files(t, filepath.Join(w.data(), "data"))); d != "" {
		t.Errorf("files (-want +got):\n%s", d)
	}
	if d := cmp.Diff(api.TransferCounters{FoundObjectsCount: 4, BytesFoundCount: 6, ObjectsCopiedCount: 4, BytesCopiedCount: 6}, counters(op)); d != "" {
		t.Errorf("counters (-want +got):\n%s", d)
	}
	if op.Metadata.Type != api.TypeImport || op.Metadata.Transfer.TransferType != "IMPORT" || op.Metadata.EndTime.IsZero() {
		t.Errorf("metadata %+v", op.Metadata)
	}

	// A second run copies what is new, what has another size and what is newer, and deletes nothing.
	w.put("c4/new", "n")
	w.put("c4/train/a.txt", "longer")
	w.put("c4/train/deep/er/b.txt", "BB")
	if err := os.WriteFile(filepath.Join(w.data(), "data/own"), []byte("own"), 0o600); err != nil {
		t.Fatal(err)
	}
	op = w.wait(w.importFrom("gs://corpus/c4/", "/data/"))
	want["new"], want["train/a.txt"], want["train/deep/er/b.txt"], want["own"] = "n", "longer", "BB", "own"
	if d := cmp.Diff(want, files(t, filepath.Join(w.data(), "data"))); d != "" {
		t.Errorf("files after the second run (-want +got):\n%s", d)
	}
	if d := cmp.Diff(api.TransferCounters{
		FoundObjectsCount: 3, BytesFoundCount: 9, ObjectsCopiedCount: 3, BytesCopiedCount: 9, ObjectsSkippedCount: 2, BytesSkippedCount: 1,
	}, counters(op)); d != "" {
		t.Errorf("counters of the second run (-want +got):\n%s", d)
	}
}

func TestExport(t *testing.T) {
	w := newWorld(t)
	w.create()
	dir := w.data()
	for name, data := range map[string]string{"out/a": "aaa", "out/d/b": "bb", "out/.hidden": "h", "other": "o"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	op := w.wait(w.exportTo("/out", "gs://corpus/results/"))
	want := map[string]string{"results/a": "aaa", "results/d/b": "bb", "results/.hidden": "h"}
	if d := cmp.Diff(want, w.objects("")); d != "" {
		t.Errorf("objects (-want +got):\n%s", d)
	}
	if d := cmp.Diff(api.TransferCounters{FoundObjectsCount: 3, BytesFoundCount: 6, ObjectsCopiedCount: 3, BytesCopiedCount: 6}, counters(op)); d != "" {
		t.Errorf("counters (-want +got):\n%s", d)
	}
	if m := op.Metadata; m.Verb != "export" || m.Type != api.TypeExport || m.Transfer.SourceLustrePath.Path != "/out" || m.Transfer.DestinationGcsPath.URI != "gs://corpus/results/" {
		t.Errorf("metadata %+v %+v", m, m.Transfer)
	}
	later := time.Now().Add(time.Hour)
	if err := os.WriteFile(filepath.Join(dir, "out/a"), []byte("AAA"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(filepath.Join(dir, "out/a"), later, later); err != nil {
		t.Fatal(err)
	}
	op = w.wait(w.exportTo("/out", "gs://corpus/results/"))
	if got := w.objects("")["results/a"]; got != "AAA" {
		t.Errorf("changed file was exported as %q", got)
	}
	if c := counters(op); c.ObjectsCopiedCount != 1 || c.ObjectsSkippedCount != 2 {
		t.Errorf("counters of the second run: %+v", c)
	}
	// All of it, to the bucket's root.
	w.wait(w.exportTo("", "gs://corpus"))
	if got := w.objects("out/"); len(got) != 3 {
		t.Errorf("export of / made %v", got)
	}
}

func TestTransferRefused(t *testing.T) {
	w := newWorld(t)
	w.create()
	for _, tt := range []struct {
		name, uri, path, account, says string
	}{
		{"no slash at the end", "gs://corpus/c4", "", "", "slash"},
		{"no gs", "s3://corpus/", "", "", "gs://"},
		{"no bucket", "gs:///x/", "", "", "gs://"},
		{"bucket's name", "gs://CORPUS/", "", "", "gs://"},
		{"relative path", "gs://corpus/", "data", "", "absolute"},
		{"dots", "gs://corpus/", "/data/../..", "", "absolute"},
		{"account", "gs://corpus/", "/", "me", "service_account"},
	} {
		r := importOf(tt.uri, tt.path)
		r.ServiceAccount = tt.account
		if _, err := w.ImportData(w.ctx(), r); gcp.Status(err) != "INVALID_ARGUMENT" || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: got %v, want INVALID_ARGUMENT and %q", tt.name, err, tt.says)
		}
	}
	if _, err := w.ImportData(w.ctx(), &api.ImportDataRequest{Name: parent + "/instances/none", GcsPath: &api.GcsPath{URI: "gs://corpus/"}}); !gcp.IsNotFound(err) {
		t.Errorf("no instance: %v", err)
	}

	// What can only be found by trying fails the operation.
	if err := os.Symlink("/", filepath.Join(w.data(), "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(w.data(), "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	w.put("a", "a")
	for _, tt := range []struct {
		name string
		op   func() *api.Operation
		code int
	}{
		{"missing directory", func() *api.Operation { return w.importFrom("gs://corpus/", "/none") }, 5},
		{"missing bucket", func() *api.Operation { return w.importFrom("gs://other-bucket/", "") }, 5},
		{"symbolic link", func() *api.Operation { return w.importFrom("gs://corpus/", "/link/tmp") }, 9},
		{"file", func() *api.Operation { return w.importFrom("gs://corpus/", "/file") }, 9},
		{"export of a missing directory", func() *api.Operation { return w.exportTo("/none", "gs://corpus/") }, 5},
		{"export through a link", func() *api.Operation { return w.exportTo("/link/etc", "gs://corpus/") }, 9},
		{"export to a missing bucket", func() *api.Operation { return w.exportTo("/", "gs://other-bucket/") }, 5},
	} {
		_, err := w.Wait(w.ctx(), tt.op().Name, nil)
		if oe := new(api.OperationError); !errors.As(err, &oe) || oe.Code != tt.code {
			t.Errorf("%s: got %v, want code %d", tt.name, err, tt.code)
		}
	}
}

func TestOneTransferAtATime(t *testing.T) {
	w := newWorld(t)
	w.create()
	w.put("a", strings.Repeat("a", 1<<20))
	w.set("lustre.transfer.rate", "1000")
	op := w.importFrom("gs://corpus/", "")
	_, err := w.ImportData(w.ctx(), importOf("gs://corpus/", ""))
	if !gcp.IsConflict(err) || gcp.Status(err) != "ABORTED" || !strings.Contains(err.Error(), "unable to queue the operation") {
		t.Errorf("second transfer: %v", err)
	}
	w.set("lustre.transfer.parallel", "on")
	second := w.importFrom("gs://corpus/", "")

	for _, name := range []string{op.Name, second.Name} {
		if err := w.CancelOperation(w.ctx(), name); err != nil {
			t.Fatal(err)
		}
		got, err := w.Wait(w.ctx(), name, nil)
		var oe *api.OperationError
		if !errors.As(err, &oe) || oe.Code != api.Cancelled || !got.Metadata.RequestedCancellation || got.Response != nil {
			t.Errorf("cancelled operation: %+v, %v", got, err)
		}
	}
	if err := w.CancelOperation(w.ctx(), op.Name); err != nil {
		t.Errorf("cancelling again: %v", err)
	}
	if err := w.faults.Clear("lustre.transfer.parallel"); err != nil {
		t.Fatal(err)
	}
	if err := w.faults.Clear("lustre.transfer.rate"); err != nil {
		t.Fatal(err)
	}
	w.wait(w.importFrom("gs://corpus/", "")) // the instance is free again
	if got := files(t, w.data())["a"]; len(got) != 1<<20 {
		t.Errorf("a has %d bytes", len(got))
	}
}

func TestDeleteEndsTransfer(t *testing.T) {
	w := newWorld(t)
	w.create()
	w.put("a", strings.Repeat("a", 1<<20))
	w.set("lustre.transfer.rate", "1000")
	op := w.importFrom("gs://corpus/", "")
	del, err := w.DeleteInstance(w.ctx(), &api.DeleteInstanceRequest{Name: scratch})
	if err != nil {
		t.Fatal(err)
	}
	w.wait(del)
	if got, err := w.GetOperation(w.ctx(), op.Name); err != nil || !got.Done || got.Error.Code != api.Cancelled {
		t.Errorf("the import: %+v, %v", got, err)
	}
}

// TestHostileNames imports objects whose names are no files. None may reach anything outside.
func TestHostileNames(t *testing.T) {
	w := newWorld(t)
	w.create()
	outside := t.TempDir()
	if err := os.Symlink(outside, filepath.Join(w.data(), "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(outside, "made"), filepath.Join(w.data(), "filelink")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(w.data(), "fifo"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(w.data(), "dir"), 0o755); err != nil {
		t.Fatal(err)
	}
	bad := []string{
		"x/../../escape", "../escape", "..", "./x", "x/./y", "/abs", "x//y", "x/", "x/y/",
		strings.Repeat("n", 256), "x/" + strings.Repeat("n", 300) + "/y",
		"link/escape", "filelink", "fifo", "dir", "link",
	}
	refused := 0
	for _, name := range bad {
		o, err := w.storage.Create(bucketID, "p/"+name, storage.CreateOptions{})
		if err != nil {
			t.Logf("the bucket refuses %q: %v", name, err)
			refused++
			continue
		}
		io.WriteString(o, "evil")
		if _, err := o.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	good := map[string]string{"good": "g", strings.Repeat("n", 255): "n", "..x/...": "d", "new\nline": "l"}
	for name, data := range good {
		if _, err := w.storage.Create(bucketID, "p/"+name, storage.CreateOptions{}); err != nil {
			delete(good, name)
			continue
		}
		w.put("p/"+name, data)
	}
	op := w.wait(w.importFrom("gs://corpus/p/", ""))
	c := counters(op)
	if int(c.ObjectsFailedCount) != len(bad)-refused || int(c.ObjectsCopiedCount) != len(good) || int(c.BytesFailedCount) != 4*(len(bad)-refused) {
		t.Errorf("counters %+v, want %d failed and %d copied: %+v", c, len(bad)-refused, len(good), op.Metadata.Transfer.ErrorSummaries)
	}
	for _, e := range op.Metadata.Transfer.ErrorSummaries {
		if len(e.ErrorLogEntries) > 5 || e.ErrorCount < int64(len(e.ErrorLogEntries)) || len(e.ErrorLogEntries) == 0 {
			t.Errorf("summary %s: %d errors, %d entries", e.ErrorCode, e.ErrorCount, len(e.ErrorLogEntries))
		}
	}
	got := files(t, w.data())
	for _, link := range []string{"link", "filelink", "fifo"} {
		delete(got, link)
	}
	if d := cmp.Diff(good, got); d != "" {
		t.Errorf("files (-want +got):\n%s", d)
	}
	if left, _ := os.ReadDir(outside); len(left) != 0 {
		t.Errorf("outside the instance there is %v", left)
	}
}

// TestFileAndDirectory has an object and others below its name: one side cannot be a file.
func TestFileAndDirectory(t *testing.T) {
	w := newWorld(t)
	w.create()
	w.put("a", "file")
	w.put("a/b", "below")
	c := counters(w.wait(w.importFrom("gs://corpus/", "")))
	if c.ObjectsCopiedCount != 1 || c.ObjectsFailedCount != 1 || c.FoundObjectsCount != 2 {
		t.Errorf("counters %+v, want one copied and one failed", c)
	}
}

func TestExportSpecialFiles(t *testing.T) {
	w := newWorld(t)
	w.create()
	dir := w.data()
	secret := filepath.Join(t.TempDir(), "secret")
	for _, err := range []error{
		os.WriteFile(secret, []byte("secret"), 0o600),
		os.Symlink(secret, filepath.Join(dir, "link")),
		os.Symlink(filepath.Dir(secret), filepath.Join(dir, "dirlink")),
		os.Symlink(".", filepath.Join(dir, "loop")),
		syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o666),
		os.WriteFile(filepath.Join(dir, "ok"), []byte("ok"), 0o600),
		os.WriteFile(filepath.Join(dir, "not-utf8-\xff"), []byte("x"), 0o600),
		os.WriteFile(filepath.Join(dir, "line\nend"), []byte("x"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	// A path that is too long for one system call, as a hostile user can make it.
	deep, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		name := strings.Repeat("d", 250)
		if err := syscall.Mkdirat(int(deep.Fd()), name, 0o755); err != nil {
			t.Fatal(err)
		}
		fd, err := syscall.Openat(int(deep.Fd()), name, syscall.O_DIRECTORY, 0)
		deep.Close()
		if err != nil {
			t.Fatal(err)
		}
		deep = os.NewFile(uintptr(fd), name)
	}
	deep.Close()
	op := w.wait(w.exportTo("", "gs://corpus/out/"))
	if d := cmp.Diff(map[string]string{"out/ok": "ok"}, w.objects("")); d != "" {
		t.Errorf("objects (-want +got):\n%s", d)
	}
	if c := counters(op); c.ObjectsCopiedCount != 1 || c.ObjectsSkippedCount != 4 || c.ObjectsFailedCount != 3 {
		t.Errorf("counters %+v: %+v", c, op.Metadata.Transfer.ErrorSummaries)
	}
}

func TestDiskFull(t *testing.T) {
	w := newWorld(t)
	w.create()
	w.set("lustre.capacity", fmt.Sprint(2<<20))
	w.put("a-small", "s")
	w.put("big", strings.Repeat("b", 3<<20))
	op := w.wait(w.importFrom("gs://corpus/", ""))
	c := counters(op)
	if c.ObjectsFailedCount != 1 || c.ObjectsCopiedCount != 1 || c.BytesFailedCount != 3<<20 || c.BytesCopiedCount != 1 {
		t.Errorf("counters %+v", c)
	}
	want := []api.ErrorSummary{{ErrorCode: "RESOURCE_EXHAUSTED", ErrorCount: 1, ErrorLogEntries: []api.ErrorLogEntry{{URI: "gs://corpus/big", ErrorDetails: []string{"no space left on device"}}}}}
	if d := cmp.Diff(want, op.Metadata.Transfer.ErrorSummaries); d != "" {
		t.Errorf("errors (-want +got):\n%s", d)
	}
}

func TestCorruption(t *testing.T) {
	w := newWorld(t)
	w.create()
	data := strings.Repeat("abc", 300000)
	w.put("in/good", data)
	w.put("in/bad", data)
	w.set("lustre.import.corrupt", "gs://corpus/in/bad")
	op := w.wait(w.importFrom("gs://corpus/in/", ""))
	got := files(t, w.data())
	if got["good"] != data || len(got["bad"]) != len(data) || differ(got["bad"], data) != 1 {
		t.Errorf("import: good is right: %v; bad differs in %d bytes, want 1", got["good"] == data, differ(got["bad"], data))
	}
	if c := counters(op); c.ObjectsCopiedCount != 2 || c.ObjectsFailedCount != 0 {
		t.Errorf("the service notices nothing: %+v", c)
	}
	w.set("lustre.export.corrupt", "gs://corpus/out/good")
	w.wait(w.exportTo("", "gs://corpus/out/"))
	if got := w.objects("out/")["out/good"]; differ(got, data) != 1 {
		t.Errorf("export differs in %d bytes, want 1", differ(got, data))
	}
}

func differ(a, b string) int {
	n := max(len(a), len(b)) - min(len(a), len(b))
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			n++
		}
	}
	return n
}

// failing is a bucket with objects that cannot be read or written.
type failing struct{ lustre.Bucket }

func (f failing) Open(bucket, name string) (io.ReadCloser, error) {
	if strings.Contains(name, "forbidden") {
		return nil, fs.ErrPermission
	}
	return f.Bucket.Open(bucket, name)
}

func (f failing) Create(bucket, name string) (lustre.ObjectWriter, error) {
	if strings.Contains(name, "forbidden") {
		return nil, fs.ErrPermission
	}
	return f.Bucket.Create(bucket, name)
}

func TestFailedObjects(t *testing.T) {
	w := newWorld(t, func(o *lustre.Options) { o.Bucket = failing{o.Bucket} })
	w.create()
	for i := range 8 {
		w.put(fmt.Sprintf("in/forbidden%d", i), "xx")
		w.put(fmt.Sprintf("in/ok%d", i), "xx")
	}
	op := w.wait(w.importFrom("gs://corpus/in/", ""))
	if d := cmp.Diff(api.TransferCounters{
		FoundObjectsCount: 16, BytesFoundCount: 32, ObjectsCopiedCount: 8, BytesCopiedCount: 16, ObjectsFailedCount: 8, BytesFailedCount: 16,
	}, counters(op)); d != "" {
		t.Errorf("counters (-want +got):\n%s", d)
	}
	want := []api.ErrorSummary{{ErrorCode: "PERMISSION_DENIED", ErrorCount: 8}}
	if d := cmp.Diff(want, op.Metadata.Transfer.ErrorSummaries, cmpopts.IgnoreFields(api.ErrorSummary{}, "ErrorLogEntries")); d != "" || len(op.Metadata.Transfer.ErrorSummaries[0].ErrorLogEntries) != 5 {
		t.Errorf("errors %+v (-want +got):\n%s", op.Metadata.Transfer.ErrorSummaries, d)
	}
	for i := range 2 {
		if err := os.WriteFile(filepath.Join(w.data(), fmt.Sprintf("forbidden-%d", i)), []byte("y"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	op = w.wait(w.exportTo("", "gs://corpus/out/"))
	if c := counters(op); c.ObjectsFailedCount != 2 || c.ObjectsCopiedCount != 8 {
		t.Errorf("export: %+v", c)
	}
}

// TestBigImport streams more than the transfer may hold in memory, and shows progress meanwhile.
func TestBigImport(t *testing.T) {
	w := newWorld(t)
	w.create()
	const size = 128 << 20
	table := crc32.MakeTable(crc32.Castagnoli)
	o, err := w.storage.Create(bucketID, "big", storage.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	h := crc32.New(table)
	if _, err := io.CopyN(io.MultiWriter(o, h), rand.NewChaCha8([32]byte{7}), size); err != nil {
		t.Fatal(err)
	}
	if _, err := o.Commit(); err != nil {
		t.Fatal(err)
	}
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	w.set("lustre.transfer.rate", fmt.Sprint(size))
	start := time.Now()
	partly := false
	op := w.importFrom("gs://corpus/", "")
	done, err := w.Wait(w.ctx(), op.Name, func(op *api.Operation) {
		c := counters(op)
		partly = partly || c.BytesCopiedCount > 0 && c.BytesCopiedCount < size
	})
	if err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took < 900*time.Millisecond {
		t.Errorf("%d bytes at %d bytes a second took only %v", size, size, took)
	}
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > size/4 {
		t.Errorf("the import allocated %d MiB", grown>>20)
	}
	if !partly {
		t.Error("no progress was seen")
	}
	if c := counters(done); c.BytesCopiedCount != size {
		t.Errorf("counters %+v", c)
	}
	f, err := os.Open(filepath.Join(w.data(), "big"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got := crc32.New(table)
	if n, err := io.Copy(got, f); n != size || err != nil || got.Sum32() != h.Sum32() {
		t.Errorf("the file has %d bytes with CRC32C %08x, want %08x (%v)", n, got.Sum32(), h.Sum32(), err)
	}
}
