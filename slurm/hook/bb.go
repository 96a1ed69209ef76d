package hook

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/internal/diag"
	"github.com/sluicehpc/sluice/slurm/directive"
	"github.com/sluicehpc/sluice/slurm/hostlist"
)

// answer is what burst_buffer.lua reads: the status alone on the first line,
// then the message.
type answer struct {
	status  string // ok, busy, error
	message string
}

var (
	ok   = answer{status: "ok"}
	busy = answer{status: "busy"}
)

func failed(err error) answer { return answer{"error", oneLine(err.Error())} }

// options are the --KEY=VALUE words of a call, and the words after "--".
type options struct {
	values map[string]string
	rest   []string
}

func parseOptions(args []string) (options, error) {
	o := options{values: map[string]string{}}
	for i, a := range args {
		if a == "--" {
			o.rest = args[i+1:]
			return o, nil
		}
		key, value, found := strings.Cut(strings.TrimPrefix(a, "--"), "=")
		if !found || !strings.HasPrefix(a, "--") {
			return o, errUsage
		}
		o.values[key] = value
	}
	return o, nil
}

func (o options) number(key string) uint32 {
	n, _ := strconv.ParseUint(o.values[key], 10, 32)
	return uint32(n)
}

// job makes the JobCall; withScript reads the script's text into it.
func (o options) job(withScript bool) (api.JobCall, error) {
	nodes, err := hostlist.Expand(o.values["nodes"])
	if err != nil {
		return api.JobCall{}, err
	}
	call := api.JobCall{
		JobID: o.number("job"), UID: o.number("uid"), GID: o.number("gid"),
		Name: o.values["name"], Account: o.values["account"], Partition: o.values["partition"],
		Nodes: nodes, Hurry: o.values["hurry"] == "true",
	}
	if call.JobID == 0 {
		return api.JobCall{}, errUsage
	}
	if withScript && o.values["script"] != "" {
		script, err := readScript(o.values["script"])
		if err != nil {
			return api.JobCall{}, err
		}
		call.Script = string(usersScript(o.values["state"], call.JobID, script))
	}
	return call, nil
}

// usersScript returns the job's script as the user wrote it, whose lines messages
// should name. Where a directive has a symbol such as %j, Slurm passes a file of
// its own that holds nothing but the directives, symbols replaced. The user's is
// in StateSaveLocation (source: job_mgr.c, the directories hash.N/job.ID). What
// Slurm passed is returned when the user's cannot be read, as a job array's, or
// has not as many directives.
func usersScript(state string, job uint32, passed []byte) []byte {
	if state == "" {
		return passed
	}
	script, err := readScript(filepath.Join(state, fmt.Sprintf("hash.%d", job%10), fmt.Sprintf("job.%d", job), "script"))
	if err != nil || directives(script) != directives(passed) {
		return passed
	}
	return script
}

func directives(script []byte) int {
	n := 0
	for line := range bytes.Lines(script) {
		if bytes.HasPrefix(line, []byte("#SLUICE")) {
			n++
		}
	}
	return n
}

// readScript reads a job script that slurmctld keeps, up to a byte more than
// is allowed.
func readScript(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read the job's script: %w", err)
	}
	defer f.Close()
	script, err := io.ReadAll(io.LimitReader(f, directive.MaxScript+1))
	if err != nil {
		return nil, fmt.Errorf("read the job's script: %w", err)
	}
	// Slurm keeps the terminating NUL of its string.
	return bytes.TrimRight(script, "\x00"), nil
}

// functions are the burst-buffer functions that start a process.
var functions = map[string]func(*Hook, context.Context, options) (answer, error){
	"job_process":    (*Hook).jobProcess,
	"setup":          (*Hook).setup,
	"data_in":        (*Hook).dataIn,
	"test_data_in":   (*Hook).testDataIn,
	"paths":          (*Hook).paths,
	"path_directory": (*Hook).pathDirectory,
	"pre_run":        (*Hook).preRun,
	"post_run":       (*Hook).postRun,
	"data_out":       (*Hook).dataOut,
	"test_data_out":  (*Hook).testDataOut,
	"teardown":       (*Hook).teardown,
	"status":         (*Hook).status,
}

