package lustre

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	api "github.com/sluicehpc/sluice/gcp/lustre"
	rules "github.com/sluicehpc/sluice/lustre"
	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

// Client is the virtual machine that mounts.
type Client struct {
	VM      string     // its name
	Address netip.Addr // by which access rules know it
	// PID is its first process: when that ends without a Flush before, the machine has crashed. 0: nothing is known of it.
	PID int
}

// mount is a process that serves one mount of an instance. Server.mu guards what follows ended.
type mount struct {
	inst    *instance
	client  Client
	process *os.Process
	orders  io.WriteCloser
	ended   chan struct{}

	applied  lustrefs.Behaviour
	counters lustrefs.Counters
	flushes  map[int64]chan struct{} // those that are waited for: closed when they are done
}

// Mount describes a mount of an instance that is served.
type Mount struct {
	Instance string // its name
	VM       string
	PID      int // of the process that serves it
}

// Mounts lists the mounts that are served.
func (s *Server) Mounts() []Mount {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []Mount
	for m := range s.mounts {
		all = append(all, Mount{m.inst.Name, m.client.VM, m.process.Pid})
	}
	return all
}

// Usage is what one machine has done on one instance, since the instance was made.
type Usage struct {
	Instance, VM string // their names
	lustrefs.Counters
}

// Usage lists what machines have done, sorted by instance and VM. It is at most a second or so behind.
func (s *Server) Usage() []Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	sums := map[[2]string]lustrefs.Counters{}
	for _, inst := range s.instances {
		for vm, c := range inst.usage {
			sums[[2]string{inst.Name, vm}] = c
		}
	}
	for m := range s.mounts {
		key := [2]string{m.inst.Name, m.client.VM}
		sums[key] = sums[key].Add(m.counters)
	}
	var all []Usage
	for key, c := range sums {
		all = append(all, Usage{key[0], key[1], c})
	}
	slices.SortFunc(all, func(a, b Usage) int {
		return cmp.Or(cmp.Compare(a.Instance, b.Instance), cmp.Compare(a.VM, b.VM))
	})
	return all
}

const (
	readyWait = 10 * time.Second // for a serving process to begin
	// steerTick is how soon a mount learns what nobody announces: a new state or other access rules.
	steerTick = 100 * time.Millisecond
	// patience is how long a machine tries to mount from a server that does not answer. A client's default is longer,
	// but whoever asks for the mount waits.
	patience = 25 * time.Second
)

// ServeMount serves the instance that source ("IP@tcp:/FS") names on a connection that a virtual
// machine has opened at /dev/fuse and mounted. It takes fuse over, and returns once a process of its
// own serves it. What a client of a real Lustre gets is in the error: EIO when no server is at the
// address or it is not ready, ENOENT when it has no file system of that name.
func (s *Server) ServeMount(ctx context.Context, client Client, source string, readOnly bool, fuse *os.File) error {
	defer fuse.Close()
	if err := s.awaitServer(ctx, client, source); err != nil {
		return fmt.Errorf("mount %s: %w", source, err)
	}
	m, ready, err := s.startMount(client, source, readOnly, fuse)
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
		m.orders.Close()
		return fmt.Errorf("mount %s: %w: %w", source, syscall.EIO, err)
	}
	return nil
}

// named finds the instance of a source. s.mu is held.
func (s *Server) named(source string) (*instance, error) {
	part := rules.MountPoint.FindStringSubmatch(source)
	if part == nil {
		return nil, syscall.EINVAL
	}
	for _, i := range s.instances {
		if i.addr.String() != part[1] || !effects[s.state(i)].mounts {
			continue
		}
		if i.Filesystem != part[2] {
			return nil, syscall.ENOENT
		}
		return i, nil
	}
	return nil, syscall.EIO
}

// awaitServer waits while the instance hangs, for as long as a machine is patient.
func (s *Server) awaitServer(ctx context.Context, client Client, source string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		changed := s.options.Faults.Changed()
		s.mu.Lock()
		inst, err := s.named(source)
		s.mu.Unlock()
		if err != nil {
			return err
		}
		if !s.options.Faults.Hits(faults.LustreHang, inst.id(), client.VM) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%w: the server does not answer", syscall.EIO)
		case <-s.ctx.Done():
			return syscall.EIO
		}
	}
}

// startMount starts the process and lists it. ready gets one value: nil when it serves.
func (s *Server) startMount(client Client, source string, readOnly bool, fuse *os.File) (*mount, <-chan error, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	inst, err := s.named(source)
	if err != nil {
		return nil, nil, err
	}
	if s.ctx.Err() != nil || len(s.options.ServeCommand) == 0 {
		return nil, nil, syscall.EIO
	}
	args := append(slices.Clone(s.options.ServeCommand[1:]), lustrefs.Args(inst.dir, lustrefs.Options{
		ReadOnly: readOnly, VM: client.PID, Passthrough: s.options.Faults.Hits(faults.LustrePassthrough, inst.id(), client.VM),
	})...)
	cmd := exec.Command(s.options.ServeCommand[0], args...)
	cmd.ExtraFiles = []*os.File{fuse}
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	m := &mount{
		inst: inst, client: client, process: cmd.Process, orders: stdin, ended: make(chan struct{}), flushes: map[int64]chan struct{}{},
	}
	s.mounts[m] = true
	ready := make(chan error, 1)
	s.work.Go(func() {
		s.hear(m, stdout, ready)
		if err := cmd.Wait(); err != nil && s.ctx.Err() == nil {
			s.options.Log.Info("mount ended", "instance", inst.Name, "vm", client.VM, "pid", m.process.Pid, "error", err)
		}
		s.mu.Lock()
		delete(s.mounts, m)
		inst.usage[client.VM] = inst.usage[client.VM].Add(m.counters)
		s.mu.Unlock()
		close(m.ended)
	})
	s.work.Go(func() { s.steer(m) })
	return m, ready, nil
}

