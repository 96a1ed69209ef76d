package compute

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	api "google.golang.org/api/compute/v1"

	"github.com/sluicehpc/sluice/sandbox/faults"
)

// instance is a VM of the project. The real service has one name space a zone; here a name is
// unique in the project, because a machine's name is its hostname on one network.
type instance struct {
	api         *api.Instance // replaced, never changed, under the server's lock
	name, zone  string
	link        string // selfLink
	image       string // of the boot disk
	address     netip.Addr
	preempted   bool
	maintenance string
	upcoming    *api.UpcomingMaintenance // or nil
	event       bool                     // a fault happens to it
	changed     chan struct{}            // closed and replaced at each change, under the server's lock

	// turn holds one token: whoever took it may start or stop the machine.
	turn chan struct{}
	// interrupt ends a start at work. Set under the server's lock.
	interrupt context.CancelFunc
	deleting  bool // a delete was accepted: nothing may start it again
	gone      bool // the machine is stopped, the address free, the name too
	starts    int  // counts starts, so that the end of an earlier machine is not taken for this one's
}

// moves are the status changes that an instance may make; "" is before and after its life.
var moves = map[string][]string{
	"":             {"PROVISIONING"},
	"PROVISIONING": {"STAGING", "STOPPING"},
	"STAGING":      {"RUNNING", "STOPPING"},
	"RUNNING":      {"STOPPING", "REPAIRING"},
	"REPAIRING":    {"PROVISIONING", "STOPPING"},
	"STOPPING":     {"TERMINATED", ""},
	"TERMINATED":   {"PROVISIONING", "STOPPING"},
}

// errMove is an illegal status change.
var errMove = errors.New("illegal status change")

// move changes the status; staying is always legal. s.mu is held.
func (in *instance) move(to string) error {
	from := in.api.Status
	if from == to {
		return nil
	}
	if !slices.Contains(moves[from], to) {
		return fmt.Errorf("%w of %s: %q to %q", errMove, in.name, from, to)
	}
	next := *in.api
	next.Status = to
	in.api = &next
	in.notify()
	return nil
}

// notify wakes who watches the instance. s.mu is held.
func (in *instance) notify() {
	close(in.changed)
	in.changed = make(chan struct{})
}

func (s *Server) hostname(in *api.Instance) string {
	if in.Hostname != "" {
		return in.Hostname
	}
	return fmt.Sprintf("%s.%s.c.%s.internal", in.Name, last(in.Zone), s.cfg.Project)
}

// takeTurn waits until nobody else starts or stops the machine.
func (in *instance) takeTurn(ctx context.Context) error {
	select {
	case <-in.turn:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (in *instance) giveTurn() { in.turn <- struct{}{} }

// start brings an instance from PROVISIONING to RUNNING. One that fails for the first time
// disappears when discard is set, and is TERMINATED otherwise.
func (s *Server) start(ctx context.Context, in *instance, discard bool) *opError {
	if err := in.takeTurn(ctx); err != nil {
		return opInternal(err)
	}
	defer in.giveTurn()

	ctx, interrupt := context.WithCancel(ctx)
	defer interrupt()
	s.mu.Lock()
	if in.deleting {
		s.mu.Unlock()
		return opCancelled(resource(in.link))
	}
	in.interrupt = interrupt
	in.preempted = false
	in.starts++
	this := in.starts
	m := s.machine(in)
	m.Ended = func() { s.machineEnded(in, this) }
	s.mu.Unlock()

	err := s.bringUp(ctx, in, m)

	s.mu.Lock()
	in.interrupt = nil
	deleting := in.deleting
	s.mu.Unlock()
	switch {
	case deleting:
		return opCancelled(resource(in.link))
	case err == nil:
		return nil
	}
	failed := *opInternal(err)
	if err := s.end(context.WithoutCancel(ctx), in, discard, stopGrace); err != nil {
		failed.message += "; " + err.Error()
	}
	return &failed
}

// bringUp does the slow part of start.
func (s *Server) bringUp(ctx context.Context, in *instance, m Machine) error {
	if delay := s.cfg.Faults.Duration(faults.ComputeInsertDelay); delay > 0 {
		select {
		case <-s.cfg.Clock.After(delay):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if failed := s.stockout(in); failed != nil {
		return failed
	}
	if err := s.moveTo(in, "STAGING"); err != nil {
		return err
	}
	if err := s.cfg.VMs.Start(ctx, m); err != nil {
		return fmt.Errorf("start machine %s: %w", m.Name, err)
	}
	return s.moveTo(in, "RUNNING")
}

func (s *Server) moveTo(in *instance, status string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := in.move(status); err != nil {
		return err
	}
	next := *in.api
	switch status {
	case "RUNNING":
		next.LastStartTimestamp = timestamp(s.now())
		close(s.runs)
		s.runs = make(chan struct{})
	case "TERMINATED":
		next.LastStopTimestamp = timestamp(s.now())
	}
	in.api = &next
	return nil
}

// stopGrace is how long a machine has to shut down when it is stopped or deleted. The real service gives about 90 seconds.
const stopGrace = 6 * time.Second

// end stops the machine and leaves the instance TERMINATED, or nowhere when discard is set. The
// caller has the turn.
func (s *Server) end(ctx context.Context, in *instance, discard bool, grace time.Duration) error {
	if in.gone {
		return nil
	}
	if err := s.moveTo(in, "STOPPING"); err != nil {
		return err
	}
	if err := s.cfg.VMs.Stop(ctx, in.name, grace); err != nil {
		return fmt.Errorf("stop machine %s: %w", in.name, err)
	}
	if !discard {
		return s.moveTo(in, "TERMINATED")
	}
	if err := s.cfg.VMs.Remove(ctx, in.name); err != nil {
		return fmt.Errorf("remove machine %s: %w", in.name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	in.gone = true
	s.addresses.free(in.address)
	delete(s.instances, in.name)
	return in.move("")
}

// remove ends an instance for good, interrupting a start at work.
func (s *Server) remove(ctx context.Context, in *instance) *opError {
	if err := in.takeTurn(ctx); err != nil {
		return opInternal(err)
	}
	defer in.giveTurn()
	if err := s.end(ctx, in, true, stopGrace); err != nil {
		return opInternal(err)
	}
	return nil
}

// markDeleting accepts a delete. s.mu is held.
func (s *Server) markDeleting(in *instance) error {
	in.deleting = true
	if in.interrupt != nil {
		in.interrupt()
	}
	return in.move("STOPPING")
}

// machineEnded is told by VMs that start number this of the machine is over.
func (s *Server) machineEnded(in *instance, this int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || in.deleting || in.starts != this {
		return
	}
	s.running.Go(func() {
		if in.takeTurn(s.ctx) != nil {
			return
		}
		defer in.giveTurn()
		s.mu.Lock()
		over := in.deleting || in.starts != this || in.api.Status != "RUNNING"
		s.mu.Unlock()
		if !over {
			// A machine that will not stop stays STOPPING: a delete tries again.
			_ = s.end(s.ctx, in, false, stopGrace)
		}
	})
}

// machine is what VMs gets to know. s.mu is held.
func (s *Server) machine(in *instance) Machine {
	mt := machineTypes[last(in.api.MachineType)]
	return Machine{
		ID:          in.api.Id,
		Name:        in.name,
		Hostname:    s.hostname(in.api),
		Zone:        in.zone,
		Address:     in.address,
		Image:       in.image,
		MachineType: last(in.api.MachineType),
		CPUs:        mt.cpus,
		MemoryMB:    mt.memoryMB,
		NewDisk:     in.starts == 1,
	}
}
