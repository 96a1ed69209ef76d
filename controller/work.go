package controller

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/controller/store"
	"github.com/sluicehpc/sluice/internal/atomicfile"
	"github.com/sluicehpc/sluice/slurm/directive"
	"github.com/sluicehpc/sluice/slurm/scontrol"
	"github.com/sluicehpc/sluice/staging"
	"github.com/sluicehpc/sluice/staging/files"
)

// follow starts a goroutine for a job's stage-in or stage-out, unless one is at it.
func (c *Controller) follow(k store.Key, kind staging.Kind) {
	w := work{k, kind}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.workers[w] || c.ctx.Err() != nil {
		return
	}
	c.workers[w] = true
	c.wg.Go(func() {
		defer func() {
			c.mu.Lock()
			delete(c.workers, w)
			c.mu.Unlock()
			c.changed.wake()
		}()
		step := c.stageIn
		if kind == staging.StageOut {
			step = c.stageOut
		}
		c.untilDone(c.ctx, k, step)
	})
}

// untilDone repeats a step until it ends, for good or for bad.
func (c *Controller) untilDone(ctx context.Context, k store.Key, step func(context.Context, store.Key) error) {
	for pause := time.Second; ; pause = min(2*pause, 30*time.Second) {
		err := step(ctx, k)
		var final *staging.Error
		var refused *api.Error
		switch {
		case err == nil || ctx.Err() != nil || errors.Is(err, errGone):
			return
		case errors.As(err, &refused):
			c.failJob(k, refused)
			return
		case errors.As(err, &final):
			c.failJob(k, &api.Error{Code: api.CodeFailed, Message: files.Shorten(final.Message), Hint: final.Hint})
			return
		}
		c.Log.Warn("job waits", "job", k.ID, "err", err)
		select {
		case <-ctx.Done():
			return
		case <-c.Clock.After(pause):
		}
	}
}

// errGone ends the work for a job that was torn down.
var errGone = errors.New("the job is gone")

func (j jobScript) staging() staging.Job {
	return staging.Job{ID: j.ID, Gen: j.Gen, UID: j.UID, GID: j.GID, User: j.User, Dir: j.Dir}
}

type jobScript struct {
	store.Job
	script directive.Script
}

func (c *Controller) load(ctx context.Context, k store.Key) (jobScript, error) {
	j, err := c.Store.JobRun(ctx, k)
	if err != nil {
		return jobScript{}, err
	}
	s, err := c.script(j)
	if err != nil {
		return jobScript{}, firstError(err)
	}
	return jobScript{j, s}, nil
}

// stageIn attaches a job to its datasets, waits for them and makes them reachable.
func (c *Controller) stageIn(ctx context.Context, k store.Key) error {
	j, err := c.load(ctx, k)
	if err != nil {
		return err
	}
	if !j.Active {
		return errGone
	}
	if _, err := c.Store.UpdateJob(ctx, k, func(j *store.Job) error { j.Phase = store.PhaseStageIn; return nil }); err != nil {
		return err
	}
	grants, err := c.permit(ctx, j.Job, j.script, reads(j.script))
	if err != nil {
		return err
	}
	var got []staging.Transfer
	for i, in := range j.script.StageIns {
		fs, _ := c.Config.FileSystem(in.FS)
		t, err := c.staging.StageIn(ctx, j.staging(), i, staging.In{Place: grants[i].Place, FS: fs.Name, AllowEmpty: in.AllowEmpty})
		if err != nil {
			return at(j.script, in.Of("source"), err)
		}
		if t.State != staging.Queued {
			if err := c.Store.AddEvent(ctx, k, api.EventStageInStarted, c.Clock.Now(), false); err != nil {
				return err
			}
		}
		got = append(got, t)
	}
	done, err := c.waitTransfers(ctx, k, got)
	if err != nil {
		return err
	}
	if len(done) > 0 {
		// A copy that was there before counts from when it was asked for.
		verified := j.CreatedAt
		events, err := c.Store.Events(ctx, k)
		if err != nil {
			return err
		}
		for _, e := range events {
			if e.Name == api.EventStageInStarted {
				verified = e.At
			}
		}
		for _, t := range done {
			if t.VerifiedAt.After(verified) {
				verified = t.VerifiedAt
			}
		}
		if err := c.Store.AddEvent(ctx, k, api.EventStageInDone, verified, false); err != nil {
			return err
		}
	}
	env, err := c.reach(ctx, j, grants, done)
	if err != nil {
		return err
	}
	staged, err := c.Store.UpdateJob(ctx, k, func(j *store.Job) error {
		if !j.Active {
			return errGone
		}
		j.Environment = env
		return nil
	})
	if err != nil {
		return err
	}
	// The file is there before Slurm hears that the job may start.
	if err := c.writeEnvironment(staged); err != nil {
		return err
	}
	_, err = c.Store.UpdateJob(ctx, k, func(j *store.Job) error {
		if j.Phase == store.PhaseStageIn {
			j.Phase, j.Reason = store.PhaseStaged, ""
		}
		return nil
	})
	if err == nil {
		c.Log.Info("job staged", "job", k.ID)
	}
	return err
}

