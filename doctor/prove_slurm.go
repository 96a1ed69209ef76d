package doctor

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/internal/command"
	"github.com/sluicehpc/sluice/slurm/conf"
	"github.com/sluicehpc/sluice/slurm/scontrol"
)

// slurmText runs one of Slurm's programs.
func slurmText(ctx context.Context, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	out, err := command.Run(ctx, command.Spec{Path: program, Args: args})
	return strings.TrimSpace(string(out)), err
}

// settings reads slurm.conf's KEY=VALUE lines that `scontrol show config` shows too: not nodes and partitions, and not
// PrivateData, of which it leaves out "cloud".
func settings(slurmConf []byte) map[string]string {
	all := map[string]string{}
	for line := range strings.Lines(string(slurmConf)) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		switch {
		case !ok || strings.HasPrefix(key, "#"):
		case key == "NodeName" || key == "NodeSet" || key == "PartitionName" || key == "PrivateData":
		default:
			all[key] = value
		}
	}
	return all
}

// shown reads `scontrol show config`: "Key[0]   = value" lines.
func shown(text string) map[string]string {
	all := map[string]string{}
	for line := range strings.Lines(text) {
		key, value, ok := strings.Cut(line, "=")
		key, _, _ = strings.Cut(strings.TrimSpace(key), "[")
		if _, twice := all[key]; ok && !twice {
			all[key] = strings.TrimSpace(value)
		}
	}
	return all
}

// sameSetting compares a value of slurm.conf with what Slurm shows of it: "300 sec" for 300, "slurm(64030)" for
// slurm, "(null)" for none, other letters' case, another order of a list.
func sameSetting(want, got string) bool {
	norm := func(s string) []string {
		s = strings.TrimSuffix(strings.TrimSuffix(strings.ToLower(s), " sec"), " nodes/min")
		switch s {
		case "none", "task/none":
			s = "(null)"
		}
		if i := strings.IndexByte(s, '('); i > 0 && strings.HasSuffix(s, ")") {
			s = s[:i]
		}
		list := strings.Split(s, ",")
		slices.Sort(list)
		return list
	}
	return slices.Equal(norm(want), norm(got))
}

// proveSlurmFiles compares what the running slurmctld says with what we render for its version.
func proveSlurmFiles(ctx context.Context, l *Lab) (string, error) {
	out, err := slurmText(ctx, "slurmctld", "-V")
	if err != nil {
		return "", err
	}
	version, err := conf.ParseVersion(out)
	if err != nil {
		return "", err
	}
	c := *l.Config
	c.Slurm.Version = version.String()
	list, err := c.SlurmFiles()
	if err != nil {
		return "", refuted("nothing can be rendered for Slurm %s: %v", version, err)
	}
	text, err := slurmText(ctx, "scontrol", "show", "config")
	if err != nil {
		return "", err
	}
	have, compared := shown(text), 0
	var wrong []string
	for key, want := range settings(list[0].Data) {
		got, known := have[key]
		if !known {
			continue // some are not shown by every version
		}
		compared++
		if !sameSetting(want, got) {
			wrong = append(wrong, fmt.Sprintf("%s is %q, rendered is %q", key, got, want))
		}
	}
	if len(wrong) > 0 {
		slices.Sort(wrong)
		return "", refuted("slurmctld %s runs with other values: %s", version, strings.Join(wrong, "; "))
	}
	buffer, err := slurmText(ctx, "scontrol", "show", "burstbuffer")
	if err != nil {
		return "", err
	}
	if !strings.Contains(buffer, "Name=lua") || !strings.Contains(buffer, "TeardownFailure") {
		return "", refuted("the burst buffer plugin has not taken burst_buffer.conf: %s", buffer)
	}
	if bad, err := logErrors(have["SlurmctldLogFile"]); err != nil {
		return "", err
	} else if bad != "" {
		return "", refuted("slurmctld's log complains of its files: %s", bad)
	}
	return fmt.Sprintf("slurmctld %s runs with all %d values that it shows of ours, and with our burst_buffer.conf; its log has no complaint", version, compared), nil
}

// complaints begin what Slurm's parsers write about files that they do not understand.
var complaints = []string{"error: _parse_next_key", "error: Parse error", "error: parse", "Unrecognized key", "Parsing error", "error: Invalid", "error: Ignoring obsolete", "Unrecognized option"}

