package files_test

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/sandbox/lustre/fusetest"
	"github.com/sluicehpc/sluice/staging/files"
)

// TestMain makes the test binary its own child: `TEST fs OP`.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "fs" {
		os.Exit(files.Main(os.Args[2:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(fusetest.Main(m))
}

const (
	uid = 10001
	gid = 20001
)

var alice = files.User{UID: uid, GID: gid}

// mount returns an empty file system whose root everybody may pass.
func mount(t *testing.T) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("needs root: files change their owners")
	}
	dir, err := os.MkdirTemp("/tmp", "sluice-files")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func crc(s string) uint32 { return crc32.Checksum([]byte(s), crc32.MakeTable(crc32.Castagnoli)) }

func write(t *testing.T, path, data string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
		t.Fatal(err)
	}
}

func entries(texts map[string]string) []files.Entry {
	var list []files.Entry
	for path, text := range texts {
		list = append(list, files.Entry{Path: path, Size: int64(len(text)), CRC32C: crc(text)})
	}
	return list
}

var c files.Client

// as runs f in a process-wide way as the user would: by the modes alone.
func stat(t *testing.T, path string) (mode fs.FileMode, owner, group uint32) {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	st := info.Sys().(*syscall.Stat_t)
	return info.Mode(), st.Uid, st.Gid
}

// The tasks of one array want the same gate at the same time.
func TestGateIsMadeOnceAtATime(t *testing.T) {
	m := mount(t)
	ctx := t.Context()
	texts := map[string]string{}
	for i := range 300 {
		texts[fmt.Sprintf("d%d/%d.txt", i%7, i)] = "x"
	}
	if _, err := c.Prepare(ctx, m, "ds", "v1", "t1"); err != nil {
		t.Fatal(err)
	}
	for path, text := range texts {
		write(t, filepath.Join(m, files.PartialDir("ds", "v1", "t1"), path), text)
	}
	pub := files.Published{Dataset: "ds", Version: "v1", Transfer: "t1", Objects: 300, Bytes: 300}
	if err := c.Publish(ctx, m, pub, files.Lines(entries(texts))); err != nil {
		t.Fatal(err)
	}
	// What a worker left that was killed.
	gates := filepath.Dir(filepath.Join(m, files.GateDir("ds", "v1", gid)))
	write(t, filepath.Join(gates, fmt.Sprint(gid)+".partial-tree", "d0/0.txt"), "x")
	errs := make(chan error, 8)
	for range cap(errs) {
		go func() { errs <- c.Gate(ctx, m, "ds", "v1", gid) }()
	}
	for range cap(errs) {
		if err := <-errs; err != nil {
			t.Errorf("Gate: %v", err)
		}
	}
	for path := range texts {
		if _, err := os.Stat(filepath.Join(m, files.GateDir("ds", "v1", gid), path)); err != nil {
			t.Errorf("the gate lacks a file: %v", err)
		}
	}
	names, err := os.ReadDir(gates)
	if err != nil || len(names) != 1 {
		t.Errorf("%d entries beside the gate (%v), want the gate alone", len(names), err)
	}
}

func TestStageInTree(t *testing.T) {
	m := mount(t)
	ctx := t.Context()
	texts := map[string]string{"a.txt": "hello", "d/b.txt": "world", "d/e/empty": ""}
	for range 2 { // every step twice: a sluiced killed after it repeats it
		pub, err := c.Prepare(ctx, m, "ds", "v1", "t1")
		if err != nil || pub != nil {
			t.Fatalf("Prepare = %+v, %v, want a new directory", pub, err)
		}
	}
	partial := filepath.Join(m, files.PartialDir("ds", "v1", "t1"))
	for path, text := range texts {
		write(t, filepath.Join(partial, path), text)
	}
	list := files.Lines(entries(texts))
	var last files.Progress
	problems, err := c.Verify(ctx, m, files.PartialDir("ds", "v1", "t1"), list, func(p files.Progress) { last = p })
	if err != nil || len(problems) != 0 {
		t.Fatalf("Verify = %q, %v", problems, err)
	}
	if last != (files.Progress{Objects: 3, Bytes: 10}) {
		t.Errorf("last progress %+v, want 3 objects and 10 bytes", last)
	}
	pub := files.Published{Dataset: "ds", Version: "v1", Transfer: "t1", Source: "gs://b/p/", InstanceUID: "u", Objects: 3, Bytes: 10}
	for range 2 {
		if err := c.Publish(ctx, m, pub, list); err != nil {
			t.Fatalf("Publish: %v", err)
		}
	}
	got, err := c.Prepare(ctx, m, "ds", "v1", "t2")
	if err != nil || got == nil || *got != pub {
		t.Errorf("Prepare of a published version = %+v, %v, want %+v", got, err, pub)
	}
	for range 2 {
		if err := c.Gate(ctx, m, "ds", "v1", gid); err != nil {
			t.Fatalf("Gate: %v", err)
		}
	}
	if mode, owner, group := stat(t, filepath.Join(m, files.GateDir("ds", "v1", gid))); mode.Perm() != 0o750 || owner != 0 || group != gid {
		t.Errorf("gate is %v %d:%d, want 0750 0:%d", mode, owner, group, gid)
	}
	if mode, _, _ := stat(t, filepath.Join(m, files.VersionDir("ds", "v1"))); mode.Perm() != 0o700 {
		t.Errorf("version is %v, want 0700: users come through a gate", mode)
	}
	if mode, owner, _ := stat(t, filepath.Join(m, files.GateDir("ds", "v1", gid), "d/b.txt")); mode.Perm() != 0o444 || owner != 0 {
		t.Errorf("file is %v of %d, want 0444 of root", mode, owner)
	}
	if mode, _, _ := stat(t, filepath.Join(m, files.Datasets)); mode.Perm() != 0o711 {
		t.Errorf("datasets is %v, want 0711", mode)
	}
}

