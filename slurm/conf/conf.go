// Package conf renders Slurm's configuration files: slurm.conf, slurmdbd.conf,
// cgroup.conf, burst_buffer.conf and burst_buffer.lua.
package conf

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/slurm/hostlist"
)

// Cluster is what the files depend on. Zero fields have the defaults named
// beside them; Name, ControllerHost, NodeSets and Partitions have none.
type Cluster struct {
	Version        Version // 24.11
	Name           string  // ClusterName
	ControllerHost string
	User           string // SlurmUser: slurm

	Auth          string // munge or slurm: munge
	CgroupPlugin  string // autodetect, cgroup/v1, cgroup/v2 or disabled: autodetect
	ProctrackType string // cgroup or linuxproc: cgroup
	TaskPlugin    string // affinity,cgroup with proctrack/cgroup, else none

	// Database says where slurmdbd is; a zero Host is a cluster without one.
	Database Database

	NodeSets   []NodeSet
	Partitions []Partition

	ResumeTimeout  time.Duration // 5m: from ResumeProgram to a node that registered
	SuspendTimeout time.Duration // 2m
	SuspendTime    time.Duration // 5m of idling; negative: never
	// PrologTimeout bounds Prolog and Epilog; it is at least a minute above
	// ResumeTimeout. What else would give up on a node that is still in its
	// Prolog follows it: messages, the batch launch, the job's credential. 10m.
	PrologTimeout time.Duration
	// StageInTimeout and StageOutTimeout bound a job's transfers; at most 24
	// days (the plugin counts milliseconds in 32 bits): 24h.
	StageInTimeout, StageOutTimeout time.Duration

	ProgramDir string // of sluice-hook, its links and sluice-prolog: /usr/local/libexec/sluice
	StateDir   string // StateSaveLocation: /var/spool/slurmctld
	SpoolDir   string // SlurmdSpoolDir: /var/spool/slurmd
	LogDir     string // /var/log/slurm
	// EnvironmentDir is where sluiced writes the jobs' environments, a file a
	// job named by its id: /run/sluice/env.
	EnvironmentDir string

	// Parameters replace what slurm.conf says, key by key, and add to it.
	Parameters map[string]string
}

// Database is slurmdbd's place and store.
type Database struct {
	Host        string // of slurmdbd
	StorageHost string // localhost
	StorageUser string // slurm
	StoragePass string // "": none, the database trusts the socket
	StorageName string // slurm_acct_db
}

// NodeSet is a group of equal CLOUD nodes.
type NodeSet struct {
	Name      string
	Nodes     string // a host list
	CPUs      int
	MemoryMiB int
	Features  []string
}

// Partition is a partition over node sets.
type Partition struct {
	Name     string
	NodeSets []string
	Default  bool
}

// File is one rendered file. Private files belong to SlurmUser and are for it
// alone (0600); the others are for all to read.
type File struct {
	Name string
	Mode fs.FileMode
	Data []byte
}

// ProgramLinks are the names under which slurm.conf runs sluice-hook: Slurm
// gives these programs no argument that would tell what is meant. They are
// links to sluice-hook in ProgramDir.
var ProgramLinks = []string{"sluice-resume", "sluice-suspend", "sluice-resume-fail", "sluice-prolog-slurmctld"}

// Render returns the files for the directory of slurm.conf, slurmdbd.conf only
// where the cluster has a database. All faults of c are in the error.
func Render(c Cluster) ([]File, error) {
	c.setDefaults()
	f, err := c.check()
	if err != nil {
		return nil, err
	}
	lua, err := c.lua(f)
	if err != nil {
		return nil, err
	}
	files := []File{
		{"slurm.conf", 0o644, c.slurm(f)},
		{"cgroup.conf", 0o644, c.cgroup(f)},
		{"burst_buffer.conf", 0o644, c.burstBuffer(f)},
		{"burst_buffer.lua", 0o644, lua},
	}
	if c.Database.Host != "" {
		files = append(files, File{"slurmdbd.conf", 0o600, c.slurmdbd()})
	}
	return files, nil
}

