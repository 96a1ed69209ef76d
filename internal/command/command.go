// Package command runs programs with deadlines. It is the one place of the
// product that starts a process and waits for it.
package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Spec is one program run. The program gets no standard input unless Stdin is
// set, only the environment in Env (nil: an empty one but for PATH), its own
// process group, and KILL for the group when ctx ends.
type Spec struct {
	Path  string // absolute, or looked up in the caller's PATH
	Args  []string
	Env   []string
	Dir   string
	Stdin io.Reader
	// Credential runs the program as another user, or nil.
	Credential *syscall.Credential
	// MaxOutput bounds each of the two outputs in bytes; 0 means 16 MiB.
	MaxOutput int
	// Stdout receives the program's standard output as it comes, without a
	// bound, instead of Run's result. Nothing is written to it after Run returned.
	Stdout io.Writer
}

// DefaultPath is the PATH of programs that Sluice starts.
const DefaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Error is a program that could not be run or did not exit with 0.
type Error struct {
	Program string
	Exit    int // exit code, or -1 when it was killed or never ran
	Stderr  string
	Err     error
}

func (e *Error) Error() string {
	msg := strings.TrimSpace(e.Stderr)
	if msg == "" {
		return fmt.Sprintf("run %s: %v", e.Program, e.Err)
	}
	return fmt.Sprintf("run %s: %v: %s", e.Program, e.Err, msg)
}

func (e *Error) Unwrap() error { return e.Err }

// killWait is how long Run waits for a program that it killed. One that is in
// uninterruptible sleep, on a file system that hangs, cannot be waited for: Run
// leaves it.
const killWait = 2 * time.Second

// Run returns the program's standard output. Failures are an *Error; a ctx
// that ended is wrapped in it. Run returns soon after ctx has ended, whatever
// the program does.
func Run(ctx context.Context, s Spec) ([]byte, error) {
	cmd := exec.CommandContext(ctx, s.Path, s.Args...)
	cmd.Env = s.Env
	if cmd.Env == nil {
		cmd.Env = []string{DefaultPath, "LC_ALL=C.UTF-8"}
	}
	cmd.Dir = s.Dir
	cmd.Stdin = s.Stdin
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: s.Credential}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	limit := s.MaxOutput
	if limit == 0 {
		limit = 16 << 20
	}
	stdout, stderr := &bounded{left: limit}, &bounded{left: limit}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	stream := &gate{w: s.Stdout}
	if s.Stdout != nil {
		cmd.Stdout = stream
		defer stream.close()
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Run() }()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		timer := time.NewTimer(killWait)
		defer timer.Stop()
		select {
		case err = <-done:
		case <-timer.C:
			return nil, &Error{Program: s.Path, Exit: -1, Err: fmt.Errorf("%w, and it could not be killed", ctx.Err())}
		}
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err == nil && stdout.over {
		err = fmt.Errorf("output is longer than %d bytes", limit)
	}
	if err == nil {
		return stdout.b.Bytes(), nil
	}
	exit := -1
	var xe *exec.ExitError
	if errors.As(err, &xe) {
		exit = xe.ExitCode()
	}
	return stdout.b.Bytes(), &Error{Program: s.Path, Exit: exit, Stderr: stderr.b.String(), Err: err}
}

// bounded keeps the first bytes and drops the rest, so that the program is
// never blocked by a full pipe. The buffer is not embedded: its ReadFrom would
// be used instead of Write.
type bounded struct {
	b    bytes.Buffer
	left int
	over bool
}

func (b *bounded) Write(p []byte) (int, error) {
	n := len(p)
	if n > b.left {
		b.over = true
		p = p[:b.left]
	}
	b.left -= len(p)
	b.b.Write(p)
	return n, nil
}

// gate passes writes on until it is closed.
type gate struct {
	mu     sync.Mutex // guards what follows
	w      io.Writer
	closed bool
}

func (g *gate) Write(p []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return 0, io.ErrClosedPipe
	}
	return g.w.Write(p)
}

func (g *gate) close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
}
