package e2e_test

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/api"
)

// stageJob is a batch script that stages bucket's data/ in and result/ out and runs body.
func stageJob(bucket, body string) string {
	return fmt.Sprintf(`#!/bin/bash
#SBATCH --nodes=1 --job-name=%[1]s --output=%[1]s-%%j.out
#SLUICE stage_in source=gs://%[1]s/data/ name=data
#SLUICE stage_out from=result/ to=gs://%[1]s/result/%%j/
set -eu
%[2]s
`, bucket, body)
}

// copyAll is a job's body that brings every staged byte back out.
const copyAll = `mkdir -p "$SLUICE_JOB_DIR/result"
cp -r "$SLUICE_DATA_DATA"/. "$SLUICE_JOB_DIR/result/"
hostname > "$SLUICE_JOB_DIR/result/host.txt"`

func event(t *testing.T, job api.Job, name string) time.Time {
	t.Helper()
	for _, e := range job.Events {
		if e.Name == name {
			at, err := time.Parse(api.TimeFormat, e.At)
			if err != nil {
				t.Fatalf("event %s: %v", name, err)
			}
			return at
		}
	}
	t.Fatalf("job %d has no event %s: %+v", job.JobID, name, job.Events)
	return time.Time{}
}

func waitPhase(t *testing.T, id uint32, phase string) api.Job {
	t.Helper()
	var job api.Job
	wait(t, fmt.Sprintf("job %d is %s", id, phase), func() (bool, string) {
		var err error
		job, err = showJob(t, id)
		if err != nil {
			return false, err.Error()
		}
		if job.Phase != phase && (job.Phase == "done" || job.Phase == "failed" || job.Phase == "cancelled") {
			t.Fatalf("job %d is %s (%s), want %s", id, job.Phase, job.Reason, phase)
		}
		return job.Phase == phase, job.Phase + " " + job.Reason
	})
	return job
}

// instances lists the VMs that Compute Engine knows, by name.
func instances(t *testing.T) map[string]time.Time {
	t.Helper()
	out := get(t, sandboxStatus(t).HostEndpoints["compute"]+"/compute/v1/projects/sluice-sandbox/zones/us-central1-a/instances")
	var list struct {
		Items []struct {
			Name              string `json:"name"`
			CreationTimestamp string `json:"creationTimestamp"`
		} `json:"items"`
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		t.Fatalf("list instances: %v\n%s", err, out)
	}
	all := map[string]time.Time{}
	for _, i := range list.Items {
		at, err := time.Parse(time.RFC3339Nano, i.CreationTimestamp)
		if err != nil {
			t.Fatalf("instance %s: %v", i.Name, err)
		}
		all[i.Name] = at
	}
	return all
}

