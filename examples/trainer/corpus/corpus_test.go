package corpus

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// write makes files from a map of relative path to content.
func write(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func open(t *testing.T, dir string) *Corpus {
	t.Helper()
	c, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func TestWindow(t *testing.T) {
	dir := write(t, map[string]string{"a": "0123", "b/c": "", "b/d": "xyz", "e": ""})
	c := open(t, dir)
	if c.Files() != 4 || c.Size() != 7 {
		t.Errorf("got %d files of %d bytes, want 4 of 7", c.Files(), c.Size())
	}
	for _, test := range []struct {
		at           int64
		before, size int
		want         string
	}{
		{0, 0, 2, "01"},
		{0, 2, 4, "\x00\x0001"},
		{1, 2, 4, "\x0001" + "2"},
		{3, 1, 5, "23"},
		{4, 1, 5, "\x00xyz"},
		{6, 5, 6, "\x00\x00\x00xyz"},
		{6, 1, 9, "yz"},
	} {
		buf := []byte("?????????")[:test.size]
		n, err := c.Window(buf, test.at, test.before)
		if got := string(buf[:n]); err != nil || got != test.want {
			t.Errorf("at %d, %d before, size %d: got %q, %v, want %q", test.at, test.before, test.size, got, err, test.want)
		}
	}
	for _, at := range []int64{-1, 7} {
		if _, err := c.Window(make([]byte, 1), at, 0); err == nil {
			t.Errorf("at %d: got no error", at)
		}
	}
}

func TestManyFiles(t *testing.T) {
	files := map[string]string{}
	for i := range maxOpen + 10 {
		files[fmt.Sprintf("%04d", i)] = fmt.Sprintf("%04d", i)
	}
	c := open(t, write(t, files))
	for i := range maxOpen + 10 {
		buf := make([]byte, 4)
		if _, err := c.Window(buf, int64(4*i), 0); err != nil || string(buf) != fmt.Sprintf("%04d", i) {
			t.Fatalf("file %d: got %q, %v", i, buf, err)
		}
	}
	if c.open != maxOpen {
		t.Errorf("%d files stay open, want %d", c.open, maxOpen)
	}
}

func TestLinks(t *testing.T) {
	dir := write(t, map[string]string{"real/a": "12", "real/b": "3"})
	if err := os.Symlink("real/a", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("..", filepath.Join(dir, "real/loop")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(dir, filepath.Join(dir, "all")); err != nil {
		t.Fatal(err)
	}
	direct, linked := open(t, dir), open(t, filepath.Join(dir, "all"))
	if direct.Files() != 3 || direct.Size() != 5 {
		t.Errorf("got %d files of %d bytes, want 3 of 5", direct.Files(), direct.Size())
	}
	if direct.Fingerprint() != linked.Fingerprint() {
		t.Error("the fingerprint depends on the path of the directory")
	}
	if other := open(t, write(t, map[string]string{"real/a": "12", "real/b": "3"})); other.Fingerprint() == direct.Fingerprint() {
		t.Error("a corpus with fewer files has the same fingerprint")
	}
}

func TestErrors(t *testing.T) {
	broken := write(t, map[string]string{"a": "1"})
	if err := os.Symlink("absent", filepath.Join(broken, "b")); err != nil {
		t.Fatal(err)
	}
	one := write(t, map[string]string{"a": "1"})
	for name, test := range map[string]struct{ dir, want string }{
		"no directory":  {filepath.Join(one, "absent"), "no such file"},
		"a file":        {filepath.Join(one, "a"), "not a directory"},
		"no files":      {t.TempDir(), "no files below"},
		"empty files":   {write(t, map[string]string{"a": "", "b": ""}), "all 2 files"},
		"a broken link": {broken, "no such file"},
	} {
		if _, err := Open(test.dir); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want an error with %q", name, err, test.want)
		}
	}
	c := open(t, one)
	if err := os.Truncate(filepath.Join(one, "a"), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Window(make([]byte, 1), 0, 0); err == nil || !strings.Contains(err.Error(), "became shorter") {
		t.Errorf("a file cut short: got %v", err)
	}
}
