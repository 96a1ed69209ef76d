// Command sluice-guest runs inside the sandbox's VMs, as PID 1, systemctl, mount.lustre and more.
package main

import (
	"os"

	"github.com/sluicehpc/sluice/sandbox/guest"
)

func main() { os.Exit(guest.Main(os.Args, os.Stdout, os.Stderr)) }
