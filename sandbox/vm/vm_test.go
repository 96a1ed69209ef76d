package vm

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/sandbox/rootfs"
)

// inside is set in the environment of the test process that has namespaces of its own, to the path of a guest binary.
const inside = "SLUICE_TEST_INSIDE"

// TestMain runs the tests as PID 1 of namespaces of their own, so that nothing of them can stay on the host.
func TestMain(m *testing.M) {
	if os.Getenv(inside) != "" || os.Geteuid() != 0 {
		os.Exit(m.Run())
	}
	code, err := reexec()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// reexec runs the test binary again, inside.
func reexec() (code int, err error) {
	// Before there is no network: the first one to need the root fetches it.
	if _, err := rootfs.Ensure(context.Background(), rootfs.Options{Cache: rootfs.Cache(), Log: os.Stderr}); err != nil {
		return 1, err
	}
	dir, err := os.MkdirTemp("", "sluice-vm-test-")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	guestBinary := filepath.Join(dir, "sluice-guest")
	build := exec.Command("go", "build", "-o", guestBinary, "../../cmd/sluice-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		return 1, err
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"="+guestBinary)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	runtime.LockOSThread() // Pdeathsig follows the thread
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL,
	}
	var exit *exec.ExitError
	if err := cmd.Run(); errors.As(err, &exit) {
		return exit.ExitCode(), nil
	} else if err != nil {
		return 1, err
	}
	return 0, nil
}

var (
	once    sync.Once
	onceErr error
	layer   string
)

// newHost returns a Host with a bridge, the guest binary built from this checkout, and the real root.
func newHost(t *testing.T) (*Host, string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	once.Do(func() {
		onceErr = func() error {
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return err
			}
			if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
				return err
			}
			var err error
			if layer, err = rootfs.Ensure(context.Background(), rootfs.Options{Cache: rootfs.Cache()}); err != nil {
				return err
			}
			bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
			if err := netlink.LinkAdd(bridge); err != nil {
				return err
			}
			for _, a := range []string{"10.128.0.1/20", "169.254.169.254/32"} {
				addr, err := netlink.ParseAddr(a)
				if err != nil {
					return err
				}
				if err := netlink.AddrAdd(bridge, addr); err != nil {
					return err
				}
			}
			return netlink.LinkSetUp(bridge)
		}()
	})
	if onceErr != nil {
		t.Fatal(onceErr)
	}
	return &Host{Bridge: "br0", Guest: os.Getenv(inside), Domain: "c.test.internal", DNS: netip.MustParseAddr("169.254.169.254")}, layer
}

func spec(t *testing.T, layer string, n int) Spec {
	t.Helper()
	dir := t.TempDir()
	return Spec{
		Name: fmt.Sprintf("vm-%d", n), Hostname: fmt.Sprintf("vm-%d", n),
		Address: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 128, 0, byte(n)}), 20), Gateway: netip.MustParseAddr("10.128.0.1"),
		Layers: []string{layer}, Dir: dir,
	}
}

func start(t *testing.T, h *Host, s Spec) *VM {
	t.Helper()
	v, err := h.Start(context.Background(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := v.Stop(context.Background()); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			if console, err := os.ReadFile(v.Console()); err == nil {
				t.Logf("console of %s:\n%s", s.Name, console)
			}
		}
	})
	return v
}

// in runs f on a thread that is in the VM's network.
func in(t *testing.T, v *VM, f func() error) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		ns, err := netns.GetFromPid(v.Pid())
		if err == nil {
			err = netns.Set(ns)
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestTwoVMsTalk(t *testing.T) {
	h, layer := newHost(t)
	a, b := start(t, h, spec(t, layer, 2)), start(t, h, spec(t, layer, 3))
	var l net.Listener
	in(t, a, func() (err error) {
		l, err = net.Listen("tcp4", "10.128.0.2:7000")
		return err
	})
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			fmt.Fprintln(c, "hello from a")
			c.Close()
		}
	}()
	in(t, b, func() error {
		c, err := net.DialTimeout("tcp4", "10.128.0.2:7000", 5*time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		line, err := bufio.NewReader(c).ReadString('\n')
		if got, want := line, "hello from a\n"; got != want {
			return fmt.Errorf("got %q, want %q, %v", got, want, err)
		}
		return nil
	})
}

// A VM that was taken over takes another one's address, and its hardware address too.
func TestVMCannotPlayAnother(t *testing.T) {
	h, layer := newHost(t)
	a, b := start(t, h, spec(t, layer, 2)), start(t, h, spec(t, layer, 3))
	l, err := net.Listen("tcp4", "10.128.0.1:0") // knows VMs by their addresses
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprintln(c, c.RemoteAddr().(*net.TCPAddr).IP)
			c.Close()
		}
	}()
	whoAmI := func(from string, patience time.Duration) (string, error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: patience}
		c, err := d.Dial("tcp4", l.Addr().String())
		if err != nil {
			return "", err
		}
		defer c.Close()
		return bufio.NewReader(c).ReadString('\n')
	}
	own := func(v *VM, ip string) {
		in(t, v, func() error {
			if got, err := whoAmI(ip, 5*time.Second); got != ip+"\n" {
				return fmt.Errorf("%s is taken for %q, %v", ip, got, err)
			}
			return nil
		})
	}
	own(a, "10.128.0.2")
	own(b, "10.128.0.3")
	in(t, b, func() error {
		eth, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		stolen, err := netlink.ParseAddr("10.128.0.2/20")
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(eth, stolen); err != nil {
			return err
		}
		for _, mac := range []net.HardwareAddr{eth.Attrs().HardwareAddr, hardwareAddr(netip.MustParseAddr("10.128.0.2"))} {
			if err := netlink.LinkSetHardwareAddr(eth, mac); err != nil {
				return err
			}
			if got, err := whoAmI("10.128.0.2", time.Second); err == nil {
				return fmt.Errorf("with the address %v, 10.128.0.3 is taken for %q", mac, got)
			}
		}
		return nil
	})
	own(a, "10.128.0.2")
}

