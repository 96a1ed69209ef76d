package lustrefs_test

import (
	"bytes"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/sandbox/lustre/fusetest"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

// machine is a process that stands for a VM's PID 1.
func machine(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	check(t, cmd.Start())
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return cmd
}

// size is that of most files, in bytes.
const size = 256 << 10

// content is size bytes without a zero byte, another one for each name.
func content(name string) []byte {
	var seed [32]byte
	copy(seed[:], name)
	b := make([]byte, size)
	rand.NewChaCha8(seed).Read(b)
	for i := range b {
		b[i] |= 1
	}
	return b
}

// writeFile writes parts to a file with one write each, and syncs after those that are named.
func writeFile(t *testing.T, path string, flags int, sync bool, parts ...[]byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|flags, 0o600)
	check(t, err)
	for _, p := range parts {
		_, err := f.Write(p)
		check(t, err)
	}
	if sync {
		check(t, f.Sync())
	}
	check(t, f.Close())
}

// crashWith writes all kinds of files on a machine, ends it and returns what a second machine sees.
func crashWith(t *testing.T, seed uint64, end func(*exec.Cmd, *fusetest.Mount)) (map[string][]byte, []lustrefs.Loss) {
	t.Helper()
	data, one, two := publicDir(t), publicDir(t), publicDir(t)
	vm := machine(t)
	m := fusetest.New(t, data, one, source, lustrefs.Options{VM: vm.Process.Pid})
	other := fusetest.New(t, data, two, source, lustrefs.Options{})
	m.Behave(t, lustrefs.Behaviour{LoseUnsynced: true, Seed: seed, Watched: true})
	other.Behave(t, lustrefs.Behaviour{Watched: true})
	in := func(name string) string { return filepath.Join(one, name) }
	pageOf := bytes.Repeat([]byte("y"), 4096)

	writeFile(t, in("unsynced"), 0, false, content("unsynced"))
	writeFile(t, in("synced"), 0, true, content("synced"))
	writeFile(t, in("O_SYNC"), syscall.O_SYNC, false, content("O_SYNC"))
	writeFile(t, in("begun"), 0, true, content("begun"))
	writeFile(t, in("begun"), os.O_APPEND, false, content("rest"))
	writeFile(t, in("over"), 0, true, content("over"))
	writeFile(t, in("over"), 0, false, bytes.Repeat(pageOf, size/2/4096)) // its first half
	writeFile(t, in("small"), 0, false, []byte("a few bytes"))
	writeFile(t, in("read"), 0, false, content("read"))
	if b, err := os.ReadFile(filepath.Join(two, "read")); err != nil || !bytes.Equal(b, content("read")) {
		t.Errorf("the other machine reads %d bytes, %v", len(b), err)
	}
	writeFile(t, in("read and more"), 0, false, content("read"))
	if _, err := os.ReadFile(filepath.Join(two, "read and more")); err != nil {
		t.Error(err)
	}
	writeFile(t, in("read and more"), os.O_APPEND, false, content("more"))
	// As a careful program publishes.
	writeFile(t, in("tmp"), 0, true, content("renamed"))
	check(t, os.Rename(in("tmp"), in("renamed")))
	d, err := os.Open(one)
	check(t, err)
	check(t, d.Sync())
	check(t, d.Close())
	writeFile(t, in("cut"), 0, false, content("cut"))
	check(t, os.Truncate(in("cut"), 5000))

	end(vm, m)
	<-m.Exited
	after := map[string][]byte{}
	names, err := os.ReadDir(two)
	check(t, err)
	for _, n := range names {
		f, err := os.Open(filepath.Join(two, n.Name()))
		check(t, err)
		b, err := io.ReadAll(f)
		check(t, err)
		f.Close()
		after[n.Name()] = b
	}
	var losses []lustrefs.Loss
	for _, e := range m.Events() {
		if e.Lost != nil {
			losses = append(losses, *e.Lost)
		}
	}
	return after, losses
}

func kill(vm *exec.Cmd, _ *fusetest.Mount) { vm.Process.Kill(); vm.Wait() }

// whole are the files that no crash may touch.
var whole = map[string][]byte{
	"synced": content("synced"), "O_SYNC": content("O_SYNC"), "read": content("read"), "renamed": content("renamed"),
}

