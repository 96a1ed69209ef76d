package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/sandbox"
	"github.com/sluicehpc/sluice/sandbox/cluster"
	"github.com/sluicehpc/sluice/sandbox/demo"
	"github.com/sluicehpc/sluice/sandbox/guest"
	"github.com/sluicehpc/sluice/sandbox/rootfs"
)

func sandboxCommand() *cli.Command {
	return &cli.Command{
		Name:  "sandbox",
		Usage: "a cloud and a Slurm cluster on this machine, to try and to test Sluice",
		Description: "Everything lives in namespaces of its own: nothing on this machine changes but one cache directory,\n" +
			"/var/cache/sluice (below SLUICE_ROOT when that is set). Needs root.",
		Subcommands: []*cli.Command{
			sandboxUp(), sandboxDown(), sandboxStatus(), sandboxExec(), sandboxDemo(), sandboxFault(), sandboxToken(), sandboxServe(), sandboxFollow(),
			workstationCommand("_create", createCluster), workstationCommand("_demo", runDemo),
		},
	}
}

func nameFlag() cli.Flag {
	return &cli.StringFlag{Name: "name", Value: sandbox.DefaultName, Usage: "which sandbox; several `NAME`s run side by side"}
}

func slurmFlag() cli.Flag {
	return &cli.StringFlag{Name: "slurm", Usage: "Slurm's version in the VMs, a `PREFIX` such as 24.11"}
}

func kernelFlag() cli.Flag {
	return &cli.StringFlag{Name: "kernel", Usage: "let the VMs' programs see the system calls of kernel `VERSION` only: 4.18 is Rocky 8's"}
}

// sandboxError says what to do about the errors that everyone meets.
func sandboxError(name string, err error) error {
	switch {
	case errors.Is(err, sandbox.ErrNotRunning):
		return &exitError{code: exitNotFound, err: err}
	case errors.Is(err, sandbox.ErrNoVM):
		return &exitError{code: exitNotFound, err: fmt.Errorf("%w\n  see sluice sandbox status --name %s", err, name)}
	case errors.Is(err, sandbox.ErrBadName), errors.Is(err, rootfs.ErrUnknownSlurm), errors.Is(err, guest.ErrUnknownKernel):
		return usageError(err)
	}
	return err
}

// sandboxServe is the outer process, which Up starts.
func sandboxServe() *cli.Command {
	return &cli.Command{Name: "_serve", Hidden: true, Action: func(*cli.Context) error { return sandbox.Serve() }}
}

// workstationCommand is a part of another command that runs inside a sandbox's
// network, through sluice sandbox exec.
func workstationCommand(name string, run func(c *cli.Context, name string) error) *cli.Command {
	return &cli.Command{
		Name: name, Hidden: true,
		Flags: []cli.Flag{
			nameFlag(), slurmFlag(), &cli.StringFlag{Name: "report"}, &cli.StringFlag{Name: "output"},
		},
		Action: func(c *cli.Context) error { return run(c, c.String("name")) },
	}
}

// onWorkstation runs this program again in the sandbox's network.
func onWorkstation(ctx context.Context, stdout, stderr io.Writer, name string, args ...string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, self, append([]string{"sandbox", "exec", "--name", name, "--", self, "sandbox"}, args...)...)
	// Ctrl-C at a terminal reaches the child too; a signal to this process alone must as well.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 15 * time.Second
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, stdout, stderr
	// If this process is killed the child must not stay behind. The signal comes
	// when the thread that started it ends, so the thread is kept.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		var xe *exec.ExitError
		if errors.As(err, &xe) && xe.ExitCode() > 0 {
			return &exitError{code: xe.ExitCode()} // it has said why
		}
		return err
	}
	return nil
}

func sandboxUp() *cli.Command {
	return &cli.Command{
		Name:  "up",
		Usage: "start the sandbox: Google's APIs, a controller and a login VM with Slurm",
		Flags: []cli.Flag{
			nameFlag(), slurmFlag(), kernelFlag(), jsonFlag(),
			&cli.IntFlag{Name: "owner", Usage: "end the sandbox when the process `PID` has ended"},
			&cli.PathFlag{Name: "check-apis", Hidden: true, Usage: "hold all traffic against the descriptions in `DIR`, the Go module google.golang.org/api"},
		},
		Action: func(c *cli.Context) error {
			if err := noArgs(c); err != nil {
				return err
			}
			status, err := up(c.Context, c.App.ErrWriter, c.Int("owner"), sandbox.Options{
				Name: c.String("name"), Slurm: c.String("slurm"), Kernel: c.String("kernel"), CheckAPIs: c.Path("check-apis"),
			})
			if err != nil {
				return err
			}
			if c.Bool("json") {
				return printJSON(c.App.Writer, status)
			}
			return printStatus(c.App.Writer, status)
		},
	}
}

