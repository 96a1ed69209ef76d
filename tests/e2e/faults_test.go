package e2e_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/api"
)

// operations counts Compute Engine's operations of a type that began after a moment.
func operations(t *testing.T, kind string, after time.Time) int {
	t.Helper()
	out := get(t, sandboxStatus(t).HostEndpoints["compute"]+"/compute/v1/projects/sluice-sandbox/zones/us-central1-a/operations?maxResults=500&filter=operationType%3D%22"+kind+"%22")
	var list struct {
		Items []struct {
			InsertTime string `json:"insertTime"`
		} `json:"items"`
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		t.Fatalf("list operations: %v\n%s", err, out)
	}
	n := 0
	for _, op := range list.Items {
		at, err := time.Parse(time.RFC3339Nano, op.InsertTime)
		if err != nil {
			t.Fatal(err)
		}
		if at.After(after) {
			n++
		}
	}
	return n
}

// nodeOf is a node as sluiced sees it.
func nodeOf(t *testing.T, name string) api.Node {
	t.Helper()
	out := mustOnVM(t, "controller", "root", "", "sluice", "node", "list", "--json")
	var list api.Nodes
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, n := range list.Nodes {
		if n.Name == name {
			return n
		}
	}
	t.Fatalf("no node %s in %s", name, out)
	return api.Node{}
}

// absent makes sure that nodes have no VM, whatever ran on them before.
func absent(t *testing.T, nodes ...string) {
	t.Helper()
	for _, n := range nodes {
		if _, ok := instances(t)[n]; ok {
			mustOnVM(t, "controller", "slurm", "", "scontrol", "update", "nodename="+n, "state=power_down_force")
		}
	}
	wait(t, "the nodes have no VMs", func() (bool, string) {
		all := instances(t)
		for _, n := range nodes {
			if _, ok := all[n]; ok {
				return false, fmt.Sprint(all)
			}
			// A node that is on its way down cannot be asked for.
			state := mustOnVM(t, "controller", "slurm", "", "sinfo", "--noheader", "--nodes="+n, "--format=%T")
			if strings.Contains(state, "powering_down") || strings.ContainsAny(state, "%!") {
				return false, n + " is " + state
			}
		}
		return true, ""
	})
}

// faultLog is the journal of the sandbox's faults.
func faultLog(t *testing.T) string {
	t.Helper()
	out, err := sluice(t.Context(), nil, "sandbox", "fault", "log", "--name", sandboxName)
	if err != nil {
		t.Fatalf("fault log: %v\n%s", err, out)
	}
	return out
}

func completed(t *testing.T, id uint32) {
	t.Helper()
	wait(t, "the job is completed", func() (bool, string) {
		state, reason := squeue(t, id)
		if strings.Contains("FAILED CANCELLED TIMEOUT NODE_FAIL BOOT_FAIL OUT_OF_MEMORY", state) && state != "" {
			t.Fatalf("job %d is %s (%s)", id, state, reason)
		}
		return state == "COMPLETED", state + " " + reason
	})
}

func onNodes(nodes string, body string) string {
	return fmt.Sprintf("#!/bin/bash\n#SBATCH --nodelist=%s --nodes=%d --exclusive --output=/dev/null --requeue\n%s\n", nodes, 1+strings.Count(nodes, ","), body)
}

// Nodes come up through errors of Compute Engine, a reply that is lost and an operation that takes its time: each once.
func TestNodesComeUpThroughTrouble(t *testing.T) {
	absent(t, "n3", "n4")
	began := time.Now()
	fault(t, "api.compute.status", "503,count=3")
	fault(t, "api.compute.instances.bulkInsert.lost", "reply,count=1")
	fault(t, "operation.compute.instances.bulkInsert.hang", "after,for=5s,count=1")
	id := submit(t, onNodes("n3,n4", "srun hostname"))
	completed(t, id)
	log := faultLog(t)
	for _, want := range []string{"the reply of", "answered 503", "hangs after its work"} {
		if !strings.Contains(log, want) {
			t.Errorf("the journal has no %q:\n%s", want, log)
		}
	}
	clearFaults(t)
	if got := operations(t, "bulkInsert", began); got != 1 {
		t.Errorf("%d bulkInserts, want 1", got)
	}
	if got := operations(t, "insert", began); got != 2 {
		t.Errorf("%d VMs were made, want 2", got)
	}
}

