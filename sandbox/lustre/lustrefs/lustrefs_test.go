package lustrefs_test

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/lustre/probe"
	"github.com/sluicehpc/sluice/sandbox/lustre/fusetest"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

const asUserEnv = "SLUICE_TEST_AS_USER"

func TestMain(m *testing.M) {
	if script := os.Getenv(asUserEnv); script != "" {
		os.Exit(userMain(script))
	}
	os.Exit(fusetest.Main(m))
}

const source = "10.129.0.2@tcp:/scratch"

// both runs a test with and without passthrough.
func both(t *testing.T, test func(t *testing.T, mnt, data string, m *fusetest.Mount)) {
	for _, o := range []lustrefs.Options{{}, {Passthrough: true}} {
		name := "through the server"
		if o.Passthrough {
			name = "passthrough"
		}
		t.Run(name, func(t *testing.T) {
			data, mnt := publicDir(t), publicDir(t)
			test(t, mnt, data, fusetest.New(t, data, mnt, source, o))
		})
	}
}

// publicDir is a temporary directory that other users can reach.
func publicDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "lustrefs")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErr(t *testing.T, what string, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// asUser runs one step as an ordinary user in a process of its own and returns its error text.
func asUser(t *testing.T, uid, gid uint32, groups []uint32, step ...string) string {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{asUserEnv + "=" + strings.Join(step, "\x1f")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: gid, Groups: groups}}
	out, err := cmd.CombinedOutput()
	if err != nil && len(out) == 0 {
		t.Fatalf("as user %d: %v", uid, err)
	}
	return string(out)
}

func userMain(script string) int {
	step := strings.Split(script, "\x1f")
	var err error
	switch syscall.Umask(0o027); step[0] {
	case "write":
		err = os.WriteFile(step[1], []byte(step[2]), 0o666)
	case "append":
		var f *os.File
		if f, err = os.OpenFile(step[1], os.O_WRONLY|os.O_APPEND, 0); err == nil {
			_, err = f.WriteString(step[2])
			f.Close()
		}
	case "read":
		_, err = os.ReadFile(step[1])
	case "mkdir":
		err = os.Mkdir(step[1], 0o777)
	case "symlink":
		err = os.Symlink(step[1], step[2])
	case "mkfifo":
		err = syscall.Mkfifo(step[1], 0o666)
	case "remove":
		err = os.Remove(step[1])
	case "chmod":
		err = os.Chmod(step[1], 0o777)
	case "chown":
		err = os.Chown(step[1], 0, 0)
	case "project":
		err = unix.Setxattr(step[1], lustrefs.ProjectAttr, []byte(`{"id":1}`), 0)
	default:
		err = errors.New("unknown step")
	}
	if err != nil {
		fmt.Print(err)
		return 1
	}
	return 0
}

func TestMountTable(t *testing.T) {
	data, mnt := publicDir(t), publicDir(t)
	fusetest.New(t, data, mnt, source, lustrefs.Options{})
	mounts, err := probe.Mounts()
	check(t, err)
	got := probe.At(mounts, mnt)
	if got == nil || got.Type != "fuse.lustre" || got.Source != source {
		t.Errorf("mount table has %+v, want fuse.lustre %s", got, source)
	}
	var host, here syscall.Statfs_t
	check(t, syscall.Statfs(data, &host))
	check(t, syscall.Statfs(mnt, &here))
	if here.Blocks != host.Blocks || here.Bsize != host.Bsize {
		t.Errorf("statfs has %d blocks of %d, want %d of %d", here.Blocks, here.Bsize, host.Blocks, host.Bsize)
	}
}

func TestBigFile(t *testing.T) {
	both(t, func(t *testing.T, mnt, data string, _ *fusetest.Mount) {
		const size = 256 << 20
		table := crc32.MakeTable(crc32.Castagnoli)
		block := make([]byte, 4<<20)
		source := rand.NewChaCha8([32]byte{1})
		wrote := uint32(0)
		f, err := os.Create(filepath.Join(mnt, "big"))
		check(t, err)
		start := time.Now()
		for range size / len(block) {
			source.Read(block)
			wrote = crc32.Update(wrote, table, block)
			_, err = f.Write(block)
			check(t, err)
		}
		check(t, f.Sync())
		check(t, f.Close())
		t.Logf("wrote %d MiB in %v", size>>20, time.Since(start))
		start = time.Now()
		for _, dir := range []string{mnt, data} {
			f, err := os.Open(filepath.Join(dir, "big"))
			check(t, err)
			h := crc32.New(table)
			n, err := io.CopyBuffer(struct{ io.Writer }{h}, struct{ io.Reader }{f}, block)
			check(t, err)
			f.Close()
			if n != size || h.Sum32() != wrote {
				t.Errorf("%s: read %d bytes with CRC32C %08x, want %d with %08x", dir, n, h.Sum32(), size, wrote)
			}
		}
		t.Logf("read twice in %v", time.Since(start))
	})
}

