package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
)

// Hardening is what a unit's processes may not do. The names are systemd's. It travels as JSON in an execSpec.
type Hardening struct {
	NoNewPrivileges bool   `json:"no_new_privileges,omitempty"`
	DropCaps        uint64 `json:"drop_caps,omitempty"` // bits that the Protect… directives take away
	KeepCaps        uint64 `json:"keep_caps,omitempty"` // CapabilityBoundingSet, when BoundCaps
	BoundCaps       bool   `json:"bound_caps,omitempty"`

	// These give the unit a copy of the mount table, which follows the VM's.
	ProtectSystem         string   `json:"protect_system,omitempty"` // "", yes, full or strict
	ProtectHome           string   `json:"protect_home,omitempty"`   // "", yes, read-only or tmpfs
	PrivateTmp            bool     `json:"private_tmp,omitempty"`
	ProtectKernelTunables bool     `json:"protect_kernel_tunables,omitempty"`
	ProtectControlGroups  bool     `json:"protect_control_groups,omitempty"`
	ReadWritePaths        []string `json:"read_write_paths,omitempty"` // a leading "-" means that it may be missing
	ReadOnlyPaths         []string `json:"read_only_paths,omitempty"`
	InaccessiblePaths     []string `json:"inaccessible_paths,omitempty"`

	ProtectHostname bool `json:"protect_hostname,omitempty"`

	Families               []int `json:"families,omitempty"`      // of RestrictAddressFamilies
	FamiliesOnly           bool  `json:"families_only,omitempty"` // Families are all that is allowed, not what is refused
	RestrictNamespaces     bool  `json:"restrict_namespaces,omitempty"`
	RestrictRealtime       bool  `json:"restrict_realtime,omitempty"`
	LockPersonality        bool  `json:"lock_personality,omitempty"`
	MemoryDenyWriteExecute bool  `json:"memory_deny_write_execute,omitempty"`
	NativeSystemCalls      bool  `json:"native_system_calls,omitempty"` // SystemCallArchitectures=native
}

// ignored are the directives that the guest knows and that do nothing here, with the reason. Everything else
// that it does not carry out is an error.
var ignored = map[string]string{
	"Unit.Documentation":       "for people",
	"Unit.DefaultDependencies": "a VM has no early boot",
	"Install.Alias":            "nothing here is called by another name",
	"Install.Also":             "what is wanted is enabled by name",
	"Service.Delegate":         "a VM of namespaces has no control groups",
	"Service.TasksMax":         "a VM of namespaces has no control groups",
	"Service.OOMScoreAdjust":   "the memory is the host's, which must not prefer a VM",
	"Service.NotifyAccess":     "every process of the unit may notify",
	"Service.GuessMainPID":     "the PID file tells",
	"Service.SendSIGKILL":      "a VM that goes down waits for nobody",
	"Service.StandardOutput":   "each unit has a journal",
	"Service.StandardError":    "each unit has a journal",
	"Service.SyslogIdentifier": "each unit has a journal",
}

// set takes one directive; known is false for those of other kinds.
func (h *Hardening) set(key, value string) (known bool, err error) {
	flags := map[string]*bool{
		"NoNewPrivileges": &h.NoNewPrivileges, "PrivateTmp": &h.PrivateTmp, "ProtectKernelTunables": &h.ProtectKernelTunables,
		"ProtectControlGroups": &h.ProtectControlGroups, "ProtectHostname": &h.ProtectHostname, "RestrictNamespaces": &h.RestrictNamespaces,
		"RestrictRealtime": &h.RestrictRealtime, "LockPersonality": &h.LockPersonality, "MemoryDenyWriteExecute": &h.MemoryDenyWriteExecute,
	}
	if flag, ok := flags[key]; ok {
		return true, parseBool(value, flag)
	}
	drops := map[string]uint64{
		"ProtectKernelModules": caps(unix.CAP_SYS_MODULE), "ProtectKernelLogs": caps(unix.CAP_SYSLOG),
		"ProtectClock": caps(unix.CAP_SYS_TIME, unix.CAP_WAKE_ALARM),
	}
	if drop, ok := drops[key]; ok {
		var on bool
		if err := parseBool(value, &on); err != nil {
			return true, err
		}
		if on {
			h.DropCaps |= drop
		}
		return true, nil
	}
	paths := map[string]*[]string{
		"ReadWritePaths": &h.ReadWritePaths, "ReadOnlyPaths": &h.ReadOnlyPaths, "InaccessiblePaths": &h.InaccessiblePaths,
	}
	if list, ok := paths[key]; ok {
		return true, parsePaths(value, list)
	}
	switch key {
	case "CapabilityBoundingSet":
		return true, h.setCapabilities(value)
	case "ProtectSystem":
		return true, parseDegree(value, &h.ProtectSystem, "full", "strict")
	case "ProtectHome":
		return true, parseDegree(value, &h.ProtectHome, "read-only", "tmpfs")
	case "RestrictAddressFamilies":
		return true, h.setFamilies(value)
	case "SystemCallArchitectures":
		if value != "native" {
			return true, fmt.Errorf("only native is supported, not %q", value)
		}
		h.NativeSystemCalls = true
		return true, nil
	}
	return false, nil
}

