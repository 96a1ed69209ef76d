package conf

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	lua "github.com/yuin/gopher-lua"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// releases are the versions whose files are kept as golden files.
var releases = []string{"22.05", "23.11", "24.05", "24.11", "25.05", "26.05"}

func sample(t *testing.T, release string) Cluster {
	t.Helper()
	v, err := ParseVersion(release)
	if err != nil {
		t.Fatal(err)
	}
	return Cluster{
		Version: v, Name: "alpha", ControllerHost: "controller",
		Database: Database{Host: "controller"},
		NodeSets: []NodeSet{
			{Name: "cpu", Nodes: "c[1-4]", CPUs: 2, MemoryMiB: 4000},
			{Name: "gpu", Nodes: "g[001-100]", CPUs: 208, MemoryMiB: 1800000, Features: []string{"a3", "h100"}},
		},
		Partitions: []Partition{{Name: "main", NodeSets: []string{"cpu"}, Default: true}, {Name: "all", NodeSets: []string{"cpu", "gpu"}}},
	}
}

// TestGolden renders a munge cluster with cgroups for every release, and one
// with auth/slurm and without cgroups for a recent one.
func TestGolden(t *testing.T) {
	clusters := map[string]Cluster{}
	for _, r := range releases {
		clusters[r] = sample(t, r)
	}
	other := sample(t, "24.11.5")
	other.Auth, other.CgroupPlugin, other.ProctrackType = "slurm", "disabled", "linuxproc"
	other.Database.StoragePass = "secret"
	other.SuspendTime, other.ResumeTimeout = -1, 20*time.Minute
	other.Parameters = map[string]string{"slurmdparameters": "config_overrides", "ReturnToService": "1", "DebugFlags": "BurstBuffer"}
	clusters["24.11-auth-slurm"] = other
	for name, c := range clusters {
		t.Run(name, func(t *testing.T) {
			files, err := Render(c)
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, f := range files {
				names = append(names, f.Name)
				compareGolden(t, filepath.Join("testdata", name, f.Name), f.Data)
				if want := strings.Contains(f.Name, "dbd"); (f.Mode == 0o600) != want {
					t.Errorf("%s has mode %o", f.Name, f.Mode)
				}
			}
			want := []string{"slurm.conf", "cgroup.conf", "burst_buffer.conf", "burst_buffer.lua", "slurmdbd.conf"}
			if diff := cmp.Diff(want, names); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
		})
	}
}

func compareGolden(t *testing.T, path string, got []byte) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v (run go test -update)", err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

func TestDifferencesBetweenVersions(t *testing.T) {
	for _, test := range []struct {
		file, text string
		from       string // first release that has it
		until      string // first release that has it no more, or ""
	}{
		{"slurm.conf", "cloud_reg_addrs", "22.05", "23.11"},
		{"burst_buffer.conf", "PollInterval=1", "24.05", ""},
		{"burst_buffer.lua", "local polls = true", "24.05", ""},
		{"burst_buffer.lua", "local long_arguments = true", "23.02", ""},
		{"slurm.conf", "PrologFlags=Alloc,DeferBatch", "22.05", ""},
	} {
		for _, r := range []string{"22.05", "23.02", "23.11", "24.05", "24.11", "25.05", "25.11", "26.05", "26.11"} {
			files, err := Render(sample(t, r))
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range files {
				want := r >= test.from && (test.until == "" || r < test.until)
				if f.Name == test.file && strings.Contains(string(f.Data), test.text) != want {
					t.Errorf("%s: %s has %q: %v, want %v", r, f.Name, test.text, !want, want)
				}
			}
		}
	}
}

