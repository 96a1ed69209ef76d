package e2e_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/gcp/lustre"
)

const scratch = "projects/sluice-sandbox/locations/us-central1-a/instances/scratch"

// promptly runs a command on a VM that must end by itself within limit.
func promptly(t *testing.T, limit time.Duration, vm, user string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	began := time.Now()
	out, err := sluice(ctx, nil, append([]string{"sandbox", "exec", "--name", sandboxName, "--vm", vm, "--user", user, "--"}, args...)...)
	if err != nil {
		t.Fatalf("%s@%s: %s: %v after %v, want an answer within %v\n%s", user, vm, strings.Join(args, " "), err, time.Since(began), limit, out)
	}
	return out
}

// hung makes a process wait for the file system of each VM, which only a hung one lets it.
func hung(t *testing.T, vms ...string) {
	t.Helper()
	for _, vm := range vms {
		// It keeps what it has open for as long as the mount hangs, so that must be nothing of ours.
		if _, err := onVM(t, vm, "root", "", "sh", "-c", "timeout --signal=KILL 1 stat -f /lustre </dev/null >/dev/null 2>&1"); err == nil {
			t.Fatalf("the mount of %s answers", vm)
		}
	}
}

// slurmWaitsFor lists what slurmd of a node has started and what is left of hooks and steps.
func slurmWaitsFor(t *testing.T, node string) string {
	t.Helper()
	return mustOnVM(t, node, "root", "", "sh", "-c", `slurmd=$(pidof -s slurmd)
ps -eo pid=,ppid=,stat=,args= | awk -v slurmd="$slurmd" '$2 == slurmd || /slurmstepd|sluice-prolog|sluice-epilog/ && !/awk/'`)
}

// A mount that hangs holds up those who use it, and nobody else: Slurm's hooks, the agent and sluiced answer, and no
// process is left for which Slurm waits.
func TestHungLustreHoldsUpNobodyElse(t *testing.T) {
	const node = "n2"
	newBucket(t, "research-hung", texts("data/", 3, 100))
	running := submit(t, onNodes(node, "sleep 600"))
	wait(t, "the job runs", func() (bool, string) {
		state, reason := squeue(t, running)
		return state == "RUNNING", state + " " + reason
	})
	mustOnVM(t, node, "root", "timeout = 5s\n", "sh", "-c", "mkdir -p /etc/sluice; cat > /etc/sluice/prolog.conf")
	t.Cleanup(func() { onVM(t, node, "root", "", "rm", "-f", "/etc/sluice/prolog.conf") })

	fault(t, "lustre.hang", "scratch")
	hung(t, "controller", "login", node)

	// sluiced, by itself and through an agent, and sbatch's hook.
	const answer = 10 * time.Second
	promptly(t, answer, "controller", "root", "sluice", "node", "list")
	promptly(t, answer, "login", "alice", "sluice", "job", "list")
	staged := submit(t, stageJob("research-hung", copyAll))
	wait(t, "sluiced says that the file system hangs", func() (bool, string) {
		promptly(t, answer, "controller", "root", "sluice", "job", "list", "--all")
		n := nodeOf(t, node)
		return n.State == "not_ready", n.State
	})

	// The Epilog: the job's node is free again at once.
	mustOnVM(t, "login", "alice", "", "scancel", fmt.Sprint(running))
	wait(t, "the cancelled job has left its node", func() (bool, string) {
		out := mustOnVM(t, "login", "alice", "", "squeue", "--noheader", "--nodelist="+node, "--format=%i %T")
		return strings.TrimSpace(out) == "", out
	})
	// The Prolog waits for its own time-out and lets the job start, since it is not the node's fault: with the agent's
	// word, and with its own eyes.
	for _, agent := range []string{"start", "stop"} {
		mustOnVM(t, node, "root", "", "systemctl", agent, "sluice-agent")
		began := time.Now()
		completed(t, submit(t, onNodes(node, "true")))
		if took := time.Since(began); took < 5*time.Second || took > time.Minute {
			t.Errorf("after systemctl %s sluice-agent a job took %v, want the Prolog's 5 s and little more", agent, took)
		}
	}
	// What probes have left hangs with nobody waiting for it.
	if left := slurmWaitsFor(t, node); left != "" {
		t.Errorf("Slurm waits for processes on %s:\n%s", node, left)
	}
	if state := mustOnVM(t, "controller", "root", "", "sinfo", "--noheader", "--nodes="+node, "--format=%T"); strings.Contains(state, "drain") || strings.Contains(state, "down") {
		t.Errorf("node %s is %s: a file system's fault drains no node", node, state)
	}
	mustOnVM(t, node, "root", "", "systemctl", "start", "sluice-agent")

	clearFaults(t)
	wait(t, "the node is ready again", func() (bool, string) {
		n := nodeOf(t, node)
		return n.State == "ready", n.State
	})
	waitPhase(t, staged, "done")
}

