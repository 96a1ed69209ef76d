// Command trainer trains a small byte-level language model on a directory of text, over all tasks of a Slurm job step.
//
//	srun trainer --data "$SLUICE_DATA_CORPUS" --out "$SLUICE_JOB_DIR/out"
//
// It is what the examples stage data in for: a real training whose loss falls, with weights in safetensors (a shard a
// rank, an index), metrics and, last of all, the marker _SUCCESS in --out. Without Slurm it runs as a single task.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/sluicehpc/sluice/examples/trainer/collective"
	"github.com/sluicehpc/sluice/examples/trainer/model"
	"github.com/sluicehpc/sluice/examples/trainer/train"
	"github.com/sluicehpc/sluice/internal/clock"
)

const usage = `usage: srun trainer --data DIR --out DIR [flags]

Trains a byte-level language model on all files below --data, over all tasks of the job step.
Run without srun it is a single task.

Exit codes: 0 done, 1 failed, 2 bad usage, 130 and 143 ended by SIGINT and SIGTERM.

`

// stopped is the cause of a run that a signal ended.
type stopped struct{ sig syscall.Signal }

func (s stopped) Error() string { return fmt.Sprintf("stopped by signal %v", s.sig) }

func main() {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() { cancel(stopped{(<-signals).(syscall.Signal)}) }()
	os.Exit(run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
}

// run is the whole command: it returns the exit code.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	o := train.Options{Progress: stdout, Clock: clock.System}
	flags := flag.NewFlagSet("trainer", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprint(stderr, usage)
		flags.PrintDefaults()
	}
	flags.StringVar(&o.Data, "data", "", "`directory` of the text to learn from")
	flags.StringVar(&o.Out, "out", "", "`directory` for the results, made if it is not there; one earlier result in it is replaced")
	flags.IntVar(&o.Steps, "steps", 300, "optimizer steps")
	flags.IntVar(&o.Batch, "batch", 16, fmt.Sprintf("windows of %d predicted bytes in a step, over all tasks together", train.Span))
	flags.Float64Var(&o.LearningRate, "lr", 0.01, "highest learning `rate`")
	flags.Uint64Var(&o.Seed, "seed", 1, "`seed` of the weights and of the order of the data")
	flags.IntVar(&o.LogEvery, "log-every", 10, "`steps` in a line of "+train.LogFile)
	byteContext := flags.Int("context", 8, "`bytes` that a prediction sees")
	embed := flags.Int("embed", 16, "`values` in the embedding of a byte")
	hidden := flags.Int("hidden", 96, "`units` of the hidden layer")
	port := flags.Int("port", 0, "TCP `port` of task 0; 0 takes a free one")
	timeout := flags.Duration("timeout", 2*time.Minute, "longest time that a task waits for the others")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return 0
	} else if err != nil {
		return 2
	}
	bad := func(format string, a ...any) int {
		fmt.Fprintf(stderr, "trainer: "+format+"\n", a...)
		return 2
	}
	switch {
	case flags.NArg() > 0:
		return bad("unexpected argument %q", flags.Arg(0))
	case o.Data == "" || o.Out == "":
		return bad("--data and --out are needed: see trainer --help")
	case *timeout <= 0 || *port < 0 || *port > 65535:
		return bad("--timeout %v and --port %d: want a time above 0 and a port from 0 to 65535", *timeout, *port)
	}
	o.Model = model.NewConfig(*byteContext, *embed, *hidden)
	umask := syscall.Umask(0)
	syscall.Umask(umask)
	o.Mode = 0o666 &^ fs.FileMode(umask)

	c, err := taskFromEnv(getenv, o.Out)
	if err != nil {
		return bad("%v", err)
	}
	c.Port, c.Timeout = *port, *timeout
	metrics, err := runRank(ctx, o, c)
	if err != nil {
		fmt.Fprintf(stderr, "trainer: rank %d on %s: %v\n", c.Rank, c.Node, err)
		var s stopped
		if errors.As(err, &s) {
			return 128 + int(s.sig)
		}
		return 1
	}
	if c.Rank == 0 {
		fmt.Fprintf(stdout, "loss %.3f -> %.3f in %d steps, %.1f s; results in %s\n", metrics.FirstLoss, metrics.LastLoss, metrics.Steps, metrics.Seconds, o.Out)
	}
	return 0
}

func runRank(ctx context.Context, o train.Options, c collective.Config) (m *train.Metrics, err error) {
	if c.Rank == 0 {
		if err := os.MkdirAll(o.Out, 0o777); err != nil {
			return nil, err
		}
	}
	g, err := collective.Join(ctx, c)
	if err != nil {
		return nil, err
	}
	// Failing after the ranks have joined, rather than before, lets the one that fails tell the others why.
	defer func() { g.Close(err) }()
	return train.Run(ctx, o, g)
}
