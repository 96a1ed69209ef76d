package agent

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"cloud.google.com/go/compute/metadata"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/api/remote"
	"github.com/sluicehpc/sluice/internal/retry"
	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/lustre"
	"github.com/sluicehpc/sluice/lustre/probe"
)

var slurmKey = []byte("the key of this test's cluster")

// scratch is the file system of most tests.
var scratch = api.FileSystem{Name: "scratch", Source: "10.0.0.5@tcp:/fs", Dir: "/lustre", Default: true}

// sluiced is a controller over real TLS that can be stopped and started again.
type sluiced struct {
	t           *testing.T
	dir         string // of its certificate
	address     string
	fingerprint string
	stop        func()

	mu      sync.Mutex // guards everything that follows
	reports []api.NodeReport
	jobs    []api.JobEvent
	users   []api.UserCall
	answer  api.ReportAnswer
	// hook is called first, with mu free, or nil; an error is the answer.
	hook func(ctx context.Context, op string) error
}

func newSluiced(t *testing.T) *sluiced {
	s := &sluiced{t: t, dir: t.TempDir(), address: "127.0.0.1:0",
		answer: api.ReportAnswer{FileSystems: []api.FileSystem{scratch}, NextSeconds: 0.02}}
	s.start()
	return s
}

func (s *sluiced) start() {
	s.t.Helper()
	cert, fp, err := remote.Certificate(s.dir, []string{"127.0.0.1"})
	if err != nil {
		s.t.Fatal(err)
	}
	l, err := net.Listen("tcp", s.address)
	if err != nil {
		s.t.Fatal(err)
	}
	s.address, s.fingerprint = l.Addr().String(), fp
	s.stop = serve(s.t, l, cert, s.handle)
}

func serve(t *testing.T, l net.Listener, cert tls.Certificate, h func(context.Context, api.Request) (any, error)) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := (remote.Server{Key: slurmKey, Handle: h}).Serve(ctx, l, cert); err != nil {
			t.Errorf("serve: %v", err)
		}
	}()
	var once sync.Once
	stop = func() { once.Do(func() { cancel(); <-done }) }
	t.Cleanup(stop)
	return stop
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
}

func (m *attributes) GetWithContext(_ context.Context, suffix string) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return "", m.err
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
	keyFile  string
	kernel   *kernel
	metadata *attributes
	mu       sync.Mutex // guards started
	started  []string   // systemd units, in order
}

const slurmUID, aliceUID, bobUID = 64030, 10001, 10002

func newVM(t *testing.T, s *sluiced, role api.Role) *vm {
	t.Helper()
	root, err := os.MkdirTemp("", "sluice") // a socket's path is at most 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	v := &vm{t: t, root: root, keyFile: filepath.Join(root, "slurm.key"),
		kernel: &kernel{mounted: map[string]string{}},
		metadata: &attributes{values: map[string]string{
			"instance/name": "c-0", "instance/id": "4711",
			"instance/attributes/" + AttributeRole:        string(role),
			"instance/attributes/" + AttributeController:  s.address,
			"instance/attributes/" + AttributeFingerprint: s.fingerprint,
		}}}
	if err := os.WriteFile(v.keyFile, slurmKey, 0o600); err != nil {
		t.Fatal(err)
	}
	return v
}

// boot starts an agent; stop ends it as a restart would.
func (v *vm) boot(change func(*Agent)) (a *Agent, stop func()) {
	v.t.Helper()
	c := Defaults
	c.Root, c.KeyFile, c.CertDir, c.Version = v.root, v.keyFile, filepath.Join(v.root, "tls"), "test"
	a = New(c, slog.New(slog.NewTextHandler(v.t.Output(), nil)))
	a.metadata = v.metadata
	a.mount = v.kernel.mount
	a.probe = v.kernel.probe
	a.start = func(_ context.Context, unit string) error {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.started = append(v.started, unit)
		return nil
	}
	a.user = func(_ context.Context, name string) (users.User, error) {
		if name != "slurm" {
			return users.User{}, users.ErrUnknown
		}
		return users.User{Name: name, UID: slurmUID}, nil
	}
	const quick = 5 * time.Millisecond
	a.pace = pace{report: quick, again: quick, probe: quick, spool: quick, grace: time.Hour,
		identify: time.Second, call: 5 * time.Second, user: 5 * time.Second,
		mount: retry.Policy{First: quick, Max: quick}, slurmd: retry.Policy{First: quick, Max: quick}}
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
