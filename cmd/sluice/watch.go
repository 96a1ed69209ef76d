package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/sluicehpc/sluice/api"
)

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// watchView shows a job's life as lines: one when a phase begins, and while
// bytes move a progress bar (terminal) or a line every two seconds (elsewhere).
type watchView struct {
	w        io.Writer
	terminal bool

	seenEvents int
	first      time.Time
	phase      string
	phaseAt    time.Time
	bar        *progressbar.ProgressBar
	barOf      string // id and state of the transfer that the bar shows
	lastPlain  time.Time
}

func newWatchView(w io.Writer, terminal bool) *watchView {
	return &watchView{w: w, terminal: terminal}
}

// plainEvery is how often progress is written where there is no terminal.
const plainEvery = 2 * time.Second

var phaseWords = map[string]string{
	"accepted":  "accepted; waiting for its stage-in",
	"stage_in":  "staging in; no node is allocated or billed",
	"staged":    "data is on Lustre; waiting for nodes (cold ones: Slurm looks every 60 s)",
	"running":   "running",
	"ended":     "job ended",
	"stage_out": "staging out; the nodes are free again",
	"requeued":  "requeued; Slurm starts it again",
}

func (v *watchView) show(job api.Job) {
	for ; v.seenEvents < len(job.Events); v.seenEvents++ {
		e := job.Events[v.seenEvents]
		at, err := time.Parse(api.TimeFormat, e.At)
		if err != nil {
			continue
		}
		if v.first.IsZero() {
			v.first = at
		}
		v.clear()
		v.line(at, strings.ReplaceAll(e.Name, "_", " "))
	}
	if job.Phase != v.phase {
		v.clear()
		v.phase, v.phaseAt = job.Phase, time.Now()
		if words := phaseWords[job.Phase]; words != "" {
			v.line(time.Now(), "» "+words)
		}
	}
	for _, t := range job.Transfers {
		if t.State == "RUNNING" || t.State == "VERIFYING" || t.State == "QUEUED" {
			v.transfer(t)
			return
		}
	}
	v.wait()
}

func (v *watchView) line(at time.Time, words string) {
	since := time.Duration(0)
	if !v.first.IsZero() {
		since = at.Sub(v.first)
	}
	fmt.Fprintf(v.w, "%8.2f s  %s\n", since.Seconds(), words)
}

func (v *watchView) transfer(t api.Transfer) {
	verb := map[string]string{"QUEUED": "queued", "RUNNING": "copying", "VERIFYING": "verifying"}[t.State]
	if !v.terminal {
		if time.Since(v.lastPlain) < plainEvery {
			return
		}
		v.lastPlain = time.Now()
		v.line(time.Now(), fmt.Sprintf("%s %s: %d of %d objects, %s of %s, %s/s%s", strings.ReplaceAll(t.Kind, "_", "-"), verb,
			t.ObjectsDone, t.Objects, byteSize(t.BytesDone), byteSize(t.Bytes), byteSize(int64(t.BytesPerSec)), eta(t.ETASeconds)))
		return
	}
	if of := t.ID + t.State; v.bar == nil || v.barOf != of {
		v.clear()
		v.barOf = of
		v.bar = progressbar.NewOptions64(max(t.Bytes, 1), progressbar.OptionSetWriter(v.w), progressbar.OptionSetWidth(30),
			progressbar.OptionSetPredictTime(false), progressbar.OptionSetElapsedTime(false), progressbar.OptionClearOnFinish())
	}
	// The rate and the time left are the controller's: the bar may have come late.
	v.bar.Describe(fmt.Sprintf("  %s %s: %d of %d objects, %s of %s, %s/s%s", strings.ReplaceAll(t.Kind, "_", "-"), verb,
		t.ObjectsDone, t.Objects, byteSize(t.BytesDone), byteSize(t.Bytes), byteSize(int64(t.BytesPerSec)), eta(t.ETASeconds)))
	v.bar.Set64(min(t.BytesDone, max(t.Bytes, 1)-1))
}

// wait says on a terminal how long the phase has lasted.
func (v *watchView) wait() {
	if !v.terminal || v.phase == "" {
		return
	}
	v.clear()
	fmt.Fprintf(v.w, "\r\033[K            %s, %.0f s", phaseOr(v.phase), time.Since(v.phaseAt).Seconds())
}

func phaseOr(phase string) string {
	if w := phaseWords[phase]; w != "" {
		return w
	}
	return phase
}

// clear removes what is drawn on the current line of a terminal.
func (v *watchView) clear() {
	if v.bar != nil {
		v.bar.Clear()
		v.bar = nil
	}
	if v.terminal {
		fmt.Fprint(v.w, "\r\033[K")
	}
}

func (v *watchView) close() { v.clear() }

// byteSize writes n with a binary unit.
func byteSize(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	f, u := float64(n)/1024, 0
	for f >= 1024 && u < len(units)-1 {
		f, u = f/1024, u+1
	}
	return fmt.Sprintf("%.1f %ciB", f, units[u])
}

func eta(seconds float64) string {
	if seconds < 0 {
		return ""
	}
	return fmt.Sprintf(", %s left", (time.Duration(seconds * float64(time.Second))).Round(time.Second))
}
