// Package sandbox runs a cloud on one machine: Google's APIs, a metadata server, DNS and virtual
// machines, all in network, mount and pid namespaces of their own, so that nothing on the host changes.
//
// Up starts the outer process (see Serve), which is PID 1 of the pid namespace: its end, however it comes, ends everything.
package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"github.com/sluicehpc/sluice/sandbox/rootfs"
)

// DefaultName is the name of a sandbox that was given none.
const DefaultName = "default"

// The sandbox's project.
const (
	Project = "sluice-sandbox"
	Region  = "us-central1"
	Zone    = "us-central1-a"
)

// Addresses inside a sandbox.
const (
	gatewayAddress  = "10.128.0.1"
	networkPrefix   = "10.128.0.0/20"
	lustrePrefix    = "10.129.0.0/24"
	metadataAddress = "169.254.169.254"
	apiPort         = 8080

	// APIURL is where all APIs are, inside.
	APIURL = "http://10.128.0.1:8080"
)

// zoneDomain is the domain of the VMs' names.
const zoneDomain = Zone + ".c." + Project + ".internal"

// Errors, to be compared with errors.Is.
var (
	ErrRunning    = errors.New("the sandbox runs already")
	ErrNotRunning = errors.New("no such sandbox is running")
	ErrNoVM       = errors.New("no such VM is running")
	ErrBadName    = errors.New("bad name for a sandbox")
)

// Endpoints are the URLs of the services, without a path.
type Endpoints struct {
	Compute string `json:"compute"`
	Lustre  string `json:"lustre"`
	Storage string `json:"storage"`
	IAM     string `json:"iam"` // with its credentials service, sts, the resource manager and the key set
}

func endpointsAt(url string) Endpoints {
	return Endpoints{Compute: url, Lustre: url, Storage: url, IAM: url}
}

// VM is an instance as status shows it.
type VM struct {
	Name    string `json:"name"`
	Address string `json:"address"`
	State   string `json:"state"` // Compute Engine's word, for example RUNNING
}

// Status is what `sluice sandbox status --json` prints.
type Status struct {
	Name          string    `json:"name"`
	Pid           int       `json:"pid"`            // of the outer process, on the host
	Slurm         string    `json:"slurm"`          // release in the VMs' root, for example "24.11"
	VMs           []VM      `json:"vms"`            // sorted by name
	Endpoints     Endpoints `json:"endpoints"`      // inside, as in Exec
	HostEndpoints Endpoints `json:"host_endpoints"` // the same on the host's 127.0.0.1
}

var nameRule = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)

// paths are the places of one sandbox.
type paths struct {
	state string // small: control.sock, state.json, log
	data  string // large: objects, Lustre, VMs, homes, image
	lock  string // held by whoever starts or ends the sandbox
}

// pathsOf returns the places of the sandbox, below $SLUICE_ROOT when that is set.
func pathsOf(name string) (paths, error) {
	if !nameRule.MatchString(name) {
		return paths{}, fmt.Errorf("%w: %q: want up to 32 of a-z, 0-9 and -", ErrBadName, name)
	}
	run := filepath.Join("/", os.Getenv("SLUICE_ROOT"), "run/sluice-sandbox")
	return paths{
		state: filepath.Join(run, name),
		data:  filepath.Join(rootfs.Cache(), "sandboxes", name),
		lock:  filepath.Join(run, "."+name+".lock"),
	}, nil
}

func (p paths) control() string    { return filepath.Join(p.state, "control.sock") }
func (p paths) record() string     { return filepath.Join(p.state, "state.json") }
func (p paths) log() string        { return filepath.Join(p.state, "log") }
func (p paths) violations() string { return filepath.Join(p.state, "violations") }
func (p paths) lustre() string     { return filepath.Join(p.state, "lustre.sock") }
func (p paths) image() string      { return filepath.Join(p.data, "image") }
func (p paths) home() string       { return filepath.Join(p.data, "home") }
func (p paths) vms() string        { return filepath.Join(p.data, "vms") }
func (p paths) objects() string    { return filepath.Join(p.data, "storage") }
func (p paths) files() string      { return filepath.Join(p.data, "lustre") }
