package agent

import (
	"context"
	"crypto/ecdsa"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"cloud.google.com/go/compute/metadata"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/api/remote"
	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/internal/retry"
	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/lustre"
	"github.com/sluicehpc/sluice/lustre/probe"
	"github.com/sluicehpc/sluice/trust"
)

var slurmKey = []byte("the key of this test's cluster")

// vmID is the instance id of the tests' VM.
const vmID = "4711"

// scratch is the file system of most tests.
var scratch = api.FileSystem{Name: "scratch", Source: "10.0.0.5@tcp:/fs", Dir: "/lustre", Default: true}

// sluiced is a controller over real TLS that can be stopped and started again.
// It gives a certificate to everybody whose token is made out to it; whom it
// should believe is package controller's matter.
type sluiced struct {
	t         *testing.T
	authority *trust.CA
	address   string
	stop      func()

	mu      sync.Mutex // guards everything that follows
	role    api.Role   // in certificates
	reports []api.NodeReport
	jobs    []api.JobEvent
	users   []api.UserCall
	answer  api.ReportAnswer
	keys    api.Keys
	// enrolled are the hashes of keys that got certificates; revoked is set when they count no more.
	enrolled []string
	renewed  int
	revoked  bool
	// hook is called first, with mu free, or nil; an error is the answer.
	hook func(ctx context.Context, op string) error
}

func newSluiced(t *testing.T, role api.Role) *sluiced {
	s := &sluiced{t: t, address: "127.0.0.1:0", role: role,
		answer: api.ReportAnswer{FileSystems: []api.FileSystem{scratch}, NextSeconds: 0.02},
		keys:   api.Keys{Files: []api.KeyFile{{Path: "/etc/slurm/slurm.key", Owner: "slurm", Data: slurmKey}}}}
	s.newAuthority()
	s.start()
	return s
}

func (s *sluiced) newAuthority() {
	s.t.Helper()
	ca, err := trust.OpenCA(filepath.Join(s.t.TempDir(), "tls"), "c", clock.System)
	if err != nil {
		s.t.Fatal(err)
	}
	s.authority = ca
}

func (s *sluiced) start() {
	s.t.Helper()
	l, err := net.Listen("tcp", s.address)
	if err != nil {
		s.t.Fatal(err)
	}
	s.address = l.Addr().String()
	ctx, cancel := context.WithCancel(s.t.Context())
	done := make(chan struct{})
	server := remote.Server{TLS: s.authority.ServerTLS(nil), Admit: s.admit, Enrol: s.enrol}
	go func() {
		defer close(done)
		if err := server.Serve(ctx, l); err != nil {
			s.t.Errorf("serve: %v", err)
		}
	}()
	var once sync.Once
	s.stop = func() { once.Do(func() { cancel(); <-done }) }
	s.t.Cleanup(s.stop)
}

