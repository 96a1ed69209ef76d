// Package bench has what the benchmarks of make bench share.
package bench

import (
	"context"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"
)

// Program is one to be measured. Its outputs go to /dev/null.
type Program struct {
	Path string   `json:"path"` // absolute
	Args []string `json:"args"` // without the program's name
	Env  []string `json:"env"`  // all of its environment
}

// ExecMedians is the median of each program's ExecTimes.
func ExecMedians(ctx context.Context, n int, programs ...Program) ([]time.Duration, error) {
	times, err := ExecTimes(ctx, n, programs...)
	if err != nil {
		return nil, err
	}
	medians := make([]time.Duration, len(programs))
	for i, t := range times {
		medians[i] = median(t)
	}
	return medians, nil
}

// ExecTimes runs the programs n times each, in turns, so that what else the
// machine does strikes all alike; it returns the times from the start of the
// process to its end, in the order of the programs. A program that does not
// exit with 0 is an error.
func ExecTimes(ctx context.Context, n int, programs ...Program) ([][]time.Duration, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	times := make([][]time.Duration, len(programs))
	for range n {
		for i, p := range programs {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			took, err := execOnce(p, null)
			if err != nil {
				return nil, fmt.Errorf("run %s: %w", p.Path, err)
			}
			times[i] = append(times[i], took)
		}
	}
	return times, nil
}

// execOnce uses neither pipes nor goroutines, which would be measured too.
func execOnce(p Program, null *os.File) (time.Duration, error) {
	fd := null.Fd()
	start := time.Now()
	pid, err := syscall.ForkExec(p.Path, append([]string{p.Path}, p.Args...), &syscall.ProcAttr{Env: p.Env, Files: []uintptr{fd, fd, fd}})
	if err != nil {
		return 0, err
	}
	var status syscall.WaitStatus
	for {
		if _, err = syscall.Wait4(pid, &status, 0, nil); err != syscall.EINTR {
			break
		}
	}
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	if !status.Exited() || status.ExitStatus() != 0 {
		return 0, fmt.Errorf("wait status %#x", uint32(status))
	}
	return took, nil
}

// median sorts t; of an even number it is the mean of the two in the middle.
func median(t []time.Duration) time.Duration {
	if len(t) == 0 {
		return 0
	}
	slices.Sort(t)
	return (t[(len(t)-1)/2] + t[len(t)/2]) / 2
}
