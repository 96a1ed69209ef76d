// Package fusetest mounts the Lustre stand-in for tests, in a mount namespace that ends with them.
package fusetest

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
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
// again as the file system's server. Without root it runs the tests where it is; Mount skips then.
func Main(m *testing.M) (code int) {
	if os.Getenv(serveEnv) != "" {
		if err := lustrefs.Main(context.Background(), os.Args[1:]); err != nil {
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
// test's end. It skips the test where it cannot mount.
func Open(t testing.TB, dir, source string) *os.File {
	t.Helper()
	if os.Getenv(namespaceEnv) == "" {
		t.Skip("needs root, for a mount namespace")
	}
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("needs FUSE: %v", err)
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
	Stdin  *os.File // takes lustrefs.CapacityLine
	Exited <-chan struct{}
}

// New mounts data at dir and takes it away at the test's end. It skips the test where it cannot mount.
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
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != lustrefs.ReadyLine {
		t.Fatalf("the server says %q, %v", line, err)
	}
	exited := make(chan struct{})
	go func() { cmd.Wait(); close(exited) }()
	m := &Mount{Dir: dir, Server: cmd.Process, Stdin: w, Exited: exited}
	t.Cleanup(func() {
		m.Server.Signal(syscall.SIGCONT)
		syscall.Unmount(dir, syscall.MNT_DETACH)
		w.Close()
		select {
		case <-exited:
		case <-time.After(10 * time.Second): // something still has a file open
			m.Server.Kill()
			<-exited
		}
	})
	return m
}

// Signal sends the server a signal: SIGSTOP makes the mount hang, SIGCONT heals it.
func (m *Mount) Signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	if err := m.Server.Signal(sig); err != nil {
		t.Fatal(err)
	}
}
