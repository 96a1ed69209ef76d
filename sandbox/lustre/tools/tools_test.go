package tools

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/lustre/probe"
	"github.com/sluicehpc/sluice/sandbox/lustre/fusetest"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

func TestMain(m *testing.M) { os.Exit(fusetest.Main(m)) }

// client is a machine with a mount.
type client struct {
	t   *testing.T
	dir string
	Machine
	dead map[string]bool // servers that nobody can reach
}

func newClient(t *testing.T) *client {
	t.Helper()
	dir := t.TempDir()
	fusetest.New(t, t.TempDir(), dir, "10.129.0.2@tcp:/scratch", lustrefs.Options{})
	c := &client{t: t, dir: dir, dead: map[string]bool{}}
	c.Machine = Machine{
		State: filepath.Join(t.TempDir(), "lustre"),
		Mounts: func() ([]probe.Mount, error) {
			return []probe.Mount{{Dir: "/", Type: "ext4", Source: "/dev/sda"}, {Dir: dir, Type: "fuse.lustre", Source: "10.129.0.2@tcp:/scratch"}}, nil
		},
		Address: func(iface string) (string, error) {
			a, ok := map[string]string{"eth0": "10.128.0.5", "eth1": "10.128.1.5"}[iface]
			if !ok {
				return "", syscall.ENODEV
			}
			return a, nil
		},
		Dial: func(_ context.Context, _, address string) (net.Conn, error) {
			if c.dead[address] {
				return nil, errors.New("connection refused")
			}
			one, two := net.Pipe()
			two.Close()
			return one, nil
		},
	}
	return c
}

// run calls a tool; paths in the words begin with the mount when they begin with MNT.
func (c *client) run(words string) (stdout, stderr string, code int) {
	c.t.Helper()
	var out, err bytes.Buffer
	args := strings.Fields(strings.ReplaceAll(words, "MNT", c.dir))
	code = c.Main(c.t.Context(), args[0], args[1:], &out, &err)
	return strings.ReplaceAll(out.String(), c.dir, "MNT"), strings.ReplaceAll(err.String(), c.dir, "MNT"), code
}

func (c *client) want(words, stdout string) {
	c.t.Helper()
	got, stderr, code := c.run(words)
	if code != 0 {
		c.t.Fatalf("%s: exit code %d: %s", words, code, stderr)
	}
	if d := cmp.Diff(stdout, got); d != "" {
		c.t.Errorf("%s (-want +got):\n%s", words, d)
	}
}

func (c *client) wantError(words string, code syscall.Errno, text string) {
	c.t.Helper()
	if stdout, stderr, got := c.run(words); got != int(code) || !strings.Contains(stderr, text) {
		c.t.Errorf("%s: exit code %d, %q, %q, want %d (%v) and %q", words, got, stdout, stderr, int(code), code, text)
	}
}

func (c *client) write(name, text string) {
	c.t.Helper()
	if err := os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o644); err != nil {
		c.t.Fatal(err)
	}
}

func TestStripes(t *testing.T) {
	c := newClient(t)
	c.want("lfs setstripe -c 4 -S 4M MNT/new", "")
	c.want("lfs getstripe MNT/new", "MNT/new\nlmm_stripe_count:  4\nlmm_stripe_size:   4194304\nlmm_pattern:       raid0\nlmm_layout_gen:    0\nlmm_stripe_offset: 0\n\n")
	c.want("lfs getstripe -c MNT/new", "4\n")
	c.want("lfs getstripe --stripe-size MNT/new", "4194304\n")
	c.write("full", "x")
	c.wantError("lfs setstripe -c 4 MNT/full", syscall.EEXIST, "setstripe error for 'MNT/full': stripe already set")
	c.wantError("lfs setstripe -c 2 MNT/new", syscall.EEXIST, "stripe already set")

	if err := os.Mkdir(filepath.Join(c.dir, "d"), 0o755); err != nil {
		t.Fatal(err)
	}
	c.want("lfs setstripe -E 64M -c1 -E 1G -c 4 --component-end=-1 -c -1 -S 16M MNT/d", "")
	c.write("d/f", "x")
	c.want("lfs getstripe -c MNT/d/f", "-1\n")
	if out, _, _ := c.run("lfs getstripe MNT/d/f"); !strings.Contains(out, "lcm_entry_count:   3\n") || !strings.Contains(out, "lcme_extent.e_start: 67108864\n    lcme_extent.e_end:   1073741824\n") {
		t.Errorf("getstripe of a file with components:\n%s", out)
	}
	c.want("lfs setstripe -d MNT/d", "")
	c.write("d/g", "x")
	c.want("lfs getstripe -c MNT/d/g", "1\n")
	c.want("lfs getstripe -d MNT/d", "MNT/d\nstripe_count:  1 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1\n\n")
	if out, _, _ := c.run("lfs getstripe -r MNT"); strings.Count(out, "MNT") != 6 {
		t.Errorf("getstripe -r shows\n%s", out)
	}

	c.wantError("lfs setstripe -S 5 MNT/x", syscall.EINVAL, "64 KiB")
	c.wantError("lfs setstripe -c many MNT/x", syscall.EINVAL, "many")
	c.wantError("lfs setstripe -E 1G -E 64M MNT/x", syscall.EINVAL, "above")
	c.wantError("lfs setstripe --wide MNT/x", syscall.EINVAL, "--wide")
	c.wantError("lfs setstripe MNT/x -c", syscall.EINVAL, "value")
	c.wantError("lfs setstripe -c 1 /nowhere/x", syscall.ENOTTY, "not on a mounted Lustre")
	c.wantError("lfs getstripe MNT/nothing", syscall.ENOENT, "no such file")
}

