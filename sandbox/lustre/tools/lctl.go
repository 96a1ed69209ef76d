package tools

import (
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"
)

// version is that of the client which the tools stand for.
const version = "2.14.0_p184"

func (r *run) lctl(args []string) error {
	if len(args) == 0 {
		return usage("lctl list_nids|get_param|set_param|ping …")
	}
	switch args[0] {
	case "list_nids":
		return r.listNIDs()
	case "get_param":
		return r.getParam(args[1:])
	case "set_param":
		return r.setParam(args[1:])
	case "ping":
		return r.ping(args[1:])
	case "--version":
		fmt.Fprintln(r.stdout, "lctl "+version)
		return nil
	}
	return usage("unknown command %q", args[0])
}

// listNIDs lists the machine's own names in the network.
func (r *run) listNIDs() error {
	l, err := r.lnet()
	if err != nil {
		return err
	}
	if !l.Configured {
		return fmt.Errorf("IOC_LIBCFS_GET_NI error 100: %w", syscall.ENETDOWN)
	}
	for _, n := range l.Nets {
		for _, iface := range n.Interfaces {
			addr, err := r.Address(iface)
			if err != nil {
				return err
			}
			fmt.Fprintf(r.stdout, "%s@%s\n", addr, n.Net)
		}
	}
	return nil
}

func (r *run) ping(args []string) error {
	_, nids, err := parse(args)
	if err != nil {
		return err
	}
	if len(nids) == 0 {
		return usage("ping NID")
	}
	if err := r.reach(nids[0], pingWait); errors.Is(err, syscall.EINVAL) {
		return err
	} else if err != nil {
		return &worded{fmt.Sprintf("failed to ping %s: %s", nids[0], "Input/output error"), err}
	}
	fmt.Fprintf(r.stdout, "12345-0@lo\n12345-%s\n", nids[0])
	return nil
}

// instance is the part of a mount's parameters that tells it from others.
func (m mount) instance() string {
	h := fnv.New64a()
	h.Write([]byte(m.server + m.dir))
	return fmt.Sprintf("ffff%012x", h.Sum64()>>16)
}

// paramsFile keeps the values that were set.
const paramsFile = "params.json"

// param is one that lctl knows.
type param struct {
	value   string // the default, or what is the case now
	settled bool   // it cannot be set
}

// params lists the parameters of the machine and its mounts, with what was set.
func (r *run) params() (map[string]param, error) {
	all := map[string]param{
		"version":            {version, true},
		"health_check":       {"healthy", true},
		"jobid_var":          {"disable", false},
		"jobid_name":         {"%e.%u", false},
		"timeout":            {"100", false},
		"at_max":             {"600", false},
		"memused":            {"0", true},
		"debug":              {"ioctl neterror warning error emerg ha config console lfsck", false},
		"panic_on_lbug":      {"0", false},
		"ldlm.lock_limit_mb": {"0", false},
	}
	mounts, err := r.mounts()
	if err != nil {
		return nil, err
	}
	for _, m := range mounts {
		state := "FULL"
		if r.reach(m.server, 300*time.Millisecond) != nil {
			state = "DISCONN"
		}
		inst := m.instance()
		for _, device := range []string{"osc." + m.name + "-OST0000-osc-" + inst, "mdc." + m.name + "-MDT0000-mdc-" + inst} {
			target := m.name + "-OST0000_UUID"
			if strings.HasPrefix(device, "mdc") {
				target = m.name + "-MDT0000_UUID"
			}
			all[device+".import"] = param{fmt.Sprintf("import:\n    name: %s\n    target: %s\n    state: %s\n    connection:\n       current_connection: %s",
				strings.SplitN(device, ".", 2)[1], target, state, m.server), true}
			for name, value := range map[string]string{
				"active": "1", "checksums": "1", "checksum_type": "crc32 adler [crc32c]", "max_dirty_mb": "2000", "max_pages_per_rpc": "1024", "max_rpcs_in_flight": "8",
			} {
				all[device+"."+name] = param{value, false}
			}
		}
		for name, value := range map[string]string{
			"checksums": "1", "lazystatfs": "1", "max_cached_mb": "512", "max_read_ahead_mb": "256", "max_read_ahead_per_file_mb": "128",
			"max_read_ahead_whole_mb": "64", "statahead_max": "32", "xattr_cache": "1",
		} {
			all["llite."+m.name+"-"+inst+"."+name] = param{value, false}
		}
		all["llite."+m.name+"-"+inst+".fstype"] = param{"lustre", true}
	}
	kept := map[string]string{}
	if err := r.load(paramsFile, &kept); err != nil {
		return nil, err
	}
	for name, value := range kept {
		if p, ok := all[name]; ok {
			all[name] = param{value, p.settled}
		}
	}
	return all, nil
}

