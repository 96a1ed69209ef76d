package files

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// child is one operation at work.
type child struct {
	req request
	in  *bufio.Reader
	top dir

	mu  sync.Mutex // guards out
	out *bufio.Writer

	objects, bytes atomic.Int64
	looked         atomic.Int64 // entries looked at: a sign of life while nothing is counted
}

// operations are what `sluiced fs` can do.
var operations = map[string]func(*child) error{
	"mkdir-job": (*child).mkdirJob,
	"prepare":   (*child).prepare,
	"verify":    (*child).verify,
	"publish":   (*child).publish,
	"gate":      (*child).gate,
	"link":      (*child).link,
	"manifest":  (*child).manifest,
	"hold":      (*child).hold,
	"unlink":    (*child).unlink,
	"remove":    (*child).remove,
	"sweep":     (*child).sweep,
}

// Main runs the operation args[0] and returns the exit code. It is not meant for people.
func Main(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	op := operations[strings.Join(args, " ")]
	if op == nil {
		fmt.Fprintln(stderr, "sluiced fs: for sluiced itself; operations: mkdir-job, prepare, verify, …")
		return 2
	}
	c := &child{in: bufio.NewReaderSize(stdin, 1<<16), out: bufio.NewWriterSize(stdout, 1<<16)}
	line, err := c.in.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &c.req)
	}
	if err != nil {
		fmt.Fprintln(stderr, "sluiced fs: read the request:", err)
		return 2
	}
	unix.Umask(0)
	stop := make(chan struct{})
	go c.watch(stop)
	c.top, err = openRoot(c.req.Root)
	if err == nil {
		err = op(c)
	}
	close(stop)
	c.progress()
	if err != nil {
		var e *Error
		if !errors.As(err, &e) {
			e = &Error{Message: err.Error()}
			switch {
			case errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT):
				e.Message = "the file system is full: " + e.Message
			case os.Geteuid() == 0 && (errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM)):
				// Nothing else refuses root a file of its own.
				e.Message = "root squash: the file system treats this machine's root as nobody: " + e.Message
				e.Hint = "an admin adds the controller's address to the instance's access rules with NO_SQUASH"
			}
		}
		c.say(reply{Error: e})
	} else {
		c.say(reply{Done: true})
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.out.Flush() != nil {
		return 1
	}
	return 0
}

// watch reports progress, and ends the process when its parent is gone: a
// sluiced that was started again must not meet the work of the one before.
func (c *child) watch(stop chan struct{}) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	last := [3]int64{}
	for n := 0; ; n++ {
		if c.req.Parent != 0 && os.Getppid() != c.req.Parent {
			os.Exit(3)
		}
		if now := [3]int64{c.objects.Load(), c.bytes.Load(), c.looked.Load()}; now != last && n%2 == 0 {
			last = now
			c.progress()
		}
		select {
		case <-stop:
			return
		case <-tick.C:
		}
	}
}

func (c *child) progress() {
	c.say(reply{Progress: &Progress{c.objects.Load(), c.bytes.Load()}})
	c.mu.Lock()
	c.out.Flush()
	c.mu.Unlock()
}

func (c *child) say(r reply) {
	line, err := json.Marshal(r)
	if err != nil {
		line = []byte(`{"error":{"message":"encode a reply"}}`)
	}
	c.mu.Lock()
	c.out.Write(append(line, '\n'))
	c.mu.Unlock()
}

func (c *child) step() { c.objects.Add(1) }

// entries reads the manifest from the input.
func (c *child) entries(f func(Entry) error) error {
	for {
		line, err := c.in.ReadBytes('\n')
		if errors.Is(err, io.EOF) && len(line) == 0 {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the manifest: %w", err)
		}
		var e Entry
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("read the manifest: %w", err)
		}
		if why := CheckName(e.Path); why != "" {
			return fmt.Errorf("manifest: bad path %q: %s", e.Path, why)
		}
		if err := f(e); err != nil {
			return err
		}
	}
}

