package hook

import (
	"context"
	"os"
	"testing"
	"time"
)

// TestMain lets the test binary be sluice-hook itself, on the socket that the
// environment names, so that burst_buffer.lua can be run against the real thing.
func TestMain(m *testing.M) {
	if socket := os.Getenv("SLUICE_TEST_HOOK_SOCKET"); socket != "" {
		h := New()
		h.Socket = socket
		h.Limits.Poll = 100 * time.Millisecond
		h.Limits.Blocking = time.Minute // this machine may be slow
		args := append([]string{"sluice-hook"}, os.Args[1:]...)
		os.Exit(h.Run(context.Background(), args))
	}
	os.Exit(m.Run())
}
