// Command sluiced is the daemon on the controller VM: it stages jobs' data, runs
// the nodes' VMs and answers Slurm's hooks, agents and people. Exit codes: 0
// when it was told to stop, 1 failed, 2 bad usage or bad configuration.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/controller/setup"
	"github.com/sluicehpc/sluice/internal/diag"
	"github.com/sluicehpc/sluice/internal/version"
	"github.com/sluicehpc/sluice/lustre/probe"
	"github.com/sluicehpc/sluice/staging/files"
)

func main() {
	if code, isChild := probe.Main(); isChild {
		os.Exit(code)
	}
	if len(os.Args) > 1 && os.Args[1] == "fs" {
		os.Exit(files.Main(os.Args[2:], os.Stdin, os.Stdout, os.Stderr))
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := app().RunContext(ctx, os.Args)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "sluiced: %v\n", err)
		var list diag.List
		var usage usageError
		if errors.As(err, &list) || errors.As(err, &usage) {
			os.Exit(2)
		}
		os.Exit(1)
	}
}

// usageError is a command line that was not understood.
type usageError struct{ error }

func app() *cli.App {
	configFlag := &cli.StringFlag{Name: "config", Value: config.DefaultPath, Usage: "sluice.yaml", EnvVars: []string{"SLUICE_CONFIG"}}
	noArgs := func(c *cli.Context) error {
		if c.Args().Present() {
			return usageError{fmt.Errorf("unexpected argument %q; see sluiced --help", c.Args().First())}
		}
		return nil
	}
	badUsage := func(_ *cli.Context, err error, _ bool) error { return usageError{err} }
	commands := []*cli.Command{
		{
			Name: "check-config", Usage: "find every error in sluice.yaml", Flags: []cli.Flag{configFlag}, Before: noArgs,
			Action: func(c *cli.Context) error {
				cfg, err := config.Load(c.String("config"))
				if err != nil {
					return err
				}
				fmt.Printf("%s: cluster %s is described without an error\n", c.String("config"), cfg.Cluster)
				return nil
			},
		},
		{
			Name: "slurm-config", Usage: "render Slurm's files from sluice.yaml", Before: noArgs,
			Flags: []cli.Flag{configFlag, &cli.StringFlag{Name: "out", Value: "/etc/slurm", Usage: "directory for the files"}},
			Action: func(c *cli.Context) error {
				cfg, err := config.Load(c.String("config"))
				if err != nil {
					return err
				}
				return cfg.WriteSlurm(c.Context, c.String("out"))
			},
		},
		{
			Name: "setup", Usage: "make this fresh VM the controller", Before: noArgs,
			Flags: []cli.Flag{configFlag, &cli.StringFlag{Name: "out", Value: "/etc/slurm", Usage: "directory for Slurm's files"}},
			Action: func(c *cli.Context) error {
				return setup.Run(c.Context, setup.Options{
					ConfigPath: c.String("config"), SlurmDir: c.String("out"), Log: os.Stdout,
					Render: func(cfg *config.Config, dir string) error { return cfg.WriteSlurm(c.Context, dir) },
				})
			},
		},
	}
	for _, cmd := range commands {
		cmd.OnUsageError = badUsage
	}
	return &cli.App{
		Name:            "sluiced",
		Usage:           "Sluice's daemon on the controller VM",
		Version:         version.String(),
		HideHelpCommand: true,
		Flags:           []cli.Flag{configFlag},
		Commands:        commands,
		OnUsageError:    badUsage,
		ExitErrHandler:  func(*cli.Context, error) {},
		CustomAppHelpTemplate: cli.AppHelpTemplate + `
EXIT CODES:
   0 told to stop   1 failed   2 bad usage or bad configuration
`,
		Action: func(c *cli.Context) error {
			if err := noArgs(c); err != nil {
				return err
			}
			return serve(c.Context, c.String("config"))
		},
	}
}
