// Package hooks measures what Slurm waits for: the Prolog of a ready node and
// the burst-buffer functions in which slurmctld stands still. The times of the
// latter are slurmctld's own, from its log.
package hooks

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/internal/benchfile"
	"github.com/sluicehpc/sluice/tests/bench"
)

// Benchmark is make bench's "hooks".
var Benchmark = bench.Benchmark{
	Name: "hooks", About: "the Prolog, the functions that block slurmctld, sluiced's memory", Run: run,
}

const (
	user = "alice"
	node = "n1"
	// settle is how long sluiced is left alone before its memory is taken.
	settle = 30 * time.Second
	// chains is how many jobs run at a time: with more, two cores that play five
	// machines keep slurmctld waiting for a processor.
	chains = 4
	// programs of ours, on the VMs.
	emptyPath  = "/usr/local/libexec/sluice/bench-empty"
	driverPath = "/usr/local/libexec/sluice/bench-driver"
	prologPath = "/usr/local/libexec/sluice/sluice-prolog"
)

// The limits of the project, in ms and MB.
const (
	maxHookMS   = 20
	maxMemoryMB = 100
	prologRatio = 0.5 // of an empty program's speed
)

// world is a sandbox under measurement.
type world struct {
	bench.Env
	*bench.Sandbox
	empty string // this machine's path of the empty program
	out   bench.Outcome
}

func run(ctx context.Context, e bench.Env) (out bench.Outcome, err error) {
	w := &world{Env: e, empty: filepath.Join(e.Dir, "empty")}
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", w.empty, "./tests/bench/empty")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := build.CombinedOutput(); err != nil {
		return out, fmt.Errorf("build the empty program: %w\n%s", err, text)
	}
	e.Step("starting the sandbox")
	if w.Sandbox, err = bench.Up(ctx, e); err != nil {
		return out, err
	}
	defer func() {
		if downErr := w.Down(ctx); err == nil {
			err = downErr
		}
	}()
	// pools comes before any node is up, because its measurement restarts
	// what runs on nodes.
	for _, part := range []func(context.Context) error{w.prepare, w.rest, w.pools, w.jobProcess, w.prolog, w.paths, w.afterJobs} {
		if err := part(ctx); err != nil {
			return out, err
		}
	}
	return w.out, nil
}

func (w *world) add(c benchfile.Case) { w.out.Cases = append(w.out.Cases, c) }

func (w *world) target(t bench.Target) { w.out.Targets = append(w.out.Targets, t) }

// addBoth adds the case's median and its 99th percentile, which is at most limit ms (0: no limit).
func (w *world) addBoth(name string, times, peer []time.Duration, peerName string, limit float64) {
	c := benchfile.Case{Name: name, Unit: "ms", Sluice: bench.Milliseconds(times), Peer: bench.Milliseconds(peer), PeerName: peerName}
	w.add(c)
	c.Name, c.Percentile = name+", 99th percentile", 99
	w.add(c)
	if limit > 0 {
		w.target(bench.Target{Case: c.Name, Max: limit})
	}
}

const jobScript = `#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --output=/dev/null
#SLUICE stage_in source=gs://research-bench/one/ name=data
true
`

const plainScript = `#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --output=/dev/null
true
`

// prepare makes what the jobs need and has slurmctld write its times.
func (w *world) prepare(ctx context.Context) error {
	if err := w.Put(ctx, "research-bench", "one/object.txt", "one tiny object\n"); err != nil {
		return err
	}
	for name, text := range map[string]string{"bb.sh": jobScript, "plain.sh": plainScript} {
		if _, err := w.As(ctx, "login", user, strings.NewReader(text), "sh", "-c", `cat >"$1"`, "sh", name); err != nil {
			return err
		}
	}
	if err := w.Install(ctx, "controller", w.empty, emptyPath); err != nil {
		return err
	}
	_, err := w.On(ctx, "controller", "sh", "-c", `printf 'DebugFlags=BurstBuffer\nSlurmctldDebug=verbose\n' >>/etc/slurm/slurm.conf && scontrol reconfigure`)
	return err
}