// The nodes do not exist yet, so this also proves that none is made before the data is there.
func TestJobIsStagedInBeforeAnyNodeAndOutAfter(t *testing.T) {
	absent(t, "n1", "n2", "n3", "n4")
	objects := texts("data/", 40, 5000)
	objects["data/empty.txt"] = nil
	objects["data/large.bin"] = []byte(strings.Repeat("0123456789abcdef", 1<<20/16*24))
	bucket := newBucket(t, "research-first-job", objects)
	fault(t, "lustre.transfer.rate", strconv.Itoa(8<<20)) // 3 s: time to look at the cloud meanwhile

	id := submit(t, stageJob("research-first-job", copyAll))
	looked := false
	wait(t, "stage-in is done", func() (bool, string) {
		job, err := showJob(t, id)
		if err != nil {
			return false, err.Error()
		}
		if job.Phase == "stage_in" {
			looked = true
			for name := range instances(t) {
				if name != "controller" && name != "login" {
					// The stage-in may have ended between the two questions.
					if again, err := showJob(t, id); err == nil && again.Phase == "stage_in" {
						t.Fatalf("instance %s exists while the job is staged in", name)
					}
				}
			}
			state, reason := squeue(t, id)
			if again, err := showJob(t, id); err == nil && again.Phase == "stage_in" && state != "PENDING" {
				t.Errorf("squeue shows %s (%s) while the job is staged in, want PENDING", state, reason)
			}
		}
		return job.Phase != "accepted" && job.Phase != "stage_in", job.Phase
	})
	if !looked {
		t.Error("the stage-in was never seen running")
	}
	clearFaults(t)
	job := waitPhase(t, id, "done")

	stagedIn, requested := event(t, job, api.EventStageInDone), event(t, job, api.EventResumeRequested)
	if !stagedIn.Before(requested) {
		t.Errorf("nodes were requested at %v, before stage-in was done at %v", requested, stagedIn)
	}
	for _, node := range job.Nodes {
		// Compute Engine's times have whole milliseconds.
		if at, ok := instances(t)[node]; !ok || at.Before(stagedIn.Truncate(time.Millisecond)) {
			t.Errorf("instance %s of the job was made at %v (exists: %v), stage-in was done at %v", node, at, ok, stagedIn)
		}
	}
	if start, ready := event(t, job, api.EventJobStarted), event(t, job, api.EventNodesReady); start.Before(ready) {
		t.Errorf("the job started at %v, before its nodes were ready at %v", start, ready)
	}

	// Both ways, byte for byte, and as the bucket itself says.
	back := listing(t, bucket, fmt.Sprintf("result/%d/", id))
	for name, data := range objects {
		got, ok := back[fmt.Sprintf("result/%d/%s", id, strings.TrimPrefix(name, "data/"))]
		if !ok {
			t.Errorf("%s did not come back", name)
			continue
		}
		if want := crc32.Checksum(data, crc32.MakeTable(crc32.Castagnoli)); got.CRC32C != want {
			t.Errorf("%s came back with CRC32C %08x, want %08x", name, got.CRC32C, want)
		}
	}
	if got, want := len(back), len(objects)+1; got != want {
		t.Errorf("%d objects came back, want %d (the staged ones and host.txt)", got, want)
	}
	for _, transfer := range job.Transfers {
		want := int64(len(objects))
		if transfer.Kind == "stage_out" {
			want++
		}
		if transfer.Objects != want || transfer.Verified != want || transfer.VerifyLevel != "full" {
			t.Errorf("%s: %d objects, %d verified (%s), want %d verified in full", transfer.Kind, transfer.Objects, transfer.Verified, transfer.VerifyLevel, want)
		}
	}
	if _, reason := squeue(t, id); strings.Contains(reason, "burst_buffer") {
		t.Errorf("a job that went well has the reason %q", reason)
	}
}

// A staged file is the cluster's, not the job's: nobody may change it, and
// another user may not even read it.
func TestStagedDataIsReadOnlyAndPrivate(t *testing.T) {
	newBucket(t, "research-private-data", texts("data/", 3, 100))
	id := submit(t, stageJob("research-private-data", `mkdir "$SLUICE_JOB_DIR/result"
f=$(find -L "$SLUICE_DATA_DATA" -name '*.txt' | head -n 1)
cat "$f" > /dev/null
if echo x 2>/dev/null >> "$f"; then echo "could write to $f"; exit 1; fi
if rm -f "$f" 2>/dev/null && ! [ -e "$f" ]; then echo "could remove $f"; exit 1; fi
realpath "$f" > "$SLUICE_JOB_DIR/result/path"`))
	job := waitPhase(t, id, "done")
	path := strings.TrimSpace(mustOnVM(t, "login", "alice", "", "cat", filepath.Join(job.Dir, "result/path")))
	if out, err := onVM(t, "login", "bob", "", "cat", path); err == nil {
		t.Errorf("bob could read alice's staged file %s:\n%s", path, out)
	}
	if out, err := onVM(t, "login", "bob", "", "ls", job.Dir); err == nil {
		t.Errorf("bob could list alice's job directory %s:\n%s", job.Dir, out)
	}
	if out, err := onVM(t, "login", "bob", "", "sluice", "job", "show", fmt.Sprint(id)); err == nil {
		t.Errorf("bob could ask for alice's job:\n%s", out)
	}
}

