// Command sluice-prolog is Slurm's Prolog on compute nodes: exit code 0 lets
// the job start, 1 drains the node and requeues the job.
package main

import (
	"os"

	"github.com/sluicehpc/sluice/lustre/probe"
	"github.com/sluicehpc/sluice/prolog"
)

func main() {
	if code, isChild := probe.Main(); isChild {
		os.Exit(code)
	}
	os.Exit(prolog.Main("sluice-prolog", prolog.Run))
}
