package e2e_test

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"cloud.google.com/go/storage"

	"github.com/sluicehpc/sluice/doctor"
)

// doctorJSON runs sluice doctor on the controller as root, and returns its exit code.
func doctorJSON(t *testing.T, out any, args ...string) (code int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), sluiceBinary, append([]string{"sandbox", "exec", "--name", sandboxName, "--vm", "controller", "--", "sluice", "doctor", "--json"}, args...)...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); cmd.ProcessState == nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(stdout.Bytes(), out); err != nil {
		t.Fatalf("sluice doctor %s: %v\n%s%s", strings.Join(args, " "), err, stdout.String(), stderr.String())
	}
	return cmd.ProcessState.ExitCode()
}

func findings(t *testing.T) (map[string]doctor.Finding, int) {
	t.Helper()
	var report struct{ Findings []doctor.Finding }
	code := doctorJSON(t, &report)
	all := map[string]doctor.Finding{}
	for _, f := range report.Findings {
		all[f.Name] = f
	}
	return all, code
}

func accept(t *testing.T, bucket string, args ...string) (map[string]doctor.Result, int) {
	t.Helper()
	var report struct{ Results []doctor.Result }
	code := doctorJSON(t, &report, append([]string{"--acceptance", "--bucket", "gs://" + bucket + "/first-day/"}, args...)...)
	all := map[string]doctor.Result{}
	for _, r := range report.Results {
		all[r.ID] = r
	}
	return all, code
}

// A cluster that is well has no finding; what is broken is one, soon, with a next step.
func TestDoctorFindsWhatIsWrong(t *testing.T) {
	wait(t, "the cluster is well", func() (bool, string) { // other tests' nodes may be on their way
		all, code := findings(t)
		for name, f := range all {
			if f.Verdict != doctor.OK {
				return false, name + ": " + f.Detail
			}
		}
		return code == 0 && len(all) >= 15, strconv.Itoa(code)
	})
	want := func(name, detail string) {
		t.Helper()
		all, code := findings(t)
		if f := all[name]; code != 1 || f.Verdict != doctor.Fail || !strings.Contains(f.Detail, detail) || f.Next == "" {
			t.Errorf("exit code %d, %+v; want 1 and a failure with %q", code, f, detail)
		}
	}
	t.Run("hung mount", func(t *testing.T) {
		fault(t, "lustre.hang", "scratch/controller")
		want("file system scratch: mount", "did not answer")
	})
	t.Run("without sluiced", func(t *testing.T) {
		mustOnVM(t, "controller", "root", "", "systemctl", "stop", "sluiced")
		defer mustOnVM(t, "controller", "root", "", "systemctl", "start", "sluiced")
		want("sluiced", "does not answer")
	})
	t.Run("a changed file of Slurm's", func(t *testing.T) {
		mustOnVM(t, "controller", "root", "", "sh", "-c", "echo '# mine' >> /etc/slurm/burst_buffer.conf")
		defer mustOnVM(t, "controller", "root", "", "sed", "-i", "/# mine/d", "/etc/slurm/burst_buffer.conf")
		want("Slurm's files", "# mine")
	})
	t.Run("a key that others read", func(t *testing.T) {
		mustOnVM(t, "controller", "root", "", "chmod", "644", "/etc/slurm/slurm.key")
		defer mustOnVM(t, "controller", "root", "", "chmod", "600", "/etc/slurm/slurm.key")
		want("secrets", "slurm.key")
	})
}

// Each of these needs a state of the file system that a fault brings about; they are not applicable without.
var needState = map[string]string{
	"full-instance": "lustre.capacity=134217728",
	"hung-mount":    "lustre.hang=scratch/controller",
}

// Every row of docs/unverified.md is proved in the sandbox, and nothing is left of it.
func TestAcceptanceProvesEveryRow(t *testing.T) {
	const name = "research-acceptance"
	bucket := newBucket(t, name, map[string][]byte{"first-day/kept": []byte("x")})
	all, code := accept(t, name)
	if code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	for _, p := range doctor.Proofs {
		r := all[p.ID]
		want := doctor.Proved
		if needState[p.ID] != "" {
			want = doctor.NotApplicable
		}
		if r.Status != want || r.Evidence == "" {
			t.Errorf("%s: %s, want %s: %s", p.ID, r.Status, want, r.Evidence)
		}
	}
	leftNothing(t, bucket)
	for id, key := range needState {
		t.Run(id, func(t *testing.T) {
			key, value, _ := strings.Cut(key, "=")
			fault(t, key, value)
			wait(t, "it is proved", func() (bool, string) { // a mount hears of a fault a moment later
				all, code := accept(t, name, "--only", id)
				if r := all[id]; r.Status != doctor.NotApplicable {
					if r.Status != doctor.Proved || code != 0 {
						t.Fatalf("exit code %d, %s: %s", code, r.Status, r.Evidence)
					}
					return true, ""
				}
				return false, all[id].Evidence
			})
		})
	}
	leftNothing(t, bucket)
}

// A cloud that is not as assumed is found out.
func TestAcceptanceRefutes(t *testing.T) {
	const name = "research-refuted"
	bucket := newBucket(t, name, nil)
	for id, set := range map[string]string{
		"one-transfer": "lustre.transfer.parallel=on",
		"hard-links":   "lustre.exdev=scratch/controller",
	} {
		t.Run(id, func(t *testing.T) {
			key, value, _ := strings.Cut(set, "=")
			fault(t, key, value)
			wait(t, "it is refuted", func() (bool, string) {
				all, code := accept(t, name, "--only", id)
				r := all[id]
				return r.Status == doctor.Refuted && code == 1 && r.Next != "", string(r.Status) + ": " + r.Evidence
			})
		})
	}
	leftNothing(t, bucket)
}

// Ctrl-C in the middle of an import ends it and leaves nothing behind.
func TestAcceptanceInterrupted(t *testing.T) {
	const name = "research-interrupted"
	bucket := newBucket(t, name, nil)
	fault(t, "lustre.transfer.rate", "1000")
	out, err := onVM(t, "controller", "root", "", "sh", "-c", `sluice doctor --acceptance --bucket gs://`+name+`/ --only import-prefix & pid=$!
while ! ls -d /lustre/.sluice/sluice-acceptance-*/import; do sleep 0.1; done
sleep 0.5; kill -INT $pid; wait $pid`)
	if err == nil || !strings.Contains(out, "interrupted") || strings.Contains(out, "left behind") {
		t.Errorf("%v, want an interrupt and nothing left:\n%s", err, out)
	}
	leftNothing(t, bucket)
	if out := mustOnVM(t, "controller", "root", "", "sluice", "doctor", "--json"); strings.Contains(out, "is not sluiced's") {
		t.Errorf("an import still runs:\n%s", out)
	}
}

func leftNothing(t *testing.T, bucket *storage.BucketHandle) {
	t.Helper()
	for name := range listing(t, bucket, "") {
		if strings.Contains(name, "sluice-acceptance-") {
			t.Errorf("left behind: %s", name)
		}
	}
	for name := range instances(t) {
		if strings.HasPrefix(name, "sluice-acceptance-") {
			t.Errorf("left behind: VM %s", name)
		}
	}
	out := mustOnVM(t, "controller", "root", "", "sh", "-c", "ls /lustre/.sluice; squeue --noheader --format=%j")
	if strings.Contains(out, "sluice-acceptance-") {
		t.Errorf("left behind:\n%s", out)
	}
}