func (c *Cluster) setDefaults() {
	for _, d := range []struct {
		field *string
		value string
	}{
		{&c.User, "slurm"}, {&c.Auth, "munge"}, {&c.CgroupPlugin, "autodetect"}, {&c.ProctrackType, "cgroup"},
		{&c.ProgramDir, "/usr/local/libexec/sluice"}, {&c.StateDir, "/var/spool/slurmctld"}, {&c.SpoolDir, "/var/spool/slurmd"},
		{&c.LogDir, "/var/log/slurm"}, {&c.EnvironmentDir, "/run/sluice/env"},
		{&c.Database.StorageHost, "localhost"}, {&c.Database.StorageUser, "slurm"}, {&c.Database.StorageName, "slurm_acct_db"},
	} {
		*d.field = cmp.Or(*d.field, d.value)
	}
	if c.TaskPlugin == "" {
		c.TaskPlugin = "none"
		if c.ProctrackType == "cgroup" {
			c.TaskPlugin = "affinity,cgroup"
		}
	}
	c.Version = cmp.Or(c.Version, Version{24, 11})
	c.ResumeTimeout = cmp.Or(c.ResumeTimeout, 5*time.Minute)
	c.SuspendTimeout = cmp.Or(c.SuspendTimeout, 2*time.Minute)
	c.SuspendTime = cmp.Or(c.SuspendTime, 5*time.Minute)
	c.PrologTimeout = cmp.Or(c.PrologTimeout, 10*time.Minute)
	c.StageInTimeout = cmp.Or(c.StageInTimeout, 24*time.Hour)
	c.StageOutTimeout = cmp.Or(c.StageOutTimeout, 24*time.Hour)
}

var (
	wordRE = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)
	pathRE = regexp.MustCompile(`^/[A-Za-z0-9/._-]*$`)
	listRE = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._,/:=-]*$`)
	keyRE  = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9]*$`)
)

// maxStage is the plugin's limit on its timeouts (24 days).
const maxStage = 24 * 24 * time.Hour

