package cluster

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/sluicehpc/sluice/packaging"
	"github.com/sluicehpc/sluice/slurm/conf"
)

// binaries that the VMs' image carries, by directory in the image.
var binaries = map[string][]string{
	"usr/local/bin":            {"sluice", "trainer"},
	"usr/local/libexec/sluice": {"sluiced", "sluice-agent", "sluice-hook", "sluice-prolog", "sluice-epilog"},
}

// file is a file of the image, owned by the user and group of that id.
type file struct {
	path string // in the image
	data []byte
	mode os.FileMode
	uid  int
}

// WriteImage fills dir, the overlay layer over Debian's root from which the
// cluster's VMs boot: Sluice's binaries from binDir and its units. No secret is in it.
func WriteImage(dir, binDir string) error {
	for target, names := range binaries {
		for _, name := range names {
			if err := copyFile(filepath.Join(binDir, name), filepath.Join(dir, target, name), 0o755); err != nil {
				return fmt.Errorf("image: %w\n  run make build", err)
			}
		}
	}
	files := []file{
		{"etc/default/slurmd", []byte(slurmdDefaults), 0o644, 0},
		{"etc/default/sackd", []byte(sackdDefaults), 0o644, 0},
		{"etc/systemd/system/mariadb.service", []byte(mariadbUnit), 0o644, 0},
	}
	units, err := packagedUnits()
	if err != nil {
		return fmt.Errorf("image: %w", err)
	}
	for name, data := range units {
		files = append(files, file{"etc/systemd/system/" + name, data, 0o644, 0})
	}
	for _, f := range files {
		path := filepath.Join(dir, f.path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("image: %w", err)
		}
		if err := os.WriteFile(path, f.data, f.mode); err != nil {
			return fmt.Errorf("image: %w", err)
		}
		if err := os.Chown(path, f.uid, f.uid); err != nil {
			return fmt.Errorf("image: %w", err)
		}
	}
	for _, link := range conf.ProgramLinks {
		if err := os.Symlink("sluice-hook", filepath.Join(dir, "usr/local/libexec/sluice", link)); err != nil {
			return fmt.Errorf("image: %w", err)
		}
	}
	// An admin's shell finds the daemon's subcommands.
	sbin := filepath.Join(dir, "usr/local/sbin")
	if err := os.MkdirAll(sbin, 0o755); err != nil {
		return fmt.Errorf("image: %w", err)
	}
	if err := os.Symlink("../libexec/sluice/sluiced", filepath.Join(sbin, "sluiced")); err != nil {
		return fmt.Errorf("image: %w", err)
	}
	// Enabled in the image: compute nodes have no startup script.
	wants := filepath.Join(dir, "etc/systemd/system/multi-user.target.wants")
	if err := os.MkdirAll(wants, 0o755); err != nil {
		return fmt.Errorf("image: %w", err)
	}
	if err := os.Symlink("/etc/systemd/system/sluice-agent.service", filepath.Join(wants, "sluice-agent.service")); err != nil {
		return fmt.Errorf("image: %w", err)
	}
	// A VM's file system is root's at the top, whatever umask made the layer.
	return os.Chmod(dir, 0o755)
}

// packagedUnits returns the units and drop-ins that Sluice ships, by path below /etc/systemd/system.
func packagedUnits() (map[string][]byte, error) {
	units := map[string][]byte{}
	root, err := fs.Sub(packaging.Units, "systemd")
	if err != nil {
		return nil, err
	}
	return units, fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			units[path], err = fs.ReadFile(root, path)
		}
		return err
	})
}

// slurmctld takes a resumed node back only if it booted after the resume;
// namespaces share the host's boot time, so -b tells slurmd to report its own start.
const slurmdDefaults = `SLURMD_OPTIONS="-b --conf-server ` + Controller + `:6817"
`

const sackdDefaults = `SACKD_OPTIONS="--conf-server ` + Controller + `:6817"
`

// mariadbUnit replaces Debian's: a small server on a socket only.
const mariadbUnit = `[Unit]
Description=MariaDB for slurmdbd

[Service]
Type=notify
User=mysql
RuntimeDirectory=mysqld mariadbd
ExecStart=/usr/sbin/mariadbd --no-defaults --datadir=/var/lib/mysql --skip-networking --socket=/run/mysqld/mysqld.sock --innodb-buffer-pool-size=32M --innodb-log-file-size=8M --innodb-flush-log-at-trx-commit=0 --skip-log-bin --skip-name-resolve --performance-schema=OFF
# Where the client library of newer releases looks for the socket.
ExecStartPost=/bin/ln -sfn /run/mysqld/mysqld.sock /run/mariadbd/mysqld.sock
Restart=on-failure
TimeoutStartSec=60

[Install]
WantedBy=multi-user.target
`

func copyFile(from, to string, mode os.FileMode) (err error) {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	if _, err := io.Copy(out, in); err != nil {
		return err
	}
	return out.Chmod(mode)
}
