// Package lustrefs serves a directory over FUSE as a stand-in for a Lustre client's mount.
//
// One process serves one mount, and is told how the mount is to misbehave. The file system is coherent between mounts of
// the same directory: the kernel keeps no names and no attributes, and data is thrown away when the file has changed or,
// with FUSE passthrough, is that of the directory's own page cache. What a machine has not synced can be lost with it;
// only fsync(2), fdatasync(2) and O_SYNC sync, because FUSE is not told of sync(2) and syncfs(2).
package lustrefs

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
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
	// Passthrough lets the kernel read and write the files itself where it can: faster, but what is open then knows
	// nothing of a Behaviour, is not counted, and does not stop with this process.
	Passthrough bool
	// VM is the PID 1 of the machine that has the mount; with that the mount ends. 0: the mount's own end says so, and
	// nothing is ever lost.
	VM int
}

// MountData is what mount(2) gets as data for the open /dev/fuse fd, with the type fuse.lustre.
func MountData(fd uintptr) string {
	return fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,max_read=%d", fd, maxWrite)
}

// serve serves dir on an open /dev/fuse until it is unmounted, its machine or ctx ends; the mount may come
// within half a minute after the call. It takes over fd. It changes the umask, the groups and the limit of open files of
// its process, and after ctx has ended only the end of the process ends the mount. It must run as root: files get the
// caller's owner.
func (s *session) serve(ctx context.Context, fd *os.File) error {
	defer fd.Close()
	syscall.Umask(0) // the kernel has applied the caller's
	if err := syscall.Setgroups(nil); err != nil {
		return err
	}
	raiseOpenFiles()
	fsys, err := newFS(s.dir, s.options, s.control)
	if err != nil {
		return err
	}
	gone, err := machine(s.options.VM)
	if err != nil {
		return err
	}
	if err := waitMounted(ctx, int(fd.Fd())); err != nil {
		return err
	}
	// The server closes its descriptor, so that it gets one of its own.
	own, err := unix.FcntlInt(fd.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return err
	}
	var raw fuse.RawFileSystem = fsys
	if s.options.ReadOnly {
		raw = readOnly{fsys}
	}
	server, err := fuse.NewServer(gate{raw, s.control}, fmt.Sprintf("/dev/fd/%d", own), &fuse.MountOptions{
		MaxWrite:           maxWrite,
		MaxBackground:      64,
		EnableLocks:        true,
		DisableReadDirPlus: true, // names and attributes are not kept, so that plus would only cost
		Name:               "lustre",
	})
	if err != nil {
		return err
	}
	s.flush = fsys.ledger.flush
	s.say(Event{Ready: true})
	go s.obey()
	served := make(chan struct{})
	go func() { server.Serve(); close(served) }()
	tick := time.NewTicker(watchTick)
	defer tick.Stop()
	for counted := time.Now(); ; {
		select {
		case <-served:
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			if !gone() && !aborted(int(fd.Fd())) {
				if time.Since(counted) > time.Second {
					counted = time.Now()
					s.tellCounters()
				}
				continue
			}
		}
		// From here on, whatever waits ends: the end of this process aborts it.
		close(s.control.dead)
		if gone() {
			for _, loss := range fsys.ledger.crash(s.dir, s.control.now().Seed) {
				s.say(Event{Lost: &loss})
			}
		}
		fsys.ledger.flush()
		s.tellCounters()
		return nil
	}
}

// watchTick is how soon the end of a machine is seen.
const watchTick = 100 * time.Millisecond

// machine returns a function that says whether the machine with that PID 1 is gone: a process that ends gives up its
// namespaces before the kernel ends those that are in them, so before the mount of the machine's last process breaks.
func machine(pid int) (gone func() bool, err error) {
	if pid == 0 {
		return func() bool { return false }, nil
	}
	link := fmt.Sprintf("/proc/%d/ns/mnt", pid)
	namespace, err := os.Readlink(link)
	if err != nil {
		return nil, fmt.Errorf("the machine of PID 1 %d: %w", pid, err)
	}
	return func() bool {
		now, err := os.Readlink(link)
		return err != nil || now != namespace
	}, nil
}

// aborted says whether the connection of a /dev/fuse was cut: by the last unmount or by force.
func aborted(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd)}}
	n, err := unix.Poll(p, 0)
	return err == nil && n > 0 && p[0].Revents&unix.POLLERR != 0
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
	if o.Passthrough {
		args = append(args, "--passthrough")
	}
	if o.VM != 0 {
		args = append(args, "--vm", strconv.Itoa(o.VM))
	}
	return args
}

// session is one run of Main.
type session struct {
	dir     string
	options Options
	control *control
	in      io.Reader
	flush   func()
	last    Counters // that were told

	mu  sync.Mutex // guards what follows
	out io.Writer
}

// Main is the program around a mount: it reads Args and serves descriptor 3, takes an Order a line from in, and writes
// an Event a line to out. It is for a process of its own.
func Main(ctx context.Context, args []string, in io.Reader, out io.Writer) error {
	flags := flag.NewFlagSet("lustre-serve", flag.ContinueOnError)
	s := &session{control: newControl(), in: in, out: out}
	flags.StringVar(&s.dir, "dir", "", "directory to serve")
	flags.BoolVar(&s.options.ReadOnly, "read-only", false, "refuse changes")
	flags.BoolVar(&s.options.Passthrough, "passthrough", false, "let the kernel read and write files itself")
	flags.IntVar(&s.options.VM, "vm", 0, "PID 1 of the machine that has the mount")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if s.dir == "" || flags.NArg() != 0 {
		return errors.New("usage: lustre-serve --dir DIR [--read-only] [--passthrough] [--vm PID] 3<>/dev/fuse")
	}
	if err := s.serve(ctx, os.NewFile(3, "/dev/fuse")); err != nil {
		return fmt.Errorf("serve %s: %w", s.dir, err)
	}
	return nil
}

// say writes an event. Whoever does not read any more does not want it.
func (s *session) say(e Event) {
	line, err := json.Marshal(e)
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, _ = s.out.Write(append(line, '\n'))
}

// tellCounters writes the counters if they are others than the last time.
func (s *session) tellCounters() {
	if now := s.control.count(); now != s.last {
		s.last = now
		s.say(Event{Counters: &now})
	}
}

// obey takes orders until there are no more.
func (s *session) obey() {
	orders := json.NewDecoder(s.in)
	for {
		var o Order
		if err := orders.Decode(&o); err != nil {
			return
		}
		if b := o.Behave; b != nil {
			s.control.set(*b)
			if !b.LoseUnsynced {
				s.flush()
			}
			s.say(Event{Applied: b})
		}
		if o.Flush != 0 {
			// Not in turn: a mount that hangs must hear the order that makes it answer again.
			go func() {
				if s.control.pass().Ok() {
					s.flush()
					s.say(Event{Flushed: o.Flush})
				}
			}()
		}
	}
}
