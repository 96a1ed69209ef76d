package bench

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// PSS reads the Pss line of /proc/PID/smaps_rollup, in bytes; ok is false for other lines.
func PSS(line string) (bytes float64, ok bool, err error) {
	f := strings.Fields(line)
	if len(f) != 3 || f[0] != "Pss:" || f[2] != "kB" {
		return 0, false, nil
	}
	kib, err := strconv.ParseUint(f[1], 10, 64)
	if err != nil {
		return 0, false, fmt.Errorf("memory: %w", err)
	}
	return float64(kib) * 1024, true, nil
}

// TreePSS is the memory of a process and of all processes below it, in bytes:
// the sum of their PSS. Processes that end meanwhile count nothing.
func TreePSS(root int) (float64, error) {
	children, err := childrenOfAll()
	if err != nil {
		return 0, err
	}
	if _, ok := children[root]; !ok {
		return 0, fmt.Errorf("memory: process %d has no children", root)
	}
	sum := 0.0
	for todo := []int{root}; len(todo) > 0; {
		pid := todo[0]
		todo = append(todo[1:], children[pid]...)
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if gone(err) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("memory: %w", err)
		}
		for line := range strings.Lines(string(text)) {
			bytes, _, err := PSS(line)
			if err != nil {
				return 0, err
			}
			sum += bytes
		}
	}
	return sum, nil
}

// gone reports that a process ended between two looks at it; ESRCH is how its memory says so.
func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) }

// childrenOfAll maps every process to its children.
func childrenOfAll() (map[int][]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	children := map[int][]int{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if gone(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		// The name in parentheses may hold anything; the state and the parent follow it.
		f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if len(f) < 2 {
			return nil, fmt.Errorf("/proc/%d/stat: %q", pid, stat)
		}
		parent, err := strconv.Atoi(f[1])
		if err != nil {
			return nil, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
		children[parent] = append(children[parent], pid)
	}
	for _, c := range children {
		slices.Sort(c)
	}
	return children, nil
}
