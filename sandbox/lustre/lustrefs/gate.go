package lustrefs

import (
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// control is what orders change about a mount while it is served.
type control struct {
	dead     chan struct{} // closed when the machine or the mount is gone: nothing waits any more
	counters struct {
		readBytes, readOps, writeBytes, writeOps, metadataOps atomic.Int64
	}

	mu        sync.Mutex // guards what follows
	behaviour Behaviour
	changed   chan struct{} // closed when the behaviour changes
}

func newControl() *control {
	return &control{dead: make(chan struct{}), changed: make(chan struct{})}
}

func (c *control) now() Behaviour {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.behaviour
}

func (c *control) set(b Behaviour) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.behaviour = b
	close(c.changed)
	c.changed = make(chan struct{})
}

// pass waits while the mount hangs. An interrupted caller waits on: as with a server that does not answer, a request
// that has been sent is not taken back, and its process is in uninterruptible sleep.
func (c *control) pass() fuse.Status {
	for {
		c.mu.Lock()
		b, changed := c.behaviour, c.changed
		c.mu.Unlock()
		switch {
		case b.EIO:
			return fuse.EIO
		case !b.Hang:
			return fuse.OK
		}
		select {
		case <-changed:
		case <-c.dead:
			return fuse.ENODEV
		}
	}
}

func (c *control) metadata() fuse.Status {
	c.counters.metadataOps.Add(1)
	return c.pass()
}

// more is for requests that need room.
func (c *control) more() fuse.Status {
	s := c.metadata()
	if s.Ok() && c.now().ENOSPC {
		return fuse.Status(syscall.ENOSPC)
	}
	return s
}

func (c *control) count() Counters {
	n := &c.counters
	return Counters{n.readBytes.Load(), n.readOps.Load(), n.writeBytes.Load(), n.writeOps.Load(), n.metadataOps.Load()}
}

// gate lets requests through as the behaviour says, and counts those that are neither reads nor writes. Forget, Release and ReleaseDir pass: nobody waits
// for their answers.
type gate struct {
	fuse.RawFileSystem
	*control
}

func (g gate) Lookup(c <-chan struct{}, h *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.Lookup(c, h, name, out)
}

func (g gate) GetAttr(c <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.GetAttr(c, in, out)
}

func (g gate) SetAttr(c <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.SetAttr(c, in, out)
}

func (g gate) Mknod(c <-chan struct{}, in *fuse.MknodIn, name string, out *fuse.EntryOut) fuse.Status {
	if s := g.more(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.Mknod(c, in, name, out)
}

func (g gate) Mkdir(c <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	if s := g.more(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.Mkdir(c, in, name, out)
}

func (g gate) Symlink(c <-chan struct{}, h *fuse.InHeader, target, name string, out *fuse.EntryOut) fuse.Status {
	if s := g.more(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.Symlink(c, h, target, name, out)
}

func (g gate) Link(c <-chan struct{}, in *fuse.LinkIn, name string, out *fuse.EntryOut) fuse.Status {
	if s := g.more(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.Link(c, in, name, out)
}

func (g gate) Unlink(c <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.Unlink(c, h, name)
}

func (g gate) Rmdir(c <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.Rmdir(c, h, name)
}

func (g gate) Rename(c <-chan struct{}, in *fuse.RenameIn, from, to string) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.Rename(c, in, from, to)
}

func (g gate) Readlink(c <-chan struct{}, h *fuse.InHeader) ([]byte, fuse.Status) {
	if s := g.metadata(); !s.Ok() {
		return nil, s
	}
	return g.RawFileSystem.Readlink(c, h)
}

func (g gate) StatFs(c <-chan struct{}, h *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.StatFs(c, h, out)
}

func (g gate) GetXAttr(c <-chan struct{}, h *fuse.InHeader, name string, dest []byte) (uint32, fuse.Status) {
	if s := g.metadata(); !s.Ok() {
		return 0, s
	}
	return g.RawFileSystem.GetXAttr(c, h, name, dest)
}

func (g gate) ListXAttr(c <-chan struct{}, h *fuse.InHeader, dest []byte) (uint32, fuse.Status) {
	if s := g.metadata(); !s.Ok() {
		return 0, s
	}
	return g.RawFileSystem.ListXAttr(c, h, dest)
}

func (g gate) SetXAttr(c <-chan struct{}, in *fuse.SetXAttrIn, name string, data []byte) fuse.Status {
	if s := g.more(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.SetXAttr(c, in, name, data)
}

func (g gate) RemoveXAttr(c <-chan struct{}, h *fuse.InHeader, name string) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.RemoveXAttr(c, h, name)
}

func (g gate) Create(c <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	if s := g.more(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.Create(c, in, name, out)
}

func (g gate) Open(c <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.Open(c, in, out)
}

func (g gate) Read(c <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	if s := g.pass(); !s.Ok() {
		return nil, s
	}
	return g.RawFileSystem.Read(c, in, buf)
}

func (g gate) Write(c <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	s := g.pass()
	if s.Ok() && g.now().ENOSPC {
		s = fuse.Status(syscall.ENOSPC)
	}
	if !s.Ok() {
		return 0, s
	}
	return g.RawFileSystem.Write(c, in, data)
}

func (g gate) Fallocate(c <-chan struct{}, in *fuse.FallocateIn) fuse.Status {
	if s := g.more(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.Fallocate(c, in)
}

func (g gate) Lseek(c <-chan struct{}, in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.Lseek(c, in, out)
}

func (g gate) Flush(c <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.Flush(c, in)
}

func (g gate) Fsync(c <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.Fsync(c, in)
}

func (g gate) FsyncDir(c <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.FsyncDir(c, in)
}

func (g gate) GetLk(c <-chan struct{}, in *fuse.LkIn, out *fuse.LkOut) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.GetLk(c, in, out)
}

func (g gate) SetLk(c <-chan struct{}, in *fuse.LkIn) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.SetLk(c, in)
}

func (g gate) SetLkw(c <-chan struct{}, in *fuse.LkIn) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.SetLkw(c, in)
}

func (g gate) OpenDir(c <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.OpenDir(c, in, out)
}

func (g gate) ReadDir(c <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	if s := g.metadata(); !s.Ok() {
		return s
	}
	return g.RawFileSystem.ReadDir(c, in, out)
}
