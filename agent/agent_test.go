package agent

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"cloud.google.com/go/compute/metadata"
	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/lustre/probe"
	"github.com/sluicehpc/sluice/prolog"
	"github.com/sluicehpc/sluice/trust"
)

// callAs makes the test binary a caller of another uid: socket and operation follow.
const callAs = "SLUICE_TEST_CALL"

func TestMain(m *testing.M) {
	if socket := os.Getenv(callAs); socket != "" {
		var out json.RawMessage
		err := local.Call(context.Background(), socket, os.Args[1], api.PrologCall{JobID: 1, UID: 1}, &out)
		if err != nil {
			os.Stdout.WriteString(string(api.CodeOf(err)) + ": " + err.Error())
			os.Exit(1)
		}
		os.Stdout.Write(out)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestBootOfAComputeNode(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	v.kernel.mountErr = errors.New("the server cannot be reached")
	var startedAfter api.NodeReport
	v.boot(func(a *Agent) {
		start := a.systemctl
		a.systemctl = func(ctx context.Context, verb, unit string) error {
			startedAfter, _ = s.last()
			return start(ctx, verb, unit)
		}
	})

	eventually(t, "a report that names why the mount fails", func() bool {
		r, _ := s.last()
		return len(r.Mounts) == 1 && strings.Contains(r.Mounts[0].Detail, "cannot be reached")
	})
	r, _ := s.last()
	if r.ReadyAt != "" || r.Mounts[0].State != string(probe.NotMounted) {
		t.Errorf("got %+v, want a node that is not ready", r)
	}
	if got := v.prolog(1, aliceUID); got.Ready || got.Cause != "unknown" || !strings.Contains(got.Reason, "cannot be reached") {
		t.Errorf("Prolog before the mount: %+v", got)
	}
	if u := v.units(); len(u) != 0 {
		t.Errorf("started %v before the mounts answered", u)
	}
	if _, err := os.Stat(v.root + slurmdFlag); err == nil {
		t.Error("slurmd may start before the mounts answered")
	}
	v.kernel.set(func(k *kernel) { k.mountErr = nil })

	eventually(t, "slurmd", func() bool { return len(v.units()) > 0 })
	if startedAfter.ReadyAt == "" {
		t.Error("slurmd was started before sluiced heard that the node is ready")
	}
	if got := v.prolog(1, aliceUID); !got.Ready {
		t.Errorf("Prolog after the mount: %+v", got)
	}
	r, _ = s.last()
	want := api.NodeReport{Version: "test",
		BootID: r.BootID, StartedAt: r.StartedAt, ReadyAt: r.ReadyAt,
		Mounts: []api.MountState{{Name: "scratch", Source: scratch.Source, Dir: scratch.Dir, State: "ok"}}}
	if d := cmp.Diff(want, r); d != "" {
		t.Errorf("report (-want +got):\n%s", d)
	}
	checks, err := prolog.ReadMounts(v.root + prolog.MountsFile)
	if wantChecks := []probe.Check{{Dir: "/lustre", Source: scratch.Source, Types: []string{"lustre"}}}; err != nil || cmp.Diff(wantChecks, checks) != "" {
		t.Errorf("mounts for later Prologs: %v, %v, want %v", checks, err, wantChecks)
	}
	if u := v.units(); !slices.Equal(u, []string{"slurmd"}) {
		t.Errorf("started %v, want slurmd once", u)
	}
}

func TestSlurmdIsForComputeNodesOnly(t *testing.T) {
	for _, role := range []api.Role{api.RoleLogin, api.RoleController} {
		s := newSluiced(t, role)
		v := newVM(t, s)
		a, stop := v.boot(nil)
		if !a.reported.wait(t.Context()) {
			t.Fatal("not ready")
		}
		stop()
		if u := v.units(); len(u) != 0 {
			t.Errorf("%s: started %v", role, u)
		}
	}
}

func TestSlurmdStartsThoughSluicedNeverHears(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	s.hook = func(_ context.Context, op string) error {
		r, n := s.last()
		if op == api.OpAgentReport && n > 0 && r.ReadyAt == "" {
			return api.Errorf(api.CodeUnavailable, "not now") // after the first report, which says what to mount
		}
		return nil
	}
	v := newVM(t, s)
	failures := 0
	v.boot(func(a *Agent) {
		a.pace.grace = time.Millisecond
		start := a.systemctl
		a.systemctl = func(ctx context.Context, verb, unit string) error {
			if failures++; failures < 3 {
				return errors.New("systemd is busy")
			}
			return start(ctx, verb, unit)
		}
	})
	eventually(t, "slurmd", func() bool { return slices.Equal(v.units(), []string{"slurmd"}) })
}

func TestSluicedAwayAndBack(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	a, _ := v.boot(nil)
	a.reported.wait(t.Context())
	before, _ := s.last()
	if got := v.prolog(1, aliceUID); !got.Ready {
		t.Fatalf("got %+v, want ready", got)
	}
	eventually(t, "the first job's prolog at sluiced", func() bool { return len(s.events()) == 1 })
	s.stop()

	eventually(t, "the agent to notice", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.lastError != ""
	})
	if got := v.prolog(2, aliceUID); !got.Ready {
		t.Errorf("with sluiced away: %+v, want ready", got)
	}
	v.epilog(1)
	v.epilog(2)
	if files, err := prolog.Kept(v.root + prolog.SpoolDir); err != nil || len(files) != 3 {
		t.Errorf("kept %v, %v, want three moments", files, err)
	}
	_, n := s.last()
	s.start()
	eventually(t, "the moments at sluiced", func() bool { return len(s.events()) == 4 })
	var got []string
	for _, e := range s.events() {
		got = append(got, e.Event+" "+strconv.Itoa(int(e.JobID)))
		if _, err := time.Parse(api.TimeFormat, e.At); err != nil || e.Node != "c-0" {
			t.Errorf("event %+v: %v", e, err)
		}
	}
	if want := []string{"prolog 1", "prolog 2", "epilog 1", "epilog 2"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	eventually(t, "an empty spool", func() bool { files, _ := prolog.Kept(v.root + prolog.SpoolDir); return len(files) == 0 })
	eventually(t, "reports again", func() bool { _, m := s.last(); return m > n })
	if after, _ := s.last(); after.ReadyAt != before.ReadyAt {
		t.Errorf("ready at %s, before %s: it is set once", after.ReadyAt, before.ReadyAt)
	}
}

func TestRestartWithEverythingAway(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	_, stop := v.boot(nil)
	eventually(t, "slurmd", func() bool { return len(v.units()) == 1 })
	v.prolog(1, aliceUID)
	before, _ := s.last()
	stop()
	s.stop()
	v.metadata.set(func(m *attributes) { m.err = errors.New("metadata server away") })

	a, _ := v.boot(nil)
	if got := v.prolog(2, bobUID); !got.Ready {
		t.Errorf("got %+v, want ready from what the kernel shows", got)
	}
	a.mu.Lock()
	readyAt := a.state.ReadyAt
	a.mu.Unlock()
	if readyAt != before.ReadyAt {
		t.Errorf("ready at %s, before %s", readyAt, before.ReadyAt)
	}
	for _, uid := range []uint32{aliceUID, bobUID} { // one job from before, one from after
		if err := a.vouch(t.Context(), uid); err != nil {
			t.Errorf("uid %d: %v", uid, err)
		}
	}
	s.start()
	eventually(t, "all moments at sluiced", func() bool {
		jobs := map[uint32]bool{} // the first may come twice: the agent was stopped before it saw the answer
		for _, e := range s.events() {
			jobs[e.JobID] = true
		}
		return len(jobs) == 2
	})
	if u := v.units(); len(u) != 1 {
		t.Errorf("started %v, want slurmd once in a boot", u)
	}
}

// After another boot nothing of the earlier one counts.
func TestStateOfAnotherBoot(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	for name, text := range map[string]string{
		"another boot": `{"boot_id":"x","ready_at":"2020-01-01T00:00:00.000000000Z","known":true,"jobs":{"1":10001}}`,
		"damaged":      `{"boot_id":`,
		"no JSON":      "\x00\x00",
	} {
		path := v.root + stateFile
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		a, stop := v.boot(nil)
		a.reported.wait(t.Context())
		if r, _ := s.last(); r.ReadyAt < "2021" {
			t.Errorf("%s: ready at %q", name, r.ReadyAt)
		}
		if err := a.vouch(t.Context(), aliceUID); err == nil {
			t.Errorf("%s: vouched for a job of another boot", name)
		}
		stop()
		os.Remove(path)
	}
}

func TestMetadataAwayAtBoot(t *testing.T) {
	s := newSluiced(t, api.RoleLogin)
	v := newVM(t, s)
	v.metadata.err = errors.New("metadata server away")
	v.boot(nil)
	eventually(t, "the reason", func() bool {
		return strings.Contains(v.prolog(1, aliceUID).Reason, "metadata server away")
	})
	if err := v.call(api.OpStatus, nil, nil); api.CodeOf(err) != api.CodeDenied && api.CodeOf(err) != api.CodeUnavailable {
		t.Errorf("a user meanwhile: %v", err)
	}
	v.metadata.set(func(m *attributes) { m.err = nil })
	eventually(t, "a report", func() bool { _, n := s.last(); return n > 0 })
}

func TestSluicedGetsANewAuthority(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	a, _ := v.boot(nil)
	a.reported.wait(t.Context())
	s.stop()
	s.newAuthority()
	s.start()
	eventually(t, "the refusal", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return strings.Contains(a.lastError, s.authority.Fingerprint())
	})
	_, n := s.last()
	v.metadata.set(func(m *attributes) { m.values["instance/attributes/"+AttributeFingerprint] = s.authority.Fingerprint() })
	eventually(t, "reports again", func() bool { _, m := s.last(); return m > n })
}

func TestTroubleAndItsCause(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	s.answer.NextSeconds = 3600 // what is reported then is reported because something changed
	a, _ := v.boot(nil)
	a.reported.wait(t.Context())

	s.set(func(s *sluiced) { s.answer.Cause = "node" })
	v.kernel.set(func(k *kernel) { k.state = probe.Hung })
	eventually(t, "a report at once", func() bool { r, _ := s.last(); return r.Mounts[0].State == "hung" })
	eventually(t, "sluiced's judgement", func() bool { return v.prolog(1, aliceUID).Cause == "node" })
	if got := v.prolog(1, aliceUID); got.Ready || !strings.Contains(got.Reason, "scratch at /lustre: hung: as the test says") {
		t.Errorf("got %+v", got)
	}

	// Another kind of trouble is judged anew; until then nobody is at fault.
	answered, release := make(chan struct{}), make(chan struct{})
	s.set(func(s *sluiced) {
		s.hook = func(ctx context.Context, op string) error {
			if op != api.OpAgentReport {
				return nil
			}
			select {
			case answered <- struct{}{}:
			case <-ctx.Done():
				return ctx.Err()
			}
			select {
			case <-release:
			case <-ctx.Done():
			}
			return ctx.Err()
		}
	})
	v.kernel.set(func(k *kernel) { k.state = probe.Failed })
	<-answered
	eventually(t, "the change", func() bool { return strings.Contains(v.prolog(1, aliceUID).Reason, ": error: ") })
	if got := v.prolog(1, aliceUID); got.Cause != "unknown" {
		t.Errorf("not judged yet: got %+v, want unknown", got)
	}
	// The state changes while the report is on its way: its judgement is of the past.
	v.kernel.set(func(k *kernel) { k.state = probe.Hung })
	eventually(t, "the change", func() bool { return strings.Contains(v.prolog(1, aliceUID).Reason, ": hung: ") })
	release <- struct{}{}
	<-answered // the next report
	if got := v.prolog(1, aliceUID); got.Cause != "unknown" {
		t.Errorf("judged for the past: got %+v, want unknown", got)
	}
	s.set(func(s *sluiced) { s.hook = nil })
	close(release)
	v.kernel.set(func(k *kernel) { k.state = "" })
	eventually(t, "ready again", func() bool { return v.prolog(1, aliceUID).Ready })
}

func TestWhatIsMountedFollowsSluiced(t *testing.T) {
	s := newSluiced(t, api.RoleLogin)
	v := newVM(t, s)
	s.answer.FileSystems = nil
	a, _ := v.boot(nil)
	a.reported.wait(t.Context()) // nothing to mount: ready

	home := api.FileSystem{Name: "home", Dir: "/fast"}
	s.set(func(s *sluiced) { s.answer.FileSystems = []api.FileSystem{scratch, home} })
	eventually(t, "an instance without an address to be named", func() bool {
		return strings.Contains(v.prolog(1, aliceUID).Reason, "file system home at /fast: not_mounted: the instance has no address yet")
	})
	home.Source = "10.0.0.6@tcp:/home"
	s.set(func(s *sluiced) { s.answer.FileSystems = []api.FileSystem{scratch, home} })
	eventually(t, "both mounted", func() bool { return v.prolog(1, aliceUID).Ready })

	home.Source = ""
	s.set(func(s *sluiced) { s.answer.FileSystems = []api.FileSystem{scratch, home}; s.reports = nil })
	eventually(t, "two reports", func() bool { _, n := s.last(); return n >= 2 })
	if got := v.prolog(1, aliceUID); !got.Ready {
		t.Errorf("sluiced has forgotten the address: got %+v, want ready as before", got)
	}

	home.Source = "10.0.0.7@tcp:/home"
	s.set(func(s *sluiced) { s.answer.FileSystems = []api.FileSystem{scratch, home} })
	eventually(t, "the old mount to be named", func() bool {
		return strings.Contains(v.prolog(1, aliceUID).Reason, "wrong_source: 10.0.0.6@tcp:/home")
	})
	s.set(func(s *sluiced) { s.answer.FileSystems = []api.FileSystem{scratch} })
	eventually(t, "the rest", func() bool { return v.prolog(1, aliceUID).Ready })
	v.kernel.set(func(k *kernel) {
		if k.mounted["/fast"] == "" {
			t.Error("what is not named any more was unmounted")
		}
	})
	eventually(t, "the mounts for later Prologs", func() bool {
		checks, err := prolog.ReadMounts(v.root + prolog.MountsFile)
		return err == nil && len(checks) == 1
	})
}

func TestMountIsLostAndComesBack(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	a, _ := v.boot(nil)
	a.reported.wait(t.Context())
	v.kernel.set(func(k *kernel) { delete(k.mounted, "/lustre"); k.mounts = 0 })
	eventually(t, "another mount", func() bool {
		v.kernel.mu.Lock()
		defer v.kernel.mu.Unlock()
		return v.kernel.mounts > 0 && v.kernel.mounted["/lustre"] != ""
	})
	eventually(t, "ready again", func() bool { return v.prolog(1, aliceUID).Ready })
}

func TestSluicedHangs(t *testing.T) {
	s := newSluiced(t, api.RoleLogin)
	v := newVM(t, s)
	a, _ := v.boot(func(a *Agent) { a.pace.call, a.pace.user = 20*time.Millisecond, 20*time.Millisecond })
	a.reported.wait(t.Context())
	s.set(func(s *sluiced) {
		s.hook = func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() }
	})
	eventually(t, "the agent to notice", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.lastError != ""
	})
	if got := v.prolog(1, aliceUID); !got.Ready {
		t.Errorf("got %+v, want ready: hooks do not wait for sluiced", got)
	}
	_, err := a.handle(t.Context(), local.Peer{UID: aliceUID}, api.Request{Version: api.Version, Op: api.OpStatus})
	if api.CodeOf(err) != api.CodeUnavailable || !strings.Contains(err.Error(), "systemctl status sluiced") {
		t.Errorf("a user: got %v, want unavailable with a hint", err)
	}
	s.set(func(s *sluiced) { s.hook = nil })
	_, n := s.last()
	eventually(t, "reports again", func() bool { _, m := s.last(); return m > n })
}

