package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehpc/sluice/internal/command"
	"github.com/sluicehpc/sluice/sandbox/guest"
	"github.com/sluicehpc/sluice/sandbox/rootfs"
)

// Options of Up.
type Options struct {
	Name  string // "" is DefaultName
	Slurm string // prefix of the Slurm release of the VMs' root; "" is rootfs.DefaultSlurm
	// Kernel is the one whose system calls the VMs' programs have: "4.18" for Rocky 8's, "" for this machine's.
	Kernel string
	// ImageFamily is the family of the image that VMs boot from; the image is called ImageFamily-v1.
	ImageFamily string
	// WriteImage fills an empty directory with the image's layer over the root, or is nil for none.
	WriteImage func(dir string) error
	Log        io.Writer // progress, one line at a time; nil discards it

	// CheckAPIs is the directory of the Go module google.golang.org/api, to hold all traffic of the APIs against the
	// descriptions in it (see Client.Violations), or "".
	CheckAPIs string

	// Self is the command that calls Serve; nil is this program with "sandbox _serve".
	Self []string
	// Guest is the guest binary; "" is sluice-guest beside this program.
	Guest string
}

// startLimit bounds the time from the start of the outer process to its being ready.
const startLimit = 60 * time.Second

// endGrace is how long the outer process has to stop its VMs in order.
const endGrace = 15 * time.Second

// Up starts a sandbox and returns its status when its services answer; it has no VMs then. It returns
// ErrRunning when a sandbox of that name runs. After any other error, and when ctx ends first, nothing of it is left.
func Up(ctx context.Context, o Options) (*Status, error) {
	if o.Name == "" {
		o.Name = DefaultName
	}
	s, err := up(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", o.Name, err)
	}
	return s, nil
}

func up(ctx context.Context, o Options) (_ *Status, err error) {
	p, err := pathsOf(o.Name)
	if err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("needs root: namespaces and mounts are root's")
	}
	if err := guest.KnownKernel(o.Kernel); err != nil {
		return nil, err
	}
	release, err := rootfs.Find(o.Slurm)
	if err != nil {
		return nil, err
	}
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	if o.Self == nil {
		o.Self = []string{program, "sandbox", "_serve"}
	}
	if o.Guest == "" {
		o.Guest = filepath.Join(filepath.Dir(program), "sluice-guest")
	}
	if _, err := os.Stat(o.Guest); err != nil {
		return nil, fmt.Errorf("the program of the VMs' PID 1: %w (run `make build`)", err)
	}
	unlock, err := lockFile(ctx, p.lock)
	if err != nil {
		return nil, err
	}
	defer unlock()
	switch r, err := readRecord(p.record()); {
	case err == nil:
		return nil, fmt.Errorf("%w (pid %d); `sluice sandbox down --name %s` ends it", ErrRunning, r.Pid, o.Name)
	case !errors.Is(err, ErrNotRunning):
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.remove())
		}
	}()
	root, err := rootfs.Ensure(ctx, rootfs.Options{Cache: rootfs.Cache(), Slurm: release.Slurm, Log: o.Log})
	if err != nil {
		return nil, err
	}
	if err := errors.Join(os.RemoveAll(p.state), os.RemoveAll(p.data)); err != nil {
		return nil, fmt.Errorf("removing what an earlier one left: %w", err)
	}
	if err := p.prepare(ctx, root, o.WriteImage); err != nil {
		return nil, err
	}

	listener, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, fmt.Errorf("listening on the host: %w", err)
	}
	defer listener.Close()
	cfg := config{
		Name: o.Name, Slurm: release.Slurm, Kernel: o.Kernel, Paths: pathsJSON(p), Root: root, Guest: o.Guest, ImageFamily: o.ImageFamily,
		HostURL: "http://" + listener.Addr().String(), CheckAPIs: o.CheckAPIs,
	}
	if o.WriteImage != nil {
		cfg.Image = p.image()
	}
	pid, err := spawn(ctx, o, p, cfg, listener)
	if err != nil {
		return nil, err
	}
	return &Status{
		Name: o.Name, Pid: pid, Slurm: release.Slurm, VMs: []VM{}, Endpoints: endpointsAt(APIURL), HostEndpoints: endpointsAt(cfg.HostURL),
	}, nil
}