// mkdirJob makes a job's directory, owned by its user.
func (c *child) mkdirJob() error {
	parent, name := split(c.req.Path)
	p, err := c.top.ensurePath(parent)
	if err != nil {
		return err
	}
	defer p.close()
	if err := unix.Mkdirat(p.fd, name, 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("make %s: %w", p.child(name), err)
	}
	d, err := p.open(name)
	if err != nil {
		return err
	}
	defer d.close()
	st, err := d.stat()
	if err != nil {
		return err
	}
	if st.Uid == c.req.UID {
		return nil
	}
	if st.Uid != uint32(os.Geteuid()) || st.Mode&0o7777 != 0o700 {
		return &Error{
			Message: fmt.Sprintf("%s is another user's (uid %d), left by an older job of that number", d.name, st.Uid),
			Hint:    "an admin moves it away, then the job can be released",
			Input:   true,
		}
	}
	// Made just now, or by a sluiced that was killed before the next line.
	if err := d.set(int(c.req.UID), int(c.req.GID), 0o700); err != nil {
		return err
	}
	return p.sync()
}

// prepare finds the published version, or makes the transfer's empty directory.
func (c *child) prepare() error {
	ds, err := c.top.ensurePath(DatasetDir(c.req.Dataset))
	if err != nil {
		return err
	}
	defer ds.close()
	pub, err := c.published(ds)
	if err != nil {
		return err
	}
	if pub != nil {
		c.say(reply{Published: pub})
		return nil
	}
	d, err := ds.ensure(c.req.Version+partialMark+c.req.Transfer, 0o700)
	if err != nil {
		return err
	}
	d.close()
	return ds.sync()
}

// published reads the version's manifest, nil if there is no such version.
func (c *child) published(ds dir) (*Published, error) {
	st, err := ds.lstat(c.req.Version)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look at %s: %w", ds.child(c.req.Version), err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil, fmt.Errorf("%s is not a directory", ds.child(c.req.Version))
	}
	f, err := ds.openFile(c.req.Version + ".manifest")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	line, err := bufio.NewReader(io.LimitReader(f, 1<<20)).ReadBytes('\n')
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", f.Name(), err)
	}
	p := &Published{}
	if err := json.Unmarshal(line, p); err != nil {
		return nil, fmt.Errorf("read %s: %w", f.Name(), err)
	}
	return p, nil
}

// maxProblems is how many differences a verification names.
const maxProblems = 20

// verify compares a tree with the manifest: every entry is there and equal,
// byte for byte, and nothing else is.
func (c *child) verify() error {
	tree, err := c.top.walk(c.req.Path)
	if err != nil {
		return err
	}
	defer tree.close()
	var problems atomic.Int64
	problem := func(format string, args ...any) {
		if problems.Add(1) <= maxProblems {
			c.say(reply{Problem: fmt.Sprintf(format, args...)})
		}
	}
	// What is there: the manifest's entries are taken off, the rest is too much.
	found := map[string]bool{}
	if err := c.list(tree, "", found); err != nil {
		return err
	}

	work := make(chan Entry)
	var wg sync.WaitGroup
	var failed atomic.Pointer[error]
	for range min(8, 2*runtime.NumCPU()) {
		wg.Go(func() {
			buf := make([]byte, 1<<20)
			for e := range work {
				if failed.Load() != nil {
					continue
				}
				why, err := c.compare(tree, e, buf)
				switch {
				case err != nil:
					failed.CompareAndSwap(nil, &err)
				case why != "":
					problem("%s: %s", e.Path, why)
				}
			}
		})
	}
	err = c.entries(func(e Entry) error {
		if e.Dir {
			if !found[e.Path+"/"] {
				problem("%s/: missing", e.Path)
			}
			return nil
		}
		if !found[e.Path] {
			problem("%s: missing", e.Path)
			return nil
		}
		delete(found, e.Path)
		if failed.Load() != nil {
			return *failed.Load()
		}
		work <- e
		return nil
	})
	close(work)
	wg.Wait()
	if p := failed.Load(); p != nil {
		err = *p
	}
	if err != nil {
		return err
	}
	var extra []string
	for path := range found {
		if !strings.HasSuffix(path, "/") {
			extra = append(extra, path)
		}
	}
	slices.Sort(extra)
	for _, path := range extra {
		problem("%s: not in the bucket's listing", path)
	}
	return nil
}

