package probe_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/lustre/probe"
	"github.com/sluicehpc/sluice/sandbox/lustre/fusetest"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

const onceEnv = "SLUICE_TEST_PROBE_ONCE"

func TestMain(m *testing.M) {
	if code, isChild := probe.Main(); isChild {
		os.Exit(code)
	}
	if dir := os.Getenv(onceEnv); dir != "" { // stands for a Prolog: one probe, then the end
		json.NewEncoder(os.Stdout).Encode(probe.Probe(check(dir)))
		os.Exit(0)
	}
	os.Exit(fusetest.Main(m))
}

const source = "10.129.0.2@tcp:/scratch"

func check(dir string) probe.Check {
	return probe.Check{Dir: dir, Source: source, Types: []string{"lustre", "fuse.lustre"}, Timeout: 300 * time.Millisecond}
}

// slack is what a loaded machine may add to a deadline.
const slack = 3 * time.Second

func TestProbe(t *testing.T) {
	mnt := t.TempDir()
	if got := probe.Probe(check(mnt)); got.State != probe.NotMounted {
		t.Errorf("before: %+v, want not_mounted", got)
	}
	fusetest.New(t, t.TempDir(), mnt, source, lustrefs.Options{})
	c := check(mnt)
	c.Timeout = 30 * time.Second
	if got := probe.Probe(c); got.State != probe.OK || got.Detail != "" {
		t.Errorf("mounted: %+v, want ok", got)
	}
	other := check(mnt)
	other.Source = "10.129.0.3@tcp:/scratch"
	if got := probe.Probe(other); got.State != probe.WrongSource {
		t.Errorf("other source: %+v, want wrong_source", got)
	}
	strict := check(mnt)
	strict.Types = nil
	if got := probe.Probe(strict); got.State != probe.WrongType {
		t.Errorf("lustre only: %+v, want wrong_type", got)
	}
}

func TestProbeDeadServer(t *testing.T) {
	mnt := t.TempDir()
	m := fusetest.New(t, t.TempDir(), mnt, source, lustrefs.Options{})
	m.Signal(t, syscall.SIGKILL)
	<-m.Exited
	c := check(mnt)
	c.Timeout = 30 * time.Second
	got := probe.Probe(c)
	if got.State != probe.Failed || !strings.Contains(got.Detail, "not connected") {
		t.Errorf("got %+v, want an error that says that the endpoint is not connected", got)
	}
}

// TestProbeHung stops the server of a real mount, as a file system that hangs does.
func TestProbeHung(t *testing.T) {
	mnt := t.TempDir()
	m := fusetest.New(t, t.TempDir(), mnt, source, lustrefs.Options{})
	m.Signal(t, syscall.SIGSTOP)
	// The first one who waits for a FUSE server can be killed, those who wait for it cannot:
	// keep such a pair there, so that the probe's children are stuck for good.
	for range 2 {
		cmd := exec.Command("stat", "-f", mnt)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		go cmd.Wait()
	}

	var p probe.Prober
	begun := time.Now()
	for i := range 5 {
		got := p.Probe(check(mnt))
		if got.State != probe.Hung || got.Took > check(mnt).Timeout+slack {
			t.Errorf("probe %d: %+v, want hung within %s", i, got, check(mnt).Timeout)
		}
	}
	t.Logf("5 probes took %v", time.Since(begun))
	if n := children(t); n > 1 {
		// A child that was killed is remembered until it is gone, so that there is never more than one.
		t.Errorf("%d children of the probe, want at most 1", n)
	}

	// A program that probes once ends by itself, without its outputs being held open.
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), onceEnv+"="+mnt)
	start := time.Now()
	out, err := cmd.CombinedOutput() // waits for the end of the pipe as well
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var got probe.Result
	if err := json.Unmarshal(out, &got); err != nil || got.State != probe.Hung {
		t.Errorf("program printed %s (%v), want hung", out, err)
	}
	if took := time.Since(start); took > check(mnt).Timeout+slack {
		t.Errorf("the program took %v", took)
	}

	m.Signal(t, syscall.SIGCONT)
	healed := check(mnt)
	healed.Timeout = 30 * time.Second
	for deadline := time.Now().Add(30 * time.Second); ; {
		got := p.Probe(healed)
		if got.State == probe.OK {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("after the heal: %+v, want ok", got)
		}
	}
}

// children counts the probe's processes among this process's children.
func children(t *testing.T) int {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, name := range lines {
		stat, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		cmdline, _ := os.ReadFile(filepath.Join(filepath.Dir(name), "cmdline"))
		_, rest, _ := strings.Cut(string(stat), ") ")
		var state string
		var parent int
		fmt.Sscan(rest, &state, &parent)
		if parent == os.Getpid() && strings.HasPrefix(string(cmdline), "sluice-probe-child") && state != "Z" {
			n++
			t.Logf("child %s is in state %s", strconv.Quote(name), state)
		}
	}
	return n
}
