package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"github.com/sluicehpc/sluice/examples/trainer/collective"
	"github.com/sluicehpc/sluice/slurm/hostlist"
)

// taskFromEnv says which rank this process is, from the variables that srun sets (srun(1), "OUTPUT ENVIRONMENT VARIABLES"). Without srun
// it is the only one. The rendezvous file lies in out, and its name has the job's and step's number: the others of an earlier
// job with the same out never mistake it for theirs.
func taskFromEnv(getenv func(string) string, out string) (collective.Config, error) {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	c := collective.Config{Size: 1, Node: host}
	var errs []error
	number := func(name string) int {
		n, err := strconv.ParseUint(getenv(name), 10, 31)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s is %q, not a number", name, getenv(name)))
		}
		return int(n)
	}
	if getenv("SLURM_STEP_NODELIST") == "" {
		// sbatch sets SLURM_NTASKS for the batch script too, where only one process runs.
		if n := getenv("SLURM_NTASKS"); n != "" && n != "1" {
			return c, fmt.Errorf("the job has %s tasks, but this one was not started by srun: use \"srun trainer ...\" in the job script", n)
		}
		return c, nil
	}
	c.Rank, c.Size = number("SLURM_PROCID"), number("SLURM_NTASKS")
	job, step, node := number("SLURM_JOB_ID"), number("SLURM_STEP_ID"), number("SLURM_NODEID")
	nodes, err := hostlist.Expand(getenv("SLURM_STEP_NODELIST"))
	if err != nil {
		errs = append(errs, fmt.Errorf("SLURM_STEP_NODELIST: %w", err))
	} else if node >= len(nodes) {
		errs = append(errs, fmt.Errorf("SLURM_NODEID is %d, but SLURM_STEP_NODELIST has %d nodes", node, len(nodes)))
	}
	if c.Size < 1 || c.Rank >= c.Size {
		errs = append(errs, fmt.Errorf("SLURM_PROCID is %d of SLURM_NTASKS %d", c.Rank, c.Size))
	}
	if len(errs) > 0 {
		return c, errors.Join(errs...)
	}
	c.Node = nodes[node]
	c.File = filepath.Join(out, fmt.Sprintf(".rendezvous-%d.%d", job, step))
	c.Hosts = []string{c.Node}
	// A node's name in Slurm need not be one that the resolver knows: the others try the addresses then.
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return c, fmt.Errorf("list this node's addresses: %w", err)
	}
	for _, a := range addrs {
		if ip, ok := a.(*net.IPNet); ok && ip.IP.IsGlobalUnicast() {
			c.Hosts = append(c.Hosts, ip.IP.String())
		}
	}
	return c, nil
}
