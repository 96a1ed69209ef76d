// Package controller is the daemon sluiced: it wires the store, staging and the
// nodes to the API, and has no rules of its own about how data moves.
package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/controller/store"
	"github.com/sluicehpc/sluice/gcp/compute"
	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/nodes"
	"github.com/sluicehpc/sluice/slurm/hostlist"
	"github.com/sluicehpc/sluice/slurm/scontrol"
	"github.com/sluicehpc/sluice/staging"
	"github.com/sluicehpc/sluice/staging/files"
	"github.com/sluicehpc/sluice/trust"
)

// Slurm is what the controller asks Slurm; scontrol.Client is it.
type Slurm interface {
	Job(ctx context.Context, id uint32) (scontrol.Job, error)
	ExitCode(ctx context.Context, id uint32) (code, signal int, err error)
	// Nodes returns the named nodes, or all of them.
	Nodes(ctx context.Context, names []string) ([]scontrol.Node, error)
	SetNodes(ctx context.Context, names []string, state, reason string) error
}

// Users resolves users; System is it.
type Users interface {
	ByID(ctx context.Context, uid uint32) (users.User, error)
	GroupIDs(ctx context.Context, name string) ([]uint32, error)
	GroupID(ctx context.Context, name string) (uint32, error)
}

// System asks the machine's name services.
type System struct{}

// ByID is users.ByID.
func (System) ByID(ctx context.Context, uid uint32) (users.User, error) { return users.ByID(ctx, uid) }

// GroupIDs is users.GroupIDs.
func (System) GroupIDs(ctx context.Context, name string) ([]uint32, error) {
	return users.GroupIDs(ctx, name)
}

// GroupID is users.GroupID.
func (System) GroupID(ctx context.Context, name string) (uint32, error) {
	return users.GroupID(ctx, name)
}

// Files is the work on the mounted file systems; *files.Client is it.
type Files interface {
	staging.Files
	MkdirJob(ctx context.Context, mount, jobDir string, uid, gid uint32) error
	Gate(ctx context.Context, mount, dataset, version string, gid uint32) error
	Link(ctx context.Context, u files.User, mount, jobDir, to, target string) error
}

// Parts are what a Controller is built of.
type Parts struct {
	Config  *config.Config
	Store   *store.Store
	Bucket  staging.Bucket
	Lustre  staging.Lustre
	Compute Compute
	Files   Files
	Slurm   Slurm
	Users   Users
	// SlurmUser is who runs slurmctld.
	SlurmUser users.User
	// EnvDir is where jobs' environments are left for burst_buffer.lua.
	EnvDir string
	// ListingDir keeps the listings of transfers that go on.
	ListingDir string
	// Authority is the cluster's; Identity verifies who wants a certificate of it.
	Authority *trust.CA
	Identity  Identity
	Audit     Audit
	IAM       IAM
	Version   string // of the binary
	Clock     clock.Clock
	Log       *slog.Logger
	// Fault is staging's; tests die in it.
	Fault func(point string)
}

// Controller is a running sluiced without its listeners: Handle answers calls.
type Controller struct {
	Parts
	staging   *staging.Runner
	nodes     *nodes.Manager
	buckets   *buckets
	directory *directory
	changed   *hub
	fleet     *fleet
	// enrolled says whose certificates count.
	enrolled *enrolments
	started  time.Time

	wg  sync.WaitGroup
	ctx context.Context // of Start

	mu      sync.Mutex // guards what follows
	workers map[work]bool
	lacks   []string             // permissions of sluiced's own account
	refused map[string]time.Time // when a node's last refused token was written down
}

// work is a job's stage-in or stage-out that a goroutine follows.
type work struct {
	key  store.Key
	kind staging.Kind
}

// New builds a Controller.
func New(p Parts) (*Controller, error) {
	c := &Controller{
		Parts:    p,
		buckets:  newBuckets(p.Bucket, p.Clock),
		changed:  newHub(),
		workers:  map[work]bool{},
		refused:  map[string]time.Time{},
		enrolled: newEnrolments(),
		started:  p.Clock.Now(),
	}
	c.directory = &directory{ask: c.askPerson, now: p.Clock.Now, run: c.wg.Go, known: map[uint32]*lookup{}}
	r := &staging.Runner{
		Store: p.Store, Bucket: p.Bucket, Lustre: p.Lustre, Files: p.Files, Groups: p.Users.GroupIDs,
		Dir: p.ListingDir, Clock: p.Clock, Log: p.Log, Changed: c.transferChanged, Fault: p.Fault,
	}
	for _, fs := range p.Config.FileSystems {
		r.FileSystems = append(r.FileSystems, staging.FileSystem{Name: fs.Name, Mount: fs.Mount, Instance: fs.Instance})
	}
	c.staging = r
	m := &nodes.Manager{
		Cluster: p.Config.Cluster, ResumeTimeout: time.Duration(p.Config.Slurm.ResumeTimeout),
		Compute: p.Compute, Store: p.Store, Clock: p.Clock, Log: p.Log,
	}
	for _, ns := range p.Config.NodeSets {
		set, err := nodeSet(p.Config, ns, p.Authority.Fingerprint())
		if err != nil {
			return nil, err
		}
		m.NodeSets = append(m.NodeSets, set)
	}
	c.nodes = m
	c.fleet = newFleet(c)
	return c, nil
}

