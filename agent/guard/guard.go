// Package guard lets only root of this machine reach Google's metadata server, whose tokens are the VM's.
//
// What every process needs stays open: DNS and NTP are served at the same address.
package guard

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// table is ours alone: what other tables say counts too, and is left as it is.
const table = "sluice_metadata"

// tag marks our rules. Change it with them, so that an older agent's are replaced.
const tag = "sluice 1"

// addresses of the metadata server.
var addresses = []netip.Addr{netip.MustParseAddr("169.254.169.254"), netip.MustParseAddr("fd20:ce::254")}

// open are the ports at the metadata server's address that everybody may reach.
var open = []struct {
	protocol byte
	port     uint16
}{{unix.IPPROTO_UDP, 53}, {unix.IPPROTO_TCP, 53}, {unix.IPPROTO_UDP, 123}}

// Ensure makes sure that the rules stand, all or none; put is true when they did
// not. It needs CAP_NET_ADMIN.
func Ensure() (put bool, err error) {
	c, err := nftables.New()
	if err != nil {
		return false, fmt.Errorf("guard the metadata server: %w", err)
	}
	stands, err := standing(c)
	if stands || err != nil {
		return false, err
	}
	t := &nftables.Table{Family: nftables.TableFamilyINet, Name: table}
	// Adding it first lets the deletion succeed; the kernel does all of it at once.
	c.AddTable(t)
	c.DelTable(t)
	c.AddTable(t)
	for _, ch := range chains(t) {
		c.AddChain(ch.chain)
		for _, exprs := range ch.rules {
			c.AddRule(&nftables.Rule{Table: t, Chain: ch.chain, Exprs: exprs, UserData: []byte(tag)})
		}
	}
	if err := c.Flush(); err != nil {
		return false, fmt.Errorf("guard the metadata server: %w", err)
	}
	return true, nil
}

// Remove takes the rules away, if there are any.
func Remove() error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open the metadata server: %w", err)
	}
	c.DelTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: table})
	if err := c.Flush(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("open the metadata server: %w", err)
	}
	return nil
}

// standing tells whether the rules are there, and all of them.
func standing(c *nftables.Conn) (bool, error) {
	there, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return false, fmt.Errorf("look for the metadata server's guard: %w", err)
	}
	hooked := map[string]bool{}
	for _, ch := range there {
		if ch.Table.Name == table && ch.Hooknum != nil {
			hooked[ch.Name] = true
		}
	}
	t := &nftables.Table{Family: nftables.TableFamilyINet, Name: table}
	for _, want := range chains(t) {
		if !hooked[want.chain.Name] {
			return false, nil
		}
		rules, err := c.GetRules(t, want.chain)
		if err != nil {
			return false, fmt.Errorf("look for the metadata server's guard: %w", err)
		}
		if len(rules) != len(want.rules) {
			return false, nil
		}
		for _, r := range rules {
			if string(r.UserData) != tag {
				return false, nil
			}
		}
	}
	return true, nil
}

// chainRules is a chain and what stands in it.
type chainRules struct {
	chain *nftables.Chain
	rules [][]expr.Any
}

// chains are what the kernel is to do with packets of this machine's processes,
// and with those that it forwards, which come from containers.
func chains(t *nftables.Table) []chainRules {
	accept := nftables.ChainPolicyAccept
	output := chainRules{chain: &nftables.Chain{Name: "output", Table: t, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityFilter, Policy: &accept}}
	forward := chainRules{chain: &nftables.Chain{Name: "forward", Table: t, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &accept}}
	for _, a := range addresses {
		for _, o := range open {
			rule := with(to(a), port(o.protocol, o.port), verdict(expr.VerdictAccept))
			output.rules = append(output.rules, rule)
			forward.rules = append(forward.rules, rule)
		}
		// A packet of a socket that was closed has no owner any more and passes: no
		// connection can begin with one.
		output.rules = append(output.rules, with(to(a), notRoot(), reject()))
		forward.rules = append(forward.rules, with(to(a), reject()))
	}
	return []chainRules{output, forward}
}

func with(parts ...[]expr.Any) []expr.Any {
	var all []expr.Any
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

// to matches the destination address.
func to(a netip.Addr) []expr.Any {
	family, offset := byte(unix.NFPROTO_IPV4), uint32(16)
	if a.Is6() {
		family, offset = unix.NFPROTO_IPV6, 24
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(a.BitLen() / 8)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: a.AsSlice()},
	}
}

// port matches the protocol and the destination port.
func port(protocol byte, port uint16) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{protocol}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{byte(port >> 8), byte(port)}},
	}
}

// notRoot matches sockets of everybody but root. Ids are those of the whole
// machine: root of a user namespace is not root here.
func notRoot() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeySKUID, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{0, 0, 0, 0}},
	}
}

func verdict(kind expr.VerdictKind) []expr.Any { return []expr.Any{&expr.Verdict{Kind: kind}} }

// reject answers at once, so that nobody waits for a time-out.
func reject() []expr.Any {
	return []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED}}
}
