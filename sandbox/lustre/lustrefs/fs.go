package lustrefs

import (
	"crypto/rand"
	"errors"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// fileSystem passes requests on to a directory. A node is an O_PATH descriptor, and names are only
// ever used one at a time relative to such a descriptor: no symbolic link that another mount puts in
// the way is followed, and files that have lost their name still work. Permissions are the
// kernel's business (mount option default_permissions).
type fileSystem struct {
	fuse.RawFileSystem // answers ENOSYS to what is not here

	dir     string
	procFD  int // /proc/self/fd
	meter   *Meter
	control *control
	ledger  *ledger
	server  *fuse.Server // set by Init

	mu          sync.Mutex // guards everything that follows, and the fields of nodes
	nodes       map[uint64]*node
	byInode     map[inode]uint64
	lastNode    uint64
	handles     map[uint64]*handle
	lastHandle  uint64
	passthrough bool // still worth a try
}

type inode struct{ dev, ino uint64 }

// node is a file that the kernel knows. fd and key do not change.
type node struct {
	fd      int // O_PATH
	key     inode
	lookups uint64 // references that the kernel holds

	backing  int32 // id of the file for passthrough, 0 without
	through  int   // open handles with passthrough: never at the same time as plain ones
	plain    int   // open handles without
	posixFDs map[uint64]int
}

// handle is an open file or directory.
type handle struct {
	fd      int
	node    *node  // nil for a directory
	flags   uint32 // of open(2)
	through bool
	dirMu   sync.Mutex // directories: guards the position of fd
}

const rootID = fuse.FUSE_ROOT_ID

func newFS(dir string, o Options, c *control) (*fileSystem, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	proc, err := unix.Open("/proc/self/fd", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return nil, err
	}
	f := &fileSystem{
		RawFileSystem: fuse.NewDefaultRawFileSystem(),
		dir:           dir,
		procFD:        proc,
		meter:         NewMeter(dir),
		control:       c,
		ledger:        newLedger(rand.Text()),
		nodes:         map[uint64]*node{rootID: {fd: fd, key: keyOf(&st), lookups: 1}},
		byInode:       map[inode]uint64{keyOf(&st): rootID},
		lastNode:      rootID,
		handles:       map[uint64]*handle{},
		passthrough:   o.Passthrough,
	}
	return f, nil
}

func keyOf(st *syscall.Stat_t) inode { return inode{uint64(st.Dev), st.Ino} }

func (f *fileSystem) String() string       { return "lustre" }
func (f *fileSystem) Init(s *fuse.Server)  { f.server = s }
func (f *fileSystem) node(id uint64) *node { f.mu.Lock(); defer f.mu.Unlock(); return f.nodes[id] }
func (f *fileSystem) handle(id uint64) *handle {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.handles[id]
}

// fdOf is the descriptor of a node; -1, which every call refuses with EBADF, when the kernel asks for one that it forgot.
func (f *fileSystem) fdOf(id uint64) int {
	if n := f.node(id); n != nil {
		return n.fd
	}
	return -1
}

// proc is a path that leads to the file of an O_PATH descriptor, also for calls that have no *at form.
func proc(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// reopen opens the file of a descriptor anew, with flags that O_PATH does not have.
func (f *fileSystem) reopen(fd, flags int) (int, error) {
	return unix.Openat(f.procFD, strconv.Itoa(fd), flags|unix.O_CLOEXEC, 0)
}

func status(err error) fuse.Status {
	if err == nil {
		return fuse.OK
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return fuse.Status(errno)
	}
	return fuse.EIO
}

// as runs create with the file system identity of the caller, so that what it makes has the right
// owner and group from the start (a set-group-id directory included). All capabilities stay: whether
// the caller may do it, the kernel has decided with groups that are not known here. It has not for root that is
// squashed: that one has the capabilities of nobody.
func (f *fileSystem) as(h *fuse.InHeader, create func() error) error {
	uid, gid, squashed := h.Uid, h.Gid, false
	if b := f.control.now(); uid == 0 && b.SquashUID != 0 {
		uid, squashed = b.SquashUID, true
		if b.SquashGID != 0 {
			gid = b.SquashGID
		}
	}
	if uid == 0 && gid == 0 {
		return create()
	}
	runtime.LockOSThread()
	var header = unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&header, &caps[0]); err != nil {
		return err
	}
	unix.SetfsgidRetGid(int(gid))
	unix.SetfsuidRetUid(int(uid)) // takes away the effective capabilities over files
	var err error
	if !squashed {
		err = unix.Capset(&header, &caps[0])
	}
	if err == nil {
		err = create()
	}
	unix.SetfsuidRetUid(0) // gives them back
	unix.SetfsgidRetGid(0)
	// A thread whose identity did not come back is not unlocked, and so ends with its goroutine.
	if uid, _ := unix.SetfsuidRetUid(-1); uid == 0 {
		if gid, _ := unix.SetfsgidRetGid(-1); gid == 0 {
			runtime.UnlockOSThread()
		}
	}
	return err
}

// judged runs do, which makes nothing. Only of a squashed root the kernel of its machine has not judged whether it may.
func (f *fileSystem) judged(h *fuse.InHeader, do func() error) error {
	if h.Uid == 0 && f.control.now().SquashUID != 0 {
		return f.as(h, do)
	}
	return do()
}

// enter gives the kernel a reference to the file of fd, which it takes over.
func (f *fileSystem) enter(fd int, out *fuse.EntryOut) (*node, error) {
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	id, known := f.byInode[keyOf(&st)]
	if known {
		unix.Close(fd)
	} else {
		f.lastNode++
		id = f.lastNode
		f.nodes[id] = &node{fd: fd, key: keyOf(&st)}
		f.byInode[keyOf(&st)] = id
	}
	n := f.nodes[id]
	n.lookups++
	out.NodeId = id
	out.Generation = 1 // ids are never used again
	out.Attr.FromStat(&st)
	return n, nil
}

func (f *fileSystem) Lookup(_ <-chan struct{}, h *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	var fd int
	err := f.judged(h, func() (err error) {
		fd, err = unix.Openat(f.fdOf(h.NodeId), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		return err
	})
	if err == nil {
		_, err = f.enter(fd, out)
	}
	return status(err)
}

// made enters what was just made in a directory, with what it has from that.
func (f *fileSystem) made(parent uint64, name string, isDir bool, out *fuse.EntryOut) fuse.Status {
	dir := f.fdOf(parent)
	fd, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return status(err)
	}
	if err := Inherit(dir, fd, isDir); err != nil {
		unix.Close(fd)
		return status(err)
	}
	_, err = f.enter(fd, out)
	return status(err)
}

func (f *fileSystem) Forget(id, count uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.nodes[id]
	if n == nil || id == rootID {
		return
	}
	n.lookups -= min(count, n.lookups)
	if n.lookups > 0 {
		return
	}
	for _, fd := range n.posixFDs {
		unix.Close(fd)
	}
	delete(f.nodes, id)
	delete(f.byInode, n.key)
	unix.Close(n.fd)
}

func (f *fileSystem) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	return f.attr(in.NodeId, out)
}

