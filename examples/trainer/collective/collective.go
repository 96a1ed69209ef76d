// Package collective lets the ranks of one job add up vectors and wait for each other.
//
// The ranks form a star: rank 0 listens, all others connect to it. Sums are made by rank 0 in the order of the ranks, so a result is the
// same bytes on every rank and in every run. A rank that fails, dies or falls silent ends every other rank's call with an
// error, within Config.Timeout at the latest.
package collective

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"strings"
	"sync"
	"time"
	"unicode"
)

// Config says who a rank is and how it finds the others.
type Config struct {
	Rank, Size int    // Rank is 0 to Size-1
	Node       string // name of the rank's machine, for messages to people
	// File is where rank 0 leaves its address and a secret, and the others read them: a path that all ranks share, in a
	// directory that only their user may write. Rank 0 removes it once all have joined.
	File string
	// Hosts are the names or addresses under which the others may reach rank 0, tried in turn. Used by rank 0.
	Hosts []string
	Port  int // TCP port of rank 0, or 0 for any free one
	// Timeout is the longest that a rank waits for the others: to join, and in each call. It includes what they
	// compute between two calls.
	Timeout time.Duration
}

// Group is a rank's end of the star. Its methods are called by one goroutine, in the same order on every rank.
type Group struct {
	Config
	peers []*peer // rank 0: all others in their order; others: rank 0
}

// AbortError is what the other ranks get when one ends with an error.
type AbortError struct {
	Reason string // from the rank that failed
}

func (e *AbortError) Error() string { return e.Reason }

// peer is the connection to one other rank.
type peer struct {
	rank int
	node string
	conn net.Conn
	r    *bufio.Reader
	buf  []byte // the last payload received
}

func (p *peer) String() string { return fmt.Sprintf("rank %d on %s", p.rank, p.node) }

// A frame is its kind (1 byte), the payload's length (4 bytes, little endian) and the payload.
const (
	frameHello   = 'h' // node name of the rank that joins, or of rank 0
	frameSum     = 's' // float32 values, little endian
	frameAgree   = 'a' // text
	frameBarrier = 'b' // nothing
	frameAbort   = 'x' // text: why the sender ends

	maxText = 4096 // bytes of a text
)

func newPeer(rank int, conn net.Conn) *peer {
	return &peer{rank: rank, node: "unknown node", conn: conn, r: bufio.NewReaderSize(conn, 64<<10)}
}

func (p *peer) send(kind byte, payload []byte) error {
	head := binary.LittleEndian.AppendUint32([]byte{kind}, uint32(len(payload)))
	parts := net.Buffers{head, payload}
	if _, err := parts.WriteTo(p.conn); err != nil {
		// The other may have said why it ends before it closed.
		var abort *AbortError
		if _, err := p.receive(kind, 0); errors.As(err, &abort) {
			return abort
		}
		return p.gone(err)
	}
	return nil
}

// receive reads a frame of that kind with at most limit bytes. The result is valid until the next call.
func (p *peer) receive(kind byte, limit int) ([]byte, error) {
	var head [5]byte
	if _, err := io.ReadFull(p.r, head[:]); err != nil {
		return nil, p.gone(err)
	}
	n := int64(binary.LittleEndian.Uint32(head[1:]))
	if head[0] == frameAbort {
		text := make([]byte, min(n, maxText))
		if _, err := io.ReadFull(p.r, text); err != nil {
			return nil, p.gone(err)
		}
		return nil, &AbortError{printable(string(text))}
	}
	if head[0] != kind || n > int64(limit) {
		return nil, fmt.Errorf("%s sent %q with %d bytes where %q with at most %d was expected: do all ranks run the same program?", p, head[0], n, kind, limit)
	}
	if int64(cap(p.buf)) < n {
		p.buf = make([]byte, n)
	}
	p.buf = p.buf[:n]
	if _, err := io.ReadFull(p.r, p.buf); err != nil {
		return nil, p.gone(err)
	}
	return p.buf, nil
}

// gone says in words what a network error means for the reader of a job's output.
func (p *peer) gone(err error) error {
	var timeout net.Error
	switch {
	case errors.As(err, &timeout) && timeout.Timeout():
		return fmt.Errorf("%s did not answer in time: %w", p, err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%s is gone: it closed the connection", p)
	}
	return fmt.Errorf("%s is gone: %w", p, err)
}

func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(s, "?"))
}

