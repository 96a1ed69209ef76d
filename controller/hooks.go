package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/controller/store"
	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/slurm/directive"
	"github.com/sluicehpc/sluice/slurm/scontrol"
	"github.com/sluicehpc/sluice/staging"
	"github.com/sluicehpc/sluice/staging/files"
)

// setupPatience is how long setup waits for what does not answer before it says
// so; the hook, which gives a call 15 s, asks again.
const setupPatience = 10 * time.Second

// maxStageWait bounds how long data_in and data_out wait in one call.
const maxStageWait = 5 * time.Minute

// setup takes a job in: it judges the script again, now with the cloud's and the
// directory's word, and makes the job's directory. It may be repeated.
func (c *Controller) setup(ctx context.Context, in api.JobCall) (any, error) {
	_, err := c.accept(ctx, in)
	return api.Ack{}, err
}

func (c *Controller) accept(ctx context.Context, in api.JobCall) (store.Job, error) {
	if in.JobID == 0 {
		return store.Job{}, api.Errorf(api.CodeBadRequest, "the call names no job")
	}
	if in.UID == 0 {
		return store.Job{}, api.Errorf(api.CodeDenied, rootRefused)
	}
	ctx, cancel := context.WithTimeout(ctx, setupPatience)
	defer cancel()
	u, err := c.Users.ByID(ctx, in.UID)
	switch {
	case errors.Is(err, users.ErrUnknown):
		return store.Job{}, &api.Error{Code: api.CodeDenied, Message: fmt.Sprintf("uid %d is not known on the controller", in.UID),
			Hint: "the controller VM must resolve the site's users: check getent passwd there"}
	case err != nil:
		return store.Job{}, api.Errorf(api.CodeUnavailable, "look up uid %d: %v", in.UID, err)
	}
	j, err := c.enrol(ctx, in, u)
	if err != nil {
		return j, err
	}
	s, err := c.script(j)
	if err != nil {
		return j, c.failJob(j.Key, firstError(err))
	}
	grants, err := c.permit(ctx, j, s, append(reads(s), writes(s)...))
	var refused *api.Error
	if errors.As(err, &refused) {
		return j, c.failJob(j.Key, refused)
	}
	if err != nil {
		return j, api.Errorf(api.CodeUnavailable, "%v", err)
	}
	for _, g := range grants {
		err, known := c.buckets.remembered(g.Place)
		if !known || err != nil {
			err = c.buckets.check(ctx, g.Place)
		}
		if d, ok := bucketDiagnostic(s, g, err); err != nil && ok {
			return j, c.failJob(j.Key, &api.Error{Code: api.CodeBadRequest, Message: files.Shorten(d.Short()), Hint: d.Hint})
		}
		if err != nil {
			return j, api.Errorf(api.CodeUnavailable, "check %s: %v", g.Place, err)
		}
	}
	for _, name := range c.fileSystems(s) {
		fs, _ := c.Config.FileSystem(name)
		err := c.Files.MkdirJob(ctx, fs.Mount, j.Dir, j.UID, j.GID)
		var fe *files.Error
		if errors.As(err, &fe) {
			return j, c.failJob(j.Key, &api.Error{Code: api.CodeFailed, Message: files.Shorten(fmt.Sprintf("file system %s: %s", fs.Name, fe.Message)), Hint: fe.Hint})
		}
		if err != nil {
			return j, api.Errorf(api.CodeUnavailable, "file system %s: %v", fs.Name, err)
		}
	}
	c.changed.wake()
	return j, nil
}

