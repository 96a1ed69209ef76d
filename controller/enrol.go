package controller

import (
	"context"
	"crypto/ecdsa"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/remote"
	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/controller/store"
	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/compute"
	"github.com/sluicehpc/sluice/nodes"
	"github.com/sluicehpc/sluice/policy"
	"github.com/sluicehpc/sluice/trust"
	"github.com/sluicehpc/sluice/trust/idtoken"
)

// Identity verifies the identity tokens of VMs; *idtoken.Verifier is it.
type Identity interface {
	Verify(ctx context.Context, token, audience string) (idtoken.Instance, error)
}

// Audit keeps decisions for good; *policy.Audit is it. What may not go unnoticed
// does not happen when Write fails.
type Audit interface {
	Write(policy.Entry) error
}

// Compute is what the controller needs of Compute Engine; *compute.Client is it.
type Compute interface {
	nodes.Compute
	Get(ctx context.Context, name string) (compute.Instance, error)
}

// The agent's names of the instance attributes that sluiced gives its VMs. What
// stands in them is no secret: every process on a VM can read them.
const (
	attributeRole        = "sluice-role"
	attributeController  = "sluice-controller"
	attributeFingerprint = "sluice-fingerprint"
)

const (
	// maxLookups is how many VMs that enrol Compute Engine is asked about at a time.
	maxLookups = 16
	// createdWithin is how far apart the token's and the API's creation times may
	// be: the token has whole seconds.
	createdWithin = time.Second
	// goneEvery is how often the VMs that have enrolled are compared with the project's.
	goneEvery = 30 * time.Second
	// A refusal that repeats itself is written down again only after auditAgain, and
	// in that time no more than maxWritten of one caller: everybody in the network
	// can call, with new words every time.
	auditAgain  = time.Hour
	maxWritten  = 20
	maxRefusals = 10000
)

// enrolments are the VMs that have certificates, and those that got none.
type enrolments struct {
	lookups  chan struct{} // capacity maxLookups
	deciding sync.Mutex    // held while a VM's enrolment changes; taken before mu

	mu      sync.Mutex                 // guards what follows
	known   map[string]store.Enrolment // by instance
	refused map[string]*refusal        // by node; where no node is proved, by "address …"
}

type refusal struct {
	api.Refusal
	proved  bool // that it is about a VM of that name
	audited time.Time
	written int       // how often, since
	since   time.Time // then
}

func newEnrolments() *enrolments {
	return &enrolments{lookups: make(chan struct{}, maxLookups), known: map[string]store.Enrolment{}, refused: map[string]*refusal{}}
}

func (e *enrolments) load(ctx context.Context, s *store.Store) error {
	list, err := s.Enrolments(ctx)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, v := range list {
		e.known[v.Instance] = v
	}
	return nil
}

// nodes returns what is known of the nodes' VMs and of what was refused to them.
func (e *enrolments) nodes() (map[string]*api.Enrolment, map[string]*api.Refusal) {
	e.mu.Lock()
	defer e.mu.Unlock()
	enrolled, refused := map[string]*api.Enrolment{}, map[string]*api.Refusal{}
	for _, v := range e.known {
		enrolled[v.Node] = &api.Enrolment{Instance: v.Instance, EnrolledAt: api.FormatTime(v.EnrolledAt), Until: api.FormatTime(v.Until), KeySHA256: v.Key}
	}
	for who, r := range e.refused {
		if r.proved {
			copied := r.Refusal
			refused[who] = &copied
		}
	}
	return enrolled, refused
}

// Enrol gives a VM a certificate for its agent's key, if its identity token and
// Compute Engine say that it is a VM of this cluster, and no other key of that
// VM got one before. from is the caller's address.
func (c *Controller) Enrol(ctx context.Context, from string, req api.Request) (any, error) {
	var in api.EnrolRequest
	if err := decode(req.Body, &in); err != nil {
		return nil, err
	}
	key, keyHash, err := trust.ParseRequest(in.Request)
	if err != nil {
		return nil, api.Errorf(api.CodeBadRequest, "%v", err)
	}
	claimed, err := c.Identity.Verify(ctx, in.Token, trust.Audience(c.Authority.Fingerprint(), keyHash))
	if errors.Is(err, idtoken.ErrUnavailable) {
		return nil, api.Errorf(api.CodeUnavailable, "%v", err)
	}
	if err != nil {
		return nil, c.refuse(from, "", err)
	}
	a, err := c.member(ctx, claimed)
	if api.CodeOf(err) == api.CodeUnavailable {
		return nil, err
	}
	if err != nil {
		name := claimed.Name
		if claimed.Project != c.Config.Project {
			name = "" // of somebody else's project: it says nothing about our VM of that name
		}
		return nil, c.refuse(from, name, err)
	}
	return c.enrolMember(ctx, from, a, key, keyHash)
}

