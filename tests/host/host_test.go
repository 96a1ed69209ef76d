// Package host_test proves that the sandbox and the demo leave nothing behind
// on the host, however they end.
package host_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var binary = func() string {
	path, err := filepath.Abs("../../bin/sluice")
	if err != nil {
		panic(err)
	}
	return path
}()

// traces is what a sandbox could leave on the host.
type traces struct {
	Links, Mounts, Processes, State []string
	Etc                             map[string]string // path → size and modification time
}

func look(t *testing.T) traces {
	t.Helper()
	return traces{Links: links(t), Mounts: mounts(t), Processes: processes(t), State: state(t), Etc: etc(t)}
}

func links(t *testing.T) []string {
	t.Helper()
	return names(t, "/sys/class/net")
}

func mounts(t *testing.T) []string {
	t.Helper()
	data, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(data), "\n")
	sort.Strings(lines)
	return lines
}

// processes lists what runs of Sluice's or in a VM: whatever has a program of
// the sandbox, or another network namespace than this one.
func processes(t *testing.T) []string {
	t.Helper()
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	paths, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	others := otherSandboxes(t)
	var found []string
	for _, p := range paths {
		ns, err := os.Readlink(p + "/ns/net")
		if err != nil || others[ns] || descends(filepath.Base(p), others) {
			continue // ended meanwhile, or somebody else's
		}
		exe, _ := os.Readlink(p + "/exe")
		if ns != own || strings.HasPrefix(exe, filepath.Dir(binary)+"/") {
			cmdline, _ := os.ReadFile(p + "/cmdline")
			if bytes.Contains(cmdline, []byte("\x00_follow\x00")) && !bytes.Contains(cmdline, []byte(ours)) {
				continue // waits for the end of somebody else's
			}
			found = append(found, fmt.Sprintf("%s %s", filepath.Base(p), bytes.ReplaceAll(cmdline, []byte{0}, []byte(" "))))
		}
	}
	sort.Strings(found)
	return found
}

// otherSandboxes are the outer processes, and the networks, of sandboxes that
// are not of these tests.
func otherSandboxes(t *testing.T) map[string]bool {
	t.Helper()
	pids := map[string]bool{}
	for _, name := range names(t, os.Getenv("SLUICE_ROOT")+"/run/sluice-sandbox") {
		if strings.HasPrefix(name, ours) {
			continue
		}
		if out, err := command(t, "sandbox", "status", "--name", name, "--json").Output(); err == nil {
			var status struct {
				PID int `json:"pid"`
			}
			if err := json.Unmarshal(out, &status); err != nil {
				t.Fatal(err)
			}
			pids[fmt.Sprint(status.PID)] = true
			if ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", status.PID)); err == nil {
				pids[ns] = true
			}
		}
	}
	return pids
}

// descends reports whether pid is one of ancestors, or has one among its parents.
func descends(pid string, ancestors map[string]bool) bool {
	for pid != "0" {
		if ancestors[pid] {
			return true
		}
		stat, err := os.ReadFile("/proc/" + pid + "/stat")
		if err != nil {
			return false
		}
		// The name, in parentheses, may hold anything; the parent is the second field after it.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		pid = fields[1]
	}
	return false
}

func state(t *testing.T) []string {
	t.Helper()
	root := os.Getenv("SLUICE_ROOT")
	var found []string
	for _, dir := range []string{root + "/run/sluice-sandbox", root + "/var/cache/sluice/sandboxes"} {
		for _, name := range names(t, dir) {
			if strings.HasPrefix(strings.TrimPrefix(name, "."), ours) {
				found = append(found, dir+"/"+name)
			}
		}
	}
	return found
}

