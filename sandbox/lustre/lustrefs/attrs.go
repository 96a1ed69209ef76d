package lustrefs

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// What a client's tools ask of the servers travels as extended attributes of names that only they use. Their values
// are JSON.
const (
	// ProjectAttr is the Project of a file or directory. Only root may set it.
	ProjectAttr = "lustre.sluice.project"
	// LayoutAttr is the Layout of a file, or the one that files made in a directory get. A file's is set once: by its
	// first open, or before, on one that mknod(2) made.
	LayoutAttr = "lustre.sluice.layout"
	// QuotaAttr and a name of QuotaName are the Quota of a user, group or project, on the root directory. Only root may
	// set it, and only its limits.
	QuotaAttr = "lustre.sluice.quota."
)

// hidden is where the directory keeps them.
const hidden = "trusted.sluice."

const (
	projectKept = hidden + "project"
	layoutKept  = hidden + "layout"
	quotaKept   = hidden + "quota"
)

// Project is to which project a file counts. Inherit makes what is made in a directory belong to its project; nothing of
// another project can be linked or moved into it.
type Project struct {
	ID      uint32 `json:"id"`
	Inherit bool   `json:"inherit"`
}

// Layout says how a file is striped: component after component, each up to its end.
type Layout struct {
	Components []Component `json:"components"`
}

// Component is one of a Layout.
type Component struct {
	End   int64  `json:"end"`   // bytes; -1 is the end of the file
	Count int    `json:"count"` // stripes; -1 is all targets
	Size  int64  `json:"size"`  // of a stripe, in bytes
	Index int    `json:"index"` // of the first target; -1 is any
	Pool  string `json:"pool,omitempty"`
}

// DefaultLayout is that of files for which nothing was said.
var DefaultLayout = Layout{Components: []Component{{End: -1, Count: 1, Size: 1 << 20, Index: -1}}}

// pendingLayout is kept on a file that mknod(2) made and nobody has opened.
const pendingLayout = "pending"

// Limits are a quota's. 0 is no limit.
type Limits struct {
	BlockSoft int64 `json:"block_soft"` // KiB
	BlockHard int64 `json:"block_hard"`
	InodeSoft int64 `json:"inode_soft"`
	InodeHard int64 `json:"inode_hard"`
}

// Quota is limits and what is used.
type Quota struct {
	Limits
	Blocks int64 `json:"blocks"` // KiB
	Inodes int64 `json:"inodes"`
}

// QuotaName names the quota of a user (u), group (g) or project (p).
func QuotaName(kind byte, id uint32) string { return fmt.Sprintf("%c.%d", kind, id) }

// getAttr reads a kept attribute into v; without the attribute it leaves v as it is.
func getAttr(fd int, name string, v any) error {
	buf := make([]byte, 4096)
	n, err := unix.Getxattr(proc(fd), name, buf)
	switch {
	case errors.Is(err, unix.ENODATA):
		return nil
	case errors.Is(err, unix.ERANGE):
		buf = make([]byte, 64<<10) // the kernel's limit
		n, err = unix.Getxattr(proc(fd), name, buf)
	}
	if err != nil {
		return err
	}
	return json.Unmarshal(buf[:n], v)
}

func setAttr(fd int, name string, v any) error {
	value, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return unix.Setxattr(proc(fd), name, value, 0)
}

func projectOf(fd int) (p Project, err error) {
	return p, getAttr(fd, projectKept, &p)
}

// Inherit gives what was just made in a directory the directory's project and layout. Both are descriptors of any kind.
func Inherit(dir, made int, isDir bool) error {
	p, err := projectOf(dir)
	if err == nil && p.Inherit {
		p.Inherit = isDir
		err = setAttr(made, projectKept, p)
	}
	if err != nil {
		return err
	}
	var l Layout
	if err := getAttr(dir, layoutKept, &l); err != nil || l.Components == nil {
		return err
	}
	return setAttr(made, layoutKept, l)
}

// apart says whether moving or linking a file into a directory would leave its project. everyDir counts each directory
// as one.
func apart(file, dir int, everyDir bool) (bool, error) {
	if everyDir {
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlink(proc(file), buf)
		if err != nil {
			return false, err
		}
		var from, to syscall.Stat_t
		if err := syscall.Stat(filepath.Dir(string(buf[:n])), &from); err != nil {
			return false, err
		}
		if err := syscall.Fstat(dir, &to); err != nil {
			return false, err
		}
		if keyOf(&from) != keyOf(&to) {
			return true, nil
		}
	}
	to, err := projectOf(dir)
	if err != nil || !to.Inherit {
		return false, err
	}
	from, err := projectOf(file)
	return from.ID != to.ID, err
}

