package controller_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/health"
	"github.com/sluicehpc/sluice/policy"
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

// One agent says of one file system a hundred times that it is fine. Trouble of
// the others is the file system's all the same, and none of them is to be drained.
func TestOneAgentIsOneVoice(t *testing.T) {
	w := newWorld(t)
	report := func(node string, role api.Role, mounts ...api.MountState) api.ReportAnswer {
		t.Helper()
		out, err := w.agent(node, role, api.OpAgentReport, api.NodeReport{BootID: "b", Mounts: mounts})
		if err != nil {
			t.Fatal(err)
		}
		return out.(api.ReportAnswer)
	}
	hung := api.MountState{Name: "fast", State: "hung"}
	var fine []api.MountState
	for range 100 {
		fine = append(fine, api.MountState{Name: "fast", State: "ok"})
	}
	var cause string
	for range 3 { // trouble settles
		report("n1", api.RoleCompute, fine...)
		report("login", api.RoleLogin, hung)
		cause = report("n2", api.RoleCompute, hung).Cause
		w.mu.Lock()
		w.shift += health.Settle - time.Second
		w.mu.Unlock()
	}
	if cause != string(health.FileSystem) {
		t.Errorf("two of three VMs have trouble: cause %q, want %q", cause, health.FileSystem)
	}
}

// What an agent says goes to people's terminals and stays in memory.
func TestReportsAreBounded(t *testing.T) {
	w := newWorld(t)
	long := strings.Repeat("x", 1<<20)
	_, err := w.agent("login", api.RoleLogin, api.OpAgentReport, api.NodeReport{BootID: long, Version: long, Trouble: long + "\nmore",
		Mounts: []api.MountState{{Name: "fast", State: long, Detail: long, Dir: long, Source: long}, {Name: long, State: "hung"}}})
	if err != nil {
		t.Fatal(err)
	}
	out, err := json.Marshal(w.show("login"))
	if err != nil || len(out) > 4<<10 {
		t.Errorf("the node's view has %d bytes, %v", len(out), err)
	}
	if got := len(w.show("login").Mounts); got != 1 {
		t.Errorf("%d mounts, want that of sluice.yaml's file system alone", got)
	}
}

// Users cannot fill the disk that the audit log is on: then nothing would be
// granted to anybody.
func TestFloodsStaySmallInTheAuditLog(t *testing.T) {
	w := newWorld(t)
	var script strings.Builder
	script.WriteString("#!/bin/sh\n")
	for i := range 900 {
		fmt.Fprintf(&script, "#SLUICE stage_in source=gs://vault/%d/ name=n%d\n", i, i)
	}
	v := w.must(slurmUID, api.OpJobProcess, api.JobProcess{Script: script.String(), HasUID: true, UID: alice, Account: "research"}).(api.Verdict)
	if len(v.Errors) != 900 {
		t.Errorf("%d refusals, want 900", len(v.Errors))
	}
	const most = 21
	w.waitAudit(most)
	if _, err := w.as(slurmUID, api.OpSetup, jobCall(7, script.String())); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("setup: %v, want denied", err)
	}
	log := w.waitAudit(2 * most)
	if len(log) != 2*most {
		t.Errorf("%d lines, want %d", len(log), 2*most)
	}
	for i, e := range log {
		if e.Decision != policy.Denied || i%most == most-1 && e.What != "880 more places of the same script" {
			t.Errorf("line %d: %+v", i, e)
		}
	}
	before := len(log)
	n := w.boot("n1", api.RoleCompute, 4711)
	for i := range 200 {
		if err := n.enrolWith(fmt.Sprintf("nonsense%d.e30.e30", i)); api.CodeOf(err) != api.CodeDenied {
			t.Fatalf("a forged token: %v", err)
		}
	}
	if got := len(w.waitAudit(0)) - before; got < 1 || got > most {
		t.Errorf("200 forged tokens are %d lines, want between 1 and %d", got, most)
	}
}