// enrol finds or makes the job's run in the store. A run that did not begin goes
// on when Slurm sets the job up again, as after slurmctld's restart; one that
// did is followed by another.
func (c *Controller) enrol(ctx context.Context, in api.JobCall, u users.User) (store.Job, error) {
	now := c.Clock.Now()
	old, err := c.Store.Job(ctx, in.JobID)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return store.Job{}, err
	}
	known := err == nil
	if known && in.Script == "" {
		in.Script = old.Script
	}
	if known && old.UID == in.UID && old.Script == in.Script && !old.Ran() {
		if err := c.Store.AddEvent(ctx, old.Key, api.EventSubmitted, old.CreatedAt, false); err != nil {
			return old, err
		}
		return c.Store.UpdateJob(ctx, old.Key, func(j *store.Job) error {
			if in.Account != "" {
				j.Account = in.Account // scontrol update
			}
			if j.Active && j.Phase != store.PhaseFailed {
				return nil
			}
			j.Active, j.Phase, j.Reason, j.EndedAt = true, store.PhaseAccepted, "", time.Time{}
			return nil
		})
	}
	if known && old.Active {
		if _, err := c.Store.UpdateJob(ctx, old.Key, func(j *store.Job) error { j.Active = false; return nil }); err != nil {
			return store.Job{}, err
		}
	}
	gid := in.GID
	if gid == 0 { // a Slurm that does not tell
		gid = u.GID
	}
	j := store.Job{
		Key: store.Key{ID: in.JobID, Gen: 1}, UID: in.UID, GID: gid, User: u.Name,
		Name: in.Name, Account: in.Account, Partition: in.Partition, Script: in.Script,
		Phase: store.PhaseAccepted, Active: true, CreatedAt: now, Dir: files.JobDir(c.Config.Cluster, in.JobID),
	}
	if known {
		j.Gen = old.Gen + 1
	}
	if fs, ok := c.Config.FileSystem(""); ok {
		j.FS = fs.Name
	}
	// Only Slurm knows an array's numbers, and in old versions the job's name and account.
	needed := j.Account == "" && c.Config.Slurm.AccountingHost != "" || j.Name == "" && strings.Contains(j.Script, "%x") || strings.Contains(j.Script, "%A") || strings.Contains(j.Script, "%a")
	if needed || j.Account == "" || j.Partition == "" {
		sj, err := c.Slurm.Job(ctx, j.ID)
		if err != nil && needed {
			// A guess would send the job's data to a wrong place.
			return j, api.Errorf(api.CodeUnavailable, "ask Slurm about job %d: %v", j.ID, err)
		}
		if err != nil {
			c.Log.Warn("ask Slurm about a job", "job", j.ID, "err", err)
		} else {
			j.ArrayJob, j.ArrayTask = sj.ArrayJobID, sj.ArrayTaskID
			if j.Name == "" {
				j.Name = sj.Name
			}
			if j.Account == "" {
				j.Account = sj.Account
			}
			if j.Partition == "" {
				j.Partition = sj.Partition
			}
		}
	}
	if err := c.Store.PutJob(ctx, j); err != nil {
		return j, err
	}
	c.Log.Info("job accepted", "job", j.ID, "run", j.Gen, "user", j.User)
	return j, c.Store.AddEvent(ctx, j.Key, api.EventSubmitted, now, false)
}

// script is a job's script, judged, with its symbols replaced.
func (c *Controller) script(j store.Job) (directive.Script, error) {
	s, err := c.parse("", j.Script)
	if err != nil {
		return s, err
	}
	s, err = s.Expand(directive.Symbols{JobID: j.ID, ArrayJobID: j.ArrayJob, ArrayTaskID: j.ArrayTask, User: j.User, JobName: j.Name})
	if err != nil {
		return s, err
	}
	return s, c.judge(s).Err()
}

// fileSystems are those on which a job has a directory: the default one, and
// those that it names.
func (c *Controller) fileSystems(s directive.Script) []string {
	var names []string
	add := func(name string) {
		if fs, ok := c.Config.FileSystem(name); ok && !slices.Contains(names, fs.Name) {
			names = append(names, fs.Name)
		}
	}
	add("")
	for _, in := range s.StageIns {
		add(in.FS)
	}
	for _, out := range s.StageOuts {
		add(out.FS)
	}
	return names
}

// failJob makes e the job's reason and returns it. A reason starts with its
// first line, since that is what squeue shows.
func (c *Controller) failJob(k store.Key, e *api.Error) error {
	_, err := c.Store.UpdateJob(c.ctx, k, func(j *store.Job) error {
		j.Phase, j.Reason = store.PhaseFailed, e.Message
		return nil
	})
	if err != nil {
		c.Log.Error("store a failed job", "job", k.ID, "err", err)
	}
	c.Log.Info("job failed", "job", k.ID, "reason", e.Message)
	c.changed.wake()
	return e
}

