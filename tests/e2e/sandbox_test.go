// Package e2e_test runs the built binaries on real Slurm in a sandbox of its own.
package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/sandbox"
	"github.com/sluicehpc/sluice/sandbox/discovery"
	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
)

// The one sandbox that the tests of this package share; each test uses names
// (buckets, jobs) of its own.
var (
	sluiceBinary string
	sandboxName  = fmt.Sprintf("e2e-%d", os.Getpid())
)

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) (code int) {
	if os.Getuid() != 0 {
		fmt.Fprintln(os.Stderr, "e2e: the sandbox needs root (namespaces, overlay mounts); run as root")
		return 1
	}
	binary, err := filepath.Abs("../../bin/sluice")
	if err == nil {
		_, err = os.Stat(binary)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "e2e: %v\n  run make build\n", err)
		return 1
	}
	sluiceBinary = binary
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	descriptions, err := discoverytest.ModuleDir()
	if err != nil {
		fmt.Fprintf(os.Stderr, "e2e: %v\n", err)
		return 1
	}
	if out, err := sluice(ctx, nil, "sandbox", "up", "--name", sandboxName, "--owner", strconv.Itoa(os.Getpid()), "--check-apis", descriptions); err != nil {
		fmt.Fprintf(os.Stderr, "e2e: sandbox up: %v\n%s\n", err, out)
		return 1
	}
	defer func() {
		if out, err := sluice(context.Background(), nil, "sandbox", "down", "--name", sandboxName); err != nil {
			fmt.Fprintf(os.Stderr, "e2e: sandbox down: %v\n%s\n", err, out)
			code = max(code, 1)
		}
	}()
	return max(m.Run(), violations())
}

// violations fails the run when a request or a reply in it was not as Google describes its APIs.
func violations() (code int) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var all []discovery.Violation
	client, err := sandbox.Open(sandboxName)
	if err == nil {
		all, err = client.Violations(ctx)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "e2e: %v\n", err)
		return 1
	}
	for _, v := range all {
		fmt.Fprintf(os.Stderr, "e2e: not as Google describes it: %v\n", v)
		code = 1
	}
	return code
}

// sluice runs the built command line on the host and returns both outputs together.
func sluice(ctx context.Context, stdin io.Reader, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, sluiceBinary, args...)
	cmd.Stdin = stdin
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// onVM runs a command on a VM and returns its outputs together.
func onVM(t *testing.T, vm, user, stdin string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	return sluice(ctx, strings.NewReader(stdin), append([]string{"sandbox", "exec", "--name", sandboxName, "--vm", vm, "--user", user, "--"}, args...)...)
}

func mustOnVM(t *testing.T, vm, user, stdin string, args ...string) string {
	t.Helper()
	out, err := onVM(t, vm, user, stdin, args...)
	if err != nil {
		t.Fatalf("%s@%s: %s: %v\n%s", user, vm, strings.Join(args, " "), err, out)
	}
	return out
}

// fault sets a sandbox fault for the length of the test.
func fault(t *testing.T, key, value string) {
	t.Helper()
	if out, err := sluice(t.Context(), nil, "sandbox", "fault", "set", "--name", sandboxName, key+"="+value); err != nil {
		t.Fatalf("fault %s=%s: %v\n%s", key, value, err, out)
	}
	t.Cleanup(func() { clearFaults(t) })
}

func clearFaults(t *testing.T) {
	t.Helper()
	if out, err := sluice(context.Background(), nil, "sandbox", "fault", "clear", "--name", sandboxName); err != nil {
		t.Errorf("clear faults: %v\n%s", err, out)
	}
}

// evidenceScript shows what is known of a job, on the controller.
const evidenceScript = `
sacct --jobs "$1" --format=JobID,State,ExitCode,Start,End,NodeList,Reason
sluice job list --all --limit 8
journalctl -u sluiced | tail -n 40
tail -n 30 /var/log/slurm/slurmctld.log
cd /home/alice && for f in $(ls -t *.out | head -n 6); do echo "== $f"; tail -n 5 "$f"; done
`

// submit sends script through sbatch as alice on the login VM.
func submit(t *testing.T, script string) uint32 {
	t.Helper()
	return submitAs(t, "alice", script)
}

func submitAs(t *testing.T, user, script string, args ...string) uint32 {
	t.Helper()
	out, err := trySubmit(t, user, script, args...)
	if err != nil {
		t.Fatalf("sbatch: %v\n%s", err, out)
	}
	fields := strings.Fields(out)
	id, err := strconv.ParseUint(fields[len(fields)-1], 10, 32)
	if err != nil {
		t.Fatalf("sbatch printed %q, a job id at the end was expected", out)
	}
	t.Cleanup(func() {
		// Jobs that a failing test left behind must not disturb the next one.
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if t.Failed() {
			evidence, _ := sluice(ctx, strings.NewReader(evidenceScript), "sandbox", "exec", "--name", sandboxName, "--vm", "controller", "--", "bash", "-s", fmt.Sprint(id))
			t.Logf("evidence of job %d:\n%s", id, evidence)
		}
		sluice(ctx, nil, "sandbox", "exec", "--name", sandboxName, "--vm", "controller", "--", "scancel", "--hurry", fmt.Sprint(id))
	})
	return uint32(id)
}

func trySubmit(t *testing.T, user, script string, args ...string) (string, error) {
	t.Helper()
	mustOnVM(t, "login", user, script, "sh", "-c", "cat > job.sh")
	return onVM(t, "login", user, "", append(append([]string{"sbatch"}, args...), "job.sh")...)
}

// showJob asks sluiced about a job, on the controller as root.
func showJob(t *testing.T, id uint32) (api.Job, error) {
	t.Helper()
	var job api.Job
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, sluiceBinary, "sandbox", "exec", "--name", sandboxName, "--vm", "controller", "--", "sluice", "job", "show", "--json", fmt.Sprint(id))
	out, err := cmd.Output()
	if err != nil {
		var xe *exec.ExitError
		if errors.As(err, &xe) {
			err = fmt.Errorf("%w: %s", err, xe.Stderr)
		}
		return job, err
	}
	return job, json.Unmarshal(out, &job)
}

// wait polls until done says so; the deadline is generous, since it is not a measurement.
func wait(t *testing.T, what string, done func() (bool, string)) {
	t.Helper()
	const deadline = 3 * time.Minute
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	var last string
	for {
		ok, seen := done()
		if ok {
			return
		}
		last = seen
		select {
		case <-ctx.Done():
			t.Fatalf("%s: not within %v; last seen: %s", what, deadline, last)
		case <-tick.C:
		}
	}
}

// squeue returns the job's state and reason as its owner sees them.
func squeue(t *testing.T, id uint32) (state, reason string) {
	t.Helper()
	out := mustOnVM(t, "login", "alice", "", "squeue", "--noheader", "--states=all", "--jobs", fmt.Sprint(id), "--format=%T|%r")
	state, reason, _ = strings.Cut(strings.TrimSpace(out), "|")
	return state, reason
}
