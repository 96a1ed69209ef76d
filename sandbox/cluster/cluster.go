// Package cluster describes the sandbox's Slurm cluster and builds it through
// the cloud's APIs, as an admin would from a workstation.
package cluster

import (
	"fmt"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/iam"
	"github.com/sluicehpc/sluice/policy"
	"github.com/sluicehpc/sluice/sandbox/rootfs"
	"github.com/sluicehpc/sluice/slurm/conf"
)

// What the sandbox's cluster is called.
const (
	Name        = "sandbox"
	Project     = "sluice-sandbox"
	Zone        = "us-central1-a"
	Controller  = "controller"
	Login       = "login"
	Partition   = "main"
	Nodes       = "n[1-4]"
	ImageFamily = "sluice-sandbox"
	Instance    = "scratch" // the Managed Lustre instance
	FSName      = "scratch" // its file system name, at most 8 letters and digits
	MountDir    = "/lustre"
	Account     = "research"
	DataAccount = "research-data" // the service account that has the rights on the account's buckets
)

// Users are the ordinary users of the VMs' image; all may submit jobs.
var Users = func() []string {
	var names []string
	for _, u := range rootfs.Users {
		names = append(names, u.Name)
	}
	return names
}()

// Capacity and throughput of the Lustre instance: the smallest that Managed
// Lustre sells in its fastest tier (GiB; MB/s per TiB).
const (
	capacityGiB   = 9000
	throughputMBs = 1000
)

// Config is the cluster's sluice.yaml.
func Config(endpoints gcp.Endpoints, slurmVersion string) *config.Config {
	return &config.Config{
		Cluster:   Name,
		Project:   Project,
		Zone:      Zone,
		Endpoints: config.Endpoints{Compute: endpoints.Compute, Lustre: endpoints.Lustre, Storage: endpoints.Storage, IAM: endpoints.IAM},
		FileSystems: []config.FileSystem{{
			Name:     Instance,
			Instance: fmt.Sprintf("projects/%s/locations/%s/instances/%s", Project, Zone, Instance),
			Mount:    MountDir,
			Default:  true,
			// The stand-in is a FUSE file system; mountinfo shows its subtype.
			Types: []string{"lustre", "fuse.lustre"},
		}},
		NodeSets: []config.NodeSet{{
			Name: "compute", Nodes: Nodes, MachineType: "n2-standard-2", ImageFamily: ImageFamily,
			Network: "default", ServiceAccount: iam.AccountEmail(NodeAccount, Project), CPUs: 2, MemoryMiB: 2048,
		}},
		Partitions: []config.Partition{{Name: Partition, NodeSets: []string{"compute"}, Default: true}},
		Slurm: config.Slurm{
			Version: slurmVersion, Auth: authOf(slurmVersion), CgroupPlugin: "disabled", Proctrack: "linuxproc",
			ControllerHost: Controller, AccountingHost: Controller,
			ResumeTimeout:  config.Duration(2 * time.Minute),
			SuspendTimeout: config.Duration(30 * time.Second),
			SuspendTime:    config.Duration(5 * time.Minute),
		},
		Policy: policy.Policy{{
			Accounts: []string{Account},
			Read:     []string{"gs://research-*/"}, Write: []string{"gs://research-*/"},
			ServiceAccount: iam.AccountEmail(DataAccount, Project),
		}},
	}
}

// accountsScript registers the sandbox's account and users: a site's own
// matter, which its startup script does after Sluice's part.
func accountsScript() string {
	return fmt.Sprintf(`sacctmgr --immediate add account %[1]s description=research organization=sandbox || true
sacctmgr --immediate add user name=%[2]s account=%[1]s || true
`, Account, strings.Join(Users, ","))
}

// controllerScript is the controller's startup script.
func controllerScript() string {
	return `#!/bin/bash
set -eu
/usr/local/libexec/sluice/sluiced setup
` + accountsScript() + `echo "controller: set up"
`
}

// authOf is how the daemons of a Slurm trust each other: "slurm" where it has auth/slurm.
func authOf(slurmVersion string) string {
	if v, err := conf.ParseVersion(slurmVersion); err == nil && !v.HasAuthSlurm() {
		return "munge"
	}
	return "slurm"
}

// loginScript is the login VM's startup script. What users' commands need is started by the agent once its key
// is there: sackd, which also fetches Slurm's configuration, or munge, with which the commands fetch it themselves.
func loginScript(auth string) string {
	script := `#!/bin/bash
set -eu
`
	if auth == "munge" {
		script += `echo SLURM_CONF_SERVER=` + Controller + `:6817 >>/etc/environment
`
	}
	return script + `systemctl enable --now sluice-agent
echo "login: set up"
`
}
