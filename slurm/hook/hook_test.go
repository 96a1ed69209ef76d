package hook

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/internal/command"
	"github.com/sluicehpc/sluice/slurm/scontrol"
)

// server is a stand-in for sluiced that answers with what the test says and
// remembers what it was asked.
type server struct {
	socket string

	mu    sync.Mutex
	calls []api.Request
	reply func(api.Request) (any, error)
}

func serve(t *testing.T, reply func(api.Request) (any, error)) *server {
	t.Helper()
	s := &server{socket: filepath.Join(t.TempDir(), "s"), reply: reply}
	s.start(t)
	return s
}

func (s *server) start(t *testing.T) {
	t.Helper()
	l, err := local.Listen(s.socket, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- local.Serve(ctx, l, nil, func(_ context.Context, _ local.Peer, r api.Request) (any, error) {
			s.mu.Lock()
			s.calls = append(s.calls, r)
			s.mu.Unlock()
			return s.reply(r)
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func (s *server) ops() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ops []string
	for _, c := range s.calls {
		ops = append(ops, c.Op)
	}
	return ops
}

// last decodes the body of the last call.
func last[T any](t *testing.T, s *server) T {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	var v T
	if len(s.calls) == 0 {
		t.Fatal("sluiced was not asked")
	}
	if err := json.Unmarshal(s.calls[len(s.calls)-1].Body, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func always(v any) func(api.Request) (any, error) {
	return func(api.Request) (any, error) { return v, nil }
}

// try runs a Hook with short limits and returns what it printed.
type try struct {
	Hook
	out, log  bytes.Buffer
	scontrols [][]string
}

func newTry(socket string) *try {
	tr := &try{Hook: *New()}
	tr.Socket, tr.Stdout, tr.Stderr, tr.Stdin = socket, &tr.out, &tr.log, strings.NewReader("")
	tr.Getenv = func(string) string { return "" }
	tr.Detach = func([]byte, ...string) error { return errors.New("not in this test") }
	tr.Slurm = scontrol.Client{Run: func(_ context.Context, s command.Spec) ([]byte, error) {
		tr.scontrols = append(tr.scontrols, s.Args)
		return nil, nil
	}}
	tr.Limits = Limits{
		Blocking: 5 * time.Second, Answer: 5 * time.Second, Poll: 10 * time.Millisecond, Stage: 10 * time.Millisecond,
		Away: time.Hour, Event: 50 * time.Millisecond, Teardown: 50 * time.Millisecond, Status: 5 * time.Second,
		Power: 5 * time.Second, Later: 5 * time.Second, Nodes: 10 * time.Second, Ask: time.Millisecond,
	}
	return tr
}

func (tr *try) run(t *testing.T, args ...string) string {
	t.Helper()
	tr.out.Reset()
	if code := tr.Run(context.Background(), append([]string{"sluice-hook"}, args...)); code != 0 {
		t.Fatalf("exit code %d; log: %s", code, tr.log.String())
	}
	return tr.out.String()
}

func write(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const goodScript = "#!/bin/bash\n#SLUICE stage_in source=gs://corpus/ name=c4\nsrun x\n"

func TestJobProcess(t *testing.T) {
	s := serve(t, always(api.Verdict{}))
	tr := newTry(s.socket)
	good := write(t, goodScript+"\x00") // Slurm keeps the NUL
	if got := tr.run(t, "bb", "job_process", "--script="+good, "--uid=1000", "--gid=100", "--account=research", "--file=train.sh"); got != "ok\n\n" {
		t.Errorf("a good script: %q", got)
	}
	want := api.JobProcess{Script: goodScript, HasUID: true, UID: 1000, GID: 100, Account: "research", File: "train.sh"}
	if diff := cmp.Diff(want, last[api.JobProcess](t, s)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	tr.run(t, "bb", "job_process", "--script="+good)
	if last[api.JobProcess](t, s).HasUID {
		t.Error("HasUID without a uid")
	}

	asked := len(s.ops())
	bad := write(t, "#!/bin/bash\n#SLUICE stage_im source=gs://corpus/ name=c4\n")
	got := tr.run(t, "bb", "job_process", "--script="+bad, "--file=train.sh")
	picture := "error\ntrain.sh:2:9: unknown verb \"stage_im\"\n   2 | #SLUICE stage_im source=gs://corpus/ name=c4\n     |         ^^^^^^^^\n  did you mean stage_in?\n"
	if got != picture {
		t.Errorf("a bad script:\n%s\nwant\n%s", got, picture)
	}
	if len(s.ops()) != asked {
		t.Error("sluiced was asked about a script that does not parse")
	}
	got = tr.run(t, "bb", "job_process", "--script="+bad, "--interactive=true")
	if !strings.HasPrefix(got, "error\n--bbf:1:9: ") {
		t.Errorf("the lines of --bbf: %q", got)
	}
	many := write(t, strings.Repeat("#SLUICE x\n", 20))
	if got := tr.run(t, "bb", "job_process", "--script="+many); !strings.Contains(got, "and 10 more") || strings.Count(got, "unknown verb") != 10 {
		t.Errorf("many errors: %q", got)
	}
}

func TestJobProcessFollowsSluiced(t *testing.T) {
	good := write(t, goodScript)
	tr := newTry(serve(t, always(api.Verdict{Errors: []string{"script:2:25: bucket corpus does not exist\n  look \x1b[31m"}})).socket)
	if got, want := tr.run(t, "bb", "job_process", "--script="+good), "error\nscript:2:25: bucket corpus does not exist\n  look ?[31m\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	tr = newTry(serve(t, always(api.Verdict{Notices: []string{"not judged yet"}})).socket)
	if got, want := tr.run(t, "bb", "job_process", "--script="+good), "ok\nnot judged yet\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestBlockedFunctions: slurmctld stands still in these calls, whatever sluiced does.
func TestBlockedFunctions(t *testing.T) {
	good, bad := write(t, goodScript), write(t, "#SLUICE x\n")
	release := make(chan struct{})
	defer close(release)
	silent := serve(t, func(api.Request) (any, error) { <-release; return api.Verdict{}, nil })
	// A stopped process still has its connections accepted by the kernel.
	stopped := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", stopped)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for name, socket := range map[string]string{
		"absent": filepath.Join(t.TempDir(), "s"), "stopped": stopped, "silent": silent.socket,
	} {
		t.Run(name, func(t *testing.T) {
			tr := newTry(socket)
			tr.Limits.Blocking = DefaultLimits.Blocking
			start := time.Now()
			if got := tr.run(t, "bb", "job_process", "--script="+good); got != "ok\n\n" {
				t.Errorf("a good script: %q", got)
			}
			if got := tr.run(t, "bb", "job_process", "--script="+bad); !strings.HasPrefix(got, "error\nscript:1:9: unknown verb") {
				t.Errorf("a bad script: %q", got)
			}
			if got := tr.run(t, "bb", "paths", "--job=7"); !strings.HasPrefix(got, "error\nthe job's environment is not known") {
				t.Errorf("paths: %q", got)
			}
			// Two waits of 50 ms; the rest is for a slow machine.
			if d := time.Since(start); d > 5*time.Second {
				t.Errorf("took %v", d)
			}
		})
	}
	tr := newTry(filepath.Join(t.TempDir(), "s"))
	if got := tr.run(t, "bb", "job_process", "--script=/does/not/exist"); got != "ok\n\n" {
		t.Errorf("an unreadable script: %q", got)
	}
}

func TestSetupWaitsForSluiced(t *testing.T) {
	good := write(t, goodScript)
	var s *server
	n := 0
	s = &server{socket: filepath.Join(t.TempDir(), "s")}
	s.reply = func(api.Request) (any, error) {
		if n++; n < 3 {
			return nil, api.Errorf(api.CodeUnavailable, "starting")
		}
		return api.Ack{}, nil
	}
	tr := newTry(s.socket)
	tr.Limits.Away = 0 // says so at the first failure
	got := make(chan string)
	go func() {
		got <- tr.run(t, "bb", "setup", "--job=7", "--uid=1000", "--gid=100", "--name=it's", "--account=a", "--partition=p", "--script="+good)
	}()
	s.start(t)
	if g := <-got; g != "ok\n\n" {
		t.Errorf("got %q; log %s", g, tr.log.String())
	}
	want := api.JobCall{JobID: 7, UID: 1000, GID: 100, Name: "it's", Account: "a", Partition: "p", Script: goodScript}
	if diff := cmp.Diff(want, last[api.JobCall](t, s)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if len(tr.scontrols) != 2 || tr.scontrols[0][1] != "JobId=7" || !strings.Contains(tr.scontrols[0][2], "cannot be reached") || tr.scontrols[1][2] != "AdminComment=" {
		t.Errorf("the job was told %q, want that sluiced is away, then nothing", tr.scontrols)
	}
}

// Where a directive has a symbol Slurm passes a file with the directives alone.
func TestUsersScriptIsJudgedRatherThanSlurmsExtract(t *testing.T) {
	const users = "#!/bin/bash\n\n# mine\n#SLUICE stage_out from=o/ to=gs://bbb/%j/\ntrue\n"
	const extract = "#!/bin/bash\n#SLUICE stage_out from=o/ to=gs://bbb/7/\n"
	state := t.TempDir()
	dir := filepath.Join(state, "hash.7", "job.17")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "script"), []byte(users+"\x00"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, job, passed, want string }{
		{"the user's", "17", extract, users},
		{"none is kept", "18", extract, extract},
		{"another number of directives", "17", extract + "#SLUICE stage_out from=p/ to=gs://bbb/p/\n", extract + "#SLUICE stage_out from=p/ to=gs://bbb/p/\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := serve(t, func(api.Request) (any, error) { return api.Ack{}, nil })
			if got := newTry(s.socket).run(t, "bb", "setup", "--job="+tt.job, "--state="+state, "--script="+write(t, tt.passed)); got != "ok\n\n" {
				t.Fatalf("got %q", got)
			}
			if got := last[api.JobCall](t, s).Script; got != tt.want {
				t.Errorf("judged %q, want %q", got, tt.want)
			}
		})
	}
}

func TestRefusedSetup(t *testing.T) {
	s := serve(t, func(api.Request) (any, error) {
		return nil, &api.Error{Code: api.CodeDenied, Message: "alice may not read gs://corpus/", Hint: "ask the site"}
	})
	if got, want := newTry(s.socket).run(t, "bb", "setup", "--job=7"), "error\nalice may not read gs://corpus/; ask the site\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestStage(t *testing.T) {
	for _, test := range []struct {
		name    string
		args    []string
		answers []api.StageState // in order; the last one repeats
		want    string
		ops     []string
		wait    float64
	}{
		{"data_in starts it", []string{"data_in"}, []api.StageState{{Phase: api.StageBusy}}, "busy\n\n", []string{api.OpDataIn}, 0},
		{"data_in of staged data", []string{"data_in"}, []api.StageState{{Phase: api.StageDone}}, "ok\n\n", []string{api.OpDataIn}, 0},
		{"test_data_in busy", []string{"test_data_in"}, []api.StageState{{Phase: api.StageBusy, Message: "3 of 9"}}, "busy\n\n", []string{api.OpDataIn}, 0.01},
		{"test_data_in done", []string{"test_data_in"}, []api.StageState{{Phase: api.StageDone}}, "ok\n\n", []string{api.OpDataIn}, 0.01},
		{"test_data_in failed", []string{"test_data_in"}, []api.StageState{{Phase: api.StageFailed, Message: "x: checksum differs;\n y\n"}}, "error\nx: checksum differs; y\n", []string{api.OpDataIn}, 0.01},
		{"data_in that waits", []string{"data_in", "--wait=true"}, []api.StageState{{Phase: api.StageBusy}, {Phase: api.StageBusy}, {Phase: api.StageDone}}, "ok\n\n",
			[]string{api.OpDataIn, api.OpDataIn, api.OpDataIn}, 0.01},
		{"data_out that waits fails", []string{"data_out", "--wait=true"}, []api.StageState{{Phase: api.StageBusy}, {Phase: api.StageFailed, Message: "no"}}, "error\nno\n",
			[]string{api.OpDataOut, api.OpDataOut}, 0.01},
		{"test_data_out", []string{"test_data_out"}, []api.StageState{{Phase: api.StageDone}}, "ok\n\n", []string{api.OpDataOut}, 0.01},
		{"a phase from the future", []string{"test_data_in"}, []api.StageState{{Phase: "paused"}}, "error\nsluiced answers with the unknown phase \"paused\"\n", []string{api.OpDataIn}, 0.01},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := 0
			s := serve(t, func(api.Request) (any, error) {
				a := test.answers[min(n, len(test.answers)-1)]
				n++
				return a, nil
			})
			args := append([]string{"bb"}, test.args...)
			if got := newTry(s.socket).run(t, append(args, "--job=7", "--uid=5")...); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
			if diff := cmp.Diff(test.ops, s.ops()); diff != "" {
				t.Errorf("calls (-want +got):\n%s", diff)
			}
			if call := last[api.StageCall](t, s); call.JobID != 7 || call.UID != 5 || call.WaitSeconds != test.wait {
				t.Errorf("asked %+v", call)
			}
		})
	}
}

func TestEventsGoOnWithoutSluiced(t *testing.T) {
	tr := newTry(filepath.Join(t.TempDir(), "s"))
	for _, f := range []string{"pre_run", "post_run"} {
		if got := tr.run(t, "bb", f, "--job=7"); got != "ok\n\n" {
			t.Errorf("%s: %q", f, got)
		}
	}
	if got := tr.run(t, "bb", "teardown", "--job=7", "--hurry=true"); !strings.HasPrefix(got, "error\n") {
		t.Errorf("teardown: %q", got)
	}
	s := serve(t, always(api.Ack{}))
	tr = newTry(s.socket)
	tr.run(t, "bb", "pre_run", "--job=7", "--nodes=n[1-2],m1")
	if diff := cmp.Diff(api.JobCall{JobID: 7, Nodes: []string{"n1", "n2", "m1"}}, last[api.JobCall](t, s)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	tr.run(t, "bb", "teardown", "--job=7", "--hurry=true")
	if !last[api.JobCall](t, s).Hurry {
		t.Error("hurry is lost")
	}
}

func TestPathsAndStatus(t *testing.T) {
	s := serve(t, always(api.Environment{Variables: map[string]string{"SLUICE_B": "2 = two", "SLUICE_A": "1"}}))
	if got, want := newTry(s.socket).run(t, "bb", "paths", "--job=7"), "ok\nSLUICE_A=1\nSLUICE_B=2 = two\n"; got != want {
		t.Errorf("paths: %q, want %q", got, want)
	}
	s = serve(t, always(api.Environment{Variables: map[string]string{"SLUICE_B": "2\nLD_PRELOAD=x"}}))
	if got := newTry(s.socket).run(t, "bb", "paths", "--job=7"); !strings.HasPrefix(got, "error\n") {
		t.Errorf("a line break in a value: %q", got)
	}
	s = serve(t, always(api.Text{Text: "job 7\n\x1b[2Jdone"}))
	if got, want := newTry(s.socket).run(t, "bb", "status", "--", "job", "--x=y"), "ok\njob 7\n?[2Jdone\n"; got != want {
		t.Errorf("status: %q, want %q", got, want)
	}
	if diff := cmp.Diff(api.BBStatus{Args: []string{"job", "--x=y"}}, last[api.BBStatus](t, s)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{{"sluice-hook"}, {"sluice-hook", "x"}, {"sluice-hook", "bb"}, {"sluice-hook", "bb", "x"},
		{"sluice-hook", "bb", "setup", "oops"}, {"sluice-hook", "bb", "setup"}, {"sluice-resume"}, {"sluice-suspend"}, {}} {
		tr := newTry("/nowhere/s")
		if code := tr.Run(context.Background(), args); code != 2 || !strings.Contains(tr.log.String(), "usage:") {
			t.Errorf("%q: exit code %d, log %q", args, code, tr.log.String())
		}
	}
}

func TestResume(t *testing.T) {
	old := `{"jobs":[{"job_id":165,"nodes":"c1"}],"all_nodes":"c1"}`
	now := `{"all_nodes_resume":"c[1-2]","jobs":[{"job_id":9,"extra":null,"features":"","nodes_alloc":"c[1-3]","nodes_resume":"c[1-2]","oversubscribe":"OK","partition":"main","reservation":""}]}`
	for _, test := range []struct {
		name, file string
		args       []string
		want       api.Resume
	}{
		{"22.05", old, []string{"sluice-resume", "c1"}, api.Resume{Nodes: []string{"c1"}, Jobs: []api.ResumeJob{{JobID: 165, Nodes: []string{"c1"}}}}},
		{"23.02 and newer", now, []string{"/x/sluice-resume", "c[1-2]"}, api.Resume{Nodes: []string{"c1", "c2"}, Jobs: []api.ResumeJob{{JobID: 9, Partition: "main", Nodes: []string{"c1", "c2"}}}}},
		{"nodes from the file", now, []string{"sluice-resume"}, api.Resume{Nodes: []string{"c1", "c2"}, Jobs: []api.ResumeJob{{JobID: 9, Partition: "main", Nodes: []string{"c1", "c2"}}}}},
		{"no file", "", []string{"sluice-hook", "resume", "c1"}, api.Resume{Nodes: []string{"c1"}}},
		{"broken file", "{", []string{"sluice-resume", "c1"}, api.Resume{Nodes: []string{"c1"}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			began := time.Now()
			s := serve(t, always(api.Ack{}))
			tr := newTry(s.socket)
			if test.file != "" {
				path := write(t, test.file)
				tr.Getenv = func(k string) string { return map[string]string{"SLURM_RESUME_FILE": path}[k] }
			}
			if code := tr.Run(context.Background(), test.args); code != 0 {
				t.Fatalf("exit code %d: %s", code, tr.log.String())
			}
			if diff := cmp.Diff(test.want, lastResume(t, s, began)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// lastResume checks when Slurm is said to have asked, and takes it out.
func lastResume(t *testing.T, s *server, began time.Time) api.Resume {
	t.Helper()
	r := last[api.Resume](t, s)
	at, err := time.Parse(api.TimeFormat, r.At)
	if err != nil || at.Before(began.Truncate(0)) || at.After(time.Now()) {
		t.Errorf("Slurm asked at %q, %v", r.At, err)
	}
	r.At = ""
	return r
}

func TestSuspend(t *testing.T) {
	for name, op := range map[string]string{"sluice-suspend": api.OpNodeSuspend, "sluice-resume-fail": api.OpNodeResumeFail} {
		s := serve(t, always(api.Ack{}))
		tr := newTry(s.socket)
		if code := tr.Run(context.Background(), []string{name, "n[1-3]"}); code != 0 {
			t.Fatalf("exit code %d: %s", code, tr.log.String())
		}
		if diff := cmp.Diff([]string{op}, s.ops()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if diff := cmp.Diff(api.NodeNames{Nodes: []string{"n1", "n2", "n3"}}, last[api.NodeNames](t, s)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestResumeWithoutSluiced: the call is left to a child, which repeats it.
func TestResumeWithoutSluiced(t *testing.T) {
	s := &server{socket: filepath.Join(t.TempDir(), "s"), reply: always(api.Ack{})}
	tr := newTry(s.socket)
	began := time.Now()
	var input []byte
	var args []string
	tr.Detach = func(in []byte, a ...string) error { input, args = in, a; return nil }
	if code := tr.Run(context.Background(), []string{"sluice-resume", "n[1-2]"}); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	if diff := cmp.Diff([]string{"later", api.OpNodeResume}, args); diff != "" {
		t.Fatalf("the child's arguments (-want +got):\n%s", diff)
	}
	child := newTry(s.socket)
	child.Stdin = bytes.NewReader(input)
	done := make(chan int)
	go func() { done <- child.Run(context.Background(), append([]string{"sluice-hook"}, args...)) }()
	s.start(t)
	if code := <-done; code != 0 {
		t.Errorf("the child's exit code is %d", code)
	}
	if diff := cmp.Diff(api.Resume{Nodes: []string{"n1", "n2"}}, lastResume(t, s, began)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestDetach runs this program as the child: it must not hold our descriptors.
func TestDetach(t *testing.T) {
	s := serve(t, always(api.Ack{}))
	t.Setenv("SLUICE_TEST_HOOK_SOCKET", s.socket)
	t.Chdir(t.TempDir())
	if err := detach([]byte(`{"nodes":["n1"]}`), "later", api.OpNodeSuspend); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the child calls", func() bool { return len(s.ops()) > 0 })
	if got := last[api.NodeNames](t, s).Nodes; !slices.Equal(got, []string{"n1"}) {
		t.Errorf("the child sent %v", got)
	}
	eventually(t, "the child tells its log", func() bool {
		log, err := os.ReadFile(logFile)
		return err == nil && bytes.Contains(log, []byte("handed over"))
	})
}

// eventually waits for a condition of another process.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited a minute in vain: %s", what)
		}
	}
}

func TestWaitForNodes(t *testing.T) {
	node := func(states ...string) []byte {
		var b strings.Builder
		for i, s := range states {
			fmt.Fprintf(&b, "NodeName=n%d Arch=x86_64 State=%s Reason=(null)\n", i+1, s)
		}
		return []byte(b.String())
	}
	for _, test := range []struct {
		name    string
		answers [][]byte // nil: scontrol fails; the last one repeats
		asked   int
	}{
		{"warm", [][]byte{node("ALLOCATED+CLOUD", "MIXED+CLOUD")}, 1},
		{"cold", [][]byte{node("ALLOCATED+CLOUD+POWERED_DOWN", "ALLOCATED+CLOUD"), node("ALLOCATED+CLOUD+NOT_RESPONDING+POWERING_UP", "ALLOCATED+CLOUD"), node("ALLOCATED+CLOUD", "ALLOCATED+CLOUD")}, 3},
		{"with the marks of old versions", [][]byte{node("ALLOCATED#", "MIXED~"), node("ALLOCATED*", "MIXED"), node("ALLOCATED", "MIXED")}, 3},
		{"a node that is down", [][]byte{node("DOWN+CLOUD+NOT_RESPONDING", "ALLOCATED+CLOUD")}, 1},
		{"Slurm busy for a while", [][]byte{nil, nil, node("ALLOCATED+CLOUD", "ALLOCATED+CLOUD")}, 3},
		{"Slurm broken", [][]byte{nil}, 10},
	} {
		t.Run(test.name, func(t *testing.T) {
			tr := newTry("/nowhere/s")
			tr.Getenv = func(k string) string {
				return map[string]string{"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}[k]
			}
			n := 0
			tr.Slurm.Run = func(_ context.Context, s command.Spec) ([]byte, error) {
				if want := []string{"show", "node", "--oneliner", "n[1-2]"}; !slices.Equal(s.Args, want) {
					t.Errorf("scontrol %q, want %q", s.Args, want)
				}
				a := test.answers[min(n, len(test.answers)-1)]
				n++
				if a == nil {
					return nil, &command.Error{Program: "scontrol", Exit: 1, Err: errors.New("exit status 1")}
				}
				return a, nil
			}
			if code := tr.Run(context.Background(), []string{"sluice-prolog-slurmctld"}); code != 0 {
				t.Errorf("exit code %d", code)
			}
			if n != test.asked {
				t.Errorf("asked %d times, want %d; log %s", n, test.asked, tr.log.String())
			}
		})
	}
	t.Run("never", func(t *testing.T) {
		tr := newTry("/nowhere/s")
		tr.Limits.Nodes = 20 * time.Millisecond
		tr.Getenv = func(k string) string { return map[string]string{"SLURM_NODELIST": "n1"}[k] }
		tr.Slurm.Run = func(context.Context, command.Spec) ([]byte, error) { return node("ALLOCATED+POWERING_UP"), nil }
		if code := tr.Run(context.Background(), []string{"sluice-prolog-slurmctld"}); code != 0 || !strings.Contains(tr.log.String(), "have not booted") {
			t.Errorf("exit code %d, log %q", code, tr.log.String())
		}
	})
	t.Run("no node list", func(t *testing.T) {
		if code := newTry("/nowhere/s").Run(context.Background(), []string{"sluice-prolog-slurmctld"}); code != 0 {
			t.Errorf("exit code %d", code)
		}
	})
}

// TestBinary keeps the hook small: it starts several times in every job's life.
func TestBinary(t *testing.T) {
	const command = "github.com/sluicehpc/sluice/cmd/sluice-hook"
	out, err := exec.Command("go", "list", "-deps", command).Output()
	if err != nil {
		t.Fatal(err)
	}
	banned := regexp.MustCompile(`^(net/http|crypto/tls|cloud\.google\.com/|google\.golang\.org/|github\.com/urfave/|gopkg\.in/yaml|modernc\.org/|os/user$)`)
	for dep := range strings.FieldsSeq(string(out)) {
		if banned.MatchString(dep) {
			t.Errorf("sluice-hook links %s", dep)
		}
	}
	bin := filepath.Join(t.TempDir(), "hook")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", bin, command)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	info, err := os.Stat(bin)
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() > 10<<20 {
		t.Errorf("sluice-hook has %d bytes, more than 10 MiB", info.Size())
	}
}

func FuzzResumeFile(f *testing.F) {
	f.Add([]byte(`{"jobs":[{"job_id":165,"nodes":"c1"}],"all_nodes":"c1"}`))
	f.Add([]byte(`{"all_nodes_resume":"c[1-2]","jobs":[{"job_id":9,"nodes_resume":"c[1-2]","partition":"main"}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		jobs, _, err := parseResumeFile(data)
		if err != nil && jobs != nil {
			t.Errorf("jobs %v beside the error %v", jobs, err)
		}
	})
}
