// Command sluice is Sluice's command line for people.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/internal/version"
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
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string) int {
	app := newApp()
	err := app.RunContext(ctx, reorder(app, args))
	if err == nil {
		return 0
	}
	var coded *exitError
	if !errors.As(err, &coded) || coded.err != nil {
		fmt.Fprintf(app.ErrWriter, "sluice: %v\n", err)
	}
	return exitCode(ctx, err)
}

func newApp() *cli.App {
	return &cli.App{
		Name:                   "sluice",
		Usage:                  "stage, checkpoint and serve on Slurm clusters with Managed Lustre",
		Version:                version.String(),
		HideVersion:            true,
		EnableBashCompletion:   true,
		UseShortOptionHandling: true,
		Suggest:                true,
		Writer:                 os.Stdout,
		ErrWriter:              os.Stderr,
		Description:            exitCodesHelp,
		Commands: []*cli.Command{
			jobCommand(),
			transferCommand(),
			nodeCommand(),
			statusCommand(),
			sandboxCommand(),
			completionCommand(),
			versionCommand(),
		},
		OnUsageError: func(_ *cli.Context, err error, _ bool) error { return usageError(err) },
		// The error comes back from Run; nothing here ends the process.
		ExitErrHandler: func(*cli.Context, error) {},
		CommandNotFound: func(c *cli.Context, name string) {
			fmt.Fprintf(c.App.ErrWriter, "sluice: no command %q; see sluice --help\n", name)
		},
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
