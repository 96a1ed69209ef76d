package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/controller/store"
	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/health"
	"github.com/sluicehpc/sluice/nodes"
	"github.com/sluicehpc/sluice/slurm/scontrol"
	"github.com/sluicehpc/sluice/staging/files"
)

// fleet is what the agents said last. It lives in memory: agents say it again.
type fleet struct {
	c *Controller

	mu        sync.Mutex // guards what follows
	reports   map[string]*report
	instances map[string]*lustre.Instance // by file system
	asked     map[string]time.Time        // when an instance was last read
}

type report struct {
	api.NodeReport
	role   api.Role
	seenAt time.Time
	since  map[string]time.Time // by file system: when its state began
}

func newFleet(c *Controller) *fleet {
	return &fleet{c: c, reports: map[string]*report{}, instances: map[string]*lustre.Instance{}, asked: map[string]time.Time{}}
}

// How soon agents report again, in seconds.
const (
	nextReady    = 10.0
	nextNotReady = 1.0
)

// instanceEvery is how often the instances' states are read.
const instanceEvery = 15 * time.Second

func (f *fleet) watchInstances(ctx context.Context) {
	for {
		wait := instanceEvery
		for _, fs := range f.c.Config.FileSystems {
			actx, cancel := context.WithTimeout(ctx, instanceEvery)
			in, err := f.c.Lustre.GetInstance(actx, fs.Instance)
			cancel()
			if err != nil && !gcp.IsNotFound(err) {
				if ctx.Err() == nil {
					f.c.Log.Warn("read a Lustre instance", "instance", fs.Instance, "err", err)
				}
				if _, denied := gcp.IsDenied(err); !denied {
					wait = time.Second
				}
				continue
			}
			if err != nil {
				in = &lustre.Instance{State: "NOT_FOUND"}
			}
			f.mu.Lock()
			if old := f.instances[fs.Name]; old != nil && old.UID != in.UID {
				f.c.Log.Warn("a Lustre instance was made anew: its datasets are gone", "instance", fs.Instance)
			}
			f.instances[fs.Name] = in
			f.mu.Unlock()
			if in.MountPoint == "" {
				wait = time.Second
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-f.c.Clock.After(wait):
		}
	}
}

// agentReport takes an agent's word and says what should be mounted there.
func (c *Controller) agentReport(ctx context.Context, w Caller, in api.NodeReport) (any, error) {
	f, now := c.fleet, c.Clock.Now()
	node, role := w.Agent.Node, w.Agent.Role
	if _, ok := c.nodes.Node(node); ok != (role == api.RoleCompute) {
		return nil, api.Errorf(api.CodeDenied, "sluice.yaml has changed: %s is no %s VM any more", node, role)
	}
	in = c.bounded(in)
	f.mu.Lock()
	r := &report{NodeReport: in, role: role, seenAt: now, since: map[string]time.Time{}}
	old := f.reports[node]
	for _, m := range in.Mounts {
		r.since[m.Name] = now
		if old == nil || old.BootID != in.BootID {
			continue
		}
		for _, o := range old.Mounts {
			if o.Name == m.Name && o.State == m.State {
				r.since[m.Name] = old.since[m.Name]
			}
		}
	}
	f.reports[node] = r
	answer := api.ReportAnswer{NextSeconds: nextReady, OpenMetadata: !*c.Config.GuardMetadata}
	for _, fs := range c.Config.FileSystems {
		a := api.FileSystem{Name: fs.Name, Dir: fs.Mount, Default: fs.Default, Types: fs.Types}
		if i := f.instances[fs.Name]; i != nil {
			a.Source = i.MountPoint
		}
		answer.FileSystems = append(answer.FileSystems, a)
		for _, m := range in.Mounts {
			if m.Name == fs.Name && m.State != "ok" {
				answer.Cause = worse(answer.Cause, f.judge(fs.Name, now).For(node))
			}
		}
	}
	f.mu.Unlock()
	if in.ReadyAt == "" {
		answer.NextSeconds = nextNotReady
		return answer, nil
	}
	if ready, err := time.Parse(api.TimeFormat, in.ReadyAt); err == nil && role == api.RoleCompute {
		news, err := c.nodes.Ready(ctx, node, ready)
		if err != nil {
			return nil, err
		}
		if news {
			c.Log.Info("node ready", "node", node)
			if err := c.nodeReady(ctx, node); err != nil {
				return nil, err
			}
		}
	}
	return answer, nil
}

// bounded is a report with what counts: of each file system of sluice.yaml one
// state, and texts of a line. Mounts that stand there a hundred times would
// outvote other nodes when it is judged whose fault trouble is.
func (c *Controller) bounded(in api.NodeReport) api.NodeReport {
	mounts := []api.MountState{}
	for _, fs := range c.Config.FileSystems {
		i := slices.IndexFunc(in.Mounts, func(m api.MountState) bool { return m.Name == fs.Name })
		if i < 0 {
			continue
		}
		m := in.Mounts[i]
		m.Source, m.Dir, m.State, m.Detail = files.Shorten(m.Source), files.Shorten(m.Dir), files.Shorten(m.State), files.Shorten(m.Detail)
		mounts = append(mounts, m)
	}
	in.Mounts, in.Trouble = mounts, files.Shorten(in.Trouble)
	in.BootID, in.Version = files.Shorten(in.BootID), files.Shorten(in.Version)
	in.StartedAt, in.ReadyAt = files.Shorten(in.StartedAt), files.Shorten(in.ReadyAt)
	return in
}

// worse picks what to say of two file systems: the node's own fault drains it,
// so it is said only when nothing speaks against it.
func worse(a string, b health.Cause) string {
	order := []string{"", string(health.Node), string(health.Unknown), string(health.FileSystem)}
	if slices.Index(order, string(b)) > slices.Index(order, a) {
		return string(b)
	}
	return a
}

// judge asks whose fault a file system's trouble is. f.mu is held.
func (f *fleet) judge(fs string, now time.Time) health.Verdict {
	var list []health.NodeTrouble
	for name, r := range f.reports {
		for _, m := range r.Mounts {
			if m.Name == fs {
				list = append(list, health.NodeTrouble{Node: name, State: m.State, Since: r.since[fs], SeenAt: r.seenAt})
			}
		}
	}
	state := ""
	if i := f.instances[fs]; i != nil {
		state = string(i.State)
	}
	return health.Judge(list, state, now)
}

// nodeReady notes, for the jobs that a node was started for, that the last of
// their nodes is ready.
func (c *Controller) nodeReady(ctx context.Context, name string) error {
	active, err := c.Store.ActiveJobs(ctx)
	if err != nil {
		return err
	}
	for _, j := range active {
		if !slices.Contains(j.Resumed, name) {
			continue
		}
		var last time.Time
		all := true
		for _, n := range j.Resumed {
			node, ok := c.nodes.Node(n)
			all = all && ok && !node.ReadyAt.IsZero()
			if node.ReadyAt.After(last) {
				last = node.ReadyAt
			}
		}
		if all {
			if err := c.Store.AddEvent(ctx, j.Key, api.EventNodesReady, last, false); err != nil {
				return err
			}
			c.changed.wake()
		}
	}
	return nil
}

// agentJob notes a moment of a job on a node.
func (c *Controller) agentJob(ctx context.Context, w Caller, in api.JobEvent) (any, error) {
	if in.Node != w.Agent.Node || w.Agent.Role != api.RoleCompute {
		return nil, api.Errorf(api.CodeDenied, "the agent of %s speaks for no job on node %.64q", w.Agent.Node, in.Node)
	}
	when, err := time.Parse(api.TimeFormat, in.At)
	if err != nil {
		return nil, api.Errorf(api.CodeBadRequest, "bad time %q", in.At)
	}
	if in.Event == "verdict" {
		return api.Ack{}, c.blame(ctx, in, when)
	}
	j, err := c.Store.Job(ctx, in.JobID)
	if err != nil || when.Before(j.CreatedAt) {
		return api.Ack{}, nil // a job without directives, or a word about an earlier run
	}
	if err := c.runsOn(ctx, j, in.Node); err != nil {
		return nil, err
	}
	switch in.Event {
	case "prolog":
		if err := c.Store.AddEvent(ctx, j.Key, api.EventJobStarted, when, true); err != nil {
			return nil, err
		}
		_, err = c.Store.UpdateJob(ctx, j.Key, func(j *store.Job) error {
			if !slices.Contains(j.Started, in.Node) {
				j.Started = append(j.Started, in.Node)
			}
			if !slices.Contains(j.Nodes, in.Node) {
				j.Nodes = append(j.Nodes, in.Node)
			}
			if j.Phase == store.PhaseStaged {
				j.Phase = store.PhaseRunning
			}
			return nil
		})
	case "epilog":
		err = c.jobEnded(ctx, j, when)
	default:
		return nil, api.Errorf(api.CodeBadRequest, "unknown event %q", in.Event)
	}
	c.changed.wake()
	return api.Ack{}, err
}

// runsOn makes sure that Slurm gave a job the node. An agent's word alone would let
// a VM that was taken over speak for the owner of any job, and end it. A refusal is
// CodeNotFound, with which an agent drops what it has to say.
func (c *Controller) runsOn(ctx context.Context, j store.Job, node string) error {
	if slices.Contains(j.Nodes, node) {
		return nil
	}
	// Slurm before 23.02 does not tell pre_run the nodes.
	sj, err := c.Slurm.Job(ctx, j.ID)
	if err != nil && !errors.Is(err, scontrol.ErrNotFound) {
		return api.Errorf(api.CodeUnavailable, "ask Slurm about job %d: %v", j.ID, err)
	}
	if err == nil && slices.Contains(sj.Nodes, node) {
		return nil
	}
	c.Log.Warn("an agent speaks of a job that is not on its node", "node", node, "job", j.ID)
	return api.Errorf(api.CodeNotFound, "job %d is not on node %s", j.ID, node)
}

// downEvery is how often Slurm is asked for nodes that did not come up.
const downEvery = 30 * time.Second

// watchDown gives Slurm back the nodes that it took out because no VM came up:
// that is the cloud's fault, which passes.
func (c *Controller) watchDown(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.Clock.After(downEvery):
		}
		if err := c.restoreDown(ctx); err != nil && ctx.Err() == nil {
			c.Log.Warn("look for nodes that did not come up", "err", err)
		}
	}
}

