package agent

import (
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/prolog"
)

// maxNext bounds what sluiced may ask for, so that a node is never silent for long.
const maxNext = 5 * time.Minute

// report tells sluiced how the node is: regularly, and at once when something changes.
func (a *Agent) report(ctx context.Context) {
	again := time.Duration(0)
	silent := true // sluiced did not answer the last report
	for {
		next, err := a.reportOnce(ctx)
		if ctx.Err() != nil {
			return
		}
		said := ""
		if err != nil {
			said = err.Error()
			again = min(max(2*again, a.pace.again/16), a.pace.again)
			next = again
		} else {
			again = 0
			if silent {
				poke(a.kept)
			}
		}
		silent = err != nil
		a.mu.Lock()
		if said != a.lastError {
			if err != nil {
				a.log.Warn("report to sluiced", "error", err)
			} else {
				a.log.Info("sluiced answers again")
			}
		}
		a.lastError = said
		a.mu.Unlock()
		// A tenth of jitter: nodes that started together do not report together.
		if !a.pause(ctx, next-time.Duration(rand.Int64N(int64(next)/10+1)), a.changed) {
			return
		}
	}
}

// reportOnce sends one report and applies the answer; it returns how soon sluiced wants the next.
func (a *Agent) reportOnce(ctx context.Context) (time.Duration, error) {
	a.mu.Lock()
	failing := a.client == nil || a.lastError != ""
	a.mu.Unlock()
	if failing {
		// What was true once may not be any more: the certificate, the address.
		if err := a.connect(ctx); err != nil {
			return 0, err
		}
	}
	a.mu.Lock()
	generation, readyAt := a.generation, a.state.ReadyAt
	r := api.NodeReport{
		BootID: a.bootID, Version: a.config.Version,
		StartedAt: a.startedAt, ReadyAt: readyAt, Mounts: []api.MountState{}, Trouble: a.otherTrouble(),
	}
	for _, m := range a.list() {
		r.Mounts = append(r.Mounts, api.MountState{Name: m.fs.Name, Source: m.fs.Source, Dir: m.fs.Dir, State: string(m.state), Detail: m.detail})
	}
	a.mu.Unlock()

	var answer api.ReportAnswer
	if err := a.call(ctx, a.pace.call, api.OpAgentReport, r, &answer); err != nil {
		if api.CodeOf(err) == api.CodeUnenrolled {
			a.mu.Lock()
			a.unenrolled = true
			a.mu.Unlock()
		}
		return 0, err
	}
	a.allowMetadata(answer.OpenMetadata)
	a.apply(ctx, answer.FileSystems)
	a.mu.Lock()
	if generation == a.generation {
		a.cause = answer.Cause
	}
	a.mu.Unlock()
	if readyAt != "" {
		a.reported.open()
	}
	a.renew(ctx)
	next := a.pace.report
	if s := answer.NextSeconds; s > 0 && s < maxNext.Seconds() {
		next = time.Duration(s * float64(time.Second))
	}
	return next, nil
}

var errNoClient = errors.New("this VM's agent does not know its sluiced yet")

// call calls sluiced.
func (a *Agent) call(ctx context.Context, wait time.Duration, op string, in, out any) error {
	a.mu.Lock()
	client := a.client
	a.mu.Unlock()
	if client == nil {
		return errNoClient
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	return client.Call(ctx, op, in, out)
}

// keep notes a moment of a job until sluiced has accepted it.
func (a *Agent) keep(call api.PrologCall, event string, at time.Time) {
	m := prolog.Moment{UID: call.UID, JobEvent: api.JobEvent{JobID: call.JobID, Node: call.Node, Event: event, At: api.FormatTime(at)}}
	if err := prolog.Keep(a.spoolDir(), m); err != nil {
		a.log.Error("keep a moment for sluiced", "job", call.JobID, "event", event, "error", err)
	}
	poke(a.kept)
}

// sendKept sends kept moments, the oldest first, and removes what sluiced has accepted.
func (a *Agent) sendKept(ctx context.Context) {
	for a.identified.wait(ctx) {
		wait := a.pace.spool
		if err := a.sendAll(ctx); err != nil {
			wait = a.pace.again // the report says why
		}
		if !a.pause(ctx, wait, a.kept) {
			return
		}
	}
}

func (a *Agent) sendAll(ctx context.Context) error {
	files, err := prolog.Kept(a.spoolDir())
	if err != nil {
		return err
	}
	for _, f := range files {
		m, err := prolog.ReadMoment(f)
		if _, noFile := errors.AsType[*fs.PathError](err); noFile {
			return err
		}
		if err == nil {
			err = a.send(ctx, m)
		} else {
			a.log.Error("drop an unreadable moment", "error", err)
			err = nil
		}
		if err == nil {
			err = os.Remove(f)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// send returns nil when the moment need not be sent again.
func (a *Agent) send(ctx context.Context, m prolog.Moment) error {
	if m.Node == "" {
		a.mu.Lock()
		m.Node = a.state.Identity.Node
		a.mu.Unlock()
	}
	err := a.call(ctx, a.pace.call, api.OpAgentJob, m.JobEvent, nil)
	if isRefusal(err) && (api.CodeOf(err) == api.CodeBadRequest || api.CodeOf(err) == api.CodeNotFound) {
		// Sending it again cannot help, and would hold up the others.
		a.log.Warn("sluiced does not want a moment", "job", m.JobID, "event", m.Event, "error", err)
		return nil
	}
	return err
}

// isRefusal tells a refusal in sluiced's words from a sluiced that is away.
func isRefusal(err error) bool {
	_, ok := errors.AsType[*api.Error](err)
	return ok
}
