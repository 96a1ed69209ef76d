package lustrefs_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/sandbox/lustre/fusetest"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

func mounted(t *testing.T, o lustrefs.Options) (mnt, data string, m *fusetest.Mount) {
	t.Helper()
	data, mnt = publicDir(t), publicDir(t)
	return mnt, data, fusetest.New(t, data, mnt, source, o)
}

// process is one that touches a mount.
type process struct {
	*exec.Cmd
	out   bytes.Buffer
	ended chan struct{}
}

func start(t *testing.T, script string, args ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.Command("sh", append([]string{"-c", script, "sh"}, args...)...), ended: make(chan struct{})}
	p.Stdout, p.Stderr = &p.out, &p.out
	check(t, p.Start())
	go func() { p.Wait(); close(p.ended) }()
	t.Cleanup(func() { p.Process.Kill() })
	return p
}

// asks waits until the process waits for the server.
func (p *process) asks(t *testing.T) {
	t.Helper()
	p.until(t, "does not wait for the server", func() bool {
		in, err := os.ReadFile(fmt.Sprintf("/proc/%d/wchan", p.Process.Pid))
		return err == nil && strings.Contains(string(in), "request_wait")
	})
}

// survivor starts processes until one survives SIGKILL: one whose request the server has read before the signal came.
func survivor(t *testing.T, script string, args ...string) *process {
	t.Helper()
	for range 100 {
		p := start(t, script, args...)
		p.asks(t)
		check(t, p.Process.Kill())
		survives := false
		p.until(t, "neither ends nor is in uninterruptible sleep", func() bool {
			select {
			case <-p.ended:
				return true
			default:
			}
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))
			survives = err == nil && strings.HasPrefix(string(stat[bytes.LastIndexByte(stat, ')')+1:]), " D ")
			return survives
		})
		if survives {
			return p
		}
	}
	t.Fatal("SIGKILL ends every process that waits for a hung server")
	return nil
}

func (p *process) until(t *testing.T, not string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("process %d %s", p.Process.Pid, not)
		}
	}
}

func (p *process) end(t *testing.T) {
	t.Helper()
	select {
	case <-p.ended:
	case <-time.After(10 * time.Second):
		t.Fatalf("process %d does not end", p.Process.Pid)
	}
}

// A mount that hangs stops what was open before, too, and SIGKILL ends nobody who waits for it.
func TestHang(t *testing.T) {
	mnt, _, m := mounted(t, lustrefs.Options{})
	check(t, os.WriteFile(filepath.Join(mnt, "f"), bytes.Repeat([]byte("x"), 1<<20), 0o600))
	r, w, err := os.Pipe()
	check(t, err)
	defer w.Close()
	reader := exec.Command("sh", "-c", `exec 3<"$1"; echo open; read x; exec cat <&3`, "sh", filepath.Join(mnt, "f"))
	reader.Stdin = r
	out, err := reader.StdoutPipe()
	check(t, err)
	check(t, reader.Start())
	r.Close()
	line := make([]byte, 5)
	if _, err := out.Read(line); err != nil || string(line) != "open\n" {
		t.Fatalf("%q, %v", line, err)
	}

	m.Behave(t, lustrefs.Behaviour{Hang: true})
	if _, err := w.WriteString("go\n"); err != nil {
		t.Fatal(err)
	}
	(&process{Cmd: reader}).asks(t)
	writer := survivor(t, `echo more >>"$1"`, filepath.Join(mnt, "f"))
	stat := survivor(t, `exec stat -f "$1"`, mnt)
	m.Behave(t, lustrefs.Behaviour{})
	writer.end(t)
	stat.end(t)
	all := make([]byte, 2<<20)
	n := 0
	for {
		k, err := out.Read(all[n:])
		n += k
		if err != nil {
			break
		}
	}
	check(t, reader.Wait())
	if n < 1<<20 {
		t.Errorf("the reader got %d bytes after the hang, want all", n)
	}
}

// The end of the server, and of the connection, end those who wait.
func TestHangEnds(t *testing.T) {
	for _, how := range []string{"server killed", "forced unmount"} {
		t.Run(how, func(t *testing.T) {
			mnt, _, m := mounted(t, lustrefs.Options{})
			m.Behave(t, lustrefs.Behaviour{Hang: true})
			p := survivor(t, `exec stat -f "$1"`, mnt)
			if how == "server killed" {
				m.Signal(t, syscall.SIGKILL)
			} else {
				wantErr(t, "forced unmount", syscall.Unmount(mnt, syscall.MNT_FORCE), syscall.EBUSY)
			}
			p.end(t)
			<-m.Exited
		})
	}
}

