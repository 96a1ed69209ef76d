// Command sluice-agent is the daemon on every VM: it mounts the file systems
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
	"github.com/sluicehpc/sluice/api"
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
	c.CertDir = c.Root + c.CertDir
	c.Version = version
	var role string
	var uidMin uint
	flag.StringVar(&role, "role", "", "controller, login or compute (default: metadata attribute "+agent.AttributeRole+")")
	flag.StringVar(&c.Controller, "controller", "", "`host:port` of sluiced (default: metadata attribute "+agent.AttributeController+"; on the controller itself, port 8443)")
	flag.StringVar(&c.Fingerprint, "fingerprint", "", "SHA-256 of sluiced's certificate in `hex` (default: metadata attribute "+agent.AttributeFingerprint+")")
	flag.StringVar(&c.Node, "node", "", "Slurm's `name` of this node (default: the instance's)")
	flag.StringVar(&c.Instance, "instance", "", "numeric instance `id` (default: from the metadata server)")
	flag.StringVar(&c.KeyFile, "slurm-key", c.KeyFile, "`file` with Slurm's key")
	flag.StringVar(&c.CertDir, "tls-dir", c.CertDir, "`directory` where sluiced keeps its certificate, on the controller")
	flag.StringVar(&c.SlurmUser, "slurm-user", c.SlurmUser, "SlurmUser, for whom no agent speaks")
	flag.UintVar(&uidMin, "uid-min", uint(c.UIDMin), "the first `uid` of a person")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "sluice-agent: unexpected argument %q\n", flag.Arg(0))
		os.Exit(2)
	}
	c.Role = api.Role(role)
	c.UIDMin = uint32(min(uidMin, uint(^uint32(0))))

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := agent.New(c, slog.New(slog.NewTextHandler(os.Stderr, nil))).Run(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "sluice-agent: %v\n", err)
		os.Exit(1)
	}
}
