package controller_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/oauth2"
	"google.golang.org/api/googleapi"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/controller"
	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/controller/store"
	"github.com/sluicehpc/sluice/gcp/compute"
	"github.com/sluicehpc/sluice/gcp/iam"
	"github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/gcp/storage"
	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/policy"
	"github.com/sluicehpc/sluice/slurm/scontrol"
	"github.com/sluicehpc/sluice/staging"
	"github.com/sluicehpc/sluice/staging/files"
	"github.com/sluicehpc/sluice/trust"
	"github.com/sluicehpc/sluice/trust/idtoken"
)

const (
	slurmUID = 64030
	alice    = 10001
	bob      = 10002
	trial    = 30007 // a group that alice is in

	dataAccount = "data@pp.iam.gserviceaccount.com"
)

// openPolicy lets everybody use every bucket of these tests.
const openPolicy = `policy: [{users: ["*"], service_account: ` + dataAccount + `,
  read: ["gs://corpus/", "gs://secret/", "gs://nowhere/"], write: ["gs://results/"]}]
`

// cloud is every service that the controller talks to, in memory.
type cloud struct {
	mu         sync.Mutex // guards what follows
	buckets    map[string][]storage.Object
	denied     map[string]bool
	checks     int
	vms        []compute.Instance
	jobs       map[uint32]scontrol.Job
	exit       int
	dirs       []string
	imports    int
	removed    []string
	shift      time.Duration // of the clock
	nodes      []scontrol.Node
	set        []string // by SetNodes
	audit      []policy.Entry
	gates      []uint32 // gids
	computeErr error
	lacks      []string // permissions
	// auditErr is what the audit log answers.
	auditErr error
}

func (c *cloud) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.shift)
}
func (c *cloud) After(d time.Duration) <-chan time.Time { return time.After(d) }

func (c *cloud) Check(_ context.Context, p storage.Place) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.checks++
	if c.denied[p.Bucket] || p.Account != dataAccount {
		return storage.ErrDenied
	}
	if _, ok := c.buckets[p.Bucket]; !ok {
		return storage.ErrNotFound
	}
	return nil
}

func (c *cloud) ListPrefix(ctx context.Context, p storage.Place) iter.Seq2[storage.Object, error] {
	return func(yield func(storage.Object, error) bool) {
		if err := c.Check(ctx, p); err != nil {
			yield(storage.Object{}, err)
			return
		}
		for _, o := range c.buckets[p.Bucket] {
			if strings.HasPrefix(o.Name, p.Prefix) && !yield(o, nil) {
				return
			}
		}
	}
}

func (c *cloud) GetInstance(context.Context, string) (*lustre.Instance, error) {
	return &lustre.Instance{State: lustre.StateActive, UID: "uid-1", MountPoint: "10.0.0.5@tcp:/fast"}, nil
}
func (c *cloud) ImportData(context.Context, *lustre.ImportDataRequest) (*lustre.Operation, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.imports++
	return &lustre.Operation{Name: "op"}, nil
}
func (c *cloud) ExportData(context.Context, *lustre.ExportDataRequest) (*lustre.Operation, error) {
	return &lustre.Operation{Name: "op"}, nil
}
func (c *cloud) GetOperation(context.Context, string) (*lustre.Operation, error) {
	return &lustre.Operation{Name: "op", Done: true}, nil
}
func (c *cloud) ListOperations(context.Context, string, string) ([]*lustre.Operation, error) {
	return nil, nil
}
func (c *cloud) CancelOperation(context.Context, string) error { return nil }

func (c *cloud) BulkInsert(_ context.Context, r compute.BulkInsertRequest) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range r.Names {
		c.vms = append(c.vms, compute.Instance{Name: n, Status: "RUNNING", Labels: r.Labels, MachineType: r.Metadata["sluice-controller"]})
	}
	return "op", nil
}
func (c *cloud) Get(_ context.Context, name string) (compute.Instance, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.computeErr != nil {
		return compute.Instance{}, c.computeErr
	}
	for _, vm := range c.vms {
		if vm.Name == name {
			return vm, nil
		}
	}
	return compute.Instance{}, &googleapi.Error{Code: 404, Message: "no such VM"}
}
func (c *cloud) Delete(context.Context, string, string) (string, error) { return "", nil }
func (c *cloud) WaitOperation(context.Context, string) error            { return nil }
func (c *cloud) List(context.Context, string) ([]compute.Instance, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.vms), nil
}

