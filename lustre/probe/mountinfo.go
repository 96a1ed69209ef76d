package probe

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// A Mount is one line of /proc/PID/mountinfo.
type Mount struct {
	ID, Parent int
	Root       string // the directory of the file system that is shown at Dir
	Dir        string // mount point
	Options    string // of the mount: "rw,relatime"
	Type       string // "lustre", "fuse.lustre"
	Source     string // "10.0.0.5@tcp:/fs"
}

// Mounts reads the mounts of the calling process from the kernel. It touches no mount, so that a
// file system that hangs cannot stop it. The order is the kernel's: a later mount hides an earlier one.
func Mounts() ([]Mount, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return ParseMountinfo(f)
}

// ParseMountinfo reads the format of /proc/PID/mountinfo (proc(5)). A line that has another form is an error.
func ParseMountinfo(r io.Reader) ([]Mount, error) {
	var mounts []Mount
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20) // an overlay names all its layers in one line
	for n := 1; lines.Scan(); n++ {
		m, err := parseLine(lines.Text())
		if err != nil {
			return nil, fmt.Errorf("mountinfo line %d: %w", n, err)
		}
		mounts = append(mounts, m)
	}
	return mounts, lines.Err()
}

// parseLine reads "ID PARENT MAJ:MIN ROOT DIR OPTIONS [TAG...] - TYPE SOURCE SUPEROPTIONS".
func parseLine(line string) (Mount, error) {
	f := strings.Split(line, " ")
	dash := 6
	for dash < len(f) && f[dash] != "-" {
		dash++
	}
	if len(f) < dash+3 {
		return Mount{}, fmt.Errorf("too few fields in %q", line)
	}
	id, err := strconv.Atoi(f[0])
	if err != nil {
		return Mount{}, fmt.Errorf("mount id: %w", err)
	}
	parent, err := strconv.Atoi(f[1])
	if err != nil {
		return Mount{}, fmt.Errorf("parent id: %w", err)
	}
	return Mount{
		ID: id, Parent: parent,
		Root: unescape(f[3]), Dir: unescape(f[4]), Options: f[5],
		Type: unescape(f[dash+1]), Source: unescape(f[dash+2]),
	}, nil
}

// unescape undoes the kernel's \ooo for blanks, tabs, newlines and backslashes.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if c, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(c))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// At returns the mount that is visible at dir, which is the last one there, or nil.
func At(mounts []Mount, dir string) *Mount {
	for i := len(mounts) - 1; i >= 0; i-- {
		if mounts[i].Dir == dir {
			return &mounts[i]
		}
	}
	return nil
}
