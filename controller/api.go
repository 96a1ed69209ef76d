package controller

import (
	"context"
	"crypto/ecdsa"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/trust"
)

// Caller is who asks, as the kernel or an agent says.
type Caller struct {
	UID uint32
	// Slurm is set for SlurmUser on the local socket.
	Slurm bool
	// Agent is an agent itself, over HTTPS, as its certificate says; else nil.
	Agent *Peer
	// Local is set on sluiced's own socket: root there is this machine's root.
	Local bool
}

// Peer is an agent that calls.
type Peer struct {
	trust.Agent
	key *ecdsa.PublicKey
}

// String says who it is.
func (w Caller) String() string {
	if w.Agent != nil {
		return "the agent of " + w.Agent.Node
	}
	return fmt.Sprintf("uid %d", w.UID)
}

func (w Caller) root() bool { return w.Local && w.UID == 0 }

// mayRead reports whether what belongs to uid may be shown.
func (w Caller) mayRead(uid uint32) bool {
	return w.root() || !w.Slurm && w.Agent == nil && w.UID == uid
}

// operation is one entry of the API: who may call it, and what it does.
type operation struct {
	who func(Caller) bool
	do  func(c *Controller, ctx context.Context, w Caller, body json.RawMessage) (any, error)
}

func slurmOnly(w Caller) bool { return w.root() || w.Local && w.Slurm }
func rootOnly(w Caller) bool  { return w.root() }
func agentOnly(w Caller) bool { return w.Agent != nil }
func people(w Caller) bool    { return w.Agent == nil }

func call[T any](f func(*Controller, context.Context, T) (any, error)) func(*Controller, context.Context, Caller, json.RawMessage) (any, error) {
	return func(c *Controller, ctx context.Context, _ Caller, body json.RawMessage) (any, error) {
		var in T
		if err := decode(body, &in); err != nil {
			return nil, err
		}
		return f(c, ctx, in)
	}
}

func callAs[T any](f func(*Controller, context.Context, Caller, T) (any, error)) func(*Controller, context.Context, Caller, json.RawMessage) (any, error) {
	return func(c *Controller, ctx context.Context, w Caller, body json.RawMessage) (any, error) {
		var in T
		if err := decode(body, &in); err != nil {
			return nil, err
		}
		return f(c, ctx, w, in)
	}
}

func decode(body json.RawMessage, v any) error {
	if len(body) == 0 {
		return nil
	}
	if err := json.Unmarshal(body, v); err != nil {
		return api.Errorf(api.CodeBadRequest, "the request's body is not what the operation takes: %v", err)
	}
	return nil
}

func nothing(f func(*Controller, context.Context, Caller) (any, error)) func(*Controller, context.Context, Caller, json.RawMessage) (any, error) {
	return func(c *Controller, ctx context.Context, w Caller, _ json.RawMessage) (any, error) {
		return f(c, ctx, w)
	}
}

// operations are all that sluiced answers. It is filled in init because
// agentUser looks into it.
var operations map[string]operation

func init() {
	operations = map[string]operation{
		api.OpJobProcess: {slurmOnly, call((*Controller).jobProcess)},
		api.OpSetup:      {slurmOnly, call((*Controller).setup)},
		api.OpDataIn:     {slurmOnly, call((*Controller).dataIn)},
		api.OpPaths:      {slurmOnly, call((*Controller).paths)},
		api.OpPreRun:     {slurmOnly, call((*Controller).preRun)},
		api.OpPostRun:    {slurmOnly, call((*Controller).postRun)},
		api.OpDataOut:    {slurmOnly, call((*Controller).dataOut)},
		api.OpTeardown:   {slurmOnly, call((*Controller).teardown)},
		api.OpBBStatus:   {slurmOnly, call((*Controller).bbStatus)},

		api.OpNodeResume:     {slurmOnly, call((*Controller).resume)},
		api.OpNodeSuspend:    {slurmOnly, call((*Controller).suspend)},
		api.OpNodeResumeFail: {slurmOnly, call((*Controller).resumeFail)},

		api.OpAgentRenew:  {agentOnly, callAs((*Controller).agentRenew)},
		api.OpAgentKeys:   {agentOnly, callAs((*Controller).agentKeys)},
		api.OpAgentReport: {agentOnly, callAs((*Controller).agentReport)},
		api.OpAgentJob:    {agentOnly, callAs((*Controller).agentJob)},
		api.OpAgentUser:   {agentOnly, callAs((*Controller).agentUser)},
		api.OpAgentToken:  {agentOnly, callAs((*Controller).agentToken)},

		api.OpJobShow:      {people, callAs((*Controller).jobShow)},
		api.OpJobList:      {people, callAs((*Controller).jobList)},
		api.OpTransferShow: {people, callAs((*Controller).transferShow)},
		api.OpTransferList: {people, callAs((*Controller).transferList)},
		api.OpNodeList:     {people, nothing((*Controller).nodeList)},
		api.OpNodeShow:     {people, call((*Controller).nodeShow)},
		api.OpNodeReenrol:  {rootOnly, callAs((*Controller).nodeReenrol)},
		api.OpStatus:       {people, nothing((*Controller).status)},
	}
}

// Handle answers one call of w.
func (c *Controller) Handle(ctx context.Context, w Caller, req api.Request) (any, error) {
	op, ok := operations[req.Op]
	if !ok {
		return nil, api.Errorf(api.CodeBadRequest, "unknown operation %.64q", req.Op)
	}
	if !op.who(w) {
		return nil, api.Errorf(api.CodeDenied, "%s may not call %s here", w, req.Op)
	}
	return op.do(c, ctx, w, req.Body)
}

// HandleLocal is Handle for the Unix socket.
func (c *Controller) HandleLocal(ctx context.Context, p local.Peer, req api.Request) (any, error) {
	return c.Handle(ctx, Caller{UID: p.UID, Local: true, Slurm: p.UID == c.SlurmUser.UID}, req)
}

// uidMin is the first uid of people (login.defs' UID_MIN everywhere).
const uidMin = 1000

// agentUser is a user's call that a VM's agent vouches for: a login VM's for
// every person, a compute node's only for those who have a job there now, and
// nobody's for root or SlurmUser.
func (c *Controller) agentUser(ctx context.Context, w Caller, in api.UserCall) (any, error) {
	node := w.Agent.Node
	if in.UID < uidMin || in.UID == c.SlurmUser.UID {
		return nil, api.Errorf(api.CodeDenied, "no agent may speak for uid %d", in.UID)
	}
	switch w.Agent.Role {
	case api.RoleLogin:
	case api.RoleCompute:
		active, err := c.Store.ActiveJobs(ctx)
		if err != nil {
			return nil, err
		}
		here := false
		for _, j := range active {
			here = here || j.UID == in.UID && slices.Contains(j.Nodes, node) && j.EndedAt.IsZero()
		}
		if !here {
			return nil, api.Errorf(api.CodeDenied, "uid %d has no job on node %s", in.UID, node)
		}
	default:
		return nil, api.Errorf(api.CodeDenied, "the agent of a %s VM speaks for nobody", w.Agent.Role)
	}
	return c.Handle(ctx, Caller{UID: in.UID}, api.Request{Version: api.Version, Op: in.Op, Body: in.Body})
}
