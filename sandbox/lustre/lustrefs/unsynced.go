package lustrefs

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// ledger remembers what a machine has written through a mount and not synced, so that it can be lost when the machine
// dies. Like a Lustre client's cache, a file's content is safe after fsync, with O_SYNC, and once another machine has
// read it: whoever reads takes the mark off that says whose unsynced data it has. Names are safe at once, because the
// metadata server makes them.
type ledger struct {
	owner string // the mark of this mount

	mu    sync.Mutex // guards what follows
	files map[inode]*unsynced
	begun []inode  // in the order of their first writes, with some that are synced by now
	spool *os.File // the earlier content of synced bytes that were written over, or nil
	end   int64    // of the spool
	over  bool     // the machine is dead
}

// unsynced is a file with content that may be lost.
type unsynced struct {
	fd      int   // open for writing
	durable int64 // bytes from the beginning that were there when it was last synced
	writes  []write
}

// write is one since the last sync, or several that follow each other.
type write struct {
	off, n int64
	old    int64 // where the spool has what was at off before
	oldLen int64 // the rest was not there, or not synced either
}

// markAttr marks a file with the owner of its unsynced content.
const markAttr = "trusted.sluice.unsynced"

// page is what a client loses or keeps as a whole, in bytes.
const page = 4096

func newLedger(owner string) *ledger { return &ledger{owner: owner, files: map[inode]*unsynced{}} }

// marked returns the owner of a file's unsynced content, or "".
func marked(fd int) string {
	buf := make([]byte, 64)
	n, err := unix.Fgetxattr(fd, markAttr, buf)
	if err != nil {
		return ""
	}
	return string(buf[:n])
}

// WrittenOut makes the content of an open file safe, whoever holds it: what reading it from another machine does.
// It returns an error only when the file may not be marked as safe.
func WrittenOut(f *os.File) error { return writtenOut(int(f.Fd()), "") }

// writtenOut does so unless it is owner's own.
func writtenOut(fd int, owner string) error {
	m := marked(fd)
	if m == "" || m == owner {
		return nil
	}
	if err := unix.Fremovexattr(fd, markAttr); err != nil && !errors.Is(err, unix.ENODATA) {
		return err
	}
	return nil
}

// write writes data and notes it.
func (l *ledger) write(key inode, fd int, data []byte, off int64, appends bool) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return 0, unix.EIO
	}
	u, err := l.entry(key, fd)
	if err != nil {
		return 0, err
	}
	if appends {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return 0, err
		}
		off = st.Size
	}
	w := write{off: off, old: l.end}
	if off < u.durable {
		if w.oldLen, err = l.keep(u.fd, off, min(int64(len(data)), u.durable-off)); err != nil {
			return 0, err
		}
	}
	n, err := unix.Pwrite(fd, data, off)
	if n <= 0 {
		return n, err
	}
	w.n = int64(n)
	if last := len(u.writes) - 1; last >= 0 && u.writes[last].off+u.writes[last].n == off && u.writes[last].oldLen+w.oldLen == 0 {
		u.writes[last].n += w.n
	} else {
		u.writes = append(u.writes, w)
	}
	return n, err
}

// entry returns the file's entry. One that another machine made safe meanwhile begins anew. mu is held.
func (l *ledger) entry(key inode, fd int) (*unsynced, error) {
	u := l.files[key]
	if u != nil && marked(u.fd) == l.owner {
		return u, nil
	}
	l.drop(key)
	own, err := unix.Openat(unix.AT_FDCWD, proc(fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	err = unix.Fstat(own, &st)
	if err == nil {
		err = unix.Fsetxattr(own, markAttr, []byte(l.owner), 0)
	}
	if err != nil {
		unix.Close(own)
		return nil, err
	}
	u = &unsynced{fd: own, durable: st.Size}
	l.files[key] = u
	l.begun = append(l.begun, key)
	return u, nil
}

// keep copies what is in a file to the spool. mu is held.
func (l *ledger) keep(fd int, off, n int64) (int64, error) {
	if l.spool == nil {
		f, err := os.CreateTemp("", "lustre-unsynced")
		if err != nil {
			return 0, err
		}
		l.spool = f
		if err := os.Remove(f.Name()); err != nil {
			return 0, err
		}
	}
	buf := make([]byte, n)
	read, err := unix.Pread(fd, buf, off)
	if err == nil {
		_, err = l.spool.WriteAt(buf[:read], l.end)
	}
	if err != nil {
		return 0, err
	}
	l.end += int64(read)
	return int64(read), nil
}

// synced makes the file's content safe.
func (l *ledger) synced(key inode) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.drop(key)
}

// flush makes all content safe.
func (l *ledger) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key := range l.files {
		l.drop(key)
	}
}