// nodeSet says how a node set's VMs are made.
func nodeSet(c *config.Config, ns config.NodeSet, fingerprint string) (nodes.NodeSet, error) {
	names, err := hostlist.Expand(ns.Nodes)
	if err != nil {
		return nodes.NodeSet{}, fmt.Errorf("nodeset %s: %w", ns.Name, err)
	}
	labels := map[string]string{nodes.ClusterLabel: c.Cluster}
	for k, v := range ns.Labels {
		labels[k] = v
	}
	metadata := map[string]string{
		attributeRole:        string(api.RoleCompute),
		attributeController:  c.Address,
		attributeFingerprint: fingerprint,
	}
	for k, v := range ns.Metadata {
		metadata[k] = v
	}
	return nodes.NodeSet{Name: ns.Name, Nodes: names, Spec: compute.Spec{
		MachineType: ns.MachineType, Image: ns.ImagePath(c.Project), Network: ns.NetworkPath(), Subnetwork: ns.SubnetworkPath(c.Zone),
		ServiceAccount: ns.ServiceAccount, Labels: labels, Metadata: metadata,
	}}, nil
}

// Start takes up what the store says is to be done and returns. Work ends with
// ctx; Wait waits for it.
func (c *Controller) Start(ctx context.Context) error {
	c.ctx = ctx
	if err := c.makeEnvDir(); err != nil {
		return err
	}
	if err := c.enrolled.load(ctx, c.Store); err != nil {
		return err
	}
	if err := c.nodes.Start(ctx); err != nil {
		return err
	}
	if err := c.staging.Start(ctx); err != nil {
		return err
	}
	active, err := c.Store.ActiveJobs(ctx)
	if err != nil {
		return err
	}
	for _, j := range active {
		switch j.Phase {
		case store.PhaseAccepted, store.PhaseStageIn:
			c.follow(j.Key, staging.StageIn)
		case store.PhaseStaged, store.PhaseRunning:
			// /run was emptied by a reboot.
			if err := c.writeEnvironment(j); err != nil {
				c.Log.Error("write a job's environment", "job", j.ID, "err", err)
			}
		case store.PhaseStageOut:
			c.follow(j.Key, staging.StageOut)
		}
	}
	requeued, err := c.Store.RequeuedJobs(ctx)
	if err != nil {
		return err
	}
	for _, j := range requeued {
		c.wg.Go(func() { c.afterRequeue(ctx, j.Key) })
	}
	c.wg.Go(func() { c.fleet.watchInstances(ctx) })
	c.wg.Go(func() { c.watchDown(ctx) })
	c.wg.Go(func() { c.watchGone(ctx) })
	c.wg.Go(func() { c.watchPermissions(ctx) })
	c.wg.Go(func() { c.retain(ctx) })
	return nil
}

// Wait returns when all work has ended.
func (c *Controller) Wait() {
	c.wg.Wait()
	c.staging.Wait()
	c.nodes.Wait()
}

// transferChanged notes the moments of the jobs that wait for a transfer.
func (c *Controller) transferChanged(t staging.Transfer) {
	if t.Kind == staging.StageIn && t.State == staging.Running {
		keys, err := c.Store.JobsOf(c.ctx, t.ID)
		for _, k := range keys {
			err = errors.Join(err, c.Store.AddEvent(c.ctx, k, api.EventStageInStarted, t.StartedAt, false))
		}
		if err != nil {
			c.Log.Error("note the start of a stage-in", "transfer", t.ID, "err", err)
		}
	}
	c.changed.wake()
}

// hub wakes everybody who waits for a change of anything.
type hub struct {
	mu sync.Mutex // guards ch
	ch chan struct{}
}

func newHub() *hub { return &hub{ch: make(chan struct{})} }

// next is closed at the next change. Take it before looking.
func (h *hub) next() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ch
}

func (h *hub) wake() {
	h.mu.Lock()
	close(h.ch)
	h.ch = make(chan struct{})
	h.mu.Unlock()
}

// makeEnvDir makes the directory of environments: SlurmUser's group reads it,
// and what is made in it belongs to that group.
func (c *Controller) makeEnvDir() error {
	if err := os.MkdirAll(c.EnvDir, 0o750); err != nil {
		return fmt.Errorf("make %s: %w", c.EnvDir, err)
	}
	if err := os.Chown(c.EnvDir, 0, int(c.SlurmUser.GID)); err != nil {
		return fmt.Errorf("make %s: %w", c.EnvDir, err)
	}
	if err := os.Chmod(c.EnvDir, 0o750|os.ModeSetgid); err != nil {
		return fmt.Errorf("make %s: %w", c.EnvDir, err)
	}
	// What an earlier sluiced left may be of jobs that are gone.
	old, err := os.ReadDir(c.EnvDir)
	if err != nil {
		return err
	}
	for _, f := range old {
		os.Remove(filepath.Join(c.EnvDir, f.Name()))
	}
	return nil
}
