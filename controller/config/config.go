// Package config reads sluice.yaml, the one file that describes a cluster to sluiced.
package config

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/policy"
)

// DefaultPath is where sluiced looks for its configuration.
const DefaultPath = "/etc/sluice/sluice.yaml"

// Config is sluice.yaml. Load returns it with every default filled in; the zero
// values named here are what a file may leave out.
type Config struct {
	// Cluster is Slurm's ClusterName: lower-case letters, digits and hyphens, at most 40.
	Cluster string `yaml:"cluster"`
	Project string `yaml:"project"`
	Zone    string `yaml:"zone"`

	Endpoints Endpoints `yaml:"endpoints,omitempty"`

	// Listen is the HTTPS address for agents; ":8443" by default.
	Listen string `yaml:"listen,omitempty"`
	// Address is the host:port under which agents reach Listen; by default
	// slurm.controller_host with Listen's port.
	Address string `yaml:"address,omitempty"`

	FileSystems []FileSystem `yaml:"file_systems"`
	// Roots are absolute directories below which a directive's absolute paths must lie.
	Roots      []string    `yaml:"roots,omitempty"`
	NodeSets   []NodeSet   `yaml:"nodesets"`
	Partitions []Partition `yaml:"partitions"`
	Slurm      Slurm       `yaml:"slurm,omitempty"`
	// Policy says who may stage in and out where; without a rule nobody may.
	Policy policy.Policy `yaml:"policy,omitempty"`

	// GuardMetadata lets only root reach the metadata server on the cluster's VMs; true by default.
	GuardMetadata *bool `yaml:"guard_metadata,omitempty"`

	// KeepJobDir is how long a job's directory is kept after its stage-outs are
	// verified; 7d by default.
	KeepJobDir Duration `yaml:"keep_job_dir,omitempty"`
	// Store is the SQLite file; below $SLUICE_ROOT when that is set.
	Store string `yaml:"store,omitempty"`
}

// Endpoints are the services' URLs without a path; empty ones are Google's own.
type Endpoints struct {
	Compute string `yaml:"compute,omitempty"`
	Lustre  string `yaml:"lustre,omitempty"`
	Storage string `yaml:"storage,omitempty"`
	IAM     string `yaml:"iam,omitempty"`
}

// GCP returns the endpoints as the clients take them.
func (e Endpoints) GCP() gcp.Endpoints {
	return gcp.Endpoints{Compute: e.Compute, Lustre: e.Lustre, Storage: e.Storage, IAM: e.IAM}
}

// FileSystem is a Managed Lustre instance and where the VMs mount it.
type FileSystem struct {
	Name     string `yaml:"name"`     // NAME in fs=NAME
	Instance string `yaml:"instance"` // projects/P/locations/ZONE/instances/I
	Mount    string `yaml:"mount"`    // absolute directory
	// Default marks the file system that is meant without fs=; the only one is it anyway.
	Default bool `yaml:"default,omitempty"`
	// Types are the mount types that count as mounted; [lustre] by default.
	Types []string `yaml:"types,omitempty"`
}

// NodeSet is a group of equal CLOUD nodes.
type NodeSet struct {
	Name        string `yaml:"name"`
	Nodes       string `yaml:"nodes"` // a Slurm hostlist
	MachineType string `yaml:"machine_type"`
	// Image or ImageFamily, exactly one: a name in the cluster's project, or
	// projects/P/global/images/… as Compute Engine writes it.
	Image          string            `yaml:"image,omitempty"`
	ImageFamily    string            `yaml:"image_family,omitempty"`
	Network        string            `yaml:"network,omitempty"`
	Subnetwork     string            `yaml:"subnetwork,omitempty"`
	ServiceAccount string            `yaml:"service_account,omitempty"`
	Labels         map[string]string `yaml:"labels,omitempty"`
	Metadata       map[string]string `yaml:"metadata,omitempty"`
	CPUs           int               `yaml:"cpus"`
	MemoryMiB      int               `yaml:"memory_mib"`
	Features       []string          `yaml:"features,omitempty"`
}