func (c *cloud) Job(_ context.Context, id uint32) (scontrol.Job, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	j, ok := c.jobs[id]
	if !ok {
		return scontrol.Job{}, scontrol.ErrNotFound
	}
	return j, nil
}
func (c *cloud) Nodes(context.Context, []string) ([]scontrol.Node, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.nodes), nil
}
func (c *cloud) SetNodes(_ context.Context, names []string, state, reason string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.set = append(c.set, fmt.Sprint(names, " ", state, reason))
	return nil
}
func (c *cloud) ExitCode(context.Context, uint32) (int, int, error) { return c.exit, 0, nil }

func (c *cloud) ByID(_ context.Context, uid uint32) (users.User, error) {
	switch uid {
	case alice:
		return users.User{Name: "alice", UID: alice, GID: 20001}, nil
	case bob:
		return users.User{Name: "bob", UID: bob, GID: 20002}, nil
	}
	return users.User{}, users.ErrUnknown
}
func (c *cloud) GroupIDs(_ context.Context, name string) ([]uint32, error) {
	if name == "alice" {
		return []uint32{20001, trial}, nil
	}
	return []uint32{20002}, nil
}
func (c *cloud) GroupID(_ context.Context, name string) (uint32, error) {
	if name == "trial" {
		return trial, nil
	}
	return 0, users.ErrUnknown
}

// DataToken mints.
func (c *cloud) DataToken(_ context.Context, d iam.DataToken) (*oauth2.Token, error) {
	return &oauth2.Token{AccessToken: fmt.Sprintf("%s gs://%s/%s write=%t", d.Account, d.Bucket, d.Prefix, d.Write), Expiry: c.Now().Add(d.Lifetime)}, nil
}

// TestProject and TestAccount say that nothing is missing, but for lacks.
func (c *cloud) TestProject(_ context.Context, _ string, permissions []string) ([]string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(permissions), func(p string) bool { return !slices.Contains(c.lacks, p) }), nil
}
func (c *cloud) TestAccount(ctx context.Context, _ string, permissions []string) ([]string, error) {
	return c.TestProject(ctx, "", permissions)
}

// Write is the audit log's.
func (c *cloud) Write(e policy.Entry) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.auditErr == nil {
		c.audit = append(c.audit, e)
	}
	return c.auditErr
}

func (c *cloud) Prepare(context.Context, string, string, string, string) (*files.Published, error) {
	return nil, nil
}
func (c *cloud) Verify(context.Context, string, string, []byte, func(files.Progress)) ([]string, error) {
	return nil, nil
}
func (c *cloud) Publish(context.Context, string, files.Published, []byte) error { return nil }
func (c *cloud) Manifest(context.Context, files.User, string, string, string, int, func(files.Progress)) ([]files.Entry, []files.Skipped, error) {
	return nil, nil, nil
}
func (c *cloud) Hold(context.Context, string, string, string, string, []byte) error {
	return nil
}
func (c *cloud) Unlink(context.Context, files.User, string, string, string, []byte) error { return nil }
func (c *cloud) Remove(_ context.Context, _, path string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if strings.HasPrefix(path, files.Jobs+"/") {
		c.removed = append(c.removed, path)
	}
	return nil
}
func (c *cloud) Sweep(context.Context, string, []string) ([]string, error) { return nil, nil }
func (c *cloud) MkdirJob(_ context.Context, _, jobDir string, _, _ uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dirs = append(c.dirs, jobDir)
	return nil
}
func (c *cloud) Gate(_ context.Context, _, _, _ string, gid uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gates = append(c.gates, gid)
	return nil
}
func (c *cloud) Link(context.Context, files.User, string, string, string, string) error {
	return nil
}

var (
	_ controller.Files = (*cloud)(nil)
	_ staging.Lustre   = (*cloud)(nil)
)

type world struct {
	*controller.Controller
	*cloud
	t   *testing.T
	dir string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	return newWorldWith(t, openPolicy)
}