// toolAttr returns the value of an attribute of the tools; ok is false when name is none of them.
func (f *fileSystem) toolAttr(fd int, name string) (value []byte, ok bool, err error) {
	var v any
	switch {
	case name == ProjectAttr:
		v, err = projectOf(fd)
	case name == LayoutAttr:
		l := Layout{}
		if err = getAttr(fd, layoutKept, &l); err != nil || l.Components == nil {
			l, err = DefaultLayout, nil // pending, or never said
		}
		v = l
	case strings.HasPrefix(name, QuotaAttr):
		v, err = f.quota(strings.TrimPrefix(name, QuotaAttr))
	default:
		return nil, false, nil
	}
	if err == nil {
		value, err = json.Marshal(v)
	}
	return value, true, err
}

// setToolAttr sets one for a caller; ok is false when name is none of them.
func (f *fileSystem) setToolAttr(fd int, name string, data []byte, root bool) (ok bool, err error) {
	switch {
	case name == ProjectAttr:
		var p Project
		if !root {
			return true, unix.EPERM
		}
		if json.Unmarshal(data, &p) != nil {
			return true, unix.EINVAL
		}
		return true, setAttr(fd, projectKept, p)
	case name == LayoutAttr:
		var l Layout
		if json.Unmarshal(data, &l) != nil || len(l.Components) == 0 {
			return true, unix.EINVAL
		}
		var st syscall.Stat_t
		if err := syscall.Fstat(fd, &st); err != nil {
			return true, err
		}
		if st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
			var kept any
			if err := getAttr(fd, layoutKept, &kept); err != nil {
				return true, err
			}
			if kept != pendingLayout || st.Size > 0 {
				return true, unix.EEXIST
			}
		}
		return true, setAttr(fd, layoutKept, l)
	case strings.HasPrefix(name, QuotaAttr):
		var l Limits
		if !root {
			return true, unix.EPERM
		}
		who := strings.TrimPrefix(name, QuotaAttr)
		if _, _, err := parseQuotaName(who); err != nil || json.Unmarshal(data, &l) != nil {
			return true, unix.EINVAL
		}
		return true, f.setLimits(who, l)
	}
	return false, nil
}

func parseQuotaName(who string) (kind byte, id uint32, err error) {
	k, number, _ := strings.Cut(who, ".")
	n, err := strconv.ParseUint(number, 10, 32)
	if err != nil || len(k) != 1 || !strings.Contains("ugp", k) {
		return 0, 0, unix.EINVAL
	}
	return k[0], uint32(n), nil
}

// setLimits changes one quota's limits. Several mounts may do so at a time.
func (f *fileSystem) setLimits(who string, l Limits) error {
	fd, err := f.reopen(f.fdOf(rootID), unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(fd) // and with it the lock
	if err := unix.Flock(fd, unix.LOCK_EX); err != nil {
		return err
	}
	all := map[string]Limits{}
	if err := getAttr(fd, quotaKept, &all); err != nil {
		return err
	}
	if all[who] = l; l == (Limits{}) {
		delete(all, who)
	}
	return setAttr(fd, quotaKept, all)
}

// quota counts what is used by looking at every file.
func (f *fileSystem) quota(who string) (q Quota, err error) {
	kind, id, err := parseQuotaName(who)
	if err != nil {
		return q, err
	}
	all := map[string]Limits{}
	if err := getAttr(f.fdOf(rootID), quotaKept, &all); err != nil {
		return q, err
	}
	q.Limits = all[who]
	linked := map[uint64]bool{}
	err = filepath.WalkDir(f.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // gone meanwhile
		}
		var st syscall.Stat_t
		if syscall.Lstat(path, &st) != nil || linked[st.Ino] {
			return nil
		}
		linked[st.Ino] = st.Nlink > 1
		owner := map[byte]uint32{'u': st.Uid, 'g': st.Gid}[kind]
		if kind == 'p' {
			var p Project
			buf := make([]byte, 256)
			if n, err := unix.Lgetxattr(path, projectKept, buf); err == nil {
				_ = json.Unmarshal(buf[:n], &p) // what is not readable is of no project
			}
			owner = p.ID
		}
		if owner == id {
			q.Inodes++
			q.Blocks += st.Blocks / 2
		}
		return nil
	})
	return q, err
}