// jobOf returns the job of a call.
func (c *Controller) jobOf(ctx context.Context, id uint32) (store.Job, error) {
	j, err := c.Store.Job(ctx, id)
	if errors.Is(err, store.ErrNotFound) {
		return j, api.Errorf(api.CodeNotFound, "job %d is not known to Sluice", id)
	}
	return j, err
}

// dataIn starts or follows a job's stage-in.
func (c *Controller) dataIn(ctx context.Context, in api.StageCall) (any, error) {
	j, err := c.jobOf(ctx, in.JobID)
	if in.Script != "" && in.UID != 0 && (err != nil || !j.Active) {
		// setup's word was lost, with the store perhaps.
		j, err = c.accept(ctx, in.JobCall)
	}
	if err != nil {
		return nil, err
	}
	return c.waitFor(ctx, j.Key, in.WaitSeconds, func(j store.Job) (api.StageState, bool) {
		switch j.Phase {
		case store.PhaseAccepted, store.PhaseStageIn:
			c.follow(j.Key, staging.StageIn)
			return api.StageState{Phase: api.StageBusy, Message: c.progress(ctx, j.Key, staging.StageIn)}, false
		case store.PhaseFailed:
			return api.StageState{Phase: api.StageFailed, Message: j.Reason}, true
		case store.PhaseCancelled:
			return api.StageState{Phase: api.StageFailed, Message: "the job was cancelled"}, true
		}
		return api.StageState{Phase: api.StageDone}, true
	})
}

// dataOut starts or follows a job's stage-out.
func (c *Controller) dataOut(ctx context.Context, in api.StageCall) (any, error) {
	j, err := c.jobOf(ctx, in.JobID)
	if err != nil {
		return nil, err
	}
	if !j.OutStarted {
		now := c.Clock.Now()
		_, err := c.Store.UpdateJob(ctx, j.Key, func(j *store.Job) error {
			j.OutStarted = true
			if j.EndedAt.IsZero() { // post_run's word was lost
				j.EndedAt = now
			}
			j.Phase = store.PhaseStageOut
			return nil
		})
		if err != nil {
			return nil, err
		}
		if err := c.Store.AddEvent(ctx, j.Key, api.EventJobEnded, now, false); err != nil {
			return nil, err
		}
	}
	return c.waitFor(ctx, j.Key, in.WaitSeconds, func(j store.Job) (api.StageState, bool) {
		switch {
		case j.Phase == store.PhaseStageOut:
			c.follow(j.Key, staging.StageOut)
			return api.StageState{Phase: api.StageBusy, Message: c.progress(ctx, j.Key, staging.StageOut)}, false
		case j.Phase == store.PhaseFailed && j.OutFailed:
			return api.StageState{Phase: api.StageFailed, Message: j.Reason}, true
		}
		return api.StageState{Phase: api.StageDone}, true
	})
}

// waitFor looks at a job until it has an answer or the time is over.
func (c *Controller) waitFor(ctx context.Context, k store.Key, seconds float64, look func(store.Job) (api.StageState, bool)) (any, error) {
	limit := min(time.Duration(max(0, seconds)*float64(time.Second)), maxStageWait)
	over := c.Clock.After(limit)
	for {
		next := c.changed.next()
		j, err := c.Store.JobRun(ctx, k)
		if err != nil {
			return nil, err
		}
		state, done := look(j)
		if done || limit == 0 {
			return state, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-c.ctx.Done():
			return nil, api.Errorf(api.CodeUnavailable, "sluiced stops")
		case <-over:
			return state, nil
		case <-next:
		}
	}
}

// progress says in words how far a job's transfers are.
func (c *Controller) progress(ctx context.Context, k store.Key, kind staging.Kind) string {
	list, err := c.Store.JobTransfers(ctx, k.ID, k.Gen)
	if err != nil {
		return ""
	}
	var words []string
	for _, t := range list {
		if t.Kind != kind || t.State.Ended() {
			continue
		}
		words = append(words, c.transferWords(t.Transfer))
	}
	return strings.Join(words, "; ")
}

