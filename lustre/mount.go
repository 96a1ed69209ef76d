package lustre

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/internal/command"
	"github.com/sluicehpc/sluice/lustre/probe"
)

// Spec is a file system and where it is mounted.
type Spec struct {
	Source  string   // the instance's mountPoint: "10.0.0.5@tcp:/fs"
	Dir     string   // absolute, without symbolic links; created when it is missing
	Options []string // for mount -o; empty: none
	// Types are the accepted file system types; empty: lustre. What stands in for Lustre may show another.
	Types []string
	// Timeout bounds the call of mount(8); 0 means DefaultMountTimeout.
	Timeout time.Duration
}

// DefaultMountTimeout is how long mount(8) may take. The client itself gives up on a server that
// does not answer after about half a minute.
const DefaultMountTimeout = 60 * time.Second

// Errors of Mount, for errors.Is.
var (
	ErrBusyDir       = errors.New("something else is mounted there")
	ErrSameFS        = errors.New("a file system of that name is mounted already")
	ErrNoFileSystem  = errors.New("the server has no file system of that name")
	ErrUnreachable   = errors.New("the server cannot be reached")
	ErrNoClient      = errors.New("this machine has no Lustre client")
	ErrMountDeadline = errors.New("mount did not end in time")
)

// Mounter runs mount(8) and umount(8). The zero value is ready.
type Mounter struct {
	run    func(ctx context.Context, name string, args ...string) error // nil: the real programs
	mounts func() ([]probe.Mount, error)                                // nil: the kernel's table
}

// Mount mounts the file system. It may be called again: when the same source is mounted at the
// directory already, it does nothing. A source elsewhere with the same file system name is refused
// (ErrSameFS), because the Lustre client cannot tell the two apart. After a failed or abandoned
// mount it unmounts what may be there.
func (m Mounter) Mount(ctx context.Context, s Spec) error {
	ip, fs, err := s.check()
	if err != nil {
		return fmt.Errorf("mount %s: %w", s.Source, err)
	}
	dir := filepath.Clean(s.Dir)
	check := probe.Check{Dir: dir, Source: s.Source, Types: s.Types}
	mounts, err := m.table()
	if err != nil {
		return fmt.Errorf("mount %s: read the mount table: %w", s.Source, err)
	}
	switch state, detail := probe.Judge(mounts, check); state {
	case probe.OK:
		return nil
	case probe.WrongSource, probe.WrongType:
		return fmt.Errorf("mount %s at %s: %w: %s", s.Source, dir, ErrBusyDir, detail)
	}
	for _, other := range mounts {
		if s.accepts(other.Type) && other.Source != s.Source && strings.HasSuffix(other.Source, "@tcp:/"+fs) {
			return fmt.Errorf("mount %s: %w: %s at %s; one machine cannot mount two instances with the same filesystem name",
				s.Source, ErrSameFS, other.Source, other.Dir)
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("mount %s: make the mount point: %w", s.Source, err)
	}

	args := []string{"-t", "lustre"}
	if len(s.Options) > 0 {
		args = append(args, "-o", strings.Join(s.Options, ","))
	}
	timeout := s.Timeout
	if timeout == 0 {
		timeout = DefaultMountTimeout
	}
	mctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err = m.do(mctx, "mount", append(args, s.Source, dir)...)
	if err != nil {
		// A killed mount(8) may leave its mount behind; only a matching one is taken away.
		m.unmountIf(check)
		if ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("%w: %s:%d was tried for %s; check that the instance is ACTIVE and that a firewall lets TCP %d through",
				ErrMountDeadline, ip, Port, timeout, Port)
		} else {
			err = explain(err, ip, fs)
		}
		return fmt.Errorf("mount %s at %s: %w", s.Source, dir, err)
	}
	mounts, err = m.table()
	if err != nil {
		return fmt.Errorf("mount %s: read the mount table: %w", s.Source, err)
	}
	if state, detail := probe.Judge(mounts, check); state != probe.OK {
		return fmt.Errorf("mount %s at %s: mount(8) reported success, but %s", s.Source, dir, detail)
	}
	return nil
}

// Port is where Lustre servers listen for clients (Managed Lustre's default; instances made with
// the deprecated GKE flag use 6988).
const Port = 988

func (s Spec) check() (ip, fs string, err error) {
	parts := MountPoint.FindStringSubmatch(s.Source)
	if parts == nil {
		return "", "", fmt.Errorf("source %q is not IP@tcp:/FS, as an instance's mountPoint is", s.Source)
	}
	if !filepath.IsAbs(s.Dir) || filepath.Clean(s.Dir) == "/" {
		return "", "", fmt.Errorf("mount point %q must be an absolute path below /", s.Dir)
	}
	for _, o := range s.Options {
		if o == "" || strings.ContainsAny(o, ", \t\n") {
			return "", "", fmt.Errorf("mount option %q must be one option without blanks and commas", o)
		}
	}
	return parts[1], parts[2], nil
}