func (c *Cluster) check() (features, error) {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	match := func(what, value string, re *regexp.Regexp) {
		if !re.MatchString(value) {
			bad("%s: %q is not valid", what, value)
		}
	}
	choice := func(what, value string, values ...string) {
		if !slices.Contains(values, value) {
			bad("%s: %q is not one of %s", what, value, strings.Join(values, ", "))
		}
	}
	f, err := featuresOf(c.Version)
	if err != nil {
		errs = append(errs, err)
	}
	match("cluster's name", c.Name, wordRE)
	match("controller's host", c.ControllerHost, wordRE)
	match("Slurm's user", c.User, wordRE)
	choice("auth", c.Auth, "munge", "slurm")
	if c.Auth == "slurm" && err == nil && !f.authSlurm {
		bad("auth: Slurm %s has no auth/slurm", c.Version)
	}
	choice("cgroup plugin", c.CgroupPlugin, "autodetect", "cgroup/v1", "cgroup/v2", "disabled")
	choice("proctrack type", c.ProctrackType, "cgroup", "linuxproc")
	match("task plugin", c.TaskPlugin, listRE)
	if c.Database.Host != "" {
		match("database's host", c.Database.Host, wordRE)
		match("storage host", c.Database.StorageHost, wordRE)
		match("storage user", c.Database.StorageUser, wordRE)
		match("storage name", c.Database.StorageName, wordRE)
		if strings.ContainsAny(c.Database.StoragePass, " \t\r\n#") {
			bad("storage password contains a blank or '#'")
		}
	}
	for what, p := range map[string]string{"program directory": c.ProgramDir, "state directory": c.StateDir,
		"spool directory": c.SpoolDir, "log directory": c.LogDir, "environment directory": c.EnvironmentDir} {
		match(what, p, pathRE)
	}
	for _, d := range []struct {
		what string
		d    time.Duration
		max  time.Duration
	}{
		{"resume timeout", c.ResumeTimeout, time.Hour * 18}, {"suspend timeout", c.SuspendTimeout, time.Hour * 18},
		{"prolog timeout", c.PrologTimeout, time.Hour * 18}, // Slurm keeps these in 16 bits of seconds
		{"stage-in timeout", c.StageInTimeout, maxStage}, {"stage-out timeout", c.StageOutTimeout, maxStage},
	} {
		if d.d < time.Second || d.d > d.max {
			bad("%s: %v is not between 1s and %v", d.what, d.d, d.max)
		}
	}
	sets, nodes := map[string]bool{}, map[string]string{}
	if len(c.NodeSets) == 0 {
		bad("no node sets")
	}
	for _, s := range c.NodeSets {
		match("node set", s.Name, wordRE)
		if sets[s.Name] {
			bad("node set %s: given twice", s.Name)
		}
		sets[s.Name] = true
		names, err := hostlist.Expand(s.Nodes)
		if err != nil {
			bad("node set %s: %w", s.Name, err)
		} else if len(names) == 0 {
			bad("node set %s: no nodes", s.Name)
		}
		for _, n := range names {
			if other, twice := nodes[n]; twice {
				bad("node %s: in the node sets %s and %s", n, other, s.Name)
				break
			}
			nodes[n] = s.Name
		}
		if s.CPUs < 1 || s.MemoryMiB < 1 {
			bad("node set %s: CPUs and memory must be above 0", s.Name)
		}
		for _, feature := range s.Features {
			match("feature of node set "+s.Name, feature, wordRE)
		}
	}
	if len(c.Partitions) == 0 {
		bad("no partitions")
	}
	defaults, partitions := 0, map[string]bool{}
	for _, p := range c.Partitions {
		match("partition", p.Name, wordRE)
		if partitions[p.Name] {
			bad("partition %s: given twice", p.Name)
		}
		partitions[p.Name] = true
		if len(p.NodeSets) == 0 {
			bad("partition %s: no node sets", p.Name)
		}
		for _, s := range p.NodeSets {
			if !sets[s] {
				bad("partition %s: no node set %q", p.Name, s)
			}
		}
		if p.Default {
			defaults++
		}
	}
	if defaults > 1 {
		bad("%d default partitions", defaults)
	}
	for k, v := range c.Parameters {
		match("parameter", k, keyRE)
		if strings.ContainsAny(v, "\r\n\x00") || v == "" {
			bad("parameter %s: its value is empty or has a line break", k)
		}
	}
	slices.SortStableFunc(errs, func(a, b error) int { return cmp.Compare(a.Error(), b.Error()) })
	return f, errors.Join(errs...)
}

const header = "# Written by Sluice for Slurm %s; changes are overwritten.\n"

// lines are the KEY=VALUE lines of a file, in order; an empty key is a blank line.
type lines [][2]string

func (l *lines) add(key, value string) { *l = append(*l, [2]string{key, value}) }

func (l lines) write(b *strings.Builder) {
	for _, kv := range l {
		if kv[0] != "" {
			b.WriteString(kv[0] + "=" + kv[1])
		}
		b.WriteByte('\n')
	}
}

func seconds(d time.Duration) string { return strconv.FormatInt(int64(d/time.Second), 10) }

func (c *Cluster) program(name string) string { return path.Join(c.ProgramDir, name) }

