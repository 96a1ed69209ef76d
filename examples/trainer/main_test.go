package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/sluicehpc/sluice/examples/trainer/collective"
	"github.com/sluicehpc/sluice/examples/trainer/model"
	"github.com/sluicehpc/sluice/examples/trainer/train"
)

// asTrainer in the environment makes the test binary the trainer, so that ranks are real processes.
const asTrainer = "TRAINER_TEST_MAIN"

// patience is how long a test waits for what should happen at once.
const patience = 5 * time.Minute

func TestMain(m *testing.M) {
	if os.Getenv(asTrainer) != "" {
		main()
	}
	os.Exit(m.Run())
}

// rank is a process of a job step.
type rank struct {
	*exec.Cmd
	stdout io.Reader
	stderr bytes.Buffer
}

// start starts rank r of size on this machine, with the environment that srun gives it.
func start(t *testing.T, r, size int, args ...string) *rank {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	p := &rank{Cmd: exec.CommandContext(ctx, os.Args[0], args...)}
	p.Env = append(os.Environ(), asTrainer+"=1", "SLURM_JOB_ID=77", "SLURM_STEP_ID=0", "SLURM_STEP_NODELIST=localhost",
		"SLURM_NODEID=0", fmt.Sprintf("SLURM_PROCID=%d", r), fmt.Sprintf("SLURM_NTASKS=%d", size))
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.stdout, p.Stderr = out, &p.stderr
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		p.Wait()
	})
	return p
}

// end waits for the process and returns its exit code and what it said.
func (p *rank) end(t *testing.T) (code int, stdout string) {
	t.Helper()
	out, _ := io.ReadAll(p.stdout)
	err := p.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return p.ProcessState.ExitCode(), string(out)
}

// trains runs a whole step and returns rank 0's output.
func trains(t *testing.T, size int, args ...string) string {
	t.Helper()
	var ranks []*rank
	for r := range size {
		ranks = append(ranks, start(t, r, size, args...))
	}
	var first string
	for r, p := range ranks {
		code, out := p.end(t)
		if code != 0 {
			t.Fatalf("rank %d of %d: exit code %d: %s", r, size, code, &p.stderr)
		}
		if r == 0 {
			first = out
		} else if out != "" {
			t.Errorf("rank %d of %d printed %q", r, size, out)
		}
	}
	return first
}

// running waits for rank 0's first line, which it prints once all ranks have joined.
func running(t *testing.T, rank0 *rank) {
	t.Helper()
	line, err := bufio.NewReader(rank0.stdout).ReadString('\n')
	if err != nil || !strings.Contains(line, "ranks") {
		t.Fatalf("got %q, %v, want the line that says the ranks: %s", line, err, &rank0.stderr)
	}
}

func load(t *testing.T, dir string) *model.Model {
	t.Helper()
	m, err := model.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func metrics(t *testing.T, dir string) train.Metrics {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, train.MetricsFile))
	if err != nil {
		t.Fatal(err)
	}
	var m train.Metrics
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatal(err)
	}
	return m
}

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

// text makes a corpus: this program's own source.
func text(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, pattern := range []string{"*.go", "*/*.go"} {
		paths, err := filepath.Glob(pattern)
		if err != nil || len(paths) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(paths), err)
		}
		for _, path := range paths {
			content, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, strings.ReplaceAll(path, "/", "-")), content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

var smallModel = []string{"--context=6", "--embed=8", "--hidden=32"}