// at puts the place in the script before a failure's words.
func at(s directive.Script, p directive.Pos, err error) error {
	var e *staging.Error
	if !errors.As(err, &e) {
		return err
	}
	d := s.Diagnostic(p, e.Message, e.Hint)
	return &staging.Error{Message: d.Short(), Hint: e.Hint, Err: err}
}

// waitTransfers returns when all have ended well; the first that did not is the error.
func (c *Controller) waitTransfers(ctx context.Context, k store.Key, list []staging.Transfer) ([]staging.Transfer, error) {
	list = slices.Clone(list)
	for {
		next := c.changed.next()
		open := false
		for i := range list {
			t, err := c.Store.Transfer(ctx, list[i].ID)
			if err != nil {
				return nil, err
			}
			list[i] = t
			switch t.State {
			case staging.Failed:
				return nil, &staging.Error{Message: t.Error, Hint: t.Hint}
			case staging.Cancelled:
				return nil, fmt.Errorf("transfer %s was cancelled", t.ID) // asked for again
			case staging.Done:
			default:
				open = true
			}
		}
		if !open {
			return list, nil
		}
		j, err := c.Store.JobRun(ctx, k)
		if err != nil {
			return nil, err
		}
		if !j.Active && list[0].Kind == staging.StageIn {
			return nil, errGone
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-next:
		}
	}
}

// reach makes the gates and links through which the job sees its data, and says
// what its environment is.
func (c *Controller) reach(ctx context.Context, j jobScript, grants []grant, done []staging.Transfer) (map[string]string, error) {
	def, _ := c.Config.FileSystem("")
	env := map[string]string{
		"SLUICE_FS":      def.Mount,
		"SLUICE_JOB_DIR": filepath.Join(def.Mount, j.Dir),
	}
	for _, fs := range c.Config.FileSystems {
		env["SLUICE_FS_"+variable(fs.Name)] = fs.Mount
	}
	for i, in := range j.script.StageIns {
		t := done[i]
		fs, _ := c.Config.FileSystem(t.FS)
		err := c.Files.Gate(ctx, fs.Mount, t.Dataset, t.Version, grants[i].gid)
		var fe *files.Error
		if errors.As(err, &fe) && fe.Missing {
			// Somebody removed it behind our back: it comes again.
			if err := c.Store.ForgetDataset(ctx, t.FS, t.Dataset, t.Version); err != nil {
				return nil, err
			}
			return nil, err
		}
		if err != nil {
			return nil, finalFile(fs.Name, err)
		}
		data := filepath.Join(fs.Mount, files.GateDir(t.Dataset, t.Version, grants[i].gid))
		if in.To != "" {
			groups, err := c.Users.GroupIDs(ctx, j.User)
			if err != nil {
				return nil, err
			}
			u := files.User{UID: j.UID, GID: j.GID, Groups: groups}
			if err := c.Files.Link(ctx, u, fs.Mount, j.Dir, in.To, data); err != nil {
				return nil, at(j.script, in.Of("to"), finalFile(fs.Name, err))
			}
			// Slurm counts the equal signs of a line.
			if to := filepath.Join(fs.Mount, j.Dir, in.To); !strings.ContainsAny(to, "=\n") {
				data = to
			}
		}
		env[in.Variable()] = data
	}
	return env, nil
}