func TestWhomTheAgentSpeaksFor(t *testing.T) {
	s, sl, sk := newSluiced(t, api.RoleCompute), newSluiced(t, api.RoleLogin), newSluiced(t, api.RoleController)
	compute, login, controller := newVM(t, s), newVM(t, sl), newVM(t, sk)
	c, _ := compute.boot(nil)
	l, _ := login.boot(nil)
	k, _ := controller.boot(nil)
	for _, a := range []*Agent{c, l, k} {
		a.reported.wait(t.Context())
	}
	compute.prolog(1, aliceUID)
	compute.prolog(2, slurmUID)
	compute.prolog(3, 0)
	compute.prolog(4, bobUID)
	compute.epilog(4)

	for _, tt := range []struct {
		name  string
		agent *Agent
		uid   uint32
		ok    bool
	}{
		{"compute, job here now", c, aliceUID, true},
		{"compute, job has left", c, bobUID, false},
		{"compute, never a job", c, 10003, false},
		{"compute, root with a job", c, 0, false},
		{"compute, SlurmUser with a job", c, slurmUID, false},
		{"login, a person", l, bobUID, true},
		{"login, the first person", l, 1000, true},
		{"login, a service", l, 999, false},
		{"login, root", l, 0, false},
		{"login, SlurmUser", l, slurmUID, false},
		{"login, nobody of the kernel", l, prolog.NoUID, false},
		{"controller, a person", k, bobUID, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			body := json.RawMessage(`{"all":true,"uid":0}`)
			s := map[*Agent]*sluiced{c: s, l: sl, k: sk}[tt.agent]
			s.set(func(s *sluiced) { s.users = nil })
			out, err := tt.agent.handle(t.Context(), local.Peer{UID: tt.uid}, api.Request{Version: 1, Op: api.OpStatus, Body: body})
			s.mu.Lock()
			defer s.mu.Unlock()
			if !tt.ok {
				if api.CodeOf(err) != api.CodeDenied || len(s.users) != 0 {
					t.Errorf("got %v and %v, want denied and nothing sent", err, s.users)
				}
				return
			}
			want := []api.UserCall{{UID: tt.uid, Op: api.OpStatus, Body: body}}
			if d := cmp.Diff(want, s.users); err != nil || d != "" {
				t.Errorf("%v, sent (-want +got):\n%s", err, d)
			}
			var st api.Status
			if raw, ok := out.(json.RawMessage); !ok || json.Unmarshal(raw, &st) != nil || st.Jobs != int(tt.uid) {
				t.Errorf("answer %v", out)
			}
		})
	}

	_, err := l.handle(t.Context(), local.Peer{UID: bobUID}, api.Request{Version: 1, Op: api.OpJobShow})
	if want := (&api.Error{Code: api.CodeNotFound, Message: "no such job", Hint: "ask squeue"}); cmp.Diff(err, error(want)) != "" {
		t.Errorf("sluiced's refusal: got %v, want %v", err, want)
	}
}

