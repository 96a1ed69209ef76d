package controller_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/slurm/scontrol"
)

// Root of a compute VM that was taken over has its agent's certificate. By telling
// moments of a job that runs elsewhere it must not come to speak for the job's
// owner, nor end the job.
func TestAgentTellsOnlyOfJobsOnItsNode(t *testing.T) {
	w := newWorld(t)
	w.staged(7)
	w.must(slurmUID, api.OpPreRun, api.JobCall{JobID: 7, Nodes: []string{"n1"}})
	w.mu.Lock()
	w.jobs[7] = scontrol.Job{ID: 7, State: "RUNNING", Nodes: []string{"n1"}}
	w.mu.Unlock()
	tell := func(node, event string) error {
		_, err := w.agent(node, api.RoleCompute, api.OpAgentJob, api.JobEvent{JobID: 7, Node: node, Event: event, At: api.FormatTime(time.Now())})
		return err
	}
	for _, event := range []string{"prolog", "epilog"} {
		if err := tell("n2", event); api.CodeOf(err) != api.CodeNotFound {
			t.Errorf("%s of a job on another node: %v, want not found", event, err)
		}
	}
	show, _ := json.Marshal(api.JobID{JobID: 7})
	if _, err := w.agent("n2", api.RoleCompute, api.OpAgentUser, api.UserCall{UID: alice, Op: api.OpJobShow, Body: show}); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("n2 speaks for the owner of a job on n1: %v, want denied", err)
	}
	if j := w.must(0, api.OpJobShow, api.JobID{JobID: 7}).(api.Job); j.Phase != "staged" || len(j.Nodes) != 1 {
		t.Errorf("after n2's words: phase %s on %v, want staged on n1", j.Phase, j.Nodes)
	}
	if err := tell("n1", "prolog"); err != nil {
		t.Errorf("the job's own node: %v", err)
	}

	// Slurm before 23.02 tells the nodes only when it is asked.
	w.staged(8)
	w.mu.Lock()
	w.jobs[8] = scontrol.Job{ID: 8, State: "RUNNING", Nodes: []string{"n3"}}
	w.mu.Unlock()
	if _, err := w.agent("n3", api.RoleCompute, api.OpAgentJob, api.JobEvent{JobID: 8, Node: "n3", Event: "prolog", At: api.FormatTime(time.Now())}); err != nil {
		t.Errorf("a node that Slurm names: %v", err)
	}
}
