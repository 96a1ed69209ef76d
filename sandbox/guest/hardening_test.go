package guest

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/packaging"
)

// attempt is what a hardened service tries; it prints one line for each word: the word and "ok" or the error.
func attempt(words []string) int {
	runtime.LockOSThread()
	for _, w := range words {
		what, argument, _ := strings.Cut(w, ":")
		err := attempts[what](argument)
		if err == nil {
			fmt.Printf("%s ok\n", w)
			continue
		}
		fmt.Printf("%s %s\n", w, unix.ErrnoName(err.(unix.Errno)))
	}
	return 0
}

func errno(e unix.Errno) error {
	if e == 0 {
		return nil
	}
	return e
}

func closing(fd int, err error) error {
	if err == nil {
		unix.Close(fd)
	}
	return err
}

var attempts = map[string]func(string) error{
	"netlink": func(string) error { return closing(unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, 0)) },
	"unix":    func(string) error { return closing(unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)) },
	"unshare": func(string) error { return unix.Unshare(unix.CLONE_NEWUTS) },
	"setns": func(string) error {
		fd, err := unix.Open("/proc/self/ns/uts", unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Setns(fd, unix.CLONE_NEWUTS)
	},
	"realtime": func(string) error {
		priority := int32(1)
		_, _, e := unix.Syscall(unix.SYS_SCHED_SETSCHEDULER, 0, unix.SCHED_FIFO, uintptr(unsafe.Pointer(&priority)))
		return errno(e)
	},
	"personality": func(string) error { _, _, e := unix.Syscall(unix.SYS_PERSONALITY, 0x0040000, 0, 0); return errno(e) },
	"writable code": func(string) error {
		_, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANON)
		return err
	},
	"openat2": func(string) error {
		return closing(unix.Openat2(unix.AT_FDCWD, "/", &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_CLOEXEC}))
	},
	"openat": func(string) error { return closing(unix.Openat(unix.AT_FDCWD, "/", unix.O_RDONLY|unix.O_CLOEXEC, 0)) },
	"time":   func(string) error { var x unix.Timex; x.Modes = 0x4000; _, err := unix.Adjtimex(&x); return err },
	"rights": func(string) error {
		if v, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0); err != nil || v == 1 {
			return unix.EPERM
		}
		return nil
	},
	"write": func(path string) error {
		return closing(unix.Open(path+"/.attempt", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600))
	},
	"open":   func(path string) error { return closing(unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)) },
	"read":   func(path string) error { return closing(unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)) },
	"kernel": func(string) error { return seccomp(new(Hardening).filter(firstAfter["4.18"])) },
}

// said is the journal of a unit in one line, without the times.
func said(m *Manager, unit string) string {
	var lines []string
	for _, line := range tail(journalPath(m.JournalDir, unit), 10) {
		_, words, _ := strings.Cut(line, " ")
		lines = append(lines, words)
	}
	return strings.Join(lines, " ")
}

