package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/internal/command"
	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/lustre/probe"
	"github.com/sluicehpc/sluice/slurm/conf"
)

const sluiceYAML = `cluster: test
project: test-project
zone: us-central1-a
file_systems:
  - name: scratch
    instance: projects/test-project/locations/us-central1-a/instances/scratch
    mount: /lustre
nodesets:
  - {name: a, nodes: "n[1-2]", machine_type: n2-standard-2, image_family: f, cpus: 2, memory_mib: 2048}
partitions:
  - {name: main, nodesets: [a]}
slurm: {controller_host: controller, accounting_host: controller, user: daemon, auth: slurm, key_file: KEY}
`

// now is what the tests' clock says.
var now = time.Date(2027, 1, 2, 3, 4, 5, 0, time.UTC)

// site is a controller on which all is well; what a test changes is wrong.
type site struct {
	*Site
	dir      string
	config   *config.Config
	instance lustre.Instance
	programs map[string]string // output, or an error after "error: "
	answers  map[string]any    // of sluiced, by operation; an error is returned
	date     time.Time
	mount    probe.Result
	guarded  bool
}

func newSite(t *testing.T) *site {
	t.Helper()
	dir := t.TempDir()
	text := strings.ReplaceAll(sluiceYAML, "KEY", filepath.Join(dir, "slurm.key"))
	must(t, os.WriteFile(filepath.Join(dir, "sluice.yaml"), []byte(text), 0o644))
	must(t, os.WriteFile(filepath.Join(dir, "slurm.key"), []byte("key"), 0o600))
	c, err := config.Load(filepath.Join(dir, "sluice.yaml"))
	must(t, err)
	owner, err := users.ByName(t.Context(), c.Slurm.User)
	must(t, err)
	must(t, os.Chown(filepath.Join(dir, "slurm.key"), int(owner.UID), int(owner.GID)))
	must(t, c.WriteSlurm(t.Context(), filepath.Join(dir, "slurm")))
	must(t, os.Mkdir(filepath.Join(dir, "programs"), 0o755))
	for _, name := range []string{"sluice-hook", "sluice-prolog", "sluice-epilog"} {
		must(t, os.WriteFile(filepath.Join(dir, "programs", name), nil, 0o755))
	}
	for _, name := range conf.ProgramLinks {
		must(t, os.Symlink("sluice-hook", filepath.Join(dir, "programs", name)))
	}
	s := &site{
		dir: dir, config: c, date: now, guarded: true, mount: probe.Result{State: probe.OK, Took: time.Millisecond},
		instance: lustre.Instance{State: lustre.StateActive, MountPoint: "10.0.0.5@tcp:/fs", CapacityGib: 9000},
		programs: map[string]string{
			"scontrol ping": "Slurmctld(primary) at controller is UP", "slurmctld -V": "slurm-wlm 24.11.5",
			"sacctmgr --noheader --parsable2 list cluster format=cluster": "test", "stat --file-system --format=%S %b %a /lustre": "4096 1000000 900000",
		},
		answers: map[string]any{
			api.OpStatus: api.Status{Version: "v1", Cluster: "test"},
			api.OpNodeList: api.Nodes{Nodes: []api.Node{
				{Name: "controller", Role: api.RoleController, State: "ready", SeenAt: api.FormatTime(now.Add(-time.Second))},
				{Name: "n1", Role: api.RoleCompute, State: "absent"},
			}},
			api.OpTransferList: api.Transfers{Transfers: []api.Transfer{{ID: "t1", State: "DONE", QueuedAt: api.FormatTime(now.Add(-72 * time.Hour))}}},
		},
	}
	server := httptest.NewServer(http.HandlerFunc(s.serve))
	t.Cleanup(server.Close)
	s.Site = &Site{
		ConfigPath: filepath.Join(dir, "sluice.yaml"), SlurmDir: filepath.Join(dir, "slurm"), ProgramDir: filepath.Join(dir, "programs"), Root: dir, Version: "v1",
		Run: func(_ context.Context, spec command.Spec) ([]byte, error) {
			out, known := s.programs[strings.Join(append([]string{spec.Path}, spec.Args...), " ")]
			if text, bad := strings.CutPrefix(out, "error: "); bad || !known {
				return nil, &command.Error{Program: spec.Path, Exit: 1, Err: errors.New(text)}
			}
			return []byte(out), nil
		},
		Call: func(_ context.Context, op string, _, out any) error {
			switch v := s.answers[op].(type) {
			case error:
				return v
			case api.Status:
				*out.(*api.Status) = v
			case api.Nodes:
				*out.(*api.Nodes) = v
			case api.Transfers:
				*out.(*api.Transfers) = v
			}
			return nil
		},
		Probe: func(c probe.Check) probe.Result { return s.mount },
		Lustre: func(ctx context.Context, _ *config.Config) (*lustre.Client, error) {
			return lustre.NewClient(ctx, option.WithEndpoint(server.URL), option.WithoutAuthentication())
		},
		HTTP: &http.Client{Transport: redirect{server.URL}},
		Now:  func() time.Time { return now },
		Connect: func(_ context.Context, uid uint32, _ string) error {
			if uid != 0 && s.guarded {
				return errors.New("connection timed out")
			}
			return nil
		},
		Permissions: func(context.Context, *config.Config) ([]string, int, error) { return nil, 20, nil },
	}
	t.Setenv("SLUICE_ROOT", dir)
	state := filepath.Dir(c.StorePath())
	must(t, os.MkdirAll(filepath.Dir(state), 0o755))
	must(t, os.Mkdir(state, 0o700))
	must(t, os.WriteFile(c.StorePath(), nil, 0o600))
	return s
}

