package files_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/sandbox/lustre/fusetest"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
	"github.com/sluicehpc/sluice/staging/files"
)

// lustre mounts the sandbox's Lustre.
func lustre(t *testing.T) (string, *fusetest.Mount) {
	t.Helper()
	dir := mount(t)
	return dir, fusetest.New(t, mount(t), dir, "10.129.0.2@tcp:/scratch", lustrefs.Options{})
}

func published(t *testing.T, m string, texts map[string]string) {
	t.Helper()
	if _, err := c.Prepare(t.Context(), m, "ds", "v1", "t1"); err != nil {
		t.Fatal(err)
	}
	for path, text := range texts {
		write(t, filepath.Join(m, files.PartialDir("ds", "v1", "t1"), path), text)
	}
	pub := files.Published{Dataset: "ds", Version: "v1", Transfer: "t1", Objects: int64(len(texts))}
	if err := c.Publish(t.Context(), m, pub, files.Lines(entries(texts))); err != nil {
		t.Fatal(err)
	}
}

// Where a hard link would leave a project, the group gets a copy.
func TestGateAcrossProjects(t *testing.T) {
	for name, apart := range map[string]func(m string, f *fusetest.Mount) error{
		"projects of lfs": func(m string, _ *fusetest.Mount) error {
			gates := filepath.Join(m, files.DatasetDir("ds"), "gates")
			if err := os.Mkdir(gates, 0o711); err != nil {
				return err
			}
			return unix.Setxattr(gates, lustrefs.ProjectAttr, []byte(`{"id":7,"inherit":true}`), 0)
		},
		"every directory": func(_ string, f *fusetest.Mount) error {
			f.Behave(t, lustrefs.Behaviour{EXDEV: true})
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, f := lustre(t)
			texts := map[string]string{"a.txt": "hello", "d/b.txt": "world", "d/e/empty": ""}
			published(t, m, texts)
			if err := apart(m, f); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if err := c.Gate(t.Context(), m, "ds", "v1", gid); err != nil {
					t.Fatal(err)
				}
			}
			gate := filepath.Join(m, files.GateDir("ds", "v1", gid))
			for path, want := range texts {
				file := filepath.Join(gate, path)
				if got, err := os.ReadFile(file); err != nil || string(got) != want {
					t.Errorf("%s: %q, %v, want %q", path, got, err, want)
				}
				if mode, owner, group := stat(t, file); mode != 0o444 || owner != 0 || group != 0 {
					t.Errorf("%s: %v %d:%d, want root's with 0444", path, mode, owner, group)
				}
				if os.SameFile(info(t, file), info(t, filepath.Join(m, files.VersionDir("ds", "v1"), path))) {
					t.Errorf("%s is a link: the test shows nothing", path)
				}
			}
		})
	}
}

func info(t *testing.T, path string) os.FileInfo {
	t.Helper()
	i, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// A squashed root is named, whatever it hits first.
func TestRootSquashIsNamed(t *testing.T) {
	squash := lustrefs.Behaviour{SquashUID: 65534, SquashGID: 65534}
	ctx := t.Context()
	for name, tt := range map[string]struct {
		before func(m string)
		do     func(m string) error
	}{
		"the first job":          {func(string) {}, func(m string) error { return c.MkdirJob(ctx, m, files.JobDir("c", 7), uid, gid) }},
		"a job beside others":    {func(m string) { c.MkdirJob(ctx, m, files.JobDir("c", 6), uid, gid) }, func(m string) error { return c.MkdirJob(ctx, m, files.JobDir("c", 7), uid, gid) }},
		"a transfer's directory": {func(string) {}, func(m string) error { _, err := c.Prepare(ctx, m, "ds", "v1", "t1"); return err }},
		"publication": {func(m string) { c.Prepare(ctx, m, "ds", "v1", "t1") }, func(m string) error {
			return c.Publish(ctx, m, files.Published{Dataset: "ds", Version: "v1", Transfer: "t1"}, nil)
		}},
		"verification": {func(m string) { c.Prepare(ctx, m, "ds", "v1", "t1") }, func(m string) error {
			_, err := c.Verify(ctx, m, files.PartialDir("ds", "v1", "t1"), nil, nil)
			return err
		}},
		"a gate": {func(m string) { published(t, m, map[string]string{"a": "x"}) }, func(m string) error { return c.Gate(ctx, m, "ds", "v1", gid) }},
	} {
		t.Run(name, func(t *testing.T) {
			m, f := lustre(t)
			tt.before(m)
			f.Behave(t, squash)
			err := tt.do(m)
			var e *files.Error
			if !errors.As(err, &e) || !strings.HasPrefix(e.Message, "root squash: ") || !strings.Contains(e.Hint, "NO_SQUASH") {
				t.Errorf("got %v, want an error that names root squash and what to do", err)
			}
		})
	}
}
