package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/controller/store"
	"github.com/sluicehpc/sluice/staging"
	"github.com/sluicehpc/sluice/staging/files"
)

// live is a transfer as it is at this moment.
func (c *Controller) live(t staging.Transfer) (staging.Live, bool) {
	if l, ok := c.staging.Live(t.ID); ok {
		return l, true
	}
	return staging.Live{Transfer: t, ETA: -1}, false
}

// transferWords says how far a transfer is, for a reason or a status line.
func (c *Controller) transferWords(t staging.Transfer) string {
	l, _ := c.live(t)
	switch {
	case l.Wait != "":
		return files.Shorten(l.Wait)
	case l.State == staging.Verifying:
		return fmt.Sprintf("%s: verified %d of %d objects", t.URL(), l.Verified, l.Objects)
	case l.State == staging.Queued:
		return t.URL() + ": queued"
	}
	return fmt.Sprintf("%s: %d of %d objects", t.URL(), l.ObjectsDone, l.Objects)
}

func (c *Controller) viewTransfer(t staging.Transfer, attached int) api.Transfer {
	l, _ := c.live(t)
	t = l.Transfer
	v := api.Transfer{
		ID: t.ID, Kind: string(t.Kind), JobID: t.JobID, UID: t.UID, Engine: staging.EngineManaged, FS: t.FS,
		State: string(t.State), Objects: t.Objects, Bytes: t.Bytes, ObjectsDone: t.ObjectsDone, BytesDone: t.BytesDone,
		Verified: t.Verified, VerifyLevel: staging.LevelFull, BytesPerSec: l.BytesPerSec, ETASeconds: -1,
		QueuedAt: api.FormatTime(t.QueuedAt), StartedAt: api.FormatTime(t.StartedAt), EndedAt: api.FormatTime(t.EndedAt),
		Error: t.Error, Hint: t.Hint, Operation: t.Operation, RequestID: t.RequestID, AttachedJobs: attached,
	}
	if v.Hint == "" {
		v.Hint = t.Note
	}
	if l.ETA >= 0 {
		v.ETASeconds = l.ETA.Round(time.Second / 10).Seconds()
	}
	fs, _ := c.Config.FileSystem(t.FS)
	if t.Kind == staging.StageIn {
		v.Source, v.Destination = t.URL(), filepath.Join(fs.Mount, files.VersionDir(t.Dataset, t.Version))
	} else {
		v.Source, v.Destination = filepath.Join(fs.Mount, t.JobDir, t.From), t.URL()
	}
	return v
}

// eventOrder is the order of moments at the same time: a copy that is there
// already is asked for and done at once.
var eventOrder = []string{
	api.EventSubmitted, api.EventStageInStarted, api.EventStageInDone, api.EventResumeRequested, api.EventNodesReady,
	api.EventJobStarted, api.EventJobEnded, api.EventStageOutStarted, api.EventStageOutDone,
}

func (c *Controller) viewJob(ctx context.Context, j store.Job) (api.Job, error) {
	fs, _ := c.Config.FileSystem(j.FS)
	v := api.Job{
		JobID: j.ID, Cluster: c.Config.Cluster, Name: j.Name, User: j.User, UID: j.UID, Account: j.Account, Partition: j.Partition,
		Phase: j.Phase, Reason: j.Reason, EndState: j.EndState, Nodes: j.Nodes, Dir: filepath.Join(fs.Mount, j.Dir),
		Events: []api.Event{}, Transfers: []api.Transfer{},
	}
	if v.Nodes == nil {
		v.Nodes = []string{}
	}
	events, err := c.Store.Events(ctx, j.Key)
	if err != nil {
		return v, err
	}
	slices.SortStableFunc(events, func(a, b store.Event) int {
		return cmp.Or(a.At.Compare(b.At), slices.Index(eventOrder, a.Name)-slices.Index(eventOrder, b.Name))
	})
	for _, e := range events {
		v.Events = append(v.Events, api.Event{Name: e.Name, At: api.FormatTime(e.At)})
	}
	transfers, err := c.Store.JobTransfers(ctx, j.ID, j.Gen)
	if err != nil {
		return v, err
	}
	for _, t := range transfers {
		v.Transfers = append(v.Transfers, c.viewTransfer(t.Transfer, t.Jobs))
	}
	return v, nil
}

// jobShow shows a job to root and its owner; to others it does not exist.
func (c *Controller) jobShow(ctx context.Context, who Caller, in api.JobID) (any, error) {
	j, err := c.jobOf(ctx, in.JobID)
	if err == nil && !who.mayRead(j.UID) {
		err = api.Errorf(api.CodeNotFound, "job %d is not known to Sluice", in.JobID)
	}
	if err != nil {
		return nil, err
	}
	return c.viewJob(ctx, j)
}

func limit(in api.JobList) int {
	if in.Limit <= 0 {
		return 100
	}
	return min(in.Limit, 10000)
}

func (c *Controller) jobList(ctx context.Context, who Caller, in api.JobList) (any, error) {
	if in.All && !who.root() {
		return nil, api.Errorf(api.CodeDenied, "only root may list everybody's jobs")
	}
	list, err := c.Store.Jobs(ctx, who.UID, in.All, limit(in))
	if err != nil {
		return nil, err
	}
	out := api.Jobs{Jobs: []api.Job{}}
	for _, j := range list {
		v, err := c.viewJob(ctx, j)
		if err != nil {
			return nil, err
		}
		out.Jobs = append(out.Jobs, v)
	}
	return out, nil
}

func (c *Controller) transferShow(ctx context.Context, who Caller, in api.TransferID) (any, error) {
	missing := api.Errorf(api.CodeNotFound, "transfer %.64q is not known to Sluice", in.ID)
	t, err := c.Store.Transfer(ctx, in.ID)
	if errors.Is(err, store.ErrNotFound) {
		return nil, missing
	}
	if err != nil {
		return nil, err
	}
	owners, err := c.Store.OwnersOf(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	allowed := who.mayRead(t.UID)
	for _, uid := range owners {
		allowed = allowed || who.mayRead(uid)
	}
	if !allowed {
		return nil, missing
	}
	return c.viewTransfer(t, len(owners)), nil
}

func (c *Controller) transferList(ctx context.Context, who Caller, in api.JobList) (any, error) {
	if in.All && !who.root() {
		return nil, api.Errorf(api.CodeDenied, "only root may list everybody's transfers")
	}
	list, err := c.Store.Transfers(ctx, who.UID, in.All, limit(in))
	if err != nil {
		return nil, err
	}
	out := api.Transfers{Transfers: []api.Transfer{}}
	for _, t := range list {
		out.Transfers = append(out.Transfers, c.viewTransfer(t, 0))
	}
	return out, nil
}

func (c *Controller) status(ctx context.Context, _ Caller) (any, error) {
	jobs, err1 := c.Store.CountActiveJobs(ctx)
	transfers, err2 := c.Store.CountActiveTransfers(ctx)
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	c.mu.Lock()
	lacks := c.lacks
	c.mu.Unlock()
	vms := 0
	for _, n := range c.nodes.List() {
		if n.State != "absent" {
			vms++
		}
	}
	return api.Status{Version: c.Version, Cluster: c.Config.Cluster, StartedAt: api.FormatTime(c.started),
		Jobs: jobs, Transfers: transfers, Nodes: vms, Address: c.Config.Address, Fingerprint: c.Authority.Fingerprint(), Lacks: lacks}, nil
}
