package scontrol

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/internal/command"
	"github.com/sluicehpc/sluice/slurm/hostlist"
)

// answering is a Client whose programs answer with out, and the command lines it ran.
func answering(out string, err error) (Client, *[]string) {
	var lines []string
	return Client{Run: func(_ context.Context, s command.Spec) ([]byte, error) {
		lines = append(lines, s.Path+" "+strings.Join(s.Args, " "))
		return []byte(out), err
	}}, &lines
}

// Lines of Slurm 24.11.5, shortened.
const nodeLines = `NodeName=n1 CoresPerSocket=1  CPUAlloc=0 CPUTot=2 AvailableFeatures=(null) Gres=(null) NodeAddr=n1 NodeHostName=n1  RealMemory=1000 FreeMem=N/A State=IDLE+CLOUD+POWERED_DOWN ThreadsPerCore=1 BootTime=None CfgTRES=cpu=2,mem=1000M,billing=2 AllocTRES= CurrentWatts=0 AveWatts=0 
NodeName=n2 Arch=x86_64 OS=Linux 6.18.0 #1 SMP State=DOWN*+CLOUD+DRAIN Comment=a b Reason=disk State=IDLE is full [root@2026-11-30T20:00:00]
`

func TestNodes(t *testing.T) {
	c, lines := answering(nodeLines, nil)
	got, err := c.Nodes(context.Background(), []string{"n2", "n1", "n10"})
	if err != nil {
		t.Fatal(err)
	}
	want := []Node{
		{Name: "n1", State: "IDLE", Flags: []string{"CLOUD", "POWERED_DOWN"}},
		{Name: "n2", State: "DOWN", Flags: []string{"CLOUD", "DRAIN", "NOT_RESPONDING"}, Reason: "disk"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"scontrol show node --oneliner n[1-2,10]"}, *lines); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if !got[1].Has("DRAIN") || got[0].Has("DRAIN") {
		t.Error("Has is wrong")
	}
	c, lines = answering(nodeLines, nil)
	if _, err := c.Nodes(context.Background(), nil); err != nil || (*lines)[0] != "scontrol show node --oneliner" {
		t.Errorf("all nodes: %v, %q", err, *lines)
	}
}

func TestSetNodes(t *testing.T) {
	c, lines := answering("", nil)
	if err := c.SetNodes(context.Background(), []string{"n3", "n1", "n2", "n1"}, "DRAIN", "disk\nfull"); err != nil {
		t.Fatal(err)
	}
	if err := c.SetNodes(context.Background(), []string{"n1"}, "RESUME", ""); err != nil {
		t.Fatal(err)
	}
	if err := c.SetNodes(context.Background(), nil, "DOWN", "x"); err != nil {
		t.Fatal(err)
	}
	want := []string{"scontrol update NodeName=n[1-3] State=DRAIN Reason=disk full", "scontrol update NodeName=n1 State=RESUME"}
	if diff := cmp.Diff(want, *lines); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	c, _ = answering("", &command.Error{Program: "scontrol", Exit: 1, Stderr: "slurm_update error: Invalid node name specified", Err: errors.New("exit status 1")})
	if err := c.SetNodes(context.Background(), []string{"n1"}, "DOWN", "x"); err == nil || !strings.Contains(err.Error(), "set n1 to DOWN") {
		t.Errorf("error %v", err)
	}
}

// TestBatches: names that compress badly are spread over several calls.
func TestBatches(t *testing.T) {
	var names []string
	for i := range 20000 {
		names = append(names, fmt.Sprintf("node%d", 2*i))
	}
	c, lines := answering("", nil)
	if err := c.SetNodes(context.Background(), names, "DOWN", "x"); err != nil {
		t.Fatal(err)
	}
	total := 0
	for _, line := range *lines {
		if len(line) > 33<<10 {
			t.Errorf("a command line of %d bytes", len(line))
		}
		list, _, _ := strings.Cut(strings.TrimPrefix(line, "scontrol update NodeName="), " ")
		hosts, err := hostlist.Expand(list)
		if err != nil {
			t.Fatal(err)
		}
		total += len(hosts)
	}
	if total != len(names) || len(*lines) < 2 {
		t.Errorf("%d names in %d calls, want %d in several", total, len(*lines), len(names))
	}
}

func record(fields ...string) string { return strings.Join(fields, "\x1f") }

