package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/iam"
	"github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/internal/command"
	"github.com/sluicehpc/sluice/lustre/probe"
)

// checks lists what is looked at. Without a valid sluice.yaml only that remains which needs none.
func (s *Site) checks() []check {
	c, err := config.Load(s.ConfigPath)
	s.config = c
	list := []check{
		{"configuration", func(context.Context, *Site) Finding { return configuration(s.ConfigPath, c, err) }},
		{"sluiced", sluiced},
		{"slurmctld", slurmctld},
		{"programs", programs},
		{"clock", clockDifference},
	}
	if c == nil {
		return list
	}
	if c.Slurm.AccountingHost != "" {
		list = append(list, check{"slurmdbd", slurmdbd})
	}
	for _, fs := range c.FileSystems {
		list = append(list,
			check{"file system " + fs.Name + ": instance", func(ctx context.Context, s *Site) Finding { return instance(ctx, s, fs) }},
			check{"file system " + fs.Name + ": mount", func(ctx context.Context, s *Site) Finding { return mounted(ctx, s, fs) }},
			check{"file system " + fs.Name + ": space", func(ctx context.Context, s *Site) Finding { return space(ctx, s, fs) }},
		)
	}
	return append(list,
		check{"permissions", permissions},
		check{"Slurm's files", slurmFiles},
		check{"secrets", secrets},
		check{"agents", agents},
		check{"transfers", transfers},
		check{"metadata address", metadataAddress},
	)
}

func configuration(path string, c *config.Config, err error) Finding {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fail("run sluice doctor on the controller VM; a fresh one gets the file from sluiced setup",
			"%s is not there: file systems, Slurm's files, agents and transfers were not checked", path)
	case err != nil:
		return fail("mend the file, then sluiced check-config", "%v\nfile systems, Slurm's files, agents and transfers were not checked", err)
	}
	return ok("cluster %s, %d file systems, %d node sets", c.Cluster, len(c.FileSystems), len(c.NodeSets))
}

func permissions(ctx context.Context, s *Site) Finding {
	missing, asked, err := s.Permissions(ctx, s.config)
	switch {
	case err != nil:
		return fail("does this VM have a service account, and are the IAM and Resource Manager APIs enabled?", "%v", err)
	case len(missing) > 0:
		return fail("grant them to this VM's service account; docs/permissions.md lists the role", "%s", strings.Join(missing, "\n"))
	}
	return ok("sluiced's account has all %d", asked)
}

// testPermissions asks what sluiced's account, which is this VM's, may do on the project and as the accounts that
// sluice.yaml names.
func testPermissions(ctx context.Context, c *config.Config) (missing []string, asked int, err error) {
	client, err := iam.NewClient(ctx, c.Endpoints.GCP())
	if err != nil {
		return nil, 0, err
	}
	note := func(what string, list []iam.Permission, names []string, failure error) {
		asked += len(list)
		err = errors.Join(err, failure)
		for _, p := range list {
			if slices.Contains(names, p.Name) {
				missing = append(missing, fmt.Sprintf("%s is missing on %s: sluiced cannot %s", p.Name, what, p.For))
			}
		}
	}
	names, failure := client.TestProject(ctx, c.Project, iam.Names(iam.ControllerPermissions))
	note("project "+c.Project, iam.ControllerPermissions, names, failure)
	accounts := map[string][]iam.Permission{}
	for _, ns := range c.NodeSets {
		if ns.ServiceAccount != "" {
			accounts[ns.ServiceAccount] = iam.NodeAccountPermissions
		}
	}
	for _, account := range c.Policy.ServiceAccounts() {
		accounts[account] = iam.DataAccountPermissions
	}
	for _, account := range slices.Sorted(maps.Keys(accounts)) {
		names, failure := client.TestAccount(ctx, account, iam.Names(accounts[account]))
		note("service account "+account, accounts[account], names, failure)
	}
	return missing, asked, err
}

func newLustre(ctx context.Context, c *config.Config) (*lustre.Client, error) {
	return lustre.NewClient(ctx, gcp.ClientOptions(c.Endpoints.Lustre)...)
}

