package atomicfile

import (
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
)

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	for _, test := range []struct {
		data string
		mode fs.FileMode
	}{{"one", 0o644}, {"", 0o600}, {"two", 0o666}} {
		if err := Write(path, []byte(test.data), test.mode); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != test.data {
			t.Errorf("content %q, %v; want %q", got, err, test.data)
		}
		if info, err := os.Stat(path); err != nil || info.Mode() != test.mode {
			t.Errorf("mode %v, %v; want %v", info.Mode(), err, test.mode)
		}
	}
	onlyFile(t, dir, "f")
}

func onlyFile(t *testing.T, dir, name string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 || entries[0].Name() != name {
		t.Errorf("the directory holds %v, %v; want %s alone", entries, err, name)
	}
}

func TestFailureLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "d"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := Write(filepath.Join(dir, "d"), []byte("x"), 0o644); err == nil {
		t.Error("a directory was replaced by a file")
	}
	onlyFile(t, dir, "d")
	if err := Write(filepath.Join(dir, "no", "f"), []byte("x"), 0o644); err == nil {
		t.Error("a file was written into a directory that does not exist")
	}
}

// TestSymlink: the link itself is replaced, not what it points to.
func TestSymlink(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(dir, "target")
	if err := os.WriteFile(target, []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	if err := Write(link, []byte("new"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(target); string(got) != "old" {
		t.Errorf("the link's target holds %q", got)
	}
	if info, err := os.Lstat(link); err != nil || !info.Mode().IsRegular() {
		t.Errorf("the link is now %v, %v", info.Mode(), err)
	}
}

// TestReadersSeeWholeFiles writes and reads at the same time.
func TestReadersSeeWholeFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	contents := [][]byte{make([]byte, 1<<16), make([]byte, 1<<10)}
	for i := range contents {
		for j := range contents[i] {
			contents[i][j] = byte('a' + i)
		}
	}
	if err := Write(path, contents[0], 0o644); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(stop)
		for i := range 50 {
			if err := Write(path, contents[i%2], 0o644); err != nil {
				t.Error(err)
			}
		}
	})
	for {
		got, err := os.ReadFile(path)
		if err != nil || string(got) != string(contents[0]) && string(got) != string(contents[1]) {
			t.Fatalf("read %d bytes, %v", len(got), err)
		}
		select {
		case <-stop:
			wg.Wait()
			return
		default:
		}
	}
}