func TestSlurmUserIsNotKnown(t *testing.T) {
	s := newSluiced(t, api.RoleLogin)
	s.keys = api.Keys{}
	v := newVM(t, s)
	var mu sync.Mutex
	answer := error(errors.New("the directory server is slow"))
	a, _ := v.boot(func(a *Agent) {
		a.user = func(context.Context, string) (users.User, error) {
			mu.Lock()
			defer mu.Unlock()
			return users.User{}, answer
		}
	})
	a.reported.wait(t.Context())
	if err := a.vouch(t.Context(), aliceUID); api.CodeOf(err) != api.CodeUnavailable {
		t.Errorf("got %v, want unavailable: it might be SlurmUser", err)
	}
	mu.Lock()
	answer = users.ErrUnknown
	mu.Unlock()
	if err := a.vouch(t.Context(), aliceUID); err != nil {
		t.Errorf("a VM without SlurmUser: %v", err)
	}
}

// The kernel says who calls: a process of another uid.
func TestCallersOfOtherUsers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("needs root to start a process of another user")
	}
	s := newSluiced(t, api.RoleLogin)
	v := newVM(t, s)
	a, _ := v.boot(nil)
	a.reported.wait(t.Context())
	if err := os.Chmod(v.root, 0o755); err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// The test binary may lie where others cannot reach.
	data, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	exe = filepath.Join(v.root, "caller")
	if err := os.WriteFile(exe, data, 0o755); err != nil {
		t.Fatal(err)
	}
	as := func(uid uint32, op string) (string, error) {
		cmd := exec.CommandContext(t.Context(), exe, op)
		cmd.Env = []string{callAs + "=" + v.root + api.AgentSocket}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid, NoSetGroups: true}}
		out, err := cmd.Output()
		return string(out), err
	}
	for _, op := range []string{api.OpProlog, api.OpEpilog} {
		if out, err := as(aliceUID, op); err == nil || !strings.HasPrefix(out, "denied") {
			t.Errorf("%s as a user: %q, %v, want denied", op, out, err)
		}
	}
	out, err := as(aliceUID, api.OpStatus)
	var st api.Status
	if err != nil || json.Unmarshal([]byte(out), &st) != nil || st.Jobs != aliceUID {
		t.Errorf("status as a user: %q, %v, want that of uid %d", out, err, aliceUID)
	}
	if out, err := as(slurmUID, api.OpStatus); err == nil || !strings.HasPrefix(out, "denied") {
		t.Errorf("status as SlurmUser: %q, %v, want denied", out, err)
	}
	if out, err := as(0, api.OpStatus); err == nil || !strings.HasPrefix(out, "denied") {
		t.Errorf("status as root: %q, %v, want denied", out, err)
	}
	if out, err := as(0, api.OpProlog); err != nil || !strings.Contains(out, `"ready":true`) {
		t.Errorf("prolog as root: %q, %v", out, err)
	}
}

