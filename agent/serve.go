package agent

import (
	"context"
	"encoding/json"
	"errors"
	"strings"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/health"
	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/prolog"
)

// handle answers one request on the agent's socket. Everybody on the VM may call.
func (a *Agent) handle(ctx context.Context, peer local.Peer, req api.Request) (any, error) {
	switch req.Op {
	case api.OpProlog, api.OpEpilog:
		if peer.UID != 0 {
			return nil, api.Errorf(api.CodeDenied, "%s is for root, as whom slurmd runs its hooks", req.Op)
		}
		var call api.PrologCall
		if err := json.Unmarshal(req.Body, &call); err != nil {
			return nil, api.Errorf(api.CodeBadRequest, "%s: %v", req.Op, err)
		}
		if call.JobID == 0 {
			return nil, api.Errorf(api.CodeBadRequest, "%s without a job id", req.Op)
		}
		if req.Op == api.OpProlog {
			return a.jobComes(call), nil
		}
		a.jobLeaves(call)
		return api.Ack{}, nil
	}
	if forUsers(req.Op) {
		return a.forward(ctx, peer, req)
	}
	return nil, api.Errorf(api.CodeBadRequest, "an agent does not know the operation %q", req.Op)
}

// jobComes notes a job's first Prolog and answers whether the node is ready.
func (a *Agent) jobComes(call api.PrologCall) api.Readiness {
	at := a.clock.Now()
	a.mu.Lock()
	uid, known := a.state.Jobs[call.JobID]
	if !known || uid != call.UID {
		a.state.Jobs[call.JobID] = call.UID
		a.save()
	}
	r := api.Readiness{Reason: a.trouble()}
	if r.Ready = r.Reason == ""; !r.Ready {
		// Without sluiced's word it is nobody's fault.
		if r.Cause = a.cause; r.Cause == "" {
			r.Cause = string(health.Unknown)
		}
	}
	a.mu.Unlock()
	if !known {
		a.keep(call, prolog.EventProlog, at)
	}
	return r
}

func (a *Agent) jobLeaves(call api.PrologCall) {
	at := a.clock.Now()
	a.mu.Lock()
	if _, known := a.state.Jobs[call.JobID]; known {
		delete(a.state.Jobs, call.JobID)
		a.save()
	}
	a.mu.Unlock()
	a.keep(call, prolog.EventEpilog, at)
}

// forUsers tells whether a user may have the operation forwarded; sluiced
// judges what of it that user may see.
func forUsers(op string) bool {
	return strings.HasPrefix(op, "job.") || strings.HasPrefix(op, "transfer.") || op == api.OpNodeList || op == api.OpNodeShow || op == api.OpStatus
}

// forward passes a user's request on to sluiced with the uid that the kernel gave.
func (a *Agent) forward(ctx context.Context, peer local.Peer, req api.Request) (any, error) {
	if err := a.vouch(ctx, peer.UID); err != nil {
		return nil, err
	}
	var out json.RawMessage
	err := a.call(ctx, a.pace.user, api.OpAgentUser, api.UserCall{UID: peer.UID, Op: req.Op, Body: req.Body}, &out)
	if err != nil && !isRefusal(err) {
		return nil, &api.Error{Code: api.CodeUnavailable, Message: "the controller cannot be reached: " + err.Error(),
			Hint: "ask an admin whether sluiced runs there (systemctl status sluiced); jobs and transfers go on meanwhile or wait"}
	}
	if err != nil {
		return nil, err
	}
	return out, nil
}

// vouch says whether this VM may speak for the uid: a compute node for who has
// a job there, a login VM for people, none for root and SlurmUser. sluiced
// judges it again.
func (a *Agent) vouch(ctx context.Context, uid uint32) error {
	if uid == 0 {
		return &api.Error{Code: api.CodeDenied, Message: "no agent speaks for root",
			Hint: "ask as yourself, or as root on the controller"}
	}
	isSlurm, err := a.isSlurmUser(ctx, uid)
	if err != nil {
		return api.Errorf(api.CodeUnavailable, "who is %s on this VM: %v", a.config.SlurmUser, err)
	}
	if isSlurm {
		return api.Errorf(api.CodeDenied, "no agent speaks for %s", a.config.SlurmUser)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch a.state.Identity.Role {
	case api.RoleCompute:
		for _, owner := range a.state.Jobs {
			if owner == uid {
				return nil
			}
		}
		return &api.Error{Code: api.CodeDenied, Message: "you have no job on this node now", Hint: "ask on a login VM"}
	case api.RoleLogin:
		if uid >= a.config.UIDMin && uid != prolog.NoUID {
			return nil
		}
		return api.Errorf(api.CodeDenied, "uid %d is not a person's: those begin at %d", uid, a.config.UIDMin)
	case api.RoleController:
		return &api.Error{Code: api.CodeDenied, Message: "the controller's agent speaks for nobody", Hint: "sluiced itself answers here, at " + api.SluicedSocket}
	}
	return api.Errorf(api.CodeUnavailable, "%v", errNoClient)
}

// isSlurmUser asks getent until it has answered once. uid is not 0.
func (a *Agent) isSlurmUser(ctx context.Context, uid uint32) (bool, error) {
	a.mu.Lock()
	known, slurm := a.slurmKnown, a.slurmUID
	a.mu.Unlock()
	if known {
		return uid == slurm, nil
	}
	u, err := a.user(ctx, a.config.SlurmUser)
	if err != nil && !errors.Is(err, users.ErrUnknown) {
		return false, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.slurmKnown, a.slurmUID = true, u.UID
	return uid == u.UID, nil
}