// parseDegree reads a boolean or one of the words.
func parseDegree(value string, to *string, words ...string) error {
	if slices.Contains(words, value) {
		*to = value
		return nil
	}
	var on bool
	if err := parseBool(value, &on); err != nil {
		return fmt.Errorf("%q is neither yes, no nor one of %s", value, strings.Join(words, ", "))
	}
	*to = ""
	if on {
		*to = "yes"
	}
	return nil
}

func parsePaths(value string, to *[]string) error {
	if value == "" {
		*to = nil
		return nil
	}
	words, err := splitWords(value)
	if err != nil {
		return err
	}
	for _, w := range words {
		path := strings.TrimPrefix(w, "-")
		if !filepath.IsAbs(path) || filepath.Clean(path) != path {
			return fmt.Errorf("%q is not a clean absolute path", w)
		}
		*to = append(*to, w)
	}
	return nil
}

// capNames are the capabilities in the kernel's order.
var capNames = []string{
	"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "LINUX_IMMUTABLE",
	"NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT",
	"SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE",
	"AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ",
	"PERFMON", "BPF", "CHECKPOINT_RESTORE",
}

func caps(numbers ...int) uint64 {
	var mask uint64
	for _, n := range numbers {
		mask |= 1 << n
	}
	return mask
}

func (h *Hardening) setCapabilities(value string) error {
	names, inverted := strings.CutPrefix(value, "~")
	var mask uint64
	for _, name := range strings.Fields(names) {
		n := slices.Index(capNames, strings.TrimPrefix(name, "CAP_"))
		if n < 0 || !strings.HasPrefix(name, "CAP_") {
			return fmt.Errorf("unknown capability %q", name)
		}
		mask |= caps(n)
	}
	switch {
	case value == "": // an empty set, to which more may be added
		h.KeepCaps = 0
	case value == "~":
		h.KeepCaps = ^uint64(0)
	case inverted && !h.BoundCaps:
		h.KeepCaps = ^mask
	case inverted:
		h.KeepCaps &^= mask
	default:
		h.KeepCaps |= mask
	}
	h.BoundCaps = true
	return nil
}

var familyNames = map[string]int{
	"AF_UNIX": unix.AF_UNIX, "AF_INET": unix.AF_INET, "AF_INET6": unix.AF_INET6, "AF_NETLINK": unix.AF_NETLINK, "AF_PACKET": unix.AF_PACKET,
	"AF_VSOCK": unix.AF_VSOCK, "AF_ALG": unix.AF_ALG,
}

func (h *Hardening) setFamilies(value string) error {
	if value == "" {
		h.Families, h.FamiliesOnly = nil, false
		return nil
	}
	names, inverted := strings.CutPrefix(value, "~")
	h.FamiliesOnly = !inverted
	if names == "none" {
		return nil
	}
	for _, name := range strings.Fields(names) {
		f, ok := familyNames[name]
		if !ok {
			return fmt.Errorf("unknown address family %q", name)
		}
		h.Families = append(h.Families, f)
	}
	return nil
}

// ownMounts tells whether the unit gets a mount table of its own.
func (h *Hardening) ownMounts() bool {
	return h.ProtectSystem != "" || h.ProtectHome != "" || h.PrivateTmp || h.ProtectKernelTunables || h.ProtectControlGroups ||
		len(h.ReadWritePaths)+len(h.ReadOnlyPaths)+len(h.InaccessiblePaths) > 0
}

