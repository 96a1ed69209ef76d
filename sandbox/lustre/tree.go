package lustre

import (
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

// tree is a directory of an instance. Its paths are relative, and nothing leads out of it: the
// kernel resolves them beneath the directory and follows no symbolic link (openat2).
type tree struct{ f *os.File }

// openTree opens the directory at a Lustre path ("/", "/data") of the instance whose data is in dir.
func openTree(dir, lustrePath string) (*tree, error) {
	root, err := os.OpenFile(dir, unix.O_DIRECTORY|unix.O_PATH, 0)
	if err != nil {
		return nil, err
	}
	t := &tree{root}
	rel := strings.Trim(lustrePath, "/")
	if rel == "" {
		return t, nil
	}
	defer root.Close()
	f, err := t.open(rel, unix.O_DIRECTORY|unix.O_PATH, 0)
	if err != nil {
		return nil, err
	}
	return &tree{f}, nil
}

func (t *tree) close() { t.f.Close() }

func (t *tree) open(rel string, flags int, mode uint64) (*os.File, error) {
	fd, err := unix.Openat2(int(t.f.Fd()), rel, &unix.OpenHow{
		Flags:   uint64(flags) | unix.O_CLOEXEC | unix.O_NOFOLLOW,
		Mode:    mode,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), rel), nil
}

// owner is whose an imported file is, and its mode. How the real service sets them is not known: a fault chooses, and
// nobody may rely on it.
type owner struct {
	uid, gid int
	mode     uint32
	dirMode  uint32 // of directories that are made for it
}

// ownerOf reads an imported file's owner from the object: of an entry that is not there or makes no sense, the default holds.
func ownerOf(fault string, o Object) owner {
	w := owner{0, 0, 0o644, 0o755}
	switch fault {
	case faults.OwnerRoot0600:
		w.mode, w.dirMode = 0o600, 0o700
	case faults.OwnerMetadata:
		for key, set := range map[string]func(n int64){
			"goog-reserved-posix-uid": func(n int64) { w.uid = int(n) },
			"goog-reserved-posix-gid": func(n int64) { w.gid = int(n) },
		} {
			if n, err := strconv.ParseUint(o.Metadata[key], 10, 32); err == nil {
				set(int64(n))
			}
		}
		if n, err := strconv.ParseUint(o.Metadata["goog-reserved-posix-mode"], 8, 16); err == nil {
			w.mode = uint32(n) & 0o7777
		}
	}
	return w
}

// create opens a file for writing from its beginning and makes the directories above it.
func (t *tree) create(rel string, w owner) (*os.File, error) {
	const flags = unix.O_WRONLY | unix.O_NONBLOCK
	f, err := t.open(rel, flags, 0)
	isNew := err == unix.ENOENT
	if isNew {
		if err := t.makeDirs(path.Dir(rel), w.dirMode); err != nil {
			return nil, err
		}
		f, err = t.open(rel, flags|unix.O_CREAT, 0o600)
	}
	if err != nil {
		return nil, err
	}
	if isNew {
		err = t.inherit(rel, f, false)
	}
	if err == nil {
		err = f.Chown(w.uid, w.gid)
	}
	if err == nil {
		err = unix.Fchmod(int(f.Fd()), w.mode) // after the owner, whose change takes set-id bits away
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("there is a %s of that name", kind(info.Mode()))
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// inherit gives a new file or directory its directory's project and layout.
func (t *tree) inherit(rel string, made *os.File, isDir bool) error {
	dir, err := t.open(path.Dir(rel), unix.O_DIRECTORY|unix.O_PATH, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	return lustrefs.Inherit(int(dir.Fd()), int(made.Fd()), isDir)
}

func (t *tree) makeDirs(rel string, mode uint32) error {
	if rel == "." {
		return nil
	}
	err := t.makeDirs(path.Dir(rel), mode)
	if err != nil {
		return err
	}
	dir, err := t.open(path.Dir(rel), unix.O_DIRECTORY|unix.O_PATH, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.Mkdirat(int(dir.Fd()), path.Base(rel), mode); err != nil {
		if err == unix.EEXIST {
			return nil
		}
		return err
	}
	made, err := t.open(rel, unix.O_DIRECTORY|unix.O_PATH, 0)
	if err != nil {
		return err
	}
	defer made.Close()
	return lustrefs.Inherit(int(dir.Fd()), int(made.Fd()), true)
}

// read opens a regular file; anything else is not opened.
func (t *tree) read(rel string) (*os.File, os.FileInfo, error) {
	f, err := t.open(rel, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("it is a %s now", kind(info.Mode()))
	}
	if err == nil {
		err = lustrefs.WrittenOut(f)
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

// stat describes a file, without following it.
func (t *tree) stat(rel string) (os.FileInfo, error) {
	f, err := t.open(rel, unix.O_PATH, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Stat()
}

// walk calls each for everything below the directory but directories, and with an error for a
// directory that cannot be read.
func (t *tree) walk(each func(rel string, mode os.FileMode, err error) error) error {
	dirs := []string{"."}
	for len(dirs) > 0 {
		dir := dirs[len(dirs)-1]
		dirs = dirs[:len(dirs)-1]
		f, err := t.open(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err == unix.ENOENT && dir != "." {
			continue // removed meanwhile
		}
		if err != nil {
			if err := each(dir, os.ModeDir, err); err != nil {
				return err
			}
			continue
		}
		for {
			entries, err := f.ReadDir(1000)
			for _, e := range entries {
				rel := path.Join(dir, e.Name())
				if e.IsDir() {
					dirs = append(dirs, rel)
				} else if err := each(rel, e.Type(), nil); err != nil {
					f.Close()
					return err
				}
			}
			if err != nil {
				break // the end
			}
		}
		f.Close()
	}
	return nil
}

func kind(m os.FileMode) string {
	switch m & os.ModeType {
	case os.ModeDir:
		return "directory"
	case os.ModeSymlink:
		return "symbolic link"
	case 0:
		return "file"
	}
	return "special file"
}

// checkName says whether an object's name, relative to the prefix, can be a file's path.
func checkName(rel string) error {
	switch {
	case len(rel) >= unix.PathMax:
		return fmt.Errorf("the path has %d bytes, more than %d", len(rel), unix.PathMax-1)
	case strings.ContainsRune(rel, 0):
		return fmt.Errorf("the name has a NUL byte")
	case strings.HasSuffix(rel, "/"):
		return fmt.Errorf("the name ends in a slash, as a directory's")
	}
	for part := range strings.SplitSeq(rel, "/") {
		switch {
		case part == "":
			return fmt.Errorf("the name has an empty part")
		case part == "." || part == "..":
			return fmt.Errorf("the name has a part %q", part)
		case len(part) > unix.NAME_MAX:
			return fmt.Errorf("a part of the name has %d bytes, more than %d", len(part), unix.NAME_MAX)
		}
	}
	return nil
}
