// Package nodes makes and deletes the VMs of Slurm's CLOUD nodes.
package nodes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/compute"
	"github.com/sluicehpc/sluice/internal/clock"
)

// Compute is what this package needs of Compute Engine; *compute.Client is it.
type Compute interface {
	BulkInsert(ctx context.Context, r compute.BulkInsertRequest) (operation string, err error)
	Delete(ctx context.Context, requestID, name string) (operation string, err error)
	WaitOperation(ctx context.Context, name string) error
	List(ctx context.Context, filter string) ([]compute.Instance, error)
}

// Store keeps nodes and batches. What a method stored survives a crash.
type Store interface {
	Nodes(ctx context.Context) ([]Node, error)
	PutNodes(ctx context.Context, nodes ...Node) error
	Batches(ctx context.Context) ([]Batch, error)
	// PutBatch stores an intent, and the nodes that it is about.
	PutBatch(ctx context.Context, b Batch) error
	DropBatch(ctx context.Context, requestID string, nodes ...Node) error
}

// State is what a node's VM is.
type State string

// The states of a VM.
const (
	Absent    State = "absent"
	Requested State = "requested" // Slurm wants it; it is being made
	Present   State = "present"   // it is made; whether it is ready, its agent tells
	Deleting  State = "deleting"
)

// moves are the legal ones; staying is always legal.
var moves = map[State][]State{
	Absent:    {Requested, Present}, // Present: found at the start
	Requested: {Present, Deleting, Absent},
	Present:   {Deleting, Requested, Absent}, // Requested: it is gone without our doing
	Deleting:  {Absent, Requested},
}

// Node is a CLOUD node of Slurm.
type Node struct {
	Name        string    `json:"name"`
	NodeSet     string    `json:"nodeset"`
	State       State     `json:"state"`
	Want        bool      `json:"want"`             // Slurm wants it up
	Reason      string    `json:"reason,omitempty"` // of the last failure
	RequestedAt time.Time `json:"requested_at,omitzero"`
	Deadline    time.Time `json:"deadline,omitzero"` // Slurm gives up then
	ReadyAt     time.Time `json:"ready_at,omitzero"` // after RequestedAt; zero: not yet
	NotBefore   time.Time `json:"not_before,omitzero"`
	Failures    int       `json:"failures,omitempty"`
}

// Enter changes the state, or says that the move is illegal.
func (n *Node) Enter(to State) error {
	if n.State != to && !slices.Contains(moves[n.State], to) {
		return fmt.Errorf("node %s: illegal move from %s to %s", n.Name, n.State, to)
	}
	n.State = to
	return nil
}

// Batch is one bulkInsert at work.
type Batch struct {
	RequestID string    `json:"request_id"`
	NodeSet   string    `json:"nodeset"`
	Names     []string  `json:"names"`
	Operation string    `json:"operation,omitempty"`
	At        time.Time `json:"at"`
}

// NodeSet is a group of nodes made of one Spec.
type NodeSet struct {
	Name  string
	Nodes []string
	Spec  compute.Spec
}

// ClusterLabel marks a VM as a cluster's.
const ClusterLabel = "sluice-cluster"

// maxBatch is how many VMs one bulkInsert may ask for (Compute Engine's limit).
const maxBatch = 1000

// Manager makes Slurm's wishes true. Fill it, then Start.
type Manager struct {
	Cluster       string
	NodeSets      []NodeSet
	ResumeTimeout time.Duration
	Compute       Compute
	Store         Store
	Clock         clock.Clock
	Log           *slog.Logger

	wg   sync.WaitGroup
	kick chan struct{}

	mu      sync.Mutex // guards what follows
	nodes   map[string]*Node
	working map[string]bool // in a batch or a deletion
	sets    map[string]*NodeSet
}

// Start loads the store, takes up what an earlier process left and reconciles
// until ctx ends; Wait waits for that.
func (m *Manager) Start(ctx context.Context) error {
	m.kick = make(chan struct{}, 1)
	m.nodes, m.working, m.sets = map[string]*Node{}, map[string]bool{}, map[string]*NodeSet{}
	for i, ns := range m.NodeSets {
		for _, name := range ns.Nodes {
			m.nodes[name] = &Node{Name: name, NodeSet: ns.Name, State: Absent}
			m.sets[name] = &m.NodeSets[i]
		}
	}
	known, err := m.Store.Nodes(ctx)
	if err != nil {
		return err
	}
	for _, n := range known {
		if old := m.nodes[n.Name]; old != nil {
			n.NodeSet = old.NodeSet
			m.nodes[n.Name] = &n
		}
	}
	batches, err := m.Store.Batches(ctx)
	if err != nil {
		return err
	}
	for _, b := range batches {
		for _, name := range b.Names {
			m.working[name] = true
		}
	}
	for _, b := range batches {
		m.wg.Go(func() { m.insert(ctx, b) })
	}
	m.wg.Go(func() { m.adopt(ctx) })
	m.wg.Go(func() { m.loop(ctx) })
	return nil
}

