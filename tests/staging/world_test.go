// Package staging_test runs sluiced's staging against the sandbox's real
// services over TCP, in a child process that is really killed.
package staging_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/controller"
	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/controller/store"
	"github.com/sluicehpc/sluice/gcp/compute"
	"github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/gcp/storage"
	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/sandbox/faults"
	sandboxlustre "github.com/sluicehpc/sluice/sandbox/lustre"
	sandboxstorage "github.com/sluicehpc/sluice/sandbox/storage"
	"github.com/sluicehpc/sluice/slurm/scontrol"
	"github.com/sluicehpc/sluice/staging/files"
)

const (
	project  = "sluice-sandbox"
	zone     = "us-central1-a"
	parent   = "projects/" + project + "/locations/" + zone
	instance = parent + "/instances/scratch"
	alice    = 10001
	bob      = 10002
)

// TestMain is also the daemon's process and its file system children.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "fs" {
		os.Exit(files.Main(os.Args[2:], os.Stdin, os.Stdout, os.Stderr))
	}
	if dir := os.Getenv("STAGING_TEST_DAEMON"); dir != "" {
		if err := daemon(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// daemon is sluiced without systemd, Slurm and Compute Engine.
func daemon(dir string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	cfg, err := config.Load(filepath.Join(dir, "sluice.yaml"))
	if err != nil {
		return err
	}
	db, err := store.Open(ctx, filepath.Join(dir, "store", "sluice.db"))
	if err != nil {
		return err
	}
	bucket, err := storage.NewClient(ctx, cfg.Endpoints.Storage, option.WithoutAuthentication())
	if err != nil {
		return err
	}
	lc, err := lustre.NewClient(ctx, option.WithEndpoint(cfg.Endpoints.Lustre), option.WithoutAuthentication())
	if err != nil {
		return err
	}
	armed := filepath.Join(dir, "fault")
	c, err := controller.New(controller.Parts{
		Config: cfg, Store: db, Bucket: bucket, Lustre: lc, Compute: noCompute{}, Files: &files.Client{},
		Slurm: fakeSlurm{dir}, Users: fakeUsers{}, SlurmUser: users.User{Name: "slurm", UID: 64030, GID: 64030},
		EnvDir: filepath.Join(dir, "env"), ListingDir: filepath.Join(dir, "listings"), Version: "test",
		Clock: clock.System, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		Fault: func(point string) {
			want, err := os.ReadFile(armed)
			if err == nil && string(want) == point {
				os.Remove(armed)
				syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
		},
	})
	if err != nil {
		return err
	}
	if err := c.Start(ctx); err != nil {
		return err
	}
	l, err := local.Listen(filepath.Join(dir, "sluiced.sock"), 0o600)
	if err != nil {
		return err
	}
	return local.Serve(ctx, l, nil, c.HandleLocal)
}

type noCompute struct{}

func (noCompute) BulkInsert(context.Context, compute.BulkInsertRequest) (string, error) {
	return "", errors.New("no VMs here")
}
func (noCompute) Delete(context.Context, string, string) (string, error)   { return "", nil }
func (noCompute) WaitOperation(context.Context, string) error              { return nil }
func (noCompute) List(context.Context, string) ([]compute.Instance, error) { return nil, nil }
func (fakeUsers) GroupIDs(_ context.Context, name string) ([]uint32, error) {
	return []uint32{20001}, nil
}
func (f fakeSlurm) ExitCode(context.Context, uint32) (code, signal int, e error) { return 0, 0, nil }
func (f fakeSlurm) Nodes(context.Context, []string) ([]scontrol.Node, error)     { return nil, nil }
func (f fakeSlurm) SetNodes(context.Context, []string, string, string) error     { return nil }

type fakeUsers struct{}

func (fakeUsers) ByID(_ context.Context, uid uint32) (users.User, error) {
	switch uid {
	case alice:
		return users.User{Name: "alice", UID: alice, GID: 20001}, nil
	case bob:
		return users.User{Name: "bob", UID: bob, GID: 20002}, nil
	}
	return users.User{}, users.ErrUnknown
}

// fakeSlurm says of every job what the file "jobstate" says.
type fakeSlurm struct{ dir string }

func (f fakeSlurm) Job(_ context.Context, id uint32) (scontrol.Job, error) {
	state, err := os.ReadFile(filepath.Join(f.dir, "jobstate"))
	if err != nil {
		state = []byte("PENDING")
	}
	return scontrol.Job{ID: id, UID: alice, Account: "research", Partition: "main", State: string(state), Name: "train"}, nil
}

// world is the cloud, and a daemon that can be killed.
type world struct {
	t       *testing.T
	dir     string
	mount   string
	storage *sandboxstorage.Server
	lustre  *lustre.Client
	faults  *faults.Set

	mu     sync.Mutex // guards what follows
	proc   *exec.Cmd
	ended  chan struct{}
	starts int
	stop   bool
}

func newWorld(t *testing.T) *world {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("needs root: jobs' directories belong to their users")
	}
	dir, err := os.MkdirTemp("/tmp", "sluice-staging")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, dir: dir, faults: new(faults.Set)}
	w.storage, err = sandboxstorage.New(sandboxstorage.Options{Dir: filepath.Join(dir, "cloud-storage"), Project: project})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.storage.Close() })
	ls, err := sandboxlustre.New(sandboxlustre.Options{
		Dir: filepath.Join(dir, "cloud-lustre"), Bucket: sandboxlustre.FromStorage(w.storage), Faults: w.faults,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ls.Close)
	hl, hs := httptest.NewServer(ls), httptest.NewServer(w.storage)
	t.Cleanup(hl.Close)
	t.Cleanup(hs.Close)
	w.lustre, err = lustre.NewClient(t.Context(), option.WithEndpoint(hl.URL), option.WithoutAuthentication())
	if err != nil {
		t.Fatal(err)
	}
	op, err := w.lustre.CreateInstance(t.Context(), &lustre.CreateInstanceRequest{Parent: parent, InstanceID: "scratch", Instance: &lustre.Instance{
		Filesystem: "scratch", CapacityGib: 9000, PerUnitStorageThroughput: 1000, Network: "projects/" + project + "/global/networks/default"}})
	if err == nil {
		_, err = w.lustre.Wait(t.Context(), op.Name, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	w.mount, _ = ls.DataDir(instance)
	cfg := &config.Config{
		Cluster: "c", Project: project, Zone: zone, Endpoints: config.Endpoints{Lustre: hl.URL, Storage: hs.URL},
		FileSystems: []config.FileSystem{{Name: "scratch", Instance: instance, Mount: w.mount}},
		NodeSets:    []config.NodeSet{{Name: "n", Nodes: "n[1-2]", MachineType: "m", Image: "i", CPUs: 1, MemoryMiB: 1}},
		Partitions:  []config.Partition{{Name: "main", NodeSets: []string{"n"}}},
		Slurm:       config.Slurm{ControllerHost: "controller"},
	}
	text, err := config.Marshal(cfg)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "sluice.yaml"), text, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.halt)
	return w
}

