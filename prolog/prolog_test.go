package prolog

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/lustre/probe"
)

// node is a Hook below a directory of its own, on a clock that only Sleep moves.
type node struct {
	Hook
	now  time.Time
	said []string
	env  map[string]string
	// onSleep is called before the clock moves.
	onSleep func()
	state   probe.State // what probes find
}

func newNode(t *testing.T) *node {
	t.Helper()
	// Socket paths are limited to 107 bytes, which t.TempDir may exceed.
	root, err := os.MkdirTemp("", "sluice")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	for _, d := range []string{"run/sluice", "etc/sluice", "var/lib/sluice"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n := &node{now: time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC), state: probe.OK,
		env: map[string]string{"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "10001", "SLURMD_NODENAME": "n1"}}
	n.Hook = Hook{
		Root:   root,
		Getenv: func(k string) string { return n.env[k] },
		Say:    func(s string) { n.said = append(n.said, s) },
		Now:    func() time.Time { return n.now },
		Sleep: func(d time.Duration) {
			if d <= 0 {
				t.Errorf("sleep of %s", d)
			}
			if n.onSleep != nil {
				n.onSleep()
			}
			n.now = n.now.Add(d)
		},
		Probe: func(probe.Check) probe.Result { return probe.Result{State: n.state, Detail: "as the test says"} },
	}
	return n
}

// agent answers on the node's socket until stop is called.
func (n *node) agent(t *testing.T, h local.Handler) (stop func()) {
	t.Helper()
	l, err := local.Listen(n.Root+api.AgentSocket, 0o666)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { local.Serve(ctx, l, nil, h) })
	stop = func() { cancel(); wg.Wait() }
	t.Cleanup(stop)
	return stop
}

func answer(r api.Readiness) local.Handler {
	return func(context.Context, local.Peer, api.Request) (any, error) { return r, nil }
}

func (n *node) mounts(t *testing.T) {
	t.Helper()
	err := WriteMounts(n.Root+MountsFile, []api.FileSystem{{Name: "scratch", Source: "10.0.0.5@tcp:/fs", Dir: "/lustre"}, {Name: "later", Dir: "/later"}})
	if err != nil {
		t.Fatal(err)
	}
}

func (n *node) moments(t *testing.T) []Moment {
	t.Helper()
	files, err := Kept(n.Root + SpoolDir)
	if err != nil {
		t.Fatal(err)
	}
	var all []Moment
	for _, f := range files {
		m, err := ReadMoment(f)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, m)
	}
	return all
}

func TestReadyNodeStartsAtOnce(t *testing.T) {
	n := newNode(t)
	var got api.PrologCall
	n.agent(t, func(_ context.Context, _ local.Peer, req api.Request) (any, error) {
		if req.Op != api.OpProlog {
			t.Errorf("operation %q", req.Op)
		}
		json.Unmarshal(req.Body, &got)
		return api.Readiness{Ready: true}, nil
	})
	if code := Run(n.Hook); code != 0 || len(n.said) != 0 {
		t.Errorf("got %d and %q, want 0 and nothing said", code, n.said)
	}
	if want := (api.PrologCall{JobID: 7, UID: 10001, Node: "n1"}); got != want {
		t.Errorf("the agent got %+v, want %+v", got, want)
	}
	if m := n.moments(t); len(m) != 0 {
		t.Errorf("kept %v though the agent heard", m)
	}
}

func TestCauses(t *testing.T) {
	for _, tt := range []struct {
		cause string
		code  int
	}{{"node", 1}, {"filesystem", 0}, {"unknown", 0}, {"", 0}, {"something new", 0}} {
		t.Run("cause "+tt.cause, func(t *testing.T) {
			n := newNode(t)
			n.agent(t, answer(api.Readiness{Reason: "/lustre is hung", Cause: tt.cause}))
			start := n.now
			if code := Run(n.Hook); code != tt.code {
				t.Errorf("got exit code %d, want %d", code, tt.code)
			}
			if waited := n.now.Sub(start); waited != DefaultTimeout {
				t.Errorf("waited %s, want %s", waited, DefaultTimeout)
			}
			if len(n.said) != 2 || !strings.Contains(n.said[1], "/lustre is hung") {
				t.Errorf("said %q, want two lines with the reason", n.said)
			}
			data, err := os.ReadFile(n.Root + VerdictDir + "/7")
			if (err == nil) != (tt.code == 1) {
				t.Fatalf("verdict: %q, %v", data, err)
			}
			kept, err := Kept(n.Root + SpoolDir)
			if err != nil || len(kept) != tt.code {
				t.Fatalf("%d moments for sluiced (%v), want %d", len(kept), err, tt.code)
			}
			if tt.code == 1 {
				if m, err := ReadMoment(kept[0]); err != nil || m.Event != EventVerdict || m.Reason != "/lustre is hung" || m.JobID != 7 || m.Node != "n1" {
					t.Errorf("for sluiced: %+v, %v, want the verdict and its reason", m, err)
				}
				var got Verdict
				if err := json.Unmarshal(data, &got); err != nil {
					t.Fatal(err)
				}
				want := Verdict{JobID: 7, UID: 10001, Node: "n1", At: api.FormatTime(n.now), Cause: "node", Reason: "/lustre is hung"}
				if got != want {
					t.Errorf("got %+v, want %+v", got, want)
				}
			}
		})
	}
}

