package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/sluicehpc/sluice/api"
)

func jobCommand() *cli.Command {
	return &cli.Command{
		Name:  "job",
		Usage: "see what Sluice does for a job",
		Subcommands: []*cli.Command{
			{
				Name:      "show",
				Usage:     "show a job: its phase, its transfers, when what happened",
				ArgsUsage: "JOBID",
				Flags:     []cli.Flag{jsonFlag()},
				Action: func(c *cli.Context) error {
					job, err := askJob(c)
					if err != nil {
						return err
					}
					if c.Bool("json") {
						return printJSON(c.App.Writer, job)
					}
					return printJob(c.App.Writer, job)
				},
			},
			{
				Name:  "list",
				Usage: "list your jobs, newest first",
				Flags: []cli.Flag{
					jsonFlag(),
					&cli.BoolFlag{Name: "all", Usage: "everybody's jobs (root only)"},
					&cli.IntFlag{Name: "limit", Value: 100, Usage: "at most `N` jobs"},
				},
				Action: func(c *cli.Context) error {
					if err := noArgs(c); err != nil {
						return err
					}
					var jobs api.Jobs
					if err := call(c.Context, api.OpJobList, listRequest(c), &jobs); err != nil {
						return err
					}
					if c.Bool("json") {
						return printJSON(c.App.Writer, jobs)
					}
					rows := [][]string{{"JOBID", "USER", "NAME", "PHASE", "NODES", "REASON"}}
					for _, j := range jobs.Jobs {
						rows = append(rows, []string{fmt.Sprint(j.JobID), j.User, j.Name, j.Phase, strings.Join(j.Nodes, ","), firstLine(j.Reason)})
					}
					return table(c.App.Writer, rows...)
				},
			},
			{
				Name:      "watch",
				Usage:     "follow a job's phases live until everything is done",
				ArgsUsage: "JOBID",
				Description: "Exit code 0 when the job and its stage-out are done, 1 if the job failed, 3 if only its stage-out did.\n" +
					"Ctrl-C stops the watching, never the job.",
				Action: func(c *cli.Context) error {
					id, err := jobID(c)
					if err != nil {
						return err
					}
					return watchJob(c.Context, c.App.Writer, id)
				},
			},
			{
				Name:        "wait",
				Usage:       "return when the job has ended and its stage-out is verified",
				ArgsUsage:   "JOBID",
				Description: "Exit code 0 when the job and its stage-out are done, 1 if the job failed, 3 if only its stage-out did.",
				Flags:       []cli.Flag{jsonFlag()},
				Action: func(c *cli.Context) error {
					id, err := jobID(c)
					if err != nil {
						return err
					}
					job, err := followJob(c.Context, id, func(api.Job) {})
					if err != nil {
						return err
					}
					if c.Bool("json") {
						if err := printJSON(c.App.Writer, job); err != nil {
							return err
						}
					}
					return outcome(job)
				},
			},
		},
	}
}

func listRequest(c *cli.Context) api.JobList {
	return api.JobList{All: c.Bool("all"), Limit: c.Int("limit")}
}

func jobID(c *cli.Context) (uint32, error) {
	arg, err := onlyArg(c, "JOBID")
	if err != nil {
		return 0, err
	}
	id, err := strconv.ParseUint(arg, 10, 32)
	if err != nil || id == 0 {
		return 0, usagef("%q is not a job id: a number as sbatch printed it", arg)
	}
	return uint32(id), nil
}

func askJob(c *cli.Context) (api.Job, error) {
	var job api.Job
	id, err := jobID(c)
	if err != nil {
		return job, err
	}
	return job, call(c.Context, api.OpJobShow, api.JobID{JobID: id}, &job)
}