func (f *fileSystem) attr(id uint64, out *fuse.AttrOut) fuse.Status {
	var st syscall.Stat_t
	if err := syscall.Fstat(f.fdOf(id), &st); err != nil {
		return status(err)
	}
	out.Attr.FromStat(&st)
	return fuse.OK
}

func (f *fileSystem) SetAttr(_ <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	n := f.node(in.NodeId)
	if n == nil {
		return fuse.Status(syscall.ESTALE)
	}
	if err := f.judged(&in.InHeader, func() error { return f.setAttr(n, in) }); err != nil {
		return status(err)
	}
	return f.attr(in.NodeId, out)
}

func (f *fileSystem) setAttr(n *node, in *fuse.SetAttrIn) error {
	uid, setUID := in.GetUID()
	gid, setGID := in.GetGID()
	if setUID || setGID {
		u, g := -1, -1
		if setUID {
			u = int(uid)
		}
		if setGID {
			g = int(gid)
		}
		if err := unix.Fchownat(n.fd, "", u, g, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	if mode, ok := in.GetMode(); ok { // after the owner, whose change takes set-id bits away
		if err := unix.Chmod(proc(n.fd), mode&07777); err != nil {
			return err
		}
	}
	if size, ok := in.GetSize(); ok {
		if err := unix.Truncate(proc(n.fd), int64(size)); err != nil {
			return err
		}
		f.ledger.resized(n.key, int64(size))
	}
	atime, setA := in.GetATime()
	mtime, setM := in.GetMTime()
	if !setA && !setM {
		return nil
	}
	ts := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_OMIT}}
	var err error
	if setA {
		ts[0], err = unix.TimeToTimespec(atime)
	}
	if setM && err == nil {
		ts[1], err = unix.TimeToTimespec(mtime)
	}
	if err == nil {
		err = unix.UtimesNanoAt(unix.AT_FDCWD, proc(n.fd), ts, 0)
	}
	return err
}

