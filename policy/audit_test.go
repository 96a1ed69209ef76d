package policy

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/internal/clock"
)

// frozen is a clock that stands.
type frozen struct{ clock.Clock }

func (frozen) Now() time.Time { return time.Date(2026, 3, 4, 5, 6, 7, 89, time.UTC) }

func openAudit(t *testing.T, path string) *Audit {
	t.Helper()
	a, err := OpenAudit(path, frozen{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return a
}

func lines(t *testing.T, path string) []string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for line := range strings.Lines(string(data)) {
		if !json.Valid([]byte(line)) && line != "{\"cut\n" {
			t.Errorf("not JSON: %q", line)
		}
		all = append(all, strings.TrimSuffix(line, "\n"))
	}
	return all
}

var entry = Entry{Event: "directive", Who: "alice (uid 10001)", What: "read gs://b/p/", Decision: Denied, Why: "no\n\x1b[2Jrule", Job: 7}

const entryLine = `{"time":"2026-03-04T05:06:07.000000089Z","event":"directive","who":"alice (uid 10001)","what":"read gs://b/p/","decision":"denied","why":"no\n\u001b[2Jrule","job":7}`

func TestAudit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log", "audit.log")
	a := openAudit(t, path)
	if err := a.Write(entry); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{entryLine}, lines(t, path)); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	for _, p := range []string{path, filepath.Dir(path)} {
		info, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has the mode %v, others can look at it", p, info.Mode())
		}
	}
}

func TestAuditBoundsHostileText(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	if err := openAudit(t, path).Write(Entry{Why: strings.Repeat("ü", 1<<20)}); err != nil {
		t.Fatal(err)
	}
	if got := lines(t, path); len(got) != 1 || len(got[0]) > 2*maxField {
		t.Errorf("%d lines, the first of %d bytes", len(got), len(got[0]))
	}
}

// Moved away, removed or copied and truncated: the next entry is at the path.
func TestAuditSurvivesRotation(t *testing.T) {
	for _, tt := range []struct {
		name   string
		rotate func(path string) error
	}{
		{"moved", func(p string) error { return os.Rename(p, p+".1") }},
		{"removed", os.Remove},
		{"moved and made anew", func(p string) error {
			return errors.Join(os.Rename(p, p+".1"), os.WriteFile(p, nil, 0o644))
		}},
		{"truncated", func(p string) error { return os.Truncate(p, 0) }},
		{"directory gone", func(p string) error { return os.RemoveAll(filepath.Dir(p)) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "log", "audit.log")
			a := openAudit(t, path)
			for range 2 {
				if err := a.Write(entry); err != nil {
					t.Fatal(err)
				}
			}
			if err := tt.rotate(path); err != nil {
				t.Fatal(err)
			}
			if err := a.Write(entry); err != nil {
				t.Fatal(err)
			}
			if got := lines(t, path); len(got) != 1 {
				t.Errorf("%d lines after the rotation, want 1", len(got))
			}
			if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("mode after the rotation: %v, %v", info.Mode(), err)
			}
			if old, err := os.ReadFile(path + ".1"); err == nil && strings.Count(string(old), "\n") != 2 {
				t.Errorf("the old file has lost or got lines:\n%s", old)
			}
		})
	}
}

func TestAuditBeginsALineOfItsOwn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	if err := os.WriteFile(path, []byte("{\"cut"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := openAudit(t, path).Write(entry); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{`{"cut`, entryLine}, lines(t, path)); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode: %v, %v, want 0600 whatever it was", info.Mode(), err)
	}
}

func TestAuditRefusesWhatIsNoFile(t *testing.T) {
	dir := t.TempDir()
	link, pipe := filepath.Join(dir, "link"), filepath.Join(dir, "pipe")
	if err := errors.Join(os.Symlink("/tmp/elsewhere", link), syscall.Mkfifo(pipe, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, pipe, dir} {
		if a, err := OpenAudit(path, frozen{}); err == nil {
			a.Close()
			t.Errorf("%s was taken as the audit log", path)
		}
	}
}

func TestAuditOfManyAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit.log")
	a := openAudit(t, path)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 20 {
				if err := a.Write(Entry{Event: "x", Who: fmt.Sprint(i, " ", j)}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got := len(lines(t, path)); got != 160 {
		t.Errorf("%d lines, want 160", got)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if err := a.Write(entry); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("after Close: %v, want %v", err, fs.ErrClosed)
	}
}

// /dev/full stands for a full disk.
func TestAuditSaysThatItCannotWrite(t *testing.T) {
	a := openAudit(t, filepath.Join(t.TempDir(), "audit.log"))
	full, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	a.mu.Lock()
	a.file.Close()
	a.file, a.path = full, "/dev/full"
	a.mu.Unlock()
	if err := a.Write(entry); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("got %v, want ENOSPC", err)
	}
}
