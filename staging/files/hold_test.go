package files_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
	"github.com/sluicehpc/sluice/staging/files"
)

// outOf makes a job's directory with files of alice's, and their manifest.
func outOf(t *testing.T, m string, texts map[string]string) (job string, manifest []byte) {
	t.Helper()
	job = files.JobDir("c", 9)
	if err := c.MkdirJob(t.Context(), m, job, uid, gid); err != nil {
		t.Fatal(err)
	}
	for path, text := range texts {
		write(t, filepath.Join(m, job, "out", path), text)
	}
	err := filepath.Walk(filepath.Join(m, job, "out"), func(path string, _ os.FileInfo, err error) error {
		return errors.Join(err, os.Chown(path, uid, gid))
	})
	if err != nil {
		t.Fatal(err)
	}
	list, _, err := c.Manifest(t.Context(), alice, m, job, "out", 10, nil)
	if err != nil {
		t.Fatal(err)
	}
	return job, files.Lines(list)
}

// held reads what the service would export.
func held(t *testing.T, m string) map[string]string {
	t.Helper()
	top := filepath.Join(m, files.ExportDir("t1"))
	got := map[string]string{}
	err := filepath.Walk(top, func(path string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		rel, _ := filepath.Rel(top, path)
		got[rel] = string(data)
		return err
	})
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return got
}

func TestHold(t *testing.T) {
	texts := map[string]string{"a": "aa", "sub/deep/b": "bbb", "sub/empty": ""}
	for name, apart := range map[string]bool{"links": false, "copies across projects": true} {
		t.Run(name, func(t *testing.T) {
			m, f := lustre(t)
			job, manifest := outOf(t, m, texts)
			f.Behave(t, lustrefs.Behaviour{EXDEV: apart})
			for range 2 { // the second one, as after a crash
				if err := c.Hold(t.Context(), m, job, "out", "t1", manifest); err != nil {
					t.Fatal(err)
				}
			}
			if d := cmp.Diff(texts, held(t, m)); d != "" {
				t.Errorf("held (-want +got):\n%s", d)
			}
			if mode, owner, _ := stat(t, filepath.Join(m, files.ExportDir("t1"))); mode.Perm() != 0o700 || owner != 0 {
				t.Errorf("the export's directory: %v of %d, want root's with 0700", mode, owner)
			}
			if err := c.Remove(t.Context(), m, files.ExportDir("t1")); err != nil {
				t.Fatal(err)
			}
			left, err := os.ReadDir(filepath.Join(m, files.Exports))
			if err != nil || len(left) != 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		})
	}
}

// Between the manifest, which is made as the user, and the export, which is root's,
// the user puts in the place of a file what the user may not read.
func TestHoldTakesOnlyWhatTheUserRead(t *testing.T) {
	const secret = "bob's"
	for name, swap := range map[string]func(out, bobs string) error{
		"a file that was moved there, from a shared directory": func(out, bobs string) error {
			return os.Rename(filepath.Join(bobs, "f"), out+"/sub/b")
		},
		"a hard link, where the kernel lets users make them": func(out, bobs string) error {
			return errors.Join(os.Remove(out+"/sub/b"), os.Link(filepath.Join(bobs, "f"), out+"/sub/b"))
		},
		"a symbolic link": func(out, bobs string) error {
			return errors.Join(os.Remove(out+"/sub/b"), os.Symlink(filepath.Join(bobs, "f"), out+"/sub/b"))
		},
		"a directory's symbolic link": func(out, bobs string) error {
			return errors.Join(os.Rename(out+"/sub", out+"/old"), os.Rename(bobs+"/f", bobs+"/b"), os.Symlink(bobs, out+"/sub"))
		},
		"the tree's symbolic link": func(out, bobs string) error {
			return errors.Join(os.Rename(out, out+".old"), os.Mkdir(bobs+"/sub", 0o755), os.Rename(bobs+"/f", bobs+"/sub/b"), os.Symlink(bobs, out))
		},
		"nothing": func(out, _ string) error { return os.Remove(out + "/sub/b") },
	} {
		for _, apart := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				m, f := lustre(t)
				bobs := filepath.Join(m, "bobs")
				write(t, bobs+"/f", secret)
				if err := os.Chmod(bobs+"/f", 0o600); err != nil {
					t.Fatal(err)
				}
				job, manifest := outOf(t, m, map[string]string{"a": "aa", "sub/b": "bbb"})
				if err := swap(filepath.Join(m, job, "out"), bobs); err != nil {
					t.Fatal(err)
				}
				f.Behave(t, lustrefs.Behaviour{EXDEV: apart})
				var e *files.Error
				if err := c.Hold(t.Context(), m, job, "out", "t1", manifest); !errors.As(err, &e) || !e.Input {
					t.Errorf("got %v, want a refusal", err)
				}
				for path, text := range held(t, m) {
					if text == secret {
						t.Errorf("%s is another user's file", path)
					}
				}
			})
		}
	}
}