// newWorldWith is newWorld with other lines of sluice.yaml in place of openPolicy.
func newWorldWith(t *testing.T, lines string) *world {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("needs root: environments belong to SlurmUser's group")
	}
	dir := t.TempDir()
	cfg, err := config.Parse("t", []byte(`
cluster: c
project: pp
zone: us-central1-a
file_systems: [{name: fast, instance: projects/pp/locations/us-central1-a/instances/fast, mount: /lustre}]
nodesets: [{name: a, nodes: "n[1-2]", machine_type: m, image: i, cpus: 1, memory_mib: 1}]
partitions: [{name: main, nodesets: [a]}]
slurm: {controller_host: ctl, accounting_host: ctl}
`+lines))
	if err != nil {
		t.Fatal(err)
	}
	db, err := store.Open(t.Context(), filepath.Join(dir, "db"))
	if err != nil {
		t.Fatal(err)
	}
	fake := &cloud{buckets: map[string][]storage.Object{"corpus": {{Name: "c4/a", Size: 1}}, "results": nil},
		denied: map[string]bool{"secret": true}, jobs: map[uint32]scontrol.Job{}}
	authority, err := trust.OpenCA(filepath.Join(dir, "tls"), "c", fake)
	if err != nil {
		t.Fatal(err)
	}
	c, err := controller.New(controller.Parts{
		Config: cfg, Store: db, Bucket: fake, Lustre: fake, Compute: fake, Files: fake, Slurm: fake, Users: fake, Audit: fake, IAM: fake,
		SlurmUser: users.User{Name: "slurm", UID: slurmUID, GID: slurmUID},
		EnvDir:    filepath.Join(dir, "env"), ListingDir: filepath.Join(dir, "listings"),
		Authority: authority, Identity: idtoken.New(googleKeys(t), fake), Version: "test",
		Clock: fake, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if err := c.Start(ctx); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		c.Wait()
		db.Close()
	})
	return &world{Controller: c, cloud: fake, t: t, dir: dir}
}

func request(op string, in any) api.Request {
	body, err := json.Marshal(in)
	if err != nil {
		panic(err)
	}
	return api.Request{Version: api.Version, Op: op, Body: body}
}

func (w *world) as(uid uint32, op string, in any) (any, error) {
	return w.HandleLocal(w.t.Context(), local.Peer{UID: uid}, request(op, in))
}

// agent calls as the agent of a node.
func (w *world) agent(node string, role api.Role, op string, in any) (any, error) {
	peer := &controller.Peer{Agent: trust.Agent{Cluster: "c", Role: role, Instance: "1", Node: node}}
	return w.Handle(w.t.Context(), controller.Caller{Agent: peer}, request(op, in))
}

func (w *world) must(uid uint32, op string, in any) any {
	w.t.Helper()
	out, err := w.as(uid, op, in)
	if err != nil {
		w.t.Fatalf("%s: %v", op, err)
	}
	return out
}

const good = "#!/bin/bash\n#SLUICE stage_in source=gs://corpus/c4/ name=c4\n#SLUICE stage_out from=out to=gs://results/%j/ on=always\n"

func jobCall(id uint32, script string) api.JobCall {
	return api.JobCall{JobID: id, UID: alice, GID: 20001, Script: script, Name: "train", Account: "research", Partition: "main"}
}

func (w *world) staged(id uint32) {
	w.t.Helper()
	w.must(slurmUID, api.OpSetup, jobCall(id, good))
	s := w.must(slurmUID, api.OpDataIn, api.StageCall{JobCall: jobCall(id, ""), WaitSeconds: 30}).(api.StageState)
	if s.Phase != api.StageDone {
		w.t.Fatalf("stage-in of job %d: %+v", id, s)
	}
}

func (w *world) event(id uint32, name string) time.Time {
	w.t.Helper()
	for _, e := range w.must(0, api.OpJobShow, api.JobID{JobID: id}).(api.Job).Events {
		if e.Name == name {
			at, err := time.Parse(api.TimeFormat, e.At)
			if err != nil {
				w.t.Fatal(err)
			}
			return at
		}
	}
	return time.Time{}
}