// notResumed begins Slurm's own reason for a node that did not come up in time.
const notResumed = "ResumeTimeout reached"

func (c *Controller) restoreDown(ctx context.Context) error {
	list, err := c.Slurm.Nodes(ctx, nil)
	if err != nil {
		return err
	}
	var names []string
	for _, n := range list {
		mine, ok := c.nodes.Node(n.Name)
		if ok && mine.State == nodes.Absent && n.State == "DOWN" && n.Has("POWERED_DOWN") && strings.HasPrefix(n.Reason, notResumed) {
			names = append(names, n.Name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	c.Log.Info("nodes are given back to Slurm", "nodes", strings.Join(names, ","))
	return c.Slurm.SetNodes(ctx, names, "RESUME", "")
}

// Slurm's own reason for a node whose Prolog failed, and for how long it may take
// to set it.
const (
	prologFailed = "Prolog error"
	drainWithin  = 2 * time.Minute
)

// blame tells Slurm the real reason for which a Prolog failed. Another reason
// is an admin's, and stays; none means that Slurm drains the node just now, or
// that an admin has given it back meanwhile.
func (c *Controller) blame(ctx context.Context, in api.JobEvent, when time.Time) error {
	list, err := c.Slurm.Nodes(ctx, []string{in.Node})
	if err != nil {
		return api.Errorf(api.CodeUnavailable, "%v", err)
	}
	for _, n := range list {
		switch {
		case n.Name != in.Node:
		case strings.HasPrefix(n.Reason, prologFailed):
			reason := "sluice: " + files.Shorten(in.Reason)
			c.Log.Warn("a node failed a Prolog", "node", in.Node, "job", in.JobID, "reason", reason)
			if err := c.Slurm.SetNodes(ctx, []string{in.Node}, "DRAIN", reason); err != nil {
				return api.Errorf(api.CodeUnavailable, "%v", err)
			}
		case n.Reason == "" && c.Clock.Now().Sub(when) < drainWithin:
			return api.Errorf(api.CodeUnavailable, "Slurm has not drained node %s yet", in.Node)
		}
	}
	return nil
}

// silent is after how long without a report a node counts as not ready.
const silent = time.Minute

// nodeList joins what Slurm wants, what the cloud has and what the agents say.
func (c *Controller) nodeList(context.Context, Caller) (any, error) {
	f, now := c.fleet, c.Clock.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	enrolled, refused := c.enrolled.nodes()
	out := api.Nodes{Nodes: []api.Node{}}
	add := func(v api.Node, r *report) {
		v.Enrolment, v.Refusal = enrolled[v.Name], refused[v.Name]
		switch {
		case v.Reason != "":
		case v.Refusal != nil:
			v.Reason = "enrolment refused: " + v.Refusal.Why
		case r != nil && v.State != "absent":
			v.Reason = r.Trouble
		}
		if v.Reason == "" && v.State == "not_ready" {
			v.Reason = unready(r, now)
		}
		out.Nodes = append(out.Nodes, v)
	}
	names := map[string]bool{}
	for _, n := range c.nodes.List() {
		names[n.Name] = true
		v := api.Node{Name: n.Name, Role: api.RoleCompute, Reason: n.Reason,
			RequestedAt: api.FormatTime(n.RequestedAt), ReadyAt: api.FormatTime(n.ReadyAt)}
		r := f.reports[n.Name]
		switch n.State {
		case nodes.Absent:
			v.State = "absent"
		case nodes.Requested:
			v.State = "requested"
		case nodes.Deleting:
			v.State = "deleting"
		default:
			v.State = "booting"
			if r != nil && !n.ReadyAt.IsZero() {
				v.State = state(r, now)
			}
		}
		if r != nil && n.State != nodes.Absent {
			v.SeenAt, v.Mounts = api.FormatTime(r.seenAt), r.Mounts
		}
		add(v, r)
	}
	// Reports for the others; VMs that were refused have sent none.
	others := map[string]bool{}
	for name := range f.reports {
		others[name] = true
	}
	for name := range refused {
		others[name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(others)) {
		if names[name] {
			continue
		}
		v, r := api.Node{Name: name, State: "not_ready"}, f.reports[name]
		if r != nil {
			v.Role, v.State, v.ReadyAt, v.SeenAt, v.Mounts = r.role, state(r, now), r.ReadyAt, api.FormatTime(r.seenAt), r.Mounts
		}
		add(v, r)
	}
	return out, nil
}

func (c *Controller) nodeShow(ctx context.Context, in api.NodeName) (any, error) {
	list, err := c.nodeList(ctx, Caller{})
	if err != nil {
		return nil, err
	}
	for _, n := range list.(api.Nodes).Nodes {
		if n.Name == in.Node {
			return n, nil
		}
	}
	return nil, &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("node %.64q is not known", in.Node), Hint: "see sluice node list"}
}

// unready says in words why state is not_ready where no trouble was reported.
func unready(r *report, now time.Time) string {
	switch {
	case r == nil:
		return "its agent has not reported"
	case now.Sub(r.seenAt) > silent:
		return "its agent has been silent since " + api.FormatTime(r.seenAt)
	}
	for _, m := range r.Mounts {
		if m.State != "ok" {
			return fmt.Sprintf("file system %s: %s", m.Name, cmp.Or(m.Detail, m.State))
		}
	}
	return "its agent is not ready"
}

func state(r *report, now time.Time) string {
	if r.ReadyAt == "" || r.Trouble != "" || now.Sub(r.seenAt) > silent {
		return "not_ready"
	}
	for _, m := range r.Mounts {
		if m.State != "ok" {
			return "not_ready"
		}
	}
	return "ready"
}
