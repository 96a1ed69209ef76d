package staging

import (
	"context"
	"errors"
	"iter"
	"strings"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/gcp/storage"
	"github.com/sluicehpc/sluice/staging/files"
)

func TestMoves(t *testing.T) {
	states := []State{Queued, Running, Verifying, Done, Failed, Cancelled}
	legal := map[string]bool{
		"QUEUED RUNNING": true, "QUEUED FAILED": true, "QUEUED CANCELLED": true,
		"RUNNING VERIFYING": true, "RUNNING QUEUED": true, "RUNNING FAILED": true, "RUNNING CANCELLED": true,
		"VERIFYING DONE": true, "VERIFYING FAILED": true, "VERIFYING CANCELLED": true,
	}
	for _, from := range states {
		for _, to := range states {
			tr := Transfer{ID: "x", State: from}
			err := tr.Enter(to)
			if want := legal[string(from)+" "+string(to)]; (err == nil) != want {
				t.Errorf("%s to %s: %v, want legal %v", from, to, err, want)
			}
			if err != nil && tr.State != from {
				t.Errorf("%s to %s: an illegal move changed the state to %s", from, to, tr.State)
			}
		}
		if got, want := from.Ended(), from == Done || from == Failed || from == Cancelled; got != want {
			t.Errorf("%s.Ended() = %v, want %v", from, got, want)
		}
	}
}

type fakeBucket map[string]storage.Object

func (f fakeBucket) Check(context.Context, storage.Place) error { return nil }

func (f fakeBucket) ListPrefix(_ context.Context, p storage.Place) iter.Seq2[storage.Object, error] {
	return func(yield func(storage.Object, error) bool) {
		for name, o := range f {
			o.Name = name
			if strings.HasPrefix(name, p.Prefix) && !yield(o, nil) {
				return
			}
		}
	}
}

func TestList(t *testing.T) {
	b := fakeBucket{"p/": {}, "p/a": {Size: 3, Generation: 1, CRC32C: 7}, "p/dir/": {}}
	l, err := List(t.Context(), b, storage.Place{Bucket: "bucket", Prefix: "p/"}, false)
	if err != nil {
		t.Fatal(err)
	}
	if l.Objects != 3 || l.Bytes != 3 || len(l.Entries) != 2 {
		t.Errorf("got %+v, want 3 objects, 3 bytes and 2 entries", l)
	}
	one := fakeBucket{"p/a": {Size: 3, Generation: 1, CRC32C: 7}}
	version := func(o storage.Object) string {
		l, err := List(t.Context(), fakeBucket{"p/a": o}, storage.Place{Bucket: "bucket", Prefix: "p/"}, false)
		if err != nil {
			t.Fatal(err)
		}
		return l.Version
	}
	base := version(one["p/a"])
	for _, o := range []storage.Object{{Size: 4, Generation: 1, CRC32C: 7}, {Size: 3, Generation: 2, CRC32C: 7}, {Size: 3, Generation: 1, CRC32C: 8}} {
		if version(o) == base {
			t.Errorf("%+v has the version of %+v", o, one["p/a"])
		}
	}
	if again := version(one["p/a"]); again != base {
		t.Errorf("version %s, then %s", base, again)
	}
	if _, err := List(t.Context(), fakeBucket{}, storage.Place{Bucket: "bucket", Prefix: "p/"}, true); err != nil {
		t.Errorf("allow_empty: %v", err)
	}
	for name, b := range map[string]fakeBucket{
		"empty":              {},
		"file and directory": {"p/a": {Size: 1}, "p/a/b": {Size: 1}},
		"file and marker":    {"p/a": {Size: 1}, "p/a/": {}},
		"data in a marker":   {"p/a/": {Size: 1}},
		"absolute":           {"p//etc/passwd": {Size: 1}},
		"dot dot":            {"p/../x": {Size: 1}},
		"NUL":                {"p/a\x00b": {Size: 1}},
		"long component":     {"p/" + strings.Repeat("x", 256): {Size: 1}},
	} {
		var e *Error
		_, err := List(t.Context(), b, storage.Place{Bucket: "bucket", Prefix: "p/"}, false)
		if !errors.As(err, &e) {
			t.Errorf("%s: got %v, want an error for a person", name, err)
		} else if len(e.Message) > 200 || strings.Contains(e.Message, "\n") || e.Hint == "" {
			t.Errorf("%s: message %q, hint %q", name, e.Message, e.Hint)
		}
	}
}

