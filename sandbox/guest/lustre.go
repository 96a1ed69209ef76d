package guest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/lustre/probe"
)

// lustreRequest is the line that mount.lustre sends together with the open /dev/fuse, or a shutdown without one.
type lustreRequest struct {
	Source   string `json:"source"` // for example "10.129.0.2@tcp:/lustre"
	ReadOnly bool   `json:"read_only"`
	Flush    bool   `json:"flush,omitempty"` // write out what the VM has written
}

// lustreReply is the line that answers it.
type lustreReply struct {
	Error string `json:"error"` // the name of an errno, or ""
}

// maxLustreLine bounds both lines, in bytes.
const maxLustreLine = 4096

// mountLustre is /sbin/mount.lustre SOURCE DIR [-sfnv] [-o OPTIONS]. Its exit codes and words are those of Lustre's own.
func mountLustre(socket string, args []string, stderr io.Writer) int {
	var positional []string
	options := ""
	for i := 0; i < len(args); i++ {
		switch {
		case (args[i] == "-o" || args[i] == "-t" || args[i] == "-N") && i+1 < len(args):
			i++
			if args[i-1] == "-o" {
				options = args[i]
			}
		case strings.HasPrefix(args[i], "-o"):
			options = args[i][2:]
		case strings.HasPrefix(args[i], "-"):
		default:
			positional = append(positional, args[i])
		}
	}
	if len(positional) != 2 {
		fmt.Fprintln(stderr, "usage: mount.lustre SOURCE DIR [-o OPTIONS]")
		return int(syscall.EINVAL)
	}
	source, dir := positional[0], positional[1]
	flags, err := mountFlags(options)
	if err == nil {
		err = mountFUSE(socket, source, dir, flags)
	}
	if err == nil {
		return 0
	}
	errno := syscall.EIO
	errors.As(err, &errno)
	fmt.Fprintf(stderr, "mount.lustre: mount %s at %s failed: %s\n", source, dir, errnoText(errno))
	switch errno {
	case syscall.EIO:
		fmt.Fprintln(stderr, "Is the MGS running?")
	case syscall.ENOENT:
		fmt.Fprintln(stderr, "Is the MGS specification correct?\nIs the filesystem name correct?\nIf upgrading, is the copied client log valid? (see upgrade docs)")
	}
	if !errors.Is(err, errno) || err.Error() != errno.Error() {
		fmt.Fprintf(stderr, "mount.lustre: %v\n", err)
	}
	return int(errno)
}

// errnoText is strerror's text, which Go writes in lower case.
func errnoText(e syscall.Errno) string {
	text := e.Error()
	return strings.ToUpper(text[:1]) + text[1:]
}

// mountFlags turns mount options into flags. Options that only the real Lustre heeds (flock, user_xattr, …)
// and those of mount(8) itself (_netdev, x-…) do nothing.
func mountFlags(options string) (flags uintptr, err error) {
	for _, o := range strings.Split(options, ",") {
		switch o {
		case "ro":
			flags |= unix.MS_RDONLY
		case "rw":
			flags &^= unix.MS_RDONLY
		case "nosuid":
			flags |= unix.MS_NOSUID
		case "nodev":
			flags |= unix.MS_NODEV
		case "noexec":
			flags |= unix.MS_NOEXEC
		case "noatime":
			flags |= unix.MS_NOATIME
		case "relatime":
			flags |= unix.MS_RELATIME
		case "remount":
			return 0, syscall.EINVAL
		}
	}
	return flags, nil
}

func mountFUSE(socket, source, dir string, flags uintptr) error {
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return syscall.ENOTDIR
	}
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("/dev/fuse: %w", err)
	}
	defer unix.Close(fd)
	data := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions", fd)
	if err := unix.Mount(source, dir, "fuse.lustre", flags, data); err != nil {
		return err
	}
	if err := askLustre(socket, lustreRequest{Source: source, ReadOnly: flags&unix.MS_RDONLY != 0}, mountWait, fd); err != nil {
		if undo := unix.Unmount(dir, unix.MNT_DETACH); undo != nil {
			return errors.Join(err, fmt.Errorf("taking the mount away again: %w", undo))
		}
		return err
	}
	return nil
}

// mountWait bounds one mount.
const mountWait = 30 * time.Second

// flushWait is how long a shutdown waits for its file systems to write out. One that hangs would hold it for ever.
const flushWait = time.Second

// flushLustre ends what still runs in the VM and writes out what it has written to Lustre, as a shutdown does. Without a
// mount it does nothing.
func flushLustre(socket string) error {
	mounts, err := probe.Mounts()
	if err != nil || !slices.ContainsFunc(mounts, func(m probe.Mount) bool { return m.Type == "fuse.lustre" }) {
		return err
	}
	if err := unix.Kill(-1, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) { // all but this process and PID 1
		return err
	}
	return askLustre(socket, lustreRequest{Flush: true}, flushWait)
}

