// Command sluice-guest is the small programs of the sandbox: inside its VMs PID 1, systemctl, mount.lustre and more, outside
// them the file server behind each Lustre mount.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/sluicehpc/sluice/sandbox/guest"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "lustrefs" {
		if err := lustrefs.Main(context.Background(), os.Args[2:], os.Stdin, os.Stdout); err != nil {
			fmt.Fprintf(os.Stderr, "lustrefs: %v\n", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(guest.Main(os.Args, os.Stdout, os.Stderr))
}
