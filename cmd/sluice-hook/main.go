// Command sluice-hook is what slurmctld runs: the burst-buffer functions,
// ResumeProgram, SuspendProgram, ResumeFailProgram and PrologSlurmctld.
package main

import (
	"context"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/sluicehpc/sluice/internal/command"
	"github.com/sluicehpc/sluice/slurm/hook"
)

func main() {
	if os.Getenv("PATH") == "" { // Slurm's power programs get none
		name, value, _ := strings.Cut(command.DefaultPath, "=")
		os.Setenv(name, value)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := hook.New().Run(ctx, os.Args)
	stop()
	os.Exit(code)
}
