package lustre

import (
	"context"
	"fmt"
	"path"
	"syscall"

	api "github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/sandbox/faults"
)

// conduct is what I/O does on an instance in some state.
type conduct int

const (
	serves conduct = iota
	stalls         // until the state is another one
	fails          // with EIO
)

// effect is what an instance's state means.
type effect struct {
	io      conduct
	mounts  bool // new mounts are served; else they get EIO
	changes bool // imports, exports and updates are taken; else FAILED_PRECONDITION
	deaf    bool // nothing listens at its address
	reason  string
}

// effects are those of the states. That I/O stalls while an instance is upgraded is documented; the others follow from
// what the state's description says of the servers.
var effects = map[api.State]effect{
	api.StateActive:    {io: serves, mounts: true, changes: true},
	api.StateUpdating:  {io: serves, mounts: true},
	api.StateCreating:  {io: stalls, deaf: true},
	api.StateUpgrading: {io: stalls},
	api.StateRepairing: {io: stalls},
	api.StateStopped:   {io: stalls, deaf: true},
	api.StateSuspended: {io: fails, reason: "the Cloud KMS key of the instance cannot be used"},
	api.StateDeleting:  {io: fails, deaf: true},
}

// id is the last part of the instance's name.
func (i *instance) id() string { return path.Base(i.Name) }

// state is the instance's, or the one that a fault puts it into.
func (s *Server) state(i *instance) api.State {
	if forced := s.options.Faults.State(i.id()); forced != "" && i.State == api.StateActive {
		return api.State(forced)
	}
	return i.State
}

// changeable refuses what the instance's state does not allow. s.mu is held.
func (s *Server) changeable(i *instance) error {
	if state := s.state(i); !effects[state].changes {
		return &rpcError{codeFailedPrecondition, fmt.Sprintf("%s is %s", i.Name, state)}
	}
	return nil
}

// pass waits while the instance's servers do not answer a transfer, and fails when they answer with an error.
func (s *Server) pass(ctx context.Context, inst *instance) error {
	f := s.options.Faults
	for {
		changed := f.Changed()
		s.mu.Lock()
		e := effects[s.state(inst)]
		s.mu.Unlock()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case f.Hits(faults.LustreEIO, inst.id(), ""), e.io == fails:
			return syscall.EIO
		case !f.Hits(faults.LustreHang, inst.id(), "") && e.io == serves:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// listen opens the instance's address while its state has one, until the instance or the server ends.
func (s *Server) listen(inst *instance) {
	for {
		changed := s.options.Faults.Changed()
		s.mu.Lock()
		gone := s.ctx.Err() != nil || s.instances[inst.Name] != inst
		deaf := effects[s.state(inst)].deaf
		if gone || deaf {
			inst.stopListening()
		}
		closed := inst.listener == nil
		s.mu.Unlock()
		switch {
		case gone:
			return
		case closed && !deaf:
			if err := s.openAddress(inst); err != nil {
				s.options.Log.Error("listen", "instance", inst.Name, "error", err)
			}
		}
		select {
		case <-changed:
		case <-inst.gone:
		case <-s.ctx.Done():
		}
	}
}
