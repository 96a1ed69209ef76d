package lustre

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	api "github.com/sluicehpc/sluice/gcp/lustre"
	rules "github.com/sluicehpc/sluice/lustre"
	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

// mount is a process that serves one mount of an instance.
type mount struct {
	inst    *instance
	process *os.Process
	ended   chan struct{}
}

// Mount describes a mount of an instance that is served.
type Mount struct {
	Instance string // its name
	PID      int    // of the process that serves it: stopping that makes the mount hang
}

// Mounts lists the mounts that are served.
func (s *Server) Mounts() []Mount {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []Mount
	for m := range s.mounts {
		all = append(all, Mount{m.inst.Name, m.process.Pid})
	}
	return all
}

const (
	readyWait    = 10 * time.Second       // for a serving process to begin
	capacityTick = 100 * time.Millisecond // how soon a mount learns that the capacity fault has changed
)

// ServeMount serves the instance that source ("IP@tcp:/FS") names on a connection that a virtual
// machine has opened at /dev/fuse and mounted. It takes fuse over, and returns once a process of its
// own serves it. What a client of a real Lustre gets is in the error: EIO when no server is at the
// address or it is not ready, ENOENT when it has no file system of that name.
func (s *Server) ServeMount(ctx context.Context, source string, readOnly bool, fuse *os.File) error {
	defer fuse.Close()
	m, stdin, ready, err := s.startMount(source, readOnly, fuse)
	if err != nil {
		return fmt.Errorf("mount %s: %w", source, err)
	}
	timer := time.NewTimer(readyWait)
	defer timer.Stop()
	select {
	case err = <-ready:
	case <-timer.C:
		err = errors.New("the serving process does not begin")
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		m.process.Kill()
		stdin.Close()
		return fmt.Errorf("mount %s: %w: %w", source, syscall.EIO, err)
	}
	s.work.Go(func() { s.tellCapacity(m, stdin) })
	return nil
}

// startMount starts the process and lists it. ready gets one value: nil when it serves.
func (s *Server) startMount(source string, readOnly bool, fuse *os.File) (*mount, io.WriteCloser, <-chan error, error) {
	part := rules.MountPoint.FindStringSubmatch(source)
	if part == nil {
		return nil, nil, nil, syscall.EINVAL
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var inst *instance
	for _, i := range s.instances {
		if i.addr.String() == part[1] && i.State == api.StateActive {
			inst = i
		}
	}
	switch {
	case s.ctx.Err() != nil, len(s.options.ServeCommand) == 0, inst == nil:
		return nil, nil, nil, syscall.EIO
	case inst.Filesystem != part[2]:
		return nil, nil, nil, syscall.ENOENT
	}
	args := append(append([]string(nil), s.options.ServeCommand[1:]...), lustrefs.Args(inst.dir, lustrefs.Options{ReadOnly: readOnly})...)
	cmd := exec.Command(s.options.ServeCommand[0], args...)
	cmd.ExtraFiles = []*os.File{fuse}
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, nil, nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, nil, err
	}
	m := &mount{inst: inst, process: cmd.Process, ended: make(chan struct{})}
	s.mounts[m] = true
	ready := make(chan error, 1)
	s.work.Go(func() {
		line, err := bufio.NewReader(io.LimitReader(stdout, 100)).ReadString('\n')
		if err == nil && line != lustrefs.ReadyLine {
			err = fmt.Errorf("it says %q", line)
		}
		ready <- err
		if err := cmd.Wait(); err != nil && s.ctx.Err() == nil {
			s.options.Log.Info("mount ended", "instance", inst.Name, "pid", m.process.Pid, "error", err)
		}
		s.mu.Lock()
		delete(s.mounts, m)
		s.mu.Unlock()
		close(m.ended)
	})
	return m, stdin, ready, nil
}

// tellCapacity passes changes of the capacity fault on until the mount ends.
func (s *Server) tellCapacity(m *mount, stdin io.WriteCloser) {
	defer stdin.Close()
	tick := time.NewTicker(capacityTick)
	defer tick.Stop()
	told := int64(0)
	for {
		if now := s.options.Faults.Int(faults.LustreCapacity); now != told {
			if _, err := io.WriteString(stdin, lustrefs.CapacityLine(now)); err != nil {
				return // it has ended
			}
			told = now
		}
		select {
		case <-tick.C:
		case <-m.ended:
			return
		}
	}
}
