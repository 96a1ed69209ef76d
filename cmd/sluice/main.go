// Command sluice is Sluice's command line for people.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/internal/diag"
	"github.com/sluicehpc/sluice/internal/version"
	"github.com/sluicehpc/sluice/lustre/probe"
)

// Exit codes, the same for every command.
const (
	exitFailed      = 1
	exitUsage       = 2
	exitPartly      = 3
	exitNotFound    = 4
	exitDenied      = 5
	exitUnreachable = 6
	exitInterrupted = 130
)

const exitCodesHelp = `Exit codes: 0 done, 1 failed, 2 bad usage or bad input, 3 partly done, 4 not found,
5 refused by policy, 6 the controller cannot be reached, 130 interrupted.`

func main() {
	if code, isChild := probe.Main(); isChild { // doctor's look at a mount
		os.Exit(code)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string) int {
	app := newApp()
	err := app.RunContext(ctx, reorder(app, completable(app, args)))
	if err == nil {
		return 0
	}
	code := exitCode(ctx, err)
	var coded *exitError
	switch said := errors.As(err, &coded) && coded.err == nil; {
	case code == exitInterrupted:
		fmt.Fprintln(app.ErrWriter, "sluice: interrupted")
	case !said:
		fmt.Fprintf(app.ErrWriter, "sluice: %s\n", plainLines(err.Error()))
	}
	return code
}

func newApp() *cli.App {
	app := &cli.App{
		Name:                   "sluice",
		Usage:                  "bring jobs' data onto Managed Lustre and back, on Slurm clusters",
		Version:                version.String(),
		HideHelpCommand:        true,
		EnableBashCompletion:   true,
		UseShortOptionHandling: true,
		Writer:                 os.Stdout,
		ErrWriter:              os.Stderr,
		Description:            exitCodesHelp,
		Commands: []*cli.Command{
			jobCommand(),
			transferCommand(),
			nodeCommand(),
			statusCommand(),
			doctorCommand(),
			sandboxCommand(),
			completionCommand(),
			versionCommand(),
		},
		OnUsageError: badUsage,
		// The error comes back from Run; nothing here ends the process.
		ExitErrHandler: func(*cli.Context, error) {},
	}
	app.Action = group("sluice", func() []*cli.Command { return app.Commands })
	finish("sluice", app.Commands)
	return app
}

// finish gives every command what all share: exit code 2 for a wrong flag or a
// subcommand that does not exist.
func finish(path string, commands []*cli.Command) {
	for _, c := range commands {
		path := path + " " + c.Name
		c.OnUsageError = badUsage
		c.HideHelpCommand = true
		if len(c.Subcommands) > 0 {
			c.Action = group(path, func() []*cli.Command { return c.Subcommands })
			finish(path, c.Subcommands)
		}
	}
}

func badUsage(c *cli.Context, err error, _ bool) error {
	return usagef("%w\n  see %s --help", err, strings.TrimSpace(c.Command.HelpName))
}

// group runs when none of a command's subcommands was named.
func group(path string, commands func() []*cli.Command) cli.ActionFunc {
	return func(c *cli.Context) error {
		if !c.Args().Present() {
			if len(c.Lineage()) > 2 {
				return cli.ShowSubcommandHelp(c)
			}
			return cli.ShowAppHelp(c)
		}
		name, hint := c.Args().First(), "see "+path+" --help"
		var names []string
		for _, sub := range commands() {
			if !sub.Hidden {
				names = append(names, sub.Name)
			}
		}
		if near := diag.Nearest(name, names); near != "" {
			hint = "did you mean " + path + " " + near + "?"
		}
		return usagef("%s has no command %q\n  %s", path, name, hint)
	}
}

// exitError carries an exit code; err is nil when all has been said already.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

func usageError(err error) error { return &exitError{code: exitUsage, err: err} }

func usagef(format string, args ...any) error { return usageError(fmt.Errorf(format, args...)) }

func exitCode(ctx context.Context, err error) int {
	var coded *exitError
	var child *exec.ExitError
	switch {
	case errors.As(err, &coded):
		return coded.code
	case ctx.Err() != nil:
		return exitInterrupted
	case errors.As(err, &child) && child.ExitCode() > 0:
		return child.ExitCode()
	case errors.Is(err, local.ErrUnreachable):
		return exitUnreachable
	}
	switch api.CodeOf(err) {
	case api.CodeBadRequest:
		return exitUsage
	case api.CodeNotFound:
		return exitNotFound
	case api.CodeDenied:
		return exitDenied
	case api.CodeUnavailable:
		return exitUnreachable
	}
	return exitFailed
}