// ImagePath names the image as Compute Engine does; a bare name is the project's.
func (ns NodeSet) ImagePath(project string) string {
	switch {
	case strings.Contains(ns.Image, "/"):
		return ns.Image
	case ns.Image != "":
		return "projects/" + project + "/global/images/" + ns.Image
	case strings.Contains(ns.ImageFamily, "/"):
		return ns.ImageFamily
	}
	return "projects/" + project + "/global/images/family/" + ns.ImageFamily
}

// NetworkPath names the network; with neither network nor subnetwork it is the default one.
func (ns NodeSet) NetworkPath() string {
	switch {
	case strings.Contains(ns.Network, "/"):
		return ns.Network
	case ns.Network != "":
		return "global/networks/" + ns.Network
	case ns.Subnetwork != "":
		return ""
	}
	return "global/networks/default"
}

// SubnetworkPath names the subnetwork, or is "". A bare name is in the zone's region.
func (ns NodeSet) SubnetworkPath(zone string) string {
	if ns.Subnetwork == "" || strings.Contains(ns.Subnetwork, "/") {
		return ns.Subnetwork
	}
	region := zone
	if i := strings.LastIndexByte(zone, '-'); i > 0 {
		region = zone[:i]
	}
	return "regions/" + region + "/subnetworks/" + ns.Subnetwork
}

// Partition is a Slurm partition over node sets.
type Partition struct {
	Name     string   `yaml:"name"`
	NodeSets []string `yaml:"nodesets"`
	Default  bool     `yaml:"default,omitempty"`
}

// What Slurm's processes know each other by.
const (
	AuthSlurm = "slurm"
	AuthMunge = "munge"
)

// KeyOwner is the user whose KeyFile is.
func (s Slurm) KeyOwner() string {
	if s.Auth == AuthMunge {
		return "munge"
	}
	return s.User
}

// Slurm is what sluiced must know of Slurm, and what it renders into Slurm's files.
type Slurm struct {
	User    string `yaml:"user,omitempty"`    // SlurmUser; "slurm"
	Version string `yaml:"version,omitempty"` // major.minor of slurmctld, "24.11"
	Auth    string `yaml:"auth,omitempty"`    // AuthSlurm or AuthMunge, the default
	// KeyFile is the key of auth, on the controller and where sluiced brings it to the
	// other VMs; /etc/slurm/slurm.key, with munge /etc/munge/munge.key.
	KeyFile        string `yaml:"key_file,omitempty"`
	CgroupPlugin   string `yaml:"cgroup_plugin,omitempty"` // autodetect, cgroup/v1, cgroup/v2 or disabled; autodetect
	Proctrack      string `yaml:"proctrack,omitempty"`     // cgroup or linuxproc; cgroup
	ControllerHost string `yaml:"controller_host"`
	// AccountingHost is where slurmdbd runs; empty: no accounting database.
	AccountingHost string   `yaml:"accounting_host,omitempty"`
	ResumeTimeout  Duration `yaml:"resume_timeout,omitempty"`  // 5m
	SuspendTimeout Duration `yaml:"suspend_timeout,omitempty"` // 2m
	SuspendTime    Duration `yaml:"suspend_time,omitempty"`    // 5m of idling
	// Parameters are further slurm.conf lines, verbatim.
	Parameters map[string]string `yaml:"parameters,omitempty"`
}

// Duration is a time.Duration written as Go writes it, plus d for 24 h ("7d", "1h30m").
type Duration time.Duration

// ParseDuration reads Go's form, or whole days ("7d").
func ParseDuration(s string) (time.Duration, error) {
	if days, ok := strings.CutSuffix(s, "d"); ok {
		n, err := strconv.Atoi(days)
		if err != nil || n < 0 || n > 36500 {
			return 0, fmt.Errorf("%q is not a duration such as 7d or 1h30m", s)
		}
		return time.Duration(n) * 24 * time.Hour, nil
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return 0, fmt.Errorf("%q is not a duration such as 7d or 1h30m", s)
	}
	return d, nil
}