// Wait returns when all work has ended.
func (m *Manager) Wait() { m.wg.Wait() }

// Resume asks for nodes; Slurm did so at, or at a moment that is not known. It
// may be repeated. A VM that was ready before is made anew: then slurmctld
// believes that it is off, as after a crash, or it is gone behind our back.
func (m *Manager) Resume(ctx context.Context, names []string, at time.Time) error {
	return m.change(ctx, names, func(n *Node) error {
		now := m.Clock.Now()
		stale := n.State == Present && !n.ReadyAt.IsZero() && at.After(n.ReadyAt)
		if n.Want && (n.State == Requested || n.State == Present) && !stale {
			return nil
		}
		n.Want, n.RequestedAt, n.Deadline = true, now, now.Add(m.ResumeTimeout)
		n.ReadyAt, n.Reason, n.NotBefore, n.Failures = time.Time{}, "", time.Time{}, 0
		switch n.State {
		case Absent:
			return n.Enter(Requested)
		case Present:
			// Stale, or one that nobody asked for: slurmctld takes no node that booted before its resume.
			return n.Enter(Deleting)
		}
		return nil // it goes first, then it comes again
	})
}

// Suspend asks for the end of nodes. It may be repeated.
func (m *Manager) Suspend(ctx context.Context, names []string, reason string) error {
	return m.change(ctx, names, func(n *Node) error {
		n.Want, n.ReadyAt = false, time.Time{}
		if reason != "" {
			n.Reason = reason
		}
		if n.State == Absent {
			// Also what the store does not know is deleted: Slurm says that it must not be.
			n.State = Present
		}
		return n.Enter(Deleting)
	})
}

// Ready notes that a node's agent is ready since at. It reports whether that is
// news.
func (m *Manager) Ready(ctx context.Context, name string, at time.Time) (news bool, err error) {
	err = m.change(ctx, []string{name}, func(n *Node) error {
		if at.Before(n.RequestedAt) || at.Equal(n.ReadyAt) || n.State == Absent || n.State == Deleting {
			return errUnchanged
		}
		news = true
		n.ReadyAt = at
		if n.State == Requested { // the agent was faster than the operation
			return n.Enter(Present)
		}
		return nil
	})
	if errors.Is(err, errUnchanged) {
		err = nil
	}
	return news, err
}

var errUnchanged = errors.New("unchanged")

// Node returns a node of the configuration.
func (m *Manager) Node(name string) (Node, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.nodes[name]
	if n == nil {
		return Node{}, false
	}
	return *n, true
}

// List returns all nodes of the configuration, by name.
func (m *Manager) List() []Node {
	m.mu.Lock()
	defer m.mu.Unlock()
	var list []Node
	for _, name := range slices.Sorted(maps.Keys(m.nodes)) {
		list = append(list, *m.nodes[name])
	}
	return list
}

// change edits nodes, stores them and wakes the loop. Unknown names are an error
// after the known ones are done.
func (m *Manager) change(ctx context.Context, names []string, edit func(*Node) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var changed []Node
	var errs []error
	for _, name := range names {
		n := m.nodes[name]
		if n == nil {
			errs = append(errs, fmt.Errorf("node %q is not in sluice.yaml", name))
			continue
		}
		next := *n
		if err := edit(&next); err != nil {
			errs = append(errs, err)
			continue
		}
		changed = append(changed, next)
	}
	if len(changed) > 0 {
		if err := m.Store.PutNodes(ctx, changed...); err != nil {
			return err
		}
		for _, n := range changed {
			*m.nodes[n.Name] = n
		}
		m.wake()
	}
	return errors.Join(errs...)
}