// member says who the VM of a genuine token is in this cluster. An error is a
// refusal, unless its code is CodeUnavailable.
func (c *Controller) member(ctx context.Context, claimed idtoken.Instance) (trust.Agent, error) {
	if claimed.Project != c.Config.Project || claimed.Zone != c.Config.Zone {
		return trust.Agent{}, fmt.Errorf("it is a VM of project %s in zone %s, not of this cluster's", claimed.Project, claimed.Zone)
	}
	select {
	case c.enrolled.lookups <- struct{}{}:
		defer func() { <-c.enrolled.lookups }()
	case <-ctx.Done():
		return trust.Agent{}, api.Errorf(api.CodeUnavailable, "%v", ctx.Err())
	}
	vm, err := c.Compute.Get(ctx, claimed.Name)
	if gcp.IsNotFound(err) {
		return trust.Agent{}, fmt.Errorf("there is no VM %s", claimed.Name)
	}
	if err != nil {
		return trust.Agent{}, api.Errorf(api.CodeUnavailable, "%v", err)
	}
	role := api.Role(vm.Metadata[attributeRole])
	_, isNode := c.nodes.Node(vm.Name)
	switch {
	case strconv.FormatUint(vm.ID, 10) != claimed.ID || vm.Created.Sub(claimed.Created).Abs() > createdWithin:
		return trust.Agent{}, fmt.Errorf("the VM %s is another one today: it was deleted and made anew", claimed.Name)
	case vm.Labels[nodes.ClusterLabel] != c.Config.Cluster:
		return trust.Agent{}, fmt.Errorf("the VM %s has no label %s=%s", claimed.Name, nodes.ClusterLabel, c.Config.Cluster)
	case vm.Status == "PROVISIONING" || vm.Status == "STAGING":
		return trust.Agent{}, api.Errorf(api.CodeUnavailable, "Compute Engine says that the VM %s is %s", claimed.Name, vm.Status)
	case vm.Status != "RUNNING":
		return trust.Agent{}, fmt.Errorf("Compute Engine says that the VM %s is %s", claimed.Name, vm.Status)
	case !role.Valid():
		return trust.Agent{}, fmt.Errorf("the VM %s has the attribute %s=%q, want controller, login or compute", claimed.Name, attributeRole, role)
	case isNode != (role == api.RoleCompute):
		return trust.Agent{}, fmt.Errorf("the VM %s has the attribute %s=%s, and sluice.yaml says otherwise", claimed.Name, attributeRole, role)
	}
	return trust.Agent{Cluster: c.Config.Cluster, Role: role, Instance: claimed.ID, Node: vm.Name}, nil
}

// enrolMember gives a member its certificate unless another key of the same VM has one.
func (c *Controller) enrolMember(ctx context.Context, from string, a trust.Agent, key *ecdsa.PublicKey, keyHash string) (any, error) {
	e := c.enrolled
	e.deciding.Lock()
	defer e.deciding.Unlock()
	e.mu.Lock()
	before, again := e.known[a.Instance]
	e.mu.Unlock()
	if again && before.Key != keyHash {
		return nil, c.refuse(from, a.Node, errors.New("this VM has enrolled already, with another key"))
	}
	if err := c.Audit.Write(policy.Entry{Event: "enroll", Who: a.Node, What: fmt.Sprintf("certificate of instance %s as %s for key %s", a.Instance, a.Role, keyHash),
		Decision: policy.Allowed, Why: "from " + from}); err != nil {
		return nil, api.Errorf(api.CodeUnavailable, "%v", err)
	}
	v := store.Enrolment{Instance: a.Instance, Node: a.Node, Role: a.Role, Key: keyHash, EnrolledAt: c.Clock.Now()}
	if again {
		v.EnrolledAt = before.EnrolledAt
	}
	chain, err := c.certify(ctx, &v, a, key)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	delete(e.refused, a.Node)
	e.mu.Unlock()
	c.Log.Info("agent enrolled", "node", a.Node, "role", a.Role, "instance", a.Instance, "from", from, "again", again)
	return chain, nil
}