// loss writes files on a VM and returns, for later, a script that says on another VM which of them are damaged: "whole",
// or "beginning" when the end is not there or zeros.
func loss(t *testing.T, vm, dir string) (look string) {
	t.Helper()
	mustOnVM(t, vm, "root", "", "sh", "-ec", `mkdir -p `+dir+`; cd `+dir+`
head -c 3000000 /dev/urandom | tr '\000' x > /home/reference
dd if=/home/reference of=synced bs=1M conv=fsync status=none
dd if=/home/reference of=tmp bs=1M conv=fsync status=none; mv tmp renamed; sync .
for n in 1 2 3; do cp /home/reference unsynced-$n; done
cp synced begun; dd if=synced of=begun bs=1M conv=fsync,notrunc status=none; cat /home/reference >> begun`)
	return `cd ` + dir + `; cat /home/reference /home/reference > /tmp/twice
for f in *; do
  want=/home/reference; [ $f != begun ] || want=/tmp/twice
  if cmp -s $f $want; then echo $f whole; continue; fi
  n=$(cmp $f $want 2>&1 | sed -n 's/.*byte \([0-9]*\).*/\1/p' | head -n 1)
  if [ $(tail -c +$n $f | tail -c +2 | tr -d '\000' | wc -c) = 0 ]; then echo $f beginning $n; else echo $f garbled; fi
done; rm /tmp/twice`
}

// What a VM has written and not synced is lost with it, what it has synced is not, and neither is anything when it is
// shut down in order.
func TestUnsyncedDataIsLostWithItsVM(t *testing.T) {
	const node, dir = "n2", "/lustre/e2e-unsynced"
	completed(t, submit(t, onNodes(node, "true")))
	t.Cleanup(func() { onVM(t, "controller", "root", "", "rm", "-rf", dir, "/home/reference") })
	fault(t, "lustre.lose-unsynced", "scratch/"+node)
	look := loss(t, node, dir)
	fault(t, "compute.instance."+node+".host-error", "on")
	wait(t, "the VM has died", func() (bool, string) {
		log := faultLog(t)
		return strings.Count(log, "unsynced bytes") >= 4, log
	})
	damaged := 0
	for line := range strings.Lines(mustOnVM(t, "controller", "root", "", "sh", "-c", look)) {
		f := strings.Fields(line)
		switch name, state := f[0], f[1]; {
		case name == "synced" || name == "renamed":
			if state != "whole" {
				t.Errorf("what was synced is not whole: %s", line)
			}
		case state != "beginning":
			t.Errorf("what was not synced has lost no end: %s", line)
		default:
			damaged++
			if at, err := strconv.Atoi(f[2]); name == "begun" && (err != nil || at < 3000000) {
				t.Errorf("the synced beginning of a file is damaged: %s", line)
			}
		}
	}
	if damaged != 4 {
		t.Errorf("%d files are damaged, want 4", damaged)
	}

	wait(t, "the VM is back and has its mount", func() (bool, string) {
		out, err := onVM(t, node, "root", "", "grep", "-c", "fuse.lustre", "/proc/mounts")
		return err == nil && strings.TrimSpace(out) != "0", out
	})
	look = loss(t, node, dir)
	mustOnVM(t, "controller", "slurm", "", "scontrol", "update", "nodename="+node, "state=power_down_force")
	wait(t, "the VM is gone", func() (bool, string) {
		_, there := instances(t)[node]
		return !there, ""
	})
	got := mustOnVM(t, "controller", "root", "", "sh", "-c", look)
	if strings.Count(got, "whole") != 6 {
		t.Errorf("a shutdown in order has lost something:\n%s", got)
	}
}

// Whoever an import makes the files' owner, and whatever their modes, what is published is root's and read-only, and the
// job reads it.
func TestOwnersOfImportedFilesDoNotMatter(t *testing.T) {
	for i, owner := range []string{"root-0644", "root-0600", "metadata"} {
		t.Run(owner, func(t *testing.T) {
			bucket := fmt.Sprintf("research-owners-%d", i)
			b := newBucket(t, bucket, texts("data/", 3, 100))
			for name, mode := range map[string]string{"suid": "4777", "secret": "0000"} {
				w := b.Object("data/sub/" + name).NewWriter(t.Context())
				w.Metadata = map[string]string{"goog-reserved-posix-uid": "1500000001", "goog-reserved-posix-gid": "3000000000", "goog-reserved-posix-mode": mode}
				fmt.Fprint(w, name)
				if err := w.Close(); err != nil {
					t.Fatal(err)
				}
			}
			fault(t, "lustre.import.owner", owner)
			id := submit(t, stageJob(bucket, `mkdir "$SLUICE_JOB_DIR/result"
find -L "$SLUICE_DATA_DATA" -type f -exec cat {} + > "$SLUICE_JOB_DIR/result/all"
find -L "$SLUICE_DATA_DATA" -type f -printf '%u:%g %m\n' | sort -u > "$SLUICE_JOB_DIR/result/modes"`))
			job := waitPhase(t, id, "done")
			if got := mustOnVM(t, "login", "alice", "", "cat", job.Dir+"/result/modes"); got != "root:root 444\n" {
				t.Errorf("published files are\n%swant root's with 444", got)
			}
			if got := mustOnVM(t, "login", "alice", "", "cat", job.Dir+"/result/all"); !strings.Contains(got, "suid") || !strings.Contains(got, "secret") {
				t.Errorf("the job did not read every file:\n%s", got)
			}
		})
	}
}

