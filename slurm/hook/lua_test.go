package hook

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	lua "github.com/yuin/gopher-lua"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/slurm/conf"
)

// interpreters run a chunk that leaves its result in the global OUT. Slurm is
// built with Lua 5.1 (gopher-lua) to 5.4.
var interpreters = map[string]func(t *testing.T, chunk string) string{
	"5.1": func(t *testing.T, chunk string) string {
		l := lua.NewState()
		defer l.Close()
		if err := l.DoString(chunk); err != nil {
			t.Fatal(err)
		}
		return l.GetGlobal("OUT").String()
	},
	"5.4": func(t *testing.T, chunk string) string {
		program, err := exec.LookPath("lua5.4")
		if err != nil {
			t.Fatalf("%v\n  run make deps", err)
		}
		out, err := exec.Command(program, "-e", chunk+"\nio.write(OUT)").Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	},
}

// literal writes any bytes as a Lua string.
func literal(s string) string {
	var b strings.Builder
	for i := range len(s) {
		fmt.Fprintf(&b, `\%03d`, s[i])
	}
	return `"` + b.String() + `"`
}

// luaFile renders burst_buffer.lua with a hook that is this test binary, and an
// environment directory. The hook's path is given to the test to replace it.
type luaFile struct {
	path, hook, environment string
	interpreter             func(t *testing.T, chunk string) string
}