func etc(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	if err := filepath.WalkDir("/etc", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		all[path] = fmt.Sprintf("%d %s", info.Size(), info.ModTime())
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// same fails the test unless the host comes to look as it did before.
func same(t *testing.T, before traces) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for {
		diff := cmp.Diff(before, look(t))
		if diff == "" {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("the host has changed (-before +after):\n%s", diff)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	return cmd
}

func run(t *testing.T, args ...string) string {
	t.Helper()
	out, err := command(t, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("sluice %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// ours begins the names of these tests' sandboxes.
var ours = fmt.Sprintf("host-%d-", os.Getpid())

// name is a sandbox's name for the test: at most 32 letters, digits and hyphens.
func name(t *testing.T) string {
	return fmt.Sprintf("%s%x", ours, crc32.ChecksumIEEE([]byte(t.Name())))
}

func pid(t *testing.T, name string) int {
	t.Helper()
	var status struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal([]byte(run(t, "sandbox", "status", "--name", name, "--json")), &status); err != nil {
		t.Fatal(err)
	}
	return status.PID
}

func TestUpTwiceAndDownLeavesNothing(t *testing.T) {
	before := look(t)
	run(t, "sandbox", "up", "--name", name(t))
	t.Cleanup(func() { command(t, "sandbox", "down", "--name", name(t)).Run() })
	if out, err := command(t, "sandbox", "up", "--name", name(t)).CombinedOutput(); err == nil || !strings.Contains(string(out), "already") {
		t.Errorf("a second sandbox of one name: %v\n%s", err, out)
	}
	if got, want := run(t, "sandbox", "exec", "--name", name(t), "--vm", "login", "--user", "alice", "--", "sh", "-c", "echo $USER@$(hostname); pwd"), "alice@login\n/home/alice\n"; got != want {
		t.Errorf("exec on the login VM printed %q, want %q", got, want)
	}
	out, err := command(t, "sandbox", "exec", "--name", name(t), "--", "sh", "-c", "exit 7").CombinedOutput()
	if xe, ok := err.(*exec.ExitError); !ok || xe.ExitCode() != 7 {
		t.Errorf("exec's exit code: %v, want 7\n%s", err, out)
	}
	run(t, "sandbox", "down", "--name", name(t))
	same(t, before)
}

func TestKilledOuterProcessLeavesNothingRunning(t *testing.T) {
	before := look(t)
	run(t, "sandbox", "up", "--name", name(t))
	t.Cleanup(func() { command(t, "sandbox", "down", "--name", name(t)).Run() })
	if err := syscall.Kill(pid(t, name(t)), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	// The state directory is all that may stay, until the next up or down.
	before.State = state(t)
	same(t, before)
	run(t, "sandbox", "down", "--name", name(t))
	before.State = nil
	same(t, before)
}

// A demo that is killed takes its sandbox with it.
func TestKilledDemoLeavesNothing(t *testing.T) {
	before := look(t)
	cmd := command(t, "sandbox", "demo", "--name", name(t), "--report", filepath.Join(t.TempDir(), "report.json"))
	w := &watch{to: &bytes.Buffer{}, want: "is up after", seen: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = w, w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-w.seen:
	case <-time.After(3 * time.Minute):
		t.Error("the sandbox never came up")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	same(t, before)
	cmd.Wait()
}

func TestDemoInterruptedThenRunAgain(t *testing.T) {
	before := look(t)
	report := filepath.Join(t.TempDir(), "report.json")
	cmd := command(t, "sandbox", "demo", "--name", name(t), "--report", report)
	var out bytes.Buffer
	w := &watch{to: &out, want: "stage in", seen: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = w, w
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-w.seen:
	case <-time.After(3 * time.Minute):
		t.Errorf("the demo never staged in:\n%s", out.String())
	}
	// What a terminal does at Ctrl-C: the whole foreground group gets it.
	if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	err := cmd.Wait()
	if xe, ok := err.(*exec.ExitError); !ok || xe.ExitCode() != 130 {
		t.Errorf("interrupted demo: %v, want exit code 130\n%s", err, out.String())
	}
	same(t, before)

	run(t, "sandbox", "demo", "--name", name(t), "--report", report)
	same(t, before)
	checkReport(t, report)
}

// watch closes seen when want has been written.
type watch struct {
	to   *bytes.Buffer
	want string
	seen chan struct{}
	done bool
}

func (w *watch) Write(p []byte) (int, error) {
	n, err := w.to.Write(p)
	if !w.done && strings.Contains(w.to.String(), w.want) {
		w.done = true
		close(w.seen)
	}
	return n, err
}

func checkReport(t *testing.T, path string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var r struct {
		Job struct {
			ID    int
			State string
			User  string
			Nodes []string
		}
		Timeline    map[string]string
		StageIn     map[string]any `json:"stage_in"`
		StageOut    map[string]any `json:"stage_out"`
		Source      string
		Destination string
		Endpoints   map[string]string
		Train       struct {
			FirstLoss float64 `json:"first_loss"`
			LastLoss  float64 `json:"last_loss"`
			Steps     int
		}
	}
	if err := json.Unmarshal(data, &r); err != nil {
		t.Fatal(err)
	}
	if r.Job.State != "COMPLETED" || r.Job.User != "alice" || len(r.Job.Nodes) != 2 || r.Job.ID == 0 {
		t.Errorf("job: %+v", r.Job)
	}
	order := []string{"submitted", "stage_in_started", "stage_in_done", "resume_requested", "nodes_ready", "job_started", "job_ended", "stage_out_done"}
	last := ""
	for _, moment := range order {
		at := r.Timeline[moment]
		if _, err := time.Parse("2006-01-02T15:04:05.000000000Z", at); err != nil || at < last {
			t.Errorf("%s is %q, after %q", moment, at, last)
		}
		last = at
	}
	for kind, stage := range map[string]map[string]any{"stage_in": r.StageIn, "stage_out": r.StageOut} {
		if stage["objects"].(float64) < 5 || stage["verified"] != stage["objects"] || stage["bytes"].(float64) == 0 || stage["engine"] != "managed" {
			t.Errorf("%s: %v", kind, stage)
		}
	}
	if in := r.StageIn; in["objects"].(float64) < 200 || in["bytes"].(float64) < 64<<20 {
		t.Errorf("stage_in: %v, want some hundred objects and more than 64 MiB", in)
	}
	if !strings.HasPrefix(r.Source, "gs://") || !strings.HasPrefix(r.Destination, "gs://") {
		t.Errorf("source %q, destination %q", r.Source, r.Destination)
	}
	for _, service := range []string{"storage", "compute", "lustre"} {
		if !strings.HasPrefix(r.Endpoints[service], "http://") {
			t.Errorf("endpoint of %s: %q", service, r.Endpoints[service])
		}
	}
	if r.Train.Steps == 0 || r.Train.LastLoss >= r.Train.FirstLoss || r.Train.LastLoss <= 0 {
		t.Errorf("train: %+v", r.Train)
	}
}

// A sandbox whose file system hangs, with processes that wait for it and cannot be killed, goes down all the same.
func TestHungMountsDoNotKeepTheSandboxUp(t *testing.T) {
	for _, how := range []string{"down", "killed"} {
		t.Run(how, func(t *testing.T) {
			before := look(t)
			run(t, "sandbox", "up", "--name", name(t))
			t.Cleanup(func() { command(t, "sandbox", "down", "--name", name(t)).Run() })
			run(t, "sandbox", "fault", "set", "--name", name(t), "lustre.hang=scratch")
			for _, vm := range []string{"controller", "login"} {
				// The processes stay behind in uninterruptible sleep, so they may have nothing of ours open.
				run(t, "sandbox", "exec", "--name", name(t), "--vm", vm, "--", "sh", "-c",
					"for i in 1 2 3; do timeout --signal=KILL 0.3 stat -f /lustre </dev/null >/dev/null 2>&1; done; ps -eo stat,args | grep -q '^D.*stat -f'")
			}
			if how == "killed" {
				if err := syscall.Kill(pid(t, name(t)), syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
				running := before
				running.State = state(t)
				same(t, running)
			}
			began := time.Now()
			run(t, "sandbox", "down", "--name", name(t))
			if took := time.Since(began); took > 30*time.Second {
				t.Errorf("down took %v", took)
			}
			same(t, before)
		})
	}
}