// start runs the daemon, again whenever it dies.
func (w *world) start() {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.launch()
}

func (w *world) launch() {
	exe, err := os.Executable()
	if err != nil {
		w.t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "STAGING_TEST_DAEMON="+w.dir)
	log, err := os.OpenFile(filepath.Join(w.dir, "daemon.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		w.t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	log.Close()
	w.starts++
	w.proc, w.ended = cmd, make(chan struct{})
	ended := w.ended
	go func() {
		cmd.Wait()
		close(ended)
		w.mu.Lock()
		defer w.mu.Unlock()
		if !w.stop && w.proc == cmd {
			w.launch()
		}
	}()
}

// kill kills the daemon; it comes again.
func (w *world) kill() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.proc != nil {
		w.proc.Process.Kill()
	}
}

func (w *world) halt() {
	w.mu.Lock()
	w.stop = true
	proc, ended := w.proc, w.ended
	w.mu.Unlock()
	if proc != nil {
		proc.Process.Kill()
		<-ended
	}
	if w.t.Failed() {
		log, _ := os.ReadFile(filepath.Join(w.dir, "daemon.log"))
		w.t.Logf("the daemon said:\n%s", log)
	}
}

// arm makes the daemon kill itself at the next such point.
func (w *world) arm(point string) {
	w.write("fault", point)
}

func (w *world) armed() bool {
	_, err := os.Stat(filepath.Join(w.dir, "fault"))
	return err == nil
}

func (w *world) write(name, data string) {
	w.t.Helper()
	tmp := filepath.Join(w.dir, "."+name)
	err := os.WriteFile(tmp, []byte(data), 0o644)
	if err == nil {
		err = os.Rename(tmp, filepath.Join(w.dir, name))
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// call asks the daemon until it answers, as the hook does.
func (w *world) call(op string, in, out any) error {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 2*time.Minute)
	defer cancel()
	for {
		err := local.Call(ctx, filepath.Join(w.dir, "sluiced.sock"), op, in, out)
		if err == nil || !errors.Is(err, local.ErrUnreachable) && api.CodeOf(err) != api.CodeUnavailable {
			return err
		}
		select {
		case <-ctx.Done():
			w.t.Fatalf("%s: %v", op, err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// stage follows a stage-in or stage-out to its end.
func (w *world) stage(op string, in api.JobCall) api.StageState {
	w.t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for {
		var s api.StageState
		if err := w.call(op, api.StageCall{JobCall: in, WaitSeconds: 5}, &s); err != nil {
			w.t.Fatalf("%s: %v", op, err)
		}
		if s.Phase != api.StageBusy {
			return s
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("%s is still busy: %s", op, s.Message)
		}
	}
}

func (w *world) job(id uint32) api.Job {
	w.t.Helper()
	var j api.Job
	if err := w.call(api.OpJobShow, api.JobID{JobID: id}, &j); err != nil {
		w.t.Fatal(err)
	}
	return j
}

func (w *world) bucket(name string, objects map[string]string) {
	w.t.Helper()
	if err := w.storage.CreateBucket(name); err != nil {
		w.t.Fatal(err)
	}
	for object, data := range objects {
		w.put(name, object, data)
	}
}

func (w *world) put(bucket, name, data string) {
	w.t.Helper()
	o, err := w.storage.Create(bucket, name, sandboxstorage.CreateOptions{})
	if err == nil {
		defer o.Abort()
		if _, err = io.WriteString(o, data); err == nil {
			_, err = o.Commit()
		}
	}
	if err != nil {
		w.t.Fatalf("put %s: %v", name, err)
	}
}

func (w *world) objects(bucket, prefix string) map[string]string {
	w.t.Helper()
	list, err := w.storage.List(bucket, prefix)
	if err != nil {
		w.t.Fatal(err)
	}
	all := map[string]string{}
	for _, o := range list {
		r, _, err := w.storage.Open(bucket, o.Name, 0)
		if err != nil {
			w.t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		r.Close()
		if err != nil {
			w.t.Fatal(err)
		}
		all[strings.TrimPrefix(o.Name, prefix)] = string(b)
	}
	return all
}

// operations counts the service's operations of a type.
func (w *world) operations(kind string) int {
	w.t.Helper()
	ops, err := w.lustre.ListOperations(w.t.Context(), parent, "")
	if err != nil {
		w.t.Fatal(err)
	}
	n := 0
	for _, op := range ops {
		if op.Metadata != nil && op.Metadata.Type == kind {
			n++
		}
	}
	return n
}

// tree reads all files below a directory, following the first link.
func (w *world) tree(dir string) map[string]string {
	w.t.Helper()
	all := map[string]string{}
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		w.t.Fatal(err)
	}
	err = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		rel, _ := filepath.Rel(dir, path)
		all[rel] = string(b)
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return all
}

// leftovers are paths below the datasets that belong to no published version.
func (w *world) leftovers() []string {
	found, err := filepath.Glob(filepath.Join(w.mount, files.Datasets, "*", "*.partial-*"))
	if err != nil {
		w.t.Fatal(err)
	}
	return found
}

func (w *world) env(id uint32) map[string]string {
	w.t.Helper()
	data, err := os.ReadFile(filepath.Join(w.dir, "env", fmt.Sprint(id)))
	if err != nil {
		w.t.Fatal(err)
	}
	vars := map[string]string{}
	for line := range strings.Lines(string(data)) {
		k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		vars[k] = v
	}
	return vars
}
