package collective

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehpc/sluice/internal/atomicfile"
)

const (
	magic     = "sluicetr1"
	nonceSize = 32

	handshakeTimeout = 5 * time.Second       // for one connection, so that a stranger who says nothing is dropped
	pollInterval     = 50 * time.Millisecond // between two looks for the rendezvous file
)

// rendezvous is the content of Config.File. Whoever can read the file may join: it is readable by its owner alone.
type rendezvous struct {
	Addresses []string `json:"addresses"` // host:port, to be tried in turn
	Secret    []byte   `json:"secret"`    // 32 random bytes
}

// Join connects the ranks. It returns when all have joined, or with an error after Timeout. A group of one needs no file and no
// network.
func Join(ctx context.Context, c Config) (*Group, error) {
	if c.Size < 1 || c.Rank < 0 || c.Rank >= c.Size {
		return nil, fmt.Errorf("join: no rank %d of %d", c.Rank, c.Size)
	}
	g := &Group{Config: c}
	if c.Size == 1 {
		return g, nil
	}
	whole, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	var err error
	if c.Rank == 0 {
		err = g.lead(whole)
	} else {
		err = g.follow(whole)
	}
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		g.Close(err)
		return nil, err
	}
	return g, nil
}

// lead listens, publishes the address and accepts every other rank.
func (g *Group) lead(ctx context.Context) error {
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", ":"+strconv.Itoa(g.Port))
	if err != nil {
		return err
	}
	defer ln.Close()
	rv := rendezvous{Secret: make([]byte, 32)}
	rand.Read(rv.Secret)
	port := strconv.Itoa(ln.Addr().(*net.TCPAddr).Port)
	for _, host := range g.Hosts {
		rv.Addresses = append(rv.Addresses, net.JoinHostPort(host, port))
	}
	text, err := json.Marshal(rv)
	if err != nil {
		return err
	}
	if err := atomicfile.Write(g.File, text, 0o600); err != nil {
		return err
	}
	defer os.Remove(g.File)

	joined := make(chan *peer)
	done := make(chan struct{})
	defer close(done)
	go func() {
		for {
			conn, err := ln.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			} else if err != nil { // out of descriptors, or the other is gone already
				select {
				case <-time.After(pollInterval):
					continue
				case <-done:
					return
				}
			}
			go func() {
				p, err := g.admit(conn, rv.Secret)
				if err != nil {
					conn.Close() // a stranger, or a rank that will try again
					return
				}
				select {
				case joined <- p:
				case <-done:
					conn.Close()
				}
			}()
		}
	}()
	g.peers = make([]*peer, g.Size-1)
	for n := 0; n < g.Size-1; {
		select {
		case p := <-joined:
			// A rank that comes again lost its first connection while it joined.
			if old := g.peers[p.rank-1]; old != nil {
				old.conn.Close()
			} else {
				n++
			}
			g.peers[p.rank-1] = p
		case <-ctx.Done():
			var missing []string
			present := g.peers[:0:0]
			for i, p := range g.peers {
				if p == nil {
					missing = append(missing, strconv.Itoa(i+1))
				} else {
					present = append(present, p)
				}
			}
			g.peers = present
			return fmt.Errorf("rank %s of %d did not come within %v: were all tasks started by one srun, and may their nodes connect to %s?",
				strings.Join(missing, ", "), g.Size, g.Timeout, strings.Join(rv.Addresses, " or "))
		}
	}
	return g.each(ctx, func(p *peer) error { return p.send(frameHello, []byte(g.Node)) })
}

// follow finds rank 0 and connects to it. Until the deadline every failure is tried again: the file may be an older run's.
func (g *Group) follow(ctx context.Context) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		p, err := g.connect(ctx)
		if err == nil {
			g.peers = []*peer{p}
			break
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("rank 0 was not found within %v: %w", g.Timeout, err)
		}
	}
	return g.each(ctx, func(p *peer) error {
		name, err := p.receive(frameHello, maxText)
		if err == nil {
			p.node = printable(string(name))
		}
		return err
	})
}

