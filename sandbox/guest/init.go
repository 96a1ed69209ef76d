package guest

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// Init is PID 1: it starts argv with the first files descriptors (standard ones included) of its own,
// reaps every orphan, passes TERM, INT and HUP on to the child as TERM, and returns the child's exit code (128+N
// when signal N ended it). When PID 1 returns, the kernel ends everything else in the namespace.
func Init(argv []string, files int) (code int, err error) {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	attr := &os.ProcAttr{Env: os.Environ(), Sys: &syscall.SysProcAttr{Setsid: true}}
	for fd := 0; fd < files; fd++ {
		attr.Files = append(attr.Files, os.NewFile(uintptr(fd), fmt.Sprintf("fd%d", fd)))
	}
	child, err := os.StartProcess(argv[0], argv, attr)
	if err != nil {
		return 1, fmt.Errorf("starting %s: %w", argv[0], err)
	}
	for _, f := range attr.Files[min(3, files):] {
		f.Close()
	}
	go func() {
		for range signals {
			_ = syscall.Kill(child.Pid, syscall.SIGTERM) // it may be gone already
		}
	}()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return 1, fmt.Errorf("waiting for children: %w", err)
		case pid == child.Pid && status.Exited():
			return status.ExitStatus(), nil
		case pid == child.Pid && status.Signaled():
			return 128 + int(status.Signal()), nil
		}
	}
}
