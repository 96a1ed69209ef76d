package bench

import (
	"bytes"
	"strings"
	"testing"

	"github.com/sluicehpc/sluice/internal/benchfile"
)

func TestCheck(t *testing.T) {
	report, err := benchfile.New("x", "m", []benchfile.Case{
		{Name: "a", Unit: "ms", Sluice: []float64{3}, Peer: []float64{2}, PeerName: "an empty program"},
		{Name: "b", Unit: "MB", Sluice: []float64{101}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name   string
		target Target
		met    bool
		want   string
	}{
		{"kept", Target{Case: "a", Max: 3}, true, "met     a: 3 ms, at most 3 ms"},
		{"not kept", Target{Case: "b", Max: 100}, false, "MISSED  b: 101 MB, at most 100 MB"},
		{"ratio kept", Target{Case: "a", Ratio: 0.5}, true, "met     a: 3 ms takes 1.50 times what an empty program takes, at most 2 times"},
		{"ratio not kept", Target{Case: "a", Ratio: 0.8}, false, "MISSED  a: 3 ms takes 1.50"},
		{"no peer", Target{Case: "b", Ratio: 0.5}, false, "MISSED  b: no peer was measured"},
		{"no case", Target{Case: "c", Max: 1}, false, "MISSED  c: was not measured"},
	} {
		var out bytes.Buffer
		missed := Check(&out, report, []Target{test.target})
		if (missed == 0) != test.met || !strings.HasPrefix(out.String(), test.want) {
			t.Errorf("%s: got %d missed, %q; want %q", test.name, missed, out.String(), test.want)
		}
	}
}