// finalFile makes what the user did wrong, and a full file system, final.
func finalFile(fs string, err error) error {
	var fe *files.Error
	if errors.As(err, &fe) && (fe.Input || strings.Contains(fe.Message, "file system is full")) {
		return &staging.Error{Message: fmt.Sprintf("file system %s: %s", fs, fe.Message), Hint: fe.Hint, Err: err}
	}
	return err
}

// variable is a name as environment variables spell it.
func variable(name string) string {
	return strings.TrimPrefix(directive.DataVariable(name), "SLUICE_DATA_")
}

// How Slurm says that a job failed although its exit code is 0.
var failureReasons = map[string]bool{
	"TimeLimit": true, "InactiveLimit": true, "NodeDown": true, "NodeFail": true, "PartitionDown": true, "SystemFailure": true,
	"JobLaunchFailure": true, "NonZeroExitCode": true, "RaisedSignal": true, "OutOfMemory": true, "DeadLine": true, "BadConstraints": true,
}

// Why Slurm says that a job waits: one that just ran was requeued, although
// COMPLETING hides that it is PENDING.
var waitReasons = map[string]bool{
	"BeginTime": true, "Cleaning": true, "JobHeldAdmin": true, "JobHeldUser": true,
}

// Ends of a run.
const (
	endSuccess  = "success"
	endFailure  = "failure"
	endRequeued = "requeued" // it comes again: neither
)

// endOf asks Slurm how a run ended.
func (c *Controller) endOf(ctx context.Context, id uint32) (end, words string, err error) {
	sj, err := c.Slurm.Job(ctx, id)
	if err != nil {
		return "", "", err
	}
	switch sj.State {
	case "PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "PREEMPTED", "SPECIAL_EXIT", "CONFIGURING":
		return endRequeued, "requeued", nil
	case "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE", "LAUNCH_FAILED":
		return endFailure, strings.ToLower(sj.State), nil
	case "COMPLETED":
		return endSuccess, "", nil
	}
	if waitReasons[sj.Reason] {
		return endRequeued, "requeued", nil
	}
	// STAGE_OUT and COMPLETING hide the state below them.
	code, signal, err := c.Slurm.ExitCode(ctx, id)
	if errors.Is(err, scontrol.ErrNotEnded) {
		return endRequeued, "requeued", nil
	}
	if err != nil {
		return "", "", err
	}
	switch {
	case failureReasons[sj.Reason]:
		return endFailure, sj.Reason, nil
	case signal != 0:
		return endFailure, fmt.Sprintf("ended by signal %d", signal), nil
	case code != 0:
		return endFailure, fmt.Sprintf("exit code %d", code), nil
	}
	return endSuccess, "", nil
}