func TestErrors(t *testing.T) {
	mnt, _, m := mounted(t, lustrefs.Options{})
	f, err := os.Create(filepath.Join(mnt, "f"))
	check(t, err)
	defer f.Close()
	_, err = f.WriteString("some")
	check(t, err)

	m.Behave(t, lustrefs.Behaviour{EIO: true})
	_, err = os.Stat(mnt)
	wantErr(t, "stat", err, syscall.EIO)
	_, err = f.WriteString("more")
	wantErr(t, "write to an open file", err, syscall.EIO)
	wantErr(t, "sync", f.Sync(), syscall.EIO)
	var st syscall.Statfs_t
	wantErr(t, "statfs", syscall.Statfs(mnt, &st), syscall.EIO)

	m.Behave(t, lustrefs.Behaviour{ENOSPC: true})
	_, err = f.WriteString("more")
	wantErr(t, "write", err, syscall.ENOSPC)
	wantErr(t, "mkdir", os.Mkdir(filepath.Join(mnt, "d"), 0o700), syscall.ENOSPC)
	wantErr(t, "create", os.WriteFile(filepath.Join(mnt, "g"), nil, 0o600), syscall.ENOSPC)
	wantErr(t, "symlink", os.Symlink("x", filepath.Join(mnt, "l")), syscall.ENOSPC)
	check(t, syscall.Statfs(mnt, &st))
	if st.Bavail != 0 {
		t.Errorf("statfs shows %d free blocks of a full file system", st.Bavail)
	}
	if b, err := os.ReadFile(filepath.Join(mnt, "f")); err != nil || string(b) != "some" {
		t.Errorf("read: %q, %v", b, err)
	}
	check(t, os.Remove(filepath.Join(mnt, "f")))
}

func setTool(t *testing.T, path, name string, v any) error {
	t.Helper()
	value, err := json.Marshal(v)
	check(t, err)
	return unix.Setxattr(path, name, value, 0)
}

func getTool(t *testing.T, path, name string, v any) {
	t.Helper()
	buf := make([]byte, 64<<10)
	n, err := unix.Getxattr(path, name, buf)
	check(t, err)
	check(t, json.Unmarshal(buf[:n], v))
}

func TestProjects(t *testing.T) {
	mnt, _, m := mounted(t, lustrefs.Options{})
	in := func(name string) string { return filepath.Join(mnt, name) }
	for _, d := range []string{"a", "b", "free"} {
		check(t, os.Mkdir(in(d), 0o755))
	}
	check(t, setTool(t, in("a"), lustrefs.ProjectAttr, lustrefs.Project{ID: 7, Inherit: true}))
	check(t, setTool(t, in("b"), lustrefs.ProjectAttr, lustrefs.Project{ID: 8, Inherit: true}))
	check(t, os.MkdirAll(in("a/sub"), 0o755))
	check(t, os.WriteFile(in("a/sub/f"), []byte("x"), 0o644))
	check(t, os.WriteFile(in("free/g"), []byte("x"), 0o644))

	var p lustrefs.Project
	getTool(t, in("a/sub"), lustrefs.ProjectAttr, &p)
	if want := (lustrefs.Project{ID: 7, Inherit: true}); p != want {
		t.Errorf("a new directory has %+v, want %+v", p, want)
	}
	getTool(t, in("a/sub/f"), lustrefs.ProjectAttr, &p)
	if want := (lustrefs.Project{ID: 7}); p != want {
		t.Errorf("a new file has %+v, want %+v", p, want)
	}
	check(t, os.Link(in("a/sub/f"), in("a/f")))
	check(t, os.Rename(in("a/f"), in("a/f2")))
	check(t, os.Rename(in("a/f2"), in("a/sub/f2")))
	check(t, os.Link(in("a/sub/f"), in("free/f"))) // a directory that inherits nothing takes anything
	wantErr(t, "link to another project", os.Link(in("a/sub/f"), in("b/f")), syscall.EXDEV)
	wantErr(t, "rename to another project", os.Rename(in("a/sub/f"), in("b/f")), syscall.EXDEV)
	wantErr(t, "rename of a directory", os.Rename(in("a/sub"), in("b/sub")), syscall.EXDEV)
	wantErr(t, "link from outside", os.Link(in("free/g"), in("b/g")), syscall.EXDEV)

	// With the fault, every directory is a project of its own.
	check(t, os.Link(in("free/g"), in("g")))
	m.Behave(t, lustrefs.Behaviour{EXDEV: true})
	wantErr(t, "link to another directory", os.Link(in("free/g"), in("h")), syscall.EXDEV)
	wantErr(t, "rename to another directory", os.Rename(in("free/g"), in("h")), syscall.EXDEV)
	check(t, os.Link(in("free/g"), in("free/h")))
	check(t, os.Rename(in("free/h"), in("free/i")))

	check(t, os.Chmod(in("free"), 0o777))
	if got := asUser(t, 700001, 700001, nil, "project", in("free")); !strings.Contains(got, "not permitted") {
		t.Errorf("a user sets a project: %q", got)
	}
}