func (s Spec) accepts(fsType string) bool {
	if len(s.Types) == 0 {
		return fsType == "lustre"
	}
	return slices.Contains(s.Types, fsType)
}

// explain turns mount's failure into what went wrong. mount.lustre exits with the errno of its
// mount(2) call (2 ENOENT, 5 EIO, 19 ENODEV); mount(8) passes the code on, with its own 32 for "failed".
func explain(err error, ip, fs string) error {
	ce, ok := errors.AsType[*command.Error](err)
	if !ok {
		return err
	}
	server := fmt.Sprintf("%s:%d", ip, Port)
	text := ce.Stderr
	switch {
	case ce.Exit == 2 || strings.Contains(text, "No such file or directory"):
		return fmt.Errorf("%w: %q at %s; compare with the instance's filesystem and mountPoint (%w)", ErrNoFileSystem, fs, server, err)
	case ce.Exit == 5 || strings.Contains(text, "Input/output error"), strings.Contains(text, "Is the MGS running"):
		return fmt.Errorf("%w: %s; check that the instance is ACTIVE, that this machine is in its network and that a firewall lets TCP %d through (%w)",
			ErrUnreachable, server, Port, err)
	case ce.Exit == 19 || strings.Contains(text, "unknown filesystem type"), strings.Contains(text, "No such device"):
		return fmt.Errorf("%w: install the client modules for this kernel and load them with modprobe lustre (%w)", ErrNoClient, err)
	}
	return fmt.Errorf("no answer that is known from %s: %w", server, err)
}

// The steps of Unmount: a plain unmount waits for what is in flight, -f aborts it, -l takes the
// directory away at once and leaves the rest to the kernel. At most 30 s together.
var unmountSteps = []struct {
	flag    string
	timeout time.Duration
}{
	{"", 15 * time.Second},
	{"-f", 10 * time.Second},
	{"-l", 5 * time.Second},
}

// Unmount takes away what is mounted at dir and returns nil when nothing is (left) there. It
// takes at most 30 s and does not end early with the caller's context, so that a caller in a hurry
// cannot leave half a clean-up behind. lazy reports that only umount -l helped: the kernel still
// holds the file system, and the machine should be drained and not used again.
func (m Mounter) Unmount(dir string) (lazy bool, err error) {
	dir = filepath.Clean(dir)
	var failures []error
	for _, step := range unmountSteps {
		ctx, cancel := context.WithTimeout(context.Background(), step.timeout)
		defer cancel()
		for range 16 { // mounts may lie on top of each other
			mounts, err := m.table()
			if err != nil {
				return lazy, fmt.Errorf("unmount %s: read the mount table: %w", dir, err)
			}
			if probe.At(mounts, dir) == nil {
				return lazy, nil
			}
			args := []string{dir}
			if step.flag != "" {
				args = []string{step.flag, dir}
			}
			if err := m.do(ctx, "umount", args...); err != nil {
				failures = append(failures, err)
				break
			}
			lazy = lazy || step.flag == "-l"
		}
	}
	return lazy, fmt.Errorf("unmount %s: %w", dir, errors.Join(failures...))
}

// unmountIf unmounts the directory if what is there is what the check wants.
func (m Mounter) unmountIf(c probe.Check) {
	mounts, err := m.table()
	if err != nil {
		return
	}
	if state, _ := probe.Judge(mounts, c); state == probe.OK {
		m.Unmount(c.Dir) // the mount's own failure is what the caller is told
	}
}

func (m Mounter) table() ([]probe.Mount, error) {
	if m.mounts != nil {
		return m.mounts()
	}
	return probe.Mounts()
}

// do runs the program and stops waiting for it soon after ctx has ended: one in uninterruptible
// sleep cannot be killed.
func (m Mounter) do(ctx context.Context, name string, args ...string) error {
	run := m.run
	if run == nil {
		run = func(ctx context.Context, name string, args ...string) error {
			_, err := command.Run(ctx, command.Spec{Path: name, Args: args})
			return err
		}
	}
	done := make(chan error, 1)
	go func() { done <- run(ctx, name, args...) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return err
	case <-time.After(200 * time.Millisecond):
		return fmt.Errorf("%s %s: %w, and it could not be killed", name, strings.Join(args, " "), ctx.Err())
	}
}