// getInstance reads a file system's Managed Lustre instance.
func (s *Site) getInstance(ctx context.Context, fs config.FileSystem) (*lustre.Instance, error) {
	client, err := s.Lustre(ctx, s.config)
	if err != nil {
		return nil, err
	}
	return client.GetInstance(ctx, fs.Instance)
}

func instance(ctx context.Context, s *Site, fs config.FileSystem) Finding {
	in, err := s.getInstance(ctx, fs)
	switch {
	case gcp.IsNotFound(err):
		return fail("compare instance: in sluice.yaml with gcloud lustre instances list", "%s does not exist", fs.Instance)
	case err != nil:
		return fail("look at the network to the API, and at the roles of this VM's service account", "%v", err)
	case in.State == lustre.StateUpgrading || in.State == lustre.StateRepairing:
		return warn("I/O stalls for minutes meanwhile; jobs wait and go on by themselves", "%s is %s %s", fs.Instance, in.State, in.StateReason)
	case in.State != lustre.StateActive:
		return fail("see gcloud lustre instances describe; SUSPENDED points at its key in Cloud KMS", "%s is %s %s", fs.Instance, in.State, in.StateReason)
	}
	return ok("ACTIVE, %s, %d GiB", in.MountPoint, in.CapacityGib)
}

func mounted(ctx context.Context, s *Site, fs config.FileSystem) Finding {
	check := probe.Check{Dir: fs.Mount, Types: fs.Types}
	source := ""
	// Without the service's word any source will do: the instance's own check says what is wrong there.
	if in, err := s.getInstance(ctx, fs); err == nil {
		source = in.MountPoint
	}
	check.Source = source
	r := s.Probe(check)
	switch r.State {
	case probe.OK:
		return ok("%s answers in %s", fs.Mount, r.Took.Round(1e5))
	case probe.Hung:
		return fail("is the instance ACTIVE, and does a firewall let TCP 988 and 1021-1023 through? It comes back by itself when the servers do", "%s", r.Detail)
	case probe.NotMounted:
		return fail("the agent mounts it: journalctl -u sluice-agent", "%s", r.Detail)
	case probe.WrongSource:
		return fail("umount "+fs.Mount+"; the agent then mounts the right one", "%s", r.Detail)
	case probe.WrongType:
		return fail("what stands in for Lustre must be named in types: of the file system in sluice.yaml", "%s", r.Detail)
	}
	return fail("see dmesg", "%s", r.Detail)
}

// Lustre gets slower from 90 % on, and one full target can refuse writes before all are full.
const fullPercent, nearlyPercent = 97, 90

func space(ctx context.Context, s *Site, fs config.FileSystem) Finding {
	if r := s.Probe(probe.Check{Dir: fs.Mount, Types: fs.Types}); r.State != probe.OK {
		return warn("see the check of its mount", "not known: %s", r.Detail)
	}
	// In a child: a mount that stops answering now must not stop this process.
	out, err := s.Run(ctx, command.Spec{Path: "stat", Args: []string{"--file-system", "--format=%S %b %a", fs.Mount}})
	var unit, blocks, free int64
	if err == nil {
		_, err = fmt.Sscan(string(out), &unit, &blocks, &free)
	}
	if err != nil {
		return fail("see dmesg", "ask %s for its size: %v", fs.Mount, err)
	}
	used := 0
	if blocks > 0 {
		used = int((blocks - free) * 100 / blocks)
	}
	text := fmt.Sprintf("%s free of %s (%d %% used)", bytesText(free*unit), bytesText(blocks*unit), used)
	switch {
	case used >= fullPercent:
		return fail("remove data, or grow the instance: gcloud lustre instances update --capacity-gib", "%s", text)
	case used >= nearlyPercent:
		return warn("Lustre gets slower from 90 % on: remove data, or grow the instance", "%s", text)
	}
	return ok("%s", text)
}

// bytesText writes a size with a binary unit: "1.5 TiB".
func bytesText(n int64) string {
	const units = "KMGTP"
	f, i := float64(n), -1
	for f >= 1024 && i < len(units)-1 {
		f /= 1024
		i++
	}
	if i < 0 {
		return strconv.FormatInt(n, 10) + " B"
	}
	return strings.TrimSuffix(strconv.FormatFloat(f, 'f', 1, 64), ".0") + " " + units[i:i+1] + "iB"
}