func TestLoseUnsynced(t *testing.T) {
	zeroed, shorter := 0, 0
	for seed := range uint64(4) {
		after, losses := crashWith(t, seed, kill)
		for name, want := range whole {
			if !bytes.Equal(after[name], want) {
				t.Errorf("seed %d: %s is damaged: %d bytes", seed, name, len(after[name]))
			}
		}
		var lost []string
		for _, l := range losses {
			lost = append(lost, l.Path)
			if l.Bytes <= 0 || l.Error != "" || l.Seed != seed || l.After != int64(len(after[l.Path])) {
				t.Errorf("seed %d: loss %+v of a file with %d bytes", seed, l, len(after[l.Path]))
			}
		}
		slices.Sort(lost)
		if d := cmp.Diff([]string{"begun", "cut", "over", "read and more", "small", "unsynced"}, lost); d != "" {
			t.Errorf("seed %d: files that lost something (-want +got):\n%s", seed, d)
		}
		// A beginning is kept, and the rest is zeros or not there.
		for name, want := range map[string][]byte{
			"unsynced": content("unsynced"), "begun": slices.Concat(content("begun"), content("rest")),
			"read and more": slices.Concat(content("read"), content("more")), "small": []byte("a few bytes"), "cut": content("cut")[:5000],
		} {
			got := after[name]
			n := 0
			for n < len(got) && n < len(want) && got[n] == want[n] {
				n++
			}
			if len(bytes.Trim(got[n:], "\x00")) > 0 || n == len(want) || len(got) > len(want) {
				t.Errorf("seed %d: %s: the first %d of %d bytes are right, and what follows is not zeros", seed, name, n, len(want))
			}
			if (name == "begun" || name == "read and more") && n < size {
				t.Errorf("seed %d: %s lost what was safe: only %d bytes are right", seed, name, n)
			}
			if len(got) < len(want) {
				shorter++
			} else {
				zeroed++
			}
		}
		// What was written over is there as it was before, or as it was to be.
		old := content("over")
		if got := after["over"]; len(got) != len(old) {
			t.Errorf("seed %d: over has %d bytes, want %d", seed, len(got), len(old))
		} else {
			for i := 0; i < len(old); i += 4096 {
				p := got[i : i+4096]
				if !bytes.Equal(p, old[i:i+4096]) && (i >= len(old)/2 || !bytes.Equal(p, bytes.Repeat([]byte("y"), 4096))) {
					t.Errorf("seed %d: over at %d is neither old nor new", seed, i)
				}
			}
		}
	}
	if zeroed == 0 || shorter == 0 {
		t.Errorf("%d files ended in zeros and %d were shorter, want some of both", zeroed, shorter)
	}
}

func TestLossIsSeeded(t *testing.T) {
	one, _ := crashWith(t, 42, kill)
	two, _ := crashWith(t, 42, kill)
	other, _ := crashWith(t, 43, kill)
	if !maps.EqualFunc(one, two, bytes.Equal) {
		t.Error("two crashes with one seed differ")
	}
	if maps.EqualFunc(one, other, bytes.Equal) {
		t.Error("two seeds lose the same")
	}
}

func TestOrderlyEndLosesNothing(t *testing.T) {
	for name, end := range map[string]func(*exec.Cmd, *fusetest.Mount){
		"unmount":  func(_ *exec.Cmd, m *fusetest.Mount) { check(t, syscall.Unmount(m.Dir, 0)) },
		"shutdown": func(vm *exec.Cmd, m *fusetest.Mount) { m.Flush(t); kill(vm, m) },
		"the fault ends before": func(vm *exec.Cmd, m *fusetest.Mount) {
			m.Behave(t, lustrefs.Behaviour{})
			kill(vm, m)
		},
	} {
		t.Run(name, func(t *testing.T) {
			after, losses := crashWith(t, 1, end)
			if len(losses) > 0 || !bytes.Equal(after["unsynced"], content("unsynced")) || !bytes.Equal(after["begun"], slices.Concat(content("begun"), content("rest"))) {
				t.Errorf("something was lost: %+v", losses)
			}
		})
	}
}

// A machine that dies while its mount hangs takes the mount with it.
func TestCrashOfHungMachine(t *testing.T) {
	data, mnt := publicDir(t), publicDir(t)
	vm := machine(t)
	m := fusetest.New(t, data, mnt, source, lustrefs.Options{VM: vm.Process.Pid})
	m.Behave(t, lustrefs.Behaviour{LoseUnsynced: true, Watched: true})
	check(t, os.WriteFile(filepath.Join(mnt, "f"), content("f"), 0o600))
	m.Behave(t, lustrefs.Behaviour{LoseUnsynced: true, Watched: true, Hang: true})
	p := survivor(t, `exec stat -f "$1"`, mnt)
	kill(vm, m)
	p.end(t)
	<-m.Exited
	if b, err := os.ReadFile(filepath.Join(data, "f")); err != nil || bytes.Equal(b, content("f")) {
		t.Errorf("nothing was lost: %d bytes, %v", len(b), err)
	}
}