// logErrors returns the first complaint about configuration files since slurmctld's last start, or "".
func logErrors(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	first := ""
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if strings.Contains(line, "slurmctld version ") && strings.Contains(line, " started") {
			first = ""
			continue
		}
		if first == "" && slices.ContainsFunc(complaints, func(c string) bool { return strings.Contains(line, c) }) {
			first = line
		}
	}
	return first, lines.Err()
}

// job runs one job of a shell command as root and returns the node that it ran on. A node that was woken for it goes to sleep
// again at the end of the run: booting one costs minutes.
func (l *Lab) job(ctx context.Context, command string) (node string, err error) {
	asleep, err := slept(ctx)
	if err != nil {
		return "", err
	}
	out, err := slurmText(ctx, "sbatch", "--parsable", "--nodes=1", "--ntasks=1", "--time=5", "--job-name="+l.Name, "--output=/dev/null", "--chdir=/", "--wrap="+command)
	if err != nil {
		return "", err
	}
	first, _, _ := strings.Cut(out, ";")
	id, err := strconv.ParseUint(first, 10, 32)
	if err != nil {
		return "", fmt.Errorf("sbatch printed %q", out)
	}
	l.undo("cancel job "+first, func(ctx context.Context) error {
		_, err := slurmText(ctx, "scancel", first)
		return err
	})
	var slurm scontrol.Client
	for {
		j, err := slurm.Job(ctx, uint32(id))
		if err != nil {
			return "", err
		}
		if len(j.Nodes) == 1 && node == "" {
			node = j.Nodes[0]
			if asleep[node] {
				l.run.push("power down node "+node, func(ctx context.Context) error { return slurm.SetNodes(ctx, []string{node}, "POWER_DOWN", "") })
			}
		}
		switch j.State {
		case "COMPLETED":
			return node, nil
		case "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY":
			return "", refuted("a job ended as %s on %s (%s)", j.State, node, j.Reason)
		}
		if err := pause(ctx, 500*time.Millisecond); err != nil {
			return "", fmt.Errorf("the job is %s (%s): %w", j.State, j.Reason, err)
		}
	}
}

// slept names the nodes that are powered down.
func slept(ctx context.Context) (map[string]bool, error) {
	list, err := scontrol.Client{}.Nodes(ctx, nil)
	names := map[string]bool{}
	for _, n := range list {
		names[n.Name] = n.Has("POWERED_DOWN") || n.Has("POWERING_DOWN")
	}
	return names, err
}

func proveSlurmJob(ctx context.Context, l *Lab) (string, error) {
	node, err := l.job(ctx, "true")
	if err != nil {
		return "", err
	}
	text, err := slurmText(ctx, "scontrol", "show", "config")
	if err != nil {
		return "", err
	}
	have := shown(text)
	return fmt.Sprintf("a job ran to its end on %s with %s, %s and %s", node, have["AuthType"], have["ProctrackType"], have["TaskPlugin"]), nil
}

// proveBootTime looks at a node of which the VM is there, or has one made.
func proveBootTime(ctx context.Context, l *Lab) (string, error) {
	node, err := l.job(ctx, "true")
	if err != nil {
		return "", err
	}
	vm, err := l.Compute.Get(ctx, node)
	if err != nil {
		return "", err
	}
	line, err := slurmText(ctx, "scontrol", "show", "node", "--oneliner", node)
	if err != nil {
		return "", err
	}
	fields := scontrol.Fields(line)
	booted, err := time.ParseInLocation("2006-01-02T15:04:05", fields["BootTime"], time.Local)
	if err != nil {
		return "", errors.Join(fmt.Errorf("boot time of node %s", node), err)
	}
	// Slurm's times have whole seconds.
	if booted.Before(vm.Created.Truncate(time.Second)) {
		return "", refuted("%s was made at %s, its slurmd says that it booted at %s: slurmctld takes no node back that did not boot after the resume",
			node, vm.Created.UTC().Format(time.RFC3339), booted.UTC().Format(time.RFC3339))
	}
	return fmt.Sprintf("%s was made at %s and booted at %s; it is %s", node, vm.Created.UTC().Format(time.RFC3339), booted.UTC().Format(time.RFC3339), fields["State"]), nil
}
