package compute

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	api "google.golang.org/api/compute/v1"

	"github.com/sluicehpc/sluice/sandbox/faults"
)

// happenings are the faults that happen to a running VM.
var happenings = []struct {
	row string
	do  func(*Server, context.Context, *instance, faults.Hit)
}{
	{faults.ComputeHostError, (*Server).hostError},
	{faults.ComputePreempt, (*Server).preempt},
	{faults.ComputeMaintenance, (*Server).maintain},
}

// watchFaults makes happen what is set for VMs, until the server is closed.
func (s *Server) watchFaults() {
	for s.ctx.Err() == nil {
		changed := s.cfg.Faults.Changed()
		s.mu.Lock()
		runs := s.runs
		for _, name := range slices.Sorted(maps.Keys(s.instances)) {
			s.happen(s.instances[name])
		}
		s.mu.Unlock()
		select {
		case <-changed:
		case <-runs:
		case <-s.ctx.Done():
		}
	}
}

// happen starts what is set for a VM, one thing at a time. s.mu is held.
func (s *Server) happen(in *instance) {
	if s.closed || in.deleting || in.event || in.api.Status != "RUNNING" {
		return
	}
	for _, h := range happenings {
		hit, ok := s.cfg.Faults.Take(h.row, in.name)
		if !ok {
			continue
		}
		in.event = true
		s.running.Go(func() {
			h.do(s, s.ctx, in, hit)
			s.mu.Lock()
			defer s.mu.Unlock()
			in.event = false
			s.happen(in) // what came meanwhile
		})
		return
	}
}

// systemOperation records what the service did by itself, as zoneOperations shows it. s.mu is held.
func (s *Server) systemOperation(in *instance, kind, message string) {
	op := s.newOperation("system", "zones/"+in.zone, kind, in.link, in.api.Id)
	next := *op.api
	next.OperationType, next.StatusMessage = kind, message
	next.Status, next.Progress = "DONE", 100
	next.StartTime, next.EndTime = next.InsertTime, next.InsertTime
	op.api = &next
	close(op.done)
}

