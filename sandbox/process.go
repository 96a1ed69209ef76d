package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/internal/atomicfile"
)

// record is state.json: which process the outer one is. A pid alone could be another process's by now.
type record struct {
	Pid       int    `json:"pid"`
	StartTime uint64 `json:"start_time"` // in clock ticks after boot
	BootID    string `json:"boot_id"`
}

// recordOf describes a process that runs now.
func recordOf(pid int) (record, error) {
	start, err := startTime(pid)
	if err != nil {
		return record{}, err
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return record{}, err
	}
	return record{Pid: pid, StartTime: start, BootID: strings.TrimSpace(string(boot))}, nil
}

// startTime is field 22 of /proc/PID/stat (proc(5)). A zombie has none: it has ended.
func startTime(pid int) (uint64, error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	text := string(stat)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:]) // the name may hold anything
	if len(fields) < 20 || fields[0] == "Z" {
		return 0, os.ErrNotExist
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

func (r record) write(path string) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return atomicfile.Write(path, append(text, '\n'), 0o600)
}

// readRecord returns the recorded process if it still runs, and ErrNotRunning otherwise.
func readRecord(path string) (record, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return record{}, ErrNotRunning
		}
		return record{}, err
	}
	var r record
	if err := json.Unmarshal(text, &r); err != nil || r.Pid <= 1 {
		return record{}, ErrNotRunning // cut short, or not ours
	}
	now, err := recordOf(r.Pid)
	if err != nil || now != r {
		return record{}, ErrNotRunning
	}
	return r, nil
}

// end asks the process to end, by force after grace, and waits until it is gone.
func (r record) end(ctx context.Context, grace time.Duration) error {
	fd, err := unix.PidfdOpen(r.Pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("process %d: %w", r.Pid, err)
	}
	defer unix.Close(fd)
	if now, err := recordOf(r.Pid); err != nil || now != r { // the pid was reused before the open
		return nil
	}
	for _, step := range []struct {
		signal syscall.Signal
		wait   time.Duration
	}{{unix.SIGTERM, grace}, {unix.SIGKILL, 30 * time.Second}} {
		if err := unix.PidfdSendSignal(fd, step.signal, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("process %d: %w", r.Pid, err)
		}
		gone, err := waitFD(ctx, fd, step.wait)
		if gone || err != nil {
			return err
		}
	}
	return fmt.Errorf("process %d survives SIGKILL: something in it waits for a device", r.Pid)
}

// waitFD waits until the process of a pidfd has ended.
func waitFD(ctx context.Context, fd int, limit time.Duration) (gone bool, err error) {
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); {
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return false, err
		}
		if n > 0 {
			return true, nil
		}
	}
	return false, nil
}

// lockFile takes an exclusive lock on the file, which it makes with its directory, waiting for another holder until ctx
// ends. The holder may remove the file.
func lockFile(ctx context.Context, path string) (unlock func(), err error) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		f, err := tryLock(path)
		if err != nil {
			return nil, fmt.Errorf("locking %s: %w", path, err)
		}
		if f != nil {
			return func() { f.Close() }, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for another command that starts or ends this sandbox: %w", ctx.Err())
		case <-tick.C:
		}
	}
}

// tryLock returns the locked file, or nil when another one holds it or removed it meanwhile.
func tryLock(path string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if errors.Is(err, os.ErrNotExist) { // the directory was removed again
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		mine, statErr := f.Stat()
		now, nowErr := os.Stat(path)
		if statErr == nil && nowErr == nil && os.SameFile(mine, now) {
			return f, nil
		}
		f.Close()
		return nil, statErr
	}
	f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, nil
	}
	return nil, err
}