func TestCorruptedObjectFailsTheStageInAndPublishesNothing(t *testing.T) {
	objects := texts("data/", 10, 1000)
	newBucket(t, "research-corrupted", objects)
	fault(t, "lustre.import.corrupt", "gs://research-corrupted/data/part-001/text-004.txt")
	id := submit(t, stageJob("research-corrupted", copyAll))

	job := waitPhase(t, id, "failed")
	wait(t, "squeue shows the reason", func() (bool, string) {
		state, reason := squeue(t, id)
		return state == "PENDING" && strings.Contains(reason, "text-004.txt"), state + " " + reason
	})
	show := mustOnVM(t, "login", "alice", "", "scontrol", "show", "job", fmt.Sprint(id))
	if !strings.Contains(show, "text-004.txt") || !strings.Contains(strings.ToLower(show), "crc32c") {
		t.Errorf("scontrol show job does not name the object and the checksum:\n%s", show)
	}
	if len(instances(t)) > 0 {
		for _, e := range job.Events {
			if e.Name == api.EventResumeRequested || e.Name == api.EventStageInDone {
				t.Errorf("a job whose stage-in failed has the event %s", e.Name)
			}
		}
	}
	// Nothing of it is on the file system, published or not.
	found := mustOnVM(t, "controller", "root", "", "find", "/lustre/.sluice/datasets", "-name", "text-00*", "-path", "*corrupted*")
	if strings.TrimSpace(found) != "" {
		t.Errorf("files of the failed stage-in are still there:\n%s", found)
	}

	// The cause gone, the same data stages in.
	clearFaults(t)
	again := submit(t, stageJob("research-corrupted", copyAll))
	waitPhase(t, again, "done")
}

