// Command sluice-agent is the daemon on every VM: it enrols the VM, mounts the file systems
// that sluiced names, answers the node's hooks and vouches for local users.
// Exit codes: 0 when it was told to stop, 1 failed, 2 bad usage.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/sluicehpc/sluice/agent"
	"github.com/sluicehpc/sluice/lustre/probe"
)

// version is set by the linker.
var version = "devel"

func main() {
	if code, isChild := probe.Main(); isChild {
		os.Exit(code)
	}
	c := agent.Defaults
	c.Root = os.Getenv("SLUICE_ROOT")
	c.TLSDir = c.Root + c.TLSDir
	c.Version = version
	var uidMin uint
	flag.StringVar(&c.Controller, "controller", "", "`host:port` of sluiced (default: metadata attribute "+agent.AttributeController+"; on the controller itself, port 8443)")
	flag.StringVar(&c.Fingerprint, "fingerprint", "", "SHA-256 of sluiced's certificate authority in `hex` (default: metadata attribute "+agent.AttributeFingerprint+")")
	flag.StringVar(&c.TLSDir, "tls-dir", c.TLSDir, "`directory` where sluiced keeps its certificate authority, on the controller")
	flag.StringVar(&c.SlurmUser, "slurm-user", c.SlurmUser, "SlurmUser, for whom no agent speaks")
	flag.UintVar(&uidMin, "uid-min", uint(c.UIDMin), "the first `uid` of a person")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "sluice-agent: unexpected argument %q\n", flag.Arg(0))
		os.Exit(2)
	}
	c.UIDMin = uint32(min(uidMin, uint(^uint32(0))))

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := agent.New(c, slog.New(slog.NewTextHandler(os.Stderr, nil))).Run(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "sluice-agent: %v\n", err)
		os.Exit(1)
	}
}