func TestOwners(t *testing.T) {
	both(t, func(t *testing.T, mnt, data string, _ *fusetest.Mount) {
		const alice, bob, shared = 700001, 700002, 800000
		home := filepath.Join(mnt, "alice")
		check(t, os.Mkdir(home, 0o700))
		check(t, os.Chown(home, alice, alice))
		project := filepath.Join(mnt, "project") // as a site's group directory
		check(t, os.Mkdir(project, 0o770))
		check(t, os.Chown(project, 0, shared))
		check(t, os.Chmod(project, 0o2770|os.ModeSetgid))

		ok := func(got string) {
			t.Helper()
			if got != "" {
				t.Error(got)
			}
		}
		refused := func(got string) {
			t.Helper()
			if !strings.Contains(got, "permission denied") && !strings.Contains(got, "not permitted") {
				t.Errorf("got %q, want a refusal", got)
			}
		}
		ok(asUser(t, alice, alice, nil, "write", home+"/f", "hello"))
		ok(asUser(t, alice, alice, nil, "append", home+"/f", " world"))
		ok(asUser(t, alice, alice, nil, "mkdir", home+"/d"))
		ok(asUser(t, alice, alice, nil, "symlink", "/etc/shadow", home+"/l"))
		ok(asUser(t, alice, alice, nil, "mkfifo", home+"/p"))
		ok(asUser(t, bob, bob, []uint32{shared}, "write", project+"/f", "x"))
		ok(asUser(t, bob, bob, []uint32{shared}, "mkdir", project+"/d"))
		refused(asUser(t, bob, bob, nil, "read", home+"/f"))
		refused(asUser(t, bob, bob, nil, "write", project+"/g", "x"))
		refused(asUser(t, bob, bob, nil, "write", mnt+"/g", "x"))
		refused(asUser(t, bob, bob, nil, "remove", home))
		check(t, os.Chmod(home, 0o755))
		refused(asUser(t, bob, bob, nil, "append", home+"/f", "x"))
		refused(asUser(t, bob, bob, nil, "chmod", home+"/f"))
		refused(asUser(t, alice, alice, nil, "chown", home+"/f"))

		var got []string
		for _, name := range []string{"alice/f", "alice/d", "alice/l", "alice/p", "project/f", "project/d"} {
			var st, behind syscall.Stat_t
			check(t, syscall.Lstat(filepath.Join(mnt, name), &st))
			check(t, syscall.Lstat(filepath.Join(data, name), &behind))
			if st.Uid != behind.Uid || st.Gid != behind.Gid || st.Mode != behind.Mode || st.Ino != behind.Ino {
				t.Errorf("%s: mount shows %+v, the directory %+v", name, st, behind)
			}
			got = append(got, fmt.Sprintf("%s %d:%d %o", name, st.Uid, st.Gid, st.Mode))
		}
		want := []string{
			"alice/f 700001:700001 100640",
			"alice/d 700001:700001 40750",
			"alice/l 700001:700001 120777",
			"alice/p 700001:700001 10640",
			"project/f 700002:800000 100640",
			"project/d 700002:800000 42750",
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("owners and modes (-want +got):\n%s", d)
		}
		if b, _ := os.ReadFile(home + "/f"); string(b) != "hello world" {
			t.Errorf("content %q", b)
		}
	})
}