// list finds the files below d; directories end in a slash.
func (c *child) list(d dir, prefix string, found map[string]bool) error {
	names, err := d.names()
	if err != nil {
		return err
	}
	for _, n := range names {
		st, err := d.lstat(n)
		if err != nil {
			return fmt.Errorf("look at %s: %w", d.child(n), err)
		}
		c.looked.Add(1)
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			found[prefix+n] = true
			continue
		}
		found[prefix+n+"/"] = true
		sub, err := d.open(n)
		if err != nil {
			return err
		}
		err = c.list(sub, prefix+n+"/", found)
		sub.close()
		if err != nil {
			return err
		}
	}
	return nil
}

// compare says how a file differs from its entry, or "".
func (c *child) compare(tree dir, e Entry, buf []byte) (string, error) {
	parent, name := split(e.Path)
	d, err := tree.walk(parent)
	if err != nil {
		return "", err
	}
	defer d.close()
	st, err := d.lstat(name)
	if err != nil {
		return "", fmt.Errorf("look at %s: %w", d.child(name), err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return "not a regular file", nil
	case st.Size != e.Size:
		return fmt.Sprintf("%d bytes, want %d", st.Size, e.Size), nil
	}
	f, err := d.openFile(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum, n, err := c.checksum(f, buf)
	if err != nil {
		return "", err
	}
	if n != e.Size {
		return fmt.Sprintf("%d bytes, want %d", n, e.Size), nil
	}
	if sum != e.CRC32C {
		return fmt.Sprintf("CRC32C is %08x, want %08x", sum, e.CRC32C), nil
	}
	c.objects.Add(1)
	return "", nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (c *child) checksum(f *os.File, buf []byte) (sum uint32, size int64, err error) {
	for {
		n, err := f.Read(buf)
		sum = crc32.Update(sum, castagnoli, buf[:n])
		size += int64(n)
		c.bytes.Add(int64(n))
		if errors.Is(err, io.EOF) {
			return sum, size, nil
		}
		if err != nil {
			return 0, 0, fmt.Errorf("read %s: %w", f.Name(), err)
		}
	}
}

// publish makes the partial directory the version. The manifest comes first, so
// that a version is never without it.
func (c *child) publish() error {
	ds, err := c.top.walk(DatasetDir(c.req.Dataset))
	if err != nil {
		return err
	}
	defer ds.close()
	if pub, err := c.published(ds); err != nil || pub != nil {
		return err // the sluiced before this one was killed after it
	}
	partial := c.req.Version + partialMark + c.req.Transfer
	d, err := ds.open(partial)
	if err != nil {
		return err
	}
	defer d.close()
	if err := c.seal(d); err != nil {
		return err
	}
	if err := d.set(os.Geteuid(), os.Getegid(), 0o700); err != nil {
		return err
	}
	if err := c.writeManifest(ds); err != nil {
		return err
	}
	if err := unix.Renameat(ds.fd, partial, ds.fd, c.req.Version); err != nil {
		return fmt.Errorf("publish %s: %w", ds.child(c.req.Version), err)
	}
	return ds.sync()
}

// seal makes everything below d root's and read-only.
func (c *child) seal(d dir) error {
	names, err := d.names()
	if err != nil {
		return err
	}
	for _, n := range names {
		st, err := d.lstat(n)
		if err != nil {
			return fmt.Errorf("look at %s: %w", d.child(n), err)
		}
		mode := uint32(0o444)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
		case unix.S_IFDIR:
			mode = 0o555
			sub, err := d.open(n)
			if err != nil {
				return err
			}
			err = c.seal(sub)
			sub.close()
			if err != nil {
				return err
			}
		default:
			return fmt.Errorf("%s is neither a file nor a directory", d.child(n))
		}
		err = unix.Fchownat(d.fd, n, os.Geteuid(), os.Getegid(), unix.AT_SYMLINK_NOFOLLOW)
		if err == nil {
			err = unix.Fchmodat(d.fd, n, mode, 0) // nobody but root reaches it: the top is 0700
		}
		if err != nil {
			return fmt.Errorf("seal %s: %w", d.child(n), err)
		}
		c.step()
	}
	return nil
}

func (c *child) writeManifest(ds dir) (err error) {
	name := c.req.Version + ".manifest"
	tmp := name + partialMark + c.req.Transfer
	fd, err := unix.Openat(ds.fd, tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("write %s: %w", ds.child(tmp), err)
	}
	f := os.NewFile(uintptr(fd), ds.child(tmp))
	defer f.Close()
	w := bufio.NewWriterSize(f, 1<<16)
	enc := json.NewEncoder(w)
	if err := enc.Encode(c.req.Published); err != nil {
		return fmt.Errorf("write %s: %w", f.Name(), err)
	}
	if err := c.entries(func(e Entry) error { return enc.Encode(e) }); err != nil {
		return err
	}
	if err := errors.Join(w.Flush(), f.Sync()); err != nil {
		return fmt.Errorf("write %s: %w", f.Name(), err)
	}
	if err := unix.Renameat(ds.fd, tmp, ds.fd, name); err != nil {
		return fmt.Errorf("write %s: %w", ds.child(name), err)
	}
	return nil
}

// gate makes the tree of hard links through which a group reads a version.
func (c *child) gate() error {
	version, err := c.top.walk(VersionDir(c.req.Dataset, c.req.Version))
	if errors.Is(err, unix.ENOENT) {
		return &Error{Message: VersionDir(c.req.Dataset, c.req.Version) + " is not there any more", Missing: true}
	}
	if err != nil {
		return err
	}
	defer version.close()
	ds, err := c.top.walk(DatasetDir(c.req.Dataset))
	if err != nil {
		return err
	}
	defer ds.close()
	gates, err := ds.ensurePath("gates/" + c.req.Version)
	if err != nil {
		return err
	}
	defer gates.close()
	// Jobs of one group want the same tree at the same time. The lock of a
	// directory is this machine's own on Lustre, and sluiced runs on one.
	unlock, err := gates.lock()
	if err != nil {
		return err
	}
	defer unlock()
	name := fmt.Sprint(c.req.GID)
	if _, err := gates.lstat(name); err == nil {
		return nil
	}
	tmp := name + partialMark + "tree"
	if err := gates.removeAll(tmp, c.step); err != nil {
		return err
	}
	tree, err := gates.ensure(tmp, 0o700)
	if err != nil {
		return err
	}
	defer tree.close()
	if err := c.mirror(version, tree); err != nil {
		return err
	}
	if err := tree.set(os.Geteuid(), int(c.req.GID), 0o750); err != nil {
		return err
	}
	if err := unix.Renameat(gates.fd, tmp, gates.fd, name); err != nil {
		return fmt.Errorf("make gate %s: %w", gates.child(name), err)
	}
	return gates.sync()
}

func (c *child) mirror(from, to dir) error {
	names, err := from.names()
	if err != nil {
		return err
	}
	for _, n := range names {
		st, err := from.lstat(n)
		if err != nil {
			return fmt.Errorf("look at %s: %w", from.child(n), err)
		}
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			a, err := from.open(n)
			if err != nil {
				return err
			}
			b, err := to.ensure(n, 0o555)
			if err == nil {
				err = c.mirror(a, b)
				b.close()
			}
			a.close()
			if err != nil {
				return err
			}
			continue
		}
		err = unix.Linkat(from.fd, n, to.fd, n, 0)
		if errors.Is(err, unix.EXDEV) {
			// The two directories are of different projects (lfs project): it costs the room of a second copy.
			err = c.copy(from, to, n)
		}
		if err != nil {
			return fmt.Errorf("link %s: %w", to.child(n), err)
		}
		c.step()
	}
	return nil
}

// copy makes a sealed copy of a file of a version in another directory.
func (c *child) copy(from, to dir, name string) error {
	source, err := from.openFile(name)
	if err != nil {
		return err
	}
	defer source.Close()
	return c.copyTo(source, to, name)
}

func (c *child) copyTo(source *os.File, to dir, name string) error {
	fd, err := unix.Openat(to.fd, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o444)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), to.child(name))
	defer f.Close()
	buf := make([]byte, 1<<20)
	for {
		n, err := source.Read(buf)
		if n > 0 {
			if _, err := f.Write(buf[:n]); err != nil {
				return err
			}
			c.bytes.Add(int64(n))
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	return f.Sync()
}

// link makes a symbolic link in a job's directory. It runs as the job's user.
func (c *child) link() error {
	d, err := c.top.walk(c.req.Path)
	if err != nil {
		return err
	}
	parent, name := split(c.req.Below)
	if why := CheckName(c.req.Below); why != "" {
		return &Error{Message: fmt.Sprintf("to=%s: %s", c.req.Below, why), Input: true}
	}
	if parent != "." {
		for part := range strings.SplitSeq(parent, "/") {
			if err := unix.Mkdirat(d.fd, part, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
				return fmt.Errorf("make %s: %w", d.child(part), err)
			}
			next, err := d.open(part)
			d.close()
			if errors.Is(err, errSymlink) {
				return &Error{Message: fmt.Sprintf("to=%s: %s in the job's directory %v", c.req.Below, part, errSymlink), Input: true}
			}
			if err != nil {
				return err
			}
			d = next
		}
	}
	defer d.close()
	err = unix.Symlinkat(c.req.Target, d.fd, name)
	if errors.Is(err, unix.EEXIST) {
		buf := make([]byte, 4096)
		n, rerr := unix.Readlinkat(d.fd, name, buf)
		if rerr == nil && string(buf[:n]) == c.req.Target {
			return nil
		}
		if rerr == nil && strings.HasPrefix(string(buf[:n]), filepath.Join(c.req.Root, Datasets)+"/") {
			// The job's earlier run had another version.
			if err = unix.Unlinkat(d.fd, name, 0); err == nil {
				err = unix.Symlinkat(c.req.Target, d.fd, name)
			}
		} else {
			return &Error{Message: fmt.Sprintf("to=%s: something of that name is in the job's directory already", c.req.Below), Input: true}
		}
	}
	if err != nil {
		return fmt.Errorf("link %s: %w", d.child(name), err)
	}
	return nil
}

// manifest reads the regular files below a directory of a job, with their
// checksums. It runs as the job's user.
func (c *child) manifest() error {
	d, err := c.top.walk(c.req.Path)
	if err != nil {
		return err
	}
	defer d.close()
	from := strings.Trim(c.req.Below, "/")
	tree, err := d.walk(from)
	var input *Error
	switch {
	case errors.Is(err, unix.ENOENT):
		return &Error{Message: fmt.Sprintf("from=%s: there is no such directory in the job's directory", c.req.Below), Input: true,
			Hint: "the job must make it below $SLUICE_JOB_DIR"}
	case errors.Is(err, errSymlink):
		return &Error{Message: fmt.Sprintf("from=%s: a part of it is a symbolic link or not a directory", c.req.Below), Input: true,
			Hint: "name a directory that lies itself below $SLUICE_JOB_DIR"}
	case errors.Is(err, unix.EACCES):
		return &Error{Message: fmt.Sprintf("from=%s: the job's user may not read it", c.req.Below), Input: true}
	case errors.As(err, &input):
		return input
	case err != nil:
		return err
	}
	defer tree.close()
	return c.manifestOf(tree, "", make([]byte, 1<<20))
}

func (c *child) manifestOf(d dir, prefix string, buf []byte) error {
	names, err := d.names()
	if err != nil {
		return userError(err, readHint)
	}
	for _, n := range names {
		path := prefix + n
		st, err := d.lstat(n)
		if errors.Is(err, unix.ENOENT) {
			continue // removed meanwhile
		}
		if err != nil {
			return fmt.Errorf("look at %s: %w", d.child(n), err)
		}
		c.looked.Add(1)
		kind := st.Mode & unix.S_IFMT
		if kind == unix.S_IFREG || kind == unix.S_IFDIR {
			if !utf8.ValidString(n) || strings.ContainsAny(n, "\r\n") {
				return &Error{Message: fmt.Sprintf("%q cannot be an object's name: it is not UTF-8 or has a line break", path), Input: true}
			}
			if len(path)+c.req.Prefix > MaxObjectName {
				return &Error{Message: fmt.Sprintf("%.80q… cannot be an object's name: it is longer than %d bytes with the prefix", path, MaxObjectName), Input: true}
			}
		}
		switch kind {
		case unix.S_IFDIR:
			sub, err := d.open(n)
			if err != nil {
				return userError(err, readHint)
			}
			err = c.manifestOf(sub, path+"/", buf)
			sub.close()
			if err != nil {
				return err
			}
		case unix.S_IFREG:
			f, err := d.openFile(n)
			if err != nil {
				return userError(err, readHint)
			}
			sum, size, err := c.checksum(f, buf)
			var read unix.Stat_t // of what was read, whatever has the name now
			if err == nil {
				err = unix.Fstat(int(f.Fd()), &read)
			}
			f.Close()
			if err != nil {
				return err
			}
			c.objects.Add(1)
			c.say(reply{Entry: &Entry{Path: path, Size: size, CRC32C: sum, MTime: st.Mtim.Nano(), Inode: read.Ino}})
		case unix.S_IFLNK:
			c.say(reply{Skipped: &Skipped{Path: strings.ToValidUTF8(path, "?"), Why: "symbolic links are not exported"}})
		default:
			c.say(reply{Skipped: &Skipped{Path: strings.ToValidUTF8(path, "?"), Why: "only regular files are exported"}})
		}
	}
	return nil
}

// hold links the files of the manifest into the export's directory, made anew or
// completed after a crash. It runs as root and the user may change the job's
// directory meanwhile, so a link is kept only if it is the file that the user read.
func (c *child) hold() error {
	exports, err := c.top.ensurePath(Exports)
	if err != nil {
		return err
	}
	defer exports.close()
	held, err := exports.ensure(c.req.Transfer, 0o700)
	if err != nil {
		return err
	}
	defer held.close()
	job, err := c.top.walk(c.req.Path)
	if err != nil {
		return err
	}
	defer job.close()
	tree, err := job.walk(strings.Trim(c.req.Below, "/"))
	if err != nil {
		return swapped(err)
	}
	defer tree.close()
	err = c.entries(func(e Entry) error {
		parent, name := split(e.Path)
		from, err := tree.walk(parent)
		if err != nil {
			return swapped(err)
		}
		defer from.close()
		to, err := held.walk(".")
		if err != nil {
			return err
		}
		defer func() { to.close() }()
		if parent != "." {
			for part := range strings.SplitSeq(parent, "/") {
				next, err := to.ensure(part, 0o700)
				if err != nil {
					return err
				}
				to.close()
				to = next
			}
		}
		if err := c.holdFile(from, to, name, e); err != nil {
			return swapped(err)
		}
		c.step()
		return nil
	})
	if err != nil {
		return err
	}
	return held.sync()
}

// errReplaced is a name that does not lead to the file any more that was read.
var errReplaced = errors.New("is not the file that was there when the job ended")

// swapped is a failure that whoever changed the job's directory made.
func swapped(err error) error {
	if errors.Is(err, errReplaced) || errors.Is(err, errSymlink) || errors.Is(err, unix.ENOENT) {
		return &Error{Message: fmt.Sprintf("the job's directory was changed while its export waited: %v", err), Input: true,
			Hint: "leave it alone until the stage-out is done; the files are still there"}
	}
	return err
}

func (c *child) holdFile(from, to dir, name string, e Entry) error {
	// What is there is an earlier attempt's: only root reaches it, and it came whole.
	if _, err := to.lstat(name); err == nil {
		return nil
	}
	tmp := partialMark + c.req.Transfer
	if err := to.removeAll(tmp, func() {}); err != nil {
		return err
	}
	// Looked at once it is linked: until then the name can be made to lead elsewhere.
	err := unix.Linkat(from.fd, name, to.fd, tmp, 0)
	switch {
	case errors.Is(err, unix.EXDEV):
		err = c.copyEntry(from, to, name, tmp, e)
	case err == nil:
		var st unix.Stat_t
		if st, err = to.lstat(tmp); err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Ino != e.Inode) {
			err = fmt.Errorf("%s %w", from.child(name), errReplaced)
		}
	}
	if err == nil {
		err = unix.Renameat(to.fd, tmp, to.fd, name)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("hold %s: %w", from.child(name), err), to.removeAll(tmp, func() {}))
	}
	return nil
}

