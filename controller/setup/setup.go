// Package setup turns a fresh VM into the cluster's controller: it fetches
// sluice.yaml from the VM's metadata, renders Slurm's files, makes the key by
// which Slurm's processes know each other, and starts the services.
package setup

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"cloud.google.com/go/compute/metadata"

	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/internal/atomicfile"
	"github.com/sluicehpc/sluice/internal/command"
	"github.com/sluicehpc/sluice/internal/retry"
	"github.com/sluicehpc/sluice/internal/users"
)

// ConfigAttribute is the instance attribute that holds sluice.yaml.
const ConfigAttribute = "sluice-config"

// accountingDeadline bounds the wait for slurmdbd: it makes its tables at its first start.
const accountingDeadline = 2 * time.Minute

// Options say where things are; Render writes Slurm's files into a directory.
type Options struct {
	ConfigPath string // where sluice.yaml is written
	SlurmDir   string // where Slurm's files are written
	Render     func(c *config.Config, dir string) error
	Log        io.Writer
}

// Run may be repeated: every step does nothing where its work is done.
func Run(ctx context.Context, o Options) error {
	c, err := fetch(ctx, o.ConfigPath)
	if err != nil {
		return err
	}
	fmt.Fprintf(o.Log, "cluster %s: configuration written to %s\n", c.Cluster, o.ConfigPath)
	if err := o.Render(c, o.SlurmDir); err != nil {
		return fmt.Errorf("render Slurm's files: %w", err)
	}
	made, err := makeKey(ctx, c.Slurm.KeyFile, c.Slurm.KeyOwner())
	if err != nil {
		return fmt.Errorf("make the cluster's key: %w", err)
	}
	if made {
		fmt.Fprintf(o.Log, "%s made; sluiced brings it to the VMs that enrol\n", c.Slurm.KeyFile)
	}
	if c.Slurm.Auth == config.AuthMunge {
		if err := start(ctx, o.Log, "munge"); err != nil {
			return err
		}
	}
	// sluiced first: it needs none of the others, and the agents wait for it.
	if err := start(ctx, o.Log, "sluiced", "sluice-agent"); err != nil {
		return err
	}
	if c.Slurm.AccountingHost != "" {
		if err := start(ctx, o.Log, "mariadb", "slurmdbd"); err != nil {
			return err
		}
		// slurmctld that enforces associations refuses to start in a cluster
		// that the database does not know.
		if err := addCluster(ctx, c.Cluster); err != nil {
			return err
		}
	}
	return start(ctx, o.Log, "slurmctld")
}

// keySize is in bytes; the most that munge takes.
const keySize = 1024

// makeKey makes the key file unless it exists, for its owner alone.
func makeKey(ctx context.Context, path, owner string) (made bool, err error) {
	if _, err := os.Lstat(path); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	u, err := users.ByName(ctx, owner)
	if err != nil {
		return false, err
	}
	key := make([]byte, keySize)
	rand.Read(key) // never fails
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return false, err
	}
	// Complete and the owner's before it has its name: a setup that was interrupted makes another one.
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return false, err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(key)
	if err := errors.Join(err, f.Chown(int(u.UID), int(u.GID)), f.Sync(), f.Close()); err != nil {
		return false, err
	}
	return true, os.Rename(f.Name(), path)
}

func fetch(ctx context.Context, path string) (*config.Config, error) {
	var text string
	err := retry.Do(ctx, retry.Policy{Attempts: 20, Max: 2 * time.Second}, func(err error) bool {
		var missing metadata.NotDefinedError
		return !errors.As(err, &missing)
	}, func(ctx context.Context) (err error) {
		text, err = metadata.InstanceAttributeValueWithContext(ctx, ConfigAttribute)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("fetch instance attribute %s: %w", ConfigAttribute, err)
	}
	c, err := config.Parse(ConfigAttribute, []byte(text))
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	return c, atomicfile.Write(path, []byte(text), 0o644)
}

func start(ctx context.Context, log io.Writer, units ...string) error {
	for _, unit := range units {
		if _, err := command.Run(ctx, command.Spec{Path: "systemctl", Args: []string{"enable", "--now", unit}}); err != nil {
			return fmt.Errorf("start %s: %w\n  see journalctl -u %s", unit, err, unit)
		}
		fmt.Fprintf(log, "%s runs\n", unit)
	}
	return nil
}

func addCluster(ctx context.Context, cluster string) error {
	ctx, cancel := context.WithTimeout(ctx, accountingDeadline)
	defer cancel()
	return retry.Do(ctx, retry.Policy{Max: time.Second}, func(error) bool { return true }, func(ctx context.Context) error {
		_, err := command.Run(ctx, command.Spec{Path: "sacctmgr", Args: []string{"--immediate", "add", "cluster", cluster}})
		var ce *command.Error
		// sacctmgr exits 1 when there is nothing to add, and says so on its standard output.
		if errors.As(err, &ce) && ce.Exit == 1 {
			out, lerr := command.Run(ctx, command.Spec{Path: "sacctmgr", Args: []string{"--noheader", "--parsable2", "list", "cluster", "format=cluster"}})
			if lerr == nil {
				for _, line := range strings.Fields(string(out)) {
					if line == cluster {
						return nil
					}
				}
			}
		}
		if err != nil {
			return fmt.Errorf("register the cluster with slurmdbd: %w", err)
		}
		return nil
	})
}