// stageOut brings a job's results to their buckets.
func (c *Controller) stageOut(ctx context.Context, k store.Key) error {
	j, err := c.load(ctx, k)
	if err != nil {
		return c.outFailed(ctx, k, err)
	}
	if j.EndState == "" {
		end, words, err := c.endOf(ctx, k.ID)
		if errors.Is(err, scontrol.ErrNotFound) {
			end, words, err = endFailure, "Slurm does not know the job any more", nil
		}
		if err != nil {
			return err
		}
		if j.Job, err = c.Store.UpdateJob(ctx, k, func(j *store.Job) error {
			j.EndState, j.EndWords = end, words
			return nil
		}); err != nil {
			return err
		}
	}
	var due []int
	var asks []ask
	for i, out := range j.script.StageOuts {
		if out.On == "always" || out.On == j.EndState {
			due = append(due, i)
			asks = append(asks, writes(j.script)[i])
		}
	}
	// Again: policy may have changed while the job ran.
	grants, err := c.permit(ctx, j.Job, j.script, asks)
	if err != nil {
		return c.outFailed(ctx, k, err)
	}
	var got []staging.Transfer
	for n, i := range due {
		out := j.script.StageOuts[i]
		if err := c.Store.AddEvent(ctx, k, api.EventStageOutStarted, c.Clock.Now(), false); err != nil {
			return err
		}
		fs, _ := c.Config.FileSystem(out.FS)
		t, err := c.staging.StageOut(ctx, j.staging(), i, staging.Out{Place: grants[n].Place, From: out.From, FS: fs.Name, Move: out.Move})
		if err != nil {
			return c.outFailed(ctx, k, at(j.script, out.Of("from"), err))
		}
		got = append(got, t)
	}
	// All of them to their end, so that one's failure does not hide another's.
	var first error
	var last time.Time
	for _, t := range got {
		done, err := c.waitTransfers(ctx, k, []staging.Transfer{t})
		var final *staging.Error
		if err != nil && !errors.As(err, &final) {
			return err
		}
		if first == nil {
			first = err
		}
		if len(done) > 0 && done[0].EndedAt.After(last) {
			last = done[0].EndedAt
		}
	}
	if first != nil {
		return c.outFailed(ctx, k, first)
	}
	if len(got) > 0 {
		if err := c.Store.AddEvent(ctx, k, api.EventStageOutDone, last, true); err != nil {
			return err
		}
	}
	_, err = c.Store.UpdateJob(ctx, k, func(j *store.Job) error {
		j.Phase, j.Reason = store.PhaseDone, ""
		if j.EndState == endFailure {
			j.Phase, j.Reason = store.PhaseFailed, "the job failed: "+j.EndWords
		}
		if j.EndState == endRequeued {
			j.Phase = store.PhaseRequeued
		}
		return nil
	})
	if err == nil && j.EndState == endRequeued {
		c.wg.Go(func() { c.afterRequeue(c.ctx, k) })
	}
	if err == nil {
		c.Log.Info("job done", "job", k.ID, "end", j.EndState)
	}
	return err
}

// requeueAsk is the longest pause between two questions to Slurm about a job that
// it is to start again.
const requeueAsk = 10 * time.Second

// afterRequeue notes that a requeued job was cancelled before it began again:
// Slurm tears nothing down then.
func (c *Controller) afterRequeue(ctx context.Context, k store.Key) {
	for pause := time.Second; ; pause = min(2*pause, requeueAsk) {
		select {
		case <-ctx.Done():
			return
		case <-c.Clock.After(pause):
		}
		newest, err := c.Store.Job(ctx, k.ID)
		if err != nil {
			c.Log.Warn("look for a requeued job", "job", k.ID, "err", err)
			continue
		}
		if newest.Gen != k.Gen {
			return
		}
		sj, err := c.Slurm.Job(ctx, k.ID)
		if err != nil && !errors.Is(err, scontrol.ErrNotFound) {
			c.Log.Warn("ask Slurm about a requeued job", "job", k.ID, "err", err)
			continue
		}
		if err == nil && (!ended(sj.State) || sj.State == "COMPLETING") {
			continue
		}
		_, err = c.Store.UpdateJob(ctx, k, func(j *store.Job) error {
			if j.Phase == store.PhaseRequeued {
				j.Phase, j.Reason = store.PhaseCancelled, "cancelled before it started again"
			}
			return nil
		})
		if err != nil {
			c.Log.Error("store a cancelled job", "job", k.ID, "err", err)
			continue
		}
		c.changed.wake()
		return
	}
}

// outFailed notes that the stage-out, not the job, failed; other errors pass.
func (c *Controller) outFailed(ctx context.Context, k store.Key, err error) error {
	var final *staging.Error
	var refused *api.Error
	if !errors.As(err, &final) && !errors.As(err, &refused) {
		return err
	}
	if _, uerr := c.Store.UpdateJob(ctx, k, func(j *store.Job) error { j.OutFailed = true; return nil }); uerr != nil {
		return uerr
	}
	return err
}

