package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/internal/users"
)

// rlimits are the limits that units set, by systemd's names without "Limit".
var rlimits = map[string]int{
	"NOFILE": unix.RLIMIT_NOFILE, "MEMLOCK": unix.RLIMIT_MEMLOCK, "STACK": unix.RLIMIT_STACK, "CORE": unix.RLIMIT_CORE,
	"NPROC": unix.RLIMIT_NPROC, "AS": unix.RLIMIT_AS, "FSIZE": unix.RLIMIT_FSIZE, "DATA": unix.RLIMIT_DATA, "CPU": unix.RLIMIT_CPU,
}

func signalByName(name string) syscall.Signal { return unix.SignalNum(name) }

// execSpec is a program and the state of the process that becomes it. It travels as JSON in the
// arguments of "guest exec", which sets what a parent cannot set for a child.
type execSpec struct {
	Argv      []string         `json:"argv"`
	Env       []string         `json:"env"`
	Dir       string           `json:"dir"`
	DirMay    bool             `json:"dir_may,omitempty"` // Dir may be missing
	UID       uint32           `json:"uid"`
	GID       uint32           `json:"gid"`
	Groups    []uint32         `json:"groups"`
	UMask     uint32           `json:"umask"`
	Limits    map[string]Limit `json:"limits,omitempty"`
	Hardening Hardening        `json:"hardening"`

	withParent bool // the kernel kills the program when its parent dies
}

// become turns the calling process into the program; it returns only with an error.
func (s execSpec) become() error {
	runtime.LockOSThread()
	for name, l := range s.Limits {
		r := unix.Rlimit{Cur: l.Soft, Max: l.Hard}
		if err := unix.Setrlimit(rlimits[name], &r); err != nil && !errors.Is(err, unix.EPERM) {
			return fmt.Errorf("setting Limit%s: %w", name, err)
		}
	}
	unix.Umask(int(s.UMask))
	groups := make([]int, 0, len(s.Groups))
	for _, g := range s.Groups {
		groups = append(groups, int(g))
	}
	kernel, err := vmKernel()
	if err != nil {
		return err
	}
	if os.Geteuid() == 0 {
		if err := s.Hardening.isolate(); err != nil {
			return err
		}
		if err := s.Hardening.confine(); err != nil {
			return err
		}
		if err := seccomp(s.Hardening.filter(kernel)); err != nil {
			return err
		}
		if err := syscall.Setgroups(groups); err != nil {
			return fmt.Errorf("setting groups: %w", err)
		}
		if err := syscall.Setgid(int(s.GID)); err != nil {
			return fmt.Errorf("setting the group: %w", err)
		}
		if err := syscall.Setuid(int(s.UID)); err != nil {
			return fmt.Errorf("setting the user: %w", err)
		}
	}
	if s.withParent { // after the user, whose change would undo it
		if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
			return fmt.Errorf("following the parent: %w", err)
		}
	}
	if err := os.Chdir(s.Dir); err != nil && !(s.DirMay && errors.Is(err, os.ErrNotExist)) {
		return err
	}
	path, err := lookPath(s.Argv[0], s.Env)
	if err != nil {
		return err
	}
	if err := syscall.Exec(path, s.Argv, s.Env); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// lookPath finds a program in the PATH of env.
func lookPath(name string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	path := Path
	for _, e := range env {
		if p, ok := strings.CutPrefix(e, "PATH="); ok {
			path = p
		}
	}
	for _, dir := range filepath.SplitList(path) {
		p := filepath.Join(dir, name)
		if info, err := os.Stat(p); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return p, nil
		}
	}
	return "", fmt.Errorf("%w: %s", exec.ErrNotFound, name)
}

// identity is a resolved user.
type identity struct {
	user   users.User
	gid    uint32
	groups []uint32
}

// resolve looks the user (name or uid; "" is root) and group (name or gid; "" is the user's) up.
func resolve(ctx context.Context, user, group string, supplementary []string) (identity, error) {
	id := identity{user: users.User{Name: "root", Home: "/root", Shell: "/bin/bash"}}
	if user != "" && user != "root" && user != "0" {
		var err error
		if n, numErr := strconv.ParseUint(user, 10, 32); numErr == nil {
			id.user, err = users.ByID(ctx, uint32(n))
		} else {
			id.user, err = users.ByName(ctx, user)
		}
		if err != nil {
			return id, err
		}
		if id.groups, err = users.GroupIDs(ctx, id.user.Name); err != nil {
			return id, err
		}
	}
	id.gid = id.user.GID
	if group != "" {
		gid, err := groupID(ctx, group)
		if err != nil {
			return id, err
		}
		id.gid = gid
	}
	for _, g := range supplementary {
		gid, err := groupID(ctx, g)
		if err != nil {
			return id, err
		}
		id.groups = append(id.groups, gid)
	}
	return id, nil
}

func groupID(ctx context.Context, group string) (uint32, error) {
	if group == "root" {
		return 0, nil
	}
	if n, err := strconv.ParseUint(group, 10, 32); err == nil {
		return uint32(n), nil
	}
	return users.GroupID(ctx, group)
}

// env is what a login of the user would have.
func (id identity) env() []string {
	return []string{"HOME=" + id.user.Home, "USER=" + id.user.Name, "LOGNAME=" + id.user.Name, "SHELL=" + id.user.Shell}
}

// As turns the calling process into argv, run as the user ("" is root) with that user's own
// environment, in the user's home. With withParent the kernel kills it when the caller's parent dies. As returns only with an error.
func As(ctx context.Context, user string, argv []string, withParent bool) error {
	id, err := resolve(ctx, user, "", nil)
	if err != nil {
		return err
	}
	s := execSpec{
		Argv: argv, Dir: id.user.Home, DirMay: true, UID: id.user.UID, GID: id.gid, Groups: id.groups, UMask: 0o022, withParent: withParent,
		Env: append(id.env(), "PATH="+Path, "LANG=C.UTF-8"),
	}
	// As pam_env does for a login.
	if text, err := os.ReadFile("/etc/environment"); err == nil {
		s.Env = append(s.Env, parseEnvironmentFile(text)...)
	}
	if term := os.Getenv("TERM"); term != "" {
		s.Env = append(s.Env, "TERM="+term)
	}
	if err := os.Chdir("/"); err != nil { // where DirMay leaves a user without a home
		return err
	}
	return s.become()
}

// execMain is "guest exec JSON".
func execMain(arg string) error {
	var s execSpec
	if err := json.Unmarshal([]byte(arg), &s); err != nil {
		return err
	}
	if len(s.Argv) == 0 {
		return errors.New("no program")
	}
	return s.become()
}
