package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
)

// IdleShare is how much of the machine's processor time others may use for a
// measurement to count as one on an idle machine.
const IdleShare = 0.1

// look is how long the machine's load is looked at; shorter ones are noise, as
// the kernel counts in ticks of 10 ms.
const look = 2 * time.Second

// WaitIdle waits at most for limit until the machine is idle, and returns the
// share of its processor time that was last seen in use, 0 to 1.
func WaitIdle(ctx context.Context, log io.Writer, limit time.Duration) (float64, error) {
	deadline := time.Now().Add(limit)
	said := false
	for {
		share, err := Busy(ctx, look)
		if err != nil || share <= IdleShare || time.Now().After(deadline) {
			return share, err
		}
		if !said {
			said = true
			fmt.Fprintf(log, "  the machine is busy (%.0f %%); waiting up to %v for an idle one\n", 100*share, limit)
		}
	}
}

// Busy is the share of the machine's processor time that is in use during the
// time d, 0 to 1.
func Busy(ctx context.Context, d time.Duration) (float64, error) {
	before, err := readStat()
	if err != nil {
		return 0, err
	}
	select {
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-time.After(d):
	}
	after, err := readStat()
	if err != nil {
		return 0, err
	}
	total := after.busy + after.idle - before.busy - before.idle
	if total <= 0 {
		return 0, nil
	}
	return max(0, (after.busy-before.busy)/total), nil
}

// ticks are the processors' times since boot.
type ticks struct{ busy, idle float64 }

func readStat() (ticks, error) {
	data, err := os.ReadFile("/proc/stat")
	if err != nil {
		return ticks{}, err
	}
	return parseStat(string(data))
}

// parseStat reads the first line of /proc/stat: user nice system idle iowait irq
// softirq steal, then guest times that user and nice contain (proc_stat(5)).
// What the host steals from a virtual machine counts as busy.
func parseStat(text string) (ticks, error) {
	line, _, _ := strings.Cut(text, "\n")
	f := strings.Fields(line)
	if len(f) < 6 || f[0] != "cpu" {
		return ticks{}, errors.New("/proc/stat does not begin with the processors' times")
	}
	var t ticks
	for i, word := range f[1:min(len(f), 9)] {
		v, err := strconv.ParseUint(word, 10, 64)
		if err != nil {
			return ticks{}, fmt.Errorf("/proc/stat: %w", err)
		}
		if i == 3 || i == 4 {
			t.idle += float64(v)
		} else {
			t.busy += float64(v)
		}
	}
	return t, nil
}
