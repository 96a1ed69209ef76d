package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/sluicehpc/sluice/sandbox/compute"
	"github.com/sluicehpc/sluice/sandbox/vm"
)

var _ compute.VMs = (*machines)(nil)

// machines starts and ends the VMs behind Compute Engine's instances.
type machines struct {
	host *vm.Host
	cfg  config
	p    paths
	log  *slog.Logger
	cuts *cuts // told before a VM takes its address

	mu      sync.Mutex        // guards what follows
	running map[string]*vm.VM // by name
	leaving map[*vm.VM]string // names of those that are being stopped
}

func newMachines(host *vm.Host, p paths, cfg config, log *slog.Logger) *machines {
	return &machines{host: host, cfg: cfg, p: p, log: log, running: map[string]*vm.VM{}, leaving: map[*vm.VM]string{}}
}

// dir is the VM's own directory. Compute Engine's rules keep names plain.
func (m *machines) dir(name string) string { return filepath.Join(m.p.vms(), name) }

// Start boots the instance's VM.
func (m *machines) Start(ctx context.Context, c compute.Machine) error {
	layers, err := m.cfg.layers(c.Image)
	if err != nil {
		return err
	}
	if c.NewDisk {
		if err := os.RemoveAll(m.dir(c.Name)); err != nil {
			return fmt.Errorf("removing an earlier disk of %s: %w", c.Name, err)
		}
	}
	if err := m.cuts.apply(); err != nil {
		return err
	}
	network := netip.MustParsePrefix(networkPrefix)
	hostname, _, _ := strings.Cut(c.Hostname, ".")
	v, err := m.host.Start(ctx, vm.Spec{
		Name: c.Name, Hostname: hostname, Address: netip.PrefixFrom(c.Address, network.Bits()),
		Gateway: netip.MustParseAddr(gatewayAddress), Layers: layers, Dir: m.dir(c.Name), Binds: binds(m.p),
	})
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.running[c.Name] = v
	m.mu.Unlock()
	m.log.Info("VM started", "name", c.Name, "address", c.Address)
	go func() {
		<-v.Done()
		m.mu.Lock()
		stopped := m.running[c.Name] != v
		if !stopped {
			delete(m.running, c.Name)
		}
		m.mu.Unlock()
		if !stopped {
			m.log.Info("VM ended by itself", "name", c.Name)
			c.Ended()
		}
	}()
	return nil
}

// Stop ends the VM; its disk stays.
func (m *machines) Stop(ctx context.Context, name string, grace time.Duration) error {
	m.mu.Lock()
	v := m.running[name]
	delete(m.running, name)
	if v != nil {
		m.leaving[v] = name
	}
	m.mu.Unlock()
	if v != nil {
		defer m.left(v)
		if err := v.StopWithin(ctx, grace); err != nil {
			return err
		}
		m.log.Info("VM stopped", "name", name, "grace", grace)
	}
	return nil
}

func (m *machines) left(v *vm.VM) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.leaving, v)
}

// Remove removes the VM's disk; the console stays until the name is given again.
func (m *machines) Remove(_ context.Context, name string) error {
	var errs []error
	for _, part := range []string{"upper", "work", "root"} {
		errs = append(errs, os.RemoveAll(filepath.Join(m.dir(name), part)))
	}
	return errors.Join(errs...)
}

// stopAll ends all VMs at once.
func (m *machines) stopAll(ctx context.Context) error {
	m.mu.Lock()
	var all []*vm.VM
	for name, v := range m.running {
		all = append(all, v)
		m.leaving[v] = name
	}
	m.running = map[string]*vm.VM{}
	m.mu.Unlock()
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, v := range all {
		wg.Go(func() { errs[i] = v.Stop(ctx) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// pids returns the PID 1 of each running VM.
func (m *machines) pids() map[string]int {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := map[string]int{}
	for name, v := range m.running {
		all[name] = v.Pid()
	}
	return all
}

// maxConsole bounds one answer of console, in bytes.
const maxConsole = 256 << 10

// console returns at most maxConsole bytes of what a VM has written to its console, from byte from on; a negative from counts
// from the end.
func (m *machines) console(name string, from int64) ([]byte, error) {
	if name != filepath.Base(name) || strings.HasPrefix(name, ".") {
		return nil, fmt.Errorf("%w: %q", ErrNoVM, name)
	}
	f, err := os.Open(filepath.Join(m.dir(name), "console.log"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s", ErrNoVM, name)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if from < 0 {
		info, err := f.Stat()
		if err != nil {
			return nil, err
		}
		from = max(0, info.Size()+from)
	}
	return io.ReadAll(io.NewSectionReader(f, from, maxConsole))
}
