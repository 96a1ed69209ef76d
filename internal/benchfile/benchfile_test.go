package benchfile

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestMedianAndPercentile(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(100 - i)
	}
	for _, test := range []struct {
		name      string
		got, want float64
	}{
		{"median of one", Median([]float64{3}), 3},
		{"median of two", Median([]float64{4, 1}), 2.5},
		{"median of three", Median([]float64{9, 1, 2}), 2},
		{"median of four", Median([]float64{9, 1, 2, 4}), 3},
		{"99th of a hundred", Percentile(hundred, 99), 99},
		{"50th of a hundred", Percentile(hundred, 50), 50},
		{"100th of a hundred", Percentile(hundred, 100), 100},
		{"a small one of a hundred", Percentile(hundred, 0.1), 1},
		{"99th of twenty", Percentile(hundred[:20], 99), 100},
		{"95th of twenty", Percentile(hundred[:20], 95), 99},
		{"99th of one", Percentile([]float64{7}, 99), 7},
	} {
		if test.got != test.want {
			t.Errorf("%s: got %g, want %g", test.name, test.got, test.want)
		}
	}
	if !math.IsNaN(Median(nil)) || !math.IsNaN(Percentile(nil, 50)) {
		t.Error("of no values: want NaN")
	}
	values := []float64{3, 1, 2}
	Median(values)
	Percentile(values, 50)
	if diff := cmp.Diff([]float64{3, 1, 2}, values); diff != "" {
		t.Errorf("the caller's values changed:\n%s", diff)
	}
}

func report(t *testing.T) Report {
	t.Helper()
	r, err := New("hooks", "a machine", []Case{
		{Name: "prolog on a ready node", Unit: "ms", Sluice: []float64{10, 8, 12}, Peer: []float64{5, 5, 6}, PeerName: "empty Go program"},
		{Name: "download 4 x 1 GiB", Unit: "MiB/s", Better: Higher, Sluice: []float64{900, 1100}, Peer: []float64{500}, PeerName: "other",
			Ceiling: []float64{1250}},
		{Name: "p99", Unit: "ms", Sluice: []float64{20, 2, 3}, Percentile: 99, Ceiling: []float64{10}},
		{Name: "memory", Unit: "MiB", Sluice: []float64{61.25, 61.25}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestNew(t *testing.T) {
	f := func(v float64) *float64 { return &v }
	want := Report{Name: "hooks", Machine: "a machine", Runs: 2, Results: []Result{
		{Case: "prolog on a ready node", Unit: "ms", Sluice: 10, Peer: f(5), PeerName: "empty Go program", Ratio: f(0.5)},
		{Case: "download 4 x 1 GiB", Unit: "MiB/s", Sluice: 1000, Peer: f(500), PeerName: "other", Ceiling: f(1250), Ratio: f(2), OfCeiling: f(0.8)},
		{Case: "p99", Unit: "ms", Sluice: 20, Ceiling: f(10), OfCeiling: f(0.5)},
		{Case: "memory", Unit: "MiB", Sluice: 61.25},
	}}
	if diff := cmp.Diff(want, report(t)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestNewRefuses(t *testing.T) {
	if _, err := New("x", "m", nil); err == nil {
		t.Error("no cases: got no error")
	}
	one := []float64{1}
	_, err := New("x", "m", []Case{
		{Name: "a", Unit: "ms"},
		{Name: "b", Unit: "ms", Sluice: []float64{0}},
		{Name: "c", Unit: "ms", Sluice: one, Peer: []float64{math.NaN()}, PeerName: "p"},
		{Name: "d", Unit: "ms", Sluice: one, Peer: one},
		{Name: "e", Unit: "ms", Sluice: one, PeerName: "p"},
		{Name: "f", Unit: "ms", Sluice: one, Ceiling: []float64{math.Inf(1)}},
		{Name: "g", Sluice: one},
		{Name: "h", Unit: "ms", Sluice: one, Percentile: 101},
	})
	for _, name := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		if err == nil || !strings.Contains(err.Error(), `case "`+name+`"`) {
			t.Errorf("case %q is not refused: %v", name, err)
		}
	}
}

func TestWrite(t *testing.T) {
	dir := filepath.Join(t.TempDir(), ".bench")
	if err := report(t).Write(dir); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "hooks.json"))
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Results []map[string]any
	}
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"case": "memory", "unit": "MiB", "sluice": 61.25, "peer": nil, "peer_name": "", "ceiling": nil, "ratio": nil, "of_ceiling": nil}
	if diff := cmp.Diff(want, got.Results[3]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, name := range []string{"", "../x", "a b", "Hooks"} {
		if err := (Report{Name: name}).Write(dir); err == nil {
			t.Errorf("name %q: got no error", name)
		}
	}
}

func TestPrint(t *testing.T) {
	var got bytes.Buffer
	if err := report(t).Print(&got); err != nil {
		t.Fatal(err)
	}
	want := `hooks: at least 2 runs a case on a machine
case                    sluice      peer                     ratio  ceiling     reached
prolog on a ready node  10.0 ms     5 ms (empty Go program)  0.50x  -           -
download 4 x 1 GiB      1000 MiB/s  500 MiB/s (other)        2x     1250 MiB/s  80 %
p99                     20.0 ms     -                        -      10.0 ms     50 %
memory                  61.2 MiB    -                        -      -           -
`
	if diff := cmp.Diff(want, got.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestMachine(t *testing.T) {
	const meminfo = "MemTotal:        8167940 kB\nMemFree:  1 kB\n"
	for _, test := range []struct{ cpuinfo, meminfo, kernel, want string }{
		{"processor\t: 0\nmodel name\t: AMD EPYC 7B13\n", meminfo, "Linux 6.1.0", "AMD EPYC 7B13, 2 cores, 7.8 GiB memory, Linux 6.1.0"},
		{"processor\t: 0\nBogoMIPS\t: 50\n", meminfo, "", "arm64, 2 cores, 7.8 GiB memory"},
		{"", "", "", "arm64, 2 cores"},
	} {
		if got := describe(test.cpuinfo, test.meminfo, test.kernel, "arm64", 2); got != test.want {
			t.Errorf("got %q, want %q", got, test.want)
		}
	}
	if got := Machine(); !strings.Contains(got, "cores") || strings.Contains(got, "\n") {
		t.Errorf("this machine is %q", got)
	}
}