// isolate gives the process, which must be root, the namespaces of the unit. The mounts that the VM makes and
// takes away later are made and taken away in its copy too, as systemd has it.
func (h *Hardening) isolate() error {
	if h.ProtectHostname {
		if err := unix.Unshare(unix.CLONE_NEWUTS); err != nil {
			return fmt.Errorf("ProtectHostname: %w", err)
		}
	}
	if !h.ownMounts() {
		return nil
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("a mount table of its own: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("making the mounts follow the VM's: %w", err)
	}
	if h.PrivateTmp {
		for _, dir := range []string{"/tmp", "/var/tmp"} {
			if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"); err != nil {
				return fmt.Errorf("PrivateTmp: %s: %w", dir, err)
			}
		}
	}
	if err := h.hideHomes(); err != nil {
		return fmt.Errorf("ProtectHome: %w", err)
	}
	for _, path := range h.InaccessiblePaths {
		if err := hide(path); err != nil {
			return fmt.Errorf("InaccessiblePaths: %w", err)
		}
	}
	return h.setWritable()
}

var homes = []string{"-/home", "-/root", "-/run/user"}

func (h *Hardening) hideHomes() error {
	for _, dir := range homes {
		var err error
		switch path := strings.TrimPrefix(dir, "-"); h.ProtectHome {
		case "yes":
			err = hide(dir)
		case "tmpfs":
			if err = unix.Mount("tmpfs", path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_RDONLY, "mode=755"); errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
		}
		if err != nil {
			return fmt.Errorf("%s: %w", dir, err)
		}
	}
	return nil
}

// hide covers a file or directory with an empty one that nobody may read.
func hide(path string) error {
	path, optional := strings.CutPrefix(path, "-")
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) && optional {
		return nil
	}
	if err != nil {
		return err
	}
	if info.IsDir() {
		err = unix.Mount("tmpfs", path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC|unix.MS_RDONLY, "mode=000")
	} else {
		err = unix.Mount("/dev/null", path, "", unix.MS_BIND, "")
	}
	if err != nil {
		return fmt.Errorf("hiding %s: %w", path, err)
	}
	return nil
}

// setWritable makes trees read-only and parts of them writable again, the outer ones first.
func (h *Hardening) setWritable() error {
	readOnly := map[string]bool{} // by path with its "-"; false is writable
	add := func(ro bool, paths ...string) {
		for _, p := range paths {
			readOnly[p] = ro
		}
	}
	switch h.ProtectSystem {
	case "strict":
		add(true, "/")
		add(false, "/dev", "/proc", "/sys")
	case "full":
		add(true, "-/etc")
		fallthrough
	case "yes":
		add(true, "/usr", "-/boot", "-/efi")
	}
	if h.ProtectHome == "read-only" {
		add(true, homes...)
	}
	if h.ProtectKernelTunables {
		add(true, "/proc/sys", "-/proc/sysrq-trigger", "-/proc/irq", "-/proc/bus", "-/proc/fs", "/sys")
	}
	if h.ProtectControlGroups {
		add(true, "-/sys/fs/cgroup")
	}
	add(true, h.ReadOnlyPaths...)
	add(false, h.ReadWritePaths...)
	if h.PrivateTmp && h.ProtectSystem == "strict" {
		add(false, "/tmp", "/var/tmp")
	}
	paths := make([]string, 0, len(readOnly))
	for p := range readOnly {
		paths = append(paths, p)
	}
	sort.Slice(paths, func(i, j int) bool { return strings.TrimPrefix(paths[i], "-") < strings.TrimPrefix(paths[j], "-") })
	for _, p := range paths {
		path, optional := strings.CutPrefix(p, "-")
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) && optional {
			continue
		}
		if err := unix.Mount(path, path, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
		if !readOnly[p] {
			attr = unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}
		}
		if err := unix.MountSetattr(unix.AT_FDCWD, path, unix.AT_RECURSIVE, &attr); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// confine takes rights away from the process, which must be root still; only the user's change and the program come after it.
func (h *Hardening) confine() error {
	for n := range capNames {
		if h.DropCaps&caps(n) == 0 && (!h.BoundCaps || h.KeepCaps&caps(n) != 0) {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(n), 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: a kernel without it
			return fmt.Errorf("dropping CAP_%s: %w", capNames[n], err)
		}
	}
	if h.NoNewPrivileges {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("NoNewPrivileges: %w", err)
		}
	}
	return nil
}