func (m *Manager) wake() {
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

// loop starts work for every node that is not as Slurm wants it.
func (m *Manager) loop(ctx context.Context) {
	for ctx.Err() == nil {
		next := m.reconcile(ctx)
		select {
		case <-ctx.Done():
		case <-m.kick:
		case <-m.Clock.After(next):
		}
	}
}

// reconcile starts what is due and returns when something else may be.
func (m *Manager) reconcile(ctx context.Context) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.Clock.Now()
	wait := time.Minute
	due := map[string][]string{}
	for _, name := range slices.Sorted(maps.Keys(m.nodes)) {
		n := m.nodes[name]
		if m.working[name] {
			continue
		}
		switch n.State {
		case Deleting:
			m.working[name] = true
			m.wg.Go(func() { m.remove(ctx, name) })
		case Requested:
			switch {
			case !n.Deadline.IsZero() && now.After(n.Deadline):
				n.State, n.Want = Absent, false
				if n.Reason == "" {
					n.Reason = "no VM came up within Slurm's ResumeTimeout"
				}
				if err := m.Store.PutNodes(ctx, *n); err != nil {
					m.Log.Error("store a node", "node", name, "err", err)
				}
				m.Log.Warn("gave up on a node", "node", name, "reason", n.Reason)
			case now.Before(n.NotBefore):
				wait = min(wait, n.NotBefore.Sub(now))
			default:
				due[n.NodeSet] = append(due[n.NodeSet], name)
			}
		}
	}
	for set, names := range due {
		for batch := range slices.Chunk(names, maxBatch) {
			b := Batch{RequestID: uuid.NewString(), NodeSet: set, Names: batch, At: now}
			for _, name := range batch {
				m.working[name] = true
			}
			m.wg.Go(func() { m.begin(ctx, b) })
		}
	}
	return wait
}

// begin looks what of a batch exists, stores the intent for the rest and does it.
func (m *Manager) begin(ctx context.Context, b Batch) {
	existing, err := m.Compute.List(ctx, m.filter())
	if err != nil {
		m.settle(ctx, "", b.Names, err)
		return
	}
	status := map[string]string{}
	for _, in := range existing {
		status[in.Name] = in.Status
	}
	var missing, present, dead []string
	for _, name := range b.Names {
		switch status[name] {
		case "":
			missing = append(missing, name)
		case "PROVISIONING", "STAGING", "RUNNING":
			present = append(present, name)
		default: // STOPPING, TERMINATED …: preempted, or stopped by somebody
			dead = append(dead, name)
		}
	}
	m.finish(ctx, "", present, func(n *Node) { n.State = Present })
	m.finish(ctx, "", dead, func(n *Node) { n.State = Deleting })
	if len(missing) == 0 {
		return
	}
	b.Names = missing
	if err := m.Store.PutBatch(ctx, b); err != nil {
		m.settle(ctx, "", b.Names, err)
		return
	}
	m.insert(ctx, b)
}

// insert calls bulkInsert once for the intent, also after a crash, and waits.
func (m *Manager) insert(ctx context.Context, b Batch) {
	var set *NodeSet
	for i := range m.NodeSets {
		if m.NodeSets[i].Name == b.NodeSet {
			set = &m.NodeSets[i]
		}
	}
	if set == nil {
		m.settle(ctx, b.RequestID, b.Names, fmt.Errorf("nodeset %s is not in sluice.yaml any more", b.NodeSet))
		return
	}
	if b.Operation == "" {
		op, err := m.Compute.BulkInsert(ctx, compute.BulkInsertRequest{RequestID: b.RequestID, Names: b.Names, Spec: set.Spec})
		if err != nil {
			m.settle(ctx, b.RequestID, b.Names, err)
			return
		}
		b.Operation = op
		if err := m.Store.PutBatch(ctx, b); err != nil {
			m.Log.Error("store a batch", "err", err) // the request id finds the operation again
		}
		m.Log.Info("VMs asked for", "nodes", strings.Join(b.Names, ","), "operation", op)
	}
	if err := m.Compute.WaitOperation(ctx, b.Operation); err != nil {
		m.settle(ctx, b.RequestID, b.Names, err)
		return
	}
	// A success may lack names: those that existed when it began and are gone now.
	list, err := m.Compute.List(ctx, m.filter())
	if err != nil {
		m.settle(ctx, b.RequestID, b.Names, err)
		return
	}
	made := map[string]bool{}
	for _, in := range list {
		made[in.Name] = true
	}
	m.finish(ctx, b.RequestID, b.Names, func(n *Node) {
		if n.State == Requested && made[n.Name] {
			n.State, n.Failures, n.Reason = Present, 0, ""
		}
	})
}

