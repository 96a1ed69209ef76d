// Package scontrol asks and changes Slurm through its command line, whose
// formats outlive versions better than those of slurmrestd.
package scontrol

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluicehpc/sluice/internal/command"
	"github.com/sluicehpc/sluice/slurm/hostlist"
)

// ErrNotFound is wrapped when Slurm knows no such job.
var ErrNotFound = errors.New("not known to Slurm")

// Client runs scontrol and squeue, found in PATH. The zero value is ready.
type Client struct {
	// Timeout bounds each program; 0 means 10 s.
	Timeout time.Duration
	// Run replaces command.Run in tests.
	Run func(context.Context, command.Spec) ([]byte, error)
}

func (c Client) run(ctx context.Context, program string, args ...string) ([]byte, error) {
	timeout, run := c.Timeout, c.Run
	if timeout == 0 {
		timeout = 10 * time.Second
	}
	if run == nil {
		run = command.Run
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	env := []string{command.DefaultPath, "LC_ALL=C.UTF-8", "SLURM_TIME_FORMAT=standard"}
	if conf := os.Getenv("SLURM_CONF"); conf != "" {
		env = append(env, "SLURM_CONF="+conf)
	}
	return run(ctx, command.Spec{Path: program, Args: args, Env: env})
}

// Node is one node of Slurm.
type Node struct {
	Name   string
	State  string   // IDLE, ALLOCATED, MIXED, DOWN, …
	Flags  []string // CLOUD, POWERED_DOWN, POWERING_UP, NOT_RESPONDING, DRAIN, …
	Reason string   // "" for none
}

// Has reports whether the node has the flag.
func (n Node) Has(flag string) bool { return slices.Contains(n.Flags, flag) }

// Nodes returns the named nodes, or all of them when names is empty. A name
// that Slurm does not know is an error.
func (c Client) Nodes(ctx context.Context, names []string) ([]Node, error) {
	var nodes []Node
	for _, list := range batches(names) {
		args := []string{"show", "node", "--oneliner"}
		if list != "" {
			args = append(args, list)
		}
		out, err := c.run(ctx, "scontrol", args...)
		if err != nil {
			return nil, fmt.Errorf("ask Slurm for nodes: %w", err)
		}
		for line := range strings.Lines(string(out)) {
			f := Fields(strings.TrimRight(line, " \r\n"))
			if f["NodeName"] == "" {
				continue
			}
			state, flags := splitState(f["State"])
			nodes = append(nodes, Node{Name: f["NodeName"], State: state, Flags: flags, Reason: f["Reason"]})
		}
	}
	return nodes, nil
}

// marks are the characters by which sinfo, and scontrol of old versions, show flags.
var marks = map[byte]string{
	'*': "NOT_RESPONDING", '~': "POWERED_DOWN", '#': "POWERING_UP", '!': "POWER_DOWN",
	'%': "POWERING_DOWN", '$': "MAINTENANCE", '@': "REBOOT_REQUESTED", '^': "REBOOT_ISSUED", '-': "PLANNED",
}

func splitState(s string) (state string, flags []string) {
	words := strings.Split(s, "+")
	state, flags = words[0], words[1:]
	for state != "" {
		flag, ok := marks[state[len(state)-1]]
		if !ok {
			break
		}
		state = state[:len(state)-1]
		if !slices.Contains(flags, flag) {
			flags = append(flags, flag)
		}
	}
	return state, flags
}

// SetNodes changes the state of nodes, with a reason unless that is "". States
// are scontrol's words: DOWN, DRAIN, RESUME, POWER_UP, POWER_DOWN, ….
func (c Client) SetNodes(ctx context.Context, names []string, state, reason string) error {
	if len(names) == 0 {
		return nil
	}
	for _, list := range batches(names) {
		args := []string{"update", "NodeName=" + list, "State=" + state}
		if reason != "" {
			args = append(args, "Reason="+oneLine(reason))
		}
		if _, err := c.run(ctx, "scontrol", args...); err != nil {
			return fmt.Errorf("set %s to %s: %w", list, state, err)
		}
	}
	return nil
}

// batches writes sorted host lists of at most 32 KiB, for one argument each
// (Linux takes 128 KiB). No names are one empty list.
func batches(names []string) []string {
	sorted := slices.Clone(names)
	slices.SortFunc(sorted, func(a, b string) int {
		pa, pb := strings.TrimRight(a, "0123456789"), strings.TrimRight(b, "0123456789")
		return cmp.Or(cmp.Compare(pa, pb), cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
	})
	sorted = slices.Compact(sorted)
	const limit = 32 << 10
	if list := hostlist.Compress(sorted); len(list) <= limit || len(sorted) < 2 {
		return []string{list}
	}
	half := len(sorted) / 2
	return append(batches(sorted[:half]), batches(sorted[half:])...)
}

// SetJobComment sets the administrator's comment of a job, which `scontrol show
// job` shows to its user.
func (c Client) SetJobComment(ctx context.Context, id uint32, comment string) error {
	_, err := c.run(ctx, "scontrol", "update", fmt.Sprintf("JobId=%d", id), "AdminComment="+oneLine(comment))
	if err != nil {
		return fmt.Errorf("comment on job %d: %w", id, err)
	}
	return nil
}

// Job is one job of Slurm.
type Job struct {
	ID          uint32
	ArrayJobID  uint32 // 0: not of an array
	ArrayTaskID uint32
	UID         uint32
	Account     string
	Partition   string
	State       string // PENDING, RUNNING, STAGE_OUT, COMPLETED, …
	Nodes       []string
	// Name and Reason are filled in by Job alone.
	Name   string
	Reason string
}

// What a user chooses freely may hold any character, a newline too, so it
// stands only at the end of the answer about a single job. (`scontrol show job`
// prints names and comments unquoted between its fields: a user could forge the
// others there.)
const (
	separator  = "\x1f"
	listFormat = "%A" + separator + "%F" + separator + "%K" + separator + "%U" + separator + "%a" + separator + "%P" + separator + "%T" + separator + "%N"
	jobFormat  = listFormat + separator + "%r" + separator + "%j"
)

// Jobs returns the jobs that Slurm remembers. Tasks of an array that have not
// been split off yet are one job.
func (c Client) Jobs(ctx context.Context) ([]Job, error) {
	out, err := c.run(ctx, "squeue", "--noheader", "--all", "--states=all", "--format="+listFormat)
	if err != nil {
		return nil, fmt.Errorf("ask Slurm for jobs: %w", err)
	}
	var jobs []Job
	for line := range strings.Lines(string(out)) {
		j, err := parseJob(strings.TrimRight(line, "\n"), 8)
		if err != nil {
			return nil, err
		}
		jobs = append(jobs, j)
	}
	return jobs, nil
}

// Job returns one job, or ErrNotFound once Slurm has forgotten it.
func (c Client) Job(ctx context.Context, id uint32) (Job, error) {
	out, err := c.run(ctx, "squeue", "--noheader", "--all", "--states=all", "--jobs="+strconv.FormatUint(uint64(id), 10), "--format="+jobFormat)
	if err != nil {
		return Job{}, fmt.Errorf("ask Slurm for job %d: %w", id, notFound(err))
	}
	// An array's id names all of its tasks; the one with the id itself is meant.
	prefix := strconv.FormatUint(uint64(id), 10) + separator
	for text := string(out); text != ""; {
		if strings.HasPrefix(text, prefix) {
			return parseJob(strings.TrimSuffix(text, "\n"), 10)
		}
		_, text, _ = strings.Cut(text, "\n")
	}
	return Job{}, fmt.Errorf("job %d: %w", id, ErrNotFound)
}

func notFound(err error) error {
	var ce *command.Error
	if errors.As(err, &ce) && strings.Contains(ce.Stderr, "Invalid job id") {
		return ErrNotFound
	}
	return err
}

// parseUID reads a uid as Slurm's commands print it: those from 2^31 up are negative there.
func parseUID(s string) (uint32, error) {
	if strings.HasPrefix(s, "-") {
		n, err := strconv.ParseInt(s, 10, 32)
		return uint32(n), err
	}
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err
}

func parseJob(text string, fields int) (Job, error) {
	f := strings.SplitN(text, separator, fields)
	if len(f) < fields {
		return Job{}, fmt.Errorf("squeue answered %.100q", text)
	}
	for i := range f {
		if f[i] == "(null)" || f[i] == "N/A" {
			f[i] = ""
		}
	}
	id, err1 := strconv.ParseUint(f[0], 10, 32)
	uid, err2 := parseUID(f[3])
	if err := errors.Join(err1, err2); err != nil {
		return Job{}, fmt.Errorf("squeue answered %.100q: %w", text, err)
	}
	j := Job{ID: uint32(id), UID: uid, Account: f[4], Partition: f[5], State: f[6]}
	if task, err := strconv.ParseUint(f[2], 10, 32); err == nil {
		array, err := strconv.ParseUint(f[1], 10, 32)
		if err != nil {
			return Job{}, fmt.Errorf("squeue answered %.100q: %w", text, err)
		}
		j.ArrayJobID, j.ArrayTaskID = uint32(array), uint32(task)
	}
	nodes, err := hostlist.Expand(f[7])
	if err != nil {
		return Job{}, fmt.Errorf("nodes of job %d: %w", id, err)
	}
	j.Nodes = nodes
	if fields == 10 {
		j.Reason, _, _ = strings.Cut(f[8], "\n")
		if j.Reason == "None" {
			j.Reason = ""
		}
		j.Name = f[9]
	}
	return j, nil
}

var (
	exitRE = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(` ExitCode=([0-9]+):([0-9]+) `) })
	endRE  = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(` EndTime=([^ ]+) `) })
)

