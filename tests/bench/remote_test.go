package bench

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

func TestServeExecTimes(t *testing.T) {
	var out bytes.Buffer
	in := strings.NewReader(`{"runs": 3, "programs": [{"path": "/bin/true"}, {"path": "/bin/sh", "args": ["-c", "test \"$A\" = b"], "env": ["A=b"]}]}`)
	if err := ServeExecTimes(t.Context(), in, &out); err != nil {
		t.Fatal(err)
	}
	var got [][]time.Duration
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || len(got[0]) != 3 || len(got[1]) != 3 || got[0][0] <= 0 {
		t.Errorf("got %v, want three times of two programs", got)
	}
	if err := ServeExecTimes(t.Context(), strings.NewReader("no JSON"), &out); err == nil {
		t.Error("a measurement that is no JSON was run")
	}
}