// copyEntry is a link between directories of different projects (lfs project): it costs the room of a second copy.
func (c *child) copyEntry(from, to dir, name, as string, e Entry) error {
	st, err := from.lstat(name)
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Ino != e.Inode {
		return fmt.Errorf("%s %w", from.child(name), errReplaced)
	}
	source, err := from.openFile(name)
	if err != nil {
		return err
	}
	defer source.Close()
	if err := unix.Fstat(int(source.Fd()), &st); err != nil {
		return err
	}
	if st.Ino != e.Inode { // since the look before
		return fmt.Errorf("%s %w", from.child(name), errReplaced)
	}
	return c.copyTo(source, to, as)
}

// readHint is what to do about a file that cannot be read.
const readHint = "chmod u+r it, or export another directory"

// userError is a failure that the user made.
func userError(err error, hint string) error {
	if errors.Is(err, unix.EACCES) {
		return &Error{Message: err.Error() + " (as the job's user)", Input: true, Hint: hint}
	}
	return err
}

// unlink removes the files of the manifest that are still as they were. It runs
// as the job's user.
func (c *child) unlink() error {
	d, err := c.top.walk(c.req.Path)
	if err != nil {
		return err
	}
	defer d.close()
	tree, err := d.walk(strings.Trim(c.req.Below, "/"))
	if err != nil {
		return err
	}
	defer tree.close()
	return c.entries(func(e Entry) error {
		parent, name := split(e.Path)
		p, err := tree.walk(parent)
		if err != nil {
			return nil // gone or changed: not ours any more
		}
		defer p.close()
		st, err := p.lstat(name)
		if err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size != e.Size || st.Mtim.Nano() != e.MTime {
			return nil
		}
		if err := unix.Unlinkat(p.fd, name, 0); err != nil {
			return userError(fmt.Errorf("remove %s: %w", p.child(name), err), "chmod u+w its directory")
		}
		c.step()
		return nil
	})
}