// settle notes a failed batch: its nodes are tried again until Slurm gives up.
func (m *Manager) settle(ctx context.Context, requestID string, names []string, err error) {
	if ctx.Err() != nil {
		return // the next process takes it up
	}
	reason := Reason(err)
	m.Log.Warn("VMs were not made", "nodes", strings.Join(names, ","), "reason", reason, "err", err)
	m.finish(ctx, requestID, names, func(n *Node) {
		if n.State != Requested {
			return
		}
		pause := min(5*time.Second<<min(n.Failures, 5), time.Minute)
		n.Failures++
		n.Reason, n.NotBefore = reason, m.Clock.Now().Add(pause)
	})
}

// Reason says in a few words why VMs were not made.
func Reason(err error) string {
	var op *compute.OperationError
	if errors.As(err, &op) {
		for _, c := range []struct{ code, words string }{
			{"ZONE_RESOURCE_POOL_EXHAUSTED", "the zone has no capacity now"},
			{"ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "the zone has no capacity now"},
			{"QUOTA_EXCEEDED", "the project's quota is used up"},
		} {
			if op.Has(c.code) {
				return c.words + ": " + op.Error()
			}
		}
	}
	if gcp.Code(err) == 429 {
		return "the project asks too often: " + err.Error()
	}
	return err.Error()
}

// finish edits nodes whose work has ended and drops the batch, in one step.
func (m *Manager) finish(ctx context.Context, requestID string, names []string, edit func(*Node)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var changed []Node
	for _, name := range names {
		delete(m.working, name)
		if n := m.nodes[name]; n != nil {
			edit(n)
			changed = append(changed, *n)
		}
	}
	ctx = context.WithoutCancel(ctx)
	var err error
	if requestID != "" {
		err = m.Store.DropBatch(ctx, requestID, changed...)
	} else if len(changed) > 0 {
		err = m.Store.PutNodes(ctx, changed...)
	}
	if err != nil {
		m.Log.Error("store nodes", "err", err)
	}
	m.wake()
}

// remove deletes a VM and waits. A repeated deletion is the same one, so the
// request id need not be stored.
func (m *Manager) remove(ctx context.Context, name string) {
	op, err := m.Compute.Delete(ctx, uuid.NewString(), name)
	if err == nil {
		err = m.Compute.WaitOperation(ctx, op)
	}
	if ctx.Err() != nil {
		return
	}
	if err != nil && !gcp.IsNotFound(err) {
		m.Log.Warn("VM was not deleted; trying again", "node", name, "err", err)
		select {
		case <-ctx.Done():
			return
		case <-m.Clock.After(5 * time.Second):
		}
		m.finish(ctx, "", []string{name}, func(n *Node) { n.Reason = err.Error() })
		return
	}
	m.Log.Info("VM deleted", "node", name)
	m.finish(ctx, "", []string{name}, func(n *Node) {
		if n.State != Deleting {
			return
		}
		n.State = Absent
		if n.Want {
			n.State = Requested
		}
	})
}

func (m *Manager) filter() string { return "labels." + ClusterLabel + "=" + m.Cluster }

// adopt compares the project with the store at the start: VMs that the store
// does not know are noted and logged, never deleted.
func (m *Manager) adopt(ctx context.Context) {
	// Only what was so before the list was made and still is can be compared with it.
	before := map[string]State{}
	for _, n := range m.List() {
		before[n.Name] = n.State
	}
	list, err := m.Compute.List(ctx, m.filter())
	if err != nil {
		if ctx.Err() == nil {
			m.Log.Warn("list the cluster's VMs", "err", err)
		}
		return
	}
	alive := map[string]bool{}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, in := range list {
		alive[in.Name] = true
		n := m.nodes[in.Name]
		if n == nil {
			continue // the controller, the login VM, or a node that was taken out of sluice.yaml
		}
		if n.State == Absent && before[in.Name] == Absent && !m.working[in.Name] {
			m.Log.Warn("a VM runs that nobody asked for", "node", in.Name, "status", in.Status)
			n.State = Present
			if err := m.Store.PutNodes(ctx, *n); err != nil {
				m.Log.Error("store nodes", "err", err)
			}
		}
	}
	for name, n := range m.nodes {
		if n.State == Present && before[name] == Present && !alive[name] && !m.working[name] {
			m.Log.Warn("the VM of a node is gone", "node", name)
			n.State = Absent
			n.Reason = "its VM is gone"
			if err := m.Store.PutNodes(ctx, *n); err != nil {
				m.Log.Error("store nodes", "err", err)
			}
		}
	}
}