func TestLayouts(t *testing.T) {
	mnt, _, _ := mounted(t, lustrefs.Options{})
	in := func(name string) string { return filepath.Join(mnt, name) }
	wide := lustrefs.Layout{Components: []lustrefs.Component{{End: 1 << 20, Count: 1, Size: 1 << 20, Index: -1}, {End: -1, Count: -1, Size: 4 << 20, Index: -1}}}
	var l lustrefs.Layout
	getTool(t, mnt, lustrefs.LayoutAttr, &l)
	if d := cmp.Diff(lustrefs.DefaultLayout, l); d != "" {
		t.Errorf("default layout (-want +got):\n%s", d)
	}
	check(t, os.Mkdir(in("d"), 0o755))
	check(t, setTool(t, in("d"), lustrefs.LayoutAttr, wide))
	check(t, os.MkdirAll(in("d/e"), 0o755))
	check(t, os.WriteFile(in("d/e/f"), []byte("x"), 0o644))
	getTool(t, in("d/e/f"), lustrefs.LayoutAttr, &l)
	if d := cmp.Diff(wide, l); d != "" {
		t.Errorf("layout of a file below (-want +got):\n%s", d)
	}
	check(t, unix.Removexattr(in("d"), lustrefs.LayoutAttr))
	check(t, os.WriteFile(in("d/g"), nil, 0o644))
	l = lustrefs.Layout{}
	getTool(t, in("d/g"), lustrefs.LayoutAttr, &l)
	if d := cmp.Diff(lustrefs.DefaultLayout, l); d != "" {
		t.Errorf("layout after the directory's was removed (-want +got):\n%s", d)
	}

	check(t, unix.Mknod(in("new"), unix.S_IFREG|0o644, 0))
	check(t, setTool(t, in("new"), lustrefs.LayoutAttr, wide))
	wantErr(t, "a second time", setTool(t, in("new"), lustrefs.LayoutAttr, wide), syscall.EEXIST)
	wantErr(t, "a file with content", setTool(t, in("d/e/f"), lustrefs.LayoutAttr, wide), syscall.EEXIST)
	wantErr(t, "an empty file that was opened", setTool(t, in("d/g"), lustrefs.LayoutAttr, wide), syscall.EEXIST)
	wantErr(t, "nonsense", unix.Setxattr(in("d"), lustrefs.LayoutAttr, []byte("{"), 0), syscall.EINVAL)
	if n, err := unix.Listxattr(in("d/e/f"), make([]byte, 1000)); n != 0 || err != nil {
		t.Errorf("the tools' attributes are listed: %d bytes, %v", n, err)
	}
}

func TestQuota(t *testing.T) {
	mnt, _, _ := mounted(t, lustrefs.Options{})
	check(t, os.WriteFile(filepath.Join(mnt, "f"), make([]byte, 1<<20), 0o644))
	check(t, os.Chown(filepath.Join(mnt, "f"), 700001, 700002))
	name := lustrefs.QuotaAttr + lustrefs.QuotaName('u', 700001)
	limits := lustrefs.Limits{BlockSoft: 1000, BlockHard: 2000, InodeHard: 5}
	check(t, setTool(t, mnt, name, limits))
	var q lustrefs.Quota
	getTool(t, mnt, name, &q)
	if want := (lustrefs.Quota{Limits: limits, Blocks: 1024, Inodes: 1}); q != want {
		t.Errorf("quota %+v, want %+v", q, want)
	}
	q = lustrefs.Quota{}
	getTool(t, mnt, lustrefs.QuotaAttr+lustrefs.QuotaName('g', 700002), &q)
	if want := (lustrefs.Quota{Blocks: 1024, Inodes: 1}); q != want {
		t.Errorf("group's quota %+v, want %+v", q, want)
	}
	wantErr(t, "a bad name", setTool(t, mnt, lustrefs.QuotaAttr+"x.1", limits), syscall.EINVAL)
	_, err := unix.Getxattr(mnt, lustrefs.QuotaAttr+"u.-1", make([]byte, 100))
	wantErr(t, "a bad id", err, syscall.EINVAL)
}