// accessRules returns a function that sets the instance's; the test's end takes them away.
func accessRules(t *testing.T) (set func(*lustre.AccessRulesOptions)) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context()) // the clean-up comes after the test's own has ended
	client, err := lustre.NewClient(ctx, option.WithEndpoint(sandboxStatus(t).HostEndpoints["lustre"]), option.WithTokenSource(admin(t)))
	if err != nil {
		t.Fatal(err)
	}
	set = func(rules *lustre.AccessRulesOptions) {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		op, err := client.UpdateInstance(ctx, &lustre.UpdateInstanceRequest{
			Instance: &lustre.Instance{Name: scratch, AccessRulesOptions: rules}, UpdateMask: []string{"accessRulesOptions"},
		})
		if err == nil {
			_, err = client.Wait(ctx, op.Name, nil)
		}
		if err != nil {
			t.Errorf("set access rules: %v", err)
		}
	}
	t.Cleanup(func() { set(&lustre.AccessRulesOptions{DefaultSquashMode: "NO_SQUASH"}) })
	return set
}

// A squashed root is named where the job's user and the admin look; an exception for the controller is enough.
func TestRootSquashIsNamed(t *testing.T) {
	newBucket(t, "research-squashed", texts("data/", 2, 100))
	squash := &lustre.AccessRulesOptions{DefaultSquashMode: "ROOT_SQUASH", DefaultSquashUID: 65534, DefaultSquashGID: 65534}
	set := accessRules(t)
	set(squash)
	if out, err := onVM(t, "controller", "root", "", "mkdir", "/lustre/squashed"); err == nil || !strings.Contains(out, "Permission denied") {
		t.Errorf("a squashed root makes a directory: %v\n%s", err, out)
	}
	id := submit(t, stageJob("research-squashed", copyAll))
	wait(t, "the reason names root squash", func() (bool, string) {
		state, reason := squeue(t, id)
		return state == "PENDING" && strings.Contains(reason, "root squash") && strings.Contains(reason, "NO_SQUASH"), state + " " + reason
	})

	for _, vm := range sandboxStatus(t).VMs {
		if vm.Name == "controller" {
			squash.AccessRules = []lustre.AccessRule{{Name: "controller", IPAddressRanges: []string{vm.Address}, SquashMode: "NO_SQUASH"}}
		}
	}
	set(squash)
	waitPhase(t, submit(t, stageJob("research-squashed", copyAll)), "done")
}

// Where hard links cannot be made, a copy does; where there is no room, the job says so.
func TestLustreWithoutLinksAndRoom(t *testing.T) {
	newBucket(t, "research-apart", texts("data/", 4, 1000))
	fault(t, "lustre.exdev", "scratch")
	waitPhase(t, submit(t, stageJob("research-apart", copyAll)), "done")
	clearFaults(t)

	newBucket(t, "research-room", texts("data/", 4, 1000))
	fault(t, "lustre.enospc", "scratch/controller")
	id := submit(t, stageJob("research-room", copyAll))
	wait(t, "the reason says that the file system is full", func() (bool, string) {
		state, reason := squeue(t, id)
		return state == "PENDING" && strings.Contains(reason, "the file system is full"), state + " " + reason
	})
	clearFaults(t)
	waitPhase(t, submit(t, stageJob("research-room", copyAll)), "done")
}

// The client's tools are there, and what they set holds on other VMs too.
func TestLustreTools(t *testing.T) {
	const dir = "/lustre/e2e-tools"
	t.Cleanup(func() { onVM(t, "controller", "root", "", "rm", "-rf", dir) })
	mustOnVM(t, "controller", "root", "", "sh", "-ec", "mkdir -p "+dir+"; cd "+dir+`
lfs setstripe -c 4 -S 4M striped; echo x > full; lfs project -p 7 -s .; lfs setquota -p 7 -B 1g /lustre
lctl set_param jobid_var=SLURM_JOB_ID; lnetctl net show > /dev/null; lfs df > /dev/null`)
	if out, err := onVM(t, "login", "root", "", "lfs", "setstripe", "-c", "2", dir+"/full"); err == nil || !strings.Contains(out, "stripe already set") {
		t.Errorf("setstripe on a file with content: %v\n%s", err, out)
	}
	for args, want := range map[string]string{
		"lfs getstripe -c " + dir + "/striped": "4\n",
		"lfs project -d " + dir:                "    7 P " + dir + "\n",
		"lctl ping 10.129.0.2@tcp":             "12345-0@lo\n12345-10.129.0.2@tcp\n",
		"lctl get_param -n jobid_var":          "disable\n", // each VM has its own
	} {
		if got := mustOnVM(t, "login", "root", "", strings.Fields(args)...); got != want {
			t.Errorf("%s prints %q, want %q", args, got, want)
		}
	}
	if out := mustOnVM(t, "login", "root", "", "lfs", "quota", "-p", "7", "/lustre"); !strings.Contains(out, "1048576") {
		t.Errorf("the quota has no limit:\n%s", out)
	}
}
