// Package start measures how long a new cluster takes to be of use.
package start

import (
	"context"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/internal/benchfile"
	"github.com/sluicehpc/sluice/tests/bench"
)

// Benchmark is make bench's "start".
var Benchmark = bench.Benchmark{Name: "start", About: "from nothing to a cluster that accepts a job", Run: run}

// runs of one that takes some five seconds.
const runs = 5

const script = "#!/bin/bash\n#SLUICE stage_out from=result/ to=gs://bench-data/%j/\ntrue\n"

func run(ctx context.Context, e bench.Env) (bench.Outcome, error) {
	var took []float64
	for i := range runs {
		e.Step("cold cluster %d of %d", i+1, runs)
		t, err := once(ctx, e)
		if err != nil {
			return bench.Outcome{}, err
		}
		took = append(took, t.Seconds())
	}
	return bench.Outcome{Cases: []benchfile.Case{{Name: "cold cluster: sandbox up to first job accepted", Unit: "s", Sluice: took}}}, nil
}

func once(ctx context.Context, e bench.Env) (took time.Duration, err error) {
	start := time.Now()
	s, err := bench.Up(ctx, e)
	if err != nil {
		return 0, err
	}
	defer func() {
		if downErr := s.Down(ctx); err == nil {
			err = downErr
		}
	}()
	// Held: the job that is accepted must not start VMs while the next cluster is measured.
	if _, err := s.As(ctx, "login", "alice", strings.NewReader(script), "sbatch", "--hold"); err != nil {
		return 0, err
	}
	return time.Since(start), nil
}