const logFile = "/var/log/slurm/slurmctld.log"

// timings runs part and returns what slurmctld wrote meanwhile.
func (w *world) timings(ctx context.Context, part func() error) ([]timing, error) {
	size, err := w.On(ctx, "controller", "stat", "--format=%s", logFile)
	if err != nil {
		return nil, err
	}
	from, err := strconv.ParseInt(strings.TrimSpace(size), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("size of slurmctld's log: %w", err)
	}
	if err := part(); err != nil {
		return nil, err
	}
	log, err := w.On(ctx, "controller", "tail", fmt.Sprintf("--bytes=+%d", from+1), logFile)
	if err != nil {
		return nil, err
	}
	return parseLog(log), nil
}

// rest measures sluiced with the cluster up and nothing to do.
func (w *world) rest(ctx context.Context) error {
	w.Step("sluiced at rest: its memory, after %v", settle)
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(settle):
	}
	return w.memory(ctx, "sluiced at rest, 30 s after its start: memory")
}

// afterJobs is rest after all the jobs of this benchmark.
func (w *world) afterJobs(ctx context.Context) error {
	w.Step("sluiced after the jobs: its memory")
	return w.memory(ctx, fmt.Sprintf("sluiced after %d jobs: memory", w.Runs))
}

func (w *world) memory(ctx context.Context, name string) error {
	text, err := w.On(ctx, "controller", "sh", "-c", memoryScript, "sh", "sluiced", strconv.Itoa(memorySamples))
	if err != nil {
		return err
	}
	values, err := parseMemory(text)
	if err != nil {
		return err
	}
	w.add(benchfile.Case{Name: name, Unit: "MB", Sluice: values})
	w.target(bench.Target{Case: name, Max: maxMemoryMB})
	return nil
}

// pools: slurmctld calls it when it starts and then every 30 s. A
// reconfiguration starts a new slurmctld (Slurm 23.11 and newer).
func (w *world) pools(ctx context.Context) error {
	w.Step("pools: %d reconfigurations of slurmctld", w.Runs)
	all, err := w.timings(ctx, func() error {
		_, err := w.On(ctx, "controller", "sh", "-c", `i=0; while [ $i -lt "$1" ]; do scontrol reconfigure || exit 1; i=$((i + 1)); done`, "sh", strconv.Itoa(w.Runs))
		return err
	})
	if err != nil {
		return err
	}
	times := only(all, "slurm_bb_pools", nil)
	if len(times) < w.Runs {
		return fmt.Errorf("slurmctld logged %d calls of pools in %d reconfigurations", len(times), w.Runs)
	}
	w.addBoth("slurm_bb_pools, as slurmctld sees it", times, nil, "", maxHookMS)
	return nil
}

// submitScript submits $1 times in turns each script that follows, held so that
// nothing but job_process runs, and prints "SCRIPT ID" lines.
const submitScript = `n=$1; shift
i=0
while [ $i -lt "$n" ]; do
  for script in "$@"; do
    id=$(sbatch --parsable --hold "$script") || exit 1
    echo "$script $id"
  done
  i=$((i + 1))
done`