func printJob(w io.Writer, job api.Job) error {
	fmt.Fprintf(w, "job %d  %s  user %s  phase %s\n", job.JobID, plain(job.Name), plain(job.User), job.Phase)
	if job.Reason != "" {
		fmt.Fprintf(w, "reason: %s\n", plain(job.Reason))
	}
	if len(job.Nodes) > 0 {
		fmt.Fprintf(w, "nodes:  %s\n", strings.Join(job.Nodes, ","))
	}
	if job.Dir != "" {
		fmt.Fprintf(w, "dir:    %s\n", plain(job.Dir))
	}
	if len(job.Transfers) > 0 {
		fmt.Fprintln(w)
		if err := printTransfers(w, job.Transfers); err != nil {
			return err
		}
	}
	fmt.Fprintln(w)
	return printEvents(w, job.Events)
}

// printEvents writes each moment with the time since the first and since the one before.
func printEvents(w io.Writer, events []api.Event) error {
	rows := [][]string{{"EVENT", "AT (UTC)", "SINCE START", "STEP"}}
	var first, before time.Time
	for i, e := range events {
		at, err := time.Parse(api.TimeFormat, e.At)
		if err != nil {
			return fmt.Errorf("event %s: %w", e.Name, err)
		}
		if i == 0 {
			first, before = at, at
		}
		rows = append(rows, []string{
			strings.ReplaceAll(e.Name, "_", " "), at.Format("15:04:05.000"),
			fmt.Sprintf("%.2f s", at.Sub(first).Seconds()), fmt.Sprintf("+%.2f s", at.Sub(before).Seconds()),
		})
		before = at
	}
	return table(w, rows...)
}

func outcome(job api.Job) error {
	switch job.Phase {
	case phaseDone:
		return nil
	case phaseFailed, phaseCancelled:
		code := exitFailed
		if job.Phase == phaseFailed && onlyStageOutFailed(job) {
			code = exitPartly
		}
		return &exitError{code: code, err: fmt.Errorf("job %d %s: %s", job.JobID, job.Phase, job.Reason)}
	}
	return fmt.Errorf("job %d is %s", job.JobID, job.Phase)
}

// Phases in which nothing more will happen.
const (
	phaseDone      = "done"
	phaseFailed    = "failed"
	phaseCancelled = "cancelled"
)

func onlyStageOutFailed(job api.Job) bool {
	if job.EndState == "failure" {
		return false
	}
	ended := false
	for _, e := range job.Events {
		ended = ended || e.Name == api.EventJobEnded
	}
	for _, t := range job.Transfers {
		if ended && t.Kind == "stage_out" && t.State == "FAILED" {
			return true
		}
	}
	return false
}

// pollEvery is how often a followed job is asked for.
const pollEvery = 300 * time.Millisecond

// knownWithin is how long a job may take to reach Sluice after sbatch: Slurm
// calls the burst buffer's setup at its next scheduling round.
const knownWithin = 30 * time.Second

// followJob calls seen with each new state of the job until nothing more will happen.
func followJob(ctx context.Context, id uint32, seen func(api.Job)) (api.Job, error) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	began, known := time.Now(), false
	for {
		var job api.Job
		err := call(ctx, api.OpJobShow, api.JobID{JobID: id}, &job)
		switch {
		case err == nil:
			known = true
			seen(job)
		case api.CodeOf(err) != api.CodeNotFound || known || time.Since(began) > knownWithin:
			return job, err
		}
		switch job.Phase {
		case phaseDone, phaseFailed, phaseCancelled:
			return job, nil
		}
		select {
		case <-ctx.Done():
			return job, ctx.Err()
		case <-tick.C:
		}
	}
}

func watchJob(ctx context.Context, w io.Writer, id uint32) error {
	view := newWatchView(w, isTerminal(os.Stdout))
	job, err := followJob(ctx, id, view.show)
	view.close()
	if err != nil {
		if ctx.Err() != nil {
			fmt.Fprintf(w, "job %d goes on; follow it again: sluice job watch %d\n", id, id)
		}
		return err
	}
	return outcome(job)
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}