// A squashed root is nobody in particular; other users are who they are.
func TestRootSquash(t *testing.T) {
	mnt, _, m := mounted(t, lustrefs.Options{})
	in := func(name string) string { return filepath.Join(mnt, name) }
	check(t, os.Mkdir(in("open"), 0o777))
	check(t, os.Chmod(in("open"), 0o777))
	check(t, os.Mkdir(in("alice"), 0o700))
	check(t, os.WriteFile(in("alice/f"), []byte("x"), 0o600))
	check(t, os.WriteFile(in("secret"), []byte("x"), 0o600))
	check(t, os.Symlink("secret", in("link")))
	check(t, os.Chown(in("alice"), 700001, 700001))
	kept, err := os.Open(in("secret"))
	check(t, err)
	defer kept.Close()

	m.Behave(t, lustrefs.Behaviour{SquashUID: 65534, SquashGID: 65533})
	for _, step := range []struct {
		name string
		do   func() error
		want error
	}{
		{"mkdir", func() error { return os.Mkdir(in("d"), 0o755) }, syscall.EACCES},
		{"create", func() error { return os.WriteFile(in("g"), nil, 0o644) }, syscall.EACCES},
		{"symlink", func() error { return os.Symlink("x", in("l")) }, syscall.EACCES},
		{"mknod", func() error { return unix.Mknod(in("m"), unix.S_IFREG|0o644, 0) }, syscall.EACCES},
		{"link", func() error { return os.Link(in("secret"), in("l")) }, syscall.EPERM},
		{"read", func() error { _, err := os.ReadFile(in("secret")); return err }, syscall.EACCES},
		{"truncate", func() error { return os.Truncate(in("secret"), 0) }, syscall.EACCES},
		{"chmod", func() error { return os.Chmod(in("secret"), 0o644) }, syscall.EPERM},
		{"chown", func() error { return os.Chown(in("secret"), 65534, 65533) }, syscall.EPERM},
		{"chtimes", func() error { return os.Chtimes(in("secret"), time.Now(), time.Now()) }, syscall.EPERM},
		{"unlink", func() error { return syscall.Unlink(in("secret")) }, syscall.EACCES},
		{"rmdir", func() error { return syscall.Rmdir(in("open")) }, syscall.EACCES},
		{"rename", func() error { return os.Rename(in("secret"), in("open/secret")) }, syscall.EACCES},
		{"lookup", func() error { _, err := os.Stat(in("alice/f")); return err }, syscall.EACCES},
		{"list", func() error { _, err := os.ReadDir(in("alice")); return err }, syscall.EACCES},
		{"user attribute", func() error { return unix.Setxattr(in("secret"), "user.a", []byte("1"), 0) }, syscall.EACCES},
		{"project", func() error { return setTool(t, in("open"), lustrefs.ProjectAttr, lustrefs.Project{ID: 1}) }, syscall.EPERM},
	} {
		if err := step.do(); !errors.Is(err, step.want) {
			t.Errorf("%s: %v, want %v", step.name, err, step.want)
		}
	}
	if _, err := kept.ReadAt(make([]byte, 1), 0); err != nil {
		t.Errorf("a file that was open before: %v", err)
	}
	if s, err := os.Readlink(in("link")); s != "secret" || err != nil {
		t.Errorf("readlink: %q, %v", s, err)
	}
	check(t, os.WriteFile(in("open/mine"), []byte("x"), 0o644))
	var st syscall.Stat_t
	check(t, syscall.Stat(in("open/mine"), &st))
	if st.Uid != 65534 || st.Gid != 65533 {
		t.Errorf("root's file belongs to %d:%d, want 65534:65533", st.Uid, st.Gid)
	}
	if got := asUser(t, 700001, 700001, nil, "write", in("alice/g"), "x"); got != "" {
		t.Errorf("another user is squashed too: %s", got)
	}

	m.Behave(t, lustrefs.Behaviour{})
	check(t, os.Mkdir(in("d"), 0o755))
}

func TestCounters(t *testing.T) {
	mnt, _, m := mounted(t, lustrefs.Options{})
	path := filepath.Join(mnt, "f")
	check(t, os.WriteFile(path, make([]byte, 3<<20), 0o600))
	if _, err := os.ReadFile(path); err != nil {
		t.Fatal(err)
	}
	check(t, syscall.Unmount(mnt, 0))
	<-m.Exited
	var got lustrefs.Counters
	for _, e := range m.Events() {
		if e.Counters != nil {
			got = *e.Counters
		}
	}
	if got.ReadBytes != 3<<20 || got.WriteBytes != 3<<20 || got.ReadOps == 0 || got.WriteOps == 0 || got.MetadataOps == 0 {
		t.Errorf("counters %+v, want 3 MiB each way and all kinds of calls", got)
	}
}
