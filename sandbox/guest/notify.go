package guest

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// notifySocket is the NOTIFY_SOCKET of one unit.
type notifySocket struct {
	path    string
	conn    *net.UnixConn
	flushed chan struct{}
}

// flushMark is a message of the manager to itself: what was sent before it has been read.
const flushMark = "X_GUEST_FLUSH"

// listenNotify calls got for every message, in their order, until close.
func listenNotify(dir, unit string, got func(fields map[string]string)) (*notifySocket, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, unit)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o666); err != nil {
		conn.Close()
		return nil, err
	}
	n := &notifySocket{path: path, conn: conn, flushed: make(chan struct{}, 1)}
	go func() {
		buffer := make([]byte, 64<<10)
		for {
			size, _, err := conn.ReadFromUnix(buffer)
			if err != nil {
				return // closed
			}
			fields := parseNotify(string(buffer[:size]))
			if _, ok := fields[flushMark]; ok {
				select {
				case n.flushed <- struct{}{}:
				default:
				}
				continue
			}
			got(fields)
		}
	}()
	return n, nil
}

func parseNotify(message string) map[string]string {
	fields := map[string]string{}
	for _, line := range strings.Split(message, "\n") {
		if name, value, ok := strings.Cut(line, "="); ok {
			fields[name] = value
		}
	}
	return fields
}

// flush waits until the messages that were sent so far have been handled.
func (n *notifySocket) flush() {
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: n.path, Net: "unixgram"})
	if err != nil {
		return // closed
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(flushMark + "=1")); err != nil {
		return
	}
	select {
	case <-n.flushed:
	case <-time.After(time.Second):
	}
}

func (n *notifySocket) close() {
	n.conn.Close()
	_ = os.Remove(n.path) // closing removes it, if nobody else did
}
