package vm

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// portTable is the table of nftables that keeps the VM behind a port of the bridge from
// sending as somebody else.
func portTable(link string) *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyBridge, Name: "port-" + link}
}

// onlyItself drops what a VM sends that is not from its own address: the metadata server knows VMs
// by their addresses, and Compute Engine's network lets no VM (without canIpForward) use another's.
func onlyItself(link string, a netip.Addr) error {
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	table := portTable(link)
	// Of an earlier VM at this address, perhaps: adding first lets the deletion succeed.
	conn.AddTable(table)
	conn.DelTable(table)
	conn.AddTable(table)
	chain := conn.AddChain(&nftables.Chain{
		Name: "from", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityFilter,
	})
	name := make([]byte, unix.IFNAMSIZ)
	copy(name, link)
	for _, sender := range []struct {
		etherType uint16 // 0: any
		base      expr.PayloadBase
		offset    uint32
		want      []byte
	}{
		{0, expr.PayloadBaseLLHeader, 6, hardwareAddr(a)},
		{unix.ETH_P_IP, expr.PayloadBaseNetworkHeader, 12, a.AsSlice()},
		{unix.ETH_P_ARP, expr.PayloadBaseNetworkHeader, 8, hardwareAddr(a)},
		{unix.ETH_P_ARP, expr.PayloadBaseNetworkHeader, 14, a.AsSlice()},
	} {
		exprs := []expr.Any{
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: name},
		}
		if sender.etherType != 0 {
			exprs = append(exprs, &expr.Meta{Key: expr.MetaKeyPROTOCOL, Register: 1},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(sender.etherType)})
		}
		exprs = append(exprs, &expr.Payload{DestRegister: 1, Base: sender.base, Offset: sender.offset, Len: uint32(len(sender.want))},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: sender.want}, &expr.Verdict{Kind: expr.VerdictDrop})
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: exprs})
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	return nil
}

// removePort takes away what onlyItself made.
func removePort(link string) error {
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	conn.DelTable(portTable(link))
	if err := conn.Flush(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