func (f *fileSystem) Mknod(_ <-chan struct{}, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	switch in.Mode & syscall.S_IFMT {
	case syscall.S_IFREG, syscall.S_IFIFO, syscall.S_IFSOCK:
	default:
		return fuse.EPERM // a device node would be the host's device
	}
	err := f.as(&in.InHeader, func() error { return unix.Mknodat(f.fdOf(in.NodeId), name, in.Mode, 0) })
	if err != nil {
		return status(err)
	}
	s := f.made(in.NodeId, name, false, out)
	if s.Ok() && in.Mode&syscall.S_IFMT == syscall.S_IFREG {
		s = status(setAttr(f.fdOf(out.NodeId), layoutKept, pendingLayout))
	}
	return s
}

func (f *fileSystem) Mkdir(_ <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	err := f.as(&in.InHeader, func() error { return unix.Mkdirat(f.fdOf(in.NodeId), name, in.Mode) })
	if err != nil {
		return status(err)
	}
	return f.made(in.NodeId, name, true, out)
}

func (f *fileSystem) Symlink(_ <-chan struct{}, h *fuse.InHeader, target, name string, out *fuse.EntryOut) fuse.Status {
	err := f.as(h, func() error { return unix.Symlinkat(target, f.fdOf(h.NodeId), name) })
	if err != nil {
		return status(err)
	}
	return f.made(h.NodeId, name, false, out)
}

func (f *fileSystem) Link(_ <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	file, dir := f.fdOf(in.Oldnodeid), f.fdOf(in.NodeId)
	leaves, err := apart(file, dir, f.control.now().EXDEV)
	if err == nil && leaves {
		err = unix.EXDEV
	}
	if err == nil {
		// By its path in /proc: an empty path would need the capability that a squashed root does not have.
		err = f.judged(&in.InHeader, func() error { return unix.Linkat(unix.AT_FDCWD, proc(file), dir, name, unix.AT_SYMLINK_FOLLOW) })
	}
	var fd int
	if err == nil {
		fd, err = unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	}
	if err == nil {
		_, err = f.enter(fd, out)
	}
	return status(err)
}

func (f *fileSystem) Unlink(_ <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return status(f.judged(h, func() error { return unix.Unlinkat(f.fdOf(h.NodeId), name, 0) }))
}

func (f *fileSystem) Rmdir(_ <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	return status(f.judged(h, func() error { return unix.Unlinkat(f.fdOf(h.NodeId), name, unix.AT_REMOVEDIR) }))
}

func (f *fileSystem) Rename(_ <-chan struct{}, in *fuse.RenameIn, from, to string) fuse.Status {
	old, dir := f.fdOf(in.NodeId), f.fdOf(in.Newdir)
	if in.NodeId != in.Newdir {
		file, err := unix.Openat(old, from, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return status(err)
		}
		leaves, err := apart(file, dir, f.control.now().EXDEV)
		unix.Close(file)
		if err != nil {
			return status(err)
		}
		if leaves {
			return fuse.Status(unix.EXDEV)
		}
	}
	return status(f.judged(&in.InHeader, func() error { return unix.Renameat2(old, from, dir, to, uint(in.Flags)) }))
}

