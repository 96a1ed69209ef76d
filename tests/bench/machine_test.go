package bench

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	got, err := parseStat("cpu  100 10 50 900 40 0 5 7 30 3\ncpu0 1 2 3 4 5 6 7 8\n")
	if want := (ticks{busy: 172, idle: 940}); err != nil || got != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	for _, text := range []string{"", "cpu0 1 2 3 4 5 6\n", "cpu 1 2 3\n", "cpu 1 2 x 4 5 6 7\n"} {
		if got, err := parseStat(text); err == nil {
			t.Errorf("%q: got %+v, want an error", text, got)
		}
	}
}

func TestBusy(t *testing.T) {
	if got, err := Busy(t.Context(), 20*time.Millisecond); err != nil || got < 0 || got > 1 {
		t.Errorf("got %g, %v; want a share", got, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := WaitIdle(ctx, io.Discard, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("after the context's end: %v", err)
	}
}
