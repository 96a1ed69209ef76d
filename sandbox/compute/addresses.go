package compute

import (
	"errors"
	"fmt"
	"net/netip"
)

// pool gives out the addresses of a subnet, each to one holder at a time.
type pool struct {
	subnet      netip.Prefix
	first, last netip.Addr
	next        netip.Addr            // where the search begins, so that a freed address rests
	used        map[netip.Addr]string // the holder's name
}

// errExhausted says that all addresses are in use.
var errExhausted = errors.New("no free address")

// newPool keeps back the network, the gateway (its first address) and, as Google does, the last two.
func newPool(subnet netip.Prefix) (*pool, error) {
	subnet = subnet.Masked()
	if !subnet.Addr().Is4() || subnet.Bits() > 29 || subnet.Bits() < 8 {
		return nil, fmt.Errorf("subnet %s is not an IPv4 one of 8 to 29 bits", subnet)
	}
	base := subnet.Addr().As4()
	top := uint32(base[0])<<24 | uint32(base[1])<<16 | uint32(base[2])<<8 | uint32(base[3]) | (1<<(32-subnet.Bits()) - 1)
	top -= 2
	p := &pool{
		subnet: subnet,
		first:  subnet.Addr().Next().Next(),
		last:   netip.AddrFrom4([4]byte{byte(top >> 24), byte(top >> 16), byte(top >> 8), byte(top)}),
		used:   map[netip.Addr]string{},
	}
	p.next = p.first
	return p, nil
}

func (p *pool) gateway() netip.Addr { return p.subnet.Addr().Next() }

// contains reports whether a may be given out.
func (p *pool) contains(a netip.Addr) bool { return !a.Less(p.first) && !p.last.Less(a) }

// take gives name a free address.
func (p *pool) take(name string) (netip.Addr, error) {
	a := p.next
	for {
		after := a.Next()
		if p.last.Less(after) {
			after = p.first
		}
		if _, used := p.used[a]; !used {
			p.used[a] = name
			p.next = after
			return a, nil
		}
		if a = after; a == p.next {
			return netip.Addr{}, errExhausted
		}
	}
}

func (p *pool) free(a netip.Addr) { delete(p.used, a) }
