package sandbox

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/sandbox/faults"
)

// peerAPIs is the PEER of faults.NetworkCut that stands for what the outer process serves.
const peerAPIs = "apis"

// cuts keeps the faults.NetworkCut that are set as rules of nftables on the bridge, in the network namespace of the outer process.
type cuts struct {
	faults    *faults.Set
	addresses func() map[string]netip.Addr // of the VMs, by name
	log       *slog.Logger

	mu   sync.Mutex // guards what follows, and the rules
	last string     // the pairs that are cut, as text
}

// watch keeps the rules until ctx ends.
func (c *cuts) watch(ctx context.Context) error {
	for {
		changed := c.faults.Changed()
		if err := c.apply(); err != nil {
			c.log.Error("cutting the network", "error", err)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// apply makes the rules those of now. It is called too when a VM gets an address.
func (c *cuts) apply() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	pairs := c.pairs()
	text := fmt.Sprint(pairs)
	if text == c.last || len(pairs) == 0 && c.last == "" {
		return nil
	}
	if err := cut(pairs); err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	c.last = text
	c.log.Info("network cut", "pairs", text)
	return nil
}

// pairs lists who is cut off from whom, each way once.
func (c *cuts) pairs() [][2]netip.Addr {
	peers := map[string][]netip.Addr{peerAPIs: {netip.MustParseAddr(gatewayAddress), netip.MustParseAddr(metadataAddress)}}
	vms := c.addresses()
	for name, a := range vms {
		peers[name] = []netip.Addr{a}
	}
	var pairs [][2]netip.Addr
	for _, a := range slices.Sorted(maps.Keys(vms)) {
		for _, b := range slices.Sorted(maps.Keys(peers)) {
			if _, vm := vms[b]; vm && b <= a {
				continue // itself, or had before
			}
			_, on := c.faults.Get(faults.NetworkCut, a, b)
			if _, back := c.faults.Get(faults.NetworkCut, b, a); !on && !back {
				continue
			}
			for _, p := range peers[b] {
				pairs = append(pairs, [2]netip.Addr{vms[a], p}, [2]netip.Addr{p, vms[a]})
			}
		}
	}
	return pairs
}

// cut drops all IPv4 packets from the first to the second of each pair, and no others.
func cut(pairs [][2]netip.Addr) error {
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyBridge, Name: "sluice-faults"})
	conn.FlushTable(table)
	// prerouting sees what a VM sends, output what the outer process sends.
	for _, hook := range []struct {
		name string
		hook *nftables.ChainHook
	}{{"prerouting", nftables.ChainHookPrerouting}, {"output", nftables.ChainHookOutput}} {
		chain := conn.AddChain(&nftables.Chain{
			Name: hook.name, Table: table, Type: nftables.ChainTypeFilter, Hooknum: hook.hook, Priority: nftables.ChainPriorityFilter,
		})
		for _, p := range pairs {
			conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
				&expr.Meta{Key: expr.MetaKeyPROTOCOL, Register: 1},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(unix.ETH_P_IP)},
				&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4}, // source address
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p[0].AsSlice()},
				&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4}, // destination address
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p[1].AsSlice()},
				&expr.Verdict{Kind: expr.VerdictDrop},
			}})
		}
	}
	return conn.Flush()
}