// certify signs a certificate and keeps v. e.deciding is held.
func (c *Controller) certify(ctx context.Context, v *store.Enrolment, a trust.Agent, key *ecdsa.PublicKey) (api.Certificate, error) {
	chain, until, err := c.Authority.Sign(key, a)
	if err != nil {
		return api.Certificate{}, err
	}
	v.Until = until
	if err := c.Store.PutEnrolment(ctx, *v); err != nil {
		return api.Certificate{}, err
	}
	e := c.enrolled
	e.mu.Lock()
	defer e.mu.Unlock()
	for id, old := range e.known {
		if old.Node == v.Node {
			delete(e.known, id) // the VM that had the name before
		}
	}
	e.known[v.Instance] = *v
	return api.Certificate{Chain: chain}, nil
}

// refuse writes a refusal down and returns it. node is "" where none is proved.
func (c *Controller) refuse(from, node string, why error) error {
	e, now := c.enrolled, c.Clock.Now()
	who := node
	if who == "" {
		who = "address " + from
	}
	e.mu.Lock()
	if len(e.refused) >= maxRefusals {
		clear(e.refused)
	}
	r := e.refused[who]
	if r == nil {
		r = &refusal{proved: node != ""}
		e.refused[who] = r
	}
	same := r.Why == why.Error() && r.From == from && now.Sub(r.audited) < auditAgain
	if now.Sub(r.since) >= auditAgain {
		r.written, r.since = 0, now
	}
	same = same || r.written >= maxWritten
	r.Refusal = api.Refusal{At: api.FormatTime(now), From: from, Why: why.Error(), Count: r.Count + 1}
	if !same {
		r.audited = now
		r.written++
	}
	e.mu.Unlock()
	if !same {
		c.Log.Warn("enrolment refused", "who", who, "from", from, "why", why)
		if err := c.Audit.Write(policy.Entry{Event: "enroll", Who: who, What: "certificate", Decision: policy.Denied, Why: "from " + from + ": " + why.Error()}); err != nil {
			c.Log.Error("write the audit log", "err", err)
		}
	}
	return &api.Error{Code: api.CodeDenied, Message: "enrolment refused: " + why.Error(),
		Hint: "on the controller, sluice node show tells more; docs/admins/trust.md says what to do"}
}

// Admit says who answers the calls of a certificate's holder: the agent that the
// certificate names, for as long as its VM is known.
func (c *Controller) Admit(cert *x509.Certificate) (remote.Handler, error) {
	a, err := trust.AgentOf(cert)
	if err != nil {
		return nil, api.Errorf(api.CodeDenied, "%v", err)
	}
	key, ok := cert.PublicKey.(*ecdsa.PublicKey)
	if !ok || a.Cluster != c.Config.Cluster {
		return nil, api.Errorf(api.CodeDenied, "the certificate is not of this cluster")
	}
	c.enrolled.mu.Lock()
	v, known := c.enrolled.known[a.Instance]
	c.enrolled.mu.Unlock()
	// The connection may have outlived the certificate.
	if !known || v.Key != trust.KeyHash(cert.RawSubjectPublicKeyInfo) || v.Node != a.Node || v.Role != a.Role || c.Clock.Now().After(cert.NotAfter) {
		return nil, &api.Error{Code: api.CodeUnenrolled, Message: fmt.Sprintf("the certificate of %s (instance %s) is not valid any more", a.Node, a.Instance),
			Hint: "its agent enrols again by itself if its VM is of this cluster"}
	}
	w := Caller{Agent: &Peer{Agent: a, key: key}}
	return func(ctx context.Context, req api.Request) (any, error) { return c.Handle(ctx, w, req) }, nil
}