// redirect sends every request to a test's server.
type redirect struct{ url string }

func (r redirect) RoundTrip(req *http.Request) (*http.Response, error) {
	to, err := http.NewRequestWithContext(req.Context(), req.Method, r.url, nil)
	if err != nil {
		return nil, err
	}
	return http.DefaultTransport.RoundTrip(to)
}

func (s *site) serve(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Date", s.date.Format(http.TimeFormat))
	w.Header().Set("Content-Type", "application/json")
	switch {
	case strings.HasSuffix(r.URL.Path, "/instances/scratch"):
		fmt.Fprintf(w, `{"state":%q,"mountPoint":%q,"capacityGib":"%d"}`, s.instance.State, s.instance.MountPoint, s.instance.CapacityGib)
	case strings.HasSuffix(r.URL.Path, "/operations"):
		fmt.Fprint(w, `{}`)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestHealthySiteHasNoFindings(t *testing.T) {
	s := newSite(t)
	calls := 0
	list := s.Examine(t.Context(), func(ended, all int, f Finding) { calls++ })
	if len(list) != calls || len(list) < 15 {
		t.Errorf("%d findings, %d calls, want as many, and all checks", len(list), calls)
	}
	for _, f := range list {
		if f.Verdict != OK || f.Next != "" || f.Detail == "" {
			t.Errorf("%+v, want ok", f)
		}
	}
}

func TestWhatIsWrongIsFound(t *testing.T) {
	at := func(s *site, name string) string { return filepath.Join(s.dir, name) }
	for _, tt := range []struct {
		name    string
		breakIt func(t *testing.T, s *site)
		check   string
		verdict Verdict
		want    string // in the detail
	}{
		{"no sluice.yaml", func(t *testing.T, s *site) { must(t, os.Remove(s.ConfigPath)) }, "configuration", Fail, "is not there"},
		{"bad sluice.yaml", func(t *testing.T, s *site) { must(t, os.WriteFile(s.ConfigPath, []byte("cluster: [\n"), 0o644)) }, "configuration", Fail, "sluice.yaml:"},
		{"no sluiced", func(t *testing.T, s *site) { s.answers[api.OpStatus] = local.ErrUnreachable }, "sluiced", Fail, "does not answer"},
		{"an older sluiced", func(t *testing.T, s *site) { s.answers[api.OpStatus] = api.Status{Version: "v0", Cluster: "test"} }, "sluiced", Warn, "sluiced is v0"},
		{"another cluster", func(t *testing.T, s *site) { s.answers[api.OpStatus] = api.Status{Version: "v1", Cluster: "old"} }, "sluiced", Warn, `"old"`},
		{"no slurmctld", func(t *testing.T, s *site) { s.programs["scontrol ping"] = "Slurmctld(primary) at controller is DOWN" }, "slurmctld", Fail, "DOWN"},
		{"another Slurm", func(t *testing.T, s *site) { s.programs["slurmctld -V"] = "slurm-wlm 25.05.1" }, "slurmctld", Fail, "25.05"},
		{"no slurmdbd", func(t *testing.T, s *site) {
			s.programs["sacctmgr --noheader --parsable2 list cluster format=cluster"] = "error: refused"
		}, "slurmdbd", Fail, "refused"},
		{"unknown cluster", func(t *testing.T, s *site) {
			s.programs["sacctmgr --noheader --parsable2 list cluster format=cluster"] = "other"
		}, "slurmdbd", Fail, "does not know"},
		{"upgrading instance", func(t *testing.T, s *site) { s.instance.State = lustre.StateUpgrading }, "file system scratch: instance", Warn, "UPGRADING"},
		{"stopped instance", func(t *testing.T, s *site) { s.instance.State = lustre.StateStopped }, "file system scratch: instance", Fail, "STOPPED"},
		{"hung mount", func(t *testing.T, s *site) { s.mount = probe.Result{State: probe.Hung, Detail: "did not answer"} }, "file system scratch: mount", Fail, "did not answer"},
		{"no mount", func(t *testing.T, s *site) { s.mount = probe.Result{State: probe.NotMounted, Detail: "nothing"} }, "file system scratch: mount", Fail, "nothing"},
		{"nearly full", func(t *testing.T, s *site) {
			s.programs["stat --file-system --format=%S %b %a /lustre"] = "4096 1000000 80000"
		}, "file system scratch: space", Warn, "92 %"},
		{"full", func(t *testing.T, s *site) {
			s.programs["stat --file-system --format=%S %b %a /lustre"] = "4096 1000000 0"
		}, "file system scratch: space", Fail, "100 %"},
		{"a changed slurm.conf", func(t *testing.T, s *site) {
			data, err := os.ReadFile(at(s, "slurm/slurm.conf"))
			must(t, err)
			must(t, os.WriteFile(at(s, "slurm/slurm.conf"), []byte(strings.Replace(string(data), "ReturnToService=2", "ReturnToService=1", 1)), 0o644))
		}, "Slurm's files", Fail, `"ReturnToService=1" instead of "ReturnToService=2"`},
		{"no burst_buffer.lua", func(t *testing.T, s *site) { must(t, os.Remove(at(s, "slurm/burst_buffer.lua"))) }, "Slurm's files", Fail, "burst_buffer.lua"},
		{"a readable slurmdbd.conf", func(t *testing.T, s *site) { must(t, os.Chmod(at(s, "slurm/slurmdbd.conf"), 0o644)) }, "Slurm's files", Fail, "mode 0644"},
		{"a missing link", func(t *testing.T, s *site) { must(t, os.Remove(at(s, "programs/sluice-resume"))) }, "programs", Fail, "sluice-resume"},
		{"a link to elsewhere", func(t *testing.T, s *site) {
			must(t, os.Remove(at(s, "programs/sluice-resume")))
			must(t, os.Symlink("sluice-prolog", at(s, "programs/sluice-resume")))
		}, "programs", Fail, "want a link to sluice-hook"},
		{"a hook that others may write", func(t *testing.T, s *site) { must(t, os.Chmod(at(s, "programs/sluice-prolog"), 0o777)) }, "programs", Fail, "others than root"},
		{"a hook that is not executable", func(t *testing.T, s *site) { must(t, os.Chmod(at(s, "programs/sluice-hook"), 0o644)) }, "programs", Fail, "not a program"},
		{"a readable key", func(t *testing.T, s *site) { must(t, os.Chmod(at(s, "slurm.key"), 0o644)) }, "secrets", Fail, "0644"},
		{"no key", func(t *testing.T, s *site) { must(t, os.Remove(at(s, "slurm.key"))) }, "secrets", Fail, "slurm.key"},
		{"a readable store", func(t *testing.T, s *site) { must(t, os.Chmod(filepath.Dir(s.config.StorePath()), 0o755)) }, "secrets", Fail, "0755"},
		{"a readable audit log", func(t *testing.T, s *site) {
			must(t, os.MkdirAll(at(s, "var/log/sluice"), 0o755))
			must(t, os.WriteFile(s.dir+auditLog, nil, 0o644))
		}, "secrets", Fail, "audit.log"},
		{"a late agent", func(t *testing.T, s *site) {
			s.answers[api.OpNodeList] = api.Nodes{Nodes: []api.Node{{Name: "controller", Role: api.RoleController, State: "ready", SeenAt: api.FormatTime(now.Add(-2 * time.Minute))}}}
		}, "agents", Fail, "2m0s ago"},
		{"a node that is not ready", func(t *testing.T, s *site) {
			s.answers[api.OpNodeList] = api.Nodes{Nodes: []api.Node{{Name: "n1", Role: api.RoleCompute, State: "not_ready", SeenAt: api.FormatTime(now), Mounts: []api.MountState{{Name: "scratch", State: "hung"}}}}}
		}, "agents", Fail, "n1 (scratch is hung)"},
		{"a refused enrolment", func(t *testing.T, s *site) {
			s.answers[api.OpNodeList] = api.Nodes{Nodes: []api.Node{{Name: "n1", Role: api.RoleCompute, State: "ready", SeenAt: api.FormatTime(now), Refusal: &api.Refusal{Why: "another key", Count: 1}}}}
		}, "agents", Fail, "another key"},
		{"no agent on the controller", func(t *testing.T, s *site) { s.answers[api.OpNodeList] = api.Nodes{} }, "agents", Fail, "controller's own agent"},
		{"an old transfer", func(t *testing.T, s *site) {
			s.answers[api.OpTransferList] = api.Transfers{Transfers: []api.Transfer{{ID: "t9", State: "RUNNING", QueuedAt: api.FormatTime(now.Add(-25 * time.Hour))}}}
		}, "transfers", Warn, "t9 (RUNNING since"},
		{"a clock that is behind", func(t *testing.T, s *site) { s.date = now.Add(5 * time.Second) }, "clock", Warn, "-5.5s off"},
		{"a clock that is far ahead", func(t *testing.T, s *site) { s.date = now.Add(-time.Minute) }, "clock", Fail, "59.5s off"},
		{"no guard", func(t *testing.T, s *site) { s.guarded = false }, "metadata address", Fail, "every user"},
		{"a missing permission", func(t *testing.T, s *site) {
			s.Permissions = func(context.Context, *config.Config) ([]string, int, error) {
				return []string{"compute.instances.create is missing"}, 20, nil
			}
		}, "permissions", Fail, "compute.instances.create"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newSite(t)
			tt.breakIt(t, s)
			list := s.Examine(t.Context(), nil)
			for _, f := range list {
				if f.Name != tt.check {
					continue
				}
				if f.Verdict != tt.verdict || !strings.Contains(f.Detail, tt.want) || f.Next == "" {
					t.Errorf("%+v, want %s with %q and a next step", f, tt.verdict, tt.want)
				}
				if warnings, failures := Findings(list); warnings+failures == 0 {
					t.Error("Findings counts none")
				}
				return
			}
			t.Errorf("no check %q in %+v", tt.check, list)
		})
	}
}

// A check that hangs, whatever its deadline says, is left behind and named.
func TestHangingCheckIsLeftBehind(t *testing.T) {
	s := newSite(t)
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	s.Probe = func(probe.Check) probe.Result { <-release; return probe.Result{State: probe.OK} }
	checkTimeout, grace = 50*time.Millisecond, 50*time.Millisecond
	t.Cleanup(func() { checkTimeout, grace = defaultCheckTimeout, defaultGrace })
	seen := 0
	for _, f := range s.Examine(t.Context(), nil) {
		if strings.HasPrefix(f.Name, "file system scratch: mount") || strings.HasPrefix(f.Name, "file system scratch: space") {
			seen++
			if f.Verdict != Fail || !strings.Contains(f.Detail, "no answer within") {
				t.Errorf("%+v, want a failure", f)
			}
		}
	}
	if seen != 2 {
		t.Errorf("%d of 2 hanging checks are named", seen)
	}
}

func TestInterruptedExamination(t *testing.T) {
	s := newSite(t)
	ctx, cancel := context.WithCancel(t.Context())
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	s.Probe = func(probe.Check) probe.Result { cancel(); <-release; return probe.Result{} }
	if list := s.Examine(ctx, nil); list != nil {
		t.Errorf("got %+v, want nothing", list)
	}
}

func TestBytesText(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 9000 << 30: "8.8 TiB"} {
		if got := bytesText(n); got != want {
			t.Errorf("bytesText(%d) = %q, want %q", n, got, want)
		}
	}
}
