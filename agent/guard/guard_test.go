package guard

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The test binary plays three parts: the tests; a machine, which is the tests in
// a network namespace of their own; and a process of some uid that asks the
// metadata server.
const (
	part    = "SLUICE_TEST_GUARD"
	machine = "machine"
	process = "process"
)

func TestMain(m *testing.M) {
	if os.Getenv(part) == process {
		os.Exit(ask(os.Args[1], os.Args[2]))
	}
	os.Exit(m.Run())
}

// ask exits with 0 when the address answers.
func ask(network, address string) int {
	c, err := net.DialTimeout(network, address, 5*time.Second)
	if err == nil && network == "udp" {
		c.SetDeadline(time.Now().Add(5 * time.Second))
		c.Write([]byte("?"))
		_, err = c.Read(make([]byte, 1))
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

// inside runs the named test again in a network namespace of its own.
func inside(t *testing.T) bool {
	t.Helper()
	if os.Getenv(part) == machine {
		return true
	}
	if os.Geteuid() != 0 {
		t.Fatal("needs root for a network namespace")
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), part+"="+machine)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("%v\n%s", err, out)
	}
	return false
}

func run(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
}

// metadataServer serves the ports at the metadata server's addresses.
func metadataServer(t *testing.T) {
	t.Helper()
	run(t, "ip", "link", "set", "lo", "up")
	run(t, "ip", "address", "add", "169.254.169.254/32", "dev", "lo")
	run(t, "ip", "-6", "address", "add", "fd20:ce::254/128", "dev", "lo", "nodad")
	for _, host := range []string{"169.254.169.254", "fd20:ce::254"} {
		for _, port := range []string{"80", "53"} {
			l, err := net.Listen("tcp", net.JoinHostPort(host, port))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
			go http.Serve(l, http.NotFoundHandler())
		}
		for _, port := range []string{"53", "123", "80"} {
			l, err := net.ListenPacket("udp", net.JoinHostPort(host, port))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
			go func() {
				buf := make([]byte, 16)
				for {
					n, from, err := l.ReadFrom(buf)
					if err != nil {
						return
					}
					l.WriteTo(buf[:n], from)
				}
			}()
		}
	}
}

// reaches tells whether a process of that uid gets an answer.
func reaches(t *testing.T, uid uint32, network, address string) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", network, address)
	cmd.Env = []string{part + "=" + process}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid, NoSetGroups: true}}
	began := time.Now()
	out, err := cmd.CombinedOutput()
	if _, exited := errors.AsType[*exec.ExitError](err); err != nil && !exited {
		t.Fatalf("run a process of uid %d: %v %s", uid, err, out)
	}
	if err != nil && time.Since(began) > 4*time.Second {
		t.Errorf("uid %d at %s: it had to wait: %s", uid, address, out)
	}
	return err == nil
}

const someUser, bigUser = 10001, 2733216754

func TestOnlyRootReachesTheMetadataServer(t *testing.T) {
	if !inside(t) {
		return
	}
	metadataServer(t)
	check := func(when string, guarded bool) {
		t.Helper()
		for _, tt := range []struct {
			network, port string
			open          bool
		}{{"tcp", "80", false}, {"udp", "80", false}, {"udp", "53", true}, {"tcp", "53", true}, {"udp", "123", true}} {
			for _, host := range []string{"169.254.169.254", "fd20:ce::254"} {
				for _, uid := range []uint32{0, someUser, bigUser} {
					want := !guarded || tt.open || uid == 0
					if got := reaches(t, uid, tt.network, net.JoinHostPort(host, tt.port)); got != want {
						t.Errorf("%s: uid %d reaches %s %s port %s: %v, want %v", when, uid, host, tt.network, tt.port, got, want)
					}
				}
			}
		}
	}
	if !reaches(t, someUser, "tcp", "169.254.169.254:80") {
		t.Fatal("a user cannot reach the server even without a guard")
	}
	for _, want := range []bool{true, false, false} {
		if put, err := Ensure(); err != nil || put != want {
			t.Fatalf("Ensure: %v, %v, want %v", put, err, want)
		}
	}
	check("guarded", true)

	for name, break_ := range map[string][]string{
		"flushed":        {"nft", "flush", "ruleset"},
		"rules flushed":  {"nft", "flush", "chain", "inet", table, "output"},
		"chain deleted":  {"sh", "-c", "nft flush chain inet " + table + " forward && nft delete chain inet " + table + " forward"},
		"a rule added":   {"nft", "insert", "rule", "inet", table, "output", "accept"},
		"rules replaced": {"sh", "-c", "nft flush chain inet " + table + " forward; for i in 1 2 3 4 5 6 7 8; do nft add rule inet " + table + " forward accept; done"},
	} {
		run(t, break_...)
		if put, err := Ensure(); err != nil || !put {
			t.Errorf("%s: Ensure: %v, %v, want it to put the rules again", name, put, err)
		}
		if reaches(t, someUser, "tcp", "169.254.169.254:80") {
			t.Errorf("%s: a user reaches the server afterwards", name)
		}
	}
	for range 2 {
		if err := Remove(); err != nil {
			t.Fatal(err)
		}
	}
	check("opened", false)
}

