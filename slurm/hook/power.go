package hook

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/slurm/hostlist"
)

func secondsOf(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// maxResumeFile bounds the file: 65536 nodes in a thousand jobs take less.
const maxResumeFile = 64 << 20

// resume hands the nodes to sluiced. Slurm's file about the jobs is read before
// all else: it vanishes when slurmctld stops.
func (h *Hook) resume(ctx context.Context, args []string) error {
	at := api.FormatTime(h.Clock.Now())
	jobs, fileNodes, err := readResumeFile(h.Getenv("SLURM_RESUME_FILE"))
	if err != nil {
		h.logf("resume: %v", err) // the nodes are wanted all the same
	}
	list := fileNodes
	if len(args) > 0 {
		list = args[0]
	}
	nodes, err := hostlist.Expand(list)
	if err != nil {
		return err
	}
	if len(nodes) == 0 {
		return errUsage
	}
	return h.handOver(ctx, api.OpNodeResume, api.Resume{Nodes: nodes, Jobs: jobs, At: at})
}

// resumeFile is SLURM_RESUME_FILE. Slurm 23.02 renamed its keys.
type resumeFile struct {
	AllNodes       string `json:"all_nodes"`
	AllNodesResume string `json:"all_nodes_resume"`
	Jobs           []struct {
		JobID       uint32 `json:"job_id"`
		Partition   string `json:"partition"`
		Nodes       string `json:"nodes"`
		NodesResume string `json:"nodes_resume"`
	} `json:"jobs"`
}

// readResumeFile returns the jobs and the list of all nodes. No file is no error.
func readResumeFile(path string) ([]api.ResumeJob, string, error) {
	if path == "" {
		return nil, "", nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, "", fmt.Errorf("read SLURM_RESUME_FILE: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxResumeFile))
	if err != nil {
		return nil, "", fmt.Errorf("read SLURM_RESUME_FILE: %w", err)
	}
	return parseResumeFile(data)
}

func parseResumeFile(data []byte) ([]api.ResumeJob, string, error) {
	var file resumeFile
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, "", fmt.Errorf("read SLURM_RESUME_FILE: %w", err)
	}
	all := file.AllNodesResume
	if all == "" {
		all = file.AllNodes
	}
	var jobs []api.ResumeJob
	for _, j := range file.Jobs {
		list := j.NodesResume
		if list == "" {
			list = j.Nodes
		}
		nodes, err := hostlist.Expand(list)
		if err != nil {
			return nil, all, fmt.Errorf("read SLURM_RESUME_FILE: job %d: %w", j.JobID, err)
		}
		jobs = append(jobs, api.ResumeJob{JobID: j.JobID, Partition: j.Partition, Nodes: nodes})
	}
	return jobs, all, nil
}

func (h *Hook) nodes(ctx context.Context, op string, args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	nodes, err := hostlist.Expand(args[0])
	if err != nil {
		return err
	}
	if len(nodes) == 0 {
		return errUsage
	}
	return h.handOver(ctx, op, api.NodeNames{Nodes: nodes})
}

// handOver tells sluiced, or leaves that to a child, so that the script that
// Slurm waits for returns within Limits.Power.
func (h *Hook) handOver(ctx context.Context, op string, body any) error {
	err := h.call(ctx, h.Limits.Power, op, body, nil)
	if err == nil || !away(err) {
		return err
	}
	h.logf("%s is left to a child: %v", op, err)
	input, err := json.Marshal(body)
	if err != nil {
		return err
	}
	return h.Detach(input, "later", op)
}

// later is the child: it repeats the call on its standard input until sluiced answers.
func (h *Hook) later(ctx context.Context, args []string) error {
	if len(args) != 1 {
		return errUsage
	}
	body, err := io.ReadAll(io.LimitReader(h.Stdin, api.MaxMessage))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, h.Limits.Later)
	defer cancel()
	if err := h.patiently(ctx, 0, h.Limits.Answer, args[0], json.RawMessage(bytes.TrimSpace(body)), nil); err != nil {
		return err
	}
	h.logf("%s was handed over", args[0])
	return nil
}

// logFile is where detached children and the burst-buffer functions write. Slurm
// starts its programs in the directory of its logs.
const logFile = "sluice-hook.log"

func openLog() (*os.File, error) {
	return os.OpenFile(logFile, os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NOFOLLOW, 0o640)
}

// lazyLog opens the log for each line: there are few, and mostly none. What
// cannot be logged is dropped.
type lazyLog struct{}

func (lazyLog) Write(p []byte) (int, error) {
	f, err := openLog()
	if err != nil {
		return len(p), nil
	}
	defer f.Close()
	return f.Write(p)
}

// detach starts this program in a session of its own, holding none of the
// caller's descriptors: Slurm waits for whoever holds its pipes.
func detach(input []byte, args ...string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	in, err := unnamed(input)
	if err != nil {
		return err
	}
	defer in.Close()
	log, err := openLog()
	if err != nil {
		if log, err = os.OpenFile(os.DevNull, os.O_WRONLY, 0); err != nil {
			return err
		}
	}
	defer log.Close()
	cmd := exec.Command(self, args...)
	cmd.Args[0] = filepath.Join(filepath.Dir(self), "sluice-hook")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, log, log
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	return cmd.Process.Release()
}

// unnamed is an open file with this content and no name.
func unnamed(content []byte) (*os.File, error) {
	f, err := os.CreateTemp("", "sluice-hook-*")
	if err != nil {
		return nil, err
	}
	_, werr := f.Write(content)
	_, serr := f.Seek(0, io.SeekStart)
	if err := errors.Join(os.Remove(f.Name()), werr, serr); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