func TestDiskFullOnLustreFailsTheStageInInWords(t *testing.T) {
	newBucket(t, "research-disk-full", map[string][]byte{"data/a.bin": make([]byte, 4<<20), "data/b.bin": make([]byte, 4<<20)})
	used := mustOnVM(t, "controller", "root", "", "du", "-sb", "/lustre")
	bytes, err := strconv.ParseInt(strings.Fields(used)[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	fault(t, "lustre.capacity", strconv.FormatInt(bytes+1<<20, 10))
	id := submit(t, stageJob("research-disk-full", copyAll))
	waitPhase(t, id, "failed")
	wait(t, "squeue shows the reason", func() (bool, string) {
		state, reason := squeue(t, id)
		return state == "PENDING" && strings.Contains(reason, "full"), state + " " + reason
	})
	clearFaults(t)
	again := submit(t, stageJob("research-disk-full", copyAll))
	waitPhase(t, again, "done")
}

// pidOf returns the pid of a program on a VM.
func pidOf(t *testing.T, vm, name string) string {
	t.Helper()
	var pid string
	wait(t, name+" runs on "+vm, func() (bool, string) {
		out, err := onVM(t, vm, "root", "", "pidof", name)
		pid = strings.TrimSpace(out)
		return err == nil && pid != "", out
	})
	return pid
}

func TestKillingSluicedInTheMiddleOfAStageInFinishesTheSameTransferOnce(t *testing.T) {
	objects := map[string][]byte{"data/a.bin": make([]byte, 8<<20), "data/b.bin": []byte(strings.Repeat("b", 8<<20)), "data/c.txt": []byte("c")}
	newBucket(t, "research-killed", objects)
	before := imports(t)
	fault(t, "lustre.transfer.rate", strconv.Itoa(4<<20))
	id := submit(t, stageJob("research-killed", copyAll))
	var transfer api.Transfer
	wait(t, "the import runs", func() (bool, string) {
		job, err := showJob(t, id)
		if err != nil {
			return false, err.Error()
		}
		for _, x := range job.Transfers {
			if x.Kind == "stage_in" && x.State == "RUNNING" && x.BytesDone > 0 && x.Operation != "" {
				transfer = x
				return true, ""
			}
		}
		return false, fmt.Sprintf("%s %+v", job.Phase, job.Transfers)
	})
	pid := pidOf(t, "controller", "sluiced")
	mustOnVM(t, "controller", "root", "", "kill", "-9", pid)
	wait(t, "systemd has started sluiced again", func() (bool, string) {
		out, err := onVM(t, "controller", "root", "", "pidof", "sluiced")
		return err == nil && strings.TrimSpace(out) != pid, out
	})
	job := waitPhase(t, id, "done")
	for _, x := range job.Transfers {
		if x.Kind != "stage_in" {
			continue
		}
		if x.ID != transfer.ID || x.Operation != transfer.Operation {
			t.Errorf("transfer %s with operation %s finished, want %s with %s as before the kill", x.ID, x.Operation, transfer.ID, transfer.Operation)
		}
	}
	if got := imports(t) - before; got != 1 {
		t.Errorf("%d imports were asked for, want 1", got)
	}
}

// imports counts the import operations that the Lustre service knows.
func imports(t *testing.T) int {
	t.Helper()
	out := get(t, sandboxStatus(t).HostEndpoints["lustre"]+"/v1/projects/sluice-sandbox/locations/us-central1-a/operations?pageSize=1000")
	return strings.Count(out, "ImportDataMetadata")
}

func TestSbatchRefusesBadDirectivesWithTheirLine(t *testing.T) {
	const good = "#!/bin/bash\n#SBATCH -N1\n"
	for _, tt := range []struct{ name, line, want, hint string }{
		{"unknown verb", "#SLUICE stage_im source=gs://b/p/ name=x", `unknown verb "stage_im"`, "stage_in"},
		{"unknown key", "#SLUICE stage_in sorce=gs://bbb/p/ name=x", `unknown key "sorce"`, "source"},
		{"missing key", "#SLUICE stage_in name=x", "source", ""},
		{"duplicate key", "#SLUICE stage_in source=gs://bbb/p/ name=x name=y", "name", ""},
		{"stray quote", `#SLUICE stage_in source="gs://bbb/p/ name=x`, "quote", ""},
		{"no bucket", "#SLUICE stage_in source=gs:///p/ name=x", "bucket", ""},
		{"dot dot", "#SLUICE stage_in source=gs://bbb/p/ to=../x", "..", ""},
		{"absolute", "#SLUICE stage_in source=gs://bbb/p/ to=/etc/x", "/etc/x", ""},
		{"stage_out from outside", "#SLUICE stage_out from=../../x to=gs://bbb/p/", "..", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, err := trySubmit(t, "alice", good+tt.line+"\ntrue\n")
			if err == nil {
				t.Fatalf("sbatch took it:\n%s", out)
			}
			for _, want := range []string{":3:", tt.want, tt.hint} {
				if !strings.Contains(out, want) {
					t.Errorf("sbatch's message lacks %q:\n%s", want, out)
				}
			}
		})
	}
}

// After the cause is gone, an admin's release is enough.
func TestReleasedJobIsSetUpAgain(t *testing.T) {
	id := submit(t, stageJob("research-made-later", copyAll))
	waitPhase(t, id, "failed")
	wait(t, "squeue shows the reason on one line", func() (bool, string) {
		state, reason := squeue(t, id)
		return state == "PENDING" && strings.HasSuffix(reason, ": script:3:25: gs://research-made-later/data/: bucket does not exist; check the bucket's name") && !strings.Contains(reason, "\n"), state + " " + reason
	})
	newBucket(t, "research-made-later", texts("data/", 2, 10))
	mustOnVM(t, "controller", "root", "", "scontrol", "release", fmt.Sprint(id))
	wait(t, "the released job is done", func() (bool, string) {
		job, err := showJob(t, id)
		return err == nil && job.Phase == "done", fmt.Sprintf("%s %s %v", job.Phase, job.Reason, err)
	})
	// What its first failure left behind must not overtake it.
	wait(t, "Slurm has forgotten its buffer", func() (bool, string) {
		out := mustOnVM(t, "controller", "root", "", "scontrol", "show", "burst")
		return !strings.Contains(out, fmt.Sprintf("JobID=%d ", id)), out
	})
	if job, err := showJob(t, id); err != nil || job.Phase != "done" {
		t.Errorf("the job is %s (%v), want done", job.Phase, err)
	}
}

// What only the bucket or the file system can tell fails in setup, in words.
func TestSetupFailsInWords(t *testing.T) {
	newBucket(t, "research-nothing-there", map[string][]byte{"other/x": []byte("x")})
	newBucket(t, "research-not-ours", texts("data/", 1, 10))
	fault(t, "storage.deny", "research-not-ours")
	for _, tt := range []struct{ name, script, want string }{
		{"no such bucket", stageJob("research-no-such-bucket", "true"), "research-no-such-bucket"},
		{"empty prefix", stageJob("research-nothing-there", "true"), "no object"},
		{"bucket that may not be read", stageJob("research-not-ours", "true"), "may not be"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			id := submit(t, tt.script)
			wait(t, "squeue shows the reason", func() (bool, string) {
				state, reason := squeue(t, id)
				return state == "PENDING" && strings.Contains(reason, tt.want), state + " " + reason
			})
		})
	}
}

