// Package vm launches the sandbox's virtual machines, each a set of Linux namespaces with a root, an
// address and a PID 1 of its own.
package vm

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/sandbox/guest"
)

// stopGrace is how long a VM has to stop its services before it is killed.
const stopGrace = 6 * time.Second

// bootLimit bounds the time from the start of the first process to its mounted file systems. It is
// generous: twenty VMs may start at once on two cores.
const bootLimit = 60 * time.Second

// Host starts VMs in the network namespace that the calling process is in. All methods may be called
// at the same time.
type Host struct {
	Bridge string // the network that VMs are connected to; it must exist
	Guest  string // path of the guest binary (cmd/sluice-guest)
	Domain string // search domain in the VMs
	DNS    netip.Addr
	Kernel string // whose system calls the VMs have, see guest.KnownKernel; "" is the host's
}

// Bind is a file or directory of the outside that a VM sees.
type Bind struct {
	Source   string // absolute; symlinks are followed
	Target   string // absolute in the VM; made when missing
	ReadOnly bool
}

// Spec describes a VM.
type Spec struct {
	Name     string // for messages
	Hostname string // without a domain
	Address  netip.Prefix
	Gateway  netip.Addr
	Layers   []string // directories of the root, the top one first; never written
	Dir      string   // of this VM alone: upper, work, console.log
	Binds    []Bind
}

// VM is a running VM.
type VM struct {
	spec Spec
	host *Host
	cmd  *exec.Cmd
	done chan struct{} // closed when no process of the VM is left
}

// Pid returns the VM's PID 1, as the calling process's pid namespace numbers it.
func (v *VM) Pid() int { return v.cmd.Process.Pid }

// Address returns the VM's address.
func (v *VM) Address() netip.Addr { return v.spec.Address.Addr() }

// Done is closed when the VM has ended, by Stop or by itself.
func (v *VM) Done() <-chan struct{} { return v.done }

// Console returns the path of the VM's console log.
func (v *VM) Console() string { return consolePath(v.spec.Dir) }

func consolePath(dir string) string { return filepath.Join(dir, "console.log") }

// Start boots a VM and returns once its file systems and network stand and PID 1 runs; services are not up
// yet then. After an error nothing of it is left but Dir.
func (h *Host) Start(ctx context.Context, spec Spec) (*VM, error) {
	v, err := h.start(ctx, spec)
	if err != nil {
		return nil, fmt.Errorf("starting VM %s: %w", spec.Name, err)
	}
	return v, nil
}

func (h *Host) start(ctx context.Context, spec Spec) (_ *VM, err error) {
	boot, err := h.bootSpec(spec)
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{boot.Upper, boot.Work, boot.Mount} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
	}
	console, err := os.OpenFile(consolePath(spec.Dir), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer console.Close()
	specRead, specWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer specRead.Close()
	defer specWrite.Close()
	replyRead, replyWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer replyRead.Close()
	defer replyWrite.Close()

	cmd := exec.Command(h.Guest, "boot")
	cmd.Env = []string{"PATH=" + guest.Path}
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = console, console
	cmd.ExtraFiles = []*os.File{specRead, replyWrite}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	specRead.Close()
	replyWrite.Close()
	v := &VM{spec: spec, host: h, cmd: cmd, done: make(chan struct{})}
	go v.wait()
	defer func() {
		if err != nil {
			err = errors.Join(err, v.kill())
		}
	}()

	line, err := json.Marshal(boot)
	if err != nil {
		return nil, err
	}
	if _, err := specWrite.Write(append(line, '\n')); err != nil {
		return nil, fmt.Errorf("talking to its first process: %w", err)
	}
	connectErr := h.connect(spec, v.Pid())
	ctx, cancel := context.WithTimeout(ctx, bootLimit)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = replyRead.SetReadDeadline(time.Unix(1, 0)) })()
	var reply guest.BootReply
	answer, err := bufio.NewReader(replyRead).ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(answer, &reply)
	}
	switch {
	case reply.Error != "": // a process that failed has no network to connect either
		return nil, errors.New(reply.Error)
	case connectErr != nil:
		return nil, fmt.Errorf("connecting its network: %w", connectErr)
	case ctx.Err() != nil:
		return nil, fmt.Errorf("waiting for its file systems: %w", ctx.Err())
	case err != nil:
		return nil, fmt.Errorf("waiting for its file systems (%s may say more): %w", v.Console(), err)
	}
	if _, err := specWrite.Write([]byte("go\n")); err != nil {
		return nil, fmt.Errorf("talking to its first process: %w", err)
	}
	return v, nil
}