// hear takes the process's events until it ends.
func (s *Server) hear(m *mount, events io.Reader, ready chan<- error) {
	began := false
	for d := json.NewDecoder(events); ; {
		var e lustrefs.Event
		if err := d.Decode(&e); err != nil {
			if !began {
				ready <- fmt.Errorf("the serving process has ended: %w", err)
			}
			return
		}
		s.mu.Lock()
		if e.Applied != nil {
			m.applied = *e.Applied
		}
		if e.Counters != nil {
			m.counters = *e.Counters
		}
		// It serves once it behaves as it is to.
		if !began && e.Applied != nil {
			began = true
			ready <- nil
		}
		if e.Lost != nil {
			m.inst.losses[m.client.VM]++
		}
		if done := m.flushes[e.Flushed]; done != nil {
			close(done)
			delete(m.flushes, e.Flushed)
		}
		s.mu.Unlock()
		if l := e.Lost; l != nil {
			how := "shorter"
			if l.Zeroed {
				how = "zeros at its end"
			}
			what := fmt.Sprintf("%s lost %d unsynced bytes (%d bytes became %d, %s; seed %d)", l.Path, l.Bytes, l.Before, l.After, how, l.Seed)
			if l.Error != "" {
				what += ": " + l.Error
			}
			s.options.Faults.Note(faults.LustreLoseUnsynced, nil, m.inst.id()+"/"+m.client.VM, what)
			s.options.Log.Info("a machine died", "instance", m.inst.Name, "vm", m.client.VM, "what", what)
		}
	}
}

// steer tells the process how to behave until it ends.
func (s *Server) steer(m *mount) {
	defer m.orders.Close()
	tick := time.NewTicker(steerTick)
	defer tick.Stop()
	var told *lustrefs.Behaviour
	for {
		changed := s.options.Faults.Changed()
		s.mu.Lock()
		now := s.behaviour(m)
		s.mu.Unlock()
		if told == nil || *told != now {
			if err := m.order(lustrefs.Order{Behave: &now}); err != nil {
				return // it has ended
			}
			told = &now
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-m.ended:
			return
		}
	}
}

func (m *mount) order(o lustrefs.Order) error {
	line, err := json.Marshal(o)
	if err == nil {
		_, err = m.orders.Write(append(line, '\n'))
	}
	return err
}

// behaviour is what a mount is to do now. s.mu is held.
func (s *Server) behaviour(m *mount) lustrefs.Behaviour {
	f, id, effect := s.options.Faults, m.inst.id(), effects[s.state(m.inst)]
	hits := func(fault string) bool { return f.Hits(fault, id, m.client.VM) }
	b := lustrefs.Behaviour{
		Hang:         hits(faults.LustreHang) || effect.io == stalls,
		EIO:          hits(faults.LustreEIO) || effect.io == fails,
		ENOSPC:       hits(faults.LustreENOSPC),
		EXDEV:        hits(faults.LustreEXDEV),
		Capacity:     f.Int(faults.LustreCapacity),
		LoseUnsynced: hits(faults.LustreLoseUnsynced),
	}
	b.SquashUID, b.SquashGID = squash(m.inst.AccessRulesOptions, m.client.Address)
	if b.LoseUnsynced {
		// Another one for each machine and each of its deaths.
		h := fnv.New64a()
		fmt.Fprint(h, m.client.VM, m.inst.losses[m.client.VM])
		b.Seed = f.List().Seed ^ h.Sum64()
	}
	for other := range s.mounts {
		b.Watched = b.Watched || other.inst == m.inst && f.Hits(faults.LustreLoseUnsynced, id, other.client.VM)
	}
	return b
}

// squash says as whom a machine's root is treated; 0 is itself, also where the default squashes and names nobody.
func squash(o *api.AccessRulesOptions, client netip.Addr) (uid, gid uint32) {
	if o == nil || o.DefaultSquashMode != "ROOT_SQUASH" {
		return 0, 0
	}
	for _, rule := range o.AccessRules {
		for _, text := range rule.IPAddressRanges {
			if prefix, err := rangeOf(text); err == nil && prefix.Contains(client) {
				return 0, 0 // NO_SQUASH is all that a rule can say
			}
		}
	}
	return uint32(o.DefaultSquashUID), uint32(o.DefaultSquashGID)
}

// rangeOf reads an address range of an access rule: one address or a prefix.
func rangeOf(text string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	if err == nil && p != p.Masked() {
		err = fmt.Errorf("%s has bits beyond its prefix", text)
	}
	return p, err
}

// Settle returns once every mount behaves as faults, states and access rules say now.
func (s *Server) Settle(ctx context.Context) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		settled := true
		s.mu.Lock()
		for m := range s.mounts {
			settled = settled && m.applied == s.behaviour(m)
		}
		s.mu.Unlock()
		if settled {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Flush makes all that a machine has written safe, as its shutdown does. It waits for a mount that hangs.
func (s *Server) Flush(ctx context.Context, vm string) error {
	flushes := map[*mount]chan struct{}{}
	s.mu.Lock()
	s.lastFlush++
	number := s.lastFlush
	for m := range s.mounts {
		if m.client.VM == vm {
			flushes[m] = make(chan struct{})
			m.flushes[number] = flushes[m]
		}
	}
	s.mu.Unlock()
	for m, done := range flushes {
		if err := m.order(lustrefs.Order{Flush: number}); err != nil {
			continue // it has ended
		}
		select {
		case <-done:
		case <-m.ended:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}