// String writes whole days as "7d" and anything else as Go does.
func (d Duration) String() string {
	const day = 24 * time.Hour
	if v := time.Duration(d); v != 0 && v%day == 0 {
		return strconv.Itoa(int(v/day)) + "d"
	}
	return time.Duration(d).String()
}

// MarshalYAML writes String's form.
func (d Duration) MarshalYAML() (any, error) { return d.String(), nil }

// UnmarshalYAML reads ParseDuration's form.
func (d *Duration) UnmarshalYAML(n *yaml.Node) error {
	v, err := ParseDuration(n.Value)
	*d = Duration(v)
	return err
}

// Load reads and checks the file at path. What is wrong in the text is a
// diag.List with every error.
func Load(path string) (*Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	return Parse(path, data)
}

// Marshal renders c as sluice.yaml.
func Marshal(c *Config) ([]byte, error) {
	var b strings.Builder
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := errors.Join(e.Encode(c), e.Close()); err != nil {
		return nil, fmt.Errorf("render configuration: %w", err)
	}
	return []byte(b.String()), nil
}

// setDefaults fills what the file left out.
func (c *Config) setDefaults() {
	str := func(p *string, v string) {
		if *p == "" {
			*p = v
		}
	}
	dur := func(p *Duration, v time.Duration) {
		if *p == 0 {
			*p = Duration(v)
		}
	}
	str(&c.Listen, ":8443")
	str(&c.Slurm.User, "slurm")
	str(&c.Slurm.Version, "24.11")
	str(&c.Slurm.Auth, AuthMunge)
	if c.Slurm.Auth == AuthMunge {
		str(&c.Slurm.KeyFile, "/etc/munge/munge.key")
	}
	str(&c.Slurm.KeyFile, "/etc/slurm/slurm.key")
	str(&c.Slurm.CgroupPlugin, "autodetect")
	str(&c.Slurm.Proctrack, "cgroup")
	dur(&c.Slurm.ResumeTimeout, 5*time.Minute)
	dur(&c.Slurm.SuspendTimeout, 2*time.Minute)
	dur(&c.Slurm.SuspendTime, 5*time.Minute)
	dur(&c.KeepJobDir, 7*24*time.Hour)
	str(&c.Store, "/var/lib/sluice/sluice.db")
	if _, port, err := net.SplitHostPort(c.Listen); err == nil {
		str(&c.Address, net.JoinHostPort(c.Slurm.ControllerHost, port))
	}
	for i := range c.FileSystems {
		if len(c.FileSystems[i].Types) == 0 {
			c.FileSystems[i].Types = []string{"lustre"}
		}
		c.FileSystems[i].Mount = filepath.Clean(c.FileSystems[i].Mount)
	}
	if c.GuardMetadata == nil {
		guard := true
		c.GuardMetadata = &guard
	}
	if len(c.FileSystems) == 1 {
		c.FileSystems[0].Default = true
	}
}

// AccountsEnforced reports that Slurm lets users submit under their own accounts only.
func (c *Config) AccountsEnforced() bool {
	for k, v := range c.Slurm.Parameters {
		if strings.EqualFold(k, "AccountingStorageEnforce") {
			v = strings.ToLower(v)
			if !strings.Contains(v, "associations") && !strings.Contains(v, "limits") && !strings.Contains(v, "safe") && v != "all" {
				return false
			}
		}
	}
	return c.Slurm.AccountingHost != ""
}

// StorePath is Store below $SLUICE_ROOT.
func (c *Config) StorePath() string { return filepath.Join(os.Getenv("SLUICE_ROOT"), c.Store) }

// FileSystem returns the file system of that name, the default one for "".
func (c *Config) FileSystem(name string) (FileSystem, bool) {
	for _, fs := range c.FileSystems {
		if fs.Name == name || name == "" && fs.Default {
			return fs, true
		}
	}
	return FileSystem{}, false
}
