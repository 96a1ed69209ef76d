package main

import (
	"bufio"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/remote"
	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/prolog"
	"github.com/sluicehpc/sluice/tests/bench"
	"github.com/sluicehpc/sluice/trust"
)

const module = "github.com/sluicehpc/sluice/"

func deps(t *testing.T, pkg string) []string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", module+pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(out))
}

func TestHooksDependOnLittle(t *testing.T) {
	own := []string{"api", "prolog", "epilog", "health", "lustre/probe", "internal/atomicfile"}
	for _, hook := range []string{"cmd/sluice-prolog", "cmd/sluice-epilog"} {
		for _, d := range deps(t, hook) {
			p, ours := strings.CutPrefix(d, module)
			switch {
			case ours && p != hook && !slices.Contains(own, p):
				t.Errorf("%s links %s", hook, d)
			case !ours && strings.Contains(d, "."):
				t.Errorf("%s links %s, which is not the standard library", hook, d)
			case d == "net" || strings.HasPrefix(d, "net/") || strings.HasPrefix(d, "crypto"):
				t.Errorf("%s links %s, whose start costs time", hook, d)
			}
		}
	}
}

func TestAgentDependsOnLittle(t *testing.T) {
	for _, d := range deps(t, "cmd/sluice-agent") {
		if strings.HasPrefix(d, module) || strings.HasPrefix(d, "vendor/") || !strings.Contains(strings.Split(d, "/")[0], ".") {
			continue
		}
		known := []string{"cloud.google.com/go/compute/metadata", "golang.org/x/sys/",
			"github.com/google/nftables", "github.com/mdlayher/netlink", "github.com/mdlayher/socket", "golang.org/x/net/bpf", "golang.org/x/sync/errgroup"} // the guard's
		if !slices.ContainsFunc(known, func(k string) bool { return strings.HasPrefix(d, k) }) {
			t.Errorf("sluice-agent links %s", d)
		}
	}
}

