// Package prolog is Slurm's Prolog on a compute node: it lets a job start when
// the node's agent, or a look of its own, says that the file systems answer.
//
// A Prolog that fails drains its node, so it fails for one cause only: trouble
// that sluiced confirmed to be the node's own. It depends on the standard
// library and small packages, because every job waits for it on every node.
package prolog

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/health"
	"github.com/sluicehpc/sluice/internal/atomicfile"
	"github.com/sluicehpc/sluice/lustre/probe"
)

// Where node hooks and the agent meet, all below $SLUICE_ROOT when that is set.
const (
	SpoolDir   = "/var/lib/sluice/agent-spool" // Moments
	VerdictDir = "/var/lib/sluice/verdicts"    // one file per job whose Prolog failed, named by its id
	MountsFile = "/run/sluice/mounts"
	ConfigFile = "/etc/sluice/prolog.conf" // key=value lines, optional
)

// DefaultTimeout is how long a Prolog waits for the node to be ready. Slurm's
// PrologEpilogTimeout must be longer: its end drains the node.
const DefaultTimeout = 60 * time.Second

// AnswerTimeout bounds the agent's answer: it only looks into its memory.
const AnswerTimeout = 2 * time.Second

// Hook is one run of a node hook, with what tests replace.
type Hook struct {
	Root   string // before every path; "" on a real node
	Getenv func(string) string
	Say    func(string) // a line for slurmd's log
	Now    func() time.Time
	Sleep  func(time.Duration)
	Probe  func(probe.Check) probe.Result
}

// New returns a Hook on the real node that says nothing.
func New() Hook {
	return Hook{
		Root:   os.Getenv("SLUICE_ROOT"),
		Getenv: os.Getenv,
		Say:    func(string) {},
		Now:    time.Now,
		Sleep:  time.Sleep,
		Probe:  new(probe.Prober).Probe,
	}
}

// pause is between two questions.
const pause = 500 * time.Millisecond

// Run is the Prolog; it returns the exit code. 0 lets the job start; 1 drains
// the node and requeues the job.
func Run(h Hook) int {
	call, ok := Call(h.Getenv)
	if !ok {
		h.Say("no job id in the environment, nothing checked")
		return 0
	}
	start := h.Now()
	ready, away := h.ask(call)
	if !ready.Ready {
		timeout := h.timeout()
		h.Say(fmt.Sprintf("job %d waits up to %s: %s", call.JobID, timeout, ready.Reason))
		for deadline := start.Add(timeout); !ready.Ready && h.Now().Before(deadline); {
			h.Sleep(min(pause, deadline.Sub(h.Now())))
			ready, away = h.ask(call)
		}
	}
	if away {
		h.Keep(call, EventProlog, start)
	}
	switch {
	case ready.Ready:
		return 0
	case ready.Cause == string(health.Node):
		h.spoolVerdict(call, ready)
		// Slurm knows no reason but "Prolog error": sluiced tells it the real one.
		h.keep(call, EventVerdict, h.Now(), ready.Reason)
		h.Say(fmt.Sprintf("job %d cannot start here: %s", call.JobID, ready.Reason))
		return 1
	}
	// The file system's fault, or nobody knows whose: that must drain no node.
	h.Say(fmt.Sprintf("job %d starts although the node is not ready: %s", call.JobID, ready.Reason))
	return 0
}

// ask asks the agent or, when that is away, looks itself.
func (h Hook) ask(call api.PrologCall) (r api.Readiness, away bool) {
	err := Ask(h.Root+api.AgentSocket, api.OpProlog, call, &r, AnswerTimeout)
	if err == nil {
		return r, false
	}
	if problem := h.look(); problem != "" {
		return api.Readiness{Cause: string(health.Unknown), Reason: fmt.Sprintf("%s (no agent: %v)", problem, err)}, true
	}
	return api.Readiness{Ready: true}, true
}

// look probes what the agent last said is to be mounted; it returns what is
// wrong. Without the agent's word nothing is known to be wrong.
func (h Hook) look() string {
	checks, err := ReadMounts(h.Root + MountsFile)
	if err != nil {
		h.Say(fmt.Sprintf("mounts not checked: %v", err))
		return ""
	}
	var problems []string
	for _, c := range checks {
		if r := h.Probe(c); r.State != probe.OK {
			problems = append(problems, fmt.Sprintf("%s: %s: %s", c.Dir, r.State, r.Detail))
		}
	}
	return strings.Join(problems, "; ")
}

// Keep leaves a moment of the job for the agent to find.
func (h Hook) Keep(call api.PrologCall, event string, at time.Time) {
	h.keep(call, event, at, "")
}

func (h Hook) keep(call api.PrologCall, event string, at time.Time, reason string) {
	m := Moment{UID: call.UID, JobEvent: api.JobEvent{JobID: call.JobID, Node: call.Node, Event: event, At: api.FormatTime(at), Reason: reason}}
	if err := Keep(h.Root+SpoolDir, m); err != nil {
		h.Say(fmt.Sprintf("keep the %s of job %d for the agent: %v", event, call.JobID, err))
	}
}

// Verdict is why a Prolog failed.
type Verdict struct {
	JobID  uint32 `json:"job_id"`
	UID    uint32 `json:"uid"`
	Node   string `json:"node"`
	At     string `json:"at"`
	Cause  string `json:"cause"`
	Reason string `json:"reason"`
}

func (h Hook) spoolVerdict(call api.PrologCall, r api.Readiness) {
	data, err := json.Marshal(Verdict{JobID: call.JobID, UID: call.UID, Node: call.Node, At: api.FormatTime(h.Now()), Cause: r.Cause, Reason: r.Reason})
	if err == nil {
		err = os.MkdirAll(h.Root+VerdictDir, 0o700)
	}
	if err == nil {
		err = atomicfile.Write(filepath.Join(h.Root+VerdictDir, strconv.FormatUint(uint64(call.JobID), 10)), data, 0o600)
	}
	if err != nil {
		h.Say(fmt.Sprintf("spool the verdict on job %d: %v", call.JobID, err))
	}
}

// maxTimeout keeps a mistyped configuration from holding a node for days.
const maxTimeout = time.Hour

// timeout reads the configuration, which only a Prolog that waits needs.
func (h Hook) timeout() time.Duration {
	data, err := os.ReadFile(h.Root + ConfigFile)
	if err != nil {
		return DefaultTimeout
	}
	timeout := DefaultTimeout
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		key, value, _ := strings.Cut(line, "=")
		d, err := time.ParseDuration(strings.TrimSpace(value))
		switch {
		case strings.TrimSpace(key) != "timeout":
			h.Say(fmt.Sprintf("%s: unknown key %q, the only one is timeout", ConfigFile, key))
		case err != nil || d < 0 || d > maxTimeout:
			h.Say(fmt.Sprintf("%s: timeout %q is not a duration up to %s, such as 60s", ConfigFile, value, maxTimeout))
		default:
			timeout = d
		}
	}
	return timeout
}