// up starts the sandbox and builds the cluster in it; after an error nothing of it is left.
// When owner is not 0 the sandbox ends with that process, even if that is killed.
func up(ctx context.Context, log io.Writer, owner int, o sandbox.Options) (*sandbox.Status, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	name := o.Name
	o.ImageFamily, o.Log = cluster.ImageFamily, log
	o.WriteImage = func(dir string) error { return cluster.WriteImage(dir, filepath.Dir(self)) }
	status, err := sandbox.Up(ctx, o)
	if err != nil {
		return nil, sandboxError(name, err)
	}
	if owner != 0 {
		if err := follow(self, name, owner); err != nil {
			return nil, errors.Join(err, sandbox.Down(context.WithoutCancel(ctx), name))
		}
	}
	if err := onWorkstation(ctx, log, log, name, "_create", "--name", name, "--slurm", status.Slurm); err != nil {
		return nil, errors.Join(err, sandbox.Down(context.WithoutCancel(ctx), name))
	}
	return sandbox.GetStatus(ctx, name)
}

// follow starts the process that ends the sandbox after its owner.
func follow(self, name string, owner int) error {
	cmd := exec.Command(self, "sandbox", "_follow", "--name", name, "--owner", strconv.Itoa(owner))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Dir = "/"
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("follow process %d: %w", owner, err)
	}
	return cmd.Process.Release()
}

func sandboxFollow() *cli.Command {
	return &cli.Command{
		Name: "_follow", Hidden: true,
		Flags:  []cli.Flag{nameFlag(), &cli.IntFlag{Name: "owner"}},
		Action: func(c *cli.Context) error { return sandbox.DownAfter(c.Context, c.String("name"), c.Int("owner")) },
	}
}

func createCluster(c *cli.Context, name string) error {
	return cluster.Create(c.Context, cluster.Options{
		Endpoints: gcp.EndpointsFromEnv(), Slurm: c.String("slurm"), Log: c.App.Writer,
		OnVM: func(ctx context.Context, vm string, args ...string) ([]byte, error) {
			self, err := os.Executable()
			if err != nil {
				return nil, err
			}
			out, err := exec.CommandContext(ctx, self, append([]string{"sandbox", "exec", "--name", name, "--vm", vm, "--"}, args...)...).Output()
			var xe *exec.ExitError
			if errors.As(err, &xe) {
				err = fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(xe.Stderr)))
			}
			return out, err
		},
	})
}