func TestNames(t *testing.T) {
	both(t, func(t *testing.T, mnt, data string, _ *fusetest.Mount) {
		in := func(name string) string { return filepath.Join(mnt, name) }
		check(t, os.WriteFile(in("a"), []byte("a"), 0o600))
		check(t, os.Link(in("a"), in("b")))
		var st syscall.Stat_t
		check(t, syscall.Stat(in("a"), &st))
		if st.Nlink != 2 {
			t.Errorf("links = %d, want 2", st.Nlink)
		}
		check(t, os.Rename(in("b"), in("c")))
		_, err := os.Stat(in("b"))
		wantErr(t, "stat of the old name", err, os.ErrNotExist)
		check(t, os.WriteFile(in("d"), []byte("d"), 0o600))
		check(t, os.Rename(in("d"), in("c")))
		if b, err := os.ReadFile(in("c")); err != nil || string(b) != "d" {
			t.Errorf("after replacing: %q, %v", b, err)
		}
		wantErr(t, "no-replace rename", unix.Renameat2(-100, in("a"), -100, in("c"), unix.RENAME_NOREPLACE), syscall.EEXIST)
		check(t, unix.Renameat2(-100, in("a"), -100, in("c"), unix.RENAME_EXCHANGE))
		if b, _ := os.ReadFile(in("a")); string(b) != "d" {
			t.Errorf("after exchange: %q", b)
		}

		check(t, os.Symlink("../../etc/passwd", in("link")))
		if s, err := os.Readlink(in("link")); err != nil || s != "../../etc/passwd" {
			t.Errorf("readlink: %q, %v", s, err)
		}
		check(t, os.Mkdir(in("dir"), 0o700))
		check(t, os.WriteFile(in("dir/f"), nil, 0o600))
		wantErr(t, "rmdir of a full directory", syscall.Rmdir(in("dir")), syscall.ENOTEMPTY)
		wantErr(t, "unlink of a directory", syscall.Unlink(in("dir")), syscall.EISDIR)
		wantErr(t, "a name of 256 bytes", os.WriteFile(in(strings.Repeat("x", 256)), nil, 0o600), syscall.ENAMETOOLONG)
		wantErr(t, "exclusive create", func() error {
			_, err := os.OpenFile(in("a"), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
			return err
		}(), os.ErrExist)
		wantErr(t, "block device", syscall.Mknod(in("dev"), syscall.S_IFBLK|0o600, 7<<8), syscall.EPERM)
		wantErr(t, "character device", syscall.Mknod(in("dev"), syscall.S_IFCHR|0o600, 1<<8|3), syscall.EPERM)

		// A file without a name works on, and so does one that moved to another directory.
		f, err := os.OpenFile(in("gone"), os.O_CREATE|os.O_RDWR, 0o600)
		check(t, err)
		defer f.Close()
		check(t, os.Remove(in("gone")))
		_, err = f.WriteString("still here")
		check(t, err)
		check(t, f.Truncate(5))
		check(t, f.Chmod(0o640))
		if info, err := f.Stat(); err != nil || info.Size() != 5 || info.Mode() != 0o640 {
			t.Errorf("fstat of a removed file: %v, %v", info, err)
		}
		when := time.Date(2020, 1, 2, 3, 4, 5, 678, time.UTC)
		check(t, os.Chtimes(in("a"), when, when))
		if info, _ := os.Stat(in("a")); !info.ModTime().Equal(when) {
			t.Errorf("mtime %v, want %v", info.ModTime(), when)
		}
		check(t, unix.UtimesNanoAt(unix.AT_FDCWD, in("link"), []unix.Timespec{unix.NsecToTimespec(when.UnixNano()), unix.NsecToTimespec(when.UnixNano())}, unix.AT_SYMLINK_NOFOLLOW))
		if info, _ := os.Lstat(in("link")); !info.ModTime().Equal(when) {
			t.Errorf("mtime of a symbolic link %v, want %v", info.ModTime(), when)
		}
		check(t, os.Lchown(in("link"), 5, 6))
	})
}

func TestManyEntries(t *testing.T) {
	both(t, func(t *testing.T, mnt, data string, _ *fusetest.Mount) {
		const n = 5000
		var want []string
		for i := range n {
			name := "file-" + strconv.Itoa(i) + strings.Repeat("x", i%100)
			want = append(want, name)
			check(t, os.WriteFile(filepath.Join(data, name), nil, 0o600))
		}
		slices.Sort(want)
		entries, err := os.ReadDir(mnt)
		check(t, err)
		var got []string
		for _, e := range entries {
			got = append(got, e.Name())
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("entries (-want +got):\n%s", d)
		}
	})
}

func TestXattr(t *testing.T) {
	data, mnt := publicDir(t), publicDir(t)
	fusetest.New(t, data, mnt, source, lustrefs.Options{})
	f := filepath.Join(mnt, "f")
	check(t, os.WriteFile(f, nil, 0o600))
	check(t, unix.Setxattr(f, "user.a", []byte("1"), 0))
	check(t, unix.Setxattr(f, "user.b", []byte("2"), unix.XATTR_CREATE))
	wantErr(t, "create again", unix.Setxattr(f, "user.b", nil, unix.XATTR_CREATE), syscall.EEXIST)
	wantErr(t, "trusted", unix.Setxattr(f, "trusted.a", nil, 0), syscall.EOPNOTSUPP)
	buf := make([]byte, 100)
	n, err := unix.Getxattr(f, "user.a", buf)
	if err != nil || string(buf[:n]) != "1" {
		t.Errorf("getxattr: %q, %v", buf[:max(n, 0)], err)
	}
	n, err = unix.Listxattr(f, buf)
	check(t, err)
	names := strings.Split(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00")
	slices.Sort(names)
	if d := cmp.Diff([]string{"user.a", "user.b"}, names); d != "" {
		t.Errorf("listxattr (-want +got):\n%s", d)
	}
	_, err = unix.Listxattr(f, buf[:3])
	wantErr(t, "short list", err, syscall.ERANGE)
	check(t, unix.Removexattr(f, "user.a"))
	_, err = unix.Getxattr(f, "user.a", buf)
	wantErr(t, "removed", err, syscall.ENODATA)
}

func TestMmapAndDirect(t *testing.T) {
	both(t, func(t *testing.T, mnt, data string, _ *fusetest.Mount) {
		f, err := os.OpenFile(filepath.Join(mnt, "f"), os.O_CREATE|os.O_RDWR, 0o600)
		check(t, err)
		defer f.Close()
		check(t, f.Truncate(1<<20))
		m, err := unix.Mmap(int(f.Fd()), 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		check(t, err)
		copy(m[5000:], "through the map")
		check(t, unix.Msync(m, unix.MS_SYNC))
		check(t, unix.Munmap(m))
		b, err := os.ReadFile(filepath.Join(data, "f"))
		check(t, err)
		if len(b) != 1<<20 || !bytes.HasPrefix(b[5000:], []byte("through the map")) {
			t.Errorf("mapped write did not arrive")
		}

		fd, err := unix.Open(filepath.Join(mnt, "direct"), unix.O_CREAT|unix.O_RDWR|unix.O_DIRECT, 0o600)
		check(t, err)
		defer unix.Close(fd)
		page, err := unix.Mmap(-1, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
		check(t, err)
		defer unix.Munmap(page)
		copy(page, bytes.Repeat([]byte("d"), 8192))
		if n, err := unix.Pwrite(fd, page, 0); n != 8192 || err != nil {
			t.Fatalf("direct write: %d, %v", n, err)
		}
		clear(page)
		if n, err := unix.Pread(fd, page, 0); n != 8192 || err != nil || page[8191] != 'd' {
			t.Errorf("direct read: %d, %v", n, err)
		}
		check(t, unix.Fallocate(int(f.Fd()), 0, 0, 2<<20))
		if off, err := f.Seek(0, unix.SEEK_HOLE); err != nil {
			t.Errorf("seek hole: %d, %v", off, err)
		}
	})
}

// TestTwoMounts stands for two nodes with the same file system.
func TestTwoMounts(t *testing.T) {
	for _, o := range []lustrefs.Options{{}, {Passthrough: true}} {
		t.Run(fmt.Sprint(o.Passthrough), func(t *testing.T) {
			data, one, two := publicDir(t), publicDir(t), publicDir(t)
			fusetest.New(t, data, one, source, o)
			fusetest.New(t, data, two, source, o)
			a, b := filepath.Join(one, "f"), filepath.Join(two, "f")

			_, err := os.Stat(b)
			wantErr(t, "before", err, os.ErrNotExist)
			check(t, os.WriteFile(a, []byte("one"), 0o600))
			if got, err := os.ReadFile(b); err != nil || string(got) != "one" {
				t.Errorf("the other sees %q, %v", got, err)
			}
			fa, err := os.OpenFile(a, os.O_RDWR|os.O_APPEND, 0)
			check(t, err)
			defer fa.Close()
			fb, err := os.OpenFile(b, os.O_RDWR|os.O_APPEND, 0)
			check(t, err)
			defer fb.Close()
			for i := range 10 {
				_, err = fmt.Fprintf([]*os.File{fa, fb}[i%2], "-%d", i)
				check(t, err)
			}
			for _, f := range []*os.File{fa, fb} {
				got := make([]byte, 100)
				n, _ := f.ReadAt(got, 0)
				if string(got[:n]) != "one-0-1-2-3-4-5-6-7-8-9" {
					t.Errorf("after appends from both: %q", got[:n])
				}
			}

			// flock and fcntl locks hold between the two.
			check(t, unix.Flock(int(fa.Fd()), unix.LOCK_EX))
			wantErr(t, "flock", unix.Flock(int(fb.Fd()), unix.LOCK_SH|unix.LOCK_NB), syscall.EWOULDBLOCK)
			taken := make(chan error)
			go func() { taken <- unix.Flock(int(fb.Fd()), unix.LOCK_SH) }()
			check(t, unix.Flock(int(fa.Fd()), unix.LOCK_UN))
			check(t, <-taken)
			check(t, unix.Flock(int(fb.Fd()), unix.LOCK_UN))
			lock := func(f *os.File, kind int16, start int64) error {
				return syscall.FcntlFlock(f.Fd(), syscall.F_SETLK, &syscall.Flock_t{Type: kind, Start: start, Len: 10})
			}
			// Both files belong to this process, but the two mounts are two clients.
			check(t, lock(fa, syscall.F_WRLCK, 0))
			wantErr(t, "fcntl", lock(fb, syscall.F_RDLCK, 5), syscall.EAGAIN)
			check(t, lock(fb, syscall.F_WRLCK, 10))
			other, err := os.Open(a)
			check(t, err)
			other.Close() // POSIX: closing any descriptor of the file gives the locks up
			check(t, lock(fb, syscall.F_RDLCK, 5))

			// A name that the other replaced.
			check(t, os.WriteFile(filepath.Join(one, "g"), []byte("new"), 0o600))
			check(t, os.Rename(filepath.Join(one, "g"), a))
			if got, err := os.ReadFile(b); err != nil || string(got) != "new" {
				t.Errorf("after the rename the other sees %q, %v", got, err)
			}
		})
	}
}

func TestReadOnly(t *testing.T) {
	data, mnt := publicDir(t), publicDir(t)
	check(t, os.WriteFile(filepath.Join(data, "f"), []byte("x"), 0o600))
	fusetest.New(t, data, mnt, source, lustrefs.Options{ReadOnly: true})
	if b, err := os.ReadFile(filepath.Join(mnt, "f")); err != nil || string(b) != "x" {
		t.Errorf("read: %q, %v", b, err)
	}
	wantErr(t, "write", os.WriteFile(filepath.Join(mnt, "f"), nil, 0o600), syscall.EROFS)
	wantErr(t, "create", os.WriteFile(filepath.Join(mnt, "g"), nil, 0o600), syscall.EROFS)
	wantErr(t, "remove", os.Remove(filepath.Join(mnt, "f")), syscall.EROFS)
	wantErr(t, "chmod", os.Chmod(filepath.Join(mnt, "f"), 0), syscall.EROFS)
}

func TestCapacity(t *testing.T) {
	data, mnt := publicDir(t), publicDir(t)
	m := fusetest.New(t, data, mnt, source, lustrefs.Options{})
	const limit = 4 << 20
	m.Behave(t, lustrefs.Behaviour{Capacity: limit})
	var st syscall.Statfs_t
	check(t, syscall.Statfs(mnt, &st))
	if int64(st.Blocks)*st.Bsize != limit {
		t.Errorf("statfs shows %d bytes, want %d", int64(st.Blocks)*st.Bsize, limit)
	}
	check(t, os.WriteFile(filepath.Join(mnt, "fits"), make([]byte, 3<<20), 0o600))
	wantErr(t, "too much", os.WriteFile(filepath.Join(mnt, "big"), make([]byte, 2<<20), 0o600), syscall.ENOSPC)
	check(t, os.Remove(filepath.Join(mnt, "big")))
	check(t, os.Remove(filepath.Join(mnt, "fits")))
	check(t, os.WriteFile(filepath.Join(mnt, "fits again"), make([]byte, 3<<20), 0o600))
}

// TestClientKilled ends the only process with files open and its mount: the server ends by itself.
func TestClientKilled(t *testing.T) {
	data, mnt := publicDir(t), publicDir(t)
	m := fusetest.New(t, data, mnt, source, lustrefs.Options{})
	cmd := exec.Command("sh", "-c", `exec 4<"$1"; exec head -c 4G /dev/zero >"$1/f"`, "sh", mnt)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	check(t, cmd.Start())
	for {
		if info, err := os.Stat(filepath.Join(data, "f")); err == nil && info.Size() > 1<<20 {
			break
		}
	}
	check(t, syscall.Unmount(mnt, syscall.MNT_DETACH))
	check(t, cmd.Process.Kill())
	cmd.Wait()
	select {
	case <-m.Exited:
	case <-time.After(20 * time.Second):
		t.Error("the server is still there")
	}
}
