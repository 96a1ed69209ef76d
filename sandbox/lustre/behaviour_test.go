package lustre_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	api "github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/lustre"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
	"github.com/sluicehpc/sluice/sandbox/storage"
)

// vm is a machine of the tests, by its last byte.
func vm(n byte) lustre.Client {
	return lustre.Client{VM: fmt.Sprintf("n%d", n), Address: netip.AddrFrom4([4]byte{10, 128, 0, n})}
}

func (w *world) mustMount(c lustre.Client, source string) string {
	w.t.Helper()
	dir, err := w.mountOn(c, source, false)
	if err != nil {
		w.t.Fatal(err)
	}
	return dir
}

// set sets a fault and returns when it is in effect.
func (w *world) inEffect(key, value string) {
	w.t.Helper()
	w.set(key, value)
	w.settle()
}

func (w *world) clear(key string) {
	w.t.Helper()
	if err := w.faults.Clear(key); err != nil {
		w.t.Fatal(err)
	}
	w.settle()
}

func (w *world) settle() {
	w.t.Helper()
	if err := w.server.Settle(w.ctx()); err != nil {
		w.t.Fatal(err)
	}
}

// answers asks a mount from a process, which may hang, and waits a moment for it.
func answers(t *testing.T, dir string) (ended <-chan error) {
	t.Helper()
	cmd := exec.Command("stat", "-f", dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	return done
}

func wantAnswer(t *testing.T, what string, ended <-chan error) {
	t.Helper()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	case <-time.After(20 * time.Second):
		t.Fatalf("%s: no answer", what)
	}
}

func wantNone(t *testing.T, what string, ended <-chan error) {
	t.Helper()
	select {
	case err := <-ended:
		t.Errorf("%s: answered, %v", what, err)
	case <-time.After(50 * time.Millisecond): // what must not happen has no moment
	}
}

func TestSwitchesForOneMachine(t *testing.T) {
	w := newWorld(t)
	inst := w.create()
	one, two := w.mustMount(vm(1), inst.MountPoint), w.mustMount(vm(2), inst.MountPoint)

	w.inEffect(faults.LustreHang, "scratch/n1")
	hung := answers(t, one)
	wantNone(t, "the one that hangs", hung)
	wantAnswer(t, "the other", answers(t, two))
	w.clear(faults.LustreHang)
	wantAnswer(t, "the one that hung", hung)

	w.inEffect(faults.LustreEIO, "scratch/n2")
	if _, err := os.Stat(two); !errors.Is(err, syscall.EIO) {
		t.Errorf("stat: %v, want EIO", err)
	}
	wantAnswer(t, "the other", answers(t, one))
	w.clear(faults.LustreEIO)

	w.inEffect(faults.LustreENOSPC, "*/n1")
	if err := os.Mkdir(filepath.Join(one, "d"), 0o755); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("mkdir: %v, want ENOSPC", err)
	}
	if err := os.Mkdir(filepath.Join(two, "d"), 0o755); err != nil {
		t.Error(err)
	}
	w.clear(faults.LustreENOSPC)

	w.inEffect(faults.LustreEXDEV, "scratch")
	if err := os.WriteFile(filepath.Join(one, "f"), nil, 0o644); err != nil {
		t.Error(err)
	}
	if err := os.Link(filepath.Join(one, "f"), filepath.Join(one, "d", "f")); !errors.Is(err, syscall.EXDEV) {
		t.Errorf("link: %v, want EXDEV", err)
	}
}

// A mount waits for a server that hangs, as a client does, and fails with EIO when that takes too long.
func TestMountOfHungServer(t *testing.T) {
	w := newWorld(t)
	inst := w.create()
	w.set(faults.LustreHang, "scratch")
	mounted := make(chan error, 1)
	go func() {
		_, err := w.mountOn(vm(1), inst.MountPoint, false)
		mounted <- err
	}()
	wantNone(t, "mount", mounted)
	w.clear(faults.LustreHang)
	wantAnswer(t, "mount", mounted)
}