// A zone without room and a quota that is used up are named, a VM that a failed bulkInsert leaves behind is taken, and the nodes come
// up once they can.
func TestNodesWaitUntilTheyCanBeMade(t *testing.T) {
	absent(t, "n3", "n4")
	fault(t, "compute.stockout.us-central1-a", "on")
	id := submit(t, onNodes("n3,n4", "srun hostname"))
	told := func(reason string) {
		t.Helper()
		wait(t, "the reason is told", func() (bool, string) {
			n := nodeOf(t, "n3")
			return strings.Contains(n.Reason, reason), fmt.Sprintf("%+v", n)
		})
	}
	told("the zone has no capacity now")
	fault(t, "compute.quota.INSTANCES", "1")
	told("the project's quota is used up")
	fault(t, "operation.compute.bulkInsert.partial", "1,count=1")
	fault(t, "operation.compute.bulkInsert.leftover", "1,count=1")
	began := time.Now()
	for _, key := range []string{"compute.stockout.us-central1-a", "compute.quota.INSTANCES"} {
		if out, err := sluice(t.Context(), nil, "sandbox", "fault", "clear", "--name", sandboxName, key); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	completed(t, id)
	if log := faultLog(t); !strings.Contains(log, "1 of 2 VMs come up") || !strings.Contains(log, "VMs behind") {
		t.Errorf("the journal has no rollback:\n%s", log)
	}
	if got := operations(t, "bulkInsert", began); got != 2 {
		t.Errorf("%d bulkInserts, want the one that was rolled back and one for the other VM", got)
	}
}

// twice is a job's body that never ends on its first start and ends at once on its second.
const twice = `[ -n "${SLURM_RESTART_COUNT:-}" ] && exit 0
srun sleep 1000`

// startTwice runs such a job on a node, makes trouble while it runs, and waits until it ran again.
func startTwice(t *testing.T, node string, trouble func()) {
	t.Helper()
	id := submit(t, onNodes(node, twice))
	wait(t, "the job runs", func() (bool, string) {
		state, reason := squeue(t, id)
		return state == "RUNNING", state + " " + reason
	})
	trouble()
	wait(t, "the job is requeued", func() (bool, string) {
		state, reason := squeue(t, id)
		return state == "PENDING" || state == "COMPLETED", state + " " + reason
	})
	// slurmctld lets two minutes pass before it starts a job again that lost its node.
	mustOnVM(t, "controller", "root", "", "scontrol", "update", fmt.Sprintf("jobid=%d", id), "starttime=now")
	completed(t, id)
}

// The host of a node fails: the VM comes again by itself, with its disk and its certificate, and the job starts anew.
func TestJobOutlivesTheHostOfItsNode(t *testing.T) {
	startTwice(t, "n3", func() {
		made := instances(t)["n3"]
		fault(t, "compute.instance.n3.host-error", "on")
		wait(t, "the VM is restarted", func() (bool, string) {
			log := faultLog(t)
			return strings.Contains(log, "restarted"), log
		})
		if at := instances(t)["n3"]; !at.Equal(made) {
			t.Errorf("the VM is another one: of %v, before of %v", at, made)
		}
		// slurmctld misses a batch job by itself only when that was older than ResumeTimeout.
		for _, state := range []string{"down", "resume"} {
			mustOnVM(t, "controller", "slurm", "", "scontrol", "update", "nodename=n3", "state="+state, "reason=host error")
		}
	})
}

// A node is preempted: its VM is found TERMINATED and made anew.
func TestPreemptedNodeIsMadeAnew(t *testing.T) {
	var made time.Time
	startTwice(t, "n3", func() {
		made = instances(t)["n3"]
		fault(t, "compute.instance.n3.preempt", "on")
		wait(t, "the VM is TERMINATED", func() (bool, string) {
			for _, vm := range sandboxStatus(t).VMs {
				if vm.Name == "n3" {
					return vm.State == "TERMINATED", vm.State
				}
			}
			return false, "gone"
		})
		// slurmctld notices by itself after SlurmdTimeout.
		for _, state := range []string{"down", "power_down_force"} {
			mustOnVM(t, "controller", "slurm", "", "scontrol", "update", "nodename=n3", "state="+state, "reason=preempted")
		}
	})
	if at := instances(t)["n3"]; !at.After(made) {
		t.Errorf("the VM is of %v, the preempted one was of %v", at, made)
	}
}
