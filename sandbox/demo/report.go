package demo

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/internal/atomicfile"
)

// Report is what `sluice sandbox demo --report FILE` writes. Times are in
// api.TimeFormat, all of the sandbox host's clock.
type Report struct {
	Job         ReportJob       `json:"job"`
	Timeline    Timeline        `json:"timeline"`
	StageIn     ReportStage     `json:"stage_in"`
	StageOut    ReportStage     `json:"stage_out"`
	Source      string          `json:"source"`      // gs:// URL
	Destination string          `json:"destination"` // gs:// URL
	Endpoints   ReportEndpoints `json:"endpoints"`   // as seen inside `sluice sandbox exec`
	Train       ReportTrain     `json:"train"`
}

// ReportJob is the job as Slurm's accounting has it.
type ReportJob struct {
	ID    uint32   `json:"id"`
	State string   `json:"state"`
	User  string   `json:"user"`
	Nodes []string `json:"nodes"`
}

// Timeline is when what happened, in this order but for resume_requested and
// stage_in_done, whose order the demo proves: no node before the data.
type Timeline struct {
	Submitted       string `json:"submitted"`
	StageInStarted  string `json:"stage_in_started"`
	StageInDone     string `json:"stage_in_done"`
	ResumeRequested string `json:"resume_requested"`
	NodesReady      string `json:"nodes_ready"`
	JobStarted      string `json:"job_started"`
	JobEnded        string `json:"job_ended"`
	StageOutDone    string `json:"stage_out_done"`
}

// ReportStage is one direction: how many objects and bytes, and how many
// objects were compared with their copy and are equal.
type ReportStage struct {
	Engine   string `json:"engine"`
	Objects  int64  `json:"objects"`
	Bytes    int64  `json:"bytes"`
	Verified int64  `json:"verified"`
}

// ReportEndpoints are the sandbox's services.
type ReportEndpoints struct {
	Storage string `json:"storage"`
	Compute string `json:"compute"`
	Lustre  string `json:"lustre"`
}

// ReportTrain is what the job itself measured: mean loss (nats a byte) over its
// first and its last window.
type ReportTrain struct {
	FirstLoss float64 `json:"first_loss"`
	LastLoss  float64 `json:"last_loss"`
	Steps     int64   `json:"steps"`
}

// moments lists the timeline in its order, with each moment's name.
func (t *Timeline) moments() []struct {
	name string
	at   *string
} {
	return []struct {
		name string
		at   *string
	}{
		{api.EventSubmitted, &t.Submitted},
		{api.EventStageInStarted, &t.StageInStarted},
		{api.EventStageInDone, &t.StageInDone},
		{api.EventResumeRequested, &t.ResumeRequested},
		{api.EventNodesReady, &t.NodesReady},
		{api.EventJobStarted, &t.JobStarted},
		{api.EventJobEnded, &t.JobEnded},
		{api.EventStageOutDone, &t.StageOutDone},
	}
}

// fill takes the moments from a job's events; what sluiced calls submitted is
// when it first heard of the job, so submitted is the caller's.
func (t *Timeline) fill(submitted time.Time, events []api.Event) error {
	at := map[string]string{}
	for _, e := range events {
		at[e.Name] = e.At
	}
	at[api.EventSubmitted] = api.FormatTime(submitted)
	before := ""
	for _, m := range t.moments() {
		*m.at = at[m.name]
		if *m.at == "" {
			return fmt.Errorf("the controller did not record when %s was", m.name)
		}
		if *m.at < before {
			return fmt.Errorf("%s (%s) came before the moment that precedes it (%s)", m.name, *m.at, before)
		}
		before = *m.at
	}
	return nil
}

// WriteNotRun writes the report of a run that could not be made that day.
func WriteNotRun(path, reason string) error {
	return write(path, struct {
		Status string `json:"status"`
		Reason string `json:"reason"`
	}{"not_run", reason})
}

func write(path string, report any) error {
	data, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return atomicfile.Write(path, append(data, '\n'), 0o644)
}