// drop forgets an entry. mu is held.
func (l *ledger) drop(key inode) {
	u := l.files[key]
	if u == nil {
		return
	}
	if marked(u.fd) == l.owner {
		_ = unix.Fremovexattr(u.fd, markAttr) // a mark without an entry means nothing
	}
	unix.Close(u.fd)
	delete(l.files, key)
	if len(l.files) > 0 {
		return
	}
	l.begun, l.end = nil, 0
	if l.spool != nil {
		_ = l.spool.Truncate(0) // it only takes room
	}
}

// resized notes a new size, which the servers know at once.
func (l *ledger) resized(key inode, size int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	u := l.files[key]
	if u == nil {
		return
	}
	end := u.durable
	for i := range u.writes {
		w := &u.writes[i]
		end = max(end, w.off+w.n)
		w.n = max(0, min(w.n, size-w.off))
		w.oldLen = min(w.oldLen, w.n)
	}
	if size >= end {
		u.durable = size // with zeros at its end
	} else {
		u.durable = min(u.durable, size)
	}
}

// crash loses a random part of every file's unsynced content: the first writes are kept, and what came after them is
// what was there before, or zeros, or not there at all. Nothing can be written afterwards.
func (l *ledger) crash(dir string, seed uint64) []Loss {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	random := rand.New(rand.NewPCG(seed, 0))
	var losses []Loss
	for _, key := range l.begun {
		u := l.files[key]
		if u == nil || marked(u.fd) != l.owner {
			continue
		}
		loss := Loss{Path: pathOf(u.fd, dir), Zeroed: random.IntN(2) == 0, Seed: seed}
		total := int64(0)
		for _, w := range u.writes {
			total += w.n
		}
		if total == 0 {
			continue
		}
		kept := random.Int64N(total)
		if err := l.lose(u, kept, &loss); err != nil {
			loss.Error = err.Error()
		}
		losses = append(losses, loss)
		delete(l.files, key)
	}
	return losses
}

// lose takes away all but the first kept bytes that were written. mu is held.
func (l *ledger) lose(u *unsynced, kept int64, loss *Loss) error {
	var st unix.Stat_t
	if err := unix.Fstat(u.fd, &st); err != nil {
		return err
	}
	loss.Before = st.Size
	end := min(u.durable, st.Size)
	var lost []write
	for _, w := range u.writes {
		k := min(kept, w.n)
		kept -= k
		if k < w.n { // whole pages
			k = max(0, (w.off+k)/page*page-w.off)
		}
		if k > 0 {
			end = max(end, w.off+k)
		}
		if k < w.n {
			lost = append(lost, write{off: w.off + k, n: w.n - k, old: w.old + k, oldLen: max(0, w.oldLen-k)})
			loss.Bytes += w.n - k
		}
	}
	for _, w := range slices.Backward(lost) {
		if err := l.restore(u.fd, w); err != nil {
			return err
		}
	}
	loss.After = st.Size
	if !loss.Zeroed {
		loss.After = min(end, st.Size)
		if err := unix.Ftruncate(u.fd, loss.After); err != nil {
			return err
		}
	}
	_ = unix.Fremovexattr(u.fd, markAttr)
	return unix.Close(u.fd)
}

// restore puts back what was at w, or zeros. mu is held.
func (l *ledger) restore(fd int, w write) error {
	buf := make([]byte, 1<<20)
	for at := int64(0); at < w.n; {
		part := buf[:min(int64(len(buf)), w.n-at)]
		clear(part)
		if at < w.oldLen {
			part = part[:min(int64(len(part)), w.oldLen-at)]
			if _, err := l.spool.ReadAt(part, w.old+at); err != nil {
				return err
			}
		}
		n, err := unix.Pwrite(fd, part, w.off+at)
		if err != nil {
			return err
		}
		at += int64(n)
	}
	return nil
}

// pathOf is where the file of a descriptor is below dir.
func pathOf(fd int, dir string) string {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlink(proc(fd), buf)
	if err != nil {
		return err.Error()
	}
	rel, err := filepath.Rel(dir, string(buf[:n]))
	if err != nil {
		return string(buf[:n])
	}
	return rel
}