// What others put into nftables stays.
func TestOthersTablesStay(t *testing.T) {
	if !inside(t) {
		return
	}
	run(t, "nft", "add", "table", "inet", "site")
	if _, err := Ensure(); err != nil {
		t.Fatal(err)
	}
	run(t, "nft", "list", "table", "inet", "site")
	if err := Remove(); err != nil {
		t.Fatal(err)
	}
	run(t, "nft", "list", "table", "inet", "site")
}

// A container with a network of its own, whose packets the machine forwards,
// reaches nothing but what is open, whatever its uid.
func TestContainersDoNotReachIt(t *testing.T) {
	if !inside(t) {
		return
	}
	// The server is behind the machine, and so is the container.
	run(t, "ip", "link", "set", "lo", "up")
	run(t, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
	for _, side := range []struct{ name, link, address, peer string }{
		{"server", "s", "10.9.1.1/24", "169.254.169.254/24"}, {"container", "c", "10.9.2.1/24", "10.9.2.2/24"},
	} {
		sleep := exec.CommandContext(t.Context(), "sleep", "60")
		sleep.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		if err := sleep.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { sleep.Process.Kill(); sleep.Wait() })
		pid := fmt.Sprint(sleep.Process.Pid)
		run(t, "ip", "link", "add", side.link, "type", "veth", "peer", "name", "eth0", "netns", pid)
		run(t, "ip", "address", "add", side.address, "dev", side.link)
		run(t, "ip", "link", "set", side.link, "up")
		in := func(args ...string) { t.Helper(); run(t, append([]string{"nsenter", "-n", "-t", pid}, args...)...) }
		in("ip", "address", "add", side.peer, "dev", "eth0")
		in("ip", "link", "set", "eth0", "up")
		in("ip", "link", "set", "lo", "up")
		if side.name == "server" {
			run(t, "ip", "route", "add", "169.254.169.254/32", "dev", side.link)
			in("ip", "route", "add", "default", "via", "10.9.1.1", "dev", "eth0", "onlink")
			continue
		}
		in("ip", "route", "add", "default", "via", "10.9.2.1")
		curl := func(port string) bool {
			cmd := exec.CommandContext(t.Context(), "nsenter", "-n", "-t", pid, "/proc/self/exe", "tcp", "169.254.169.254:"+port)
			cmd.Args[4] = os.Args[0]
			cmd.Env = append(os.Environ(), part+"="+process)
			out, err := cmd.CombinedOutput()
			// Nothing listens there: refused means that the packet arrived.
			return err == nil || strings.Contains(string(out), "refused")
		}
		if !curl("80") {
			t.Fatal("the container cannot reach the server even without a guard")
		}
		if _, err := Ensure(); err != nil {
			t.Fatal(err)
		}
		if curl("80") {
			t.Error("the container reaches the server")
		}
		if !curl("53") {
			t.Error("the container cannot reach the server's DNS")
		}
	}
}