func TestRootMayNotSubmit(t *testing.T) {
	newBucket(t, "research-from-root", texts("data/", 1, 10))
	out, err := trySubmit(t, "root", stageJob("research-from-root", "true"))
	if err == nil {
		t.Fatalf("sbatch took root's job:\n%s", out)
	}
	if !strings.Contains(strings.ToLower(out), "root") {
		t.Errorf("the message does not say that root is the reason:\n%s", out)
	}
}

// The accounting database is real, and its associations are enforced.
func TestUserWithoutAnAssociationMayNotSubmit(t *testing.T) {
	mustOnVM(t, "login", "alice", "#!/bin/bash\ntrue\n", "sh", "-c", "cat > job.sh")
	out, err := onVM(t, "login", "alice", "", "sbatch", "--account=somebody-elses", "job.sh")
	if err == nil || !strings.Contains(out, "Invalid account") {
		t.Errorf("sbatch with an account that is not alice's: %v\n%s", err, out)
	}
}

// With sluiced away, or stopped so that it accepts and never answers, slurmctld
// answers as ever, bad lines are refused, good jobs wait and then run.
func TestJobsWaitWhileSluicedIsAway(t *testing.T) {
	for _, tt := range []struct{ name, away, back string }{
		{"stopped", "systemctl stop sluiced", "systemctl start sluiced"},
		{"frozen", "kill -STOP $(pidof sluiced)", "kill -CONT $(pidof sluiced)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bucket := "research-away-" + tt.name
			newBucket(t, bucket, texts("data/", 2, 10))
			pidOf(t, "controller", "sluiced")
			mustOnVM(t, "controller", "root", "", "sh", "-c", tt.away)
			restored := false
			restore := func() {
				if !restored {
					restored = true
					mustOnVM(t, "controller", "root", "", "sh", "-c", tt.back)
				}
			}
			defer restore()
			if out, err := trySubmit(t, "alice", "#!/bin/bash\n#SLUICE stage_im x=y\ntrue\n"); err == nil {
				t.Errorf("a bad script was taken:\n%s", out)
			}
			id := submit(t, stageJob(bucket, copyAll))
			if out := mustOnVM(t, "login", "alice", "", "scontrol", "ping"); !strings.Contains(out, "UP") {
				t.Errorf("scontrol ping: %s", out)
			}
			if state, reason := squeue(t, id); state != "PENDING" {
				t.Errorf("the job is %s (%s), want PENDING", state, reason)
			}
			restore()
			waitPhase(t, id, "done")
		})
	}
}

// A to= through a symlink that the user planted in the job's directory must not
// lead out of it.
func TestStageOutDoesNotFollowASymlinkOutOfTheJobDirectory(t *testing.T) {
	b := newBucket(t, "research-symlink", texts("data/", 1, 10))
	id := submit(t, stageJob("research-symlink", `ln -s /etc "$SLUICE_JOB_DIR/result"`))
	job := waitPhase(t, id, "failed")
	if !strings.Contains(job.Reason, "symlink") && !strings.Contains(job.Reason, "symbolic link") {
		t.Errorf("reason %q does not name the symbolic link", job.Reason)
	}
	if got := listing(t, b, "result/"); len(got) != 0 {
		t.Errorf("%d objects were staged out through a symbolic link", len(got))
	}
	wait(t, "Slurm has the job as completed, with the reason", func() (bool, string) {
		state, reason := squeue(t, id)
		return state == "COMPLETED" && strings.Contains(reason, "symbolic link"), state + " " + reason
	})
}
