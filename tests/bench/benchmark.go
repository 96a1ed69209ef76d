package bench

import (
	"context"
	"fmt"
	"io"

	"github.com/sluicehpc/sluice/internal/benchfile"
)

// Benchmark is one that make bench runs; its report is .bench/NAME.json.
type Benchmark struct {
	Name  string
	About string // what it measures, in a few words
	Run   func(context.Context, Env) (Outcome, error)
}

// Outcome is what a benchmark found, and what it should have found.
type Outcome struct {
	Cases   []benchfile.Case
	Targets []Target
}

// Env is what a benchmark is given.
type Env struct {
	Sluice string    // the built command line, absolute; the other binaries are beside it
	Self   string    // the driver's own program, absolute, which understands ExecTimesCommand
	Dir    string    // for what is built, removed at the end
	Runs   int       // of each case, where a run is short
	Log    io.Writer // progress
}

// Step says what is measured now.
func (e Env) Step(format string, args ...any) {
	fmt.Fprintf(e.Log, "  "+format+"\n", args...)
}

// Target is what a case has to keep.
type Target struct {
	Case  string
	Max   float64 // of Sluice's value, in the case's unit; 0 for none
	Ratio float64 // to the peer, at least; 0 for none
}

// Check compares the targets with the report; missed counts those that are not
// kept or have no case.
func Check(w io.Writer, r benchfile.Report, targets []Target) (missed int) {
	for _, t := range targets {
		met, text := t.check(r)
		word := "met   "
		if !met {
			word = "MISSED"
			missed++
		}
		fmt.Fprintf(w, "%s  %s: %s\n", word, t.Case, text)
	}
	return missed
}

func (t Target) check(r benchfile.Report) (met bool, text string) {
	for _, c := range r.Results {
		if c.Case != t.Case {
			continue
		}
		if t.Max > 0 {
			return c.Sluice <= t.Max, fmt.Sprintf("%.4g %s, at most %g %s", c.Sluice, c.Unit, t.Max, c.Unit)
		}
		if c.Ratio == nil {
			return false, "no peer was measured"
		}
		return *c.Ratio >= t.Ratio, fmt.Sprintf("%.4g %s takes %.2f times what %s takes, at most %g times", c.Sluice, c.Unit, 1 / *c.Ratio, c.PeerName, 1/t.Ratio)
	}
	return false, "was not measured"
}
