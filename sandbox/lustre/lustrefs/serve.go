// Package lustrefs serves a directory over FUSE as a stand-in for a Lustre client's mount.
//
// One process serves one mount, so that stopping the process is a mount that hangs. The file
// system is coherent between mounts of the same directory: the kernel keeps no names and no
// attributes, and data goes through the page cache of the directory itself (FUSE passthrough) or
// is thrown away when the file has changed.
package lustrefs

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// maxWrite is the largest read or write, the kernel's limit.
const maxWrite = 1 << 20

// mountWait is how long Serve waits for the mount that fd belongs to.
const mountWait = 30 * time.Second

// Options of a mount.
type Options struct {
	ReadOnly bool
	// NoPassthrough sends every read and write through this process, so that a stopped process
	// also stops the files that are open.
	NoPassthrough bool
	// Capacity, when not nil, returns how many bytes the directory may hold now; 0 is no limit.
	Capacity func() int64
	// Ready, when not nil, is called once requests are about to be answered.
	Ready func()
}

// MountData is what mount(2) gets as data for the open /dev/fuse fd, with the type fuse.lustre.
func MountData(fd uintptr) string {
	return fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,max_read=%d", fd, maxWrite)
}

// Serve serves dir on an open /dev/fuse until it is unmounted or ctx ends; the mount may come
// within half a minute after the call. It takes over fd. It is for a process of its own: it changes
// the umask and the limit of open files, and after ctx has ended only the end of the process ends
// the mount. It must run as root: files get the caller's owner.
func Serve(ctx context.Context, dir string, fd *os.File, o Options) error {
	defer fd.Close()
	syscall.Umask(0) // the kernel has applied the caller's
	raiseOpenFiles()
	fsys, err := newFS(dir, o)
	if err != nil {
		return fmt.Errorf("serve %s: %w", dir, err)
	}
	if err := waitMounted(ctx, int(fd.Fd())); err != nil {
		return fmt.Errorf("serve %s: %w", dir, err)
	}
	// The server closes its descriptor, so that it gets one of its own.
	own, err := unix.FcntlInt(fd.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return fmt.Errorf("serve %s: %w", dir, err)
	}
	var raw fuse.RawFileSystem = fsys
	if o.ReadOnly {
		raw = readOnly{fsys}
	}
	server, err := fuse.NewServer(raw, fmt.Sprintf("/dev/fd/%d", own), &fuse.MountOptions{
		MaxWrite:           maxWrite,
		MaxBackground:      64,
		EnableLocks:        true,
		DisableReadDirPlus: true, // names and attributes are not kept, so that plus would only cost
		Name:               "lustre",
	})
	if err != nil {
		return fmt.Errorf("serve %s: %w", dir, err)
	}
	fd.Close()
	if o.Ready != nil {
		o.Ready()
	}
	done := make(chan struct{})
	go func() { server.Serve(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// waitMounted waits until the kernel has queued its first request. Before the mount, a read fails.
func waitMounted(ctx context.Context, fd int) error {
	deadline := time.NewTimer(mountWait)
	defer deadline.Stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if n > 0 && p[0].Revents&unix.POLLIN != 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-deadline.C:
			return fmt.Errorf("no mount within %s", mountWait)
		case <-tick.C:
		}
	}
}

// raiseOpenFiles makes room for one descriptor for each file that the kernel remembers.
func raiseOpenFiles() {
	limit := uint64(1 << 20)
	if b, err := os.ReadFile("/proc/sys/fs/nr_open"); err == nil {
		if n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err == nil {
			limit = n
		}
	}
	// A process without the right keeps what it has.
	_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: limit, Max: limit})
}

// Args are the arguments with which a program that calls Main serves dir; the /dev/fuse
// descriptor must be number 3 there.
func Args(dir string, o Options) []string {
	args := []string{"--dir", dir}
	if o.ReadOnly {
		args = append(args, "--read-only")
	}
	if o.NoPassthrough {
		args = append(args, "--no-passthrough")
	}
	return args
}

// ReadyLine is what Main prints when it is about to answer requests.
const ReadyLine = "ready\n"

// Main is the program around Serve: it reads Args, serves descriptor 3, prints ReadyLine, and takes
// CapacityLine from stdin.
func Main(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("lustre-serve", flag.ContinueOnError)
	dir := flags.String("dir", "", "directory to serve")
	var o Options
	flags.BoolVar(&o.ReadOnly, "read-only", false, "refuse changes")
	flags.BoolVar(&o.NoPassthrough, "no-passthrough", false, "let all reads and writes pass through this process")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *dir == "" || flags.NArg() != 0 {
		return errors.New("usage: lustre-serve --dir DIR [--read-only] [--no-passthrough] 3<>/dev/fuse")
	}
	var capacity atomic.Int64
	o.Capacity = capacity.Load
	o.Ready = func() { fmt.Print(ReadyLine) }
	go readCapacity(os.Stdin, &capacity)
	return Serve(ctx, *dir, os.NewFile(3, "/dev/fuse"), o)
}

// CapacityLine is the line that tells a running Main how many bytes the directory may hold (0: no limit).
func CapacityLine(bytes int64) string { return fmt.Sprintf("capacity %d\n", bytes) }

func readCapacity(r io.Reader, capacity *atomic.Int64) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		n, err := strconv.ParseInt(strings.TrimPrefix(lines.Text(), "capacity "), 10, 64)
		if err == nil && n >= 0 {
			capacity.Store(n)
		}
	}
}