func (h *Hook) burstBuffer(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	if h.Stderr == os.Stderr {
		// Slurm takes a child's two outputs as one, and shows them as the job's reason.
		h.Stderr = lazyLog{}
	}
	f := functions[args[0]]
	if f == nil {
		return errUsage
	}
	o, err := parseOptions(args[1:])
	if err != nil {
		return err
	}
	a, err := f(h, ctx, o)
	if err != nil {
		if errors.Is(err, errUsage) {
			return err
		}
		h.logf("%s of job %s: %v", args[0], o.values["job"], err)
		a = failed(err)
	}
	_, err = fmt.Fprintf(h.Stdout, "%s\n%s\n", a.status, a.message)
	return err
}

// maxShown is how many errors of a script sbatch prints.
const maxShown = 10

// jobProcess judges a script while sbatch waits and slurmctld stands still:
// here as far as the text goes, then in sluiced, if that answers at once.
// Trouble of our own refuses nothing, since setup judges again.
func (h *Hook) jobProcess(ctx context.Context, o options) (answer, error) {
	script, err := readScript(o.values["script"])
	if err != nil {
		h.logf("job_process: %v", err)
		return ok, nil
	}
	file := o.values["file"]
	if file == "" {
		file = "script"
	}
	if o.values["interactive"] == "true" {
		// The lines of salloc or srun --bbf FILE, below a first line of Slurm's.
		file = "--bbf"
		_, script, _ = bytes.Cut(script, []byte("\n"))
	}
	if _, err := directive.Parse(file, script); err != nil {
		var list diag.List
		if !errors.As(err, &list) {
			return failed(err), nil
		}
		lines := make([]string, len(list))
		for i, d := range list {
			lines[i] = d.Error()
		}
		return refusal(lines), nil
	}
	_, hasUID := o.values["uid"]
	call := api.JobProcess{Script: string(script), HasUID: hasUID, UID: o.number("uid"), GID: o.number("gid"), Account: o.values["account"], File: file}
	var verdict api.Verdict
	if err := h.call(ctx, h.Limits.Blocking, api.OpJobProcess, call, &verdict); err != nil {
		h.logf("job_process is left to setup: %v", err)
		return ok, nil
	}
	if len(verdict.Errors) > 0 {
		return refusal(verdict.Errors), nil
	}
	return answer{"ok", printable(strings.Join(verdict.Notices, "\n"))}, nil
}

// refusal shows the errors whole: sbatch prints every line of the message.
func refusal(errs []string) answer {
	shown := errs[:min(len(errs), maxShown)]
	message := strings.Join(shown, "\n")
	if more := len(errs) - len(shown); more > 0 {
		message += fmt.Sprintf("\nand %d more; `sluice lint SCRIPT` shows them all", more)
	}
	// The first line follows Slurm's own words, the rest stands below it.
	return answer{"error", printable(message)}
}

func (h *Hook) setup(ctx context.Context, o options) (answer, error) {
	call, err := o.job(true)
	if err != nil {
		return answer{}, err
	}
	return ok, h.patiently(ctx, call.JobID, h.Limits.Answer, api.OpSetup, call, nil)
}

func (h *Hook) dataIn(ctx context.Context, o options) (answer, error) {
	return h.stage(ctx, o, api.OpDataIn, true)
}

func (h *Hook) dataOut(ctx context.Context, o options) (answer, error) {
	return h.stage(ctx, o, api.OpDataOut, true)
}

func (h *Hook) testDataIn(ctx context.Context, o options) (answer, error) {
	return h.stage(ctx, o, api.OpDataIn, false)
}

func (h *Hook) testDataOut(ctx context.Context, o options) (answer, error) {
	return h.stage(ctx, o, api.OpDataOut, false)
}