// remove deletes a job's directory, or a transfer's partial or export directory.
func (c *child) remove() error {
	parent, name := split(c.req.Path)
	if parent != Jobs && parent != Exports && !(strings.HasPrefix(parent, Datasets+"/") && strings.Contains(name, partialMark)) {
		return fmt.Errorf("%s is not to be removed", c.req.Path)
	}
	d, err := c.top.walk(parent)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer d.close()
	return d.removeAll(name, c.step)
}

// sweep removes partial directories and files, and export directories, of transfers that are not in Keep.
func (c *child) sweep() error {
	if err := c.sweepExports(); err != nil {
		return err
	}
	all, err := c.top.walk(Datasets)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer all.close()
	ids, err := all.names()
	if err != nil {
		return err
	}
	for _, id := range ids {
		d, err := all.open(id)
		if err != nil {
			continue // not a dataset
		}
		err = c.sweepDataset(d)
		d.close()
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *child) sweepExports() error {
	d, err := c.top.walk(Exports)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer d.close()
	names, err := d.names()
	if err != nil {
		return err
	}
	for _, n := range names {
		if slices.Contains(c.req.Keep, n) {
			continue
		}
		if err := d.removeAll(n, c.step); err != nil {
			return err
		}
		c.say(reply{Removed: d.child(n)})
	}
	return nil
}

func (c *child) sweepDataset(d dir) error {
	names, err := d.names()
	if err != nil {
		return err
	}
	for _, n := range names {
		_, transfer, ok := strings.Cut(n, partialMark)
		if !ok || slices.Contains(c.req.Keep, transfer) {
			continue
		}
		if err := d.removeAll(n, c.step); err != nil {
			return err
		}
		c.say(reply{Removed: d.child(n)})
	}
	return nil
}

// encodeLines is the input of a child: the request and the manifest.
func encodeLines(r request, manifest []byte) (io.Reader, error) {
	line, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	return io.MultiReader(bytes.NewReader(append(line, '\n')), bytes.NewReader(manifest)), nil
}