func FuzzDatasetID(f *testing.F) {
	f.Add("bucket", "p/")
	f.Add("bucket", "../../etc/")
	f.Add("b", strings.Repeat("é/", 500))
	f.Fuzz(func(t *testing.T, bucket, prefix string) {
		id := DatasetID(bucket, prefix)
		if len(id) > 80 || files.CheckName(id) != "" || strings.Contains(id, "/") {
			t.Errorf("DatasetID(%q, %q) = %q is not a directory's name", bucket, prefix, id)
		}
		if DatasetID(bucket, prefix+"x/") == id {
			t.Errorf("%q and %q have one id", prefix, prefix+"x/")
		}
	})
}

func TestJudge(t *testing.T) {
	x := &run{t: Transfer{ID: "t1", Kind: StageIn, FS: "fast", Bucket: "b", Prefix: "p/", Objects: 3, Bytes: 5 << 20}, cancel: make(chan struct{})}
	r := &Runner{}
	op := func(opErr *lustre.OperationError, failed int64, entries ...lustre.ErrorLogEntry) *lustre.Operation {
		m := &lustre.TransferMetadata{Counters: lustre.TransferCounters{ObjectsFailedCount: failed}}
		if len(entries) > 0 {
			m.ErrorSummaries = []lustre.ErrorSummary{{ErrorCode: "DATA_LOSS", ErrorCount: failed, ErrorLogEntries: entries}}
		}
		return &lustre.Operation{Done: true, Error: opErr, Metadata: &lustre.OperationMetadata{Transfer: m}}
	}
	for _, tt := range []struct {
		name string
		op   *lustre.Operation
		want string
	}{
		{"all copied", op(nil, 0), ""},
		{"one failed", op(nil, 1, lustre.ErrorLogEntry{URI: "gs://b/p/x", ErrorDetails: []string{"checksum"}}), "gs://b/p/: 1 of 3 objects were not imported: gs://b/p/x: checksum"},
		{"full", op(nil, 2, lustre.ErrorLogEntry{URI: "gs://b/p/x", ErrorDetails: []string{"write: no space left on device"}}), "file system fast is full: gs://b/p/ needs 5.0 MiB"},
		{"operation failed", op(&lustre.OperationError{Code: 7, Message: "no permission"}, 0), "gs://b/p/: the import failed: no permission"},
		{"not permitted", op(&lustre.OperationError{Code: 7, Message: "x cannot get a token of y: Permission 'iam.serviceAccounts.getAccessToken' denied on resource 'z' (or it may not exist)."}, 0),
			"gs://b/p/: the import failed for want of iam.serviceAccounts.getAccessToken: x cannot get a token of y: Permission 'iam.serviceAccounts.getAccessToken' denied on resource 'z' (or it may not exist)."},
		{"cancelled by another", op(&lustre.OperationError{Code: lustre.Cancelled}, 0), "gs://b/p/: the service's transfer was cancelled by somebody else"},
		{"failed without metadata", &lustre.Operation{Done: true, Error: &lustre.OperationError{Code: 13, Message: "internal"}}, "gs://b/p/: the import failed: internal"},
	} {
		err := r.judge(x, tt.op)
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || err.Error() != tt.want) {
			t.Errorf("%s: got %v, want %q", tt.name, err, tt.want)
		}
	}
}

func TestMeter(t *testing.T) {
	var m meter
	t0 := time.Unix(1000, 0)
	if got := m.rate(t0); got != 0 {
		t.Errorf("rate of nothing = %v", got)
	}
	for i := range 10 {
		m.add(t0.Add(time.Duration(i)*time.Second), int64(i)*100)
	}
	if got := m.rate(t0.Add(9 * time.Second)); got != 100 {
		t.Errorf("rate = %v, want 100 bytes a second", got)
	}
	if got := m.rate(t0.Add(30 * time.Second)); got != 0 {
		t.Errorf("rate after a silence = %v, want 0", got)
	}
	m.add(t0.Add(10*time.Second), 0)
	if got := m.rate(t0.Add(10 * time.Second)); got != 0 {
		t.Errorf("rate at the start of another phase = %v, want 0", got)
	}
}

func TestSize(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 5 << 30: "5.0 GiB"} {
		if got := size(n); got != want {
			t.Errorf("size(%d) = %q, want %q", n, got, want)
		}
	}
}