func TestHostileCallers(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	a, _ := v.boot(nil)
	a.reported.wait(t.Context())
	for _, line := range []string{
		"", "\n", "{", "null\n", "[]\n", `{"v":1}` + "\n", `{"v":1,"op":"agent.report","body":{}}` + "\n",
		`{"v":1,"op":"agent.user","body":{"uid":0,"op":"status"}}` + "\n", `{"v":1,"op":"node.resume"}` + "\n",
		`{"v":1,"op":"agent.prolog","body":{"job_id":-1}}` + "\n", `{"v":1,"op":"agent.prolog","body":{"job_id":0}}` + "\n",
		`{"v":1,"op":"agent.prolog","body":{"job_id":"x"}}` + "\n", `{"v":1,"op":"agent.epilog","body":[]}` + "\n",
		`{"v":1,"op":"agent.prolog"}` + "\n", strings.Repeat("[", 1<<16) + "\n", "\x00\xff\xfe\n",
	} {
		c, err := net.Dial("unix", v.root+api.AgentSocket)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte(line)); err != nil {
			t.Fatal(err)
		}
		c.(*net.UnixConn).CloseWrite()
		c.SetReadDeadline(time.Now().Add(10 * time.Second))
		var resp api.Response
		if err := json.NewDecoder(c).Decode(&resp); err == nil && resp.Error == nil {
			t.Errorf("%.60q was answered with %s", line, resp.Body)
		}
		c.Close()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.users) != 0 || len(s.jobs) != 0 {
		t.Errorf("sluiced heard %v and %v", s.users, s.jobs)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.state.Jobs) != 0 {
		t.Errorf("jobs %v", a.state.Jobs)
	}
}

