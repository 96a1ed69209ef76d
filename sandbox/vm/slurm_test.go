package vm

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/sandbox/rootfs"
)

// slurmLayer writes what a Slurm cluster of a controller and one node needs beside Debian's own units.
func slurmLayer(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil { // it becomes the VMs' /
		t.Fatal(err)
	}
	key := make([]byte, 32)
	if _, err := rand.Read(key); err != nil {
		t.Fatal(err)
	}
	files := []struct {
		path, text string
		secret     bool
	}{
		{"etc/slurm/slurm.key", string(key), true},
		{"etc/slurm/cgroup.conf", "CgroupPlugin=disabled\n", false},
		{"etc/slurm/slurm.conf", `ClusterName=test
SlurmctldHost=vm-100(10.128.0.100)
AuthType=auth/slurm
CredType=cred/slurm
SlurmUser=slurm
SlurmctldPidFile=/run/slurmctld/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
MpiDefault=none
SelectType=select/cons_tres
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=10.128.0.100
AccountingStorageEnforce=associations,limits
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=vm-101 NodeAddr=10.128.0.101 CPUs=2 RealMemory=1000
PartitionName=debug Nodes=ALL Default=YES
`, false},
		{"etc/slurm/slurmdbd.conf", `AuthType=auth/slurm
DbdHost=vm-100
SlurmUser=slurm
LogFile=/var/log/slurm/slurmdbd.log
PidFile=/run/slurmdbd/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm_acct_db
`, true},
		{"etc/default/slurmd", "SLURMD_OPTIONS=-b\n", false},
		{"etc/systemd/system/mariadb.service", `[Unit]
Description=MariaDB for slurmdbd
[Service]
Type=notify
User=mysql
Group=mysql
RuntimeDirectory=mysqld
ExecStart=/usr/sbin/mariadbd --no-defaults --datadir=/var/lib/mysql --skip-networking --socket=/run/mysqld/mysqld.sock --innodb-buffer-pool-size=32M --innodb-buffer-pool-size-max=32M --innodb-log-file-size=8M --innodb-flush-log-at-trx-commit=0 --skip-log-bin --skip-name-resolve --performance-schema=OFF
LimitNOFILE=32768
`, false},
		{"etc/systemd/system/slurmctld.service.d/accounts.conf", `[Unit]
Requires=slurmdbd.service
After=slurmdbd.service
[Service]
ExecStartPre=+/usr/local/bin/accounts
`, false},
		{"etc/systemd/system/slurmdbd.service.d/mariadb.conf", "[Unit]\nRequires=mariadb.service\n", false},
	}
	for _, f := range files {
		path := filepath.Join(dir, f.path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(f.text), 0o644); err != nil {
			t.Fatal(err)
		}
		if f.secret {
			if err := os.Chmod(path, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chown(path, rootfs.SlurmUID, rootfs.SlurmUID); err != nil {
				t.Fatal(err)
			}
		}
	}
	accounts := `#!/bin/sh
set -e
until sacctmgr -n show cluster >/dev/null 2>&1; do sleep 0.1; done
sacctmgr -i add cluster test || true # it is there already
sacctmgr -i add account research || true
sacctmgr -i add user alice account=research || true
`
	if err := os.MkdirAll(filepath.Join(dir, "usr/local/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "usr/local/bin/accounts"), []byte(accounts), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// inVM runs a command in the VM and returns its output.
func inVM(t *testing.T, v *VM, user string, argv ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	args := append([]string{"-t", fmt.Sprint(v.Pid()), "-m", "-u", "-i", "-n", "-p", "/run/sandbox/guest", "as", "-user", user}, argv...)
	cmd := exec.CommandContext(ctx, "nsenter", args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, stderr.String())
	}
	return stdout.String(), nil
}

// TestSlurm boots a controller and a node from Debian's own units and runs a job between them.
func TestSlurm(t *testing.T) {
	h, root := newHost(t)
	layer := slurmLayer(t)
	controllerSpec, nodeSpec := spec(t, root, 100), spec(t, root, 101)
	controllerSpec.Layers, nodeSpec.Layers = []string{layer, root}, []string{layer, root}
	controller, node := start(t, h, controllerSpec), start(t, h, nodeSpec)
	began := time.Now()
	for _, s := range []struct {
		vm   *VM
		argv []string
	}{
		{controller, []string{"systemctl", "enable", "--now", "slurmctld"}},
		{node, []string{"systemctl", "start", "slurmd"}},
	} {
		if out, err := inVM(t, s.vm, "root", s.argv...); err != nil {
			status, _ := inVM(t, s.vm, "root", "systemctl", "status", "slurmctld", "slurmdbd", "mariadb", "slurmd")
			t.Fatalf("%v %s\n%s", err, out, status)
		}
	}
	t.Logf("Slurm is up after %v", time.Since(began))
	out, err := inVM(t, controller, "alice", "srun", "-N1", "sh", "-c", "hostname; id -un; pwd")
	if err != nil {
		log, _ := inVM(t, node, "root", "journalctl")
		t.Fatalf("%v\n%s", err, log)
	}
	if want := "vm-101\nalice\n/home/alice\n"; out != want {
		t.Errorf("srun printed %q, want %q", out, want)
	}
	t.Logf("first job after %v", time.Since(began))
	step := func(what string) { t.Logf("%s after %v", what, time.Since(began)) }
	// A reconfigure makes slurmctld hand over to a new process.
	if _, err := inVM(t, controller, "root", "scontrol", "reconfigure"); err != nil {
		t.Error(err)
	}
	step("reconfigured")
	if out, err := inVM(t, controller, "root", "systemctl", "is-active", "slurmctld", "slurmdbd", "mariadb"); err != nil || out != "active\nactive\nactive\n" {
		t.Errorf("is-active printed %q, %v", out, err)
	}
	if _, err := inVM(t, controller, "root", "systemctl", "restart", "slurmctld"); err != nil {
		t.Error(err)
	}
	step("restarted")
	if out, err := inVM(t, controller, "alice", "srun", "hostname"); err != nil || out != "vm-101\n" {
		t.Errorf("srun after the restart printed %q, %v", out, err)
	}
	step("second job")
	stopped := time.Now()
	if err := controller.Stop(context.Background()); err != nil {
		t.Error(err)
	}
	t.Logf("the controller stopped within %v", time.Since(stopped))
	console, err := os.ReadFile(controller.Console())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"started slurmctld.service", "stopped slurmctld.service", "init: down"} {
		if !strings.Contains(string(console), want) {
			t.Errorf("the console lacks %q:\n%s", want, console)
		}
	}
}
