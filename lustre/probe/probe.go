// Package probe tells whether a Lustre mount is there and answers, without ever hanging on it.
package probe

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// State is what a probe found.
type State string

// The states of a mount.
const (
	OK          State = "ok"
	NotMounted  State = "not_mounted"  // nothing is mounted at the directory
	WrongSource State = "wrong_source" // something else is
	WrongType   State = "wrong_type"   // the source is right, the file system type is not
	Hung        State = "hung"         // it did not answer within the time
	Failed      State = "error"        // it answered with an error, or could not be asked
)

// DefaultTimeout is how long a probe waits for the file system.
const DefaultTimeout = 2 * time.Second

// Check says what is to be probed.
type Check struct {
	Dir     string        // mount point: absolute, without symbolic links
	Source  string        // the expected source, "IP@tcp:/FS"; empty: any
	Types   []string      // accepted file system types; empty: lustre
	Timeout time.Duration // 0: DefaultTimeout
}

// Result is what was found and how long it took.
type Result struct {
	State  State
	Detail string // for people; empty when OK
	Took   time.Duration
}

// child is a running process that touches a mount.
type child struct {
	process *os.Process
	started time.Time
	ended   chan struct{} // closed after code is set
	code    int           // exit code, -1 when it was killed
}

// A Prober probes mounts. It remembers a child process that hangs, and starts no other on the same
// directory while that one lives. The zero value is ready; all methods may be called at the same time.
type Prober struct {
	mu   sync.Mutex
	hung map[string]*child // mu guards it
}

// Probe does one check with a Prober of its own, for programs that end after it.
func Probe(c Check) Result { return new(Prober).Probe(c) }

// Probe answers within the check's timeout and a few milliseconds, whatever the mount does. It
// reads the mount table first; only when type and source are right, a child process (this program,
// see Main) touches the mount. A child that does not answer is killed and left: a process in
// uninterruptible sleep cannot be waited for.
func (p *Prober) Probe(c Check) Result {
	start := time.Now()
	state, detail := p.probe(c)
	return Result{state, detail, time.Since(start)}
}

func (p *Prober) probe(c Check) (State, string) {
	mounts, err := Mounts()
	if err != nil {
		return Failed, err.Error()
	}
	if state, detail := Judge(mounts, c); state != OK {
		return state, detail
	}
	timeout := c.Timeout
	if timeout == 0 {
		timeout = DefaultTimeout
	}
	dir := filepath.Clean(c.Dir)

	p.mu.Lock()
	earlier := p.hung[dir]
	if earlier != nil {
		select {
		case <-earlier.ended:
			delete(p.hung, dir)
			earlier = nil
		default:
		}
	}
	p.mu.Unlock()
	if earlier != nil {
		return Hung, fmt.Sprintf("a check that began %s ago still hangs on %s", time.Since(earlier.started).Round(time.Second), dir)
	}

	ch, err := start(dir)
	if err != nil {
		return Failed, fmt.Sprintf("start the check: %v", err)
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-ch.ended:
	case <-timer.C:
		p.mu.Lock()
		if p.hung == nil {
			p.hung = map[string]*child{}
		}
		p.hung[dir] = ch
		p.mu.Unlock()
		ch.process.Kill()
		return Hung, fmt.Sprintf("%s did not answer within %s", dir, timeout)
	}
	switch {
	case ch.code == 0:
		return OK, ""
	case ch.code > 0:
		return Failed, fmt.Sprintf("%s: %v", dir, syscall.Errno(ch.code))
	default:
		return Failed, fmt.Sprintf("the check of %s was killed", dir)
	}
}

// Judge compares a mount table with what is expected, touching nothing. OK means that the mount is
// listed, not that it answers.
func Judge(mounts []Mount, c Check) (State, string) {
	types := c.Types
	if len(types) == 0 {
		types = []string{"lustre"}
	}
	dir := filepath.Clean(c.Dir)
	m := At(mounts, dir)
	switch {
	case m == nil:
		return NotMounted, fmt.Sprintf("nothing is mounted at %s", dir)
	case c.Source != "" && m.Source != c.Source:
		return WrongSource, fmt.Sprintf("%s at %s, want %s", m.Source, dir, c.Source)
	case !slices.Contains(types, m.Type):
		return WrongType, fmt.Sprintf("file system type %s at %s, want %s", m.Type, dir, types[0])
	}
	return OK, ""
}

// childName is the argv[0] by which Main knows that it is the child.
const childName = "sluice-probe-child"

// hooked is set by Main. Without the hook, a child would run the program itself again.
var hooked atomic.Bool

// start runs the child. It gets no descriptor but /dev/null, so that nobody who waits for the end
// of a pipe waits for it, and a session of its own.
func start(dir string) (*child, error) {
	if !hooked.Load() {
		return nil, errors.New("this program does not call probe.Main")
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	process, err := os.StartProcess("/proc/self/exe", []string{childName, dir}, &os.ProcAttr{
		Dir:   "/",
		Env:   []string{"GOMAXPROCS=1"},
		Files: []*os.File{null, null, null},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return nil, err
	}
	c := &child{process: process, started: time.Now(), ended: make(chan struct{}), code: -1}
	go func() {
		if state, err := process.Wait(); err == nil {
			c.code = state.ExitCode()
		}
		close(c.ended)
	}()
	return c, nil
}

// Main is to be called first in main of every program that probes. It does nothing but in the
// child process that Probe starts; there it touches the mount and returns the exit code to end with:
//
//	if code, isChild := probe.Main(); isChild {
//		os.Exit(code)
//	}
func Main() (code int, isChild bool) {
	hooked.Store(true)
	if len(os.Args) != 2 || os.Args[0] != childName {
		return 0, false
	}
	return touch(os.Args[1]), true
}

// touch asks the file system for its size and for the entries of its root; it returns an errno.
func touch(dir string) int {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return number(err)
	}
	fd, err := syscall.Open(dir, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return number(err)
	}
	if _, err := syscall.ReadDirent(fd, make([]byte, 4096)); err != nil {
		return number(err)
	}
	return 0
}

// number maps an error to an exit code: errno values end at 133 on Linux, so that they fit.
func number(err error) int {
	if e, ok := err.(syscall.Errno); ok && e > 0 && e < 256 {
		return int(e)
	}
	return int(syscall.EIO)
}
