// Package start measures how long a new cluster and its VMs take to be of use, and what they weigh.
package start

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/internal/benchfile"
	"github.com/sluicehpc/sluice/tests/bench"
)

// Benchmark is make bench's "start".
var Benchmark = bench.Benchmark{Name: "start", About: "a cold cluster, the boot of a VM, and the memory of a cluster with two nodes", Run: run}

// runs of one that takes some five seconds.
const runs = 5

// nodes are the VMs that are booted in each run; the cluster then has these two.
var nodes = []string{"n1", "n2"}

const script = "#!/bin/bash\n#SLUICE stage_out from=result/ to=gs://research-bench/%j/\ntrue\n"

// Cases.
const (
	caseUp     = "sandbox up: from nothing to the controller and the login VM ready"
	caseCold   = "cold cluster: sandbox up to first job accepted"
	caseBoot   = "boot of a VM: insert to agent ready"
	caseMemory = "memory of the sandbox and a two-node cluster, PSS"
)

func run(ctx context.Context, e bench.Env) (bench.Outcome, error) {
	var m measured
	for i := range runs {
		e.Step("cold cluster %d of %d", i+1, runs)
		if err := m.once(ctx, e); err != nil {
			return bench.Outcome{}, err
		}
	}
	return bench.Outcome{
		Cases: []benchfile.Case{
			{Name: caseUp, Unit: "s", Sluice: m.up},
			{Name: caseCold, Unit: "s", Sluice: m.cold},
			{Name: caseBoot, Unit: "s", Sluice: m.boot},
			{Name: caseMemory, Unit: "MB", Sluice: m.memory},
		},
		Targets: []bench.Target{{Case: caseUp, Max: 10}, {Case: caseBoot, Max: 2}, {Case: caseMemory, Max: 600}},
	}, nil
}

// measured are seconds, and megabytes (10^6 bytes).
type measured struct{ up, cold, boot, memory []float64 }

func (m *measured) once(ctx context.Context, e bench.Env) (err error) {
	start := time.Now()
	s, err := bench.Up(ctx, e)
	if err != nil {
		return err
	}
	defer func() {
		if downErr := s.Down(ctx); err == nil {
			err = downErr
		}
	}()
	m.up = append(m.up, time.Since(start).Seconds())
	// Held: the job that is accepted must not start VMs.
	if _, err := s.As(ctx, "login", "alice", strings.NewReader(script), "sbatch", "--hold"); err != nil {
		return err
	}
	m.cold = append(m.cold, time.Since(start).Seconds())
	for _, node := range nodes {
		took, err := boot(ctx, s, node)
		if err != nil {
			return err
		}
		m.boot = append(m.boot, took.Seconds())
	}
	pid, err := s.PID(ctx)
	if err != nil {
		return err
	}
	pss, err := bench.TreePSS(pid)
	m.memory = append(m.memory, pss/1e6)
	return err
}

// boot powers a node up and returns the time from the request for its VM to its agent's readiness.
func boot(ctx context.Context, s *bench.Sandbox, node string) (took time.Duration, err error) {
	if _, err := s.On(ctx, "controller", "scontrol", "update", "NodeName="+node, "State=POWER_UP"); err != nil {
		return 0, err
	}
	err = bench.Wait(ctx, node+" is ready", time.Minute, func(ctx context.Context) (bool, error) {
		out, err := s.On(ctx, "controller", "sluice", "node", "list", "--json")
		if err != nil {
			return false, err
		}
		var list api.Nodes
		if err := json.Unmarshal([]byte(out), &list); err != nil {
			return false, fmt.Errorf("sluice node list: %w", err)
		}
		for _, n := range list.Nodes {
			if n.Name != node || n.State != "ready" {
				continue
			}
			requested, err1 := time.Parse(time.RFC3339Nano, n.RequestedAt)
			ready, err2 := time.Parse(time.RFC3339Nano, n.ReadyAt)
			took = ready.Sub(requested)
			return err1 == nil && err2 == nil && took > 0, nil
		}
		return false, nil
	})
	return took, err
}
