package sandbox

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// DownAfter ends the sandbox when the process owner ends, however it does. It
// returns when the sandbox is gone, whoever ended it.
func DownAfter(ctx context.Context, name string, owner int) error {
	status, err := GetStatus(ctx, name)
	if err != nil {
		return err
	}
	outer, err := unix.PidfdOpen(status.Pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("watch the sandbox's outer process: %w", err)
	}
	defer unix.Close(outer)
	fds := []unix.PollFd{{Fd: int32(outer), Events: unix.POLLIN}}
	switch fd, err := unix.PidfdOpen(owner, 0); {
	case err == nil:
		defer unix.Close(fd)
		fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
		for fds[1].Revents == 0 {
			_, err := unix.Poll(fds, 1000) // a pidfd is readable when its process has ended
			if err != nil && !errors.Is(err, unix.EINTR) {
				return fmt.Errorf("watch process %d: %w", owner, err)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if fds[0].Revents != 0 {
				return nil
			}
		}
	case !errors.Is(err, unix.ESRCH):
		return fmt.Errorf("watch process %d: %w", owner, err)
	}
	if err := Down(ctx, name); err != nil && !errors.Is(err, ErrNotRunning) {
		return err
	}
	return nil
}
