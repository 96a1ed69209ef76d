package tools

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// lnetFile keeps the network's configuration.
const lnetFile = "lnet.json"

// lnet is the configuration of a machine's Lustre network. Networks are those that Sluice and its users may need: of
// TCP, over interfaces of the machine.
type lnet struct {
	Configured bool              `json:"configured"`
	Nets       []network         `json:"nets"`
	Globals    map[string]string `json:"globals"`
}

type network struct {
	Net        string   `json:"net"` // tcp, tcp1
	Interfaces []string `json:"interfaces"`
}

// firstInterface is what the network has when nothing else was said.
const firstInterface = "eth0"

func (r *run) lnet() (*lnet, error) {
	l := &lnet{
		Configured: true, Nets: []network{{"tcp", []string{firstInterface}}},
		Globals: map[string]string{"numa_range": "0", "discovery": "1", "drop_asym_route": "0", "retry_count": "2", "transaction_timeout": "50", "health_sensitivity": "100"},
	}
	return l, r.load(lnetFile, l)
}

var netName = regexp.MustCompile(`^tcp[0-9]{0,3}$`)

func (r *run) lnetctl(args []string) error {
	l, err := r.lnet()
	if err != nil {
		return err
	}
	two := strings.Join(args[:min(2, len(args))], " ")
	if len(args) > 0 && (args[0] == "export" || args[0] == "ping" || args[0] == "set") {
		two = args[0]
	}
	options, rest, err := parse(args[len(strings.Fields(two)):], option{'n', "net", true}, option{'i', "if", true}, option{'v', "verbose", false},
		option{'a', "all", false}, option{'b', "backup", false}, option{'N', "nid", true})
	if err != nil {
		return err
	}
	value := func(short byte) string {
		for _, o := range options {
			if o.short == short {
				return o.value
			}
		}
		return ""
	}
	verbose := slices.ContainsFunc(options, func(o given) bool { return o.short == 'v' })
	switch two {
	case "net show":
		return r.showNets(l, value('n'), verbose)
	case "net add":
		return r.addNet(l, value('n'), value('i'))
	case "net del":
		return r.delNet(l, value('n'), value('i'))
	case "lnet configure":
		l.Configured = true
		return r.store(lnetFile, l)
	case "lnet unconfigure":
		if mounts, err := r.mounts(); err != nil || len(mounts) > 0 {
			return r.refuse("unconfigure", "lnet", syscall.EBUSY, "LNet unconfigure error: Device or resource busy")
		}
		l.Configured = false
		return r.store(lnetFile, l)
	case "peer show":
		return r.showPeers()
	case "global show":
		r.showGlobals(l)
		return nil
	case "set":
		if len(rest) != 2 || l.Globals[rest[0]] == "" {
			return r.refuse("set", "global", syscall.EINVAL, "unknown parameter or no value")
		}
		l.Globals[rest[0]] = rest[1]
		return r.store(lnetFile, l)
	case "ping":
		return r.pingNIDs(rest)
	case "export":
		return r.export(l, rest)
	}
	return usage("lnetctl net show|add|del, peer show, global show, set, ping, export, lnet configure|unconfigure")
}

// refuse writes an error as lnetctl does.
func (r *run) refuse(verb, what string, errno syscall.Errno, text string) error {
	fmt.Fprintf(r.stderr, "%s:\n    - %s:\n          errno: -%d\n          descr: %q\n", verb, what, int(errno), text)
	return &worded{text, errno}
}

func (r *run) showNets(l *lnet, only string, verbose bool) error {
	if !l.Configured {
		return r.refuse("show", "net", syscall.ENETDOWN, "cannot get networks: Network is down")
	}
	fmt.Fprintln(r.stdout, "net:")
	nets := append([]network{{Net: "lo"}}, l.Nets...)
	found := false
	for _, n := range nets {
		if only != "" && n.Net != only {
			continue
		}
		found = true
		fmt.Fprintf(r.stdout, "    - net type: %s\n      local NI(s):\n", n.Net)
		if n.Net == "lo" {
			fmt.Fprint(r.stdout, "        - nid: 0@lo\n          status: up\n")
		}
		for _, iface := range n.Interfaces {
			addr, err := r.Address(iface)
			if err != nil {
				return err
			}
			fmt.Fprintf(r.stdout, "        - nid: %s@%s\n          status: up\n          interfaces:\n              0: %s\n", addr, n.Net, iface)
			if verbose {
				fmt.Fprint(r.stdout, "          tunables:\n              peer_timeout: 180\n              peer_credits: 8\n              peer_buffer_credits: 0\n              credits: 256\n")
			}
		}
	}
	if !found {
		return r.refuse("show", "net", syscall.ENOENT, "no such network")
	}
	return nil
}