// whileRunning waits for d; false: the VM does not run any more.
func (s *Server) whileRunning(ctx context.Context, in *instance, d time.Duration) bool {
	over := s.cfg.Clock.After(d)
	for {
		s.mu.Lock()
		running, changed := in.api.Status == "RUNNING" && !in.deleting, in.changed
		s.mu.Unlock()
		if !running {
			return false
		}
		select {
		case <-over:
			return true
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// shutDown ends a running VM by the service's own will, and records that as an operation of this kind, if any. A delete cuts its grace short.
func (s *Server) shutDown(ctx context.Context, in *instance, kind, message string, grace time.Duration, discard bool) (done bool) {
	if in.takeTurn(ctx) != nil {
		return false
	}
	defer in.giveTurn()
	ctx, interrupt := context.WithCancel(ctx)
	defer interrupt()
	s.mu.Lock()
	if in.deleting || in.api.Status != "RUNNING" {
		s.mu.Unlock()
		return false
	}
	if kind != "" {
		s.systemOperation(in, kind, message)
	}
	in.interrupt = interrupt
	in.deleting = discard
	s.mu.Unlock()
	err := s.end(ctx, in, discard, grace)
	s.mu.Lock()
	in.interrupt = nil
	s.mu.Unlock()
	return err == nil // a machine that will not stop stays STOPPING: a delete tries again
}

// acpiGrace is how long a preempted VM has to shut down (Compute Engine, "Preemption process").
const acpiGrace = 30 * time.Second

// preempt takes a VM's host away.
func (s *Server) preempt(ctx context.Context, in *instance, hit faults.Hit) {
	s.mu.Lock()
	in.preempted = true
	in.notify()
	s.systemOperation(in, "compute.instances.preempted", "Instance was preempted.")
	var notice time.Duration
	sch := in.api.Scheduling
	if d := sch.PreemptionNoticeDuration; d != nil {
		notice = time.Duration(d.Seconds)*time.Second + time.Duration(d.Nanos)
	}
	discard := sch.InstanceTerminationAction == "DELETE"
	s.mu.Unlock()
	hit.Note(in.name, fmt.Sprintf("preempted: told at once, asked to shut down after %v", notice))
	if !s.whileRunning(ctx, in, notice) {
		return
	}
	grace := hit.Duration(acpiGrace)
	if s.shutDown(ctx, in, "", "", grace, discard) {
		what := "TERMINATED"
		if discard {
			what = "deleted"
		}
		hit.Note(in.name, "preempted: "+what)
	}
}

// maintain takes a VM's host out of service after a notice.
func (s *Server) maintain(ctx context.Context, in *instance, hit faults.Hit) {
	s.mu.Lock()
	notice := time.Minute
	if len(in.api.GuestAccelerators) > 0 {
		notice = time.Hour
	}
	notice = hit.Duration(notice)
	sch := in.api.Scheduling
	event := sch.OnHostMaintenance + "_ON_HOST_MAINTENANCE"
	start := s.now().Add(notice)
	s.announceMaintenance(in, event, &api.UpcomingMaintenance{
		CanReschedule: false, Type: "SCHEDULED", MaintenanceStatus: "PENDING",
		WindowStartTime: start.UTC().Format(time.RFC3339), LatestWindowStartTime: start.UTC().Format(time.RFC3339),
		WindowEndTime: start.Add(4 * time.Hour).UTC().Format(time.RFC3339),
	})
	s.mu.Unlock()
	hit.Note(in.name, fmt.Sprintf("%s announced, in %v", event, notice))
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.announceMaintenance(in, "NONE", nil)
	}()
	if !s.whileRunning(ctx, in, notice) {
		return
	}
	s.mu.Lock()
	ongoing := *in.upcoming
	ongoing.MaintenanceStatus = "ONGOING"
	s.announceMaintenance(in, event, &ongoing)
	s.mu.Unlock()
	if sch.OnHostMaintenance == "MIGRATE" {
		s.mu.Lock()
		s.systemOperation(in, "compute.instances.migrateOnHostMaintenance", "Instance migrated during Compute Engine maintenance.")
		s.mu.Unlock()
		hit.Note(in.name, "migrated")
		return
	}
	if !s.shutDown(ctx, in, "compute.instances.terminateOnHostMaintenance", "Instance terminated during Compute Engine maintenance.", stopGrace, false) {
		return
	}
	hit.Note(in.name, "ended for maintenance")
	s.restart(ctx, in, hit)
}

// announceMaintenance sets what the metadata server and the API tell. s.mu is held.
func (s *Server) announceMaintenance(in *instance, event string, upcoming *api.UpcomingMaintenance) {
	in.maintenance, in.upcoming = event, upcoming
	next := *in.api
	next.ResourceStatus = nil
	if upcoming != nil {
		next.ResourceStatus = &api.ResourceStatus{UpcomingMaintenance: upcoming}
	}
	in.api = &next
	in.notify()
}

// hostError kills a VM.
func (s *Server) hostError(ctx context.Context, in *instance, hit faults.Hit) {
	if in.takeTurn(ctx) != nil {
		return
	}
	s.mu.Lock()
	if in.deleting || in.api.Status != "RUNNING" {
		s.mu.Unlock()
		in.giveTurn()
		return
	}
	s.systemOperation(in, "compute.instances.hostError", "Instance terminated by Compute Engine.")
	again := *in.api.Scheduling.AutomaticRestart
	s.mu.Unlock()
	hit.Note(in.name, "the host failed")
	var err error
	if again {
		if err = s.moveTo(in, "REPAIRING"); err == nil {
			err = s.cfg.VMs.Stop(ctx, in.name, 0)
		}
	} else {
		err = s.end(ctx, in, false, 0)
	}
	in.giveTurn()
	if err == nil {
		s.restart(ctx, in, hit)
	}
}

// restart starts a VM again that the service has ended, where the instance wants that.
func (s *Server) restart(ctx context.Context, in *instance, hit faults.Hit) {
	s.mu.Lock()
	again := *in.api.Scheduling.AutomaticRestart && !in.deleting && (in.api.Status == "REPAIRING" || in.api.Status == "TERMINATED")
	if again {
		again = in.move("PROVISIONING") == nil
	}
	if again {
		s.systemOperation(in, "compute.instances.automaticRestart", "Instance was automatically restarted.")
	}
	s.mu.Unlock()
	if !again {
		return
	}
	if failed := s.start(ctx, in, false); failed != nil {
		hit.Note(in.name, "not restarted: "+failed.Error())
		return
	}
	hit.Note(in.name, "restarted")
}