func (c *Cluster) slurm(f features) []byte {
	// PrologSlurmctld waits for nodes to boot under the same limit; Slurm gives
	// up on a node by itself after ResumeTimeout.
	timeout := max(c.PrologTimeout, c.ResumeTimeout+time.Minute)
	prolog := seconds(timeout)
	var l lines
	l.add("ClusterName", c.Name)
	l.add("SlurmctldHost", c.ControllerHost)
	l.add("SlurmUser", c.User)
	l.add("AuthType", "auth/"+c.Auth)
	l.add("CredType", "cred/"+c.Auth)
	// A credential lives 2 minutes by default; a longer Prolog would leave srun
	// with an expired one.
	auth := "cred_expire=" + prolog
	if c.Auth == "slurm" {
		// Its tokens live 60 s, that of a batch job's launch too, which waits for
		// the Prolog: slurmd refuses an expired one, and the job fails.
		auth += ",ttl=" + prolog
	}
	l.add("AuthInfo", auth)
	l.add("StateSaveLocation", c.StateDir)
	l.add("SlurmdSpoolDir", c.SpoolDir)
	l.add("SlurmctldLogFile", path.Join(c.LogDir, "slurmctld.log"))
	l.add("SlurmdLogFile", path.Join(c.LogDir, "slurmd.log"))
	l.add("SlurmctldPidFile", "/run/slurmctld/slurmctld.pid")
	l.add("SlurmdPidFile", "/run/slurmd.pid")
	l.add("", "")
	l.add("ProctrackType", "proctrack/"+c.ProctrackType)
	var tasks []string
	for t := range strings.SplitSeq(c.TaskPlugin, ",") {
		tasks = append(tasks, "task/"+strings.TrimPrefix(t, "task/"))
	}
	l.add("TaskPlugin", strings.Join(tasks, ","))
	l.add("JobAcctGatherType", "jobacct_gather/linux")
	l.add("MpiDefault", "none")
	l.add("SelectType", "select/cons_tres")
	l.add("SelectTypeParameters", "CR_Core")
	l.add("ReturnToService", "2")
	l.add("PrivateData", "cloud") // shows powered-down nodes to everybody
	if c.Database.Host != "" {
		l.add("", "")
		l.add("AccountingStorageType", "accounting_storage/slurmdbd")
		l.add("AccountingStorageHost", c.Database.Host)
		l.add("AccountingStorageEnforce", "associations,limits")
	}
	l.add("", "")
	l.add("BurstBufferType", "burst_buffer/lua")
	l.add("Prolog", c.program("sluice-prolog"))
	l.add("Epilog", c.program("sluice-epilog"))
	l.add("PrologSlurmctld", c.program("sluice-prolog-slurmctld"))
	// The batch script waits for the Prologs of all nodes.
	l.add("PrologFlags", "Alloc,DeferBatch")
	l.add("PrologEpilogTimeout", prolog)
	l.add("BatchStartTimeout", prolog)
	l.add("MessageTimeout", prolog)
	l.add("UnkillableStepTimeout", seconds(5*timeout)) // at least 5 x MessageTimeout
	l.add("", "")
	// Intervals of a second: what Slurm waits between looking at its queue and
	// its nodes is time in which a ready node is idle.
	l.add("SchedulerParameters", "bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0,nohold_on_prolog_fail,sbatch_wait_nodes")
	slurmctld := "enable_configless,idle_on_node_suspend,power_save_interval=1,power_save_min_interval=0"
	if f.addressFlag {
		slurmctld += ",cloud_reg_addrs"
	}
	l.add("SlurmctldParameters", slurmctld)
	l.add("ResumeProgram", c.program("sluice-resume"))
	l.add("SuspendProgram", c.program("sluice-suspend"))
	l.add("ResumeFailProgram", c.program("sluice-resume-fail"))
	l.add("ResumeTimeout", seconds(c.ResumeTimeout))
	l.add("SuspendTimeout", seconds(c.SuspendTimeout))
	if c.SuspendTime < 0 {
		l.add("SuspendTime", "INFINITE")
	} else {
		l.add("SuspendTime", seconds(c.SuspendTime))
	}
	l.add("ResumeRate", "0") // no limit: sluiced paces its calls
	l.add("SuspendRate", "0")
	l.add("", "")
	l = override(l, c.Parameters)

	for _, s := range c.NodeSets {
		v := fmt.Sprintf("%s State=CLOUD CPUs=%d RealMemory=%d", s.Nodes, s.CPUs, s.MemoryMiB)
		if len(s.Features) > 0 {
			v += " Feature=" + strings.Join(s.Features, ",")
		}
		l.add("NodeName", v)
	}
	for _, s := range c.NodeSets {
		l.add("NodeSet", s.Name+" Nodes="+s.Nodes)
	}
	for _, p := range c.Partitions {
		v := p.Name + " Nodes=" + strings.Join(p.NodeSets, ",")
		if p.Default {
			v += " Default=YES"
		}
		l.add("PartitionName", v+" MaxTime=INFINITE State=UP")
	}
	var b strings.Builder
	fmt.Fprintf(&b, header, c.Version)
	l.write(&b)
	return []byte(b.String())
}

