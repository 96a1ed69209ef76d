package lustrefs

import (
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// fileFlags are the flags of an open file that the file below gets too. O_DIRECT is not among
// them: it would ask for an alignment that a request from the kernel need not have.
const fileFlags = syscall.O_ACCMODE | syscall.O_APPEND | syscall.O_SYNC | syscall.O_DSYNC | syscall.O_NOATIME

func (f *fileSystem) Open(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	n := f.node(in.NodeId)
	if n == nil {
		return fuse.Status(syscall.ESTALE)
	}
	var fd int
	err := f.judged(&in.InHeader, func() (err error) {
		fd, err = f.reopen(n.fd, int(in.Flags)&fileFlags|unix.O_NONBLOCK)
		return err
	})
	if err != nil {
		return status(err)
	}
	f.opened(n, fd, in.Flags, out)
	return fuse.OK
}

func (f *fileSystem) Create(_ <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	var fd int
	dir := f.fdOf(in.NodeId)
	err := f.as(&in.InHeader, func() (err error) {
		fd, err = unix.Openat(dir, name,
			int(in.Flags)&fileFlags|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, in.Mode&07777)
		return err
	})
	if err == unix.EEXIST && in.Flags&syscall.O_EXCL == 0 {
		// Another mount made it since the kernel looked. It has to look again, because it has not
		// checked whether the caller may open that file.
		return fuse.Status(syscall.ESTALE)
	}
	if err != nil {
		return status(err)
	}
	err = Inherit(dir, fd, false)
	var path int
	if err == nil {
		path, err = f.reopen(fd, unix.O_PATH)
	}
	var n *node
	if err == nil {
		n, err = f.enter(path, &out.EntryOut)
	}
	if err != nil {
		unix.Close(fd)
		return status(err)
	}
	f.opened(n, fd, in.Flags, &out.OpenOut)
	return fuse.OK
}

// opened makes a handle of fd, which it takes over. Where the kernel can, it reads and writes the
// file itself from then on. All handles of a file must be of one kind at a time.
func (f *fileSystem) opened(n *node, fd int, flags uint32, out *fuse.OpenOut) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n.backing == 0 && n.plain == 0 && f.passthrough {
		id, errno := f.server.RegisterBackingFd(&fuse.BackingMap{Fd: int32(fd)})
		if errno == 0 {
			n.backing = id
		} else {
			f.passthrough = false
		}
	}
	h := &handle{fd: fd, node: n, flags: flags, through: n.backing != 0}
	if h.through {
		n.through++
		out.BackingID = n.backing
		out.OpenFlags |= fuse.FOPEN_PASSTHROUGH
	} else {
		n.plain++
	}
	out.Fh = f.add(h)
}

// add numbers a handle. mu is held.
func (f *fileSystem) add(h *handle) uint64 {
	f.lastHandle++
	f.handles[f.lastHandle] = h
	return f.lastHandle
}

func (f *fileSystem) Release(_ <-chan struct{}, in *fuse.ReleaseIn) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.handles[in.Fh]
	if h == nil {
		return
	}
	delete(f.handles, in.Fh)
	if h.through {
		if h.node.through--; h.node.through == 0 {
			f.server.UnregisterBackingFd(h.node.backing)
			h.node.backing = 0
		}
	} else {
		h.node.plain--
	}
	f.unlockPosix(h.node, in.LockOwner)
	unix.Close(h.fd) // gives its flock up as well
}

func (f *fileSystem) Read(_ <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	h := f.handle(in.Fh)
	if h == nil {
		return nil, fuse.EBADF
	}
	if f.control.now().Watched {
		if err := writtenOut(h.fd, f.ledger.owner); err != nil {
			return nil, status(err)
		}
	}
	var st syscall.Stat_t
	if err := syscall.Fstat(h.fd, &st); err != nil {
		return nil, status(err)
	}
	f.control.counters.readOps.Add(1)
	f.control.counters.readBytes.Add(max(0, min(int64(len(buf)), st.Size-int64(in.Offset))))
	return fuse.ReadResultFd(uintptr(h.fd), int64(in.Offset), len(buf)), fuse.OK
}

func (f *fileSystem) Write(_ <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	h := f.handle(in.Fh)
	if h == nil {
		return 0, fuse.EBADF
	}
	b := f.control.now()
	if err := f.meter.Take(b.Capacity, int64(len(data))); err != nil {
		return 0, status(err)
	}
	var n int
	var err error
	if b.LoseUnsynced {
		n, err = f.ledger.write(h.node.key, h.fd, data, int64(in.Offset), h.flags&syscall.O_APPEND != 0)
		if h.flags&(syscall.O_SYNC|syscall.O_DSYNC) != 0 {
			f.ledger.synced(h.node.key)
		}
	} else {
		n, err = unix.Pwrite(h.fd, data, int64(in.Offset))
	}
	f.control.counters.writeOps.Add(1)
	f.control.counters.writeBytes.Add(int64(max(n, 0)))
	return uint32(max(n, 0)), status(err)
}

func (f *fileSystem) Fallocate(_ <-chan struct{}, in *fuse.FallocateIn) fuse.Status {
	h := f.handle(in.Fh)
	if h == nil {
		return fuse.EBADF
	}
	if in.Mode&(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_COLLAPSE_RANGE) == 0 {
		if err := f.meter.Take(f.control.now().Capacity, int64(in.Length)); err != nil {
			return status(err)
		}
	}
	err := unix.Fallocate(h.fd, in.Mode, int64(in.Offset), int64(in.Length))
	if err == nil && h.node != nil {
		f.ledger.synced(h.node.key) // the servers do it, with what the client had before
	}
	return status(err)
}

