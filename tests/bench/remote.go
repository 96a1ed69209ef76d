package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"
)

// ExecTimesCommand is the argument with which the driver is ExecTimes on a VM:
// a measurement on standard input, the times on standard output.
const ExecTimesCommand = "_exec-times"

// measurement is what ExecTimes is asked for.
type measurement struct {
	Runs     int       `json:"runs"`
	Programs []Program `json:"programs"`
}

// ServeExecTimes is ExecTimesCommand.
func ServeExecTimes(ctx context.Context, in io.Reader, out io.Writer) error {
	var m measurement
	if err := json.NewDecoder(in).Decode(&m); err != nil {
		return fmt.Errorf("read the measurement: %w", err)
	}
	times, err := ExecTimes(ctx, m.Runs, m.Programs...)
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(times)
}

// ExecTimesOn is ExecTimes on a VM, where driver is the path of the driver's program.
func (s *Sandbox) ExecTimesOn(ctx context.Context, vm, driver string, n int, programs ...Program) ([][]time.Duration, error) {
	in, err := json.Marshal(measurement{Runs: n, Programs: programs})
	if err != nil {
		return nil, err
	}
	out, err := s.As(ctx, vm, "root", bytes.NewReader(in), driver, ExecTimesCommand)
	if err != nil {
		return nil, err
	}
	var times [][]time.Duration
	if err := json.Unmarshal([]byte(out), &times); err != nil {
		return nil, fmt.Errorf("the times measured on %s: %w", vm, err)
	}
	if len(times) != len(programs) {
		return nil, fmt.Errorf("%s measured %d programs, %d were asked for", vm, len(times), len(programs))
	}
	return times, nil
}

// Milliseconds turns times into a case's values.
func Milliseconds(times []time.Duration) []float64 {
	values := make([]float64, len(times))
	for i, t := range times {
		values[i] = float64(t) / float64(time.Millisecond)
	}
	return values
}
