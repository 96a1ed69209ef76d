package hook

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/sluicehpc/sluice/slurm/hostlist"
	"github.com/sluicehpc/sluice/slurm/scontrol"
)

// booting are the flags of a node that cannot run a job yet (# ~ * of sinfo).
var booting = []string{"POWERED_DOWN", "POWERING_UP", "NOT_RESPONDING"}

// eager is how long Slurm is asked at the shortest pause; later the pause grows,
// since a boot takes minutes on some machines and slurmctld answers other people too.
const eager = 20 * time.Second

// longestPause between two questions. A start that waits for it has waited for
// minutes.
const longestPause = 5 * time.Second

// waitForNodes is PrologSlurmctld: it returns when every node of the job has
// booted. Slurm itself would look every 30 s (a batch job's start waits for
// job_time_limit), and starts a job at once when its PrologSlurmctld returns
// with the nodes ready. Any trouble lets the job go on: it would start then
// without us too. It may be run again after slurmctld restarts.
func (h *Hook) waitForNodes(ctx context.Context) {
	list := h.Getenv("SLURM_JOB_NODELIST")
	if list == "" {
		list = h.Getenv("SLURM_NODELIST")
	}
	names, err := hostlist.Expand(list)
	if err != nil || len(names) == 0 {
		h.logf("prolog-slurmctld: no node list: %q, %v", list, err)
		return
	}
	ctx, cancel := context.WithTimeout(ctx, h.Limits.Nodes)
	defer cancel()
	start := h.Clock.Now()
	pause := h.Limits.Ask
	failures := 0
	for {
		nodes, err := h.Slurm.Nodes(ctx, names)
		switch {
		case ctx.Err() != nil:
			h.logf("prolog-slurmctld: the nodes of job %s have not booted within %v", h.Getenv("SLURM_JOB_ID"), h.Limits.Nodes)
			return
		case err != nil:
			if failures++; failures >= 10 {
				h.logf("prolog-slurmctld: %v", err)
				return
			}
		case ready(nodes):
			return
		default:
			failures = 0
		}
		if h.Clock.Now().Sub(start) > eager || failures > 0 {
			pause = min(pause*5/4, longestPause)
		}
		// Jobs that start together ask apart.
		wait := pause + time.Duration(rand.Int64N(int64(pause)/4+1))
		select {
		case <-ctx.Done():
		case <-h.Clock.After(wait):
		}
	}
}

// ready reports whether no node is still on its way. One that is down never
// comes, and Slurm ends the job by itself.
func ready(nodes []scontrol.Node) bool {
	for _, n := range nodes {
		if n.State == "DOWN" {
			continue
		}
		for _, flag := range booting {
			if n.Has(flag) {
				return false
			}
		}
	}
	return len(nodes) > 0
}