// prepare makes the directories, the homes that all VMs share, and the image.
func (p paths) prepare(ctx context.Context, root string, writeImage func(string) error) error {
	for _, dir := range []string{p.state, p.objects(), p.files(), p.vms(), p.image()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(p.home(), 0o755); err != nil {
		return err
	}
	if _, err := command.Run(ctx, command.Spec{Path: "cp", Args: []string{"-a", "--", filepath.Join(root, "home") + "/.", p.home()}}); err != nil {
		return fmt.Errorf("making the homes: %w", err)
	}
	if err := os.Chmod(p.image(), 0o755); err != nil { // it becomes the VMs' /
		return err
	}
	if writeImage == nil {
		return nil
	}
	if err := writeImage(p.image()); err != nil {
		return fmt.Errorf("making the VMs' image: %w", err)
	}
	return nil
}

// remove removes everything of a sandbox that does not run, the lock last, which the caller holds.
func (p paths) remove() error {
	if err := errors.Join(os.RemoveAll(p.state), os.RemoveAll(p.data), os.Remove(p.lock)); err != nil {
		return err
	}
	_ = os.Remove(filepath.Dir(p.state)) // unless another sandbox has its place there
	return nil
}

// spawn starts the outer process and waits until it is ready.
func spawn(ctx context.Context, o Options, p paths, cfg config, listener *net.TCPListener) (pid int, err error) {
	log, err := os.OpenFile(p.log(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return 0, err
	}
	defer log.Close()
	listenerFile, err := listener.File()
	if err != nil {
		return 0, err
	}
	defer listenerFile.Close()
	cfgRead, cfgWrite, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer cfgRead.Close()
	defer cfgWrite.Close()
	readyRead, readyWrite, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer readyRead.Close()
	defer readyWrite.Close()

	extra := []*os.File{cfgRead, readyWrite, listenerFile}
	cmd := exec.Command(o.Guest, append([]string{"reap", "-files", strconv.Itoa(3 + len(extra)), "--"}, o.Self...)...)
	cmd.ExtraFiles = extra
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = "/"
	cmd.Env = serveEnv()
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
	}
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("starting it in namespaces of its own: %w", err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait() // the log says why
	}()
	defer func() {
		if err != nil {
			_ = cmd.Process.Kill()
			<-ended
			if last := lastLines(p.log(), 10); last != "" {
				err = fmt.Errorf("%w; its last words:\n%s", err, last)
			}
		}
	}()
	readyWrite.Close()
	// Recorded before it can do anything, so that a killed Up leaves a process that Down finds.
	r, err := recordOf(cmd.Process.Pid)
	if err != nil {
		return 0, err
	}
	if err := r.write(p.record()); err != nil {
		return 0, err
	}
	text, err := json.Marshal(cfg)
	if err != nil {
		return 0, err
	}
	if _, err := cfgWrite.Write(append(text, '\n')); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = readyRead.SetReadDeadline(time.Unix(1, 0)) })()
	answer, err := io.ReadAll(io.LimitReader(readyRead, 1<<16))
	switch {
	case ctx.Err() != nil:
		return 0, fmt.Errorf("waiting for it to be ready: %w", ctx.Err())
	case err != nil:
		return 0, fmt.Errorf("waiting for it to be ready: %w", err)
	case string(answer) == readyLine:
		return cmd.Process.Pid, nil
	case len(answer) > 0:
		return 0, errors.New(strings.TrimSpace(string(answer)))
	}
	return 0, errors.New("it ended before it was ready")
}

// serveEnv is what the outer process keeps of the caller's environment.
func serveEnv() []string {
	env := []string{command.DefaultPath, "LANG=C.UTF-8"}
	if root, ok := os.LookupEnv("SLUICE_ROOT"); ok {
		env = append(env, "SLUICE_ROOT="+root)
	}
	return env
}

func lastLines(path string, n int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	lines := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-n):], []byte("\n")))
}

// Down ends a sandbox and removes its state and data; it returns when nothing of it is left. It also cleans up
// after one that was killed. A sandbox that does not exist is ErrNotRunning.
func Down(ctx context.Context, name string) error {
	if name == "" {
		name = DefaultName
	}
	if err := down(ctx, name); err != nil {
		return fmt.Errorf("sandbox %s: %w", name, err)
	}
	return nil
}

func down(ctx context.Context, name string) error {
	p, err := pathsOf(name)
	if err != nil {
		return err
	}
	if !exists(p.state) && !exists(p.data) {
		return ErrNotRunning
	}
	unlock, err := lockFile(ctx, p.lock)
	if err != nil {
		return err
	}
	defer unlock()
	r, err := readRecord(p.record())
	switch {
	case err == nil:
		if err := r.end(ctx, endGrace); err != nil {
			return err
		}
	case !errors.Is(err, ErrNotRunning):
		return err
	}
	return p.remove()
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