func TestStates(t *testing.T) {
	var addresses sync.Map
	w := newWorld(t, func(o *lustre.Options) { o.Listen = loopback(&addresses) })
	inst := w.create()
	dir := w.mustMount(vm(1), inst.MountPoint)
	w.put("d/a", "x")
	for _, tt := range []struct {
		state         api.State
		io            string
		mounts, opens bool
		changes       bool
	}{
		{"UPGRADING", "stalls", false, true, false},
		{"REPAIRING", "stalls", false, true, false},
		{"STOPPED", "stalls", false, false, false},
		{"CREATING", "stalls", false, false, false},
		{"SUSPENDED", "fails", false, true, false},
		{"DELETING", "fails", false, false, false},
		{"UPDATING", "serves", true, true, false},
	} {
		t.Run(string(tt.state), func(t *testing.T) {
			w.inEffect(faults.LustreState, "scratch:"+string(tt.state))
			got, err := w.GetInstance(w.ctx(), scratch)
			if err != nil || got.State != tt.state || (got.StateReason != "") != (tt.state == "SUSPENDED") {
				t.Errorf("instance %+v, %v", got, err)
			}
			switch tt.io {
			case "stalls":
				ended := answers(t, dir)
				wantNone(t, "I/O", ended)
				defer wantAnswer(t, "I/O after", ended)
			case "fails":
				if _, err := os.Stat(dir); !errors.Is(err, syscall.EIO) {
					t.Errorf("stat: %v, want EIO", err)
				}
			default:
				wantAnswer(t, "I/O", answers(t, dir))
			}
			if _, err := w.mountOn(vm(2), inst.MountPoint, false); tt.mounts != (err == nil) || err != nil && !errors.Is(err, syscall.EIO) {
				t.Errorf("mount: %v", err)
			}
			_, err = w.ImportData(w.ctx(), importOf("gs://corpus/d/", ""))
			if tt.changes != (err == nil) || err != nil && !strings.Contains(err.Error(), "is "+string(tt.state)) {
				t.Errorf("import: %v", err)
			}
			_, err = w.UpdateInstance(w.ctx(), &api.UpdateInstanceRequest{Instance: &api.Instance{Name: scratch, Description: "x"}, UpdateMask: []string{"description"}})
			if tt.changes != (err == nil) {
				t.Errorf("update: %v", err)
			}
			waitFor(t, "the address", func() bool {
				address, _ := addresses.Load("10.129.0.2:988")
				conn, err := net.Dial("tcp", address.(string))
				if err == nil {
					conn.Close()
				}
				return tt.opens == (err == nil)
			})
			w.clear(faults.LustreState)
		})
	}
	wantAnswer(t, "at the end", answers(t, dir))
	w.wait(w.importFrom("gs://corpus/d/", ""))
}

// A transfer stands still while its instance does, and goes on.
func TestTransferOfHungInstance(t *testing.T) {
	w := newWorld(t)
	w.create()
	w.put("a", strings.Repeat("x", 1<<20))
	for _, fault := range [][2]string{{faults.LustreHang, "scratch"}, {faults.LustreState, "scratch:UPGRADING"}} {
		w.set(faults.LustreTransferRate, "1000000")
		op := w.importFrom("gs://corpus/", "")
		waitFor(t, "the first bytes", func() bool { return w.counters(op).BytesCopiedCount > 0 })
		w.set(fault[0], fault[1])
		if err := w.faults.Clear(faults.LustreTransferRate); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			_, err := w.Wait(w.ctx(), op.Name, nil)
			done <- err
		}()
		wantNone(t, fault[0], done)
		w.clear(fault[0])
		wantAnswer(t, fault[0], done)
		if c := w.counters(op); c.ObjectsCopiedCount+c.ObjectsSkippedCount != 1 {
			t.Errorf("%s: counters %+v, want the object", fault[0], c)
		}
		if err := os.RemoveAll(filepath.Join(w.data(), "a")); err != nil {
			t.Fatal(err)
		}
	}
	// Cancelled, it ends although nothing answers.
	w.set(faults.LustreHang, "scratch")
	op := w.importFrom("gs://corpus/", "")
	if err := w.CancelOperation(w.ctx(), op.Name); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Wait(w.ctx(), op.Name, nil); err == nil || !strings.Contains(err.Error(), "cancelled") {
		t.Errorf("cancelled operation: %v", err)
	}
}

func (w *world) counters(op *api.Operation) api.TransferCounters {
	w.t.Helper()
	now, err := w.GetOperation(w.ctx(), op.Name)
	if err != nil {
		w.t.Fatal(err)
	}
	return now.Metadata.Transfer.Counters
}

func TestTransferErrors(t *testing.T) {
	for fault, want := range map[string]string{faults.LustreEIO: "INTERNAL", faults.LustreENOSPC: "RESOURCE_EXHAUSTED"} {
		t.Run(fault, func(t *testing.T) {
			w := newWorld(t)
			w.create()
			w.put("a", strings.Repeat("x", 1<<20))
			w.set(faults.LustreTransferRate, "1000000")
			op := w.importFrom("gs://corpus/", "")
			waitFor(t, "the first bytes", func() bool { return w.counters(op).BytesCopiedCount > 0 })
			w.set(fault, "scratch")
			done := w.wait(op)
			m := done.Metadata.Transfer
			if len(m.ErrorSummaries) != 1 || m.ErrorSummaries[0].ErrorCode != want || m.Counters.ObjectsFailedCount != 1 {
				t.Errorf("%+v %+v, want one object with %s", m.Counters, m.ErrorSummaries, want)
			}
		})
	}
}