func (r *run) addNet(l *lnet, name, interfaces string) error {
	switch {
	case !l.Configured:
		return r.refuse("add", "net", syscall.ENETDOWN, "cannot add network: Network is down")
	case !netName.MatchString(name):
		return r.refuse("add", "net", syscall.EINVAL, fmt.Sprintf("cannot parse net '%s'", name))
	case interfaces == "":
		return r.refuse("add", "net", syscall.EINVAL, "mandatory parameter 'if' not specified.")
	}
	i := slices.IndexFunc(l.Nets, func(n network) bool { return n.Net == name })
	if i < 0 {
		i = len(l.Nets)
		l.Nets = append(l.Nets, network{Net: name})
	}
	for iface := range strings.SplitSeq(interfaces, ",") {
		if slices.Contains(l.Nets[i].Interfaces, iface) {
			return r.refuse("add", "net", syscall.EEXIST, "cannot add network: File exists")
		}
		if _, err := r.Address(iface); err != nil {
			return r.refuse("add", "net", syscall.ENODEV, fmt.Sprintf("cannot add network: %v", err))
		}
		l.Nets[i].Interfaces = append(l.Nets[i].Interfaces, iface)
	}
	return r.store(lnetFile, l)
}

func (r *run) delNet(l *lnet, name, interfaces string) error {
	i := slices.IndexFunc(l.Nets, func(n network) bool { return n.Net == name })
	if i < 0 {
		return r.refuse("del", "net", syscall.EINVAL, fmt.Sprintf("cannot del network: net '%s' does not exist", name))
	}
	if interfaces == "" {
		l.Nets = slices.Delete(l.Nets, i, i+1)
		return r.store(lnetFile, l)
	}
	for iface := range strings.SplitSeq(interfaces, ",") {
		l.Nets[i].Interfaces = slices.DeleteFunc(l.Nets[i].Interfaces, func(have string) bool { return have == iface })
	}
	if len(l.Nets[i].Interfaces) == 0 {
		l.Nets = slices.Delete(l.Nets, i, i+1)
	}
	return r.store(lnetFile, l)
}

func (r *run) showPeers() error {
	mounts, err := r.mounts()
	if err != nil {
		return err
	}
	fmt.Fprintln(r.stdout, "peer:")
	for _, m := range mounts {
		state := "up"
		if r.reach(m.server, 300*time.Millisecond) != nil {
			state = "down"
		}
		fmt.Fprintf(r.stdout, "    - primary nid: %[1]s\n      Multi-Rail: False\n      peer ni:\n        - nid: %[1]s\n          state: %[2]s\n", m.server, state)
	}
	return nil
}

func (r *run) showGlobals(l *lnet) {
	fmt.Fprintln(r.stdout, "global:")
	for _, name := range slices.Sorted(maps.Keys(l.Globals)) {
		fmt.Fprintf(r.stdout, "    %s: %s\n", name, l.Globals[name])
	}
}

func (r *run) pingNIDs(nids []string) error {
	if len(nids) == 0 {
		return usage("ping NID")
	}
	for _, nid := range nids {
		if err := r.reach(nid, pingWait); err != nil {
			return r.refuse("ping", nid, syscall.EIO, fmt.Sprintf("failed to ping %s: Input/output error", nid))
		}
		fmt.Fprintf(r.stdout, "ping:\n    - primary nid: %[1]s\n      Multi-Rail: False\n      peer ni:\n        - nid: %[1]s\n", nid)
	}
	return nil
}

// export writes the whole configuration, to a file when one is named.
func (r *run) export(l *lnet, to []string) error {
	if len(to) > 0 {
		f, err := os.Create(to[0])
		if err != nil {
			return err
		}
		defer f.Close()
		r.stdout = f
	}
	if err := r.showNets(l, "", true); err != nil {
		return err
	}
	if err := r.showPeers(); err != nil {
		return err
	}
	r.showGlobals(l)
	return nil
}