// each calls f for every peer at once, with the connections bounded by ctx and Timeout, and returns the first error. After an
// error the connections are of use to Close only.
func (g *Group) each(ctx context.Context, f func(*peer) error) error {
	deadline := time.Now().Add(g.Timeout)
	for _, p := range g.peers {
		p.conn.SetDeadline(deadline)
	}
	interrupt := func() {
		for _, p := range g.peers {
			p.conn.SetDeadline(time.Unix(1, 0))
		}
	}
	stop := context.AfterFunc(ctx, interrupt)
	defer stop()
	var once sync.Once
	var first error
	var wg sync.WaitGroup
	for _, p := range g.peers {
		wg.Go(func() {
			if err := f(p); err != nil {
				once.Do(func() {
					first = err
					interrupt()
				})
			}
		})
	}
	wg.Wait()
	if first != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return first
}

// gather brings every rank's payload of at most limit bytes to rank 0 and returns what combine makes of them there to all.
// combine gets the others' payloads in the order of the ranks, and rank 0's own is payload.
func (g *Group) gather(ctx context.Context, kind byte, payload []byte, limit int, combine func(others [][]byte) ([]byte, error)) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	if g.Rank > 0 {
		var result []byte
		err := g.each(ctx, func(p *peer) (err error) {
			if err = p.send(kind, payload); err == nil {
				result, err = p.receive(kind, limit)
			}
			return err
		})
		return result, err
	}
	others := make([][]byte, len(g.peers))
	err := g.each(ctx, func(p *peer) (err error) {
		others[p.rank-1], err = p.receive(kind, limit)
		return err
	})
	if err != nil {
		return nil, err
	}
	result, err := combine(others)
	if err != nil {
		return nil, err
	}
	return result, g.each(ctx, func(p *peer) error { return p.send(kind, result) })
}

// Sum replaces values by the sum over all ranks, which all give equally many.
func (g *Group) Sum(ctx context.Context, values []float32) error {
	size := 4 * len(values)
	if int64(size) > math.MaxUint32 {
		return fmt.Errorf("sum of %d values: too many for one message", len(values))
	}
	payload := make([]byte, 0, size)
	if g.Rank > 0 {
		payload = appendFloats(payload, values)
	}
	result, err := g.gather(ctx, frameSum, payload, size, func(others [][]byte) ([]byte, error) {
		for i, o := range others {
			if len(o) != size {
				return nil, fmt.Errorf("rank %d gave %d values to a sum of %d", i+1, len(o)/4, len(values))
			}
			for i := range values {
				values[i] += math.Float32frombits(binary.LittleEndian.Uint32(o[4*i:]))
			}
		}
		return appendFloats(payload, values), nil
	})
	if err != nil {
		return err
	}
	if len(result) != size {
		return fmt.Errorf("rank 0 returned %d values for a sum of %d", len(result)/4, len(values))
	}
	if g.Rank > 0 {
		for i := range values {
			values[i] = math.Float32frombits(binary.LittleEndian.Uint32(result[4*i:]))
		}
	}
	return nil
}

func appendFloats(b []byte, values []float32) []byte {
	for _, v := range values {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	}
	return b
}

// Agree proves that every rank gives the same value for what, a text of at most 4 KiB.
func (g *Group) Agree(ctx context.Context, what, value string) error {
	_, err := g.gather(ctx, frameAgree, []byte(value), maxText, func(others [][]byte) ([]byte, error) {
		for i, o := range others {
			if !bytes.Equal(o, []byte(value)) {
				return nil, fmt.Errorf("%s of %s is %s, of rank 0 %s", what, g.peers[i], printable(string(o)), value)
			}
		}
		return nil, nil
	})
	return err
}

// Barrier returns when every rank has called it.
func (g *Group) Barrier(ctx context.Context) error {
	_, err := g.gather(ctx, frameBarrier, nil, 0, func([][]byte) ([]byte, error) { return nil, nil })
	return err
}

// Close ends the connections. With a cause it tells the other ranks, whose next call returns it as an AbortError; that takes a second
// at most.
func (g *Group) Close(cause error) {
	var wg sync.WaitGroup
	for _, p := range g.peers {
		wg.Go(func() {
			defer p.conn.Close()
			if cause == nil {
				return
			}
			p.conn.SetDeadline(time.Now().Add(time.Second))
			reason := cause.Error()
			var abort *AbortError
			if !errors.As(cause, &abort) { // else it names its rank already
				reason = fmt.Sprintf("rank %d on %s: %s", g.Rank, g.Node, reason)
			} else {
				reason = abort.Reason
			}
			if p.send(frameAbort, []byte(reason[:min(len(reason), maxText)])) != nil {
				return
			}
			// Closing with unread data would reset the connection and might destroy the message on its way.
			if tcp, ok := p.conn.(*net.TCPConn); ok && tcp.CloseWrite() == nil {
				io.Copy(io.Discard, p.r)
			}
		})
	}
	wg.Wait()
}