func TestMomentsThatHooksLeft(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	at := time.Now()
	for i, m := range []prolog.Moment{
		{UID: aliceUID, JobEvent: api.JobEvent{JobID: 1, Event: prolog.EventProlog}},
		{UID: bobUID, JobEvent: api.JobEvent{JobID: 2, Event: prolog.EventProlog}},
		{UID: bobUID, JobEvent: api.JobEvent{JobID: 2, Event: prolog.EventEpilog}},
	} {
		m.At = api.FormatTime(at.Add(time.Duration(i)))
		if err := prolog.Keep(v.root+prolog.SpoolDir, m); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(v.root+prolog.SpoolDir, "0.json"), []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.hook = func(_ context.Context, op string) error {
		if op == api.OpAgentJob && len(s.events()) == 0 {
			s.set(func(s *sluiced) { s.jobs = append(s.jobs, api.JobEvent{Event: "refused"}) })
			return api.Errorf(api.CodeNotFound, "no such job")
		}
		return nil
	}
	a, _ := v.boot(nil)
	eventually(t, "the moments at sluiced", func() bool { return len(s.events()) == 3 })
	want := []api.JobEvent{{Event: "refused"},
		{JobID: 2, Node: "c-0", Event: "prolog", At: api.FormatTime(at.Add(1))},
		{JobID: 2, Node: "c-0", Event: "epilog", At: api.FormatTime(at.Add(2))}}
	if d := cmp.Diff(want, s.events()); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	if err := a.vouch(t.Context(), aliceUID); err != nil {
		t.Errorf("whose job is here: %v", err)
	}
	if err := a.vouch(t.Context(), bobUID); err == nil {
		t.Error("vouched for one whose job has left")
	}
	eventually(t, "an empty spool", func() bool { files, _ := prolog.Kept(v.root + prolog.SpoolDir); return len(files) == 0 })
}

func TestIdentity(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	own := filepath.Join(t.TempDir(), "tls")
	ca, err := trust.OpenCA(own, "c", clock.System)
	if err != nil {
		t.Fatal(err)
	}
	fp := strings.Repeat("ab", 32)
	for _, tt := range []struct {
		name   string
		change func(*Agent, *attributes)
		want   identity
		err    string
	}{
		{name: "from the metadata server", want: identity{Instance: vmID, Controller: s.address, Fingerprint: s.authority.Fingerprint()}},
		{name: "the command line first", change: func(a *Agent, m *attributes) {
			a.config.Controller, a.config.Fingerprint = "h:1", strings.ToUpper(fp)
			m.values = map[string]string{"instance/id": "1"}
		}, want: identity{Instance: "1", Controller: "h:1", Fingerprint: fp}},
		{name: "no attribute", change: func(_ *Agent, m *attributes) {
			delete(m.values, "instance/attributes/"+AttributeController)
		}, err: AttributeController},
		{name: "empty attribute", change: func(_ *Agent, m *attributes) {
			m.values["instance/attributes/"+AttributeFingerprint] = " \n"
		}, err: "empty"},
		{name: "on the controller", change: func(a *Agent, m *attributes) {
			a.config.TLSDir = own
			m.values = map[string]string{"instance/id": "1"}
		}, want: identity{Instance: "1", Controller: "127.0.0.1:8443", Fingerprint: ca.Fingerprint()}},
		{name: "on the controller with another port", change: func(a *Agent, m *attributes) {
			a.config.TLSDir, a.config.Controller = own, "127.0.0.1:9"
		}, want: identity{Instance: vmID, Controller: "127.0.0.1:9", Fingerprint: ca.Fingerprint()}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := newVM(t, s)
			a := New(Defaults, nil)
			a.config.TLSDir = filepath.Join(v.root, "tls")
			a.metadata = v.metadata
			if tt.change != nil {
				tt.change(a, v.metadata)
			}
			got, err := a.identify(t.Context())
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("got %+v, %v, want an error with %q", got, err, tt.err)
				}
				return
			}
			if err != nil || got != tt.want {
				t.Errorf("got %+v, %v, want %+v", got, err, tt.want)
			}
		})
	}
}

