package lustre

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/internal/command"
	"github.com/sluicehpc/sluice/lustre/probe"
	"github.com/sluicehpc/sluice/sandbox/lustre/fusetest"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

func TestMain(m *testing.M) { os.Exit(fusetest.Main(m)) }

const testSource = "10.129.0.2@tcp:/scratch"

// machine stands for mount(8), umount(8) and the mount table.
type machine struct {
	mounts []probe.Mount
	ran    []string
	fail   func(ctx context.Context, name string) error // nil: nothing fails
	hidden bool                                         // mount reports success but mounts nothing
}

func (m *machine) mounter() Mounter {
	return Mounter{
		mounts: func() ([]probe.Mount, error) { return m.mounts, nil },
		run: func(ctx context.Context, name string, args ...string) error {
			m.ran = append(m.ran, name+" "+strings.Join(args, " "))
			if m.fail != nil {
				if err := m.fail(ctx, strings.Join(append([]string{name}, args...), " ")); err != nil {
					return err
				}
			}
			if name == "mount" && !m.hidden {
				m.mounts = append(m.mounts, probe.Mount{Type: "lustre", Source: args[len(args)-2], Dir: args[len(args)-1]})
			}
			if name == "umount" {
				m.mounts = m.mounts[:len(m.mounts)-1]
			}
			return nil
		},
	}
}

func exitWith(code int, stderr string) func(context.Context, string) error {
	return func(_ context.Context, command_ string) error {
		if !strings.HasPrefix(command_, "mount") {
			return nil
		}
		return &command.Error{Program: "mount", Exit: code, Stderr: stderr, Err: errors.New("exit status")}
	}
}

func TestMount(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "lustre")
	m := new(machine)
	spec := Spec{Source: testSource, Dir: dir, Options: []string{"flock", "_netdev"}}
	for range 2 { // the second time there is nothing to do
		if err := m.mounter().Mount(t.Context(), spec); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"mount -t lustre -o flock,_netdev " + testSource + " " + dir}
	if d := cmp.Diff(want, m.ran); d != "" {
		t.Errorf("ran (-want +got):\n%s", d)
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		t.Errorf("mount point: %v, %v", info, err)
	}
	if lazy, err := m.mounter().Unmount(dir); lazy || err != nil {
		t.Errorf("unmount: %v, %v", lazy, err)
	}
	if lazy, err := m.mounter().Unmount(dir); lazy || err != nil || len(m.ran) != 2 {
		t.Errorf("unmount of nothing: %v, %v, ran %q", lazy, err, m.ran)
	}
}

func TestMountFails(t *testing.T) {
	dir := t.TempDir()
	mounted := func(typ, source, dir string) []probe.Mount {
		return []probe.Mount{{Type: typ, Source: source, Dir: dir}}
	}
	for _, tt := range []struct {
		name string
		m    machine
		spec Spec
		is   error
		says string
	}{
		{"source", machine{}, Spec{Source: "server:/export", Dir: dir}, nil, "IP@tcp:/FS"},
		{"relative directory", machine{}, Spec{Source: testSource, Dir: "lustre"}, nil, "absolute"},
		{"root", machine{}, Spec{Source: testSource, Dir: "/"}, nil, "below /"},
		{"option with a comma", machine{}, Spec{Source: testSource, Dir: dir, Options: []string{"a,b"}}, nil, "one option"},
		{"another file system there", machine{mounts: mounted("lustre", "10.0.0.9@tcp:/x", dir)}, Spec{Source: testSource, Dir: dir}, ErrBusyDir, "10.0.0.9@tcp:/x"},
		{"another type there", machine{mounts: mounted("nfs", testSource, dir)}, Spec{Source: testSource, Dir: dir}, ErrBusyDir, "nfs"},
		{"same file system name", machine{mounts: mounted("lustre", "10.0.0.9@tcp:/scratch", "/other")}, Spec{Source: testSource, Dir: dir}, ErrSameFS, "/other"},
		{"wrong name", machine{fail: exitWith(2, "")}, Spec{Source: testSource, Dir: dir}, ErrNoFileSystem, `"scratch" at 10.129.0.2:988`},
		{"unreachable", machine{fail: exitWith(5, "mount.lustre: … Input/output error\nIs the MGS running?")}, Spec{Source: testSource, Dir: dir}, ErrUnreachable, "10.129.0.2:988"},
		{"no module", machine{fail: exitWith(32, "mount: unknown filesystem type 'lustre'.")}, Spec{Source: testSource, Dir: dir}, ErrNoClient, "modprobe lustre"},
		{"something else", machine{fail: exitWith(1, "strange")}, Spec{Source: testSource, Dir: dir}, nil, "strange"},
		{"success without a mount", machine{hidden: true}, Spec{Source: testSource, Dir: dir}, nil, "nothing is mounted"},
		{"hangs", machine{fail: func(ctx context.Context, c string) error { <-ctx.Done(); return ctx.Err() }},
			Spec{Source: testSource, Dir: dir, Timeout: 10 * time.Millisecond}, ErrMountDeadline, "10.129.0.2:988 was tried for 10ms"},
		{"cannot be killed", machine{fail: func(ctx context.Context, c string) error { select {} }},
			Spec{Source: testSource, Dir: dir, Timeout: 10 * time.Millisecond}, ErrMountDeadline, "988"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.m.mounter().Mount(t.Context(), tt.spec)
			if err == nil || !strings.Contains(err.Error(), tt.says) || tt.is != nil && !errors.Is(err, tt.is) {
				t.Errorf("got %v, want %q (%v)", err, tt.says, tt.is)
			}
		})
	}
}

func TestMountHungLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	m := new(machine)
	m.fail = func(ctx context.Context, c string) error {
		if strings.HasPrefix(c, "mount") { // killed after the kernel had mounted
			<-ctx.Done()
			m.mounts = append(m.mounts, probe.Mount{Type: "lustre", Source: testSource, Dir: dir})
			return ctx.Err()
		}
		return nil
	}
	err := m.mounter().Mount(t.Context(), Spec{Source: testSource, Dir: dir, Timeout: 10 * time.Millisecond})
	if !errors.Is(err, ErrMountDeadline) || len(m.mounts) != 0 {
		t.Errorf("got %v, mounts %v", err, m.mounts)
	}
}

func TestUnmountSteps(t *testing.T) {
	busy := func(but string) func(context.Context, string) error {
		return func(_ context.Context, c string) error {
			if strings.Contains(c, but) {
				return nil
			}
			return errors.New("target is busy")
		}
	}
	for _, tt := range []struct {
		name string
		fail func(context.Context, string) error
		ran  []string
		lazy bool
		err  bool
	}{
		{"plain", nil, []string{"umount /m"}, false, false},
		{"force", busy("-f"), []string{"umount /m", "umount -f /m"}, false, false},
		{"lazy", busy("-l"), []string{"umount /m", "umount -f /m", "umount -l /m"}, true, false},
		{"never", busy("-x"), []string{"umount /m", "umount -f /m", "umount -l /m"}, false, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := &machine{mounts: []probe.Mount{{Dir: "/m"}}, fail: tt.fail}
			lazy, err := m.mounter().Unmount("/m")
			if d := cmp.Diff(tt.ran, m.ran); d != "" || lazy != tt.lazy || (err != nil) != tt.err {
				t.Errorf("lazy %v, %v, ran (-want +got):\n%s", lazy, err, d)
			}
		})
	}
}

// TestUnmountHung takes away a real mount whose server is stopped, with the real umount(8). The
// plain attempt has its time cut short here.
func TestUnmountHung(t *testing.T) {
	plain := unmountSteps[0].timeout
	unmountSteps[0].timeout = 200 * time.Millisecond
	t.Cleanup(func() { unmountSteps[0].timeout = plain })
	dir := t.TempDir()
	m := fusetest.New(t, t.TempDir(), dir, testSource, lustrefs.Options{})
	m.Signal(t, syscall.SIGSTOP)
	for range 2 { // so that the second one cannot be killed
		cmd := exec.Command("stat", "-f", dir)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		go cmd.Wait()
	}
	start := time.Now()
	lazy, err := Mounter{}.Unmount(dir)
	t.Logf("lazy %v, %v, took %v", lazy, err, time.Since(start))
	if err != nil || time.Since(start) > 30*time.Second {
		t.Errorf("unmount: %v after %v", err, time.Since(start))
	}
	mounts, err := probe.Mounts()
	if err != nil || probe.At(mounts, dir) != nil {
		t.Errorf("still mounted, %v", err)
	}
}
