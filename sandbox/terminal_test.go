package sandbox

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// terminal is a program on a pseudo-terminal.
type terminal struct {
	t      *testing.T
	master *os.File
	cmd    *exec.Cmd
	seen   string // what it printed since the last expect
}

func openTerminal(t *testing.T, args ...string) *terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	x := &terminal{t: t, master: master}
	var n int
	x.control(func(fd int) error { return unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0) })
	x.control(func(fd int) (err error) {
		n, err = unix.IoctlGetInt(fd, unix.TIOCGPTN)
		return err
	})
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer slave.Close()
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		master.Close()
		_ = cmd.Process.Kill() // it has ended unless the test failed
	})
	x.cmd = cmd
	return x
}

// control calls f with the descriptor, which Fd would make blocking: reads need deadlines.
func (x *terminal) control(f func(fd int) error) {
	x.t.Helper()
	raw, err := x.master.SyscallConn()
	if err != nil {
		x.t.Fatal(err)
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = f(int(fd)) }); err != nil || failed != nil {
		x.t.Fatal(err, failed)
	}
}

func (x *terminal) send(text string) {
	x.t.Helper()
	if _, err := x.master.WriteString(text); err != nil {
		x.t.Fatal(err)
	}
}

// expect waits until the program has printed text.
func (x *terminal) expect(text string) {
	x.t.Helper()
	if err := x.master.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		x.t.Fatal(err)
	}
	buffer := make([]byte, 4096)
	for {
		if i := strings.Index(x.seen, text); i >= 0 {
			x.seen = x.seen[i+len(text):]
			return
		}
		n, err := x.master.Read(buffer)
		x.seen += string(buffer[:n])
		if err != nil {
			x.t.Fatalf("waiting for %q: %v; printed so far: %q", text, err, x.seen)
		}
	}
}

func TestTerminal(t *testing.T) {
	const name = "test-terminal"
	insert(t, cloud(t, testUp(t, name)), "a", "")
	for _, tc := range []struct{ name, vm string }{{"on a VM", "a"}, {"on the workstation", ""}} {
		t.Run(tc.name, func(t *testing.T) {
			x := openTerminal(t, "_exec", name, tc.vm, "", "bash", "--norc", "-i")
			// The echoed command line must not look like its output, hence the quotes.
			x.send("echo re''ady\n")
			x.expect("ready")
			x.send("sleep 1000\n")
			waitForeground(t, x)
			x.send("\x03")
			x.send("echo inter''rupted\n")
			x.expect("interrupted")
			x.send("sleep 1001\n")
			waitForeground(t, x)
			x.send("\x1a")
			x.expect("Stopped")
			x.send("kill %1; wait; exit 4\n")
			x.send("exit 4\n") // bash warns once of a stopped job
			_ = x.cmd.Wait()
			if got := x.cmd.ProcessState.ExitCode(); got != 4 {
				t.Errorf("exit code %d, want 4", got)
			}
		})
	}
}

// waitForeground waits until a job of the shell, not the shell, has the terminal.
func waitForeground(t *testing.T, x *terminal) {
	t.Helper()
	become(t, "a job has the terminal", true, func() any {
		var group int
		x.control(func(fd int) (err error) {
			group, err = unix.IoctlGetInt(fd, unix.TIOCGPGRP)
			return err
		})
		cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", group))
		return err == nil && strings.HasPrefix(string(cmdline), "sleep\x00")
	})
}
