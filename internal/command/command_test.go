package command_test

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/internal/command"
)

func TestRun(t *testing.T) {
	out, err := command.Run(t.Context(), command.Spec{Path: "/bin/sh", Args: []string{"-c", "echo out; echo err >&2"}})
	if err != nil || string(out) != "out\n" {
		t.Errorf("got %q, %v, want out", out, err)
	}
	_, err = command.Run(t.Context(), command.Spec{Path: "/bin/sh", Args: []string{"-c", "echo why >&2; exit 3"}})
	var ce *command.Error
	if !errors.As(err, &ce) || ce.Exit != 3 || ce.Stderr != "why\n" {
		t.Errorf("got %+v, want exit 3 with its words", err)
	}
	_, err = command.Run(t.Context(), command.Spec{Path: "/bin/sh", Args: []string{"-c", "echo 123456789"}, MaxOutput: 4})
	if err == nil {
		t.Error("too long an output is no error")
	}
}

func TestStdoutStreams(t *testing.T) {
	var b bytes.Buffer
	out, err := command.Run(t.Context(), command.Spec{Path: "/bin/sh", Args: []string{"-c", "echo 123456789"}, MaxOutput: 4, Stdout: &b})
	if err != nil || len(out) != 0 || b.String() != "123456789\n" {
		t.Errorf("got %q and %q, %v, want everything in the writer", out, b.String(), err)
	}
}

func TestContextEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	start := time.Now()
	_, err := command.Run(ctx, command.Spec{Path: "/bin/sh", Args: []string{"-c", "sleep 60 & sleep 60"}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want Canceled", err)
	}
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("Run took %v after its context ended", took)
	}
}