func sandboxDown() *cli.Command {
	return &cli.Command{
		Name:  "down",
		Usage: "end the sandbox and remove its data",
		Flags: []cli.Flag{nameFlag(), &cli.BoolFlag{Name: "all", Usage: "every sandbox of this machine"}},
		Action: func(c *cli.Context) error {
			if err := noArgs(c); err != nil {
				return err
			}
			names := []string{c.String("name")}
			if c.Bool("all") {
				if c.IsSet("name") {
					return usagef("--all and --name exclude each other")
				}
				var err error
				if names, err = sandbox.Names(); err != nil {
					return err
				}
			}
			var errs []error
			for _, name := range names {
				// A Ctrl-C must not leave half of it: what was begun is finished.
				err := sandbox.Down(context.WithoutCancel(c.Context), name)
				if errors.Is(err, sandbox.ErrNotRunning) {
					fmt.Fprintf(c.App.ErrWriter, "sandbox %s does not run\n", name)
					continue
				}
				if err == nil {
					fmt.Fprintf(c.App.ErrWriter, "sandbox %s ended, its data removed\n", name)
				}
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		},
	}
}

func sandboxStatus() *cli.Command {
	return &cli.Command{
		Name:  "status",
		Usage: "show the sandbox's VMs and endpoints",
		Flags: []cli.Flag{nameFlag(), jsonFlag()},
		Action: func(c *cli.Context) error {
			if err := noArgs(c); err != nil {
				return err
			}
			status, err := sandbox.GetStatus(c.Context, c.String("name"))
			if err != nil {
				return sandboxError(c.String("name"), err)
			}
			if c.Bool("json") {
				return printJSON(c.App.Writer, status)
			}
			return printStatus(c.App.Writer, status)
		},
	}
}

func printStatus(w io.Writer, s *sandbox.Status) error {
	fmt.Fprintf(w, "sandbox %s, Slurm %s, outer process %d\n\n", s.Name, s.Slurm, s.Pid)
	rows := [][]string{{"VM", "ADDRESS", "STATE"}}
	for _, vm := range s.VMs {
		rows = append(rows, []string{vm.Name, vm.Address, vm.State})
	}
	if err := table(w, rows...); err != nil {
		return err
	}
	fmt.Fprintln(w)
	return table(w,
		[]string{"SERVICE", "INSIDE (sluice sandbox exec)", "ON THIS HOST"},
		[]string{"compute", s.Endpoints.Compute, s.HostEndpoints.Compute},
		[]string{"lustre", s.Endpoints.Lustre, s.HostEndpoints.Lustre},
		[]string{"storage", s.Endpoints.Storage, s.HostEndpoints.Storage},
		[]string{"iam", s.Endpoints.IAM, s.HostEndpoints.IAM})
}

func sandboxExec() *cli.Command {
	return &cli.Command{
		Name:      "exec",
		Usage:     "run a command in the sandbox",
		ArgsUsage: "[--] CMD [ARG…]",
		Description: "Without --vm: as on an admin's workstation, in the sandbox's network, in this directory, with the endpoints\n" +
			"(SLUICE_ENDPOINT_*) and, for Google's client libraries, credentials (GCE_METADATA_HOST) in the environment. With --vm: on a VM, as root or as --user, in that user's home.\n" +
			"The exit code is CMD's.",
		Flags: []cli.Flag{
			nameFlag(),
			&cli.StringFlag{Name: "vm", Usage: "run it on the `VM`: controller, login, or a node"},
			&cli.StringFlag{Name: "user", Usage: "the `USER` on the VM (default root)"},
		},
		Action: func(c *cli.Context) error {
			if !c.Args().Present() {
				return usagef("a command is missing: sluice sandbox exec --vm login --user alice -- bash")
			}
			if c.String("user") != "" && c.String("vm") == "" {
				return usagef("--user needs --vm: the workstation is this machine, where you are who you are")
			}
			name := c.String("name")
			code, err := sandbox.Exec(c.Context, name, sandbox.ExecOptions{VM: c.String("vm"), User: c.String("user"), Args: c.Args().Slice()})
			if errors.Is(err, exec.ErrNotFound) {
				return &exitError{code: 127, err: err} // as a shell says it
			}
			if err != nil {
				return sandboxError(name, err)
			}
			if code != 0 {
				return &exitError{code: code}
			}
			return nil
		},
	}
}

func sandboxDemo() *cli.Command {
	return &cli.Command{
		Name:  "demo",
		Usage: "run a training job live: stage in, two nodes, train, stage out",
		Description: "Starts a sandbox, uploads a text corpus to a bucket, submits a two-node training job with sbatch as an ordinary\n" +
			"user, follows it, and downloads its output from the bucket. Where a Slurm cannot be had on a day (26.05 is that of\n" +
			"Debian sid), the last line is NOT RUN and the report says why.",
		Flags: []cli.Flag{
			nameFlag(), slurmFlag(), kernelFlag(),
			&cli.PathFlag{Name: "report", Value: ".sandbox/demo/report.json", Usage: "write what happened to `FILE` as JSON; the job's output goes to output/ beside it"},
			&cli.BoolFlag{Name: "keep", Usage: "leave the sandbox up"},
		},
		Action: func(c *cli.Context) (err error) {
			if err := noArgs(c); err != nil {
				return err
			}
			name, ctx, w := c.String("name"), c.Context, c.App.Writer
			report, err := filepath.Abs(c.Path("report"))
			if err != nil {
				return err
			}
			if os.Geteuid() != 0 {
				return errors.New("the sandbox needs root: namespaces and mounts are root's\n  run it with sudo")
			}
			began := time.Now()
			fmt.Fprintln(w, "starting the sandbox: Google's APIs, a controller and a login VM with real Slurm")
			owner := os.Getpid()
			if c.Bool("keep") {
				owner = 0
			}
			_, err = up(ctx, c.App.ErrWriter, owner, sandbox.Options{Name: name, Slurm: c.String("slurm"), Kernel: c.String("kernel")})
			if errors.Is(err, rootfs.ErrUnavailable) {
				if werr := demo.WriteNotRun(report, err.Error()); werr != nil {
					return errors.Join(err, werr)
				}
				fmt.Fprintf(w, "%v\nNOT RUN\n", err)
				return nil
			}
			if err != nil {
				return err
			}
			fmt.Fprintf(w, "sandbox %s is up after %.1f s\n", name, time.Since(began).Seconds())
			keep := false
			defer func() {
				if !keep {
					err = errors.Join(err, sandbox.Down(context.WithoutCancel(ctx), name))
				}
			}()
			if err := onWorkstation(ctx, w, c.App.ErrWriter, name, "_demo", "--name", name, "--report", report,
				"--output", filepath.Join(filepath.Dir(report), "output")); err != nil {
				return err
			}
			if keep = c.Bool("keep"); keep {
				status, err := sandbox.GetStatus(ctx, name)
				if err != nil {
					return err
				}
				fmt.Fprintf(w, "\nThe sandbox is still up (sluice sandbox down --name %s ends it):\n\n", name)
				return printStatus(w, status)
			}
			return nil
		},
	}
}

func runDemo(c *cli.Context, name string) error {
	return demo.Run(c.Context, demo.Options{
		Sandbox: name, Endpoints: gcp.EndpointsFromEnv(), Report: c.String("report"), Output: c.String("output"),
		Out: os.Stdout, Terminal: isTerminal(os.Stdout),
	})
}