func TestVerifyFindsEveryDifference(t *testing.T) {
	m := mount(t)
	if _, err := c.Prepare(t.Context(), m, "ds", "v", "t"); err != nil {
		t.Fatal(err)
	}
	dir := files.PartialDir("ds", "v", "t")
	at := filepath.Join(m, dir)
	write(t, at+"/good", "good")
	write(t, at+"/flipped", "flippeD")
	write(t, at+"/short", "shor")
	write(t, at+"/sub/extra", "x")
	if err := os.Symlink("good", at+"/link"); err != nil {
		t.Fatal(err)
	}
	list := files.Lines(entries(map[string]string{"good": "good", "flipped": "flipped", "short": "short", "gone": "", "link": "good"}))
	problems, err := c.Verify(t.Context(), m, dir, list, nil)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(problems)
	want := []string{
		fmt.Sprintf("flipped: CRC32C is %08x, want %08x", crc("flippeD"), crc("flipped")),
		"gone: missing",
		"link: not a regular file",
		"short: 4 bytes, want 5",
		"sub/extra: not in the bucket's listing",
	}
	if d := cmp.Diff(want, problems); d != "" {
		t.Errorf("problems (-want +got):\n%s", d)
	}
}

func TestJobDirectory(t *testing.T) {
	m := mount(t)
	ctx := t.Context()
	job := files.JobDir("c", 7)
	for range 2 {
		if err := c.MkdirJob(ctx, m, job, uid, gid); err != nil {
			t.Fatal(err)
		}
	}
	if mode, owner, group := stat(t, filepath.Join(m, job)); mode.Perm() != 0o700 || owner != uid || group != gid {
		t.Errorf("job directory is %v %d:%d, want 0700 %d:%d", mode, owner, group, uid, gid)
	}
	var e *files.Error
	if err := c.MkdirJob(ctx, m, job, uid+1, gid); !errors.As(err, &e) || !e.Input {
		t.Errorf("another user's job of that number: %v, want a refusal", err)
	}
	for range 2 {
		if err := c.Link(ctx, alice, m, job, "in/data", "/somewhere"); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.Readlink(filepath.Join(m, job, "in/data")); err != nil || got != "/somewhere" {
		t.Errorf("link = %q, %v", got, err)
	}
	// A planted symlink does not lead out.
	if err := os.Symlink("/tmp", filepath.Join(m, job, "out")); err != nil {
		t.Fatal(err)
	}
	if err := c.Link(ctx, alice, m, job, "out/x", "/somewhere"); !errors.As(err, &e) || !e.Input || !strings.Contains(err.Error(), "symbolic link") {
		t.Errorf("to= through a symlink: %v, want a refusal", err)
	}
	for _, to := range []string{"../x", "/etc/x", "a/../../x", "a//b", ""} {
		if err := c.Link(ctx, alice, m, job, to, "/somewhere"); err == nil {
			t.Errorf("to=%q was taken", to)
		}
	}
	if err := c.Remove(ctx, m, job); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/tmp"); err != nil {
		t.Error("removal followed a symlink")
	}
	if _, err := os.Lstat(filepath.Join(m, job)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("job directory is still there: %v", err)
	}
	for _, path := range []string{".sluice", "home", "../etc", ".sluice/datasets/ds/v1"} {
		if err := c.Remove(ctx, m, path); err == nil {
			t.Errorf("Remove(%q) was done", path)
		}
	}
}

