package hooks

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseMemory(t *testing.T) {
	const rollup = "00400000-7ffd3a668000 ---p 00000000 00:00 0   [rollup]\nRss:  63612 kB\nPss:  50000 kB\nPss_Dirty:   25048 kB\n"
	got, err := parseMemory(rollup + rollup + "end\n" + rollup + "end\n")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]float64{102.4, 51.2}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for name, text := range map[string]string{"no process": "end\n", "no number": "Pss: x kB\nend\n"} {
		if got, err := parseMemory(text); err == nil {
			t.Errorf("%s: got %v, want an error", name, got)
		}
	}
}