func (s *sluiced) admit(cert *x509.Certificate) (remote.Handler, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.revoked {
		return nil, api.Errorf(api.CodeUnenrolled, "revoked")
	}
	return func(ctx context.Context, req api.Request) (any, error) {
		if req.Op != api.OpAgentRenew {
			return s.handle(ctx, req)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.renewed++
		return s.sign(cert.PublicKey.(*ecdsa.PublicKey))
	}, nil
}

func (s *sluiced) enrol(ctx context.Context, _ string, req api.Request) (any, error) {
	s.mu.Lock()
	hook := s.hook
	s.mu.Unlock()
	if hook != nil {
		if err := hook(ctx, req.Op); err != nil {
			return nil, err
		}
	}
	var in api.EnrolRequest
	if err := json.Unmarshal(req.Body, &in); err != nil {
		return nil, err
	}
	key, hash, err := trust.ParseRequest(in.Request)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if want := "token for " + trust.Audience(s.authority.Fingerprint(), hash); in.Token != want {
		return nil, api.Errorf(api.CodeDenied, "got %q, want %q", in.Token, want)
	}
	s.enrolled, s.revoked = append(s.enrolled, hash), false
	return s.sign(key)
}

// sign is called with mu held.
func (s *sluiced) sign(key *ecdsa.PublicKey) (any, error) {
	chain, _, err := s.authority.Sign(key, trust.Agent{Cluster: "c", Role: s.role, Instance: vmID, Node: "c-0"})
	return api.Certificate{Chain: chain}, err
}

func (s *sluiced) handle(ctx context.Context, req api.Request) (any, error) {
	s.mu.Lock()
	hook := s.hook
	s.mu.Unlock()
	if hook != nil {
		if err := hook(ctx, req.Op); err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch req.Op {
	case api.OpAgentKeys:
		return s.keys, nil
	case api.OpAgentReport:
		var r api.NodeReport
		if err := json.Unmarshal(req.Body, &r); err != nil {
			return nil, err
		}
		s.reports = append(s.reports, r)
		return s.answer, nil
	case api.OpAgentJob:
		var j api.JobEvent
		if err := json.Unmarshal(req.Body, &j); err != nil {
			return nil, err
		}
		s.jobs = append(s.jobs, j)
		return api.Ack{}, nil
	case api.OpAgentUser:
		var u api.UserCall
		if err := json.Unmarshal(req.Body, &u); err != nil {
			return nil, err
		}
		s.users = append(s.users, u)
		if u.Op == api.OpJobShow {
			return nil, &api.Error{Code: api.CodeNotFound, Message: "no such job", Hint: "ask squeue"}
		}
		return api.Status{Version: "fake", Jobs: int(u.UID)}, nil
	}
	return nil, api.Errorf(api.CodeBadRequest, "operation %q", req.Op)
}

func (s *sluiced) set(f func(*sluiced)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s)
}

// last returns the newest report and how many there were.
func (s *sluiced) last() (api.NodeReport, int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.reports) == 0 {
		return api.NodeReport{}, 0
	}
	return s.reports[len(s.reports)-1], len(s.reports)
}

func (s *sluiced) events() []api.JobEvent {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.jobs)
}

// kernel stands for the node's mounts.
type kernel struct {
	mu       sync.Mutex // guards everything that follows
	mounted  map[string]string
	state    probe.State // of what is mounted; "" is ok
	mountErr error
	mounts   int // attempts
}

func (k *kernel) mount(_ context.Context, s lustre.Spec) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mounts++
	if k.mountErr != nil {
		return k.mountErr
	}
	k.mounted[s.Dir] = s.Source
	return nil
}

func (k *kernel) probe(c probe.Check) probe.Result {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch source := k.mounted[c.Dir]; {
	case source == "":
		return probe.Result{State: probe.NotMounted, Detail: "nothing is mounted at " + c.Dir}
	case source != c.Source:
		return probe.Result{State: probe.WrongSource, Detail: source}
	case k.state != "":
		return probe.Result{State: k.state, Detail: "as the test says"}
	}
	return probe.Result{State: probe.OK}
}

func (k *kernel) set(f func(*kernel)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f(k)
}

// attributes is a metadata server: paths below computeMetadata/v1 and their values.
type attributes struct {
	mu     sync.Mutex // guards everything that follows
	values map[string]string
	err    error
	// noAccount: the VM runs under no service account.
	noAccount bool
}

func (m *attributes) GetWithContext(_ context.Context, suffix string) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return "", m.err
	}
	if query, ok := strings.CutPrefix(suffix, "instance/service-accounts/default/identity?"); ok && !m.noAccount {
		q, err := url.ParseQuery(query)
		if err != nil || q.Get("format") != "full" {
			return "", fmt.Errorf("identity token: %q, %v", query, err)
		}
		return "token for " + q.Get("audience"), nil
	}
	v, ok := m.values[suffix]
	if !ok {
		return "", metadata.NotDefinedError(suffix)
	}
	return v, nil
}

func (m *attributes) set(f func(*attributes)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f(m)
}

// vm is what stays when an agent on it is started again.
type vm struct {
	t        *testing.T
	root     string
	kernel   *kernel
	metadata *attributes
	mu       sync.Mutex // guards what follows
	started  []string   // systemd units, in order
	guarded  bool       // users are kept from the metadata server
	guardErr error
}

