// Package fusetest mounts the Lustre stand-in for tests, in a mount namespace that ends with them.
package fusetest

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

const (
	serveEnv     = "SLUICE_TEST_LUSTRE_SERVE"
	namespaceEnv = "SLUICE_TEST_IN_NAMESPACE"
)

// Main is the body of a TestMain: it runs the tests in a private mount namespace, and this program
// again as the file system's server. Without root it runs the tests where it is; Open fails then.
func Main(m *testing.M) (code int) {
	if os.Getenv(serveEnv) != "" {
		if err := lustrefs.Main(context.Background(), os.Args[1:], os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}
	if os.Geteuid() != 0 || os.Getenv(namespaceEnv) != "" {
		return m.Run()
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), namespaceEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		if cmd.ProcessState == nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return max(1, cmd.ProcessState.ExitCode())
	}
	return 0
}

// ServeCommand starts this program as the file system's server; lustrefs.Args are to be added.
func ServeCommand(t testing.TB) []string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return []string{"/usr/bin/env", serveEnv + "=1", self}
}

// Open makes a mount at dir whose requests come to the returned file, and takes it away at the
// test's end.
func Open(t testing.TB, dir, source string) *os.File {
	t.Helper()
	if os.Getenv(namespaceEnv) == "" {
		t.Fatal("needs root, for a mount namespace")
	}
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Fatalf("needs FUSE: %v", err)
	}
	if err := syscall.Mount(source, dir, "fuse.lustre", syscall.MS_NOSUID|syscall.MS_NODEV, lustrefs.MountData(fuse.Fd())); err != nil {
		t.Fatalf("mount: %v", err)
	}
	t.Cleanup(func() { syscall.Unmount(dir, syscall.MNT_DETACH) })
	return fuse
}

// Mount is a mounted stand-in.
type Mount struct {
	Dir    string
	Server *os.Process
	Exited <-chan struct{} // closed after the last event

	orders *os.File
	mu     sync.Mutex // guards what follows
	events []lustrefs.Event
	more   chan struct{} // closed at the next event
}

// New mounts data at dir and takes it away at the test's end.
func New(t testing.TB, data, dir, source string, o lustrefs.Options) *Mount {
	t.Helper()
	fuse := Open(t, dir, source)
	defer fuse.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd := exec.Command("/proc/self/exe", lustrefs.Args(data, o)...)
	cmd.Env = append(os.Environ(), serveEnv+"=1")
	cmd.Stdin, cmd.Stderr = r, os.Stderr
	cmd.ExtraFiles = []*os.File{fuse}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	m := &Mount{Dir: dir, Server: cmd.Process, Exited: exited, orders: w, more: make(chan struct{})}
	go func() {
		events := json.NewDecoder(stdout)
		for {
			var e lustrefs.Event
			if events.Decode(&e) != nil {
				break
			}
			m.mu.Lock()
			m.events = append(m.events, e)
			close(m.more)
			m.more = make(chan struct{})
			m.mu.Unlock()
		}
		cmd.Wait()
		close(exited)
	}()
	t.Cleanup(func() {
		m.Server.Signal(syscall.SIGCONT)
		m.order(t, lustrefs.Order{Behave: &lustrefs.Behaviour{}})
		syscall.Unmount(dir, syscall.MNT_DETACH)
		select {
		case <-exited:
		case <-time.After(10 * time.Second): // something still has a file open
			m.Server.Kill()
			<-exited
		}
		w.Close()
	})
	m.Wait(t, "its beginning", func(e lustrefs.Event) bool { return e.Ready })
	return m
}

func (m *Mount) order(t testing.TB, o lustrefs.Order) {
	t.Helper()
	line, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	m.orders.Write(append(line, '\n')) // a server that has ended obeys nothing
}

// Behave tells the server how to behave and returns when it does.
func (m *Mount) Behave(t testing.TB, b lustrefs.Behaviour) {
	t.Helper()
	already := m.Events()
	m.order(t, lustrefs.Order{Behave: &b})
	m.wait(t, "the behaviour", len(already), func(e lustrefs.Event) bool { return e.Applied != nil && *e.Applied == b })
}

// Flush orders one, and returns when it was done.
func (m *Mount) Flush(t testing.TB) {
	t.Helper()
	already := m.Events()
	m.order(t, lustrefs.Order{Flush: 1})
	m.wait(t, "the flush", len(already), func(e lustrefs.Event) bool { return e.Flushed == 1 })
}

// Events returns what the server has told so far.
func (m *Mount) Events() []lustrefs.Event {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.events)
}

// Wait waits for an event.
func (m *Mount) Wait(t testing.TB, what string, is func(lustrefs.Event) bool) {
	t.Helper()
	m.wait(t, what, 0, is)
}

func (m *Mount) wait(t testing.TB, what string, from int, is func(lustrefs.Event) bool) {
	t.Helper()
	deadline := time.NewTimer(30 * time.Second)
	defer deadline.Stop()
	for ended := false; ; {
		m.mu.Lock()
		events, more := m.events, m.more
		m.mu.Unlock()
		if slices.ContainsFunc(events[from:], is) {
			return
		}
		if ended {
			t.Fatalf("waited in vain for %s: the server has ended", what)
		}
		select {
		case <-more:
		case <-m.Exited:
			ended = true
		case <-deadline.C:
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// Signal sends the server a signal: SIGSTOP makes the mount hang, SIGCONT heals it.
func (m *Mount) Signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	if err := m.Server.Signal(sig); err != nil {
		t.Fatal(err)
	}
}