// jobProcess measures sbatch's way through slurmctld: with a directive, without,
// and with a burst_buffer.lua that differs in the program that it starts.
func (w *world) jobProcess(ctx context.Context) error {
	w.Step("job_process: %d submissions with a directive, as many without, and with an empty program", w.Runs)
	const rounds = 10
	jobs := map[string]map[uint32]bool{"bb.sh": {}, "plain.sh": {}, "empty": {}}
	submitSome := func(as string, scripts ...string) error {
		each := (w.Runs + rounds - 1) / rounds
		out, err := w.As(ctx, "login", user, nil, append([]string{"sh", "-c", submitScript, "sh", strconv.Itoa(each)}, scripts...)...)
		if err != nil {
			return err
		}
		for line := range strings.Lines(out) {
			script, id, _ := strings.Cut(strings.TrimSpace(line), " ")
			if as != "" {
				script = as
			}
			n, err := strconv.ParseUint(id, 10, 32)
			if err != nil || jobs[script] == nil {
				return fmt.Errorf("sbatch --parsable printed %q", line)
			}
			jobs[script][uint32(n)] = true
		}
		return nil
	}
	const lua = "/etc/slurm/burst_buffer.lua"
	// Slurm loads the file at each call.
	swap := func(script string) error { _, err := w.On(ctx, "controller", "sh", "-c", script); return err }
	if err := swap(fmt.Sprintf(`cp -p %[1]s %[1]s.sluice && sed 's|^local hook = .*|local hook = "%[2]s"|' %[1]s >%[1]s.empty && ! cmp -s %[1]s %[1]s.empty`, lua, emptyPath)); err != nil {
		return err
	}
	all, err := w.timings(ctx, func() error {
		for range rounds {
			if err := submitSome("", "bb.sh", "plain.sh"); err != nil {
				return err
			}
			if err := swap(fmt.Sprintf("cp %[1]s.empty %[1]s.new && mv %[1]s.new %[1]s", lua)); err != nil {
				return err
			}
			if err := submitSome("empty", "bb.sh"); err != nil {
				return err
			}
			if err := swap(fmt.Sprintf("cp -p %[1]s.sluice %[1]s.new && mv %[1]s.new %[1]s", lua)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	const function = "slurm_bb_job_process"
	times, peer := only(all, function, jobs["bb.sh"]), only(all, function, jobs["empty"])
	with, without := only(all, submit, jobs["bb.sh"]), only(all, submit, jobs["plain.sh"])
	for name, got := range map[string]int{"job_process": len(times), "job_process with an empty program": len(peer), "submit with": len(with), "submit without": len(without)} {
		if got < w.Runs {
			return fmt.Errorf("%s: slurmctld logged %d calls, %d were made", name, got, w.Runs)
		}
	}
	w.addBoth("slurm_bb_job_process, as slurmctld sees it", times, peer, "the same Lua starting an empty Go program", maxHookMS)
	w.add(benchfile.Case{Name: "submit with a directive, as slurmctld sees it", Unit: "ms", Sluice: bench.Milliseconds(with),
		Peer: bench.Milliseconds(without), PeerName: "submit without"})
	_, err = w.On(ctx, "controller", "scancel", "--user="+user)
	return err
}

// sbatch submits as the user, in his home, and returns the job's id.
func (w *world) sbatch(ctx context.Context, args ...string) (uint32, error) {
	out, err := w.As(ctx, "login", user, nil, append([]string{"sbatch", "--parsable"}, args...)...)
	if err != nil {
		return 0, err
	}
	id, err := strconv.ParseUint(strings.TrimSpace(out), 10, 32)
	if err != nil {
		return 0, fmt.Errorf("sbatch --parsable printed %q", out)
	}
	return uint32(id), nil
}

// queue waits until the states of the user's jobs in squeue are as wanted.
func (w *world) queue(ctx context.Context, what string, limit time.Duration, done func(states []string) bool) error {
	return bench.Wait(ctx, what, limit, func(ctx context.Context) (bool, error) {
		out, err := w.On(ctx, "controller", "squeue", "--noheader", "--user="+user, "--format=%T")
		return err == nil && done(strings.Fields(out)), err
	})
}

func empty(states []string) bool { return len(states) == 0 }

// prolog measures the Prolog on a node that a job holds, with what slurmd gives it.
func (w *world) prolog(ctx context.Context) error {
	w.Step("sluice-prolog: %d runs on a ready node", w.Runs)
	id, err := w.sbatch(ctx, "--nodelist="+node, "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
	if err != nil {
		return err
	}
	if err := w.queue(ctx, "a job runs on "+node, 3*time.Minute, func(states []string) bool { return slices.Equal(states, []string{"RUNNING"}) }); err != nil {
		return err
	}
	for from, to := range map[string]string{w.empty: emptyPath, w.Self: driverPath} {
		if err := w.Install(ctx, node, from, to); err != nil {
			return err
		}
	}
	uid, err := w.On(ctx, node, "id", "--user", user)
	if err != nil {
		return err
	}
	env := prologEnv(id, strings.TrimSpace(uid))
	times, err := w.ExecTimesOn(ctx, node, driverPath, w.Runs, bench.Program{Path: prologPath, Env: env}, bench.Program{Path: emptyPath, Env: env})
	if err != nil {
		return err
	}
	const name = "sluice-prolog on a ready node"
	w.addBoth(name, times[0], times[1], "an empty Go program", 0)
	w.target(bench.Target{Case: name, Max: maxHookMS})
	w.target(bench.Target{Case: name, Ratio: prologRatio})
	if _, err := w.On(ctx, "controller", "scancel", strconv.FormatUint(uint64(id), 10)); err != nil {
		return err
	}
	return w.queue(ctx, "the job on "+node+" has ended", time.Minute, empty)
}

// prologEnv is the environment that slurmd 24.11 gives a Prolog.
func prologEnv(job uint32, uid string) []string {
	id := strconv.FormatUint(uint64(job), 10)
	vars := map[string]string{
		"SLURMD_NODENAME": node, "SLURM_CLUSTER_NAME": "sandbox", "SLURM_CONF": "/run/slurm/conf/slurm.conf", "SLURM_JOBID": id, "SLURM_JOB_ID": id,
		"SLURM_JOB_UID": uid, "SLURM_UID": uid, "SLURM_JOB_GID": uid, "SLURM_JOB_USER": user, "SLURM_JOB_PARTITION": "main", "SLURM_JOB_NUM_NODES": "1",
		"SLURM_JOB_CPUS_PER_NODE": "2", "SLURM_JOB_RESTART_COUNT": "0", "SLURM_JOB_WORK_DIR": "/home/" + user, "SLURM_NODELIST": node, "SLURM_SCRIPT_CONTEXT": "prolog_slurmd",
	}
	var env []string
	for _, k := range slices.Sorted(maps.Keys(vars)) {
		env = append(env, k+"="+vars[k])
	}
	return env
}

// chainScript submits jobs in $1 chains, $2 in each: jobs of one name run one after the other.
const chainScript = `i=0
while [ $i -lt "$2" ]; do
  c=0
  while [ $c -lt "$1" ]; do
    sbatch --parsable --dependency=singleton --job-name="chain$c" bb.sh || exit 1
    c=$((c + 1))
  done
  i=$((i + 1))
done`

// paths runs before each job that has a directive starts.
func (w *world) paths(ctx context.Context) error {
	w.Step("paths: booting all nodes")
	if _, err := w.sbatch(ctx, "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true"); err != nil {
		return err
	}
	if err := w.queue(ctx, "all nodes are up", 3*time.Minute, empty); err != nil {
		return err
	}
	w.Step("paths: %d jobs on warm nodes, %d at a time", w.Runs, chains)
	all, err := w.timings(ctx, func() error {
		if _, err := w.As(ctx, "login", user, nil, "sh", "-c", chainScript, "sh", strconv.Itoa(chains), strconv.Itoa((w.Runs+chains-1)/chains)); err != nil {
			return err
		}
		return w.queue(ctx, "all jobs have run", time.Minute+time.Duration(w.Runs)*3*time.Second, empty)
	})
	if err != nil {
		return err
	}
	times := only(all, "slurm_bb_paths", nil)
	if len(times) < w.Runs {
		return fmt.Errorf("slurmctld logged %d calls of paths for %d jobs", len(times), w.Runs)
	}
	w.addBoth(fmt.Sprintf("slurm_bb_paths, as slurmctld sees it, %d jobs at a time", chains), times, nil, "", maxHookMS)
	return nil
}
