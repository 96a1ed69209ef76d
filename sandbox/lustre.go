package sandbox

import (
	"context"
	"fmt"
	"maps"
	"os"
	"syscall"
	"time"

	"github.com/sluicehpc/sluice/sandbox/guest"
	"github.com/sluicehpc/sluice/sandbox/lustre"
)

var _ guest.LustreServer = lustreMounts{}

// lustreMounts answers the VMs' mount.lustre.
type lustreMounts struct{ *outer }

func (l lustreMounts) Mount(ctx context.Context, peer int, source string, readOnly bool, fuse *os.File) error {
	client, err := l.machines.client(peer)
	if err != nil {
		fuse.Close()
		return err
	}
	return l.lustre.ServeMount(ctx, client, source, readOnly, fuse)
}

func (l lustreMounts) Flush(ctx context.Context, peer int) error {
	client, err := l.machines.client(peer)
	if err != nil {
		return err
	}
	return l.lustre.Flush(ctx, client.VM)
}

// client finds the VM of one of its processes.
func (m *machines) client(pid int) (lustre.Client, error) {
	namespace := func(pid int) string {
		name, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
		if err != nil {
			return "" // it has ended
		}
		return name
	}
	peer := namespace(pid)
	m.mu.Lock()
	defer m.mu.Unlock()
	all := maps.Clone(m.leaving)
	for name, v := range m.running {
		all[v] = name
	}
	for v, name := range all {
		if ns := namespace(v.Pid()); ns != "" && ns == peer {
			return lustre.Client{VM: name, Address: v.Address(), PID: v.Pid()}, nil
		}
	}
	return lustre.Client{}, fmt.Errorf("%w: process %d is of no VM", syscall.EPERM, pid)
}

// settleWait bounds the wait until all mounts behave as the faults say.
const settleWait = 5 * time.Second

// settle returns once a change of the faults is in effect on all mounts.
func (o *outer) settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleWait)
	defer cancel()
	if err := o.lustre.Settle(ctx); err != nil {
		return fmt.Errorf("the fault is set, but not every mount has taken it yet: %w", err)
	}
	return nil
}