func TestLossFalls(t *testing.T) {
	dir, out := text(t), filepath.Join(t.TempDir(), "new", "out")
	printed := trains(t, 2, append(smallModel, "--data", dir, "--out", out, "--steps=205", "--batch=8", "--lr=0.04")...)
	m := metrics(t, out)
	if m.FirstLoss < 4 || m.LastLoss > 2.8 {
		t.Errorf("the loss goes from %.2f to %.2f nats, want from above 4 to below 2.8", m.FirstLoss, m.LastLoss)
	}
	if m.Steps != 205 || m.WorldSize != 2 || m.DataFiles < 10 || m.Tokens < 205*8 || m.Tokens > 205*8*train.Span || m.Seconds <= 0 {
		t.Errorf("metrics: %+v", m)
	}
	if !strings.Contains(printed, "step 205/205  loss") || !strings.Contains(printed, "loss "+fmt.Sprintf("%.3f -> %.3f", m.FirstLoss, m.LastLoss)) {
		t.Errorf("printed %q", printed)
	}
	want := []string{"_SUCCESS", "config.json", "metrics.json", "metrics.jsonl", "model-00001-of-00002.safetensors",
		"model-00002-of-00002.safetensors", "model.safetensors.index.json"}
	if diff := cmp.Diff(want, names(t, out)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}

	// The model that was saved is the one that was trained.
	content, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	if got := load(t, out).Loss(content); math.Abs(got-m.LastLoss) > 0.5 {
		t.Errorf("the saved model's loss is %.2f, training ended with %.2f", got, m.LastLoss)
	}

	log, err := os.ReadFile(filepath.Join(out, train.LogFile))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	if len(lines) != 21 {
		t.Fatalf("the log has %d lines, want 21", len(lines))
	}
	before := ""
	for i, line := range lines {
		var l train.LogLine
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatal(err)
		}
		if l.Step != min(10*i+10, 205) || l.Loss <= 0 || l.TokensS <= 0 || len(l.Time) != 30 || l.Time < before {
			t.Errorf("line %d: %s", i+1, line)
		}
		before = l.Time
	}

	// A second run with fewer ranks leaves nothing of the first.
	trains(t, 1, append(smallModel, "--data", dir, "--out", out, "--steps=1")...)
	want = []string{"_SUCCESS", "config.json", "metrics.json", "metrics.jsonl", "model-00001-of-00001.safetensors", "model.safetensors.index.json"}
	if diff := cmp.Diff(want, names(t, out)); diff != "" {
		t.Errorf("files of the second run (-want +got):\n%s", diff)
	}
}

// TestRanksAgree shows that the work is the same however many ranks share it, and the same bytes when they are as many.
func TestRanksAgree(t *testing.T) {
	dir := text(t)
	run := func(size int) ([]float32, train.Metrics) {
		out := t.TempDir()
		trains(t, size, append(smallModel, "--data", dir, "--out", out, "--steps=20", "--batch=7", "--seed=5")...)
		return load(t, out).Params(), metrics(t, out)
	}
	want, one := run(1)
	for _, size := range []int{2, 3} {
		got, m := run(size)
		var far float64
		for i := range want {
			far = max(far, math.Abs(float64(got[i]-want[i])))
		}
		if far > 2e-2 {
			t.Errorf("%d ranks: a weight differs from one rank's by %g", size, far)
		}
		if math.Abs(m.LastLoss-one.LastLoss) > 1e-4 || m.Tokens != one.Tokens {
			t.Errorf("%d ranks: loss %g after %d bytes, with one rank %g after %d", size, m.LastLoss, m.Tokens, one.LastLoss, one.Tokens)
		}
		if again, _ := run(size); !cmp.Equal(got, again) {
			t.Errorf("%d ranks: two runs give other weights", size)
		}
	}
}

// endless are the arguments of a run that does not end by itself in a test's time.
func endless(t *testing.T) []string {
	return append(smallModel, "--data", text(t), "--out", t.TempDir(), "--steps=100000000", "--batch=3")
}

// fails ends ranks that must have failed with the reason, without a marker.
func fails(t *testing.T, p *rank, code int, reason string) {
	t.Helper()
	got, _ := p.end(t)
	if got != code || !strings.Contains(p.stderr.String(), reason) {
		t.Errorf("got exit code %d and %q, want %d and %q", got, &p.stderr, code, reason)
	}
	if n := strings.Count(p.stderr.String(), "\n"); n != 1 {
		t.Errorf("got %d lines, want 1: %s", n, &p.stderr)
	}
	for i, arg := range p.Args {
		if arg == "--out" {
			for _, name := range names(t, p.Args[i+1]) {
				if name != train.LogFile {
					t.Errorf("%s is left", name)
				}
			}
		}
	}
}

func TestKilledRankEndsTheOthers(t *testing.T) {
	for _, victim := range []int{0, 2} {
		args := endless(t)
		ranks := []*rank{start(t, 0, 3, args...), start(t, 1, 3, args...), start(t, 2, 3, args...)}
		running(t, ranks[0])
		if err := ranks[victim].Process.Kill(); err != nil {
			t.Fatal(err)
		}
		for r, p := range ranks {
			if r != victim {
				fails(t, p, 1, fmt.Sprintf("rank %d on localhost is gone", victim))
			}
		}
	}
}

func TestSignal(t *testing.T) {
	args := endless(t)
	ranks := []*rank{start(t, 0, 2, args...), start(t, 1, 2, args...)}
	running(t, ranks[0])
	if err := ranks[1].Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	fails(t, ranks[1], 143, "rank 1 on localhost: stopped by signal terminated")
	fails(t, ranks[0], 1, "rank 1 on localhost: stopped by signal terminated")
}