func TestWhoMayCallWhat(t *testing.T) {
	w := newWorld(t)
	w.staged(7)
	transfer := w.must(0, api.OpJobShow, api.JobID{JobID: 7}).(api.Job).Transfers[0].ID
	for _, tt := range []struct {
		name string
		uid  uint32
		op   string
		in   any
		want api.Code // "": allowed
	}{
		{"root sets up", 0, api.OpSetup, jobCall(7, good), ""},
		{"SlurmUser sets up", slurmUID, api.OpSetup, jobCall(7, good), ""},
		{"a user sets up", alice, api.OpSetup, jobCall(7, good), api.CodeDenied},
		{"a user tears down", alice, api.OpTeardown, jobCall(7, ""), api.CodeDenied},
		{"a user resumes", alice, api.OpNodeResume, api.Resume{}, api.CodeDenied},
		{"a user reads paths", alice, api.OpPaths, jobCall(7, ""), api.CodeDenied},
		{"a user plays the agent", alice, api.OpAgentReport, api.NodeReport{}, api.CodeDenied},
		{"root plays the agent", 0, api.OpAgentUser, api.UserCall{}, api.CodeDenied},
		{"root sees a job", 0, api.OpJobShow, api.JobID{JobID: 7}, ""},
		{"the owner sees it", alice, api.OpJobShow, api.JobID{JobID: 7}, ""},
		{"another does not", bob, api.OpJobShow, api.JobID{JobID: 7}, api.CodeNotFound},
		{"nor does SlurmUser", slurmUID, api.OpJobShow, api.JobID{JobID: 7}, api.CodeNotFound},
		{"the owner sees its transfer", alice, api.OpTransferShow, api.TransferID{ID: transfer}, ""},
		{"another does not", bob, api.OpTransferShow, api.TransferID{ID: transfer}, api.CodeNotFound},
		{"a user lists all", alice, api.OpJobList, api.JobList{All: true}, api.CodeDenied},
		{"a user lists all transfers", alice, api.OpTransferList, api.JobList{All: true}, api.CodeDenied},
		{"root lists all", 0, api.OpJobList, api.JobList{All: true}, ""},
		{"anybody lists nodes", bob, api.OpNodeList, nil, ""},
		{"anybody asks for the status", bob, api.OpStatus, nil, ""},
		{"nobody knows it", 0, "no.such", nil, api.CodeBadRequest},
		{"a body of another type", 0, api.OpJobShow, "text", api.CodeBadRequest},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := w.as(tt.uid, tt.op, tt.in)
			if tt.want == "" && err != nil || tt.want != "" && api.CodeOf(err) != tt.want {
				t.Errorf("got %v, want code %q", err, tt.want)
			}
		})
	}
	if got := w.must(bob, api.OpJobList, api.JobList{}).(api.Jobs).Jobs; len(got) != 0 {
		t.Errorf("bob's jobs: %+v", got)
	}
	if got := w.must(alice, api.OpTransferList, api.JobList{}).(api.Transfers).Transfers; len(got) != 1 {
		t.Errorf("alice's transfers: %+v", got)
	}
}

func TestJobProcess(t *testing.T) {
	w := newWorld(t)
	judge := func(script string, uid uint32) api.Verdict {
		t.Helper()
		return w.must(slurmUID, api.OpJobProcess, api.JobProcess{Script: script, HasUID: true, UID: uid, Account: "research"}).(api.Verdict)
	}
	for _, tt := range []struct{ name, line, want string }{
		{"unknown verb", "stage_im source=gs://corpus/ name=x", "did you mean stage_in?"},
		{"not served", "stage_in source=gs://corpus/ name=x engine=direct", "engine=direct is not served"},
		{"absolute", "stage_in source=gs://corpus/ to=/etc/x", "/etc/x"},
		{"file system", "stage_in source=gs://corpus/ name=x fs=fats", "did you mean fast?"},
	} {
		v := judge("#!/bin/sh\n#SLUICE "+tt.line+"\n", alice)
		if len(v.Errors) != 1 || !strings.HasPrefix(v.Errors[0], "script:2:") || !strings.Contains(v.Errors[0], tt.want) {
			t.Errorf("%s: %q, want one error at line 2 that says %q", tt.name, v.Errors, tt.want)
		}
	}
	if v := judge(good, 0); len(v.Errors) != 1 || !strings.Contains(v.Errors[0], "root") {
		t.Errorf("root: %+v", v)
	}
	// What is not known is accepted, asked for, and known the next time.
	bad := "#!/bin/sh\n#SLUICE stage_in source=gs://nowhere/x/ name=x\n#SLUICE stage_in source=gs://secret/x/ name=y\n"
	if v := judge(bad, alice); len(v.Errors) != 0 || len(v.Notices) != 2 {
		t.Errorf("unknown buckets: %+v, want two notices", v)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		v := judge(bad, alice)
		if len(v.Errors) == 2 && strings.Contains(v.Errors[0], "does not exist") && strings.Contains(v.Errors[1], "may not be read") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("known buckets: %+v, want two errors", v)
		}
	}
	// setup says the same words.
	_, err := w.as(slurmUID, api.OpSetup, jobCall(3, bad))
	if v := judge(bad, alice); err == nil || !strings.HasPrefix(v.Errors[0], strings.SplitN(err.Error(), "\n", 2)[0]) {
		t.Errorf("setup says %v, job_process %q", err, v.Errors)
	}
	if _, err := w.as(slurmUID, api.OpSetup, api.JobCall{JobID: 4, UID: 0, Script: good}); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("setup for root: %v", err)
	}
	if _, err := w.as(slurmUID, api.OpSetup, api.JobCall{JobID: 4, UID: 4242, Account: "research", Script: good}); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("setup for an unknown uid: %v", err)
	}
}

