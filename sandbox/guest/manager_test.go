package guest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// The test binary also is the guest binary's "exec", and a service that speaks systemd's protocol.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "exec":
			os.Exit(Main(os.Args, os.Stdout, os.Stderr))
		case "attempt":
			os.Exit(attempt(os.Args[2:]))
		case "notify": // notify MESSAGE…, then wait
			conn, err := net.Dial("unixgram", os.Getenv("NOTIFY_SOCKET"))
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			for _, message := range os.Args[2:] {
				if message == "exit" {
					os.Exit(0)
				}
				if _, err := conn.Write([]byte(message)); err != nil {
					os.Exit(1)
				}
			}
			// Until it is killed. A bare select {} is a deadlock to a static program.
			terminated := make(chan os.Signal, 1)
			signal.Notify(terminated, syscall.SIGTERM)
			<-terminated
			os.Exit(0)
		}
	}
	os.Exit(m.Run())
}

// syncBuffer is a console.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// testManager returns a manager of the units, whose texts may name {dir} and {self}, and its directory.
func testManager(t *testing.T, units map[string]string) (*Manager, string) {
	t.Helper()
	dir := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range units {
		path := filepath.Join(dir, "etc", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		text = strings.NewReplacer("{dir}", dir, "{self}", self).Replace(text)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	console := &syncBuffer{}
	m := &Manager{
		UnitDirs: []string{filepath.Join(dir, "etc")}, ConfigDir: filepath.Join(dir, "etc"), VendorDir: filepath.Join(dir, "vendor"),
		RunDir: filepath.Join(dir, "run"), JournalDir: filepath.Join(dir, "journal"), Console: console, Binary: self, StopLimit: 2 * time.Second,
	}
	t.Cleanup(func() {
		m.Shutdown(context.Background())
		if t.Failed() {
			t.Logf("console:\n%s", console)
		}
	})
	return m, dir
}

// become waits until get returns want.
func become(t *testing.T, what string, want any, get func() any) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		got := get()
		diff := cmp.Diff(want, got)
		if diff == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s (-want +got):\n%s", what, diff)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return string(text)
}

func TestMovesAreATable(t *testing.T) {
	states := []State{Inactive, Activating, Active, Deactivating, Failed}
	for _, from := range states {
		for _, to := range states {
			legal := false
			for _, s := range moves[from] {
				legal = legal || s == to
			}
			s := newService(nil, "x.service")
			s.state = from
			if err := s.move(to); (err == nil) != legal {
				t.Errorf("%s to %s: %v, legal: %v", from, to, err, legal)
			}
			if want := map[bool]State{true: to, false: from}[legal]; s.state != want {
				t.Errorf("%s to %s ended in %s, want %s", from, to, s.state, want)
			}
		}
	}
}

func TestStartFollowsTheOrder(t *testing.T) {
	step := func(name, more string) string {
		return "[Unit]\n" + more + "\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/sh -c 'sleep 0.05; echo " + name + " >>{dir}/order'\n"
	}
	m, dir := testManager(t, map[string]string{
		"a.service": step("a", "Wants=b.service missing.service odd.socket\nRequires=c.service\nAfter=b.service c.service"),
		"b.service": step("b", "After=c.service"),
		"c.service": step("c", ""),
		"d.service": step("d", "Before=c.service"),
		"t.target":  "[Unit]\nWants=a.service d.service\n",
	})
	if err := m.Start(context.Background(), "t.target"); err != nil {
		t.Fatal(err)
	}
	if got, want := read(t, dir+"/order"), "d\nc\nb\na\n"; got != want {
		t.Errorf("started %q, want %q", got, want)
	}
	if err := m.Start(context.Background(), "t.target"); err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(read(t, dir+"/order"), "\n"); got != 4 {
		t.Errorf("%d starts after a second Start, want 4: active units are left alone", got)
	}
}

func TestACircleStillStarts(t *testing.T) {
	m, _ := testManager(t, map[string]string{
		"a.service": "[Unit]\nAfter=b.service\nWants=b.service\n[Service]\nType=oneshot\nExecStart=/bin/true\n",
		"b.service": "[Unit]\nAfter=a.service\n[Service]\nType=oneshot\nExecStart=/bin/true\n",
	})
	if err := m.Start(context.Background(), "a.service"); err != nil {
		t.Error(err)
	}
}

func TestAFailedRequirementFails(t *testing.T) {
	m, dir := testManager(t, map[string]string{
		"a.service": "[Unit]\nRequires=b.service\nAfter=b.service\n[Service]\nExecStart=/bin/touch {dir}/a\n",
		"b.service": "[Service]\nType=oneshot\nExecStart=/bin/sh -c 'echo last words >&2; exit 3'\n",
	})
	err := m.Start(context.Background(), "a.service")
	if !errors.Is(err, ErrDependency) {
		t.Errorf("Start = %v, want ErrDependency", err)
	}
	if read(t, dir+"/a") != "" || m.service("b.service").State() != Failed {
		t.Error("a ran, or b did not fail")
	}
	become(t, "the console has b's last words", true, func() any {
		return strings.Contains(m.Console.(*syncBuffer).String(), "b.service failed: /bin/sh: exit status 3")
	})
	if err := m.Start(context.Background(), "nobody.service"); !errors.Is(err, ErrNoUnit) {
		t.Errorf("Start of a missing unit = %v, want ErrNoUnit", err)
	}
}

func TestNotify(t *testing.T) {
	m, _ := testManager(t, map[string]string{
		"ok.service":    "[Service]\nType=notify\nExecStart={self} notify STATUS=hello READY=1\n",
		"never.service": "[Service]\nType=notify\nTimeoutStartSec=200ms\nExecStart={self} notify STATUS=hm\n",
		"dies.service":  "[Service]\nType=notify\nExecStart=/bin/sh -c 'exit 4'\n",
	})
	if err := m.Start(context.Background(), "ok.service"); err != nil {
		t.Fatal(err)
	}
	resp := m.Handle(context.Background(), Request{Verb: "status", Units: []string{"ok"}})
	if resp.Exit != 0 || !strings.Contains(resp.Out, `Status: "hello"`) {
		t.Errorf("status: %+v", resp)
	}
	if err := m.Start(context.Background(), "never.service"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a service that is never ready: %v", err)
	}
	if err := m.Start(context.Background(), "dies.service"); err == nil || !strings.Contains(err.Error(), "before it was ready: exit status 4") {
		t.Errorf("a service that dies: %v", err)
	}
}

// A reconfigured slurmctld starts its successor, names it and ends.
func TestMainProcessHandsOver(t *testing.T) {
	m, dir := testManager(t, map[string]string{
		"x.service": "[Service]\nType=notify\nExecStart=/bin/sh -c 'sleep 1000 & echo $$$$ $! >{dir}/pids; {self} notify READY=1 exit; {self} notify MAINPID=$! exit'\nRestart=always\n",
	})
	if err := m.Start(context.Background(), "x.service"); err != nil {
		t.Fatal(err)
	}
	var old, successor int
	become(t, "the main process is the successor", true, func() any {
		if _, err := fmt.Sscan(read(t, dir+"/pids"), &old, &successor); err != nil {
			return false
		}
		main := m.service("x.service").mainProcess()
		return main != nil && main.pid == successor
	})
	become(t, "the first one has ended", true, func() any { return !alive(old) })
	if state := m.service("x.service").State(); state != Active {
		t.Errorf("state %s, want active", state)
	}
	if err := m.Stop(context.Background(), "x.service"); err != nil {
		t.Fatal(err)
	}
	become(t, "the successor has ended", true, func() any { return !alive(successor) })
}

func alive(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

func TestStopEndsAllProcesses(t *testing.T) {
	m, dir := testManager(t, map[string]string{
		"x.service": "[Service]\nExecStart=/bin/sh -c 'setsid sleep 1000 & echo $! >{dir}/child; exec sleep 1000'\nExecStop=/bin/sh -c 'echo $MAINPID >{dir}/main'\n",
		"y.service": "[Service]\nKillMode=process\nExecStart=/bin/sh -c 'setsid sleep 5 & echo $! >{dir}/kept; exec sleep 1000'\n",
		"z.service": "[Service]\nTimeoutStopSec=100ms\nExecStart=/bin/sh -c 'trap \"\" TERM; touch {dir}/deaf; while :; do sleep 0.05; done'\n",
	})
	for _, u := range []string{"x.service", "y.service", "z.service"} {
		if err := m.Start(context.Background(), u); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{"child", "kept"} {
		become(t, f+" has started", true, func() any { return strings.HasSuffix(read(t, dir+"/"+f), "\n") })
	}
	become(t, "z is deaf", true, func() any { _, err := os.Stat(dir + "/deaf"); return err == nil })
	main := m.service("z.service").mainProcess().pid
	if err := m.Stop(context.Background(), "x.service", "y.service", "z.service"); err != nil {
		t.Fatal(err)
	}
	child, _ := strconv.Atoi(strings.TrimSpace(read(t, dir+"/child")))
	kept, _ := strconv.Atoi(strings.TrimSpace(read(t, dir+"/kept")))
	become(t, "x's child in another session has ended", false, func() any { return alive(child) })
	if alive(main) {
		t.Error("a service that ignores TERM is alive")
	}
	if !alive(kept) {
		t.Error("KillMode=process ended a child")
	}
	if got := strings.TrimSpace(read(t, dir+"/main")); got == "" || got == "0" {
		t.Errorf("ExecStop saw MAINPID=%q", got)
	}
}

func TestRestart(t *testing.T) {
	m, dir := testManager(t, map[string]string{
		"x.service": "[Service]\nRestart=on-failure\nRestartSec=10ms\nStartLimitBurst=3\nExecStart=/bin/sh -c 'echo run >>{dir}/runs; exit 1'\n",
		"y.service": "[Service]\nRestart=on-failure\nRestartSec=10ms\nExecStart=/bin/sh -c 'echo run >>{dir}/clean'\n",
		"z.service": "[Service]\nRestart=always\nRestartSec=1h\nExecStart=/bin/false\n",
	})
	for _, u := range []string{"x.service", "y.service", "z.service"} {
		if err := m.Start(context.Background(), u); err != nil {
			t.Fatal(err)
		}
	}
	become(t, "x gives up after three starts", "run\nrun\nrun\n failed", func() any {
		return read(t, dir+"/runs") + " " + string(m.service("x.service").State())
	})
	become(t, "y ended well and stays so", "run\n inactive", func() any {
		return read(t, dir+"/clean") + " " + string(m.service("y.service").State())
	})
	become(t, "z waits for its restart", Activating, func() any { return m.service("z.service").State() })
	if err := m.Stop(context.Background(), "z.service"); err != nil {
		t.Fatal(err)
	}
	if got := m.service("z.service").State(); got != Inactive {
		t.Errorf("z is %s after a stop, want inactive", got)
	}
}

func TestConditionsAndEnvironment(t *testing.T) {
	m, dir := testManager(t, map[string]string{
		"skipped.service": "[Unit]\nConditionPathExists={dir}/nothing\n[Service]\nExecStart=/bin/touch {dir}/ran\n",
		"negated.service": "[Unit]\nConditionPathExists=!{dir}/nothing\n[Service]\nType=oneshot\nEnvironment=A=1 B=2\nEnvironmentFile={dir}/env\nEnvironmentFile=-{dir}/nothing\n" +
			"UMask=0077\nLimitNOFILE=123\nWorkingDirectory={dir}\nExecStart=/bin/sh -c 'echo $$A $$B $$C; umask; ulimit -n; pwd' \nExecStart=-/bin/false\nExecStart=/bin/echo $C ${C}\n",
		"assert.service": "[Unit]\nAssertPathExists={dir}/nothing\n[Service]\nExecStart=/bin/true\n",
		"noenv.service":  "[Service]\nEnvironmentFile={dir}/nothing\nExecStart=/bin/true\n",
	})
	if err := os.WriteFile(dir+"/env", []byte("B=from the file\nC=\"x  y\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := m.Start(context.Background(), "skipped.service"); err != nil {
		t.Error(err)
	}
	if got := m.service("skipped.service").State(); got != Inactive || read(t, dir+"/ran") != "" {
		t.Errorf("a unit whose condition is not met is %s", got)
	}
	if err := m.Start(context.Background(), "negated.service"); err != nil {
		t.Fatal(err)
	}
	become(t, "the journal", []string{"1 from the file x y", "0077", "123", dir, "x y x  y"}, func() any {
		var lines []string
		for _, l := range tail(journalPath(m.JournalDir, "negated.service"), 10) {
			_, text, _ := strings.Cut(l, " ")
			lines = append(lines, text)
		}
		return lines
	})
	if err := m.Start(context.Background(), "assert.service"); err == nil {
		t.Error("an unmet assertion is no error")
	}
	if err := m.Start(context.Background(), "noenv.service"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing EnvironmentFile: %v", err)
	}
}

func TestStopDuringStart(t *testing.T) {
	m, _ := testManager(t, map[string]string{"slow.service": "[Service]\nType=oneshot\nExecStart=/bin/sleep 1000\n"})
	started := make(chan error, 1)
	go func() { started <- m.Start(context.Background(), "slow.service") }()
	become(t, "it starts", Activating, func() any { return m.service("slow.service").State() })
	if err := m.Stop(context.Background(), "slow.service"); err != nil {
		t.Fatal(err)
	}
	if err := <-started; !errors.Is(err, context.Canceled) {
		t.Errorf("Start = %v, want Canceled", err)
	}
	if got := m.service("slow.service").State(); got != Inactive {
		t.Errorf("state %s, want inactive", got)
	}
}

func TestShutdownStopsInReverse(t *testing.T) {
	unit := func(name, more string) string {
		return "[Unit]\n" + more + "\n[Service]\nExecStart=/bin/sleep 1000\nExecStopPost=/bin/sh -c 'echo " + name + " >>{dir}/order'\n"
	}
	m, dir := testManager(t, map[string]string{
		"db.service":   unit("db", ""),
		"dbd.service":  unit("dbd", "After=db.service\nRequires=db.service"),
		"ctld.service": unit("ctld", "After=dbd.service\nRequires=dbd.service"),
	})
	if err := m.Start(context.Background(), "ctld.service"); err != nil {
		t.Fatal(err)
	}
	m.Shutdown(context.Background())
	if got, want := read(t, dir+"/order"), "ctld\ndbd\ndb\n"; got != want {
		t.Errorf("stopped %q, want %q", got, want)
	}
}

// serve returns the path of a socket on which the manager answers.
func serve(t *testing.T, m *Manager, dir string) string {
	t.Helper()
	socket := filepath.Join(dir, "socket")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- m.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return socket
}

func TestSystemctl(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root: only root may start units")
	}
	m, dir := testManager(t, map[string]string{
		"x.service":     "[Unit]\nDescription=The X\n[Service]\nExecStart=/bin/sleep 1000\nExecReload=/bin/touch {dir}/reloaded\n[Install]\nWantedBy=multi-user.target\n",
		"bad.service":   "[Service]\nType=oneshot\nExecStart=/bin/false\n",
		"wrong.service": "[Service]\nType=unknown\n",
	})
	socket := serve(t, m, dir)
	for _, tc := range []struct {
		args   string
		exit   int
		stdout string
		stderr string // is in it
	}{
		{"is-active x", 3, "inactive\n", ""},
		{"is-enabled x", 1, "disabled\n", ""},
		{"enable --now x", 0, "", ""},
		{"is-active x.service", 0, "active\n", ""},
		{"is-active -q x", 0, "", ""},
		{"is-active bad x", 0, "inactive\nactive\n", ""},
		{"is-enabled x", 0, "enabled\n", ""},
		{"enable x", 0, "", ""},
		{"reload x", 0, "", ""},
		{"restart x", 0, "", ""},
		{"try-restart bad", 0, "", ""},
		{"start bad", 1, "", "exit status 1"},
		{"is-failed bad", 0, "failed\n", ""},
		{"reset-failed bad", 0, "", ""},
		{"is-failed bad", 1, "inactive\n", ""},
		{"start nobody", 5, "", "nobody.service"},
		{"is-enabled nobody", 1, "not-found\n", ""},
		{"status nobody", 4, "Unit nobody.service could not be found.\n", ""},
		{"start wrong", 1, "", "type \"unknown\" is not supported"},
		{"start ../x", 1, "", "not a unit's name"},
		{"start", 1, "", "needs a unit"},
		{"frobnicate x", 1, "", "unknown verb"},
		{"mask x", 0, "", ""},
		{"daemon-reload", 0, "", ""},
		{"disable --now x", 0, "", ""},
		{"is-active x", 3, "inactive\n", ""},
		{"is-enabled x", 1, "disabled\n", ""},
		{"stop x", 0, "", ""},
		{"is-system-running", 1, "starting\n", ""},
	} {
		var stdout, stderr bytes.Buffer
		exit := systemctl(socket, strings.Fields(tc.args), &stdout, &stderr)
		if exit != tc.exit || stdout.String() != tc.stdout || !strings.Contains(stderr.String(), tc.stderr) || (tc.stderr == "") != (stderr.Len() == 0) {
			t.Errorf("systemctl %s: exit %d, %q, %q, want %d, %q, %q", tc.args, exit, &stdout, &stderr, tc.exit, tc.stdout, tc.stderr)
		}
	}
	if _, err := os.Stat(dir + "/reloaded"); err != nil {
		t.Error("reload did not run ExecReload")
	}
}

func TestServeSurvivesNonsense(t *testing.T) {
	m, dir := testManager(t, nil)
	socket := serve(t, m, dir)
	for _, text := range []string{"", "\n", "{\n", "null\n", strings.Repeat("x", 2*maxRequest), `{"verb":"start","units":["a\u0000b"]}` + "\n"} {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write([]byte(text)) // it may be cut off
		if err := conn.(*net.UnixConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, conn)
		conn.Close()
	}
	if _, err := call(socket, Request{Verb: "daemon-reload"}); err != nil {
		t.Error(err)
	}
}

func FuzzParseSystemctl(f *testing.F) {
	f.Add("enable --now slurmd")
	f.Add("-q is-active a b --no-pager")
	f.Fuzz(func(t *testing.T, line string) {
		req, _ := parseSystemctl(strings.Split(line, " "))
		for _, u := range append(req.Units, req.Verb) {
			if strings.HasPrefix(u, "-") {
				t.Errorf("the flag %q became an argument", u)
			}
		}
	})
}