// stage starts or follows a transfer. A first call returns at once, unless it
// has to wait for the end because Slurm has no test function (before 24.05).
// While sluiced is away it waits here and not by saying busy, so that it can
// tell for how long.
func (h *Hook) stage(ctx context.Context, o options, op string, first bool) (answer, error) {
	job, err := o.job(first)
	if err != nil {
		return answer{}, err
	}
	call := api.StageCall{JobCall: job}
	toTheEnd := o.values["wait"] == "true"
	switch {
	case toTheEnd:
		call.WaitSeconds = h.Limits.Stage.Seconds()
	case !first:
		call.WaitSeconds = h.Limits.Poll.Seconds()
	}
	limit := h.Limits.Answer + secondsOf(call.WaitSeconds)
	for {
		var state api.StageState
		if err := h.patiently(ctx, job.JobID, limit, op, call, &state); err != nil {
			return answer{}, err
		}
		switch state.Phase {
		case api.StageDone:
			return ok, nil
		case api.StageFailed:
			return answer{"error", oneLine(state.Message)}, nil
		case api.StageBusy:
			if !toTheEnd {
				return busy, nil
			}
			// A sluiced that says busy without having waited must not be asked
			// in a tight loop.
			select {
			case <-ctx.Done():
				return answer{}, ctx.Err()
			case <-h.Clock.After(h.Limits.Ask):
			}
		default:
			return answer{}, fmt.Errorf("sluiced answers with the unknown phase %q", state.Phase)
		}
	}
}

// paths is asked only when sluiced's file for the job is missing; slurmctld
// stands still.
func (h *Hook) paths(ctx context.Context, o options) (answer, error) {
	call, err := o.job(false)
	if err != nil {
		return answer{}, err
	}
	var env api.Environment
	if err := h.call(ctx, h.Limits.Blocking, api.OpPaths, call, &env); err != nil {
		return answer{}, fmt.Errorf("the job's environment is not known: %w", err)
	}
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(env.Variables)) {
		value := env.Variables[name]
		if strings.ContainsAny(name+value, "\n\x00") {
			return answer{}, fmt.Errorf("the job's variable %q has a line break", name)
		}
		fmt.Fprintf(&b, "%s=%s\n", name, value)
	}
	return answer{"ok", strings.TrimSuffix(b.String(), "\n")}, nil
}

// pathDirectory makes the directory of the file that paths writes; slurmctld
// stands still.
func (h *Hook) pathDirectory(_ context.Context, o options) (answer, error) {
	file := o.values["file"]
	if !filepath.IsAbs(file) {
		return answer{}, errUsage
	}
	return ok, os.MkdirAll(filepath.Dir(file), 0o700)
}

func (h *Hook) preRun(ctx context.Context, o options) (answer, error) {
	return h.event(ctx, o, api.OpPreRun)
}

func (h *Hook) postRun(ctx context.Context, o options) (answer, error) {
	return h.event(ctx, o, api.OpPostRun)
}

// event tells sluiced of a moment. If it stays away the job goes on: its nodes
// cost money, and its data is there.
func (h *Hook) event(ctx context.Context, o options, op string) (answer, error) {
	call, err := o.job(false)
	if err != nil {
		return answer{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, h.Limits.Event)
	defer cancel()
	err = h.patiently(ctx, 0, h.Limits.Answer, op, call, nil)
	if err != nil && away(err) {
		h.logf("%s of job %d goes on without sluiced: %v", op, call.JobID, err)
		return ok, nil
	}
	return ok, err
}

func (h *Hook) teardown(ctx context.Context, o options) (answer, error) {
	call, err := o.job(false)
	if err != nil {
		return answer{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, h.Limits.Teardown)
	defer cancel()
	return ok, h.patiently(ctx, 0, h.Limits.Answer, api.OpTeardown, call, nil)
}

func (h *Hook) status(ctx context.Context, o options) (answer, error) {
	var text api.Text
	if err := h.call(ctx, h.Limits.Status, api.OpBBStatus, api.BBStatus{Args: o.rest}, &text); err != nil {
		return answer{}, err
	}
	return answer{"ok", printable(text.Text)}, nil
}