func TestForeignSluiceDirectoryIsRefused(t *testing.T) {
	m := mount(t)
	if err := os.Mkdir(filepath.Join(m, files.Base), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(filepath.Join(m, files.Base), uid, gid); err != nil {
		t.Fatal(err)
	}
	if err := c.MkdirJob(t.Context(), m, files.JobDir("c", 1), uid, gid); err == nil || !strings.Contains(err.Error(), "belongs to uid") {
		t.Errorf("got %v, want a refusal: a user could swap everything below", err)
	}
}

func TestManifestAndMove(t *testing.T) {
	m := mount(t)
	ctx := t.Context()
	job := files.JobDir("c", 8)
	if err := c.MkdirJob(ctx, m, job, uid, gid); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(m, job, "out")
	write(t, out+"/a", "aa")
	write(t, out+"/sub/b", "bbb")
	if err := os.Symlink("/etc/shadow", out+"/secret"); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(out+"/pipe", 0o644); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{out, out + "/a", out + "/sub", out + "/sub/b"} {
		if err := os.Chown(path, uid, gid); err != nil {
			t.Fatal(err)
		}
	}
	got, skipped, err := c.Manifest(ctx, alice, m, job, "out/", 10, nil)
	if err != nil {
		t.Fatal(err)
	}
	list := files.Lines(got)
	for i := range got {
		if got[i].Inode == 0 {
			t.Errorf("%s has no inode", got[i].Path)
		}
		got[i].MTime, got[i].Inode = 0, 0
	}
	if d := cmp.Diff([]files.Entry{{Path: "a", Size: 2, CRC32C: crc("aa")}, {Path: "sub/b", Size: 3, CRC32C: crc("bbb")}}, got); d != "" {
		t.Errorf("manifest (-want +got):\n%s", d)
	}
	if len(skipped) != 2 {
		t.Errorf("skipped %+v, want the link and the pipe", skipped)
	}

	// Only what did not change is moved.
	write(t, out+"/a", "changed")
	if err := c.Unlink(ctx, alice, m, job, "out", list); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(out + "/a"); err != nil {
		t.Error("a changed file was deleted")
	}
	if _, err := os.Stat(out + "/sub/b"); err == nil {
		t.Error("an exported file was not deleted")
	}

	for _, tt := range []struct {
		name, from, want string
		plant            func() error
	}{
		{"missing", "nowhere", "no such directory", func() error { return nil }},
		{"symlink", "etc", "symbolic link", func() error { return os.Symlink("/etc", filepath.Join(m, job, "etc")) }},
		{"symlink inside", "etc/ssl", "symbolic link", func() error { return nil }},
		{"file", "out/a", "not a directory", func() error { return nil }},
		{"dot dot", "../..", "component ..", func() error { return nil }},
		{"unreadable", "out", "may not", func() error {
			write(t, out+"/mine", "root's")
			return os.Chmod(out+"/mine", 0o600)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := tt.plant(); err != nil {
				t.Fatal(err)
			}
			var e *files.Error
			_, _, err := c.Manifest(ctx, alice, m, job, tt.from, 10, nil)
			if !errors.As(err, &e) || !e.Input {
				t.Fatalf("got %v, want a refusal", err)
			}
			if tt.name != "unreadable" && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %q, want it to say %q", err, tt.want)
			}
		})
	}
	// Another user's manifest of the job's directory is refused by the kernel.
	if _, _, err := c.Manifest(ctx, files.User{UID: uid + 1, GID: gid + 1}, m, job, "out", 10, nil); err == nil {
		t.Error("another user read the job's directory")
	}
}

func TestSweepKeepsTheLiving(t *testing.T) {
	m := mount(t)
	for _, tr := range []string{"t1", "t2"} {
		if _, err := c.Prepare(t.Context(), m, "ds", "v", tr); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(m, files.PartialDir("ds", "v", tr), "sub/f"), "x")
		write(t, filepath.Join(m, files.ExportDir(tr), "sub/f"), "x")
	}
	removed, err := c.Sweep(t.Context(), m, []string{"t2"})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{files.ExportDir("t1"), files.PartialDir("ds", "v", "t1")}, removed); d != "" {
		t.Errorf("removed (-want +got):\n%s", d)
	}
	for _, dir := range []string{files.PartialDir("ds", "v", "t2"), files.ExportDir("t2")} {
		if _, err := os.Stat(filepath.Join(m, dir, "sub/f")); err != nil {
			t.Errorf("a living transfer's directory was removed: %v", err)
		}
	}
}

// A child that hangs is left, and the caller knows.
func TestHungChildIsLeft(t *testing.T) {
	hung := files.Client{Program: "/bin/sh", Args: []string{"-c", "sleep 600"}, Stall: 50 * time.Millisecond}
	_, err := hung.Prepare(t.Context(), "/", "d", "v", "t")
	if !errors.Is(err, files.ErrHung) {
		t.Errorf("got %v, want ErrHung", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := hung.Remove(ctx, "/", "x"); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want Canceled", err)
	}
}

func FuzzCheckName(f *testing.F) {
	for _, s := range []string{"a/b", "../x", "/a", "a//b", "a/", ".", "a\x00", strings.Repeat("x", 300)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if files.CheckName(s) == "" && (!filepath.IsLocal(s) || filepath.Clean(s) != s) {
			t.Errorf("%q is taken, but is not a clean local path", s)
		}
	})
}