func (f *fileSystem) Readlink(_ <-chan struct{}, h *fuse.InHeader) ([]byte, fuse.Status) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(f.fdOf(h.NodeId), "", buf)
	if err != nil {
		return nil, status(err)
	}
	return buf[:n], fuse.OK
}

func (f *fileSystem) StatFs(_ <-chan struct{}, h *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	var st syscall.Statfs_t
	if err := syscall.Fstatfs(f.fdOf(rootID), &st); err != nil {
		return status(err)
	}
	out.FromStatfsT(&st)
	b := f.control.now()
	if b.ENOSPC {
		out.Bfree, out.Bavail = 0, 0
	}
	if limit := b.Capacity; limit > 0 {
		out.Blocks = uint64(limit) / uint64(st.Bsize)
		out.Bfree = min(out.Bfree, uint64(f.meter.Free(limit))/uint64(st.Bsize))
		out.Bavail = min(out.Bavail, out.Bfree)
	}
	return fuse.OK
}

// Extended attributes: Lustre users have the user namespace, and its tools theirs; the others would be the host's.

func userAttr(name string) bool { return strings.HasPrefix(name, "user.") }

func (f *fileSystem) GetXAttr(_ <-chan struct{}, h *fuse.InHeader, name string, dest []byte) (uint32, fuse.Status) {
	fd := f.fdOf(h.NodeId)
	if value, ok, err := f.toolAttr(fd, name); ok {
		if err == nil && len(dest) > 0 && len(value) > len(dest) {
			err = unix.ERANGE
		}
		copy(dest, value)
		return uint32(len(value)), status(err)
	}
	if !userAttr(name) {
		return 0, fuse.ENODATA
	}
	var n int
	err := f.judged(h, func() (err error) { n, err = unix.Getxattr(proc(fd), name, dest); return err })
	return uint32(max(n, 0)), status(err)
}

func (f *fileSystem) ListXAttr(_ <-chan struct{}, h *fuse.InHeader, dest []byte) (uint32, fuse.Status) {
	all := make([]byte, 64<<10) // the kernel's limit for a list
	n, err := unix.Listxattr(proc(f.fdOf(h.NodeId)), all)
	if err != nil {
		return 0, status(err)
	}
	var list []byte
	for name := range strings.SplitSeq(string(all[:n]), "\x00") {
		if userAttr(name) {
			list = append(append(list, name...), 0)
		}
	}
	if len(dest) == 0 {
		return uint32(len(list)), fuse.OK
	}
	if len(list) > len(dest) {
		return uint32(len(list)), fuse.ERANGE
	}
	return uint32(copy(dest, list)), fuse.OK
}

func (f *fileSystem) SetXAttr(_ <-chan struct{}, in *fuse.SetXAttrIn, name string, data []byte) fuse.Status {
	fd := f.fdOf(in.NodeId)
	root := in.Uid == 0 && f.control.now().SquashUID == 0
	if ok, err := f.setToolAttr(fd, name, data, root); ok {
		return status(err)
	}
	if !userAttr(name) {
		return fuse.Status(syscall.EOPNOTSUPP)
	}
	return status(f.judged(&in.InHeader, func() error { return unix.Setxattr(proc(fd), name, data, int(in.Flags)) }))
}

func (f *fileSystem) RemoveXAttr(_ <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	fd := f.fdOf(h.NodeId)
	if name == LayoutAttr { // of a directory: a file keeps its own
		var st syscall.Stat_t
		if err := syscall.Fstat(fd, &st); err != nil {
			return status(err)
		}
		if st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
			return fuse.EPERM
		}
		return status(unix.Removexattr(proc(fd), layoutKept))
	}
	if !userAttr(name) {
		return fuse.Status(syscall.EOPNOTSUPP)
	}
	return status(f.judged(h, func() error { return unix.Removexattr(proc(fd), name) }))
}