func TestProjectsAndQuota(t *testing.T) {
	c := newClient(t)
	if err := os.MkdirAll(filepath.Join(c.dir, "p/sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	c.write("p/old", strings.Repeat("x", 4096))
	c.want("lfs project -d MNT/p", "    0 - MNT/p\n")
	c.want("lfs project -p 100 -s MNT/p", "")
	c.write("p/new", strings.Repeat("x", 8192))
	c.want("lfs project MNT/p", "  100 - MNT/p/new\n    0 - MNT/p/old\n    0 - MNT/p/sub\n")
	c.want("lfs project -p 100 -s -r MNT/p", "")
	c.want("lfs project -d MNT/p MNT/p/sub", "  100 P MNT/p\n  100 P MNT/p/sub\n")
	c.want("lfs setquota -p 100 -b 8 -B 1M -I 100 MNT", "")
	out, _, _ := c.run("lfs quota -p 100 MNT")
	line := strings.Fields(out[strings.LastIndex(strings.TrimSuffix(out, "\n"), "\n")+1:])
	// The directories have a block of 4 KiB each on the disk below.
	if d := cmp.Diff([]string{"MNT", "20*", "8", "1024", "-", "4", "0", "100", "-"}, line); d != "" {
		t.Errorf("quota (-want +got):\n%s\n%s", d, out)
	}
	c.want("lfs setquota -p 100 -b 0 -B 0 -I 0 MNT", "")
	if out, _, _ := c.run("lfs quota -q -p 100 MNT"); strings.Contains(out, "*") {
		t.Errorf("quota without limits: %s", out)
	}
	c.want("lfs project -C -r MNT/p", "")
	c.want("lfs project -d MNT/p", "    0 - MNT/p\n")
	if out, _, code := c.run("lfs quota -u root MNT"); code != 0 || !strings.Contains(out, "Disk quotas for usr root (uid 0):") {
		t.Errorf("quota of a name: %s", out)
	}
	c.wantError("lfs setquota -p x -b 1 MNT", syscall.EINVAL, "project id")
	c.wantError("lfs setquota -b 1 MNT", syscall.EINVAL, "missing")
}

func TestDf(t *testing.T) {
	c := newClient(t)
	out, _, code := c.run("lfs df -h MNT")
	if code != 0 || !strings.HasPrefix(out, "UUID") || !strings.Contains(out, "scratch-MDT0000_UUID") || !strings.Contains(out, "MNT[OST:0]\n") || !strings.Contains(out, "\nfilesystem_summary:") {
		t.Errorf("df: exit code %d\n%s", code, out)
	}
	c.wantError("lfs df /", syscall.ENOTTY, "not on a mounted Lustre")
	if out, _, code := c.run("lfs check servers"); code != 0 || strings.Count(out, " active.\n") != 2 {
		t.Errorf("check: exit code %d\n%s", code, out)
	}
	c.wantError("lfs frobnicate", syscall.EINVAL, "unknown command")
}

func TestLctl(t *testing.T) {
	c := newClient(t)
	c.want("lctl list_nids", "10.128.0.5@tcp\n")
	c.want("lctl get_param health_check", "health_check=healthy\n")
	c.want("lctl get_param -n jobid_var", "disable\n")
	c.want("lctl set_param jobid_var=SLURM_JOB_ID", "jobid_var=SLURM_JOB_ID\n")
	c.want("lctl get_param -n jobid_var", "SLURM_JOB_ID\n")
	c.want("lctl set_param -n osc.*.max_rpcs_in_flight=64", "")
	c.want("lctl get_param -n osc.scratch-*.max_rpcs_in_flight", "64\n")
	c.want("lctl get_param -n mdc.*.max_rpcs_in_flight", "8\n")
	if out, _, _ := c.run("lctl get_param osc.*.import"); !strings.Contains(out, "state: FULL") || !strings.Contains(out, "current_connection: 10.129.0.2@tcp") {
		t.Errorf("import:\n%s", out)
	}
	c.want("lctl ping 10.129.0.2@tcp", "12345-0@lo\n12345-10.129.0.2@tcp\n")
	c.dead["10.129.0.2:988"] = true
	c.wantError("lctl ping 10.129.0.2@tcp", syscall.EIO, "failed to ping 10.129.0.2@tcp: Input/output error")
	if out, _, _ := c.run("lctl get_param osc.*.import"); !strings.Contains(out, "state: DISCONN") {
		t.Errorf("import of a server that is away:\n%s", out)
	}
	c.wantError("lctl ping nonsense", syscall.EINVAL, "nonsense")
	c.wantError("lctl get_param no.such", syscall.ENOENT, "param_path 'no.such': No such file or directory")
	c.wantError("lctl set_param health_check=bad", syscall.EACCES, "Permission denied")
	c.wantError("lctl set_param -P jobid_var=x", syscall.EPERM, "MGS")
	c.wantError("lctl set_param jobid_var", syscall.EINVAL, "PARAMETER=VALUE")
}

func TestLnetctl(t *testing.T) {
	c := newClient(t)
	const lo, tcp = "net:\n    - net type: lo\n      local NI(s):\n        - nid: 0@lo\n          status: up\n",
		"    - net type: tcp\n      local NI(s):\n        - nid: 10.128.0.5@tcp\n          status: up\n          interfaces:\n              0: eth0\n"
	c.want("lnetctl net show", lo+tcp)
	c.want("lnetctl net add --net tcp --if eth1", "")
	const second = "        - nid: 10.128.1.5@tcp\n          status: up\n          interfaces:\n              0: eth1\n"
	c.want("lnetctl net show", lo+tcp+second)
	c.want("lctl list_nids", "10.128.0.5@tcp\n10.128.1.5@tcp\n")
	c.want("lnetctl net del --net tcp --if eth1", "")
	c.want("lnetctl net show --net tcp", "net:\n"+tcp)
	c.want("lnetctl set discovery 0", "")
	out, _, code := c.run("lnetctl export")
	if code != 0 || !strings.Contains(out, "peer:\n    - primary nid: 10.129.0.2@tcp\n") || !strings.Contains(out, "global:\n    discovery: 0\n") {
		t.Errorf("export: exit code %d\n%s", code, out)
	}
	file := filepath.Join(t.TempDir(), "lnet.conf")
	c.want("lnetctl export "+file, "")
	if b, err := os.ReadFile(file); err != nil || string(b) != out {
		t.Errorf("export to a file: %q, %v", b, err)
	}
	c.wantError("lnetctl net add --net tcp --if eth0", syscall.EEXIST, "errno: -17")
	c.wantError("lnetctl net add --net tcp1 --if eth9", syscall.ENODEV, "errno: -19")
	c.wantError("lnetctl net add --net o2ib --if eth0", syscall.EINVAL, "cannot parse net 'o2ib'")
	c.wantError("lnetctl net add --net tcp1", syscall.EINVAL, "mandatory parameter 'if'")
	c.wantError("lnetctl net del --net tcp7", syscall.EINVAL, "does not exist")
	c.wantError("lnetctl lnet unconfigure", syscall.EBUSY, "busy")
	c.wantError("lnetctl", syscall.EINVAL, "net show")
	c.want("lnetctl ping 10.129.0.2@tcp", "ping:\n    - primary nid: 10.129.0.2@tcp\n      Multi-Rail: False\n      peer ni:\n        - nid: 10.129.0.2@tcp\n")
}