// paths answers from the store: slurmctld stands still meanwhile.
func (c *Controller) paths(ctx context.Context, in api.JobCall) (any, error) {
	j, err := c.jobOf(ctx, in.JobID)
	if err != nil {
		return nil, err
	}
	return api.Environment{Variables: j.Environment}, nil
}

func (c *Controller) preRun(ctx context.Context, in api.JobCall) (any, error) {
	j, err := c.jobOf(ctx, in.JobID)
	if err != nil {
		return nil, err
	}
	if len(in.Nodes) > 0 {
		if _, err := c.Store.UpdateJob(ctx, j.Key, func(j *store.Job) error { j.Nodes = in.Nodes; return nil }); err != nil {
			return nil, err
		}
	}
	return api.Ack{}, nil
}

func (c *Controller) postRun(ctx context.Context, in api.JobCall) (any, error) {
	j, err := c.jobOf(ctx, in.JobID)
	if err != nil {
		return nil, err
	}
	return api.Ack{}, c.jobEnded(ctx, j, c.Clock.Now())
}

// jobEnded notes the end of a run, which several may tell.
func (c *Controller) jobEnded(ctx context.Context, j store.Job, at time.Time) error {
	if err := c.Store.AddEvent(ctx, j.Key, api.EventJobEnded, at, false); err != nil {
		return err
	}
	_, err := c.Store.UpdateJob(ctx, j.Key, func(j *store.Job) error {
		if j.EndedAt.IsZero() {
			j.EndedAt = at
		}
		if j.Phase == store.PhaseStaged || j.Phase == store.PhaseRunning {
			j.Phase = store.PhaseEnded
		}
		return nil
	})
	c.changed.wake()
	return err
}

// teardown ends what a job holds. It never deletes staged data, and it cancels a
// transfer only when nobody else wants it and the job is really gone: a restart
// of slurmctld tears jobs down, too, and sets them up again minutes later.
func (c *Controller) teardown(ctx context.Context, in api.JobCall) (any, error) {
	j, err := c.Store.Job(ctx, in.JobID)
	if errors.Is(err, store.ErrNotFound) {
		return api.Ack{}, nil
	}
	if err != nil {
		return nil, err
	}
	j, err = c.Store.UpdateJob(ctx, j.Key, func(j *store.Job) error {
		j.Active = false
		return nil
	})
	if err != nil {
		return nil, err
	}
	c.removeEnvironment(j.ID)
	c.changed.wake()
	if !j.Ran() && j.Phase != store.PhaseCancelled {
		c.wg.Go(func() { c.afterTeardown(c.ctx, j.Key) })
	}
	return api.Ack{}, nil
}