func (g *Group) connect(ctx context.Context) (*peer, error) {
	rv, err := readRendezvous(g.File)
	if err != nil {
		return nil, err
	}
	err = fmt.Errorf("%s has no address", g.File)
	for _, addr := range rv.Addresses {
		var conn net.Conn
		d := net.Dialer{Timeout: handshakeTimeout}
		if conn, err = d.DialContext(ctx, "tcp", addr); err != nil {
			continue
		}
		p := newPeer(0, conn)
		if err = g.introduce(p, rv.Secret); err == nil {
			return p, nil
		}
		conn.Close()
		err = fmt.Errorf("%s: %w", addr, err)
	}
	return nil, err
}

// readRendezvous trusts only a file that nobody but this process's user can have written or read.
func readRendezvous(path string) (*rendezvous, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o077 != 0 || !ok || int(stat.Uid) != os.Geteuid() {
		return nil, fmt.Errorf("%s is not a file that user %d alone may read", path, os.Geteuid())
	}
	text, err := io.ReadAll(io.LimitReader(f, 64<<10))
	if err != nil {
		return nil, err
	}
	var rv rendezvous
	if err := json.Unmarshal(text, &rv); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(rv.Secret) != 32 {
		return nil, fmt.Errorf("%s has no secret", path)
	}
	return &rv, nil
}

// Both sides prove that they know the secret by an HMAC over both nonces and the rank, without sending it. What follows on
// the connection is neither encrypted nor signed.
//
//	follower: magic, rank (4 bytes), nonce
//	leader:   nonce, proof
//	follower: proof, hello frame with its node's name
//	leader:   hello frame with its node's name, once all have joined

func proof(secret []byte, who string, rank uint32, follower, leader []byte) []byte {
	mac := hmac.New(sha256.New, secret)
	fmt.Fprintf(mac, "%s %d ", who, rank)
	mac.Write(follower)
	mac.Write(leader)
	return mac.Sum(nil)
}

func (g *Group) introduce(p *peer, secret []byte) error {
	p.conn.SetDeadline(time.Now().Add(handshakeTimeout))
	mine := make([]byte, nonceSize)
	rand.Read(mine)
	hello := binary.LittleEndian.AppendUint32([]byte(magic), uint32(g.Rank))
	if _, err := p.conn.Write(append(hello, mine...)); err != nil {
		return err
	}
	var answer [nonceSize + sha256.Size]byte
	if _, err := io.ReadFull(p.r, answer[:]); err != nil {
		return fmt.Errorf("rank 0 did not identify itself: %w", err)
	}
	theirs := answer[:nonceSize]
	if !hmac.Equal(answer[nonceSize:], proof(secret, "leader", uint32(g.Rank), mine, theirs)) {
		return errors.New("who answers there is not rank 0 of this job")
	}
	if _, err := p.conn.Write(proof(secret, "follower", uint32(g.Rank), mine, theirs)); err != nil {
		return err
	}
	return p.send(frameHello, []byte(g.Node[:min(len(g.Node), maxText)]))
}

func (g *Group) admit(conn net.Conn, secret []byte) (*peer, error) {
	conn.SetDeadline(time.Now().Add(handshakeTimeout))
	p := newPeer(0, conn)
	var hello [len(magic) + 4 + nonceSize]byte
	if _, err := io.ReadFull(p.r, hello[:]); err != nil {
		return nil, err
	}
	rank := binary.LittleEndian.Uint32(hello[len(magic):])
	if string(hello[:len(magic)]) != magic || rank < 1 || int64(rank) >= int64(g.Size) {
		return nil, errors.New("not a rank of this job")
	}
	p.rank = int(rank)
	mine, theirs := make([]byte, nonceSize), hello[len(magic)+4:]
	rand.Read(mine)
	if _, err := conn.Write(append(mine, proof(secret, "leader", rank, theirs, mine)...)); err != nil {
		return nil, err
	}
	var answer [sha256.Size]byte
	if _, err := io.ReadFull(p.r, answer[:]); err != nil {
		return nil, err
	}
	if !hmac.Equal(answer[:], proof(secret, "follower", rank, theirs, mine)) {
		return nil, errors.New("does not know the secret")
	}
	name, err := p.receive(frameHello, maxText)
	if err != nil {
		return nil, err
	}
	p.node = printable(string(name))
	return p, nil
}