// ErrNotEnded is wrapped when Slurm knows no end of a job: what ran was
// requeued, although states like COMPLETING hide that it is PENDING.
var ErrNotEnded = errors.New("has no end")

// ExitCode returns how a job ended: its exit code, and the signal that ended
// it or 0. The job's owner can forge it (by its name), which fools only the owner.
func (c Client) ExitCode(ctx context.Context, id uint32) (code, signal int, err error) {
	out, err := c.run(ctx, "scontrol", "show", "job", "--oneliner", strconv.FormatUint(uint64(id), 10))
	if err != nil {
		return 0, 0, fmt.Errorf("ask Slurm how job %d ended: %w", id, notFound(err))
	}
	// An array's id names all of its tasks; the one with the id itself is meant.
	var m, end [][]byte
	prefix := fmt.Appendf(nil, "JobId=%d ", id)
	for line := range bytes.Lines(out) {
		if bytes.HasPrefix(line, prefix) {
			m, end = exitRE().FindSubmatch(line), endRE().FindSubmatch(line)
			break
		}
	}
	if end != nil && (string(end[1]) == "Unknown" || string(end[1]) == "NONE") {
		return 0, 0, fmt.Errorf("job %d: %w", id, ErrNotEnded)
	}
	if m == nil {
		return 0, 0, fmt.Errorf("scontrol tells no exit code of job %d", id)
	}
	code, err1 := strconv.Atoi(string(m[1]))
	signal, err2 := strconv.Atoi(string(m[2]))
	if err := errors.Join(err1, err2); err != nil {
		return 0, 0, fmt.Errorf("exit code of job %d: %w", id, err)
	}
	return code, signal, nil
}

var keyRE = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`(?:^| )([A-Za-z][A-Za-z0-9_/:]*)=`) })

// Fields reads one line of `scontrol show … --oneliner`. A value reaches to the
// next word that looks like KEY=; of a key that comes twice the first is taken,
// since free text (Reason, Comment, Extra) comes last. "(null)", "N/A" and "n/a"
// are left out.
func Fields(line string) map[string]string {
	fields := map[string]string{}
	at := keyRE().FindAllStringSubmatchIndex(line, -1)
	for i, m := range at {
		end := len(line)
		if i+1 < len(at) {
			end = at[i+1][0]
		}
		key, value := line[m[2]:m[3]], strings.TrimSpace(line[m[1]:end])
		if _, twice := fields[key]; twice || value == "" || value == "(null)" || strings.EqualFold(value, "n/a") {
			continue
		}
		fields[key] = value
	}
	return fields
}

// oneLine makes text safe as a value on scontrol's command line, which knows no
// escapes: control characters become blanks.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
}
