// Command cmd runs the benchmarks of make bench in a sandbox of their own and
// writes a table and .bench/NAME.json for each.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehpc/sluice/internal/benchfile"
	"github.com/sluicehpc/sluice/tests/bench"
	"github.com/sluicehpc/sluice/tests/bench/hooks"
	"github.com/sluicehpc/sluice/tests/bench/start"
)

// benchmarks in the order in which they run.
var benchmarks = []bench.Benchmark{hooks.Benchmark, start.Benchmark}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if len(os.Args) == 2 && os.Args[1] == bench.ExecTimesCommand {
		err = bench.ServeExecTimes(ctx, os.Stdin, os.Stdout)
	} else {
		err = run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	}
	switch {
	case errors.Is(err, flag.ErrHelp):
	case errors.Is(err, errUsage):
		os.Exit(2)
	case errors.Is(err, context.Canceled):
		fmt.Fprintln(os.Stderr, "bench: interrupted")
		os.Exit(130)
	case err != nil:
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1)
	}
}

var errUsage = errors.New("usage") // the flag package has said why

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	runs := flags.Int("runs", 200, "`N` runs of each case in which a run is short, at least 20")
	list := flags.Bool("list", false, "list the benchmarks and end")
	wait := flags.Duration("wait", 30*time.Second, "wait so long for an idle machine")
	dir := flags.String("dir", ".bench", "write the reports into this directory")
	flags.Usage = func() {
		fmt.Fprintln(stderr, "usage: go run ./tests/bench/cmd [options] [BENCHMARK ...]      (in the repository, as root, after make build)")
		flags.PrintDefaults()
	}
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return err
	case err != nil:
		return errUsage
	}
	if *list {
		for _, b := range benchmarks {
			fmt.Fprintf(stdout, "%-8s %s\n", b.Name, b.About)
		}
		return nil
	}
	if *runs < 20 {
		return fmt.Errorf("--runs %d, want at least 20", *runs)
	}
	chosen, err := choose(flags.Args())
	if err != nil {
		return err
	}
	env, err := newEnv(*runs, stderr)
	if err != nil {
		return err
	}
	defer os.RemoveAll(env.Dir)
	for _, b := range chosen {
		if err := measure(ctx, b, env, *wait, *dir, stdout); err != nil {
			if ctx.Err() != nil {
				return context.Canceled
			}
			return fmt.Errorf("%s: %w", b.Name, err)
		}
	}
	return nil
}

func choose(names []string) ([]bench.Benchmark, error) {
	if len(names) == 0 {
		return benchmarks, nil
	}
	var chosen []bench.Benchmark
	for _, name := range names {
		i := slices.IndexFunc(benchmarks, func(b bench.Benchmark) bool { return b.Name == name })
		if i < 0 {
			var all []string
			for _, b := range benchmarks {
				all = append(all, b.Name)
			}
			return nil, fmt.Errorf("no benchmark %q; there are %s", name, strings.Join(all, ", "))
		}
		chosen = append(chosen, benchmarks[i])
	}
	return chosen, nil
}

func newEnv(runs int, log io.Writer) (bench.Env, error) {
	if os.Geteuid() != 0 {
		return bench.Env{}, errors.New("the sandbox needs root; run as root")
	}
	sluice, err := filepath.Abs("bin/sluice")
	if err == nil {
		_, err = os.Stat(sluice)
	}
	if err != nil {
		return bench.Env{}, fmt.Errorf("%w\n  run make build, in the repository's directory", err)
	}
	self, err := os.Executable()
	if err != nil {
		return bench.Env{}, err
	}
	dir, err := os.MkdirTemp("", "sluice-bench-")
	return bench.Env{Sluice: sluice, Self: self, Dir: dir, Runs: runs, Log: log}, err
}

// measure runs a benchmark and reports it. A missed target is no error: the
// report is there to be judged, on a machine that may be a slow one.
func measure(ctx context.Context, b bench.Benchmark, env bench.Env, wait time.Duration, dir string, stdout io.Writer) error {
	fmt.Fprintf(env.Log, "%s: %s\n", b.Name, b.About)
	before, err := bench.WaitIdle(ctx, env.Log, wait)
	if err != nil {
		return err
	}
	began := time.Now()
	outcome, err := b.Run(ctx, env)
	if err != nil {
		return err
	}
	took := time.Since(began)
	after, err := bench.WaitIdle(ctx, io.Discard, 0)
	if err != nil {
		return err
	}
	machine := benchfile.Machine()
	if busy := max(before, after); busy > bench.IdleShare {
		machine += fmt.Sprintf(", not idle (%.0f %% in use by others)", 100*busy)
	}
	report, err := benchfile.New(b.Name, machine, outcome.Cases)
	if err != nil {
		return err
	}
	if err := report.Write(dir); err != nil {
		return err
	}
	fmt.Fprintln(stdout)
	if err := report.Print(stdout); err != nil {
		return err
	}
	if len(outcome.Targets) > 0 {
		fmt.Fprintln(stdout)
		bench.Check(stdout, report, outcome.Targets)
	}
	fmt.Fprintf(stdout, "\n%s (%.0f s)\n", filepath.Join(dir, b.Name+".json"), took.Seconds())
	return nil
}
