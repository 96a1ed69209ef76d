// Package benchfile turns measurements into the reports of "make bench": .bench/NAME.json and a table for people.
package benchfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/sluicehpc/sluice/internal/atomicfile"
)

// Better says which of two values of a unit is the better one.
type Better int

const (
	Lower  Better = iota // durations, memory
	Higher               // rates
)

// Case is what was measured: for each side the values of all its runs, in Unit.
type Case struct {
	Name     string // says what was done: "download 4 x 1 GiB"
	Unit     string // "ms", "MiB/s", "MiB"
	Better   Better
	Sluice   []float64 // at least one
	Peer     []float64 // or nil when there is no peer
	PeerName string    // "" exactly when Peer is nil
	Ceiling  []float64 // what the machine allows, or nil
	// Percentile of the runs that is reported, above 0 to 100, or 0 for the median.
	Percentile float64
}

// Result is the case of a report. The values are medians, or the percentiles that the case asked for.
type Result struct {
	Case      string   `json:"case"`
	Unit      string   `json:"unit"`
	Sluice    float64  `json:"sluice"`
	Peer      *float64 `json:"peer"`       // or null
	PeerName  string   `json:"peer_name"`  // or ""
	Ceiling   *float64 `json:"ceiling"`    // or null
	Ratio     *float64 `json:"ratio"`      // how many times better than the peer: above 1 is good, whatever the unit; or null
	OfCeiling *float64 `json:"of_ceiling"` // the share of the ceiling that was reached, 1 being all of it; or null
}

// Report is the content of a file.
type Report struct {
	Name    string   `json:"name"`
	Machine string   `json:"machine"`
	Runs    int      `json:"runs"` // of the case with the fewest, Sluice's side
	Results []Result `json:"results"`
}

// New makes a report of the cases, in their order. It says of all cases at once what is wrong with them: no runs, values that are not above zero (no ratio could be
// made of them), a peer without a name or a name without a peer.
func New(name, machine string, cases []Case) (Report, error) {
	r := Report{Name: name, Machine: machine, Results: []Result{}}
	if len(cases) == 0 {
		return r, fmt.Errorf("bench %s: no cases", name)
	}
	var errs []error
	for i, c := range cases {
		if err := c.check(); err != nil {
			errs = append(errs, fmt.Errorf("bench %s: case %q: %w", name, c.Name, err))
			continue
		}
		if i == 0 || len(c.Sluice) < r.Runs {
			r.Runs = len(c.Sluice)
		}
		r.Results = append(r.Results, c.result())
	}
	return r, errors.Join(errs...)
}

func (c Case) check() error {
	if c.Name == "" || c.Unit == "" {
		return errors.New("needs a name and a unit")
	}
	if len(c.Sluice) == 0 {
		return errors.New("no runs")
	}
	if (len(c.Peer) > 0) != (c.PeerName != "") {
		return fmt.Errorf("%d runs of the peer %q", len(c.Peer), c.PeerName)
	}
	if c.Percentile < 0 || c.Percentile > 100 {
		return fmt.Errorf("percentile %g, want 0 to 100", c.Percentile)
	}
	for _, v := range slices.Concat(c.Sluice, c.Peer, c.Ceiling) {
		if !(v > 0) || math.IsInf(v, 0) {
			return fmt.Errorf("value %g, want a number above 0", v)
		}
	}
	return nil
}

func (c Case) result() Result {
	reduce := Median
	if c.Percentile > 0 {
		reduce = func(v []float64) float64 { return Percentile(v, c.Percentile) }
	}
	r := Result{Case: c.Name, Unit: c.Unit, Sluice: reduce(c.Sluice), PeerName: c.PeerName}
	// compare is how many times better than other Sluice is.
	compare := func(other float64) *float64 {
		if c.Better == Lower {
			return new(other / r.Sluice)
		}
		return new(r.Sluice / other)
	}
	if len(c.Peer) > 0 {
		r.Peer = new(reduce(c.Peer))
		r.Ratio = compare(*r.Peer)
	}
	if len(c.Ceiling) > 0 {
		r.Ceiling = new(reduce(c.Ceiling))
		r.OfCeiling = compare(*r.Ceiling)
	}
	return r
}

// Median is the middle value, the mean of the two middle ones when their number is even, and NaN of none.
func Median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	v := slices.Sorted(slices.Values(values))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// Percentile is the smallest value that at least p percent of the values do not exceed, 0 < p <= 100 (nearest rank: always a value that was
// measured), and NaN of none.
func Percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	v := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(p * float64(len(v)) / 100))
	return v[min(max(rank, 1), len(v))-1]
}

var validName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]*$`)

// Write writes dir/NAME.json, and makes dir. A name has lower-case letters, digits and dashes.
func (r Report) Write(dir string) error {
	if !validName.MatchString(r.Name) {
		return fmt.Errorf("write bench report: name %q, want lower-case letters, digits and dashes", r.Name)
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("write bench report %s: %w", r.Name, err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write bench report %s: %w", r.Name, err)
	}
	return atomicfile.Write(filepath.Join(dir, r.Name+".json"), append(text, '\n'), 0o644)
}

// Print writes the report as a table.
func (r Report) Print(w io.Writer) error {
	if _, err := fmt.Fprintf(w, "%s: at least %d runs a case on %s\n", r.Name, r.Runs, r.Machine); err != nil {
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "case\tsluice\tpeer\tratio\tceiling\treached")
	for _, c := range r.Results {
		peer, ratio, ceiling, reached := "-", "-", "-", "-"
		if c.Peer != nil {
			peer = fmt.Sprintf("%s %s (%s)", digits(*c.Peer), c.Unit, c.PeerName)
			ratio = digits(*c.Ratio) + "x"
		}
		if c.Ceiling != nil {
			ceiling = digits(*c.Ceiling) + " " + c.Unit
			reached = fmt.Sprintf("%.0f %%", 100**c.OfCeiling)
		}
		fmt.Fprintf(t, "%s\t%s %s\t%s\t%s\t%s\t%s\n", c.Case, digits(c.Sluice), c.Unit, peer, ratio, ceiling, reached)
	}
	return t.Flush()
}

// digits writes a number with three digits that count.
func digits(v float64) string {
	switch {
	case v >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strings.TrimSuffix(strconv.FormatFloat(v, 'f', 2, 64), ".00")
}