// Google's client against a metadata server over HTTP.
func TestIdentityOverHTTP(t *testing.T) {
	values := map[string]string{"id": "5",
		"attributes/" + AttributeController: "controller:8443", "attributes/" + AttributeFingerprint: strings.Repeat("ab", 32)}
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		v, ok := values[strings.TrimPrefix(r.URL.Path, "/computeMetadata/v1/instance/")]
		if !ok || r.Header.Get("Metadata-Flavor") != "Google" {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Metadata-Flavor", "Google")
		w.Write([]byte(v))
	}))
	defer h.Close()
	t.Setenv("GCE_METADATA_HOST", strings.TrimPrefix(h.URL, "http://"))
	c := Defaults
	c.TLSDir = t.TempDir()
	a := New(c, nil)
	a.metadata = metadata.NewWithOptions(&metadata.Options{Client: h.Client()})
	got, err := a.identify(t.Context())
	if want := (identity{Instance: "5", Controller: "controller:8443", Fingerprint: strings.Repeat("ab", 32)}); err != nil || got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
}

func TestEverythingAtOnce(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	a, _ := v.boot(nil)
	a.reported.wait(t.Context())
	var wg sync.WaitGroup
	for i := range uint32(20) {
		wg.Go(func() {
			job := i + 1
			v.prolog(job, aliceUID+i)
			if _, err := a.handle(t.Context(), local.Peer{UID: aliceUID + i}, api.Request{Version: 1, Op: api.OpNodeList}); err != nil {
				t.Errorf("uid %d: %v", aliceUID+i, err)
			}
			v.prolog(job, aliceUID+i)
			v.epilog(job)
		})
	}
	wg.Go(func() {
		for i := range 20 {
			v.kernel.set(func(k *kernel) { k.state = []probe.State{probe.Hung, ""}[i%2] })
			s.set(func(s *sluiced) {
				s.answer.FileSystems = []api.FileSystem{scratch, {Name: "b", Source: "10.0.0.6@tcp:/b", Dir: "/b"}}[:1+i%2]
			})
		}
	})
	wg.Wait()
	eventually(t, "all moments at sluiced", func() bool { return len(s.events()) == 40 })
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.state.Jobs) != 0 {
		t.Errorf("jobs left: %v", a.state.Jobs)
	}
}

func TestTellsSystemd(t *testing.T) {
	s := newSluiced(t, api.RoleLogin)
	v := newVM(t, s)
	name := filepath.Join(v.root, "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	t.Setenv("NOTIFY_SOCKET", name)
	v.boot(nil)
	conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	buf := make([]byte, 100)
	n, err := conn.Read(buf)
	if err != nil || string(buf[:n]) != "READY=1" {
		t.Fatalf("got %q, %v", buf[:n], err)
	}
	// Ready means that the socket is served.
	if err := v.call(api.OpProlog, api.PrologCall{JobID: 1}, nil); err != nil {
		t.Error(err)
	}
}
