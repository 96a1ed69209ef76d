package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/oauth2"
	api "google.golang.org/api/compute/v1"
	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/sandbox/faults"
)

// The test binary is also the two programs that the tests start: the outer process, and
// `sluice sandbox exec`.
func TestMain(m *testing.M) {
	switch {
	case len(os.Args) == 3 && os.Args[2] == "_serve":
		if err := Serve(); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	case len(os.Args) > 5 && os.Args[1] == "_exec": // _exec NAME VM USER ARGS…
		code, err := Exec(context.Background(), os.Args[2], ExecOptions{VM: os.Args[3], User: os.Args[4], Args: os.Args[5:]})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(code)
	}
	dir, err := os.MkdirTemp("", "sluice-sandbox-test-")
	if err == nil {
		guestBinary = filepath.Join(dir, "sluice-guest")
		build := exec.Command("go", "build", "-o", guestBinary, "../cmd/sluice-guest")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		build.Stderr = os.Stderr
		err = build.Run()
	}
	code := 1
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = m.Run()
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

var guestBinary string

const testFamily = "test-family"

func options(name string) Options {
	exe, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return Options{
		Name: name, Guest: guestBinary, Self: []string{exe, "sandbox", "_serve"}, ImageFamily: testFamily,
		WriteImage: func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "from-image"), []byte("the image's layer\n"), 0o644)
		},
		Log: os.Stderr,
	}
}

// testUp starts a sandbox that ends with the test.
func testUp(t *testing.T, name string) *Status {
	t.Helper()
	needRoot(t)
	s, err := Up(context.Background(), options(name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p, err := pathsOf(name)
		if err != nil {
			t.Fatal(err)
		}
		if t.Failed() {
			t.Logf("log of the outer process:\n%s", lastLines(p.log(), 60))
		}
		if err := Down(context.Background(), name); err != nil && !errors.Is(err, ErrNotRunning) {
			t.Error(err)
		}
	})
	return s
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
}

// hostState is what the sandbox could leave on the host.
func hostState(t *testing.T) map[string][]string {
	t.Helper()
	state := map[string][]string{}
	links, err := os.ReadDir("/sys/class/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		state["links"] = append(state["links"], l.Name())
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	state["mounts"] = strings.Split(string(mounts), "\n")
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		ns, err := os.Readlink("/proc/" + e.Name() + "/ns/net")
		if err != nil || ns == own {
			continue
		}
		// Other tests of this machine may have namespaces too: only those of this binary count.
		cmdline, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err == nil && bytes.Contains(cmdline, []byte(filepath.Dir(guestBinary))) {
			state["processes"] = append(state["processes"], strings.ReplaceAll(string(cmdline), "\x00", " "))
		}
	}
	for _, dir := range []string{"/run/sluice-sandbox", "/var/cache/sluice/sandboxes"} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		for _, e := range entries {
			if strings.Contains(e.Name(), "test-") {
				state["files"] = append(state["files"], dir+"/"+e.Name())
			}
		}
	}
	sort.Strings(state["processes"])
	return state
}