// matching returns the names that a pattern, whose * matches within one part, stands for.
func matching(all map[string]param, pattern string) []string {
	var names []string
	slashed := strings.ReplaceAll(pattern, ".", "/")
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if ok, err := path.Match(slashed, strings.ReplaceAll(name, ".", "/")); ok && err == nil {
			names = append(names, name)
		}
	}
	return names
}

func (r *run) getParam(args []string) error {
	options, patterns, err := parse(args, option{'n', "", false}, option{'N', "", false}, option{'F', "", false}, option{'R', "", false})
	if err != nil {
		return err
	}
	if len(patterns) == 0 {
		return usage("get_param [-n|-N] PARAMETER")
	}
	has := func(short byte) bool {
		return slices.ContainsFunc(options, func(o given) bool { return o.short == short })
	}
	all, err := r.params()
	if err != nil {
		return err
	}
	for _, pattern := range patterns {
		names := matching(all, pattern)
		if len(names) == 0 {
			return &worded{fmt.Sprintf("error: get_param: param_path '%s': No such file or directory", pattern), syscall.ENOENT}
		}
		for _, name := range names {
			switch value := all[name].value; {
			case has('N'):
				fmt.Fprintln(r.stdout, name)
			case has('n'):
				fmt.Fprintln(r.stdout, value)
			case strings.Contains(value, "\n"):
				fmt.Fprintf(r.stdout, "%s=\n%s\n", name, value)
			default:
				fmt.Fprintf(r.stdout, "%s=%s\n", name, value)
			}
		}
	}
	return nil
}

func (r *run) setParam(args []string) error {
	options, settings, err := parse(args, option{'n', "", false}, option{'P', "", false}, option{'F', "", false})
	if err != nil {
		return err
	}
	quiet := slices.ContainsFunc(options, func(o given) bool { return o.short == 'n' })
	if slices.ContainsFunc(options, func(o given) bool { return o.short == 'P' }) {
		return &worded{"error: set_param: -P sets parameters on the MGS, which is Google's", syscall.EPERM}
	}
	if len(settings) == 0 {
		return usage("set_param [-n] PARAMETER=VALUE")
	}
	all, err := r.params()
	if err != nil {
		return err
	}
	kept := map[string]string{}
	if err := r.load(paramsFile, &kept); err != nil {
		return err
	}
	for _, setting := range settings {
		pattern, value, ok := strings.Cut(setting, "=")
		if !ok {
			return usage("set_param: %q is not PARAMETER=VALUE", setting)
		}
		names := matching(all, pattern)
		if len(names) == 0 {
			return &worded{fmt.Sprintf("error: set_param: param_path '%s': No such file or directory", pattern), syscall.ENOENT}
		}
		for _, name := range names {
			if all[name].settled {
				return &worded{fmt.Sprintf("error: set_param: setting %s=%s: Permission denied", name, value), syscall.EACCES}
			}
			kept[name] = value
			if !quiet {
				fmt.Fprintf(r.stdout, "%s=%s\n", name, value)
			}
		}
	}
	return r.store(paramsFile, kept)
}
