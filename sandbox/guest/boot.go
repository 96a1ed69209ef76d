package guest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// BootSpec is what the launcher (package vm) tells the first process of a VM, as one line of JSON on
// descriptor 3. The process answers one line of JSON with an error, or "", on descriptor 4 when its
// file systems stand, waits for a second line on descriptor 3, and becomes PID 1's real program.
type BootSpec struct {
	Hostname string   `json:"hostname"`
	Hosts    string   `json:"hosts"`  // /etc/hosts
	Resolv   string   `json:"resolv"` // /etc/resolv.conf
	Layers   []string `json:"layers"` // lower directories, the top one first
	Upper    string   `json:"upper"`
	Work     string   `json:"work"`
	Mount    string   `json:"mount"` // an empty directory for the overlay, seen only in the VM
	Binary   string   `json:"binary"`
	Binds    []Bind   `json:"binds"`
	Kernel   string   `json:"kernel"` // see KnownKernel
}

// Bind is a file or directory of the outside that a VM sees.
type Bind struct {
	Source   string `json:"source"` // absolute, without symlinks
	Target   string `json:"target"` // absolute in the VM; made when missing
	ReadOnly bool   `json:"read_only"`
}

// Descriptors of the first process.
const (
	bootSpecFD  = 3
	bootReplyFD = 4
)

// BootReply answers a BootSpec.
type BootReply struct {
	Error string `json:"error"`
}

func bootMain() error {
	in := bufio.NewReader(os.NewFile(bootSpecFD, "spec"))
	out := os.NewFile(bootReplyFD, "reply")
	line, err := in.ReadBytes('\n')
	if err != nil {
		return err
	}
	var spec BootSpec
	if err := json.Unmarshal(line, &spec); err != nil {
		return err
	}
	var reply BootReply
	if err := spec.mount(); err != nil {
		reply.Error = err.Error()
	}
	answer, err := json.Marshal(reply)
	if err != nil {
		return err
	}
	if _, err := out.Write(append(answer, '\n')); err != nil {
		return err
	}
	if reply.Error != "" {
		return errors.New(reply.Error)
	}
	if _, err := in.ReadBytes('\n'); err != nil {
		if errors.Is(err, io.EOF) {
			return errors.New("the launcher gave up")
		}
		return err
	}
	unix.CloseOnExec(bootSpecFD)
	unix.CloseOnExec(bootReplyFD)
	return syscall.Exec(Binary, []string{Binary, "init"}, []string{"PATH=" + Path, "LANG=C.UTF-8", "HOME=/root"})
}

// deviceNames are the host's devices that a VM has.
var deviceNames = []string{"null", "zero", "full", "random", "urandom", "tty", "fuse"}

// mount builds the VM's file systems and moves the process into them.
func (s BootSpec) mount() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Sethostname([]byte(s.Hostname)); err != nil {
		return fmt.Errorf("setting the hostname: %w", err)
	}
	unix.Umask(0o022)
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making the mounts private: %w", err)
	}
	for _, dir := range append([]string{s.Upper, s.Work}, s.Layers...) {
		if strings.ContainsAny(dir, `:,\`) {
			return fmt.Errorf("%q: an overlay cannot use a path with a colon, comma or backslash", dir)
		}
	}
	options := "lowerdir=" + strings.Join(s.Layers, ":") + ",upperdir=" + s.Upper + ",workdir=" + s.Work
	if err := unix.Mount("overlay", s.Mount, "overlay", 0, options); err != nil {
		return fmt.Errorf("mounting the root (%s): %w", options, err)
	}
	// Everything below happens inside the new root, where no symlink leads out.
	old := filepath.Join(s.Mount, ".outside")
	if err := os.Mkdir(old, 0o700); err != nil {
		return err
	}
	if err := os.Chdir(s.Mount); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", ".outside"); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	const noexec = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, m := range []struct {
		source, target, fstype string
		flags                  uintptr
		data                   string
	}{
		{"proc", "/proc", "proc", noexec, ""},
		{"sysfs", "/sys", "sysfs", noexec | unix.MS_RDONLY, ""},
		{"tmpfs", "/dev", "tmpfs", unix.MS_NOSUID, "mode=755,size=1m"},
		{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5"},
		{"tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
		{"tmpfs", "/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=755"},
		{"tmpfs", "/tmp", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
	} {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.source, m.target, m.fstype, m.flags, m.data); err != nil {
			return fmt.Errorf("mounting %s: %w", m.target, err)
		}
	}
	binds := []Bind{{Source: s.Binary, Target: Binary, ReadOnly: true}}
	for _, name := range deviceNames {
		binds = append(binds, Bind{Source: "/dev/" + name, Target: "/dev/" + name})
	}
	for _, b := range append(binds, s.Binds...) {
		if err := b.mount(); err != nil {
			return err
		}
	}
	if err := unix.Unmount("/.outside", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leaving the outside: %w", err)
	}
	if err := os.Remove("/.outside"); err != nil {
		return err
	}
	// As systemd has it, so that units with a mount table of their own see what is mounted later.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("sharing the mounts: %w", err)
	}
	if s.Kernel != "" {
		if err := os.WriteFile(KernelFile, []byte(s.Kernel+"\n"), 0o644); err != nil {
			return err
		}
	}
	for link, target := range map[string]string{
		"/dev/ptmx": "pts/ptmx", "/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1",
		"/dev/stderr": "/proc/self/fd/2", "/usr/bin/systemctl": Binary, "/usr/bin/journalctl": Binary, "/usr/sbin/mount.lustre": Binary,
		"/usr/bin/lfs": Binary, "/usr/sbin/lctl": Binary, "/usr/sbin/lnetctl": Binary,
	} {
		if err := os.Remove(link); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if err := os.Symlink(target, link); err != nil {
			return err
		}
	}
	for path, text := range map[string]string{"/etc/hostname": s.Hostname + "\n", "/etc/hosts": s.Hosts, "/etc/resolv.conf": s.Resolv} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// mount makes the bind while the outside is still at /.outside.
func (b Bind) mount() error {
	source := filepath.Join("/.outside", b.Source)
	info, err := os.Stat(source)
	if err != nil {
		return fmt.Errorf("bind %s: %w", b.Source, err)
	}
	if info.IsDir() {
		err = os.MkdirAll(b.Target, 0o755)
	} else {
		err = os.MkdirAll(filepath.Dir(b.Target), 0o755)
		if err == nil {
			var f *os.File
			if f, err = os.OpenFile(b.Target, os.O_CREATE|os.O_RDONLY, 0o644); err == nil {
				err = f.Close()
			}
		}
	}
	if err != nil {
		return fmt.Errorf("bind %s: %w", b.Target, err)
	}
	if err := unix.Mount(source, b.Target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind %s at %s: %w", b.Source, b.Target, err)
	}
	if b.ReadOnly {
		if err := unix.Mount("", b.Target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			return fmt.Errorf("bind %s read-only: %w", b.Target, err)
		}
	}
	return nil
}
