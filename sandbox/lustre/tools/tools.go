// Package tools is the commands of a Lustre client, lfs, lctl and lnetctl, for the sandbox's VMs: as much of them as Sluice
// and its users need. What they set is kept: on the file system, or in the VM below /run.
package tools

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehpc/sluice/internal/atomicfile"
	"github.com/sluicehpc/sluice/lustre/probe"
)

// Names are those that the programs are called by.
var Names = []string{"lfs", "lctl", "lnetctl"}

// Machine is the VM that a tool runs on.
type Machine struct {
	State   string // directory of what lctl and lnetctl set
	Mounts  func() ([]probe.Mount, error)
	Address func(iface string) (string, error) // IPv4
	Dial    func(ctx context.Context, network, address string) (net.Conn, error)
}

// Here is the machine that the program runs on.
func Here() Machine {
	return Machine{State: "/run/lustre", Mounts: probe.Mounts, Address: address, Dial: new(net.Dialer).DialContext}
}

// run is one call of a tool.
type run struct {
	Machine
	ctx            context.Context
	stdout, stderr io.Writer
}

// Main runs the tool of a name and returns its exit code: as the tools do, the number of an error.
func (m Machine) Main(ctx context.Context, name string, args []string, stdout, stderr io.Writer) int {
	r := &run{m, ctx, stdout, stderr}
	tool := map[string]func([]string) error{"lfs": r.lfs, "lctl": r.lctl, "lnetctl": r.lnetctl}[name]
	err := tool(args)
	if err == nil {
		return 0
	}
	fmt.Fprintf(stderr, "%s: %v\n", name, err)
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return int(errno)
	}
	return 1
}

// usage is a call that cannot be understood.
func usage(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{syscall.EINVAL}, args...)...)
}

// option is one that a command takes.
type option struct {
	short byte
	long  string
	value bool // it has one
}

// given is an option of a call.
type given struct {
	short byte
	value string
}

// parse reads options, anywhere among the arguments, as getopt_long(3) does.
func parse(args []string, known ...option) (options []given, rest []string, err error) {
	find := func(match func(option) bool, text string) (option, error) {
		i := slices.IndexFunc(known, match)
		if i < 0 {
			return option{}, usage("unrecognized option %q", text)
		}
		return known[i], nil
	}
	for i := 0; i < len(args); i++ {
		a := args[i]
		take := func(inline string, has bool) (string, error) {
			if has {
				return inline, nil
			}
			if i+1 == len(args) {
				return "", usage("option %s needs a value", a)
			}
			i++
			return args[i], nil
		}
		switch {
		case a == "--":
			return options, append(rest, args[i+1:]...), nil
		case strings.HasPrefix(a, "--"):
			name, inline, has := strings.Cut(a[2:], "=")
			o, err := find(func(o option) bool { return o.long == name }, a)
			if err != nil {
				return nil, nil, err
			}
			g := given{short: o.short}
			if o.value {
				if g.value, err = take(inline, has); err != nil {
					return nil, nil, err
				}
			} else if has {
				return nil, nil, usage("option --%s takes no value", name)
			}
			options = append(options, g)
		case len(a) > 1 && a[0] == '-' && (a[1] < '0' || a[1] > '9'):
			for j := 1; j < len(a); j++ {
				o, err := find(func(o option) bool { return o.short == a[j] }, a)
				if err != nil {
					return nil, nil, err
				}
				g := given{short: o.short}
				if o.value {
					if g.value, err = take(a[j+1:], j+1 < len(a)); err != nil {
						return nil, nil, err
					}
					j = len(a)
				}
				options = append(options, g)
			}
		default:
			rest = append(rest, a)
		}
	}
	return options, rest, nil
}

// size reads a number of bytes with an optional k, m, g, t or p; without one it is in units of unit bytes.
func size(text string, unit int64) (int64, error) {
	number, factor := text, unit
	if n := len(text); n > 0 {
		if i := strings.IndexByte("kmgtp", text[n-1]|0x20); i >= 0 {
			number, factor = text[:n-1], 1<<(10*(i+1))
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n < 0 || n > (1<<62)/factor {
		return 0, usage("%q is not a size", text)
	}
	return n * factor, nil
}

// mount is a mounted file system.
type mount struct {
	dir, server, name string // the server as IP@tcp
}

// mounts are all Lustre file systems that are mounted.
func (r *run) mounts() ([]mount, error) {
	table, err := r.Mounts()
	if err != nil {
		return nil, err
	}
	var all []mount
	for _, m := range table {
		server, name, ok := strings.Cut(m.Source, ":/")
		if ok && (m.Type == "lustre" || m.Type == "fuse.lustre") {
			all = append(all, mount{m.Dir, server, name})
		}
	}
	return all, nil
}

// at finds the file system that a path is on. It touches no mount.
func (r *run) at(path string) (mount, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return mount{}, err
	}
	all, err := r.mounts()
	if err != nil {
		return mount{}, err
	}
	var best *mount
	for i, m := range all {
		if (abs == m.dir || strings.HasPrefix(abs, strings.TrimSuffix(m.dir, "/")+"/")) && (best == nil || len(m.dir) >= len(best.dir)) {
			best = &all[i]
		}
	}
	if best == nil {
		return mount{}, fmt.Errorf("%s is not on a mounted Lustre file system: %w", path, syscall.ENOTTY)
	}
	return *best, nil
}

// load reads what store kept into v, and leaves v as it is when there is nothing.
func (r *run) load(name string, v any) error {
	data, err := os.ReadFile(filepath.Join(r.State, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return json.Unmarshal(data, v)
}

func (r *run) store(name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(r.State, 0o755); err != nil {
		return err
	}
	return atomicfile.Write(filepath.Join(r.State, name), data, 0o644)
}

// address returns the IPv4 address of an interface.
func address(iface string) (string, error) {
	i, err := net.InterfaceByName(iface)
	if err != nil {
		return "", fmt.Errorf("interface %s: %w", iface, syscall.ENODEV)
	}
	addrs, err := i.Addrs()
	if err != nil {
		return "", err
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil {
			return n.IP.String(), nil
		}
	}
	return "", fmt.Errorf("interface %s has no IPv4 address: %w", iface, syscall.EADDRNOTAVAIL)
}

// pingWait bounds a ping.
const pingWait = 2 * time.Second

// reach says whether a server listens at IP@tcp.
func (r *run) reach(nid string, wait time.Duration) error {
	ip, netName, ok := strings.Cut(nid, "@")
	if !ok || !strings.HasPrefix(netName, "tcp") || net.ParseIP(ip) == nil {
		return usage("%q is not a NID such as 10.0.0.1@tcp", nid)
	}
	ctx, cancel := context.WithTimeout(r.ctx, wait)
	defer cancel()
	conn, err := r.Dial(ctx, "tcp", net.JoinHostPort(ip, "988"))
	if err != nil {
		return fmt.Errorf("%w: %w", syscall.EIO, err)
	}
	return conn.Close()
}