// askLustre sends a request, with descriptors, and waits for its end.
func askLustre(socket string, req lustreRequest, wait time.Duration, fds ...int) error {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return fmt.Errorf("%w: %w", syscall.EIO, err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(wait)); err != nil {
		return err
	}
	line, err := json.Marshal(req)
	if err != nil {
		return err
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if _, _, err := conn.WriteMsgUnix(append(line, '\n'), rights, nil); err != nil {
		return fmt.Errorf("%w: %w", syscall.EIO, err)
	}
	var reply lustreReply
	if err := json.NewDecoder(io.LimitReader(conn, maxLustreLine)).Decode(&reply); err != nil {
		return fmt.Errorf("%w: %w", syscall.EIO, err)
	}
	if reply.Error == "" {
		return nil
	}
	return errnoByName(reply.Error)
}

func errnoByName(name string) syscall.Errno {
	for e := syscall.Errno(1); e < 134; e++ {
		if unix.ErrnoName(e) == name {
			return e
		}
	}
	return syscall.EIO
}

// LustreServer is what stands behind the VMs' mount.lustre. peer is the process that asks, as the server's own pid
// namespace numbers it. An error that is (or wraps) a syscall.Errno reaches the VM as such, any other as EIO. Calls come at
// the same time.
type LustreServer interface {
	// Mount serves a source, as the VM named it, on an open FUSE connection, which is Mount's to close, also when it
	// returns an error. It must return once the connection is being served.
	Mount(ctx context.Context, peer int, source string, readOnly bool, fuse *os.File) error
	// Flush makes safe what the peer's VM has written.
	Flush(ctx context.Context, peer int) error
}

// ServeLustreSocket answers the mount.lustre of all VMs until ctx ends.
func ServeLustreSocket(ctx context.Context, l *net.UnixListener, server LustreServer) error {
	defer context.AfterFunc(ctx, func() { l.Close() })()
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		go func() {
			defer conn.Close()
			reply := lustreReply{}
			if err := serveLustreConn(ctx, conn, server); err != nil {
				errno := syscall.EIO
				errors.As(err, &errno)
				reply.Error = unix.ErrnoName(errno)
			}
			line, err := json.Marshal(reply)
			if err != nil {
				return
			}
			_, _ = conn.Write(append(line, '\n')) // a helper that died does not want it
		}()
	}
}

func serveLustreConn(ctx context.Context, conn *net.UnixConn, server LustreServer) error {
	ctx, cancel := context.WithTimeout(ctx, mountWait)
	defer cancel()
	if err := conn.SetDeadline(time.Now().Add(mountWait)); err != nil {
		return err
	}
	peer, err := peerOf(conn)
	if err != nil {
		return err
	}
	buffer, oob := make([]byte, maxLustreLine), make([]byte, unix.CmsgSpace(4))
	n, oobn, flags, _, err := conn.ReadMsgUnix(buffer, oob)
	if err != nil {
		return err
	}
	var fuse *os.File
	if oobn > 0 {
		if fuse, err = receivedFile(oob[:oobn]); err != nil {
			return err
		}
	}
	if flags&unix.MSG_CTRUNC != 0 { // more descriptors than one
		err = syscall.EINVAL
	}
	var req lustreRequest
	if err == nil {
		var line []byte
		line, err = bufio.NewReader(io.MultiReader(strings.NewReader(string(buffer[:n])), io.LimitReader(conn, maxLustreLine))).ReadBytes('\n')
		if err == nil {
			err = json.Unmarshal(line, &req)
		}
		if err != nil {
			err = fmt.Errorf("%w: %w", syscall.EINVAL, err)
		}
	}
	switch {
	case err == nil && fuse != nil && !req.Flush:
		return server.Mount(ctx, peer, req.Source, req.ReadOnly, fuse)
	case err == nil && fuse == nil && req.Flush:
		return server.Flush(ctx, peer)
	case err == nil:
		err = syscall.EINVAL
	}
	if fuse != nil {
		fuse.Close()
	}
	return err
}

// peerOf returns the process at the other end.
func peerOf(conn *net.UnixConn) (int, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	controlErr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(controlErr, err); err != nil {
		return 0, err
	}
	return int(cred.Pid), nil
}

func receivedFile(oob []byte) (*os.File, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(messages) != 1 {
		return nil, syscall.EINVAL
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return nil, syscall.EINVAL
	}
	for _, fd := range fds[1:] {
		unix.Close(fd)
	}
	unix.CloseOnExec(fds[0])
	return os.NewFile(uintptr(fds[0]), "/dev/fuse"), nil
}