func TestBecomesReadyWhileWaiting(t *testing.T) {
	n := newNode(t)
	calls := 0
	n.agent(t, func(context.Context, local.Peer, api.Request) (any, error) {
		calls++
		return api.Readiness{Ready: calls == 4, Cause: "node"}, nil
	})
	if code := Run(n.Hook); code != 0 || calls != 4 {
		t.Errorf("got %d after %d calls, want 0 after 4", code, calls)
	}
}

func TestAgentAway(t *testing.T) {
	for _, tt := range []struct {
		name   string
		mounts bool
		state  probe.State
		waits  bool
	}{
		{"mounts answer", true, probe.OK, false},
		{"mount hangs", true, probe.Hung, true},
		{"not mounted", true, probe.NotMounted, true},
		{"nothing known", false, probe.Hung, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := newNode(t)
			n.state = tt.state
			if tt.mounts {
				n.mounts(t)
			}
			start := n.now
			if code := Run(n.Hook); code != 0 {
				t.Errorf("got %d, want 0: nobody confirmed the node's fault", code)
			}
			if waited := n.now.Sub(start); (waited > 0) != tt.waits {
				t.Errorf("waited %s", waited)
			}
			want := []Moment{{UID: 10001, JobEvent: api.JobEvent{JobID: 7, Node: "n1", Event: EventProlog, At: api.FormatTime(start)}}}
			if d := cmp.Diff(want, n.moments(t)); d != "" {
				t.Errorf("kept for the agent (-want +got):\n%s", d)
			}
		})
	}
}

func TestAgentComesWhileWaiting(t *testing.T) {
	n := newNode(t)
	n.mounts(t)
	n.state = probe.Hung
	n.onSleep = func() {
		n.onSleep = nil
		n.agent(t, answer(api.Readiness{Ready: true}))
	}
	if code := Run(n.Hook); code != 0 {
		t.Errorf("got %d, want 0", code)
	}
	if m := n.moments(t); len(m) != 0 {
		t.Errorf("kept %v though the agent heard", m)
	}
}

// Whatever sits on the socket, the Prolog looks itself and lets the job start.
func TestStrangeAgents(t *testing.T) {
	for name, say := range map[string]string{
		"closes at once":     "",
		"no JSON":            "hello\n",
		"no end of line":     `{"v":1}`,
		"wrong body":         `{"v":1,"body":[1]}` + "\n",
		"no body":            `{"v":1}` + "\n",
		"an error":           `{"v":1,"error":{"code":"failed","message":"boom"}}` + "\n",
		"endless":            strings.Repeat("x", 1<<20),
		"another version":    `{"v":99,"body":{"ready":true},"more":1}` + "\n",
		"ready in two parts": `{"v":1,"body":`,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			l, err := net.Listen("unix", n.Root+api.AgentSocket)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					c.Write([]byte(say))
					c.Close()
				}
			}()
			if code := Run(n.Hook); code != 0 {
				t.Errorf("got %d, want 0", code)
			}
		})
	}
}

func TestAskGivesUp(t *testing.T) {
	n := newNode(t)
	l, err := net.Listen("unix", n.Root+api.AgentSocket) // never accepts: the kernel connects, nobody answers
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	start := time.Now()
	if err := Ask(n.Root+api.AgentSocket, api.OpProlog, api.PrologCall{JobID: 1}, new(api.Readiness), 30*time.Millisecond); err == nil {
		t.Error("no error")
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("took %s", took)
	}
}

