// Package hook is sluice-hook: what slurmctld runs in Sluice's name. A call
// asks sluiced over its socket and answers on standard output.
package hook

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/internal/retry"
	"github.com/sluicehpc/sluice/slurm/scontrol"
)

// Hook is one run of sluice-hook. New fills in what a real run uses.
type Hook struct {
	Socket string // of sluiced
	Stdout io.Writer
	Stderr io.Writer // slurmctld's standard error, or a log
	Stdin  io.Reader
	Getenv func(string) string
	Slurm  scontrol.Client
	Clock  clock.Clock
	// Detach starts this program again, in a session of its own, with these
	// arguments and input, and does not wait for it.
	Detach func(input []byte, args ...string) error
	// Limits in time; New sets the defaults.
	Limits Limits
}

// Limits are how long a call may take.
type Limits struct {
	// Blocking bounds the calls in which slurmctld stands still (50 ms).
	Blocking time.Duration
	// Answer bounds sluiced's answer to one call, beyond the time it was asked
	// to wait (15 s). A sluiced that accepts and never answers counts as away.
	Answer time.Duration
	// Poll is how long test_data_in and test_data_out wait in sluiced (8 s),
	// and Stage how long one call of a data_in that waits itself (60 s).
	Poll, Stage time.Duration
	// Away is how long sluiced may be away before the job says so (10 min).
	Away time.Duration
	// Event bounds pre_run and post_run (30 s): the job goes on without sluiced.
	Event time.Duration
	// Teardown bounds teardown (2 min); Slurm repeats it twice.
	Teardown time.Duration
	// Status bounds `scontrol show bbstat` (3 s).
	Status time.Duration
	// Power bounds the first attempt of resume and suspend (2 s), and Later the
	// attempts of the detached child (10 min).
	Power, Later time.Duration
	// Nodes bounds the wait for a job's nodes (30 min), Ask is the first pause
	// between two looks at them (0.3 s).
	Nodes, Ask time.Duration
}

// DefaultLimits are the limits of a real run.
var DefaultLimits = Limits{
	Blocking: 50 * time.Millisecond, Answer: 15 * time.Second, Poll: 8 * time.Second, Stage: time.Minute,
	Away: 10 * time.Minute, Event: 30 * time.Second, Teardown: 2 * time.Minute, Status: 3 * time.Second,
	Power: 2 * time.Second, Later: 10 * time.Minute, Nodes: 30 * time.Minute, Ask: 300 * time.Millisecond,
}

// New returns the Hook of a real run.
func New() *Hook {
	return &Hook{
		Socket: api.SluicedSocket, Stdout: os.Stdout, Stderr: os.Stderr, Stdin: os.Stdin,
		Getenv: os.Getenv, Clock: clock.System, Detach: detach, Limits: DefaultLimits,
	}
}

const usage = `usage: sluice-hook bb FUNCTION [--KEY=VALUE ...]
       sluice-hook resume|suspend|resume-fail NODES
       sluice-hook prolog-slurmctld
Slurm calls it; as sluice-resume, sluice-suspend, sluice-resume-fail and
sluice-prolog-slurmctld it needs no first argument.
`

// Run does what args ask for (args[0] is the program's name) and returns the
// exit code: 0, or 2 for a call that it does not understand.
func (h *Hook) Run(ctx context.Context, args []string) int {
	name, rest := "", []string(nil)
	if len(args) > 0 {
		name, rest = strings.TrimPrefix(filepath.Base(args[0]), "sluice-"), args[1:]
	}
	if name == "hook" && len(rest) > 0 {
		name, rest = rest[0], rest[1:]
	}
	var err error
	switch name {
	case "bb":
		err = h.burstBuffer(ctx, rest)
	case "resume":
		err = h.resume(ctx, rest)
	case "suspend":
		err = h.nodes(ctx, api.OpNodeSuspend, rest)
	case "resume-fail":
		err = h.nodes(ctx, api.OpNodeResumeFail, rest)
	case "later":
		err = h.later(ctx, rest)
	case "prolog-slurmctld":
		h.waitForNodes(ctx)
	default:
		err = errUsage
	}
	switch {
	case errors.Is(err, errUsage):
		fmt.Fprint(h.Stderr, usage)
		return 2
	case err != nil:
		h.logf("%s: %v", name, err)
	}
	return 0
}

var errUsage = errors.New("usage")

func (h *Hook) logf(format string, args ...any) {
	fmt.Fprintf(h.Stderr, "%s sluice-hook: %s\n", api.FormatTime(h.Clock.Now()), oneLine(fmt.Sprintf(format, args...)))
}

// call asks sluiced once, within limit.
func (h *Hook) call(ctx context.Context, limit time.Duration, op string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return local.Call(ctx, h.Socket, op, in, out)
}

// away reports whether err means that sluiced may answer later: it is not
// there, does not answer in time, or says so.
func away(err error) bool {
	return errors.Is(err, local.ErrUnreachable) || errors.Is(err, context.DeadlineExceeded) || api.CodeOf(err) == api.CodeUnavailable
}

// patiently asks sluiced until it answers or ctx ends. When it has been away
// for long, the job (unless 0) says so.
func (h *Hook) patiently(ctx context.Context, job uint32, limit time.Duration, op string, in, out any) error {
	var since time.Time
	told := false
	err := retry.Do(ctx, retry.Policy{First: 200 * time.Millisecond, Max: 2 * time.Second, Clock: h.Clock}, away, func(ctx context.Context) error {
		err := h.call(ctx, limit, op, in, out)
		if err == nil || !away(err) {
			return err
		}
		now := h.Clock.Now()
		if since.IsZero() {
			since = now
			h.logf("%s of job %d waits for sluiced: %v", op, job, err)
		}
		if !told && job != 0 && now.Sub(since) >= h.Limits.Away {
			told = true
			h.comment(ctx, job, "Sluice: the controller (sluiced) cannot be reached since "+since.UTC().Format(time.RFC3339)+"; the job waits for it")
		}
		return err
	})
	if told && (err == nil || !away(err)) {
		h.comment(ctx, job, "")
	}
	return err
}

func (h *Hook) comment(ctx context.Context, job uint32, text string) {
	if err := h.Slurm.SetJobComment(ctx, job, text); err != nil {
		h.logf("%v", err)
	}
}

// oneLine joins the lines of a message for the places where Slurm keeps one.
func oneLine(s string) string {
	var words []string
	for line := range strings.Lines(s) {
		line = strings.TrimLeft(strings.TrimRight(printable(line), "; \t\n"), " \t")
		if line != "" {
			words = append(words, line)
		}
	}
	return strings.Join(words, "; ")
}

// printable replaces control characters but the newline and the tab.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' && r != '\n' && r != '\t' || r >= 0x7f && r < 0xa0 {
			return '?'
		}
		return r
	}, s)
}