// TestLuaDefinesEveryFunction: slurmctld from 24.05 on ends itself when one is missing.
func TestLuaDefinesEveryFunction(t *testing.T) {
	functions := []string{"job_process", "pools", "job_teardown", "setup", "data_in", "test_data_in", "real_size",
		"paths", "pre_run", "post_run", "data_out", "test_data_out", "get_status"}
	for _, r := range releases {
		files, err := Render(sample(t, r))
		if err != nil {
			t.Fatal(err)
		}
		l := lua.NewState()
		defer l.Close()
		if err := l.DoString("slurm = {SUCCESS = 0, ERROR = -1}"); err != nil {
			t.Fatal(err)
		}
		if err := l.DoString(string(files[3].Data)); err != nil {
			t.Fatalf("%s: %v", r, err)
		}
		if got := l.Get(-1); got != lua.LNumber(0) {
			t.Errorf("%s: loading it returns %v, want slurm.SUCCESS", r, got)
		}
		for _, f := range functions {
			if l.GetGlobal("slurm_bb_"+f).Type() != lua.LTFunction {
				t.Errorf("%s: no function slurm_bb_%s", r, f)
			}
		}
	}
}

func TestRenderErrors(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*Cluster)
		want   []string
	}{
		{"everything missing", func(c *Cluster) { *c = Cluster{} },
			[]string{`cluster's name: "" is not valid`, `controller's host: "" is not valid`, "no node sets", "no partitions"}},
		{"old version", func(c *Cluster) { c.Version = Version{21, 8} }, []string{"version 21.08 of Slurm is older than 22.05"}},
		{"auth/slurm too early", func(c *Cluster) { c.Version = Version{23, 2}; c.Auth = "slurm" }, []string{"auth: Slurm 23.02 has no auth/slurm"}},
		{"unknown words", func(c *Cluster) { c.Auth, c.CgroupPlugin, c.ProctrackType = "none", "v3", "pgid" },
			[]string{`auth: "none" is not one of munge, slurm`, `cgroup plugin: "v3" is not one of autodetect, cgroup/v1, cgroup/v2, disabled`, `proctrack type: "pgid" is not one of cgroup, linuxproc`}},
		{"line break", func(c *Cluster) { c.Name = "a\nSlurmUser=root" }, []string{`cluster's name: "a\nSlurmUser=root" is not valid`}},
		{"line break in a parameter", func(c *Cluster) { c.Parameters = map[string]string{"A": "b\nSlurmUser=root"} },
			[]string{"parameter A: its value is empty or has a line break"}},
		{"quote in a path", func(c *Cluster) { c.ProgramDir = `/opt/"x` }, []string{`program directory: "/opt/\"x" is not valid`}},
		{"relative path", func(c *Cluster) { c.StateDir = "spool" }, []string{`state directory: "spool" is not valid`}},
		{"bad host list", func(c *Cluster) { c.NodeSets[0].Nodes = "c[1-" }, []string{"node set cpu: host list"}},
		{"node in two sets", func(c *Cluster) { c.NodeSets[1].Nodes = "c[4-5]" }, []string{"node c4: in the node sets cpu and gpu"}},
		{"unknown node set", func(c *Cluster) { c.Partitions[0].NodeSets = []string{"x"} }, []string{`partition main: no node set "x"`}},
		{"two defaults", func(c *Cluster) { c.Partitions[1].Default = true }, []string{"2 default partitions"}},
		{"no CPUs", func(c *Cluster) { c.NodeSets[0].CPUs = 0 }, []string{"node set cpu: CPUs and memory must be above 0"}},
		{"timeout", func(c *Cluster) { c.StageInTimeout = 25 * 24 * time.Hour }, []string{"stage-in timeout: 600h0m0s is not between 1s and 576h0m0s"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := sample(t, "24.11")
			test.change(&c)
			_, err := Render(c)
			if err == nil {
				t.Fatal("no error")
			}
			for _, w := range test.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error lacks %q:\n%v", w, err)
				}
			}
		})
	}
}

func TestParseVersion(t *testing.T) {
	for s, want := range map[string]Version{"24.11": {24, 11}, "slurm-wlm 24.11.5": {24, 11}, "22.05.8\n": {22, 5}} {
		if got, err := ParseVersion(s); err != nil || got != want {
			t.Errorf("ParseVersion(%q) = %v, %v; want %v", s, got, err, want)
		}
	}
	for _, s := range []string{"", "24", "x.y", "24.13", "-1.05"} {
		if got, err := ParseVersion(s); err == nil {
			t.Errorf("ParseVersion(%q) = %v, want an error", s, got)
		}
	}
}