// override replaces values in l and appends those that l has not.
func override(l lines, with map[string]string) lines {
	keys := make([]string, 0, len(with))
	for k := range with {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	added := false
	for _, k := range keys {
		i := slices.IndexFunc(l, func(kv [2]string) bool { return strings.EqualFold(kv[0], k) })
		if i >= 0 {
			l[i][1] = with[k]
		} else {
			l.add(k, with[k])
			added = true
		}
	}
	if added {
		l.add("", "")
	}
	return l
}

func (c *Cluster) slurmdbd() []byte {
	var l lines
	l.add("AuthType", "auth/"+c.Auth)
	l.add("DbdHost", c.Database.Host)
	l.add("SlurmUser", c.User)
	l.add("LogFile", path.Join(c.LogDir, "slurmdbd.log"))
	l.add("PidFile", "/run/slurmdbd/slurmdbd.pid")
	l.add("StorageType", "accounting_storage/mysql")
	l.add("StorageHost", c.Database.StorageHost)
	l.add("StorageUser", c.Database.StorageUser)
	if c.Database.StoragePass != "" {
		l.add("StoragePass", c.Database.StoragePass)
	}
	l.add("StorageLoc", c.Database.StorageName)
	var b strings.Builder
	fmt.Fprintf(&b, header, c.Version)
	l.write(&b)
	return []byte(b.String())
}

func (c *Cluster) cgroup(f features) []byte {
	plugin := c.CgroupPlugin
	if plugin == "disabled" && !f.cgroupDisabled {
		plugin = "cgroup/v1" // without a mount of cgroups it does nothing
	}
	var l lines
	l.add("CgroupPlugin", plugin)
	if strings.Contains(c.TaskPlugin, "cgroup") {
		l.add("ConstrainCores", "yes")
		l.add("ConstrainRAMSpace", "yes")
		l.add("ConstrainDevices", "yes")
	}
	var b strings.Builder
	fmt.Fprintf(&b, header, c.Version)
	l.write(&b)
	return []byte(b.String())
}

// otherTimeout bounds setup, which waits for a sluiced that is away, and the
// shorter functions, which set themselves shorter limits.
const otherTimeout = time.Hour

// pollInterval is the pause between two calls of test_data_in, which waits
// itself.
const pollInterval = time.Second

func (c *Cluster) burstBuffer(f features) []byte {
	var l lines
	l.add("Directive", "SLUICE")
	l.add("StageInTimeout", seconds(c.StageInTimeout))
	l.add("StageOutTimeout", seconds(c.StageOutTimeout))
	l.add("OtherTimeout", seconds(otherTimeout))
	if f.polls {
		l.add("PollInterval", seconds(pollInterval))
	}
	// After a failure the job lets go of its buffer: a released job is set up
	// again (without the flag it waits for ever), a finished one leaves the queue.
	l.add("Flags", "TeardownFailure")
	var b strings.Builder
	fmt.Fprintf(&b, header, c.Version)
	l.write(&b)
	return []byte(b.String())
}