func TestBadData(t *testing.T) {
	good, empty, out := text(t), t.TempDir(), t.TempDir()
	for _, test := range []struct {
		name string
		data [2]string
		want [2]string
	}{
		{"no files", [2]string{empty, empty}, [2]string{"no files below " + empty, "no files below " + empty}},
		{"one rank without", [2]string{good, empty}, [2]string{"rank 1 on localhost: open corpus: no files", "no files below " + empty}},
		{"other files", [2]string{good, t.TempDir()}, [2]string{"the corpus of rank 1 on localhost is 1 files", "the corpus of rank 1"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.name == "other files" {
				if err := os.WriteFile(filepath.Join(test.data[1], "a"), []byte("text"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			var ranks []*rank
			for r := range 2 {
				ranks = append(ranks, start(t, r, 2, "--data", test.data[r], "--out", out))
			}
			for r, p := range ranks {
				fails(t, p, 1, test.want[r])
			}
		})
	}
}

func TestUsage(t *testing.T) {
	dir := text(t)
	for _, test := range []struct {
		name string
		args []string
		code int
		want string
	}{
		{"help", []string{"--help"}, 0, "usage: srun trainer"},
		{"unknown flag", []string{"--stepz=1"}, 2, "stepz"},
		{"no data", []string{"--out=x"}, 2, "--data and --out are needed"},
		{"an argument", []string{"--data=x", "--out=y", "z"}, 2, `unexpected argument "z"`},
		{"a timeout of nothing", []string{"--data=x", "--out=y", "--timeout=0s"}, 2, "--timeout"},
		{"numbers out of range", []string{"--data", dir, "--out", t.TempDir(), "--steps=0", "--batch=0", "--lr=0", "--hidden=0"}, 1, "steps 0"},
		{"a learning rate out of range", []string{"--data", dir, "--out", t.TempDir(), "--steps=200", "--batch=1", "--lr=1e30"}, 1, "learning rate"},
	} {
		var stdout, stderr bytes.Buffer
		code := run(t.Context(), test.args, func(string) string { return "" }, &stdout, &stderr)
		if code != test.code || !strings.Contains(stderr.String(), test.want) {
			t.Errorf("%s: got exit code %d and %q, want %d and %q", test.name, code, &stderr, test.code, test.want)
		}
	}
}

func TestTaskFromEnv(t *testing.T) {
	for _, test := range []struct {
		name string
		env  map[string]string
		want collective.Config // without what depends on the machine
		err  string
	}{
		{"no Slurm", nil, collective.Config{Size: 1}, ""},
		{"second of three, on the second node", map[string]string{"SLURM_STEP_NODELIST": "n[1,4]", "SLURM_NODEID": "1", "SLURM_PROCID": "1",
			"SLURM_NTASKS": "3", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"},
			collective.Config{Rank: 1, Size: 3, Node: "n4", File: "o/.rendezvous-12.3"}, ""},
		{"a job script without srun", map[string]string{"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, collective.Config{}, "use \"srun"},
		{"a job script of one task without srun", map[string]string{"SLURM_JOB_ID": "12", "SLURM_NTASKS": "1"}, collective.Config{Size: 1}, ""},
		{"numbers missing", map[string]string{"SLURM_STEP_NODELIST": "n1"}, collective.Config{}, `SLURM_PROCID is "", not a number`},
		{"a bad node list", map[string]string{"SLURM_STEP_NODELIST": "n[1-"}, collective.Config{}, "SLURM_STEP_NODELIST"},
		{"a node too many", map[string]string{"SLURM_STEP_NODELIST": "n1", "SLURM_NODEID": "1", "SLURM_PROCID": "0",
			"SLURM_NTASKS": "1", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}, collective.Config{}, "has 1 nodes"},
		{"a rank too many", map[string]string{"SLURM_STEP_NODELIST": "n1", "SLURM_NODEID": "0", "SLURM_PROCID": "2",
			"SLURM_NTASKS": "2", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}, collective.Config{}, "SLURM_PROCID is 2"},
	} {
		got, err := taskFromEnv(func(name string) string { return test.env[name] }, "o")
		if test.err != "" {
			if err == nil || !strings.Contains(err.Error(), test.err) {
				t.Errorf("%s: got %v, want %q", test.name, err, test.err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
		}
		if got.File != "" && got.Hosts[0] != got.Node {
			t.Errorf("%s: hosts %q do not begin with the node %q", test.name, got.Hosts, got.Node)
		}
		got.Hosts = nil
		if test.want.Node == "" {
			got.Node = ""
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, diff)
		}
	}
}
