package e2e_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/sluicehpc/sluice/api"
)

// The tasks of an array share one copy, start, and get their environment each:
// Slurm keeps no directory of its own for a task.
func TestArrayTasksShareOneImport(t *testing.T) {
	bucket := newBucket(t, "research-array", texts("data/", 4, 1000))
	before := imports(t)
	id := submit(t, strings.NewReplacer("--nodes=1", "--nodes=1 --array=0-3", "result/%j/", "result/%A-%a/").Replace(stageJob("research-array",
		`mkdir "$SLUICE_JOB_DIR/result"
cp "$SLUICE_DATA_DATA/part-000/text-000.txt" "$SLUICE_JOB_DIR/result/$SLURM_ARRAY_TASK_ID"`)))
	var want []string
	for task := range 4 {
		want = append(want, fmt.Sprintf("result/%d-%d/%d", id, task, task))
	}
	wait(t, "all tasks are done", func() (bool, string) {
		got := listing(t, bucket, "result/")
		out := mustOnVM(t, "login", "alice", "", "squeue", "--noheader", "--all", "--array", "--jobs", fmt.Sprint(id), "--format=%i %T %r")
		if strings.Contains(out, "JobHeld") {
			t.Fatalf("a task is held:\n%s", out)
		}
		for _, name := range want {
			if got[name] == nil {
				return false, out
			}
		}
		return true, ""
	})
	if got := imports(t) - before; got != 1 {
		t.Errorf("%d imports for the tasks of one array, want 1", got)
	}
}

// A requeued job is not over, and Slurm's next start is another run of it.
func TestRequeuedJobIsNotDone(t *testing.T) {
	newBucket(t, "research-requeued", texts("data/", 1, 10))
	id := submit(t, stageJob("research-requeued", `[ -n "${SLURM_RESTART_COUNT:-}" ] || sleep 600; true`))
	waitPhase(t, id, "running")
	mustOnVM(t, "login", "alice", "", "scontrol", "requeue", fmt.Sprint(id))
	job := waitPhase(t, id, "requeued")
	if job.EndState != "requeued" {
		t.Errorf("the run's end is %q, want requeued", job.EndState)
	}
	if state, reason := squeue(t, id); state != "PENDING" {
		t.Errorf("squeue shows %s (%s), want PENDING", state, reason)
	}
	// Cancelled before Slurm starts it again: Slurm tears nothing down.
	mustOnVM(t, "login", "alice", "", "scancel", fmt.Sprint(id))
	wait(t, "the job is cancelled", func() (bool, string) {
		job, err := showJob(t, id)
		return err == nil && job.Phase == "cancelled", job.Phase
	})
}

// A slurmctld that was killed may remember a node as off that runs; it takes the
// node only after another boot. The node is made anew and serves the next job.
func TestNodeThatSlurmBelievesOffIsMadeAnew(t *testing.T) {
	const node = "n4"
	run := func() {
		t.Helper()
		id := submit(t, "#!/bin/bash\n#SBATCH --nodes=1 --nodelist="+node+" --output=/dev/null\ntrue\n")
		wait(t, "the job is completed", func() (bool, string) {
			state, reason := squeue(t, id)
			return state == "COMPLETED", state + " " + reason
		})
	}
	run()
	made := instances(t)[node]
	// What slurmctld forgets when it is killed, Sluice must not tell apart.
	mustOnVM(t, "controller", "slurm", "", "/usr/local/libexec/sluice/sluice-resume", node)
	wait(t, "the VM is another one", func() (bool, string) {
		at := instances(t)[node]
		return at.After(made), at.String()
	})
	wait(t, "the node is ready again", func() (bool, string) {
		out := mustOnVM(t, "controller", "root", "", "sluice", "node", "list", "--json")
		var list api.Nodes
		if err := json.Unmarshal([]byte(out), &list); err != nil {
			t.Fatal(err)
		}
		for _, n := range list.Nodes {
			if n.Name == node {
				return n.State == "ready", n.State
			}
		}
		return false, "no such node"
	})
	run()
}

// Names that a shell or a terminal would obey are names and nothing else.
func TestHostileNamesAreOnlyNames(t *testing.T) {
	bucket := newBucket(t, "research-hostile-names", texts("data/", 1, 10))
	script := stageJob("research-hostile-names", `mkdir "$SLUICE_JOB_DIR/result"
cd "$SLUICE_JOB_DIR/result"
for name in 'a b' "q'\"x" '$(touch pwned)' -rf '#x?y%41' ' .sluice'; do echo x > "./$name"; done
ln -s /etc/passwd link; mkfifo pipe`)
	mustOnVM(t, "login", "alice", script, "sh", "-c", `cat > 'we ird;$(touch pwned).sh'`)
	out := mustOnVM(t, "login", "alice", "", "sbatch", "--parsable", "--job-name=$(touch pwned)';touch pwned;'", "--output=/dev/null", `we ird;$(touch pwned).sh`)
	var id uint32
	if _, err := fmt.Sscan(out, &id); err != nil {
		t.Fatalf("sbatch printed %q", out)
	}
	job := waitPhase(t, id, "done")
	got := listing(t, bucket, "result/")
	if len(got) != 6 || got[fmt.Sprintf("result/%d/$(touch pwned)", id)] == nil {
		t.Errorf("%d objects came out, want the six regular files: %v", len(got), got)
	}
	for _, transfer := range job.Transfers {
		if transfer.Kind == "stage_out" && !strings.Contains(transfer.Hint, "2 not exported") {
			t.Errorf("the stage-out does not say that the link and the pipe stayed: %q", transfer.Hint)
		}
	}
	for _, vm := range []string{"controller", "login"} {
		if found := mustOnVM(t, vm, "root", "", "find", "/", "-xdev", "-name", "pwned"); found != "" {
			t.Errorf("on %s something obeyed a name: %s", vm, found)
		}
	}
}
