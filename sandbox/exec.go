package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/sandbox/guest"
)

// ExecOptions says what Exec runs, and where.
type ExecOptions struct {
	VM   string   // "" is the admin's workstation
	User string   // on the VM; "" is root. On the workstation it must be empty.
	Args []string // the program and its arguments
}

// Exec runs a program with the caller's standard streams and terminal.
//
// On the workstation it is in the sandbox's network, and otherwise on the host: same directory, user and files. Its
// environment has the endpoints and credentials, and PATH begins with the directory of this program.
// Exec then does not return but with an error: the calling process becomes the program.
//
// On a VM it runs as the user with that user's own environment, in the user's home. Exec passes signals on and returns the program's exit code
// (128+N when signal N ended it).
func Exec(ctx context.Context, name string, o ExecOptions) (code int, err error) {
	if len(o.Args) == 0 {
		return 0, errors.New("no program to run")
	}
	c, err := Open(name)
	if err != nil {
		return 0, err
	}
	if o.VM == "" {
		if o.User != "" {
			return 0, errors.New("a user without a VM: the workstation has only you")
		}
		return 0, c.becomeWorkstation(o.Args)
	}
	return c.execVM(ctx, o)
}

// WorkstationEnv is what a program on the workstation has in its environment beside the caller's, as NAME=VALUE.
func WorkstationEnv() ([]string, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	path := filepath.Dir(program)
	if old := os.Getenv("PATH"); old != "" {
		path += ":" + old
	}
	return []string{
		"PATH=" + path,
		"SLUICE_ENDPOINT_COMPUTE=" + APIURL,
		"SLUICE_ENDPOINT_LUSTRE=" + APIURL,
		"SLUICE_ENDPOINT_STORAGE=" + APIURL,
		"SLUICE_ENDPOINT_IAM=" + APIURL,
		"CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE=" + APIURL + "/compute/v1/",
		"CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE=" + APIURL + "/storage/v1/",
		"CLOUDSDK_CORE_PROJECT=" + Project,
		"GOOGLE_CLOUD_PROJECT=" + Project,
		"GCE_METADATA_HOST=" + gatewayAddress + ":80",
	}, nil
}

// merge returns env with the variables of more, which win.
func merge(env, more []string) []string {
	names := map[string]bool{}
	for _, e := range more {
		name, _, _ := strings.Cut(e, "=")
		names[name] = true
	}
	out := append([]string(nil), more...)
	for _, e := range env {
		if name, _, _ := strings.Cut(e, "="); !names[name] {
			out = append(out, e)
		}
	}
	return out
}

func (c *Client) becomeWorkstation(args []string) error {
	env, err := WorkstationEnv()
	if err != nil {
		return err
	}
	// The program is looked up in the PATH that it will have.
	if err := os.Setenv("PATH", strings.TrimPrefix(env[0], "PATH=")); err != nil {
		return err
	}
	program, err := exec.LookPath(args[0])
	if err != nil {
		return err
	}
	runtime.LockOSThread()
	if err := c.JoinNetwork(); err != nil {
		return err
	}
	if err := syscall.Exec(program, args, merge(os.Environ(), env)); err != nil {
		return fmt.Errorf("%s: %w", program, err)
	}
	return nil
}

// JoinNetwork puts the calling thread into the sandbox's network; the caller has locked its goroutine to it.
func (c *Client) JoinNetwork() error {
	f, err := os.Open(filepath.Join("/proc", strconv.Itoa(c.pid), "ns/net"))
	if err != nil {
		return fmt.Errorf("the network of sandbox %s: %w", c.name, err)
	}
	defer f.Close()
	if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("joining the network of sandbox %s: %w", c.name, err)
	}
	return nil
}

func (c *Client) execVM(ctx context.Context, o ExecOptions) (int, error) {
	inner, err := c.pidOf(ctx, o.VM)
	if err != nil {
		return 0, err
	}
	argv := []string{guest.Binary, "as", "-with-parent", "-user", o.User, "--"}
	cmd := exec.Command(argv[0], append(argv[1:], o.Args...)...)
	cmd.Env = []string{"PATH=" + guest.Path}
	if term := os.Getenv("TERM"); term != "" {
		cmd.Env = append(cmd.Env, "TERM="+term)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Dir = "/"

	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGUSR2)
	defer signal.Stop(signals)
	// The thread changes its namespaces for good: the goroutine keeps it until both end. It must live as long
	// as the child, which -with-parent ends with it.
	started, ended := make(chan error, 1), make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := joinVM(c.pid, inner)
		if err == nil {
			err = cmd.Start()
		}
		started <- err
		if err == nil {
			ended <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return 0, fmt.Errorf("entering VM %s: %w", o.VM, err)
	}
	for {
		select {
		case s := <-signals:
			if fromTerminal(s) {
				continue // the terminal has sent it to the program too
			}
			_ = cmd.Process.Signal(s) // it may have ended
		case err := <-ended:
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				return 0, err
			}
			status := cmd.ProcessState.Sys().(syscall.WaitStatus)
			if status.Signaled() {
				return 128 + int(status.Signal()), nil
			}
			return status.ExitStatus(), nil
		}
	}
}

// fromTerminal guesses that Ctrl-C or Ctrl-\ was pressed: we are in the terminal's foreground group then.
func fromTerminal(s os.Signal) bool {
	if s != syscall.SIGINT && s != syscall.SIGQUIT {
		return false
	}
	tty, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	defer tty.Close()
	foreground, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && foreground == unix.Getpgrp()
}

// joinVM puts the calling thread into the VM's namespaces. Its PID 1 has the number inner in the pid namespace of
// the outer process, whose own /proc shows it.
func joinVM(outer, inner int) error {
	dir := filepath.Join("/proc", strconv.Itoa(outer), "root/proc", strconv.Itoa(inner), "ns")
	// The mount namespace last: it takes the paths away.
	kinds := []struct {
		name string
		flag int
	}{{"uts", unix.CLONE_NEWUTS}, {"ipc", unix.CLONE_NEWIPC}, {"net", unix.CLONE_NEWNET}, {"pid", unix.CLONE_NEWPID}, {"mnt", unix.CLONE_NEWNS}}
	fds := make([]int, len(kinds))
	for i, k := range kinds {
		fd, err := unix.Open(filepath.Join(dir, k.name), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			for _, fd := range fds[:i] {
				unix.Close(fd)
			}
			return &os.PathError{Op: "open", Path: filepath.Join(dir, k.name), Err: err}
		}
		fds[i] = fd
	}
	defer func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}()
	if err := unix.Unshare(unix.CLONE_FS); err != nil { // setns of a mount namespace wants an own root and directory
		return fmt.Errorf("unshare: %w", err)
	}
	for i, k := range kinds {
		if err := unix.Setns(fds[i], k.flag); err != nil {
			return fmt.Errorf("setns %s: %w", k.name, err)
		}
	}
	return nil
}
