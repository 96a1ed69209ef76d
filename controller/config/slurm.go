package config

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/sluicehpc/sluice/internal/atomicfile"
	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/slurm/conf"
)

// EnvironmentDir is where sluiced leaves the jobs' environments for burst_buffer.lua.
const EnvironmentDir = "/run/sluice/env"

// SlurmFiles renders Slurm's files.
func (c *Config) SlurmFiles() ([]conf.File, error) {
	v, err := conf.ParseVersion(c.Slurm.Version)
	if err != nil {
		return nil, err
	}
	s := conf.Cluster{
		Version: v, Name: c.Cluster, ControllerHost: c.Slurm.ControllerHost, User: c.Slurm.User, Auth: c.Slurm.Auth,
		CgroupPlugin: c.Slurm.CgroupPlugin, ProctrackType: c.Slurm.Proctrack,
		Database:      conf.Database{Host: c.Slurm.AccountingHost},
		ResumeTimeout: time.Duration(c.Slurm.ResumeTimeout), SuspendTimeout: time.Duration(c.Slurm.SuspendTimeout),
		SuspendTime: time.Duration(c.Slurm.SuspendTime), EnvironmentDir: EnvironmentDir, Parameters: c.Slurm.Parameters,
	}
	for _, ns := range c.NodeSets {
		s.NodeSets = append(s.NodeSets, conf.NodeSet{Name: ns.Name, Nodes: ns.Nodes, CPUs: ns.CPUs, MemoryMiB: ns.MemoryMiB, Features: ns.Features})
	}
	for _, p := range c.Partitions {
		s.Partitions = append(s.Partitions, conf.Partition{Name: p.Name, NodeSets: p.NodeSets, Default: p.Default})
	}
	return conf.Render(s)
}

// WriteSlurm renders Slurm's files into dir, which it makes if it has to. Run it
// as root: private files become SlurmUser's.
func (c *Config) WriteSlurm(ctx context.Context, dir string) error {
	list, err := c.SlurmFiles()
	if err != nil {
		return fmt.Errorf("render Slurm's files: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("render Slurm's files: %w", err)
	}
	for _, f := range list {
		path := filepath.Join(dir, f.Name)
		if err := atomicfile.Write(path, f.Data, f.Mode); err != nil {
			return err
		}
		if f.Mode.Perm()&0o077 == 0 {
			u, err := users.ByName(ctx, c.Slurm.User)
			if err != nil {
				return fmt.Errorf("give %s to SlurmUser: %w", path, err)
			}
			if err := os.Chown(path, int(u.UID), int(u.GID)); err != nil {
				return fmt.Errorf("give %s to SlurmUser: %w", path, err)
			}
		}
	}
	return nil
}
