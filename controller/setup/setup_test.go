package setup

import (
	"bytes"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestKeyIsMadeOnce(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("needs root to give the key to its owner")
	}
	dir := filepath.Join(t.TempDir(), "etc", "slurm")
	path := filepath.Join(dir, "slurm.key")
	made, err := makeKey(t.Context(), path, "nobody")
	if err != nil || !made {
		t.Fatalf("%v, %v", made, err)
	}
	first, err := os.ReadFile(path)
	if err != nil || len(first) != keySize || bytes.Equal(first, make([]byte, keySize)) {
		t.Fatalf("%d bytes, %v", len(first), err)
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode() != 0o600 || st.Sys().(*syscall.Stat_t).Uid == 0 {
		t.Errorf("%v, %v, want the owner's alone", st, err)
	}
	// A setup that is repeated, or a site's own key: nodes hold it already.
	if made, err := makeKey(t.Context(), path, "nobody"); err != nil || made {
		t.Errorf("again: %v, %v, want nothing done", made, err)
	}
	if again, err := os.ReadFile(path); err != nil || !bytes.Equal(again, first) {
		t.Errorf("the key was replaced: %v", err)
	}
	if _, err := makeKey(t.Context(), filepath.Join(dir, "other.key"), "no-such-user-here"); err == nil {
		t.Error("an owner that does not exist: no error")
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 {
		t.Errorf("left %v, %v, want the key alone", left, err)
	}
}