func (h *Host) bootSpec(spec Spec) (guest.BootSpec, error) {
	if spec.Hostname == "" || strings.ContainsAny(spec.Hostname, " ./\n\t\x00") || len(spec.Hostname) > 63 {
		return guest.BootSpec{}, fmt.Errorf("%q is not a hostname", spec.Hostname)
	}
	if !spec.Address.IsValid() || !spec.Address.Addr().Is4() || !spec.Gateway.Is4() {
		return guest.BootSpec{}, fmt.Errorf("address %s with gateway %s: want IPv4", spec.Address, spec.Gateway)
	}
	if err := guest.KnownKernel(h.Kernel); err != nil {
		return guest.BootSpec{}, err
	}
	if len(spec.Layers) == 0 {
		return guest.BootSpec{}, errors.New("no layers for its root")
	}
	guestBinary, err := filepath.EvalSymlinks(h.Guest)
	if err != nil {
		return guest.BootSpec{}, fmt.Errorf("the guest binary: %w", err)
	}
	fqdn := spec.Hostname
	if h.Domain != "" {
		fqdn += "." + h.Domain + " " + spec.Hostname
	}
	b := guest.BootSpec{
		Hostname: spec.Hostname,
		Hosts:    fmt.Sprintf("127.0.0.1 localhost\n%s %s\n169.254.169.254 metadata.google.internal metadata\n", spec.Address.Addr(), fqdn),
		Resolv:   fmt.Sprintf("search %s\nnameserver %s\noptions timeout:2 attempts:2\n", h.Domain, h.DNS),
		Layers:   spec.Layers,
		Upper:    filepath.Join(spec.Dir, "upper"),
		Work:     filepath.Join(spec.Dir, "work"),
		Mount:    filepath.Join(spec.Dir, "root"),
		Binary:   guestBinary,
		Kernel:   h.Kernel,
	}
	for _, bind := range spec.Binds {
		source, err := filepath.EvalSymlinks(bind.Source)
		if err != nil {
			return guest.BootSpec{}, fmt.Errorf("bind: %w", err)
		}
		if !filepath.IsAbs(source) || !filepath.IsAbs(bind.Target) {
			return guest.BootSpec{}, fmt.Errorf("bind %s at %s: both must be absolute", bind.Source, bind.Target)
		}
		b.Binds = append(b.Binds, guest.Bind{Source: source, Target: filepath.Clean(bind.Target), ReadOnly: bind.ReadOnly})
	}
	return b, nil
}

// linkName is the VM's interface on the bridge. It follows from the address, which only one VM has.
func linkName(a netip.Addr) string {
	return fmt.Sprintf("v-%08x", binary.BigEndian.Uint32(a.AsSlice()))
}

// hardwareAddr follows from the address, as on Compute Engine, so that a new VM at an old address is reached
// at once.
func hardwareAddr(a netip.Addr) net.HardwareAddr {
	return append(net.HardwareAddr{0x42, 0x01}, a.AsSlice()...)
}

// connect gives the VM with that PID 1 its interface eth0, address and default route.
func (h *Host) connect(spec Spec, pid int) error {
	bridge, err := netlink.LinkByName(h.Bridge)
	if err != nil {
		return fmt.Errorf("bridge %s: %w", h.Bridge, err)
	}
	addr := spec.Address.Addr()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = linkName(addr)
	attrs.MasterIndex = bridge.Attrs().Index
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerHardwareAddr: hardwareAddr(addr), PeerNamespace: netlink.NsPid(pid)}
	// The network of an earlier VM at this address goes away a moment after the VM.
	for deadline := time.Now().Add(5 * time.Second); ; {
		err := netlink.LinkAdd(veth)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EEXIST) || time.Now().After(deadline) {
			return fmt.Errorf("adding %s: %w", attrs.Name, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	link, err := netlink.LinkByName(attrs.Name)
	if err != nil {
		return err
	}
	if err := onlyItself(attrs.Name, addr); err != nil {
		return fmt.Errorf("%s: %w", attrs.Name, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("%s up: %w", attrs.Name, err)
	}

	ns, err := netns.GetFromPid(pid)
	if err != nil {
		return err
	}
	defer ns.Close()
	inside, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer inside.Close()
	lo, err := inside.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := inside.LinkSetUp(lo); err != nil {
		return fmt.Errorf("lo up: %w", err)
	}
	eth, err := inside.LinkByName("eth0")
	if err != nil {
		return err
	}
	ip := &netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(spec.Address.Bits(), 32)}}
	if err := inside.AddrAdd(eth, ip); err != nil {
		return fmt.Errorf("address %s: %w", spec.Address, err)
	}
	if err := inside.LinkSetUp(eth); err != nil {
		return fmt.Errorf("eth0 up: %w", err)
	}
	if err := inside.RouteAdd(&netlink.Route{LinkIndex: eth.Attrs().Index, Gw: spec.Gateway.AsSlice()}); err != nil {
		return fmt.Errorf("default route: %w", err)
	}
	return nil
}

// wait reaps PID 1. The kernel lets it end only after every other process of its namespace.
func (v *VM) wait() {
	defer close(v.done)
	_ = v.cmd.Wait() // how it ended is on its console
	v.removeLink()
}

// removeLink removes the VM's interface, which the kernel would do a moment later.
func (v *VM) removeLink() {
	name := linkName(v.spec.Address.Addr())
	if link, err := netlink.LinkByName(name); err == nil {
		_ = netlink.LinkDel(link) // gone meanwhile
	}
	_ = removePort(name) // its rules match nothing any more
}

// Stop asks PID 1 to stop the services and ends the VM; after a grace, or when ctx ends, by force. It returns when
// no process, mount or link of it is left. Stopping a VM that has ended is no error.
func (v *VM) Stop(ctx context.Context) error { return v.StopWithin(ctx, stopGrace) }

// StopWithin is Stop with another grace; 0 pulls the plug.
func (v *VM) StopWithin(ctx context.Context, grace time.Duration) error {
	if grace == 0 {
		return v.kill()
	}
	ctx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	// A PID 1 that does not handle TERM yet does not see it either, so it is sent again.
	again := time.NewTicker(200 * time.Millisecond)
	defer again.Stop()
	for {
		if err := v.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return fmt.Errorf("stopping VM %s: %w", v.spec.Name, err)
		}
		select {
		case <-v.done:
			return nil
		case <-ctx.Done():
			return v.kill()
		case <-again.C:
		}
	}
}

// kill ends the VM by force. Only processes that the kernel cannot end (waiting on a hung file system)
// make it fail.
func (v *VM) kill() error {
	if err := v.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("killing VM %s: %w", v.spec.Name, err)
	}
	select {
	case <-v.done:
		return nil
	case <-time.After(20 * time.Second):
		return fmt.Errorf("VM %s survives SIGKILL: a process in it waits for a device", v.spec.Name)
	}
}
