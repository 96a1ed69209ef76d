// Package staging_test runs sluiced's staging against the sandbox's real
// services over TCP, in a child process that is really killed.
package staging_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/oauth2"
	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/controller"
	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/controller/store"
	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/compute"
	"github.com/sluicehpc/sluice/gcp/iam"
	"github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/gcp/storage"
	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/policy"
	sandboxcompute "github.com/sluicehpc/sluice/sandbox/compute"
	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/front"
	sandboxiam "github.com/sluicehpc/sluice/sandbox/iam"
	sandboxlustre "github.com/sluicehpc/sluice/sandbox/lustre"
	sandboxstorage "github.com/sluicehpc/sluice/sandbox/storage"
	"github.com/sluicehpc/sluice/slurm/scontrol"
	"github.com/sluicehpc/sluice/staging/files"
	"github.com/sluicehpc/sluice/trust"
	"github.com/sluicehpc/sluice/trust/idtoken"
)

const (
	project  = "sluice-sandbox"
	zone     = "us-central1-a"
	parent   = "projects/" + project + "/locations/" + zone
	instance = parent + "/instances/scratch"
	alice    = 10001
	bob      = 10002
	trial    = 30007 // a group that alice is in, and bob not
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

// daemon is sluiced without systemd and Slurm, its credentials a metadata server's.
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
	credentials, err := iam.NewClient(ctx, cfg.Endpoints.GCP())
	if err != nil {
		return err
	}
	bucket, err := storage.NewClient(cfg.Endpoints.Storage, func(p storage.Place) oauth2.TokenSource {
		return credentials.DataSource(ctx, iam.DataToken{Account: p.Account, Bucket: p.Bucket, Prefix: p.Prefix})
	})
	if err != nil {
		return err
	}
	lc, err := lustre.NewClient(ctx, gcp.ClientOptions(cfg.Endpoints.Lustre)...)
	if err != nil {
		return err
	}
	cc, err := compute.New(ctx, compute.Config{Project: cfg.Project, Zone: cfg.Zone, Endpoint: cfg.Endpoints.Compute})
	if err != nil {
		return err
	}
	authority, err := trust.OpenCA(filepath.Join(dir, "tls"), cfg.Cluster, clock.System)
	if err != nil {
		return err
	}
	audit, err := policy.OpenAudit(filepath.Join(dir, "log", "audit.log"), clock.System)
	if err != nil {
		return err
	}
	armed := filepath.Join(dir, "fault")
	c, err := controller.New(controller.Parts{
		Config: cfg, Store: db, Bucket: bucket, Lustre: lc, Compute: cc, Files: &files.Client{},
		Slurm: fakeSlurm{dir}, Users: fakeUsers{}, SlurmUser: users.User{Name: "slurm", UID: 64030, GID: 64030},
		Authority: authority, Identity: idtoken.New(cfg.Endpoints.IAM, clock.System), Audit: audit, IAM: credentials,
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

func (fakeUsers) GroupIDs(_ context.Context, name string) ([]uint32, error) {
	if name == "alice" {
		return []uint32{20001, trial}, nil
	}
	return []uint32{20002}, nil
}
func (fakeUsers) GroupID(_ context.Context, name string) (uint32, error) {
	if name == "trial" {
		return trial, nil
	}
	return 0, users.ErrUnknown
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
	t          *testing.T
	dir        string
	mount      string
	storage    *sandboxstorage.Server
	iam        *sandboxiam.Server
	admin      *iam.Client // the project's owner
	lustre     *lustre.Client
	faults     *faults.Set
	storageURL string
	// metadata is the metadata server of the daemon's VM, host:port.
	metadata string

	mu     sync.Mutex // guards what follows
	tokens []string   // that Cloud Storage has seen
	proc   *exec.Cmd
	ended  chan struct{}
	starts int
	stop   bool
}

// The project's accounts.
var (
	sluicedAccount = iam.AccountEmail("sluiced", project)
	nodeAccount    = iam.AccountEmail("sluice-node", project)
	dataAccount    = iam.AccountEmail("research-data", project)
	trialAccount   = iam.AccountEmail("trial-data", project)
)

// machines are VMs that run and do nothing.
type machines struct{}

func (machines) Start(context.Context, sandboxcompute.Machine) error { return nil }
func (machines) Stop(context.Context, string, time.Duration) error   { return nil }
func (machines) Remove(context.Context, string) error                { return nil }

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
	cloudClock := w.faults.Clock(clock.System)
	w.iam = sandboxiam.New(sandboxiam.Options{Project: project, Clock: cloudClock})
	w.storage, err = sandboxstorage.New(sandboxstorage.Options{Dir: filepath.Join(dir, "cloud-storage"), Project: project, Now: cloudClock.Now, IAM: w.iam})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.storage.Close() })
	ls, err := sandboxlustre.New(sandboxlustre.Options{
		Dir: filepath.Join(dir, "cloud-lustre"), Bucket: sandboxlustre.FromStorage(w.storage), Faults: w.faults, Now: cloudClock.Now, IAM: w.iam,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ls.Close)
	cs, err := sandboxcompute.New(sandboxcompute.Config{Project: project, Zone: zone, VMs: machines{}, Faults: w.faults, Clock: cloudClock, IAM: w.iam, Caller: w.iam.Caller})
	if err == nil {
		err = cs.AddImage("i", "", "")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cs.Close)
	serve := func(h http.Handler) string {
		s := httptest.NewServer(h)
		t.Cleanup(s.Close)
		return s.URL
	}
	// Its faults are off until a test sets them.
	f := &front.Front{Faults: w.faults, Clock: cloudClock}
	service := func(name string, h http.Handler, apis ...string) string {
		return serve(discoverytest.Strict(t, f.Handler(name, h), append(apis, name)...))
	}
	endpoints := config.Endpoints{
		Lustre: service("lustre", ls), Storage: service("storage", http.HandlerFunc(w.serveStorage)),
		Compute: service("compute", cs), IAM: service("iam", w.iam, "iamcredentials", "sts", "cloudresourcemanager"),
	}
	w.storageURL = endpoints.Storage
	w.metadata = strings.TrimPrefix(serve(http.HandlerFunc(w.serveToken)), "http://")
	owner := option.WithTokenSource(oauth2.StaticTokenSource(w.mint(w.iam.Admin())))
	w.admin, err = iam.NewClient(t.Context(), endpoints.GCP(), owner)
	if err != nil {
		t.Fatal(err)
	}
	w.lustre, err = lustre.NewClient(t.Context(), option.WithEndpoint(endpoints.Lustre), owner)
	if err != nil {
		t.Fatal(err)
	}
	w.accounts()
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
		Cluster: "c", Project: project, Zone: zone, Endpoints: endpoints,
		FileSystems: []config.FileSystem{{Name: "scratch", Instance: instance, Mount: w.mount}},
		NodeSets:    []config.NodeSet{{Name: "n", Nodes: "n[1-2]", MachineType: "n2-standard-2", Image: "i", ServiceAccount: nodeAccount, CPUs: 1, MemoryMiB: 1}},
		Partitions:  []config.Partition{{Name: "main", NodeSets: []string{"n"}}},
		Slurm:       config.Slurm{ControllerHost: "controller", AccountingHost: "controller"},
		Policy: policy.Policy{
			{Accounts: []string{"research"}, Read: []string{"gs://corpus/", "gs://b-data/", "gs://nowhere-at-all/"}, Write: []string{"gs://results/"}, ServiceAccount: dataAccount},
			{Accounts: []string{"trial"}, Read: []string{"gs://patients/trial7/"}, ServiceAccount: trialAccount, Group: "trial"},
		},
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

// accounts makes the project's accounts as docs/permissions.md says.
func (w *world) accounts() {
	w.t.Helper()
	for _, email := range []string{sluicedAccount, nodeAccount, dataAccount, trialAccount} {
		id, _, _ := strings.Cut(email, "@")
		if _, err := w.admin.CreateServiceAccount(w.t.Context(), project, id, ""); err != nil {
			w.t.Fatal(err)
		}
	}
	sluiced, agent := []string{"serviceAccount:" + sluicedAccount}, []string{"serviceAccount:" + w.iam.LustreAgent()}
	w.role("controller", iam.ControllerPermissions, "")
	w.role("nodes", iam.NodeAccountPermissions, "")
	w.role("data", iam.DataAccountPermissions, "")
	w.grant(w.admin.GrantProject(w.t.Context(), project,
		iam.Binding{Role: "projects/" + project + "/roles/controller", Members: sluiced},
		iam.Binding{Role: iam.ObjectUser, Members: []string{"serviceAccount:" + dataAccount, "serviceAccount:" + trialAccount}}))
	w.grant(w.admin.GrantAccount(w.t.Context(), nodeAccount, iam.Binding{Role: "projects/" + project + "/roles/nodes", Members: sluiced}))
	for _, data := range []string{dataAccount, trialAccount} {
		w.grant(w.admin.GrantAccount(w.t.Context(), data,
			iam.Binding{Role: "projects/" + project + "/roles/data", Members: sluiced},
			iam.Binding{Role: "roles/iam.serviceAccountTokenCreator", Members: agent}))
	}
}

func (w *world) grant(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// role makes a role of the permissions, or makes it anew, but without one.
func (w *world) role(id string, permissions []iam.Permission, without string) {
	w.t.Helper()
	names := slices.DeleteFunc(iam.Names(permissions), func(p string) bool { return p == without })
	_, err := w.admin.CreateRole(w.t.Context(), project, id, id, names)
	w.grant(err)
}

// mint returns a token of an account.
func (w *world) mint(account string) *oauth2.Token {
	w.t.Helper()
	token, expires, err := w.iam.Mint(account, nil, time.Hour)
	if err != nil {
		w.t.Fatal(err)
	}
	return &oauth2.Token{AccessToken: token, TokenType: "Bearer", Expiry: expires}
}

// serveStorage is Cloud Storage, and notes the tokens that are used.
func (w *world) serveStorage(rw http.ResponseWriter, r *http.Request) {
	token := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
	w.mu.Lock()
	if !slices.Contains(w.tokens, token) {
		w.tokens = append(w.tokens, token)
	}
	w.mu.Unlock()
	w.storage.ServeHTTP(rw, r)
}

// serveToken is as much of a metadata server as credentials need.
func (w *world) serveToken(rw http.ResponseWriter, r *http.Request) {
	rw.Header().Set("Metadata-Flavor", "Google")
	switch strings.TrimPrefix(r.URL.Path, "/computeMetadata/v1/") {
	case "instance/service-accounts/default/token":
		token, expires, err := w.iam.Mint(sluicedAccount, nil, time.Hour)
		if err != nil {
			http.Error(rw, err.Error(), http.StatusInternalServerError)
			return
		}
		rw.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(rw, `{"access_token":%q,"expires_in":%d,"token_type":"Bearer"}`, token, int(time.Until(expires).Seconds()))
	case "project/project-id":
		io.WriteString(rw, project)
	case "":
	default:
		http.NotFound(rw, r)
	}
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
	cmd.Env = append(os.Environ(), "STAGING_TEST_DAEMON="+w.dir, "GCE_METADATA_HOST="+w.metadata, "HOME="+w.dir, "GOOGLE_APPLICATION_CREDENTIALS=")
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