func TestImportOwner(t *testing.T) {
	w := newWorld(t)
	w.create()
	put := func(name string, metadata map[string]string) {
		o, err := w.storage.Create(bucketID, name, storage.CreateOptions{Metadata: metadata})
		if err == nil {
			_, err = o.Commit()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	put("d/plain", nil)
	put("d/said", map[string]string{"goog-reserved-posix-uid": "1500000001", "goog-reserved-posix-gid": "3000000000", "goog-reserved-posix-mode": "4751"})
	put("d/nonsense", map[string]string{"goog-reserved-posix-uid": "-1", "goog-reserved-posix-gid": "99999999999", "goog-reserved-posix-mode": "rwx"})
	for value, want := range map[string][]string{
		"":                   {"d 0:0 40755", "d/plain 0:0 100644", "d/said 0:0 100644", "d/nonsense 0:0 100644"},
		faults.OwnerRoot0644: {"d 0:0 40755", "d/plain 0:0 100644", "d/said 0:0 100644", "d/nonsense 0:0 100644"},
		faults.OwnerRoot0600: {"d 0:0 40700", "d/plain 0:0 100600", "d/said 0:0 100600", "d/nonsense 0:0 100600"},
		faults.OwnerMetadata: {"d 0:0 40755", "d/plain 0:0 100644", "d/said 1500000001:3000000000 104751", "d/nonsense 0:0 100644"},
	} {
		if value != "" {
			w.set(faults.LustreImportOwner, value)
		}
		w.wait(w.importFrom("gs://corpus/", ""))
		var got []string
		for _, name := range []string{"d", "d/plain", "d/said", "d/nonsense"} {
			var st syscall.Stat_t
			if err := syscall.Lstat(filepath.Join(w.data(), name), &st); err != nil {
				t.Fatal(err)
			}
			got = append(got, fmt.Sprintf("%s %d:%d %o", name, st.Uid, st.Gid, st.Mode))
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", value, d)
		}
		if err := os.RemoveAll(filepath.Join(w.data(), "d")); err != nil {
			t.Fatal(err)
		}
		w.clear(faults.LustreImportOwner)
	}
}

// An import into a directory of a project belongs to the project.
func TestImportIntoProject(t *testing.T) {
	w := newWorld(t)
	inst := w.create()
	dir := w.mustMount(vm(1), inst.MountPoint)
	if err := os.Mkdir(filepath.Join(dir, "p"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setxattr(filepath.Join(dir, "p"), lustrefs.ProjectAttr, []byte(`{"id":7,"inherit":true}`), 0); err != nil {
		t.Fatal(err)
	}
	w.put("sub/f", "x")
	w.wait(w.importFrom("gs://corpus/", "/p"))
	if err := os.Link(filepath.Join(dir, "p/sub/f"), filepath.Join(dir, "p/g")); err != nil {
		t.Errorf("link within the project: %v", err)
	}
}

// Access rules say whose root is squashed, from the moment of the update on.
func TestRootSquash(t *testing.T) {
	w := newWorld(t)
	inst := w.create()
	trusted, other := w.mustMount(vm(2), inst.MountPoint), w.mustMount(vm(77), inst.MountPoint)
	op, err := w.UpdateInstance(w.ctx(), &api.UpdateInstanceRequest{UpdateMask: []string{"accessRulesOptions"}, Instance: &api.Instance{Name: scratch,
		AccessRulesOptions: &api.AccessRulesOptions{
			DefaultSquashMode: "ROOT_SQUASH", DefaultSquashUID: 65534, DefaultSquashGID: 65534,
			AccessRules: []api.AccessRule{{Name: "controller", IPAddressRanges: []string{"10.128.0.0/28", "10.128.0.33"}, SquashMode: "NO_SQUASH"}},
		}}})
	if err != nil {
		t.Fatal(err)
	}
	w.wait(op)
	if err := os.Mkdir(filepath.Join(trusted, "d"), 0o755); err != nil {
		t.Errorf("a machine that a rule exempts: %v", err)
	}
	if err := os.Mkdir(filepath.Join(other, "e"), 0o755); !errors.Is(err, syscall.EACCES) {
		t.Errorf("root of another machine: %v, want EACCES", err)
	}
	if err := os.Chmod(filepath.Join(trusted, "d"), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(other, "d/e"), 0o755); err != nil {
		t.Errorf("nobody may do what anybody may: %v", err)
	}
	for name, rules := range map[string]api.AccessRulesOptions{
		"overlap":  {DefaultSquashMode: "ROOT_SQUASH", AccessRules: []api.AccessRule{{Name: "a", IPAddressRanges: []string{"10.0.0.0/8", "10.1.0.0/16"}, SquashMode: "NO_SQUASH"}}},
		"range":    {DefaultSquashMode: "ROOT_SQUASH", AccessRules: []api.AccessRule{{Name: "a", IPAddressRanges: []string{"10.0.0.1/8"}, SquashMode: "NO_SQUASH"}}},
		"name":     {DefaultSquashMode: "ROOT_SQUASH", AccessRules: []api.AccessRule{{Name: "a-b", IPAddressRanges: []string{"10.0.0.0/8"}, SquashMode: "NO_SQUASH"}}},
		"mode":     {DefaultSquashMode: "ROOT_SQUASH", AccessRules: []api.AccessRule{{Name: "a", IPAddressRanges: []string{"10.0.0.0/8"}, SquashMode: "ROOT_SQUASH"}}},
		"negative": {DefaultSquashMode: "ROOT_SQUASH", DefaultSquashUID: -1},
	} {
		_, err := w.UpdateInstance(w.ctx(), &api.UpdateInstanceRequest{UpdateMask: []string{"accessRulesOptions"}, Instance: &api.Instance{Name: scratch, AccessRulesOptions: &rules}})
		if err == nil {
			t.Errorf("access rules with a bad %s were taken", name)
		}
	}
}

// A machine that dies loses what it had not synced, but not what the service had exported.
func TestLoseUnsynced(t *testing.T) {
	w := newWorld(t)
	inst := w.create()
	pid1 := exec.Command("sleep", "1000")
	pid1.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if err := pid1.Start(); err != nil {
		t.Fatal(err)
	}
	dying := vm(1)
	dying.PID = pid1.Process.Pid
	one, two := w.mustMount(dying, inst.MountPoint), w.mustMount(vm(2), inst.MountPoint)
	w.set(faults.Seed, "7")
	w.inEffect(faults.LustreLoseUnsynced, "scratch/n1")
	data := bytes.Repeat([]byte("data"), 1<<16)
	if err := os.WriteFile(filepath.Join(one, "exported"), data, 0o644); err != nil {
		t.Fatal(err)
	}
	w.wait(w.exportTo("", "gs://corpus/out/"))
	if err := os.WriteFile(filepath.Join(one, "lost"), data, 0o644); err != nil {
		t.Fatal(err)
	}
	pid1.Process.Kill()
	pid1.Wait()
	waitFor(t, "the mount's end", func() bool { return len(w.server.Mounts()) == 1 })
	if b, err := os.ReadFile(filepath.Join(two, "exported")); err != nil || !bytes.Equal(b, data) {
		t.Errorf("the exported file has %d bytes now, %v", len(b), err)
	}
	if b, err := os.ReadFile(filepath.Join(two, "lost")); err != nil || bytes.Equal(b, data) || len(b) > len(data) {
		t.Errorf("the other file is whole: %d bytes, %v", len(b), err)
	}
	var noted []string
	for _, e := range w.faults.Log().Entries {
		if e.Fault == faults.LustreLoseUnsynced && e.Request == "scratch/n1" {
			noted = append(noted, e.What)
		}
	}
	if len(noted) != 1 || !strings.HasPrefix(noted[0], "lost lost ") || !strings.Contains(noted[0], "seed") {
		t.Errorf("the journal says %q", noted)
	}
}

func TestFlush(t *testing.T) {
	w := newWorld(t)
	inst := w.create()
	dir := w.mustMount(vm(1), inst.MountPoint)
	w.inEffect(faults.LustreLoseUnsynced, "*")
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := w.server.Flush(w.ctx(), "n1"); err != nil {
		t.Error(err)
	}
	w.inEffect(faults.LustreHang, "scratch")
	ctx, cancel := context.WithTimeout(w.ctx(), 50*time.Millisecond)
	defer cancel()
	if err := w.server.Flush(ctx, "n1"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("flush of a mount that hangs: %v", err)
	}
	w.clear(faults.LustreHang)
}

func TestUsage(t *testing.T) {
	w := newWorld(t)
	inst := w.create()
	one, again, two := w.mustMount(vm(1), inst.MountPoint), w.mustMount(vm(1), inst.MountPoint), w.mustMount(vm(2), inst.MountPoint)
	for _, dir := range []string{one, again} {
		if err := os.WriteFile(filepath.Join(dir, "f"), make([]byte, 1<<20), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.ReadFile(filepath.Join(two, "f")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Unmount(again, 0); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the counters", func() bool {
		u := w.server.Usage()
		return len(w.server.Mounts()) == 2 && len(u) == 2 && u[0].VM == "n1" && u[0].Instance == scratch && u[0].WriteBytes == 2<<20 && u[0].ReadBytes == 0 &&
			u[1].VM == "n2" && u[1].ReadBytes == 1<<20 && u[1].WriteBytes == 0
	})
}
