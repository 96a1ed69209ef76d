package lustre_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	api "github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/sandbox/lustre"
	"github.com/sluicehpc/sluice/sandbox/lustre/fusetest"
)

// mount does what a virtual machine and the sandbox do together.
func (w *world) mount(source string, readOnly bool) (string, error) {
	w.t.Helper()
	return w.mountOn(lustre.Client{VM: "n1", Address: netip.MustParseAddr("10.128.0.2")}, source, readOnly)
}

func (w *world) mountOn(c lustre.Client, source string, readOnly bool) (string, error) {
	w.t.Helper()
	dir := w.t.TempDir()
	return dir, w.server.ServeMount(w.ctx(), c, source, readOnly, fusetest.Open(w.t, dir, source))
}

func TestMount(t *testing.T) {
	w := newWorld(t)
	inst := w.create()
	w.put("d/a", "from the bucket")
	dir, err := w.mount(inst.MountPoint, false)
	if err != nil {
		t.Fatal(err)
	}
	w.wait(w.importFrom("gs://corpus/", ""))
	if b, err := os.ReadFile(filepath.Join(dir, "d/a")); err != nil || string(b) != "from the bucket" {
		t.Errorf("imported file: %q, %v", b, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "result"), []byte("from the node"), 0o600); err != nil {
		t.Fatal(err)
	}
	w.wait(w.exportTo("", "gs://corpus/out/"))
	if got := w.objects("out/")["out/result"]; got != "from the node" {
		t.Errorf("exported object: %q", got)
	}
	readOnly, err := w.mount(inst.MountPoint, true)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(readOnly, "x"), nil, 0o600); !errors.Is(err, syscall.EROFS) {
		t.Errorf("write to a read-only mount: %v", err)
	}
	if got := w.server.Mounts(); len(got) != 2 || got[0].Instance != scratch || got[0].PID == got[1].PID {
		t.Errorf("mounts %+v, want two processes of %s", got, scratch)
	}

	// A full disk, and one that is not full any more.
	w.set("lustre.capacity", fmt.Sprint(1<<20))
	big := filepath.Join(dir, "big")
	waitFor(t, "the disk to be full", func() bool {
		return errors.Is(os.WriteFile(big, []byte(strings.Repeat("x", 2<<20)), 0o600), syscall.ENOSPC)
	})
	if err := w.faults.Clear("lustre.capacity"); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "room on the disk", func() bool { return os.WriteFile(big, []byte(strings.Repeat("x", 2<<20)), 0o600) == nil })

	// One client ends, its process ends; the instance ends, the others do.
	if err := syscall.Unmount(readOnly, 0); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "one mount", func() bool { return len(w.server.Mounts()) == 1 })
	op, err := w.DeleteInstance(w.ctx(), &api.DeleteInstanceRequest{Name: scratch})
	if err != nil {
		t.Fatal(err)
	}
	w.wait(op)
	if _, err := os.Stat(dir); !errors.Is(err, syscall.ENOTCONN) {
		t.Errorf("mount of a deleted instance: %v, want ENOTCONN", err)
	}
}

func TestMountRefused(t *testing.T) {
	w := newWorld(t)
	w.create()
	for _, tt := range []struct {
		source string
		want   syscall.Errno
	}{
		{"10.129.0.77@tcp:/scratch", syscall.EIO},
		{"10.129.0.2@tcp:/other", syscall.ENOENT},
		{"10.129.0.2@tcp:/scratch/sub", syscall.EINVAL},
		{"nonsense", syscall.EINVAL},
	} {
		if _, err := w.mount(tt.source, false); !errors.Is(err, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.source, err, tt.want)
		}
	}
}