func TestCallReadsWhatSlurmSays(t *testing.T) {
	for _, tt := range []struct {
		name string
		env  map[string]string
		want api.PrologCall
		ok   bool
	}{
		{"all", map[string]string{"SLURM_JOB_ID": "7", "SLURM_JOBID": "8", "SLURM_JOB_UID": "5", "SLURM_UID": "6", "SLURMD_NODENAME": "n"}, api.PrologCall{JobID: 7, UID: 5, Node: "n"}, true},
		{"old names", map[string]string{"SLURM_JOBID": "8", "SLURM_UID": "6"}, api.PrologCall{JobID: 8, UID: 6}, true},
		{"null", map[string]string{"SLURM_JOB_ID": "(null)", "SLURM_JOBID": "8", "SLURM_JOB_UID": "(null)", "SLURMD_NODENAME": "(null)"}, api.PrologCall{JobID: 8, UID: NoUID}, true},
		{"uid of rubbish", map[string]string{"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "-1"}, api.PrologCall{JobID: 7, UID: NoUID}, true},
		{"nothing", nil, api.PrologCall{}, false},
		{"zero", map[string]string{"SLURM_JOB_ID": "0"}, api.PrologCall{}, false},
		{"too large", map[string]string{"SLURM_JOB_ID": "4294967296"}, api.PrologCall{}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, ok := Call(func(k string) string { return tt.env[k] })
			if got != tt.want || ok != tt.ok {
				t.Errorf("got %+v, %v, want %+v, %v", got, ok, tt.want, tt.ok)
			}
		})
	}
	n := newNode(t)
	n.env = nil
	if code := Run(n.Hook); code != 0 || len(n.said) != 1 {
		t.Errorf("without a job: got %d and %q, want 0 and one line", code, n.said)
	}
}

func TestConfiguration(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"":                           DefaultTimeout,
		"timeout=5s\n":               5 * time.Second,
		"# c\n\n timeout = 1m30s \n": 90 * time.Second,
		"timeout=0\n":                0,
		"timeout=60\n":               DefaultTimeout, // no unit
		"timeout=-1s\n":              DefaultTimeout,
		"timeout=999h\n":             DefaultTimeout,
		"time=5s\n\x00\n=\n":         DefaultTimeout,
	} {
		n := newNode(t)
		if err := os.WriteFile(n.Root+ConfigFile, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := n.timeout(); got != want {
			t.Errorf("%q: got %s, want %s", text, got, want)
		}
	}
}

func TestPanicIsExitZero(t *testing.T) {
	// The line goes to the test's standard error.
	if code := Main("sluice-prolog", func(Hook) int { panic("a bug") }); code != 0 {
		t.Errorf("got %d, want 0", code)
	}
	if code := Main("sluice-prolog", func(Hook) int { return 1 }); code != 1 {
		t.Errorf("got %d, want 1", code)
	}
}

func TestSpoolIsBoundedAndSorted(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "spool")
	if files, err := Kept(dir); err != nil || len(files) != 0 {
		t.Errorf("no directory: got %v, %v", files, err)
	}
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for i := range 3 {
		m := Moment{JobEvent: api.JobEvent{JobID: uint32(i), Event: EventProlog, At: api.FormatTime(at.Add(-time.Duration(i)))}}
		if err := Keep(dir, m); err != nil {
			t.Fatal(err)
		}
	}
	files, err := Kept(dir)
	if err != nil || len(files) != 3 {
		t.Fatalf("got %v, %v", files, err)
	}
	if m, err := ReadMoment(files[0]); err != nil || m.JobID != 2 {
		t.Errorf("oldest: got %+v, %v, want job 2", m, err)
	}
	for i := 3; i < MaxMoments; i++ {
		if err := os.WriteFile(filepath.Join(dir, "z"+api.FormatTime(at.Add(time.Duration(i)))+suffix), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := Keep(dir, Moment{}); err != errSpoolFull {
		t.Errorf("full spool: got %v, want %v", err, errSpoolFull)
	}
}

func TestMountsFile(t *testing.T) {
	n := newNode(t)
	n.mounts(t)
	got, err := ReadMounts(n.Root + MountsFile)
	want := []probe.Check{{Source: "10.0.0.5@tcp:/fs", Dir: "/lustre", Types: []string{"lustre"}}}
	if err != nil || cmp.Diff(want, got) != "" {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
	if err := WriteMounts(n.Root+MountsFile, []api.FileSystem{{Source: "a", Dir: "/x y"}}); err == nil {
		t.Error("a blank in a directory was written")
	}
}

func FuzzReadMounts(f *testing.F) {
	f.Add("10.0.0.5@tcp:/fs /lustre lustre,fuse.lustre\n")
	f.Add("a b\n")
	path := filepath.Join(f.TempDir(), "mounts")
	f.Fuzz(func(t *testing.T, text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		checks, err := ReadMounts(path)
		for _, c := range checks {
			if err != nil || !strings.HasPrefix(c.Dir, "/") || len(c.Types) == 0 {
				t.Errorf("%q: %+v, %v", text, c, err)
			}
		}
	})
}
