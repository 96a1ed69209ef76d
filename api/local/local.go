// Package local speaks the api over a Unix socket: one JSON line each way a
// call, with the caller's identity taken from the kernel (SO_PEERCRED). It
// needs neither net/http nor TLS, so that hooks start as fast as an empty program.
package local

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/sluicehpc/sluice/api"
)

// probeTimeout bounds how long Listen looks whether another daemon is there.
const probeTimeout = 50 * time.Millisecond

// ErrUnreachable is wrapped by Call when no daemon answers on the socket.
var ErrUnreachable = errors.New("daemon not reachable")

// Call sends one request and decodes the answer's body into out (unless nil).
// A refusal by the daemon is an *api.Error; a daemon that is away, or goes
// away before it answered, is ErrUnreachable. ctx bounds the wait for the answer.
func Call(ctx context.Context, socket, op string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return fmt.Errorf("encode %s: %w", op, err)
	}
	// No deadline of its own: connecting to a Unix socket does not wait. A full
	// queue of a daemon that does not accept is an error at once (EAGAIN), and
	// a timer would only blame the daemon when this machine is slow.
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnreachable, err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()

	line, err := json.Marshal(api.Request{Version: api.Version, Op: op, Body: body})
	if err != nil {
		return fmt.Errorf("encode %s: %w", op, err)
	}
	_, werr := conn.Write(append(line, '\n'))
	// The daemon may have refused and closed before it read everything, so the
	// answer is read even after a failed write.
	reply, rerr := readLine(conn)
	if ctx.Err() != nil {
		return fmt.Errorf("%s on %s: %w", op, socket, ctx.Err())
	}
	if rerr != nil {
		return fmt.Errorf("%w: %s on %s: %w", ErrUnreachable, op, socket, errors.Join(werr, rerr))
	}
	var resp api.Response
	if err := json.Unmarshal(reply, &resp); err != nil {
		return fmt.Errorf("answer to %s on %s: %w", op, socket, err)
	}
	if resp.Error != nil {
		return resp.Error
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(resp.Body, out); err != nil {
		return fmt.Errorf("answer to %s on %s: %w", op, socket, err)
	}
	return nil
}

// Peer is who the kernel says is calling.
type Peer struct {
	UID, GID uint32
	PID      int32
}

// Handler answers one request. ctx ends when the caller hangs up.
type Handler func(ctx context.Context, peer Peer, req api.Request) (any, error)

// Limits of a server: a hostile local user can hold sockets open, so a request
// must arrive in time and the number of connections is bounded per user.
const (
	readTimeout     = 5 * time.Second
	connectionsUser = 64
	connectionsRoot = 4096 // root and SlurmUser call for all jobs
)

// Listen makes the socket at path, replacing a dead one, with the given mode.
func Listen(path string, mode os.FileMode) (*net.UnixListener, error) {
	if conn, err := net.DialTimeout("unix", path, probeTimeout); err == nil {
		conn.Close()
		return nil, fmt.Errorf("listen on %s: another daemon answers there", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	if err := os.Chmod(path, mode); err != nil {
		l.Close()
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return l, nil
}

// Serve answers callers until ctx ends or l fails, and returns when the last
// handler has returned. Privileged uids get a larger share of connections.
func Serve(ctx context.Context, l *net.UnixListener, privileged map[uint32]bool, h Handler) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex // guards open
		open  = map[uint32]int{}
		delay time.Duration
	)
	defer wg.Wait()
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
				delay = min(max(2*delay, time.Millisecond), time.Second)
				select {
				case <-ctx.Done():
				case <-time.After(delay):
				}
				continue
			}
			return fmt.Errorf("accept on %s: %w", l.Addr(), err)
		}
		delay = 0
		peer, err := peerOf(conn)
		if err != nil {
			conn.Close()
			continue
		}
		limit := connectionsUser
		if peer.UID == 0 || privileged[peer.UID] {
			limit = connectionsRoot
		}
		mu.Lock()
		full := open[peer.UID] >= limit
		if !full {
			open[peer.UID]++
		}
		mu.Unlock()
		if full {
			conn.Close()
			continue
		}
		wg.Go(func() {
			defer conn.Close()
			serveOne(ctx, conn, peer, h)
			mu.Lock()
			if open[peer.UID]--; open[peer.UID] == 0 {
				delete(open, peer.UID)
			}
			mu.Unlock()
		})
	}
}

func serveOne(ctx context.Context, conn *net.UnixConn, peer Peer, h Handler) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn.SetReadDeadline(time.Now().Add(readTimeout))
	line, err := readLine(conn)
	if err != nil {
		if errors.Is(err, errTooLong) {
			reply(conn, nil, api.Errorf(api.CodeBadRequest, "request is longer than %d bytes", api.MaxMessage))
		}
		return
	}
	conn.SetReadDeadline(time.Time{})
	// A caller that hangs up ends its request.
	go func() {
		var b [1]byte
		conn.Read(b[:])
		cancel()
	}()
	var req api.Request
	if err := json.Unmarshal(line, &req); err != nil {
		reply(conn, nil, api.Errorf(api.CodeBadRequest, "request is not JSON: %v", err))
		return
	}
	if req.Version < api.Version-1 || req.Version > api.Version+1 {
		reply(conn, nil, api.Errorf(api.CodeBadRequest, "request speaks version %d, this daemon %d", req.Version, api.Version))
		return
	}
	out, err := h(ctx, peer, req)
	reply(conn, out, err)
}

func reply(conn *net.UnixConn, out any, err error) {
	resp := api.Response{Version: api.Version}
	if err != nil {
		resp.Error = api.AsError(err)
	} else if resp.Body, err = json.Marshal(out); err != nil {
		resp.Error = api.Errorf(api.CodeFailed, "encode answer: %v", err)
	}
	line, err := json.Marshal(resp)
	if err != nil {
		return
	}
	conn.SetWriteDeadline(time.Now().Add(readTimeout))
	conn.Write(append(line, '\n'))
}

var errTooLong = errors.New("message too long")

func readLine(r io.Reader) ([]byte, error) {
	br := bufio.NewReader(io.LimitReader(r, api.MaxMessage+1))
	line, err := br.ReadBytes('\n')
	if err != nil {
		if len(line) > api.MaxMessage {
			return nil, errTooLong
		}
		if errors.Is(err, io.EOF) {
			return nil, io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return line, nil
}

func peerOf(conn *net.UnixConn) (Peer, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return Peer{}, err
	}
	var cred *syscall.Ucred
	var cerr error
	if err := raw.Control(func(fd uintptr) {
		cred, cerr = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	}); err != nil {
		return Peer{}, err
	}
	if cerr != nil {
		return Peer{}, cerr
	}
	return Peer{UID: cred.Uid, GID: cred.Gid, PID: cred.Pid}, nil
}