// Environment files.

func (c *Controller) environmentFile(id uint32) string {
	return filepath.Join(c.EnvDir, strconv.FormatUint(uint64(id), 10))
}

// writeEnvironment leaves the job's variables for burst_buffer.lua, which copies
// them while slurmctld stands still.
func (c *Controller) writeEnvironment(j store.Job) error {
	var names []string
	for name := range j.Environment {
		names = append(names, name)
	}
	slices.Sort(names)
	var b strings.Builder
	for _, name := range names {
		if strings.ContainsAny(j.Environment[name], "\n\x00") {
			return &staging.Error{Message: fmt.Sprintf("the job's variable %s has a line break", name)}
		}
		b.WriteString(name + "=" + j.Environment[name] + "\n")
	}
	return atomicfile.Write(c.environmentFile(j.ID), []byte(b.String()), 0o640)
}

func (c *Controller) removeEnvironment(id uint32) {
	if err := os.Remove(c.environmentFile(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		c.Log.Warn("remove a job's environment", "job", id, "err", err)
	}
}

// Retention.

// retainEvery is how often old job directories are looked for.
const retainEvery = 10 * time.Minute

func (c *Controller) retain(ctx context.Context) {
	for {
		if err := errors.Join(c.forgetLost(ctx), c.removeExpired(ctx)); err != nil && ctx.Err() == nil {
			c.Log.Warn("look for old jobs", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-c.Clock.After(retainEvery):
		}
	}
}

// forgetLost tears down what Slurm does not know any more: a teardown that was
// never heard would hold its transfers for ever.
func (c *Controller) forgetLost(ctx context.Context) error {
	active, err := c.Store.ActiveJobs(ctx)
	if err != nil {
		return err
	}
	for _, j := range active {
		if c.Clock.Now().Sub(j.CreatedAt) < time.Hour {
			continue
		}
		if _, err := c.Slurm.Job(ctx, j.ID); !errors.Is(err, scontrol.ErrNotFound) {
			continue
		}
		c.Log.Warn("Slurm does not know a job any more", "job", j.ID)
		if _, err := c.teardown(ctx, api.JobCall{JobID: j.ID}); err != nil {
			return err
		}
	}
	return nil
}

// removeExpired removes the directories of jobs that ended long ago, unless a
// stage-out of theirs failed or a newer run has the directory.
func (c *Controller) removeExpired(ctx context.Context) error {
	limit := c.Clock.Now().Add(-time.Duration(c.Config.KeepJobDir))
	list, err := c.Store.ExpiredJobs(ctx, limit)
	if err != nil {
		return err
	}
	var errs []error
	for _, j := range list {
		keep, err := c.keeps(ctx, j)
		if err != nil {
			return err
		}
		if keep {
			continue
		}
		newest, err := c.Store.Job(ctx, j.ID)
		if err != nil {
			return err
		}
		if newest.Key == j.Key {
			removed := true
			for _, fs := range c.Config.FileSystems {
				if err := c.Files.Remove(ctx, fs.Mount, j.Dir); err != nil {
					errs = append(errs, err)
					removed = false
				}
			}
			if !removed {
				continue
			}
			c.Log.Info("removed a job's directory", "job", j.ID)
		}
		if _, err := c.Store.UpdateJob(ctx, j.Key, func(j *store.Job) error { j.DirRemoved = true; return nil }); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// keeps reports that a job's directory holds what is nowhere else.
func (c *Controller) keeps(ctx context.Context, j store.Job) (bool, error) {
	if j.OutFailed || j.Phase == store.PhaseStageOut || j.Phase == store.PhaseEnded {
		return true, nil
	}
	list, err := c.Store.JobTransfers(ctx, j.ID, j.Gen)
	for _, t := range list {
		if t.Kind == staging.StageOut && t.State != staging.Done {
			return true, err
		}
	}
	return false, err
}
