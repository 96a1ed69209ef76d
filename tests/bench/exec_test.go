package bench

import (
	"context"
	"testing"
	"time"
)

func TestExecMedians(t *testing.T) {
	got, err := ExecMedians(t.Context(), 3, Program{Path: "/bin/true"}, Program{Path: "/bin/sh", Args: []string{"-c", `test "$A" = b`}, Env: []string{"A=b"}})
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0] <= 0 || got[1] <= 0 {
		t.Errorf("got %v, want two times", got)
	}
	if _, err := ExecMedians(t.Context(), 1, Program{Path: "/bin/false"}); err == nil {
		t.Error("a program that failed was measured")
	}
	if _, err := ExecMedians(t.Context(), 1, Program{Path: "/nowhere"}); err == nil {
		t.Error("a program that is not there was measured")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := ExecMedians(ctx, 1, Program{Path: "/bin/true"}); err == nil {
		t.Error("did not end with its context")
	}
}

func TestMedian(t *testing.T) {
	for want, in := range map[time.Duration][]time.Duration{0: nil, 5: {5}, 2: {3, 1, 2}, 3: {4, 1, 2, 9}} {
		if got := median(in); got != want {
			t.Errorf("%v: got %d, want %d", in, got, want)
		}
	}
}