func TestVMSeesOnlyItself(t *testing.T) {
	h, layer := newHost(t)
	s := spec(t, layer, 4)
	share := t.TempDir()
	s.Binds = []Bind{{Source: share, Target: "/mnt/share"}, {Source: share, Target: "/var/run/ro", ReadOnly: true}}
	v := start(t, h, s)
	script := `set -e
		hostname
		test -c /dev/fuse; test -c /dev/null
		test "$(readlink -f /usr/bin/systemctl)" = /run/sandbox/guest
		echo made inside >/mnt/share/file
		if touch /run/ro/x 2>/dev/null; then echo a read-only bind is writable; fi
		if touch /sys/x 2>/dev/null; then echo sysfs is writable; fi
		ls -d /proc/[0-9]* | wc -l >/mnt/share/processes
		grep -c outside /proc/mounts || true
		getent hosts vm-4
		cat /etc/resolv.conf`
	out, err := exec.Command("nsenter", "-t", fmt.Sprint(v.Pid()), "-m", "-u", "-i", "-n", "-p", "bash", "-c", script).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	want := "vm-4\n0\n10.128.0.4      vm-4.c.test.internal vm-4\nsearch c.test.internal\nnameserver 169.254.169.254\noptions timeout:2 attempts:2\n"
	if got := string(out); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got, err := os.ReadFile(filepath.Join(share, "file")); err != nil || string(got) != "made inside\n" {
		t.Errorf("the shared file has %q, %v", got, err)
	}
}

func TestStopLeavesNothing(t *testing.T) {
	h, layer := newHost(t)
	before := state(t)
	v := start(t, h, spec(t, layer, 5))
	if got := state(t); got == before {
		t.Error("a running VM is not seen: the test looks at the wrong things")
	}
	if err := v.Stop(context.Background()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-v.Done():
	default:
		t.Error("Done is open after Stop")
	}
	if got := state(t); got != before {
		t.Errorf("before the VM:\n%s\nafter it:\n%s", before, got)
	}
	if err := v.Stop(context.Background()); err != nil {
		t.Errorf("stopping it again: %v", err)
	}
}

// state is what the machine has now: links, mounts and processes but this one's children of other tests.
func state(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		fmt.Fprintln(&b, "link", l.Attrs().Name)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	b.Write(mounts)
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		cmdline, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err == nil && e.Name() != "self" && e.Name() != "thread-self" && len(cmdline) > 0 {
			fmt.Fprintf(&b, "process %s %s\n", e.Name(), bytes.ReplaceAll(cmdline, []byte{0}, []byte{' '}))
		}
	}
	return b.String()
}

func TestTwentyAtOnce(t *testing.T) {
	h, layer := newHost(t)
	before := state(t)
	for round := range 3 {
		vms := make([]*VM, 20)
		errs := make([]error, 20)
		var wg sync.WaitGroup
		for i := range vms {
			s := spec(t, layer, 20+i)
			wg.Go(func() { vms[i], errs[i] = h.Start(context.Background(), s) })
		}
		wg.Wait()
		for i, err := range errs {
			if err != nil {
				t.Errorf("round %d, VM %d: %v", round, i, err)
			}
		}
		for i, v := range vms {
			if v == nil {
				continue
			}
			select {
			case <-v.Done():
				t.Errorf("round %d, VM %d has ended by itself", round, i)
			default:
			}
			wg.Go(func() { errs[i] = v.Stop(context.Background()) })
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Error(err)
		}
	}
	if got := state(t); got != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, got)
	}
}

func TestBadSpecs(t *testing.T) {
	h, layer := newHost(t)
	before := state(t)
	for _, tc := range []struct {
		name string
		bad  func(*Spec)
		want string
	}{
		{"no such layer", func(s *Spec) { s.Layers = []string{"/does/not/exist"} }, "mounting the root"},
		{"no layer", func(s *Spec) { s.Layers = nil }, "no layers"},
		{"hostname with a newline", func(s *Spec) { s.Hostname = "a\n10.0.0.1 b" }, "not a hostname"},
		{"bind of nothing", func(s *Spec) { s.Binds = []Bind{{Source: "/does/not/exist", Target: "/x"}} }, "no such file"},
		{"IPv6", func(s *Spec) { s.Address = netip.MustParsePrefix("fd00::1/64") }, "want IPv4"},
		{"a layer that would add mount options", func(s *Spec) { s.Layers = []string{"/tmp,upperdir=/"} }, "colon, comma"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := spec(t, layer, 50)
			tc.bad(&s)
			v, err := h.Start(context.Background(), s)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("Start = %v, %v, want an error with %q", v, err, tc.want)
			}
		})
	}
	if got := state(t); got != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, got)
	}
}

func TestStopFollowsContext(t *testing.T) {
	h, layer := newHost(t)
	v := start(t, h, spec(t, layer, 51))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := v.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	<-v.Done()
}
