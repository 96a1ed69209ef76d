package files

import (
	"errors"
	"fmt"
	"os"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
)

// dir is an open directory; everything below it is reached through its
// descriptor, which is of the O_PATH kind: a user may pass .sluice but not read it.
type dir struct {
	fd   int
	name string // for messages: relative to the mount
}

func (d dir) close() { unix.Close(d.fd) }

func (d dir) child(name string) string {
	if d.name == "" {
		return name
	}
	return d.name + "/" + name
}

// openRoot opens the mount itself.
func openRoot(path string) (dir, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return dir{}, fmt.Errorf("open %s: %w", path, err)
	}
	return dir{fd, ""}, nil
}

// errSymlink is a path whose component is a symbolic link or not a directory.
var errSymlink = errors.New("is a symbolic link or not a directory")

// open opens the directory name in d; it never follows a symbolic link.
func (d dir) open(name string) (dir, error) {
	fd, err := retryEINTR(func() (int, error) {
		return unix.Openat(d.fd, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	})
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) {
		return dir{}, fmt.Errorf("%s %w", d.child(name), errSymlink)
	}
	if err != nil {
		return dir{}, fmt.Errorf("open %s: %w", d.child(name), err)
	}
	return dir{fd, d.child(name)}, nil
}

// walk opens the directory at the relative path; "." is d again.
func (d dir) walk(path string) (dir, error) {
	fd, err := unix.FcntlInt(uintptr(d.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return dir{}, err
	}
	at := dir{fd, d.name}
	if path == "." || path == "" {
		return at, nil
	}
	if why := CheckName(path); why != "" {
		at.close()
		return dir{}, &Error{Message: fmt.Sprintf("bad path %q: %s", path, why), Input: true}
	}
	for part := range strings.SplitSeq(path, "/") {
		next, err := at.open(part)
		at.close()
		if err != nil {
			return dir{}, err
		}
		at = next
	}
	return at, nil
}

// split parts a relative path into its parent and last component.
func split(path string) (parent, name string) {
	i := strings.LastIndexByte(path, '/')
	if i < 0 {
		return ".", path
	}
	return path[:i], path[i+1:]
}

func (d dir) stat() (unix.Stat_t, error) {
	var st unix.Stat_t
	err := unix.Fstat(d.fd, &st)
	return st, err
}

func (d dir) lstat(name string) (unix.Stat_t, error) {
	var st unix.Stat_t
	err := unix.Fstatat(d.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	return st, err
}

// readable opens d itself for reading, changing and syncing.
func (d dir) readable() (*os.File, error) {
	fd, err := retryEINTR(func() (int, error) {
		return unix.Openat(d.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", d.name, err)
	}
	return os.NewFile(uintptr(fd), d.name), nil
}

// set gives d an owner and a mode.
func (d dir) set(uid, gid int, mode uint32) error {
	f, err := d.readable()
	if err != nil {
		return err
	}
	defer f.Close()
	// The owner first: a change of owner may clear bits of the mode.
	if err := unix.Fchown(int(f.Fd()), uid, gid); err != nil {
		return fmt.Errorf("give %s to %d:%d: %w", d.name, uid, gid, err)
	}
	if err := unix.Fchmod(int(f.Fd()), mode); err != nil {
		return fmt.Errorf("change the mode of %s: %w", d.name, err)
	}
	return nil
}

// names reads the entries in order.
func (d dir) names() ([]string, error) {
	f, err := d.readable()
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", d.name, err)
	}
	sort.Strings(names)
	return names, nil
}

// openFile opens a regular file for reading, never a link, and never waits for a pipe's writer.
func (d dir) openFile(name string) (*os.File, error) {
	fd, err := retryEINTR(func() (int, error) {
		return unix.Openat(d.fd, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	})
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", d.child(name), err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("open %s: %w", d.child(name), err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		unix.Close(fd)
		return nil, fmt.Errorf("%s is not a regular file", d.child(name))
	}
	return os.NewFile(uintptr(fd), d.child(name)), nil
}

// ensure opens the directory name in d, which must be root's (or, in tests
// without root, the caller's); it makes it if it is not there.
func (d dir) ensure(name string, mode uint32) (dir, error) {
	err := unix.Mkdirat(d.fd, name, 0o700)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return dir{}, fmt.Errorf("make %s: %w", d.child(name), err)
	}
	sub, err := d.open(name)
	if err != nil {
		return dir{}, err
	}
	st, err := sub.stat()
	if err == nil && st.Uid != uint32(os.Geteuid()) {
		err = &Error{
			Message: fmt.Sprintf("%s belongs to uid %d, not to root: another program or user made it", sub.name, st.Uid),
			Hint:    "move it away; sluiced makes it anew",
		}
	}
	if err == nil && st.Mode&0o7777 != mode {
		err = sub.set(int(st.Uid), int(st.Gid), mode)
	}
	if err != nil {
		sub.close()
		return dir{}, err
	}
	return sub, nil
}

// ensurePath is ensure for each component, with mode 0711: to be passed, not read.
func (d dir) ensurePath(path string) (dir, error) {
	at, err := d.walk(".")
	if err != nil {
		return dir{}, err
	}
	if why := CheckName(path); why != "" {
		at.close()
		return dir{}, fmt.Errorf("bad path %q: %s", path, why)
	}
	for part := range strings.SplitSeq(path, "/") {
		next, err := at.ensure(part, 0o711)
		at.close()
		if err != nil {
			return dir{}, err
		}
		at = next
	}
	return at, nil
}

// removeAll removes name and what is below it, following nothing.
func (d dir) removeAll(name string, progress func()) error {
	err := unix.Unlinkat(d.fd, name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		progress()
		return nil
	}
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("remove %s: %w", d.child(name), err)
	}
	sub, err := d.open(name)
	if err != nil {
		return err
	}
	names, err := sub.names()
	for _, n := range names {
		if err == nil {
			err = sub.removeAll(n, progress)
		}
	}
	sub.close()
	if err != nil {
		return err
	}
	if err := unix.Unlinkat(d.fd, name, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove %s: %w", d.child(name), err)
	}
	progress()
	return nil
}

// lock waits until no other process holds the directory's lock. It ends with unlock or the process.
func (d dir) lock() (unlock func(), err error) {
	f, err := d.readable()
	if err != nil {
		return nil, err
	}
	if _, err := retryEINTR(func() (int, error) { return 0, unix.Flock(int(f.Fd()), unix.LOCK_EX) }); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", d.name, err)
	}
	return func() { f.Close() }, nil
}

func (d dir) sync() error {
	f, err := d.readable()
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

func retryEINTR(f func() (int, error)) (int, error) {
	for {
		fd, err := f()
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}