// TestHardening runs a service with each directive: what it forbids fails, and would not without it.
func TestHardening(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	for _, tc := range []struct{ directive, attempt, with, without string }{
		{"NoNewPrivileges=yes", "rights", "EPERM", "ok"},
		{"CapabilityBoundingSet=CAP_CHOWN", "unshare", "EPERM", "ok"},
		{"CapabilityBoundingSet=~CAP_SYS_ADMIN", "unshare", "EPERM", "ok"},
		{"CapabilityBoundingSet=CAP_CHOWN\nCapabilityBoundingSet=CAP_SYS_ADMIN", "unshare", "ok", "ok"},
		{"RestrictAddressFamilies=AF_UNIX AF_INET", "netlink", "EAFNOSUPPORT", "ok"},
		{"RestrictAddressFamilies=AF_UNIX AF_INET", "unix", "ok", "ok"},
		{"RestrictAddressFamilies=~AF_NETLINK AF_PACKET", "netlink", "EAFNOSUPPORT", "ok"},
		{"RestrictAddressFamilies=~AF_NETLINK AF_PACKET", "unix", "ok", "ok"},
		{"RestrictAddressFamilies=none", "unix", "EAFNOSUPPORT", "ok"},
		{"RestrictNamespaces=yes", "unshare", "EPERM", "ok"},
		{"RestrictNamespaces=yes", "setns", "EPERM", "ok"},
		{"RestrictRealtime=yes", "realtime", "EPERM", "ok"},
		{"LockPersonality=yes", "personality", "EPERM", "ok"},
		{"MemoryDenyWriteExecute=yes", "writable code", "EPERM", "ok"},
		{"SystemCallArchitectures=native", "openat", "ok", "ok"},
		{"ProtectSystem=full", "write:/usr", "EROFS", "ok"},
		{"ProtectSystem=full", "write:/etc", "EROFS", "ok"},
		{"ProtectSystem=strict", "write:{dir}", "EROFS", "ok"},
		{"ProtectSystem=strict\nReadWritePaths={dir}", "write:{dir}", "ok", "ok"},
		{"ReadOnlyPaths={dir} -/no/such", "write:{dir}", "EROFS", "ok"},
		{"InaccessiblePaths={dir}/secret", "read:{dir}/secret/key", "ENOENT", "ok"},
		{"ProtectHome=yes", "write:/root", "EROFS", "ok"},
		{"ProtectHome=read-only", "write:/root", "EROFS", "ok"},
		{"ProtectKernelTunables=yes", "open:/proc/sys/kernel/hostname", "EROFS", "ok"},
	} {
		t.Run(tc.directive+" "+tc.attempt, func(t *testing.T) {
			for directive, want := range map[string]string{tc.directive: tc.with, "": tc.without} {
				if strings.HasPrefix(tc.attempt, "write:/") && want == "ok" {
					continue // not on the host
				}
				m, dir := testManager(t, map[string]string{"x.service": "[Service]\nType=oneshot\n" + directive + "\nExecStart={self} attempt \"" + tc.attempt + "\"\n"})
				secret := filepath.Join(dir, "secret")
				if err := os.Mkdir(secret, 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(secret, "key"), nil, 0o644); err != nil {
					t.Fatal(err)
				}
				if err := m.Start(context.Background(), "x.service"); err != nil {
					t.Fatal(err)
				}
				become(t, fmt.Sprintf("what is said with %q", directive), tc.attempt+" "+want, func() any {
					return strings.ReplaceAll(said(m, "x.service"), dir, "{dir}")
				})
			}
		})
	}
}

func TestPrivateTmp(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	m, _ := testManager(t, map[string]string{"x.service": "[Service]\nType=oneshot\nPrivateTmp=yes\nExecStart=/bin/sh -c \"ls -A /tmp /var/tmp; echo >/tmp/x\"\n"})
	if err := m.Start(context.Background(), "x.service"); err != nil {
		t.Fatal(err)
	}
	become(t, "what is said", "/tmp:  /var/tmp:", func() any { return said(m, "x.service") })
}

// TestOldKernel: a system call younger than Rocky 8's kernel does not exist.
func TestOldKernel(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	m, _ := testManager(t, map[string]string{"x.service": "[Service]\nType=oneshot\nExecStart={self} attempt openat2 kernel openat2 openat unshare\n"})
	if err := m.Start(context.Background(), "x.service"); err != nil {
		t.Fatal(err)
	}
	become(t, "what is said", "openat2 ok kernel ok openat2 ENOSYS openat ok unshare ok", func() any { return said(m, "x.service") })
}

// TestShippedUnits: the guest understands every directive of the units that Sluice ships.
func TestShippedUnits(t *testing.T) {
	n := 0
	err := fs.WalkDir(packaging.Units, "systemd", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		n++
		text, err := fs.ReadFile(packaging.Units, path)
		if err != nil {
			return err
		}
		name, files := filepath.Base(path), []string{string(text)}
		if strings.HasSuffix(name, ".conf") { // a drop-in
			name, files = strings.TrimSuffix(filepath.Base(filepath.Dir(path)), ".d"), []string{"[Service]\nExecStart=/x\n", string(text)}
		}
		_, err = parseStrings(name, files...)
		return err
	})
	if err != nil || n < 3 {
		t.Errorf("%d units: %v", n, err)
	}
}
