package agent

import (
	"context"
	"os"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/internal/retry"
)

// slurmdTimeout bounds one systemctl start; slurmd registers before it is over.
const slurmdTimeout = 2 * time.Minute

// slurmdFlag is the file without which our drop-in for slurmd.service keeps
// slurmd from starting, as when an image has it enabled at boot.
const slurmdFlag = "/run/sluice/slurmd-may-start"

// startSlurmd starts slurmd on a compute node once in a boot: after its key is
// there, users are kept from the metadata server and the mounts answer, and,
// unless sluiced is away, after it has heard so, because Slurm starts jobs as
// soon as slurmd registers.
func (a *Agent) startSlurmd(ctx context.Context) {
	if !a.identified.wait(ctx) || !a.ready.wait(ctx) {
		return
	}
	a.mu.Lock()
	wanted := a.state.Identity.Role == api.RoleCompute && !a.state.SlurmdStarted
	a.mu.Unlock()
	if !wanted || !a.pause(ctx, a.pace.grace, a.reported.c) {
		return
	}
	err := retry.Do(ctx, a.pace.slurmd, func(error) bool { return true }, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, slurmdTimeout)
		defer cancel()
		err := os.WriteFile(a.config.Root+slurmdFlag, nil, 0o644)
		if err == nil {
			err = a.systemctl(ctx, "start", "slurmd")
		}
		if err != nil {
			a.log.Error("start slurmd", "error", err)
		}
		return err
	})
	if err != nil {
		return // ctx ended
	}
	a.log.Info("slurmd started")
	a.mu.Lock()
	defer a.mu.Unlock()
	a.state.SlurmdStarted = true
	a.save()
}
