package e2e_test

import (
	"fmt"
	"strings"
	"testing"
)

// The daemons run under what their units give up, and sluiced, which has a copy
// of the mount table, sees what is mounted later and no longer what is gone.
func TestHardenedUnits(t *testing.T) {
	for _, daemon := range []string{"sluiced", "sluice-agent"} {
		status := mustOnVM(t, "controller", "root", "", "sh", "-c", fmt.Sprintf("cat /proc/%s/status", pidOf(t, "controller", daemon)))
		for _, want := range []string{"NoNewPrivs:\t1\n", "Seccomp:\t2\n"} {
			if !strings.Contains(status, want) {
				t.Errorf("%s: its status lacks %q:\n%s", daemon, want, status)
			}
		}
		if strings.Contains(status, "CapBnd:\t000001ffffffffff\n") {
			t.Errorf("%s has every capability", daemon)
		}
	}
	pid := pidOf(t, "controller", "sluiced")
	seen := func() string {
		return strings.TrimSpace(mustOnVM(t, "controller", "root", "", "sh", "-c", fmt.Sprintf("grep -c ' /mnt ' /proc/%s/mountinfo || true", pid)))
	}
	mustOnVM(t, "controller", "root", "", "mount", "-t", "tmpfs", "tmpfs", "/mnt")
	if got := seen(); got != "1" {
		t.Errorf("sluiced sees %s mounts of what was mounted after its start, want 1", got)
	}
	mustOnVM(t, "controller", "root", "", "umount", "/mnt")
	if got := seen(); got != "0" {
		t.Errorf("sluiced still has %s of a mount that is gone", got)
	}
}