// build makes the released form of the programs.
func build(t *testing.T) (dir string) {
	t.Helper()
	// A look at their sources tells go test that its cached result depends on them.
	for _, d := range slices.Concat(deps(t, "cmd/sluice-agent"), deps(t, "cmd/sluice-prolog"), deps(t, "cmd/sluice-epilog")) {
		if p, ours := strings.CutPrefix(d, module); ours {
			files, err := filepath.Glob(filepath.Join("../..", p, "*.go"))
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range files {
				if _, err := os.Stat(f); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	dir = t.TempDir()
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags=-s -w", "-o", dir,
		module+"cmd/sluice-agent", module+"cmd/sluice-prolog", module+"cmd/sluice-epilog", module+"tests/bench/empty")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return dir
}

// controller answers agents and remembers what they said.
type controller struct {
	mu      sync.Mutex // guards what follows
	reports []api.NodeReport
	jobs    []api.JobEvent
}

func (c *controller) events() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []string
	for _, e := range c.jobs {
		if s := fmt.Sprintf("%s %d on %s", e.Event, e.JobID, e.Node); !slices.Contains(all, s) {
			all = append(all, s) // a killed agent may have sent it twice
		}
	}
	return all
}

// inNetwork holds where the programs are for a test that runs in a network of its own.
const inNetwork = "SLUICE_TEST_IN_NETWORK"

// The programs as they are released: a metadata server over HTTP, sluiced over
// TLS, mount(8) with a helper for lustre in a mount namespace of the test's own.
func TestProgramsOnANode(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("needs root for namespaces")
	}
	if os.Getenv(inNetwork) == "" {
		// The agent guards the metadata server in its network namespace: not in this machine's.
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), inNetwork+"="+build(t))
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
			t.Errorf("%v", err)
		}
		t.Logf("%s", out)
		return
	}
	if out, err := exec.CommandContext(t.Context(), "ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	bin := os.Getenv(inNetwork)
	for _, hook := range []string{"sluice-prolog", "sluice-epilog"} {
		if st, err := os.Stat(filepath.Join(bin, hook)); err != nil || st.Size() > 10<<20 {
			t.Errorf("%s: %v, %v, want at most 10 MiB", hook, st.Size(), err)
		}
	}
	root, err := os.MkdirTemp("", "sluice") // a socket's path is at most 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), mode)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	write("sbin/mount.lustre", "#!/bin/sh\nexec mount -i -t tmpfs \"$1\" \"$2\"\n", 0o755)
	write("bin/systemctl", "#!/bin/sh\necho \"$@\" >>"+root+"/systemctl.log\n", 0o755)
	dir := filepath.Join(root, "lustre")

	// sluiced
	c := &controller{}
	authority, err := trust.OpenCA(filepath.Join(root, "controller"), "c", clock.System)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	handle := func(_ context.Context, req api.Request) (any, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		switch req.Op {
		case api.OpAgentKeys:
			return api.Keys{Files: []api.KeyFile{{Path: "/etc/slurm/slurm.key", Owner: "root", Data: []byte("a key")}}}, nil
		case api.OpAgentReport:
			var r api.NodeReport
			err := json.Unmarshal(req.Body, &r)
			c.reports = append(c.reports, r)
			return api.ReportAnswer{NextSeconds: 1, FileSystems: []api.FileSystem{{Name: "scratch", Source: "10.0.0.5@tcp:/fs", Dir: dir, Types: []string{"tmpfs"}}}}, err
		case api.OpAgentJob:
			var j api.JobEvent
			err := json.Unmarshal(req.Body, &j)
			c.jobs = append(c.jobs, j)
			return api.Ack{}, err
		}
		return nil, api.Errorf(api.CodeBadRequest, "operation %s", req.Op)
	}
	enrol := func(_ context.Context, _ string, req api.Request) (any, error) {
		var in api.EnrolRequest
		if err := json.Unmarshal(req.Body, &in); err != nil {
			return nil, err
		}
		key, hash, err := trust.ParseRequest(in.Request)
		if err != nil {
			return nil, err
		}
		if in.Token != "token for "+trust.Audience(authority.Fingerprint(), hash) {
			return nil, api.Errorf(api.CodeDenied, "token %q", in.Token)
		}
		chain, _, err := authority.Sign(key, trust.Agent{Cluster: "c", Role: api.RoleCompute, Instance: "4711", Node: "c-0"})
		return api.Certificate{Chain: chain}, err
	}
	admit := func(*x509.Certificate) (remote.Handler, error) { return handle, nil }
	go remote.Server{TLS: authority.ServerTLS(nil), Admit: admit, Enrol: enrol}.Serve(t.Context(), l)

	// metadata server
	values := map[string]string{"id": "4711",
		"attributes/sluice-controller": l.Addr().String(), "attributes/sluice-fingerprint": authority.Fingerprint()}
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		v, ok := values[strings.TrimPrefix(r.URL.Path, "/computeMetadata/v1/instance/")]
		if r.URL.Path == "/computeMetadata/v1/instance/service-accounts/default/identity" && r.FormValue("format") == "full" {
			v, ok = "token for "+r.FormValue("audience"), true
		}
		if !ok {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Metadata-Flavor", "Google")
		w.Write([]byte(v))
	}))
	defer h.Close()

	// the node
	node := exec.CommandContext(t.Context(), "unshare", "--mount", "--propagation", "private", "--", "sh", "-c",
		"mount -t overlay overlay -o lowerdir="+root+"/sbin:/usr/sbin /usr/sbin && echo up && exec cat")
	stdin, err := node.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := node.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	node.Stderr = t.Output()
	if err := node.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { stdin.Close(); node.Wait() }()
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "up\n" {
		t.Fatalf("no namespace with an overlay: %q, %v", line, err)
	}
	env := []string{"PATH=" + root + "/bin:/usr/sbin:/usr/bin:/sbin:/bin", "SLUICE_ROOT=" + root,
		"GCE_METADATA_HOST=" + strings.TrimPrefix(h.URL, "http://"),
		"SLURM_JOB_ID=7", "SLURM_JOB_UID=10001", "SLURMD_NODENAME=c-0"}
	inNode := func(args ...string) *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), "nsenter", append([]string{"--mount=/proc/" + strconv.Itoa(node.Process.Pid) + "/ns/mnt", "--"}, args...)...)
		cmd.Env = env
		cmd.Stderr = t.Output()
		return cmd
	}
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: root + "/notify", Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer notify.Close()
	start := func() *exec.Cmd {
		t.Helper()
		agent := inNode(filepath.Join(bin, "sluice-agent"))
		agent.Env = append(agent.Env, "NOTIFY_SOCKET="+root+"/notify")
		if err := agent.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { agent.Process.Kill(); agent.Wait() })
		notify.SetReadDeadline(time.Now().Add(20 * time.Second))
		buf := make([]byte, 64)
		if n, err := notify.Read(buf); err != nil || string(buf[:n]) != "READY=1" {
			t.Fatalf("notified %q, %v", buf[:n], err)
		}
		return agent
	}
	hook := func(name string) (exit int, stderr string) {
		t.Helper()
		cmd := inNode(filepath.Join(bin, name))
		var b strings.Builder
		cmd.Stderr = &b
		err := cmd.Run()
		if cmd.ProcessState == nil {
			t.Fatal(err)
		}
		return cmd.ProcessState.ExitCode(), b.String()
	}

	agent := start()
	log := filepath.Join(root, "systemctl.log")
	eventually(t, "slurmd", func() bool { b, _ := os.ReadFile(log); return string(b) == "start slurmd\n" })
	if exit, said := hook("sluice-prolog"); exit != 0 || said != "" {
		t.Errorf("Prolog on a ready node: %d, %q", exit, said)
	}
	c.mu.Lock()
	r := c.reports[len(c.reports)-1]
	c.mu.Unlock()
	if data, err := os.ReadFile(filepath.Join(root, "etc/slurm/slurm.key")); err != nil || string(data) != "a key" {
		t.Errorf("Slurm's key: %q, %v", data, err)
	}
	if out, err := inNode("nft", "list", "table", "inet", "sluice_metadata").Output(); err != nil || !strings.Contains(string(out), "meta skuid != 0") {
		t.Errorf("the metadata server's guard: %v\n%s", err, out)
	}
	if r.ReadyAt == "" || len(r.Mounts) != 1 || r.Mounts[0].State != "ok" {
		t.Errorf("report %+v", r)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", agent.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if f := strings.Fields(line); f[0] == "Pss:" {
			t.Logf("memory of the agent: PSS %s kB", f[1])
			if kb, err := strconv.Atoi(f[1]); err != nil || kb > 40<<10 {
				t.Errorf("PSS %s kB, want at most 40 MiB", f[1])
			}
		}
	}
	medians, err := bench.ExecMedians(t.Context(), 50,
		bench.Program{Path: filepath.Join(bin, "empty")}, bench.Program{Path: filepath.Join(bin, "sluice-prolog"), Env: env})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("empty program %s, sluice-prolog %s", medians[0], medians[1]) // judged by make bench

	// Killed without a word: hooks look themselves and keep what they saw.
	agent.Process.Signal(syscall.SIGKILL)
	agent.Wait()
	if exit, said := hook("sluice-prolog"); exit != 0 || said != "" {
		t.Errorf("Prolog without an agent: %d, %q", exit, said)
	}
	if exit, _ := hook("sluice-epilog"); exit != 0 {
		t.Errorf("Epilog without an agent: %d", exit)
	}
	write("etc/sluice/prolog.conf", "timeout=0s\n", 0o644)
	if err := inNode("umount", dir).Run(); err != nil {
		t.Fatal(err)
	}
	if exit, said := hook("sluice-prolog"); exit != 0 || !strings.Contains(said, "not_mounted") {
		t.Errorf("Prolog without agent and mount: %d, %q, want 0 and the reason", exit, said)
	}
	start()
	want := []string{"prolog 7 on c-0", "epilog 7 on c-0"}
	eventually(t, "all moments at sluiced", func() bool { return slices.Equal(c.events(), want) })
	eventually(t, "the mount again", func() bool {
		write("etc/sluice/prolog.conf", "timeout=20s\n", 0o644)
		exit, said := hook("sluice-prolog")
		return exit == 0 && !strings.Contains(said, "starts although")
	})
	if b, err := os.ReadFile(log); err != nil || string(b) != "start slurmd\n" {
		t.Errorf("systemctl was called with %q, %v, want one start in a boot", b, err)
	}
	if _, err := os.Stat(filepath.Join(prolog.VerdictDir, "7")); err == nil {
		t.Error("a verdict outside of SLUICE_ROOT")
	}
}

// eventually waits until the condition holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	deadline := time.NewTimer(30 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("never came: %s", what)
		}
	}
}