func (f *fileSystem) Lseek(_ <-chan struct{}, in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	h := f.handle(in.Fh)
	if h == nil {
		return fuse.EBADF
	}
	n, err := unix.Seek(h.fd, int64(in.Offset), int(in.Whence))
	out.Offset = uint64(n)
	return status(err)
}

func (f *fileSystem) Fsync(_ <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	h := f.handle(in.Fh)
	if h == nil {
		return fuse.EBADF
	}
	err := unix.Fsync(h.fd)
	if err == nil && h.node != nil {
		f.ledger.synced(h.node.key)
	}
	return status(err)
}

func (f *fileSystem) FsyncDir(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	return f.Fsync(cancel, in)
}

// Flush comes with every close(2), which gives up the process's POSIX locks on the file.
func (f *fileSystem) Flush(_ <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	if h := f.handles[in.Fh]; h != nil {
		f.unlockPosix(h.node, in.LockOwner)
	}
	return fuse.OK
}

func (f *fileSystem) OpenDir(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	var fd int
	err := f.judged(&in.InHeader, func() (err error) {
		fd, err = unix.Openat(f.fdOf(in.NodeId), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return status(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	out.Fh = f.add(&handle{fd: fd})
	return fuse.OK
}

func (f *fileSystem) ReadDir(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	h := f.handle(in.Fh)
	if h == nil {
		return fuse.EBADF
	}
	h.dirMu.Lock()
	defer h.dirMu.Unlock()
	if _, err := unix.Seek(h.fd, int64(in.Offset), unix.SEEK_SET); err != nil {
		return status(err)
	}
	buf := make([]byte, max(int(in.Size), 4096))
	n, err := unix.Getdents(h.fd, buf)
	if err != nil {
		return status(err)
	}
	for buf = buf[:n]; len(buf) > 0; {
		var e fuse.DirEntry
		buf = buf[e.Parse(buf):]
		if !out.AddDirEntry(e) {
			break // asked for again from its offset
		}
	}
	return fuse.OK
}

func (f *fileSystem) ReleaseDir(in *fuse.ReleaseIn) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if h := f.handles[in.Fh]; h != nil {
		delete(f.handles, in.Fh)
		unix.Close(h.fd)
	}
}

// Locks hold between all mounts of the directory. flock(2) locks belong to an open file and are
// taken on its descriptor. POSIX locks belong to a process (LockOwner), so that each owner gets a
// descriptor of its own for each file, with open-file-description locks on it.

func (f *fileSystem) GetLk(_ <-chan struct{}, in *fuse.LkIn, out *fuse.LkOut) fuse.Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	fd, err := f.lockFD(in)
	if err != nil {
		return status(err)
	}
	var lk syscall.Flock_t
	in.Lk.ToFlockT(&lk)
	if err := syscall.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &lk); err != nil {
		return status(err)
	}
	out.Lk.FromFlockT(&lk)
	out.Lk.Pid = 0 // it may be on another machine
	return fuse.OK
}

func (f *fileSystem) SetLk(_ <-chan struct{}, in *fuse.LkIn) fuse.Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	fd, err := f.lockFD(in)
	if err != nil {
		return status(err)
	}
	if in.LkFlags&fuse.FUSE_LK_FLOCK != 0 {
		how := map[uint32]int{syscall.F_RDLCK: unix.LOCK_SH, syscall.F_WRLCK: unix.LOCK_EX, syscall.F_UNLCK: unix.LOCK_UN}
		return status(unix.Flock(fd, how[in.Lk.Typ]|unix.LOCK_NB))
	}
	var lk syscall.Flock_t
	in.Lk.ToFlockT(&lk)
	return status(syscall.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &lk))
}

// SetLkw asks again and again: a thread that waits in the kernel could not be called back when the caller is interrupted.
func (f *fileSystem) SetLkw(cancel <-chan struct{}, in *fuse.LkIn) fuse.Status {
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		s := f.SetLk(cancel, in)
		if s != fuse.EAGAIN && s != fuse.Status(syscall.EACCES) {
			return s
		}
		select {
		case <-cancel:
			return fuse.EINTR
		case <-time.After(pause):
		}
	}
}

// lockFD returns the descriptor on which the lock is taken. mu is held.
func (f *fileSystem) lockFD(in *fuse.LkIn) (int, error) {
	h := f.handles[in.Fh]
	if h == nil || h.node == nil {
		return -1, unix.EBADF
	}
	if in.LkFlags&fuse.FUSE_LK_FLOCK != 0 {
		return h.fd, nil
	}
	if fd, ok := h.node.posixFDs[in.Owner]; ok {
		return fd, nil
	}
	fd, err := f.reopen(h.node.fd, unix.O_RDWR|unix.O_NONBLOCK)
	if err != nil {
		return -1, err
	}
	if h.node.posixFDs == nil {
		h.node.posixFDs = map[uint64]int{}
	}
	h.node.posixFDs[in.Owner] = fd
	return fd, nil
}

// unlockPosix gives up the owner's POSIX locks. mu is held.
func (f *fileSystem) unlockPosix(n *node, owner uint64) {
	if fd, ok := n.posixFDs[owner]; ok {
		unix.Close(fd)
		delete(n.posixFDs, owner)
	}
}
