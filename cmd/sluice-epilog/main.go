// Command sluice-epilog is Slurm's Epilog on compute nodes; its exit code is always 0.
package main

import (
	"os"

	"github.com/sluicehpc/sluice/epilog"
	"github.com/sluicehpc/sluice/prolog"
)

func main() { os.Exit(prolog.Main("sluice-epilog", epilog.Run)) }