const slurmUID, aliceUID, bobUID = 64030, 10001, 10002

func newVM(t *testing.T, s *sluiced) *vm {
	t.Helper()
	root, err := os.MkdirTemp("", "sluice") // a socket's path is at most 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	v := &vm{t: t, root: root,
		kernel: &kernel{mounted: map[string]string{}},
		metadata: &attributes{values: map[string]string{
			"instance/id": vmID,
			"instance/attributes/" + AttributeController:  s.address,
			"instance/attributes/" + AttributeFingerprint: s.authority.Fingerprint(),
		}}}
	return v
}

// boot starts an agent; stop ends it as a restart would.
func (v *vm) boot(change func(*Agent)) (a *Agent, stop func()) {
	v.t.Helper()
	c := Defaults
	c.Root, c.TLSDir, c.Version = v.root, filepath.Join(v.root, "tls"), "test"
	a = New(c, slog.New(slog.NewTextHandler(v.t.Output(), nil)))
	a.metadata = v.metadata
	a.mount = v.kernel.mount
	a.probe = v.kernel.probe
	a.systemctl = func(_ context.Context, verb, unit string) error {
		if _, err := os.Stat(v.root + slurmdFlag); verb == "start" && unit == "slurmd" && err != nil {
			v.t.Errorf("systemd would not start slurmd: %v", err)
		}
		v.mu.Lock()
		defer v.mu.Unlock()
		v.started = append(v.started, unit)
		return nil
	}
	a.guard = Guard{
		Ensure: func() (bool, error) {
			v.mu.Lock()
			defer v.mu.Unlock()
			put := !v.guarded && v.guardErr == nil
			v.guarded = v.guarded || put
			return put, v.guardErr
		},
		Remove: func() error {
			v.mu.Lock()
			defer v.mu.Unlock()
			v.guarded = false
			return nil
		},
	}
	a.user = func(_ context.Context, name string) (users.User, error) {
		if name != "slurm" {
			return users.User{}, users.ErrUnknown
		}
		return users.User{Name: name, UID: slurmUID}, nil
	}
	const quick = 5 * time.Millisecond
	a.pace = pace{report: quick, again: quick, probe: quick, spool: quick, grace: time.Hour,
		identify: time.Second, call: 5 * time.Second, user: 5 * time.Second, enrol: 5 * time.Second, renew: quick, guard: quick,
		mount: retry.Policy{First: quick, Max: quick}, keys: retry.Policy{First: quick, Max: quick}, slurmd: retry.Policy{First: quick, Max: quick}}
	if change != nil {
		change(a)
	}
	ctx, cancel := context.WithCancel(v.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := a.Run(ctx); err != nil {
			v.t.Errorf("Run: %v", err)
		}
	}()
	var once sync.Once
	stop = func() { once.Do(func() { cancel(); <-done }) }
	v.t.Cleanup(stop)
	return a, stop
}

func (v *vm) units() []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.started)
}

func (v *vm) call(op string, in, out any) error {
	ctx, cancel := context.WithTimeout(v.t.Context(), 20*time.Second)
	defer cancel()
	return local.Call(ctx, v.root+api.AgentSocket, op, in, out)
}

// prolog asks as a job's Prolog does; an agent that is not there yet is waited for.
func (v *vm) prolog(job, uid uint32) api.Readiness {
	v.t.Helper()
	var r api.Readiness
	var err error
	eventually(v.t, "an answer to the Prolog", func() bool {
		err = v.call(api.OpProlog, api.PrologCall{JobID: job, UID: uid, Node: "c-0"}, &r)
		return !errors.Is(err, local.ErrUnreachable)
	})
	if err != nil {
		v.t.Fatal(err)
	}
	return r
}

func (v *vm) epilog(job uint32) {
	v.t.Helper()
	if err := v.call(api.OpEpilog, api.PrologCall{JobID: job, Node: "c-0"}, nil); err != nil {
		v.t.Fatal(err)
	}
}

// eventually waits until the condition holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	deadline := time.NewTimer(20 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("never came: %s", what)
		}
	}
}