// become waits until get returns want.
func become(t *testing.T, what string, want any, get func() any) {
	t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for {
		got := get()
		diff := cmp.Diff(want, got)
		if diff == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s (-want +got):\n%s", what, diff)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func TestUpStatusDown(t *testing.T) {
	needRoot(t)
	before := hostState(t)
	up := testUp(t, "test-updown")
	status, err := GetStatus(context.Background(), "test-updown")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(up, status); diff != "" {
		t.Errorf("Up and GetStatus differ:\n%s", diff)
	}
	want := &Status{
		Name: "test-updown", Pid: up.Pid, Slurm: "24.11", VMs: []VM{},
		Endpoints: endpointsAt(APIURL), HostEndpoints: up.HostEndpoints,
	}
	if diff := cmp.Diff(want, status); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	if !strings.HasPrefix(up.HostEndpoints.Compute, "http://127.0.0.1:") {
		t.Errorf("host endpoint %q", up.HostEndpoints.Compute)
	}
	buckets := up.HostEndpoints.Storage + "/storage/v1/b?project=" + Project
	if resp, err := admin(t, up).Get(buckets); err != nil || resp.StatusCode != 200 {
		t.Errorf("the storage on the host's 127.0.0.1: %v, %v", resp, err)
	}
	if resp, err := http.Get(buckets); err != nil || resp.StatusCode != 401 {
		t.Errorf("the storage on the host's 127.0.0.1, without a token: %v, %v", resp, err)
	}
	if _, err := Up(context.Background(), options("test-updown")); !errors.Is(err, ErrRunning) || !strings.Contains(err.Error(), "sandbox down") {
		t.Errorf("a second Up = %v, want ErrRunning and what to do", err)
	}
	if err := Down(context.Background(), "test-updown"); err != nil {
		t.Fatal(err)
	}
	become(t, "the host after Down", before, func() any { return hostState(t) })
	if err := Down(context.Background(), "test-updown"); !errors.Is(err, ErrNotRunning) {
		t.Errorf("a second Down = %v, want ErrNotRunning", err)
	}
	if _, err := GetStatus(context.Background(), "test-updown"); !errors.Is(err, ErrNotRunning) {
		t.Errorf("GetStatus after Down = %v, want ErrNotRunning", err)
	}
}

func TestBadNames(t *testing.T) {
	for _, name := range []string{"../x", "a/b", "A", "-a", strings.Repeat("a", 40), "a b", "."} {
		if _, err := Up(context.Background(), options(name)); err == nil || !strings.Contains(err.Error(), "bad name") {
			t.Errorf("Up(%q) = %v", name, err)
		}
		if err := Down(context.Background(), name); err == nil {
			t.Errorf("Down(%q) succeeded", name)
		}
	}
}

func TestCancelledUpLeavesNothing(t *testing.T) {
	needRoot(t)
	before := hostState(t)
	for _, after := range []time.Duration{0, 5 * time.Millisecond, 30 * time.Millisecond, 100 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(context.Background(), after)
		_, err := Up(ctx, options("test-cancel"))
		cancel()
		if err == nil {
			if err := Down(context.Background(), "test-cancel"); err != nil {
				t.Fatal(err)
			}
		}
	}
	become(t, "the host", before, func() any { return hostState(t) })
}

func TestFailedStartSaysWhy(t *testing.T) {
	needRoot(t)
	o := options("test-fail")
	o.Self = []string{"/bin/sh", "-c", "echo out of luck >&2; exit 1"}
	_, err := Up(context.Background(), o)
	if err == nil || !strings.Contains(err.Error(), "out of luck") {
		t.Errorf("Up = %v, want the last words of the outer process", err)
	}
}

// admin makes calls from the host as the owner of a sandbox's project.
func admin(t *testing.T, s *Status) *http.Client {
	t.Helper()
	c, err := Open(s.Name)
	if err != nil {
		t.Fatal(err)
	}
	return oauth2.NewClient(context.Background(), c.TokenSource(context.Background()))
}

// cloud is the API client of a sandbox, from the host.
func cloud(t *testing.T, s *Status) *api.Service {
	t.Helper()
	c, err := api.NewService(context.Background(), option.WithEndpoint(s.HostEndpoints.Compute+"/compute/v1/"), option.WithHTTPClient(admin(t, s)))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// insert makes an instance and waits until it runs.
func insert(t *testing.T, c *api.Service, name, script string) {
	t.Helper()
	i := &api.Instance{
		Name: name, MachineType: "zones/" + Zone + "/machineTypes/n2-standard-2",
		Disks: []*api.AttachedDisk{{Boot: true, InitializeParams: &api.AttachedDiskInitializeParams{
			SourceImage: "projects/" + Project + "/global/images/family/" + testFamily,
		}}},
		NetworkInterfaces: []*api.NetworkInterface{{Network: "global/networks/default"}},
	}
	if script != "" {
		i.Metadata = &api.Metadata{Items: []*api.MetadataItems{{Key: "startup-script", Value: &script}}}
	}
	op, err := c.Instances.Insert(Project, Zone, i).Do()
	for err == nil && op.Status != "DONE" {
		op, err = c.ZoneOperations.Wait(Project, Zone, op.Name).Do()
	}
	if err != nil {
		t.Fatal(err)
	}
	if op.Error != nil {
		text, _ := json.Marshal(op.Error)
		t.Fatalf("insert %s: %s", name, text)
	}
}

// run is `sluice sandbox exec`.
func run(t *testing.T, sandbox, vm, user string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", append([]string{"_exec", sandbox, vm, user}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%v: %v", args, err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

func TestKillLeavesNothing(t *testing.T) {
	needRoot(t)
	before := hostState(t)
	s := testUp(t, "test-kill")
	insert(t, cloud(t, s), "a", "")
	insert(t, cloud(t, s), "b", "#!/bin/sh\nsleep 1000")
	if cmp.Equal(before["processes"], hostState(t)["processes"]) {
		t.Fatal("the test does not see the sandbox's processes")
	}
	if err := syscall.Kill(s.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	become(t, "the host after kill -9", before["processes"], func() any { return hostState(t)["processes"] })
	// A process that ends loses its command line before its files, the lock among them.
	become(t, "no such sandbox runs", true, func() any {
		_, err := GetStatus(context.Background(), "test-kill")
		return errors.Is(err, ErrNotRunning)
	})
	// The next one starts over what the dead one left.
	if _, err := Up(context.Background(), options("test-kill")); err != nil {
		t.Fatal(err)
	}
	if err := Down(context.Background(), "test-kill"); err != nil {
		t.Fatal(err)
	}
	become(t, "the host", before, func() any { return hostState(t) })
}

func TestVMs(t *testing.T) {
	const name = "test-vms"
	s := testUp(t, name)
	c := cloud(t, s)
	script := "#!/bin/bash\necho hello from the script\ncat /from-image\nhostname >/home/alice/startup\nexit 3\n"
	insert(t, c, "a", script)
	insert(t, c, "b", "")
	status, err := GetStatus(context.Background(), name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]VM{{"a", "10.128.0.2", "RUNNING"}, {"b", "10.128.0.3", "RUNNING"}}, status.VMs); diff != "" {
		t.Errorf("VMs (-want +got):\n%s", diff)
	}
	client, err := Open(name)
	if err != nil {
		t.Fatal(err)
	}
	become(t, "the console shows the startup script", true, func() any {
		text, err := client.Console(context.Background(), "a")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Contains(text, "startup-script: hello from the script\nstartup-script: the image's layer\nstartup-script exit status 3\n")
	})
	for _, tc := range []struct {
		name, vm, user string
		args           []string
		want           string
		code           int
	}{
		{"root on a VM", "a", "", []string{"sh", "-c", "hostname; id -un; pwd"}, "a\nroot\n/root\n", 0},
		{"a user has the user's environment", "b", "alice", []string{"sh", "-c", "id -un; id -G; pwd; echo $HOME $USER $SHELL"}, "alice\n1500000001 1500001000\n/home/alice\n/home/alice alice /bin/bash\n", 0},
		{"homes are shared", "b", "alice", []string{"cat", "startup"}, "a\n", 0},
		{"exit code of a VM", "a", "", []string{"sh", "-c", "exit 7"}, "", 7},
		{"signal in a VM", "a", "", []string{"sh", "-c", "kill -TERM $$"}, "", 128 + 15},
		{"exit code of the workstation", "", "", []string{"sh", "-c", "exit 8"}, "", 8},
		{"no such program", "a", "", []string{"no-such-program"}, "", 127},
		{"names", "a", "", []string{"sh", "-c", "getent hosts b | awk '{print $1, $2}'; getent hosts b.c.sluice-sandbox.internal | awk '{print $1}'"}, "10.128.0.3 b.us-central1-a.c.sluice-sandbox.internal\n10.128.0.3\n", 0},
		{"reverse names", "a", "", []string{"sh", "-c", "getent hosts 10.128.0.3 | awk '{print $2}'"}, "b.us-central1-a.c.sluice-sandbox.internal\n", 0},
		{"unknown names", "a", "", []string{"getent", "hosts", "nobody-here"}, "", 2},
		{"unknown user", "a", "carol", []string{"true"}, "", 127},
		{"metadata of a VM", "a", "", []string{"bash", "-c", metadataRequest("169.254.169.254", "instance/name")}, "a", 0},
		{"metadata of the workstation", "", "", []string{"bash", "-c", metadataRequest("10.128.0.1", "project/project-id")}, Project, 0},
		{"the workstation's metadata is not for VMs", "a", "", []string{"bash", "-c", metadataRequest("10.128.0.1", "instance/name")}, "for the workstation alone\n", 0},
		{"the workstation's directory is the host's", "", "", []string{"pwd"}, workingDirectory(t) + "\n", 0},
		{"the workstation's environment", "", "", []string{"sh", "-c", "echo $SLUICE_ENDPOINT_LUSTRE $SLUICE_ENDPOINT_IAM $GOOGLE_CLOUD_PROJECT"}, APIURL + " " + APIURL + " " + Project + "\n", 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			out, errs, code := run(t, name, tc.vm, tc.user, tc.args...)
			if out != tc.want || code != tc.code {
				t.Errorf("got %q and exit code %d, want %q and %d; stderr: %s", out, code, tc.want, tc.code, errs)
			}
		})
	}
	t.Run("a signal reaches the program", func(t *testing.T) {
		cmd := exec.Command("/proc/self/exe", "_exec", name, "a", "", "bash", "-c", "trap 'echo got it; exit 5' TERM; echo ready; while :; do sleep 0.05; done")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		line := make([]byte, 6)
		if _, err := io.ReadFull(out, line); err != nil || string(line) != "ready\n" {
			t.Fatalf("read %q, %v", line, err)
		}
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		rest, err := io.ReadAll(out)
		if err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		if string(rest) != "got it\n" || cmd.ProcessState.ExitCode() != 5 {
			t.Errorf("got %q and exit code %d", rest, cmd.ProcessState.ExitCode())
		}
	})
	t.Run("a killed exec takes the program with it", func(t *testing.T) {
		cmd := exec.Command("/proc/self/exe", "_exec", name, "b", "alice", "sh", "-c", "echo ready; exec sleep 1234")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(out, make([]byte, 6)); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		become(t, "the program", "", func() any {
			out, _, _ := run(t, name, "b", "", "pgrep", "-f", "sleep 1234")
			return out
		})
	})
	t.Run("a deleted VM is gone", func(t *testing.T) {
		op, err := c.Instances.Delete(Project, Zone, "b").Do()
		for err == nil && op.Status != "DONE" {
			op, err = c.ZoneOperations.Wait(Project, Zone, op.Name).Do()
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, errs, code := run(t, name, "b", "", "true"); code != 1 || !strings.Contains(errs, ErrNoVM.Error()) {
			t.Errorf("exec on it: exit code %d, %q", code, errs)
		}
	})
	t.Run("a VM that powers itself off is no longer running", func(t *testing.T) {
		run(t, name, "a", "", "kill", "-TERM", "1")
		become(t, "status", []VM{{"a", "10.128.0.2", "TERMINATED"}}, func() any {
			s, err := GetStatus(context.Background(), name)
			if err != nil {
				t.Fatal(err)
			}
			return s.VMs
		})
	})
}

func workingDirectory(t *testing.T) string {
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// metadataRequest is bash that prints a metadata value: the VMs' root has no curl.
func metadataRequest(host, key string) string {
	return `exec 3<>/dev/tcp/` + host + `/80; printf 'GET /computeMetadata/v1/` + key +
		` HTTP/1.0\r\nHost: metadata\r\nMetadata-Flavor: Google\r\n\r\n' >&3; sed '1,/^\r*$/d' <&3`
}

func TestFaultsOverTheSocket(t *testing.T) {
	const name = "test-faults"
	testUp(t, name)
	c, err := Open(name)
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	if err := c.SetFault(ctx, faults.LustreTransferRate, "1000000"); err != nil {
		t.Fatal(err)
	}
	if err := c.SetFault(ctx, faults.LustreImportCorrupt, "gs://b/a ö/%2F?x"); err != nil {
		t.Fatal(err)
	}
	if err := c.SetFault(ctx, "lustre.transfer.rat", "1"); err == nil || !strings.Contains(err.Error(), "did you mean lustre.transfer.rate?") {
		t.Errorf("SetFault of an unknown key = %v", err)
	}
	if err := c.ClearFault(ctx, faults.LustreTransferRate); err != nil {
		t.Fatal(err)
	}
	got, err := c.Faults(ctx)
	if err != nil || len(got.Faults) != 1 || got.Faults[0].Key != faults.LustreImportCorrupt || got.Faults[0].Value != "gs://b/a ö/%2F?x" {
		t.Errorf("Faults: %v, %+v", err, got)
	}
	if err := c.ClearFaults(ctx); err != nil {
		t.Error(err)
	}
	log, err := c.FaultLog(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var what []string
	for _, e := range log.Entries {
		what = append(what, e.Fault+" "+e.What)
	}
	want := []string{"lustre.transfer.rate set", "lustre.import.corrupt set", "lustre.transfer.rate cleared", "lustre.import.corrupt cleared"}
	if diff := cmp.Diff(want, what); diff != "" {
		t.Errorf("FaultLog (-want +got):\n%s", diff)
	}
}

func TestLustreMount(t *testing.T) {
	const name = "test-lustre"
	s := testUp(t, name)
	c := cloud(t, s)
	insert(t, c, "a", "")
	insert(t, c, "b", "")
	source := createLustre(t, s)
	for _, vm := range []string{"a", "b"} {
		out, errs, code := run(t, name, vm, "", "sh", "-c", "mkdir -p /lustre && mount -t lustre "+source+" /lustre && findmnt -no FSTYPE,SOURCE /lustre")
		if want := "fuse.lustre " + source + "\n"; out != want || code != 0 {
			t.Fatalf("mount on %s printed %q, exit code %d, want %q; stderr: %s", vm, out, code, want, errs)
		}
	}
	if out, errs, code := run(t, name, "a", "", "sh", "-c", "mkdir -m 1777 /lustre/d && cp /bin/bash /lustre/d/file && sha256sum </bin/bash"); code != 0 {
		t.Errorf("writing: %s", errs)
	} else if sum, errs, _ := run(t, name, "b", "alice", "sh", "-c", "sha256sum </lustre/d/file; touch /lustre/d/mine; stat -c %U /lustre/d/mine"); sum != out+"alice\n" {
		t.Errorf("the other VM read %q, want %q and alice; %s", sum, out, errs)
	}
	ip, _, _ := strings.Cut(source, "@")
	for _, tc := range []struct {
		name, source string
		code         int
		text         string
	}{
		{"wrong file system", ip + "@tcp:/nope", 2, "Is the filesystem name correct?"},
		{"no server", "10.129.0.99@tcp:/scratch", 5, "Is the MGS running?"},
	} {
		// mount(8) has exit code 32 for any helper's; the helper's own is asked for.
		_, errs, code := run(t, name, "a", "", "/sbin/mount.lustre", tc.source, "/mnt", "-o", "rw")
		if code != tc.code || !strings.Contains(errs, tc.text) {
			t.Errorf("%s: exit code %d, %q, want %d and %q", tc.name, code, errs, tc.code, tc.text)
		}
		if out, _, _ := run(t, name, "a", "", "findmnt", "-n", "/mnt"); out != "" {
			t.Errorf("%s: left the mount %q", tc.name, out)
		}
	}
	if _, errs, code := run(t, name, "a", "", "sh", "-c", "umount /lustre && mount -t lustre -o ro "+source+" /lustre && ! touch /lustre/d/x"); code != 0 {
		t.Errorf("read-only: %s", errs)
	}
}

// createLustre makes a file system and returns its mount source.
func createLustre(t *testing.T, s *Status) string {
	t.Helper()
	base := s.HostEndpoints.Lustre + "/v1/"
	parent := "projects/" + Project + "/locations/" + Zone
	body := `{"filesystem":"scratch","capacityGib":"9000","perUnitStorageThroughput":"1000","network":"projects/` + Project + `/global/networks/default"}`
	var op struct {
		Name  string
		Done  bool
		Error any
	}
	do := func(method, url, body string, out any) {
		t.Helper()
		req, err := http.NewRequest(method, url, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := admin(t, s).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%s %s: %s: %s, %v", method, url, resp.Status, text, err)
		}
		if err := json.Unmarshal(text, out); err != nil {
			t.Fatal(err)
		}
	}
	do("POST", base+parent+"/instances?instanceId=scratch", body, &op)
	become(t, "the instance's operation", true, func() any {
		do("GET", base+op.Name, "", &op)
		return op.Done
	})
	if op.Error != nil {
		t.Fatal(op.Error)
	}
	var instance struct{ MountPoint string }
	do("GET", base+parent+"/instances/scratch", "", &instance)
	return instance.MountPoint
}

func TestTwoSandboxes(t *testing.T) {
	a, b := testUp(t, "test-one"), testUp(t, "test-two")
	if a.Pid == b.Pid || a.HostEndpoints == b.HostEndpoints {
		t.Errorf("two sandboxes share: %+v and %+v", a, b)
	}
	insert(t, cloud(t, a), "vm", "")
	insert(t, cloud(t, b), "vm", "")
	if err := Down(context.Background(), "test-one"); err != nil {
		t.Fatal(err)
	}
	if out, errs, code := run(t, "test-two", "vm", "", "hostname"); out != "vm\n" || code != 0 {
		t.Errorf("after the other's Down: %q %q %d", out, errs, code)
	}
}

func TestRecord(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	own, err := recordOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		text string
		want error
	}{
		{"the process", mustJSON(t, own), nil},
		{"a later process of that pid", mustJSON(t, record{own.Pid, own.StartTime - 1, own.BootID}), ErrNotRunning},
		{"another boot", mustJSON(t, record{own.Pid, own.StartTime, "x"}), ErrNotRunning},
		{"a dead process", mustJSON(t, record{1 << 30, 1, own.BootID}), ErrNotRunning},
		{"cut short", `{"pid":` + strconv.Itoa(own.Pid), ErrNotRunning},
		{"a pid that would be a group", `{"pid":-1}`, ErrNotRunning},
	} {
		if err := os.WriteFile(path, []byte(tc.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readRecord(path); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
	}
}

func mustJSON(t *testing.T, v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
