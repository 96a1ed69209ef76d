package guest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// mounter is a LustreServer for the tests.
type mounter func(source string, readOnly bool, fuse *os.File) error

func (m mounter) Mount(_ context.Context, peer int, source string, readOnly bool, fuse *os.File) error {
	if peer != os.Getpid() {
		fuse.Close()
		return fmt.Errorf("the peer is %d, want %d", peer, os.Getpid())
	}
	return m(source, readOnly, fuse)
}

func (m mounter) Flush(_ context.Context, peer int) error {
	if peer != os.Getpid() {
		return fmt.Errorf("the peer is %d, want %d", peer, os.Getpid())
	}
	return syscall.EBUSY
}

// lustreSocket serves mount.lustre with mount.
func lustreSocket(t *testing.T, mount mounter) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- ServeLustreSocket(ctx, l, mount) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return socket
}

func TestAskLustre(t *testing.T) {
	socket := lustreSocket(t, func(source string, readOnly bool, fuse *os.File) error {
		defer fuse.Close()
		switch source {
		case "nowhere@tcp:/fs":
			return fmt.Errorf("no such server: %w", syscall.EIO)
		case "10.129.0.2@tcp:/nope":
			return syscall.ENOENT
		case "odd@tcp:/fs":
			return errors.New("something else")
		}
		_, err := fmt.Fprintf(fuse, "%s %v", source, readOnly)
		return err
	})
	for _, tc := range []struct {
		source string
		want   error
	}{
		{"10.129.0.2@tcp:/fs", nil},
		{"nowhere@tcp:/fs", syscall.EIO},
		{"10.129.0.2@tcp:/nope", syscall.ENOENT},
		{"odd@tcp:/fs", syscall.EIO},
	} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := askLustre(socket, lustreRequest{Source: tc.source, ReadOnly: true}, time.Minute, int(w.Fd())); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.source, err, tc.want)
		}
		w.Close()
		got, err := io.ReadAll(r) // ends only when the other side has closed its copy
		if err != nil {
			t.Fatal(err)
		}
		if want := tc.source + " true"; tc.want == nil && string(got) != want {
			t.Errorf("the descriptor got %q, want %q", got, want)
		}
		r.Close()
	}
	if err := askLustre(socket, lustreRequest{Flush: true}, time.Minute); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("flush: %v, want the server's EBUSY", err)
	}
	if err := askLustre("/does/not/exist", lustreRequest{Source: "x"}, time.Minute, 0); !errors.Is(err, syscall.EIO) {
		t.Errorf("without a sandbox: %v, want EIO", err)
	}
}

func TestLustreSocketRefusesNonsense(t *testing.T) {
	socket := lustreSocket(t, func(source string, _ bool, fuse *os.File) error {
		fuse.Close()
		t.Errorf("mount was called for %q", source)
		return nil
	})
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	fd := int(null.Fd())
	for _, tc := range []struct {
		name, text string
		fds        []int
	}{
		{"no descriptor", `{"source":"x"}` + "\n", nil},
		{"flush with a descriptor", `{"flush":true}` + "\n", []int{fd}},
		{"three descriptors", `{"source":"x"}` + "\n", []int{fd, fd, fd}},
		{"no JSON", "mount it\n", []int{fd}},
		{"no end", strings.Repeat("x", 3*maxLustreLine), []int{fd}},
	} {
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		var rights []byte
		if len(tc.fds) > 0 {
			rights = unix.UnixRights(tc.fds...)
		}
		if _, _, err := conn.WriteMsgUnix([]byte(tc.text), rights, nil); err != nil {
			t.Fatal(err)
		}
		if err := conn.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		line, err := bufio.NewReader(conn).ReadBytes('\n')
		var reply lustreReply
		if err == nil {
			err = json.Unmarshal(line, &reply)
		}
		// An unread rest may cut the answer off.
		if (err == nil && reply.Error == "") || (err != nil && !errors.Is(err, syscall.ECONNRESET)) {
			t.Errorf("%s: answered %q, %v, want an error", tc.name, reply.Error, err)
		}
		conn.Close()
	}
}

func TestMountLustreArguments(t *testing.T) {
	for _, tc := range []struct {
		args []string
		code int
		text string
	}{
		{nil, int(syscall.EINVAL), "usage"},
		{[]string{"a@tcp:/fs"}, int(syscall.EINVAL), "usage"},
		{[]string{"a@tcp:/fs", "/does/not/exist", "-o", "rw,flock"}, int(syscall.ENOENT), "mount a@tcp:/fs at /does/not/exist failed: No such file or directory"},
		{[]string{"a@tcp:/fs", "/dev/null", "-v", "-s", "-orw"}, int(syscall.ENOTDIR), "Not a directory"},
		{[]string{"-o", "remount,ro", "a@tcp:/fs", "/"}, int(syscall.EINVAL), "Invalid argument"},
	} {
		var stderr bytes.Buffer
		if code := mountLustre("/does/not/exist", tc.args, &stderr); code != tc.code || !strings.Contains(stderr.String(), tc.text) {
			t.Errorf("%q: exit code %d, %q, want %d and %q", tc.args, code, &stderr, tc.code, tc.text)
		}
	}
}

func TestMountFlags(t *testing.T) {
	got, err := mountFlags("rw,flock,_netdev,x-systemd.automount,nosuid,noatime,ro")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(uintptr(unix.MS_NOSUID|unix.MS_NOATIME|unix.MS_RDONLY), got); diff != "" {
		t.Error(diff)
	}
}