// agentRenew gives an agent that has a certificate another one for the same key.
func (c *Controller) agentRenew(ctx context.Context, w Caller, _ api.Ack) (any, error) {
	e := c.enrolled
	e.deciding.Lock()
	defer e.deciding.Unlock()
	e.mu.Lock()
	v, known := e.known[w.Agent.Instance]
	e.mu.Unlock()
	if !known {
		return nil, api.Errorf(api.CodeUnenrolled, "node %s is not enrolled any more", w.Agent.Node)
	}
	return c.certify(ctx, &v, w.Agent.Agent, w.Agent.key)
}

// agentKeys gives a node what it needs to be part of the Slurm cluster. The
// controller has it already.
func (c *Controller) agentKeys(_ context.Context, w Caller, _ api.Ack) (any, error) {
	out := api.Keys{Files: []api.KeyFile{}, Services: []string{}}
	s := c.Config.Slurm
	if w.Agent.Role == api.RoleController {
		return out, nil
	}
	data, err := os.ReadFile(s.KeyFile)
	if err != nil || len(data) == 0 {
		c.Log.Error("read the cluster's key", "file", s.KeyFile, "err", err)
		return nil, api.Errorf(api.CodeUnavailable, "the controller cannot read its key %s", s.KeyFile)
	}
	out.Files = append(out.Files, api.KeyFile{Path: s.KeyFile, Owner: s.KeyOwner(), Data: data})
	switch {
	case s.Auth == config.AuthMunge:
		out.Services = append(out.Services, "munge")
	case w.Agent.Role == api.RoleLogin:
		out.Services = append(out.Services, "sackd") // slurmd does its work on compute nodes
	}
	return out, nil
}

// watchGone forgets the VMs that are gone, so that their certificates count no more.
func (c *Controller) watchGone(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.Clock.After(goneEvery):
		}
		if err := c.forgetGone(ctx); err != nil && ctx.Err() == nil {
			c.Log.Warn("look for VMs that are gone", "err", err)
		}
	}
}

func (c *Controller) forgetGone(ctx context.Context) error {
	e := c.enrolled
	// Only who had enrolled before the list was made can be missed in it.
	e.mu.Lock()
	var before []store.Enrolment
	for _, v := range e.known {
		before = append(before, v)
	}
	e.mu.Unlock()
	list, err := c.Compute.List(ctx, "labels."+nodes.ClusterLabel+"="+c.Config.Cluster)
	if err != nil {
		return err
	}
	alive := map[string]bool{}
	for _, vm := range list {
		alive[strconv.FormatUint(vm.ID, 10)] = true
	}
	before = slices.DeleteFunc(before, func(v store.Enrolment) bool { return alive[v.Instance] })
	return c.forget(ctx, before, "the VM is gone")
}

// forget drops enrolments.
func (c *Controller) forget(ctx context.Context, list []store.Enrolment, why string) error {
	e := c.enrolled
	e.deciding.Lock()
	defer e.deciding.Unlock()
	for _, v := range list {
		if err := c.Audit.Write(policy.Entry{Event: "revoke", Who: v.Node, What: "certificate of instance " + v.Instance, Decision: policy.Allowed, Why: why}); err != nil {
			return err
		}
		if err := c.Store.DropEnrolments(ctx, v.Instance); err != nil {
			return err
		}
		e.mu.Lock()
		delete(e.known, v.Instance)
		e.mu.Unlock()
		c.Log.Info("certificate revoked", "node", v.Node, "instance", v.Instance, "why", why)
	}
	return nil
}

// nodeReenrol lets a VM enrol with a new key; the certificate that it has counts no more.
func (c *Controller) nodeReenrol(ctx context.Context, w Caller, in api.NodeName) (any, error) {
	e := c.enrolled
	var list []store.Enrolment
	e.mu.Lock()
	for _, v := range e.known {
		if v.Node == in.Node {
			list = append(list, v)
		}
	}
	e.mu.Unlock()
	if len(list) == 0 {
		return nil, &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("no VM %.64q has enrolled", in.Node), Hint: "see sluice node list"}
	}
	return api.Ack{}, c.forget(ctx, list, fmt.Sprintf("uid %d lets it enrol again", w.UID))
}