func TestJobs(t *testing.T) {
	out := record("5", "5", "N/A", "10001", "research", "main", "RUNNING", "n[1-2]") + "\n" +
		record("7", "6", "3", "-1561750542", "(null)", "main", "PENDING", "") + "\n" // Slurm prints a uid as %d
	c, _ := answering(out, nil)
	got, err := c.Jobs(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	want := []Job{
		{ID: 5, UID: 10001, Account: "research", Partition: "main", State: "RUNNING", Nodes: []string{"n1", "n2"}},
		{ID: 7, ArrayJobID: 6, ArrayTaskID: 3, UID: 2733216754, Partition: "main", State: "PENDING"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	c, _ = answering("slurm_load_jobs error\n", nil)
	if _, err := c.Jobs(context.Background()); err == nil {
		t.Error("nonsense is no error")
	}
}

func TestJob(t *testing.T) {
	forged := "x\n" + record("7", "7", "N/A", "0", "root", "main", "COMPLETED", "", "None", "forged")
	task := record("8", "7", "1", "10001", "research", "main", "RUNNING", "n1", "None", "t")
	for _, test := range []struct {
		name, out string
		want      Job
	}{
		{"plain", record("7", "7", "N/A", "10001", "research", "main", "PENDING", "", "burst_buffer/lua: x: checksum differs", "my job") + "\n",
			Job{ID: 7, UID: 10001, Account: "research", Partition: "main", State: "PENDING", Reason: "burst_buffer/lua: x: checksum differs", Name: "my job"}},
		{"a name that forges a job", record("7", "7", "N/A", "10001", "research", "main", "RUNNING", "n1", "None", forged) + "\n",
			Job{ID: 7, UID: 10001, Account: "research", Partition: "main", State: "RUNNING", Nodes: []string{"n1"}, Name: forged}},
		{"the array itself among its tasks", task + "\n" + record("7", "7", "2", "10001", "research", "main", "RUNNING", "n2", "None", "t") + "\n",
			Job{ID: 7, ArrayJobID: 7, ArrayTaskID: 2, UID: 10001, Account: "research", Partition: "main", State: "RUNNING", Nodes: []string{"n2"}, Name: "t"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, _ := answering(test.out, nil)
			got, err := c.Job(context.Background(), 7)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	c, _ := answering("", nil)
	if _, err := c.Job(context.Background(), 7); !errors.Is(err, ErrNotFound) {
		t.Errorf("no answer: %v", err)
	}
	c, _ = answering("", &command.Error{Program: "squeue", Exit: 1, Stderr: "slurm_load_jobs error: Invalid job id specified", Err: errors.New("exit status 1")})
	if _, err := c.Job(context.Background(), 7); !errors.Is(err, ErrNotFound) {
		t.Errorf("unknown job: %v", err)
	}
}

// The task of an array that has the array's own id is listed among the others.
func TestExitCodeOfAnArraysTask(t *testing.T) {
	c, _ := answering("JobId=8 ArrayJobId=7 ArrayTaskId=0 JobName=x JobState=FAILED ExitCode=3:0 RunTime=00:00:01\n"+
		"JobId=7 ArrayJobId=7 ArrayTaskId=1 JobName=x JobState=COMPLETED ExitCode=0:0 RunTime=00:00:01\n", nil)
	if code, signal, err := c.ExitCode(context.Background(), 7); err != nil || code != 0 || signal != 0 {
		t.Errorf("got %d:%d, %v, want 0:0", code, signal, err)
	}
}

func TestExitCode(t *testing.T) {
	c, _ := answering("JobId=7 JobName=x JobState=FAILED Restarts=0 BatchFlag=1 Reboot=0 ExitCode=3:9 RunTime=00:00:01\n", nil)
	if code, signal, err := c.ExitCode(context.Background(), 7); err != nil || code != 3 || signal != 9 {
		t.Errorf("got %d:%d, %v", code, signal, err)
	}
	c, _ = answering("JobId=7\n", nil)
	if _, _, err := c.ExitCode(context.Background(), 7); err == nil {
		t.Error("no exit code is no error")
	}
}

// While a requeued job is cleaned up, its state is COMPLETING and its code 0.
func TestExitCodeOfARequeuedJob(t *testing.T) {
	for _, end := range []string{"Unknown", "NONE"} {
		c, _ := answering("JobId=7 JobName=x JobState=COMPLETING Restarts=1 ExitCode=0:0 RunTime=00:00:00 StartTime=2026-11-30T23:30:54 EndTime="+end+" Deadline=N/A\n", nil)
		if _, _, err := c.ExitCode(context.Background(), 7); !errors.Is(err, ErrNotEnded) {
			t.Errorf("EndTime=%s: error %v, want ErrNotEnded", end, err)
		}
	}
	c, _ := answering("JobId=7 JobName=x JobState=COMPLETING ExitCode=0:0 EndTime=2026-11-30T23:20:54 Deadline=N/A\n", nil)
	if code, _, err := c.ExitCode(context.Background(), 7); err != nil || code != 0 {
		t.Errorf("a job that ended: %d, %v", code, err)
	}
}

func TestSetJobComment(t *testing.T) {
	c, lines := answering("", nil)
	if err := c.SetJobComment(context.Background(), 7, "a\nb"); err != nil {
		t.Fatal(err)
	}
	if want := "scontrol update JobId=7 AdminComment=a b"; (*lines)[0] != want {
		t.Errorf("ran %q, want %q", (*lines)[0], want)
	}
}

// TestDeadline: a program that hangs is ended.
func TestDeadline(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "scontrol"), []byte("#!/bin/sh\nexec sleep 600\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	_, err := Client{Timeout: 20 * time.Millisecond}.Nodes(context.Background(), nil)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
}

func TestFields(t *testing.T) {
	got := Fields("JobId=7 JobName=my job  Account=(null) QOS=N/A AllocTRES= TRES=cpu=2,mem=1G  Comment=a=b JobName=other")
	want := map[string]string{"JobId": "7", "JobName": "my job", "TRES": "cpu=2,mem=1G"}
	want["Comment"] = "a=b"
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func FuzzFields(f *testing.F) {
	f.Add(nodeLines)
	f.Add("NodeName=x State= = ==a b=c")
	f.Fuzz(func(t *testing.T, line string) {
		for k, v := range Fields(line) {
			if k == "" || v == "" || !strings.Contains(line, k+"=") || !strings.Contains(line, v) {
				t.Errorf("%q has the field %q=%q", line, k, v)
			}
		}
		splitState(line)
	})
}

func FuzzJob(f *testing.F) {
	f.Add(record("7", "7", "N/A", "10001", "research", "main", "PENDING", "n[1-2]", "None", "a\nb"))
	f.Fuzz(func(t *testing.T, out string) {
		c, _ := answering(out, nil)
		if j, err := c.Job(context.Background(), 7); err == nil && j.ID != 7 {
			t.Errorf("asked for job 7, got %+v", j)
		}
	})
}