// A job's moments come in their order, and a requeued job is another run.
func TestLifeOfAJob(t *testing.T) {
	w := newWorld(t)
	w.staged(7)
	env := w.must(slurmUID, api.OpPaths, jobCall(7, "")).(api.Environment).Variables
	file, err := os.ReadFile(filepath.Join(w.dir, "env", "7"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"SLUICE_FS", "SLUICE_FS_FAST", "SLUICE_JOB_DIR", "SLUICE_DATA_C4"} {
		if env[name] == "" || !strings.Contains(string(file), name+"="+env[name]+"\n") {
			t.Errorf("%s = %q; file:\n%s", name, env[name], file)
		}
	}
	info, err := os.Stat(filepath.Join(w.dir, "env", "7"))
	if err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("environment file: %v, %v, want mode 0640", info, err)
	}

	w.must(slurmUID, api.OpNodeResume, api.Resume{Nodes: []string{"n1", "n2"}, Jobs: []api.ResumeJob{{JobID: 7, Nodes: []string{"n1", "n2"}}, {JobID: 99, Nodes: []string{"n1"}}}})
	ready := func(node string) {
		t.Helper()
		_, err := w.agent(node, api.RoleCompute, api.OpAgentReport, api.NodeReport{BootID: "b", ReadyAt: api.FormatTime(time.Now()),
			Mounts: []api.MountState{{Name: "fast", State: "ok"}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	ready("n1")
	if at := w.event(7, api.EventNodesReady); !at.IsZero() {
		t.Error("nodes_ready with one of two nodes")
	}
	ready("n2")
	w.must(slurmUID, api.OpPreRun, api.JobCall{JobID: 7, Nodes: []string{"n1", "n2"}})
	for _, node := range []string{"n1", "n2"} {
		_, err := w.agent(node, api.RoleCompute, api.OpAgentJob, api.JobEvent{JobID: 7, Node: node, Event: "prolog", At: api.FormatTime(time.Now())})
		if err != nil {
			t.Fatal(err)
		}
	}
	if got := w.must(0, api.OpJobShow, api.JobID{JobID: 7}).(api.Job).Phase; got != "running" {
		t.Errorf("phase %s, want running", got)
	}
	w.mu.Lock()
	w.jobs[7] = scontrol.Job{ID: 7, State: "STAGE_OUT"}
	w.exit = 3
	w.mu.Unlock()
	w.must(slurmUID, api.OpPostRun, jobCall(7, ""))
	s := w.must(slurmUID, api.OpDataOut, api.StageCall{JobCall: jobCall(7, ""), WaitSeconds: 30}).(api.StageState)
	if s.Phase != api.StageDone {
		t.Errorf("stage-out: %+v", s)
	}
	w.must(slurmUID, api.OpTeardown, jobCall(7, ""))
	job := w.must(0, api.OpJobShow, api.JobID{JobID: 7}).(api.Job)
	if job.Phase != "failed" || !strings.Contains(job.Reason, "exit code 3") {
		t.Errorf("phase %s (%s), want failed with its exit code", job.Phase, job.Reason)
	}
	order := []string{api.EventSubmitted, api.EventStageInStarted, api.EventStageInDone, api.EventResumeRequested, api.EventNodesReady,
		api.EventJobStarted, api.EventJobEnded, api.EventStageOutStarted, api.EventStageOutDone}
	var last time.Time
	for _, name := range order {
		at := w.event(7, name)
		if at.IsZero() || at.Before(last) {
			t.Errorf("%s at %v, after %v", name, at, last)
		}
		last = at
	}
	if _, err := os.Stat(filepath.Join(w.dir, "env", "7")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the environment file is still there: %v", err)
	}

	w.staged(7) // requeued
	again := w.must(0, api.OpJobShow, api.JobID{JobID: 7}).(api.Job)
	if again.Phase != "staged" || len(again.Events) != 3 {
		t.Errorf("the second run: %s %+v, want staged with three moments", again.Phase, again.Events)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.imports != 1 {
		t.Errorf("%d imports, want 1: the data was there", w.imports)
	}
}

// A requeued job is neither done nor failed, whatever becomes of it.
func TestRequeuedJob(t *testing.T) {
	w := newWorld(t)
	slurm := func(id uint32, state, reason string) {
		w.mu.Lock()
		w.jobs[id] = scontrol.Job{ID: id, State: state, Reason: reason}
		w.mu.Unlock()
	}
	for _, id := range []uint32{1, 2} {
		w.staged(id)
		slurm(id, "PENDING", "BeginTime")
		w.must(slurmUID, api.OpPostRun, jobCall(id, ""))
		w.must(slurmUID, api.OpDataOut, api.StageCall{JobCall: jobCall(id, ""), WaitSeconds: 30})
		w.must(slurmUID, api.OpTeardown, jobCall(id, ""))
		if job := w.must(0, api.OpJobShow, api.JobID{JobID: id}).(api.Job); job.Phase != "requeued" || job.EndState != "requeued" {
			t.Errorf("job %d is %s, its end %q, want requeued", id, job.Phase, job.EndState)
		}
	}
	slurm(1, "CANCELLED", "")
	w.staged(2)
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		job := w.must(0, api.OpJobShow, api.JobID{JobID: 1}).(api.Job)
		if job.Phase == "cancelled" && job.Reason != "" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the cancelled job is %s (%s)", job.Phase, job.Reason)
		}
	}
	if job := w.must(0, api.OpJobShow, api.JobID{JobID: 2}).(api.Job); job.Phase != "staged" {
		t.Errorf("the job that came again is %s, want staged", job.Phase)
	}
	// The moments of a copy that was there already are in their order.
	var names []string
	for _, e := range w.must(0, api.OpJobShow, api.JobID{JobID: 2}).(api.Job).Events {
		names = append(names, e.Name)
	}
	if want := []string{api.EventSubmitted, api.EventStageInStarted, api.EventStageInDone}; !slices.Equal(names, want) {
		t.Errorf("moments %v, want %v", names, want)
	}
}

func TestNodesAreMadeForTheirAgents(t *testing.T) {
	w := newWorld(t)
	w.must(slurmUID, api.OpNodeResume, api.Resume{Nodes: []string{"n1"}})
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		list := w.must(bob, api.OpNodeList, nil).(api.Nodes).Nodes
		if list[0].State == "booting" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("nodes %+v", list)
		}
	}
	w.mu.Lock()
	vm := w.vms[0]
	w.mu.Unlock()
	if vm.Labels["sluice-cluster"] != "c" || vm.MachineType != "ctl:8443" {
		t.Errorf("VM %+v, want the cluster's label and the controller's address", vm)
	}
	answer, err := w.agent("n1", api.RoleCompute, api.OpAgentReport, api.NodeReport{})
	if err != nil {
		t.Fatal(err)
	}
	state := func(mount string) string {
		t.Helper()
		_, err := w.agent("n1", api.RoleCompute, api.OpAgentReport, api.NodeReport{BootID: "b", ReadyAt: api.FormatTime(time.Now()),
			Mounts: []api.MountState{{Name: "fast", State: mount}}})
		if err != nil {
			t.Fatal(err)
		}
		return w.must(bob, api.OpNodeList, nil).(api.Nodes).Nodes[0].State
	}
	if got := state("ok"); got != "ready" {
		t.Errorf("a node whose mounts answer is %s, want ready", got)
	}
	if got := state("hung"); got != "not_ready" {
		t.Errorf("a node whose mount hangs is %s, want not_ready", got)
	}
	fs := answer.(api.ReportAnswer).FileSystems
	if len(fs) != 1 || fs[0].Dir != "/lustre" || fmt.Sprint(fs[0].Types) != "[lustre]" {
		t.Errorf("file systems %+v", fs)
	}
}

// A node for which there was no VM in time comes back, one that an admin or
// Slurm took out for another reason does not.
func TestNodesThatDidNotComeUpAreGivenBack(t *testing.T) {
	w := newWorld(t)
	off := []string{"CLOUD", "POWERED_DOWN"}
	w.mu.Lock()
	w.nodes = []scontrol.Node{
		{Name: "n1", State: "DOWN", Flags: off, Reason: "ResumeTimeout reached [slurm@2026-11-30T21:42:02]"},
		{Name: "n2", State: "DOWN", Flags: off, Reason: "broken fan [root@2026-11-30T21:42:02]"},
		{Name: "other", State: "DOWN", Flags: off, Reason: "ResumeTimeout reached"},
	}
	w.mu.Unlock()
	for range 2 {
		if err := w.RestoreDown(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.mu.Lock()
		if want := []string{"[n1] RESUME"}; !slices.Equal(w.set, want) {
			t.Errorf("set %q, want %q", w.set, want)
		}
		w.nodes[0].Flags = off[:1] // it is still on its way down
		w.mu.Unlock()
	}
}

// What made a node's Prolog fail becomes Slurm's reason for its drain; an
// admin's reason stays.
func TestVerdictBecomesTheReason(t *testing.T) {
	w := newWorld(t)
	for _, tt := range []struct {
		name, reason string
		age          time.Duration
		set          []string
		code         api.Code
	}{
		{"drained", "Prolog error [root@2026-11-30T21:42:02]", time.Second, []string{"[n1] DRAINsluice: /lustre is hung"}, ""},
		{"not drained yet", "", time.Second, nil, api.CodeUnavailable},
		{"given back", "", time.Hour, nil, ""},
		{"an admin's", "broken fan", time.Second, nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w.mu.Lock()
			w.nodes, w.set = []scontrol.Node{{Name: "n1", State: "IDLE", Reason: tt.reason}}, nil
			w.mu.Unlock()
			_, err := w.agent("n1", api.RoleCompute, api.OpAgentJob, api.JobEvent{JobID: 99, Node: "n1", Event: "verdict",
				At: api.FormatTime(time.Now().Add(-tt.age)), Reason: "/lustre is hung\nState=x"})
			if api.CodeOf(err) != tt.code && (err != nil || tt.code != "") {
				t.Errorf("got %v, want code %q", err, tt.code)
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			if !slices.Equal(w.set, tt.set) {
				t.Errorf("set %q, want %q", w.set, tt.set)
			}
		})
	}
}

func TestBBStatusShowsNothingPrivate(t *testing.T) {
	w := newWorld(t)
	w.staged(7)
	for _, args := range [][]string{nil, {"7"}, {"sluice", "7"}, {"8"}} {
		text := w.must(slurmUID, api.OpBBStatus, api.BBStatus{Args: args}).(api.Text).Text
		if text == "" || strings.Contains(text, "corpus") || strings.Contains(text, "alice") || strings.Contains(text, "/lustre") {
			t.Errorf("status %v: %q", args, text)
		}
	}
}

// A job's directory goes when it is old, unless a stage-out failed.
func TestRetention(t *testing.T) {
	w := newWorld(t)
	run := func(id uint32, lost string) {
		t.Helper()
		w.staged(id)
		w.mu.Lock()
		delete(w.buckets, lost)
		w.jobs[id] = scontrol.Job{ID: id, State: "COMPLETED"}
		w.mu.Unlock()
		w.must(slurmUID, api.OpPostRun, jobCall(id, ""))
		w.must(slurmUID, api.OpDataOut, api.StageCall{JobCall: jobCall(id, ""), WaitSeconds: 30})
		w.must(slurmUID, api.OpTeardown, jobCall(id, ""))
	}
	run(1, "")
	run(2, "results") // its stage-out fails
	if j := w.must(0, api.OpJobShow, api.JobID{JobID: 2}).(api.Job); j.Phase != "failed" || !strings.Contains(j.Reason, "does not exist") {
		t.Fatalf("job 2 is %s (%s), want failed", j.Phase, j.Reason)
	}
	for _, tt := range []struct {
		shift time.Duration
		want  []string
	}{{6 * 24 * time.Hour, nil}, {8 * 24 * time.Hour, []string{files.JobDir("c", 1)}}, {9 * 24 * time.Hour, []string{files.JobDir("c", 1)}}} {
		w.mu.Lock()
		w.shift = tt.shift
		w.mu.Unlock()
		if err := w.RemoveExpired(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.mu.Lock()
		if !slices.Equal(w.removed, tt.want) {
			t.Errorf("after %v removed %v, want %v", tt.shift, w.removed, tt.want)
		}
		w.mu.Unlock()
	}
}
