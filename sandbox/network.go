package sandbox

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// bridge is the VMs' network.
const bridge = "br0"

// makeNetwork makes the bridge with the addresses of the services. It runs in a network namespace of its own.
func makeNetwork() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("network: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("network: lo up: %w", err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = bridge
	// An address of its own, so that it does not change with the first and last port.
	attrs.HardwareAddr = net.HardwareAddr{0x42, 0x01, 10, 128, 0, 1}
	br := &netlink.Bridge{LinkAttrs: attrs}
	if err := netlink.LinkAdd(br); err != nil {
		return fmt.Errorf("network: adding the bridge: %w", err)
	}
	network := netip.MustParsePrefix(networkPrefix)
	for _, a := range []netip.Prefix{
		netip.PrefixFrom(netip.MustParseAddr(gatewayAddress), network.Bits()),
		netip.PrefixFrom(netip.MustParseAddr(metadataAddress), 32),
	} {
		if err := netlink.AddrAdd(br, ipAddr(a)); err != nil {
			return fmt.Errorf("network: address %s: %w", a, err)
		}
	}
	if err := netlink.LinkSetUp(br); err != nil {
		return fmt.Errorf("network: bridge up: %w", err)
	}
	return nil
}

func ipAddr(p netip.Prefix) *netlink.Addr {
	return &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}}
}

// listenOwnAddress listens on an address that the bridge has as long as the listener is open.
func listenOwnAddress(at netip.AddrPort) (net.Listener, error) {
	br, err := netlink.LinkByName(bridge)
	if err != nil {
		return nil, err
	}
	addr := ipAddr(netip.PrefixFrom(at.Addr(), 32))
	if err := netlink.AddrAdd(br, addr); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("address %s: %w", at.Addr(), err)
	}
	l, err := net.Listen("tcp4", at.String())
	if err != nil {
		return nil, errors.Join(err, netlink.AddrDel(br, addr))
	}
	return &ownAddress{Listener: l, remove: sync.OnceValue(func() error { return netlink.AddrDel(br, addr) })}, nil
}

type ownAddress struct {
	net.Listener
	remove func() error
}

func (o *ownAddress) Close() error { return errors.Join(o.Listener.Close(), o.remove()) }

// serveDNS answers for the names and addresses that instances returns, until ctx ends.
func serveDNS(ctx context.Context, g *errgroup.Group, address string, instances func() map[string]netip.Addr) error {
	packets, err := net.ListenPacket("udp4", address)
	if err != nil {
		return fmt.Errorf("DNS: %w", err)
	}
	stream, err := net.Listen("tcp4", address)
	if err != nil {
		return errors.Join(fmt.Errorf("DNS: %w", err), packets.Close())
	}
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		_ = w.WriteMsg(answer(q, instances())) // the client asks again
	})
	for _, s := range []*dns.Server{{PacketConn: packets, Handler: handler}, {Listener: stream, Handler: handler}} {
		g.Go(s.ActivateAndServe)
		g.Go(func() error {
			<-ctx.Done()
			return s.Shutdown()
		})
	}
	return nil
}

// dnsTTL is short: addresses are given again soon.
const dnsTTL = 1 // seconds

// answer is the reply to a query. An instance has the names NAME, NAME.c.PROJECT.internal and
// NAME.ZONE.c.PROJECT.internal; of its address, the last one is told.
func answer(q *dns.Msg, instances map[string]netip.Addr) *dns.Msg {
	a := new(dns.Msg).SetReply(q)
	a.Authoritative = true
	a.RecursionAvailable = true // nothing to recurse to, but clients warn without it
	if len(q.Question) != 1 || q.Opcode != dns.OpcodeQuery {
		a.Rcode = dns.RcodeNotImplemented
		return a
	}
	question := q.Question[0]
	name := strings.ToLower(question.Name)
	if name == "metadata.google.internal." || name == "metadata." {
		return addressAnswer(a, question, netip.MustParseAddr(metadataAddress))
	}
	if strings.HasSuffix(name, ".in-addr.arpa.") {
		for instance, addr := range instances {
			if reverse, err := dns.ReverseAddr(addr.String()); err == nil && reverse == name {
				if question.Qtype == dns.TypePTR || question.Qtype == dns.TypeANY {
					a.Answer = append(a.Answer, &dns.PTR{
						Hdr: dns.RR_Header{Name: question.Name, Rrtype: dns.TypePTR, Class: dns.ClassINET, Ttl: dnsTTL},
						Ptr: instance + "." + zoneDomain + ".",
					})
				}
				return a
			}
		}
		a.Rcode = dns.RcodeNameError
		return a
	}
	host, domain, _ := strings.Cut(strings.TrimSuffix(name, "."), ".")
	if addr, ok := instances[host]; ok && (domain == "" || domain == zoneDomain || domain == "c."+Project+".internal") {
		return addressAnswer(a, question, addr)
	}
	a.Rcode = dns.RcodeNameError
	return a
}

func addressAnswer(a *dns.Msg, q dns.Question, addr netip.Addr) *dns.Msg {
	if q.Qtype == dns.TypeA || q.Qtype == dns.TypeANY {
		a.Answer = append(a.Answer, &dns.A{
			Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: dnsTTL}, A: addr.AsSlice(),
		})
	}
	return a
}
