package host_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A day on which Debian sid cannot be had is no failure of ours: the run says so
// at its end and in its report. The other releases have no such excuse.
func TestDemoOnASlurmThatCannotBeHad(t *testing.T) {
	dir := t.TempDir()
	for name, script := range map[string]string{"apt-get": "#!/bin/sh\necho http://127.0.0.1:1/debian/\n", "apt-config": "#!/bin/sh\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	report := filepath.Join(dir, "report.json")
	try := func(args ...string) (string, error) {
		cmd := command(t, append([]string{"sandbox"}, append(args, "--name", name(t))...)...)
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "SLUICE_ROOT="+dir)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	out, err := try("demo", "--slurm", "26.05", "--report", report)
	if err != nil || !strings.HasSuffix(out, "\nNOT RUN\n") {
		t.Errorf("error %v, and the last line is not NOT RUN:\n%s", err, out)
	}
	text, err := os.ReadFile(report)
	if err != nil {
		t.Fatal(err)
	}
	var got struct{ Status, Reason string }
	if err := json.Unmarshal(text, &got); err != nil || got.Status != "not_run" || !strings.Contains(got.Reason, "Debian sid") {
		t.Errorf("report %s (%v), want the status not_run and a reason that names Debian sid", text, err)
	}
	for _, args := range [][]string{{"demo", "--slurm", "22.05", "--report", report}, {"up", "--slurm", "26.05"}} {
		if out, err := try(args...); err == nil || strings.Contains(out, "NOT RUN") {
			t.Errorf("%s: error %v, want a failure:\n%s", strings.Join(args, " "), err, out)
		}
	}
}