func renderLua(t *testing.T, release, socket string, interpreter func(*testing.T, string) string) luaFile {
	t.Helper()
	dir := t.TempDir()
	version, err := conf.ParseVersion(release)
	if err != nil {
		t.Fatal(err)
	}
	// conf wants plain paths; the test's name in TempDir may hold others.
	plain, err := os.MkdirTemp("", "sluice-lua")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(plain) })
	files, err := conf.Render(conf.Cluster{
		Version: version, Name: "c", ControllerHost: "h", ProgramDir: plain, EnvironmentDir: plain,
		NodeSets:   []conf.NodeSet{{Name: "s", Nodes: "n1", CPUs: 1, MemoryMiB: 1}},
		Partitions: []conf.Partition{{Name: "p", NodeSets: []string{"s"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	l := luaFile{path: filepath.Join(dir, "burst_buffer.lua"), hook: filepath.Join(plain, "sluice-hook"), environment: plain, interpreter: interpreter}
	for _, f := range files {
		if f.Name == "burst_buffer.lua" {
			if err := os.WriteFile(l.path, f.Data, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	l.setHook(t, fmt.Sprintf("SLUICE_TEST_HOOK_SOCKET='%s' exec '%s' \"$@\"", socket, self))
	return l
}

func (l luaFile) setHook(t *testing.T, body string) {
	t.Helper()
	if err := os.WriteFile(l.hook, []byte("#!/bin/sh\n"+body+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
}

// call runs a function as slurmctld does: all arguments are strings, and
// job_info, if any, comes last. The result is "RC" or "RC MESSAGE".
func (l luaFile) call(t *testing.T, function string, info map[string]string, args ...string) string {
	t.Helper()
	var words []string
	for _, a := range args {
		words = append(words, literal(a))
	}
	if info != nil {
		var fields []string
		for k, v := range info {
			if k == "batch_flag" {
				fields = append(fields, k+" = "+v)
			} else {
				fields = append(fields, k+" = "+literal(v))
			}
		}
		words = append(words, "{"+strings.Join(fields, ", ")+"}")
	}
	return l.interpreter(t, fmt.Sprintf(`
slurm = {SUCCESS = 0, ERROR = -1, SLURM_BB_BUSY = "BUSY", log_error = function(...) LOG = string.format(...) end}
assert(dofile(%s) == slurm.SUCCESS)
local rc, message = slurm_bb_%s(%s)
OUT = tostring(rc)
if message ~= nil then OUT = OUT .. " " .. message end
`, literal(l.path), function, strings.Join(words, ", ")))
}

const hostile = "it's; $(touch /tmp/x) `id` \"q\" \\ \n--name=y"

func TestLua(t *testing.T) {
	t.Chdir(t.TempDir()) // the hook logs there
	for version, interpreter := range interpreters {
		t.Run(version, func(t *testing.T) { testLua(t, interpreter) })
	}
}

func testLua(t *testing.T, interpreter func(*testing.T, string) string) {
	script := write(t, goodScript)
	info := map[string]string{"name": hostile, "account": "a'b", "partition": "main", "nodes": "n[1-2]", "command": "/home/al ice/x", "batch_flag": "1"}
	var phase atomic.Pointer[api.StageState]
	phase.Store(&api.StageState{Phase: api.StageBusy})
	s := serve(t, func(r api.Request) (any, error) {
		switch r.Op {
		case api.OpJobProcess:
			return api.Verdict{}, nil
		case api.OpDataIn, api.OpDataOut:
			return phase.Load(), nil
		case api.OpPaths:
			return api.Environment{Variables: map[string]string{"SLUICE_JOB_DIR": "/lustre/x"}}, nil
		case api.OpBBStatus:
			return api.Text{Text: "line 1\nline 2"}, nil
		}
		return api.Ack{}, nil
	})
	long := renderLua(t, "24.11", s.socket, interpreter)
	middle := renderLua(t, "23.11", s.socket, interpreter)
	short := renderLua(t, "22.05", s.socket, interpreter)
	expect := func(what, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	is := func(want api.JobCall) {
		t.Helper()
		if diff := cmp.Diff(want, last[api.JobCall](t, s)); diff != "" {
			t.Errorf("sluiced was asked (-want +got):\n%s", diff)
		}
	}

	expect("pools", long.call(t, "pools", nil), "0")
	expect("real_size", long.call(t, "real_size", nil, "7"), "0")

	expect("job_process", long.call(t, "job_process", info, script, "1000", "100"), "0")
	if got := last[api.JobProcess](t, s); !got.HasUID || got.UID != 1000 || got.GID != 100 || got.Script != goodScript || got.Account != info["account"] || got.Account == "" {
		t.Errorf("job_process asked %+v", got)
	}
	expect("job_process, short", short.call(t, "job_process", nil, script), "0")
	if got := last[api.JobProcess](t, s); got.HasUID {
		t.Errorf("job_process, short, asked %+v", got)
	}
	bad := write(t, "#!/bin/sh\n#SLUICE stage_im\n")
	picture := ":2:9: unknown verb \"stage_im\"\n   2 | #SLUICE stage_im\n     |         ^^^^^^^^\n  did you mean stage_in?"
	info["command"] = "/home/alice/tr ain.sh"
	expect("a bad script whose path has a blank", long.call(t, "job_process", info, bad, "1000", "100"), "-1 tr"+picture)
	info["command"] = "/home/alice/train.sh --lr 3"
	expect("a bad script", long.call(t, "job_process", info, bad, "1000", "100"), "-1 train.sh"+picture)
	info["command"] = "/home/alice/tr$(id)"
	expect("a script with a hostile name", long.call(t, "job_process", info, bad, "1000", "100"), "-1 script"+picture)
	expect("a bad script, short", short.call(t, "job_process", nil, bad), "-1 script"+picture)
	info["batch_flag"] = "0"
	if got := long.call(t, "job_process", info, bad, "1000", "100"); !strings.HasPrefix(got, "-1 --bbf:1:9: unknown verb") {
		t.Errorf("salloc: %q", got)
	}

	full := api.JobCall{JobID: 7, UID: 1000, GID: 100, Name: hostile, Account: "a'b", Partition: "main"}
	withScript := full
	withScript.Script = goodScript
	expect("setup", long.call(t, "setup", info, "7", "1000", "100", "(null)", "0", script), "0")
	is(withScript)
	expect("setup, short", short.call(t, "setup", nil, "7", "1000", "100", "(null)", "0", script), "0")
	is(api.JobCall{JobID: 7, UID: 1000, GID: 100, Script: goodScript})

	expect("data_in", long.call(t, "data_in", info, "7", script, "1000", "100"), "0")
	is(withScript)
	expect("test_data_in, busy", long.call(t, "test_data_in", info, "7", script, "1000", "100"), "0 BUSY")
	expect("test_data_out, busy", long.call(t, "test_data_out", info, "7", script, "1000", "100"), "0 BUSY")
	phase.Store(&api.StageState{Phase: api.StageDone})
	expect("test_data_in", long.call(t, "test_data_in", info, "7", script, "1000", "100"), "0")
	is(full)
	expect("data_in that waits", middle.call(t, "data_in", info, "7", script, "1000", "100"), "0")
	if got := last[api.StageCall](t, s); got.WaitSeconds == 0 || got.UID != 1000 {
		t.Errorf("data_in of 23.11 asked %+v", got)
	}
	expect("data_in, short", short.call(t, "data_in", nil, "7", script), "0")
	is(api.JobCall{JobID: 7, Script: goodScript})
	expect("data_out, short", short.call(t, "data_out", nil, "7", script), "0")
	phase.Store(&api.StageState{Phase: api.StageFailed, Message: "x: checksum differs"})
	expect("data_in, failed", long.call(t, "data_in", info, "7", script, "1000", "100"), "-1 x: checksum differs")
	expect("test_data_in, failed", long.call(t, "test_data_in", info, "7", script, "1000", "100"), "-1 x: checksum differs")
	expect("test_data_out, failed", long.call(t, "test_data_out", info, "7", script, "1000", "100"), "-1 x: checksum differs")

	pathFile := write(t, "")
	content := func() string {
		t.Helper()
		data, err := os.ReadFile(pathFile)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	expect("paths without sluiced's file", long.call(t, "paths", info, "7", script, pathFile, "1000", "100"), "0")
	expect("the environment", content(), "SLUICE_JOB_DIR=/lustre/x\n")
	// A task of a job array has no directory of its own.
	task := filepath.Join(t.TempDir(), "hash.8", "job.8", "path")
	expect("paths of an array's task", long.call(t, "paths", info, "8", script, task, "1000", "100"), "0")
	if data, err := os.ReadFile(task); err != nil || string(data) != "SLUICE_JOB_DIR=/lustre/x\n" {
		t.Errorf("the environment of an array's task: %q, %v", data, err)
	}
	asked := len(s.ops())
	for _, l := range []luaFile{long, short} {
		if err := os.WriteFile(filepath.Join(l.environment, "7"), []byte("SLUICE_FS=/lustre\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	expect("paths", long.call(t, "paths", info, "7", script, pathFile, "1000", "100"), "0")
	expect("the environment", content(), "SLUICE_FS=/lustre\n")
	expect("paths, short", short.call(t, "paths", nil, "7", script, pathFile), "0")
	if len(s.ops()) != asked {
		t.Error("paths asked sluiced although its file is there")
	}
	if got := short.call(t, "paths", nil, "../../etc/passwd", script, pathFile); !strings.HasPrefix(got, "-1") {
		t.Errorf("paths of a job that is no number: %q", got)
	}

	expect("pre_run", long.call(t, "pre_run", info, "7", script, "1000", "100"), "0")
	nodes := full
	nodes.Nodes = []string{"n1", "n2"}
	is(nodes)
	expect("pre_run, short", short.call(t, "pre_run", nil, "7", script), "0")
	expect("post_run", long.call(t, "post_run", info, "7", script, "1000", "100"), "0")
	is(full)
	expect("job_teardown", long.call(t, "job_teardown", nil, "7", script, "true", "1000", "100"), "0")
	is(api.JobCall{JobID: 7, UID: 1000, GID: 100, Hurry: true})
	expect("job_teardown, short", short.call(t, "job_teardown", nil, "7", script, "false"), "0")
	is(api.JobCall{JobID: 7})

	expect("get_status", long.call(t, "get_status", nil, "1000", "100", "job", hostile), "0 line 1\nline 2\n")
	if diff := cmp.Diff(api.BBStatus{Args: []string{"job", hostile}}, last[api.BBStatus](t, s)); diff != "" {
		t.Errorf("get_status (-want +got):\n%s", diff)
	}
	expect("get_status, short", short.call(t, "get_status", nil, "job", "7"), "0 line 1\nline 2\n")

	// A hook that is broken in any way.
	for what, body := range map[string]string{"fails": "exit 1", "says nothing": "exit 0", "says nonsense": "echo hello; echo x", "is killed": "kill -9 $$"} {
		long.setHook(t, body)
		expect("job_process when the hook "+what, long.call(t, "job_process", info, script, "1000", "100"), "0")
		if got := long.call(t, "data_in", info, "7", script, "1000", "100"); !strings.HasPrefix(got, "-1 no answer from sluice-hook") {
			t.Errorf("data_in when the hook %s: %q", what, got)
		}
	}
	if err := os.Remove(long.hook); err != nil {
		t.Fatal(err)
	}
	expect("job_process without a hook", long.call(t, "job_process", info, script, "1000", "100"), "0")
}