// afterTeardown asks Slurm whether a job that never ran was cancelled. Slurm may
// still be about to say so.
func (c *Controller) afterTeardown(ctx context.Context, k store.Key) {
	gone := false
	for range 5 {
		sj, err := c.Slurm.Job(ctx, k.ID)
		if errors.Is(err, scontrol.ErrNotFound) || err == nil && ended(sj.State) {
			gone = true
			break
		}
		if err != nil {
			c.Log.Warn("ask Slurm about a job that was torn down", "job", k.ID, "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-c.Clock.After(time.Second):
		}
	}
	if !gone {
		return // it waits in Slurm and comes again
	}
	j, err := c.Store.UpdateJob(ctx, k, func(j *store.Job) error {
		if j.Active || j.Ran() {
			return errSetUpAgain // and perhaps over by now
		}
		if j.Phase != store.PhaseFailed {
			j.Phase, j.Reason = store.PhaseCancelled, "cancelled before it started"
		}
		if j.EndedAt.IsZero() {
			j.EndedAt = c.Clock.Now()
		}
		return nil
	})
	if err != nil {
		if !errors.Is(err, errSetUpAgain) {
			c.Log.Error("store a cancelled job", "job", k.ID, "err", err)
		}
		return
	}
	c.Log.Info("job was cancelled", "job", j.ID)
	list, err := c.Store.JobTransfers(ctx, k.ID, k.Gen)
	if err != nil {
		c.Log.Error("find a cancelled job's transfers", "job", k.ID, "err", err)
	}
	for _, t := range list {
		if t.Kind != staging.StageIn || t.State.Ended() {
			continue
		}
		marked, err := c.Store.CancelIfUnwanted(ctx, t.ID)
		if err != nil {
			c.Log.Error("cancel a transfer", "transfer", t.ID, "err", err)
		}
		if marked {
			c.staging.CancelNow(t.ID)
		}
	}
	c.changed.wake()
}

var errSetUpAgain = errors.New("the job was set up again")

// ended reports that Slurm's state is of a job that will not start by itself.
func ended(state string) bool {
	switch state {
	case "CANCELLED", "COMPLETED", "COMPLETING", "FAILED", "TIMEOUT", "DEADLINE", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "REVOKED":
		return true
	}
	return false
}

// bbStatus answers `scontrol show bbstat`. Old Slurm does not tell who asks, so
// it shows nothing private: no paths, no buckets, no names.
func (c *Controller) bbStatus(ctx context.Context, in api.BBStatus) (any, error) {
	var b strings.Builder
	if len(in.Args) == 0 {
		active, err := c.Store.ActiveTransfers(ctx)
		if err != nil {
			return nil, err
		}
		count := map[staging.State]int{}
		for _, t := range active {
			count[t.State]++
		}
		jobs, err := c.Store.CountActiveJobs(ctx)
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&b, "Sluice on cluster %s: %d jobs, transfers: %d queued, %d running, %d verifying\n",
			c.Config.Cluster, jobs, count[staging.Queued], count[staging.Running], count[staging.Verifying])
		b.WriteString("scontrol show bbstat sluice JOBID shows a job; sluice job show JOBID tells its owner more\n")
	}
	for _, arg := range in.Args {
		var id uint32
		if _, err := fmt.Sscanf(arg, "%d", &id); err != nil {
			continue // the plugin's name
		}
		j, err := c.Store.Job(ctx, id)
		if err != nil {
			fmt.Fprintf(&b, "job %d: not known to Sluice\n", id)
			continue
		}
		fmt.Fprintf(&b, "job %d: %s\n", id, j.Phase)
		list, err := c.Store.JobTransfers(ctx, j.ID, j.Gen)
		if err != nil {
			return nil, err
		}
		for _, t := range list {
			live, _ := c.live(t.Transfer)
			fmt.Fprintf(&b, "  %s %s: %d of %d objects, %d of %d bytes\n", t.Kind, live.State, live.ObjectsDone, live.Objects, live.BytesDone, live.Bytes)
		}
	}
	return api.Text{Text: b.String()}, nil
}

// resume starts nodes for jobs; the moment is stored before any VM is asked for.
func (c *Controller) resume(ctx context.Context, in api.Resume) (any, error) {
	now := c.Clock.Now()
	for _, r := range in.Jobs {
		j, err := c.Store.Job(ctx, r.JobID)
		if errors.Is(err, store.ErrNotFound) {
			continue // a job without directives
		}
		if err != nil {
			return nil, err
		}
		if _, err := c.Store.UpdateJob(ctx, j.Key, func(j *store.Job) error {
			j.Resumed = r.Nodes
			if len(j.Nodes) == 0 {
				j.Nodes = r.Nodes
			}
			return nil
		}); err != nil {
			return nil, err
		}
		if err := c.Store.AddEvent(ctx, j.Key, api.EventResumeRequested, now, false); err != nil {
			return nil, err
		}
	}
	at, err := time.Parse(api.TimeFormat, in.At)
	if err != nil {
		at = time.Time{} // an older hook's
	}
	if err := c.nodes.Resume(ctx, in.Nodes, at); err != nil {
		return nil, err
	}
	c.Log.Info("nodes resumed", "nodes", strings.Join(in.Nodes, ","))
	return api.Ack{}, nil
}

func (c *Controller) suspend(ctx context.Context, in api.NodeNames) (any, error) {
	c.Log.Info("nodes suspended", "nodes", strings.Join(in.Nodes, ","))
	return api.Ack{}, c.nodes.Suspend(ctx, in.Nodes, "")
}

func (c *Controller) resumeFail(ctx context.Context, in api.NodeNames) (any, error) {
	c.Log.Warn("nodes failed to resume", "nodes", strings.Join(in.Nodes, ","))
	return api.Ack{}, c.nodes.Suspend(ctx, in.Nodes, "")
}
