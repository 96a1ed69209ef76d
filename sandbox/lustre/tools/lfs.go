package tools

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

func (r *run) lfs(args []string) error {
	if len(args) == 0 {
		return usage("lfs setstripe|getstripe|df|project|quota|setquota|check|osts …")
	}
	switch args[0] {
	case "setstripe":
		return r.setstripe(args[1:])
	case "getstripe":
		return r.getstripe(args[1:])
	case "df":
		return r.df(args[1:])
	case "project":
		return r.project(args[1:])
	case "quota":
		return r.quota(args[1:])
	case "setquota":
		return r.setquota(args[1:])
	case "check":
		return r.check(args[1:])
	case "osts":
		return r.osts(args[1:])
	case "--version":
		fmt.Fprintln(r.stdout, "lfs "+version)
		return nil
	}
	return usage("unknown command %q", args[0])
}

func setAttr(path, name string, v any) error {
	value, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return unix.Lsetxattr(path, name, value, 0)
}

func getAttr(path, name string, v any) error {
	buf := make([]byte, 64<<10)
	n, err := unix.Lgetxattr(path, name, buf)
	if err != nil {
		return err
	}
	return json.Unmarshal(buf[:n], v)
}

var layoutOptions = []option{
	{'c', "stripe-count", true}, {'S', "stripe-size", true}, {'i', "stripe-index", true}, {'p', "pool", true},
	{'E', "component-end", true}, {'d', "delete", false},
}

// layout reads the options of setstripe.
func layout(options []given) (l lustrefs.Layout, remove bool, err error) {
	c := lustrefs.DefaultLayout.Components[0]
	ends := false
	for _, o := range options {
		n := int64(0)
		switch o.short {
		case 'E':
			if ends {
				l.Components = append(l.Components, c)
				c.End = -1
			}
			ends = true
			if c.End = -1; o.value != "-1" && o.value != "eof" && o.value != "EOF" {
				c.End, err = size(o.value, 1)
			}
			if n := len(l.Components); err == nil && n > 0 && (l.Components[n-1].End < 0 || c.End >= 0 && c.End <= l.Components[n-1].End) {
				err = usage("component end %s is not above the one before", o.value)
			}
		case 'S':
			if c.Size, err = size(o.value, 1); err == nil && (c.Size == 0 || c.Size%(64<<10) != 0) {
				err = usage("stripe size %s is not a multiple of 64 KiB", o.value)
			}
		case 'c', 'i':
			if n, err = strconv.ParseInt(o.value, 10, 16); err != nil || n < -1 || n > 2000 {
				err = usage("%q is not a number from -1 to 2000", o.value)
			}
			if o.short == 'c' {
				c.Count = int(n)
			} else {
				c.Index = int(n)
			}
		case 'p':
			c.Pool = o.value
		case 'd':
			remove = true
		}
		if err != nil {
			return l, false, err
		}
	}
	if c.Count == 0 {
		c.Count = 1
	}
	l.Components = append(l.Components, c)
	return l, remove, nil
}

// setstripe sets the layout of a new file, or the one that files made in a directory get.
func (r *run) setstripe(args []string) error {
	options, paths, err := parse(args, layoutOptions...)
	if err != nil {
		return err
	}
	if len(paths) == 0 {
		return usage("setstripe: a path is missing")
	}
	l, remove, err := layout(options)
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range paths {
		err := func() error {
			if _, err := r.at(p); err != nil {
				return err
			}
			info, err := os.Stat(p)
			if errors.Is(err, fs.ErrNotExist) && !remove {
				// Without an open, so that it has no layout yet.
				err = unix.Mknod(p, unix.S_IFREG|0o666, 0)
			} else if err == nil && remove {
				if !info.IsDir() {
					return syscall.EPERM
				}
				if err = unix.Removexattr(p, lustrefs.LayoutAttr); errors.Is(err, unix.ENODATA) {
					err = nil
				}
				return err
			}
			if err != nil {
				return err
			}
			return setAttr(p, lustrefs.LayoutAttr, l)
		}()
		if errors.Is(err, syscall.EEXIST) {
			err = &worded{fmt.Sprintf("setstripe error for '%s': stripe already set", p), err}
		} else if err != nil {
			err = fmt.Errorf("setstripe error for '%s': %w", p, err)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// worded is an error in other words than its own.
type worded struct {
	text string
	err  error
}

func (w *worded) Error() string { return w.text }
func (w *worded) Unwrap() error { return w.err }

func (r *run) getstripe(args []string) error {
	options, paths, err := parse(args, option{'c', "stripe-count", false}, option{'S', "stripe-size", false}, option{'i', "stripe-index", false},
		option{'p', "pool", false}, option{'d', "directory", false}, option{'q', "quiet", false}, option{'v', "verbose", false},
		option{'r', "recursive", false}, option{'y', "yaml", false})
	if err != nil {
		return err
	}
	if len(paths) == 0 {
		return usage("getstripe: a path is missing")
	}
	only, itself, all := byte(0), false, false
	for _, o := range options {
		switch o.short {
		case 'c', 'S', 'i', 'p':
			only = o.short
		case 'd':
			itself = true
		case 'r':
			all = true
		}
	}
	for _, p := range paths {
		if _, err := r.at(p); err != nil {
			return err
		}
		info, err := os.Stat(p)
		if err != nil {
			return fmt.Errorf("getstripe: %w", err)
		}
		if err := r.showStripe(p, info.IsDir(), only); err != nil {
			return err
		}
		if !info.IsDir() || itself {
			continue
		}
		err = filepath.WalkDir(p, func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case path == p:
				return nil
			case !d.IsDir() && !d.Type().IsRegular():
				return nil
			}
			if err := r.showStripe(path, d.IsDir(), only); err != nil {
				return err
			}
			if d.IsDir() && !all {
				return filepath.SkipDir
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("getstripe: %w", err)
		}
	}
	return nil
}

// lastComponent is what a single value is said of.
func lastComponent(l lustrefs.Layout) lustrefs.Component { return l.Components[len(l.Components)-1] }

func (r *run) showStripe(path string, isDir bool, only byte) error {
	var l lustrefs.Layout
	if err := getAttr(path, lustrefs.LayoutAttr, &l); err != nil {
		return fmt.Errorf("getstripe: %s: %w", path, err)
	}
	switch c := lastComponent(l); only {
	case 'c':
		fmt.Fprintln(r.stdout, c.Count)
		return nil
	case 'S':
		fmt.Fprintln(r.stdout, c.Size)
		return nil
	case 'i':
		fmt.Fprintln(r.stdout, offset(c, isDir))
		return nil
	case 'p':
		fmt.Fprintln(r.stdout, c.Pool)
		return nil
	}
	fmt.Fprintln(r.stdout, path)
	if isDir && len(l.Components) == 1 {
		c := l.Components[0]
		fmt.Fprintf(r.stdout, "stripe_count:  %d stripe_size:   %d pattern:       raid0 stripe_offset: %d", c.Count, c.Size, c.Index)
		if c.Pool != "" {
			fmt.Fprintf(r.stdout, " pool:          %s", c.Pool)
		}
		fmt.Fprint(r.stdout, "\n\n")
		return nil
	}
	indent := ""
	if len(l.Components) > 1 {
		fmt.Fprintf(r.stdout, "  lcm_layout_gen:    %d\n  lcm_mirror_count:  1\n  lcm_entry_count:   %d\n", len(l.Components), len(l.Components))
		indent = "      "
	}
	begin := int64(0)
	for i, c := range l.Components {
		if len(l.Components) > 1 {
			end := "EOF"
			if c.End >= 0 {
				end = fmt.Sprint(c.End)
			}
			fmt.Fprintf(r.stdout, "    lcme_id:             %d\n    lcme_mirror_id:      0\n    lcme_flags:          init\n", i+1)
			fmt.Fprintf(r.stdout, "    lcme_extent.e_start: %d\n    lcme_extent.e_end:   %s\n", begin, end)
			begin = c.End
		}
		fmt.Fprintf(r.stdout, "%[1]slmm_stripe_count:  %[2]d\n%[1]slmm_stripe_size:   %[3]d\n%[1]slmm_pattern:       raid0\n", indent, c.Count, c.Size)
		fmt.Fprintf(r.stdout, "%[1]slmm_layout_gen:    0\n%[1]slmm_stripe_offset: %[2]d\n", indent, offset(c, isDir))
		if c.Pool != "" {
			fmt.Fprintf(r.stdout, "%slmm_pool:          %s\n", indent, c.Pool)
		}
	}
	fmt.Fprintln(r.stdout)
	return nil
}

// offset is the first target of a file, which has one, or what a directory asks for.
func offset(c lustrefs.Component, isDir bool) int {
	if isDir {
		return c.Index
	}
	return max(0, c.Index)
}

// targets are the parts that a file system shows of itself here: one of each kind.
func targets(m mount) []struct{ uuid, label string } {
	return []struct{ uuid, label string }{
		{m.name + "-MDT0000_UUID", m.dir + "[MDT:0]"}, {m.name + "-OST0000_UUID", m.dir + "[OST:0]"},
	}
}

func (r *run) df(args []string) error {
	options, paths, err := parse(args, option{'h', "human-readable", false}, option{'i', "inodes", false})
	if err != nil {
		return err
	}
	human, inodes := false, false
	for _, o := range options {
		human, inodes = human || o.short == 'h', inodes || o.short == 'i'
	}
	all, err := r.mounts()
	if err != nil {
		return err
	}
	if len(paths) > 0 {
		m, err := r.at(paths[0])
		if err != nil {
			return err
		}
		all = []mount{m}
	}
	for _, m := range all {
		var st unix.Statfs_t
		if err := unix.Statfs(m.dir, &st); err != nil {
			return fmt.Errorf("df: %s: %w", m.dir, err)
		}
		unit := "1K-blocks"
		total, free, available := int64(st.Blocks)*st.Bsize/1024, int64(st.Bfree)*st.Bsize/1024, int64(st.Bavail)*st.Bsize/1024
		if inodes {
			unit, total, free, available = "Inodes", int64(st.Files), int64(st.Ffree), int64(st.Ffree)
		}
		show := func(n int64) string {
			if !human {
				return fmt.Sprint(n)
			}
			bytes := float64(n)
			if !inodes {
				bytes *= 1024
			}
			for _, u := range []string{"", "K", "M", "G", "T"} {
				if bytes < 1024 {
					return fmt.Sprintf("%.1f%s", bytes, u)
				}
				bytes /= 1024
			}
			return fmt.Sprintf("%.1fP", bytes)
		}
		if human && !inodes {
			unit = "bytes"
		}
		percent := int64(0)
		if used := total - free; used+available > 0 {
			percent = (used*100 + used + available - 1) / (used + available)
		}
		line := func(uuid, label string) {
			fmt.Fprintf(r.stdout, "%-20s %11s %11s %11s %3d%% %s\n", uuid, show(total), show(total-free), show(available), percent, label)
		}
		fmt.Fprintf(r.stdout, "%-20s %11s %11s %11s %4s %s\n", "UUID", unit, "Used", "Available", "Use%", "Mounted on")
		for _, t := range targets(m) {
			line(t.uuid, t.label)
		}
		fmt.Fprintln(r.stdout)
		line("filesystem_summary:", m.dir)
		fmt.Fprintln(r.stdout)
	}
	return nil
}

// project shows or sets projects: with -p, -s, -C or -c it sets or checks, else it shows.
func (r *run) project(args []string) error {
	options, paths, err := parse(args, option{'p', "project", true}, option{'s', "", false}, option{'r', "recursive", false},
		option{'d', "directory", false}, option{'C', "", false}, option{'k', "", false}, option{'c', "check", false}, option{'0', "", false})
	if err != nil {
		return err
	}
	has := func(short byte) bool {
		return slices.ContainsFunc(options, func(o given) bool { return o.short == short })
	}
	id := uint64(0)
	for _, o := range options {
		if o.short == 'p' {
			if id, err = strconv.ParseUint(o.value, 10, 32); err != nil {
				return usage("%q is not a project id", o.value)
			}
		}
	}
	if len(paths) == 0 {
		return usage("project: a path is missing")
	}
	one := func(path string, isDir bool) error {
		var p lustrefs.Project
		if err := getAttr(path, lustrefs.ProjectAttr, &p); err != nil {
			return fmt.Errorf("project: %s: %w", path, err)
		}
		was := p
		if has('p') {
			p.ID = uint32(id)
		}
		if has('s') {
			p.Inherit = isDir
		}
		if has('C') {
			p.Inherit = false
			if !has('k') {
				p.ID = 0
			}
		}
		switch {
		case has('c'):
			if p != was {
				fmt.Fprintf(r.stdout, "%s - project identifier is not set (inode=%d, tree=%d)\n", path, was.ID, p.ID)
			}
		case p != was:
			if err := setAttr(path, lustrefs.ProjectAttr, p); err != nil {
				return fmt.Errorf("project: failed to set the project of '%s': %w", path, err)
			}
		case !has('p') && !has('s') && !has('C'):
			flag := '-'
			if p.Inherit {
				flag = 'P'
			}
			fmt.Fprintf(r.stdout, "%5d %c %s\n", p.ID, flag, path)
		}
		return nil
	}
	changes := has('p') || has('s') || has('C')
	for _, path := range paths {
		if _, err := r.at(path); err != nil {
			return err
		}
		info, err := os.Lstat(path)
		if err != nil {
			return fmt.Errorf("project: %w", err)
		}
		if !info.IsDir() || has('d') || changes && !has('r') {
			if err := one(path, info.IsDir()); err != nil {
				return err
			}
			continue
		}
		err = filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case p == path && !changes:
				return nil // what is in it
			case !d.IsDir() && !d.Type().IsRegular():
				return nil
			}
			if err := one(p, d.IsDir()); err != nil {
				return err
			}
			if d.IsDir() && p != path && !has('r') {
				return filepath.SkipDir
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

var quotaOptions = []option{
	{'u', "user", true}, {'g', "group", true}, {'p', "projid", true},
	{'b', "block-softlimit", true}, {'B', "block-hardlimit", true}, {'i', "inode-softlimit", true}, {'I', "inode-hardlimit", true},
}

// whose reads of whom a quota is.
func (r *run) whose(o given) (kind byte, id uint32, err error) {
	if n, err := strconv.ParseUint(o.value, 10, 32); err == nil {
		return o.short, uint32(n), nil
	}
	switch o.short {
	case 'u':
		u, err := users.ByName(r.ctx, o.value)
		return 'u', u.UID, err
	case 'g':
		id, err := users.GroupID(r.ctx, o.value)
		return 'g', id, err
	}
	return 0, 0, usage("%q is not a project id", o.value)
}

func (r *run) setquota(args []string) error {
	options, paths, err := parse(args, quotaOptions...)
	if err != nil {
		return err
	}
	if len(paths) != 1 {
		return usage("setquota -u|-g|-p ID -b|-B|-i|-I LIMIT FILESYSTEM")
	}
	m, err := r.at(paths[0])
	if err != nil {
		return err
	}
	kind, id := byte(0), uint32(0)
	for _, o := range options {
		if o.short == 'u' || o.short == 'g' || o.short == 'p' {
			if kind, id, err = r.whose(o); err != nil {
				return err
			}
		}
	}
	if kind == 0 {
		return usage("setquota: -u, -g or -p is missing")
	}
	name := lustrefs.QuotaAttr + lustrefs.QuotaName(kind, id)
	var q lustrefs.Quota
	if err := getAttr(m.dir, name, &q); err != nil {
		return fmt.Errorf("setquota: %w", err)
	}
	for _, o := range options {
		n := int64(0)
		switch o.short {
		case 'b', 'B':
			n, err = size(o.value, 1024)
			n /= 1024
		case 'i', 'I':
			n, err = size(o.value, 1)
		}
		if err != nil {
			return err
		}
		switch o.short {
		case 'b':
			q.BlockSoft = n
		case 'B':
			q.BlockHard = n
		case 'i':
			q.InodeSoft = n
		case 'I':
			q.InodeHard = n
		}
	}
	if err := setAttr(m.dir, name, q.Limits); err != nil {
		return fmt.Errorf("setquota failed: %w", err)
	}
	return nil
}

func (r *run) quota(args []string) error {
	options, paths, err := parse(args, append(quotaOptions[:3:3], option{'q', "quiet", false}, option{'v', "verbose", false}, option{'h', "human-readable", false})...)
	if err != nil {
		return err
	}
	if len(paths) != 1 {
		return usage("quota [-q] -u|-g|-p ID FILESYSTEM")
	}
	m, err := r.at(paths[0])
	if err != nil {
		return err
	}
	quiet := slices.ContainsFunc(options, func(o given) bool { return o.short == 'q' })
	options = slices.DeleteFunc(options, func(o given) bool { return o.short != 'u' && o.short != 'g' && o.short != 'p' })
	if len(options) == 0 {
		options = []given{{'u', fmt.Sprint(os.Getuid())}}
	}
	for _, o := range options {
		kind, id, err := r.whose(o)
		if err != nil {
			return err
		}
		var q lustrefs.Quota
		if err := getAttr(m.dir, lustrefs.QuotaAttr+lustrefs.QuotaName(kind, id), &q); err != nil {
			return fmt.Errorf("quota: %w", err)
		}
		if !quiet {
			word := map[byte]string{'u': "usr", 'g': "grp", 'p': "prj"}[kind]
			fmt.Fprintf(r.stdout, "Disk quotas for %s %s (%cid %d):\n", word, o.value, kind, id)
			fmt.Fprintf(r.stdout, "%15s%8s %7s%8s%8s%8s %7s%8s%8s\n", "Filesystem", "kbytes", "quota", "limit", "grace", "files", "quota", "limit", "grace")
		}
		used := func(n, soft, hard int64) string {
			if soft > 0 && n > soft || hard > 0 && n >= hard {
				return fmt.Sprintf("%d*", n)
			}
			return fmt.Sprint(n)
		}
		fmt.Fprintf(r.stdout, "%15s%8s %7d%8d%8s%8s %7d%8d%8s\n", m.dir, used(q.Blocks, q.BlockSoft, q.BlockHard), q.BlockSoft, q.BlockHard, "-",
			used(q.Inodes, q.InodeSoft, q.InodeHard), q.InodeSoft, q.InodeHard, "-")
	}
	return nil
}

// check asks the servers, and waits for them as the real one does.
func (r *run) check(args []string) error {
	if len(args) == 0 || !slices.Contains([]string{"mds", "osts", "mgts", "servers", "all"}, args[0]) {
		return usage("check mds|osts|servers [PATH]")
	}
	all, err := r.mounts()
	if err != nil {
		return err
	}
	if len(args) > 1 {
		m, err := r.at(args[1])
		if err != nil {
			return err
		}
		all = []mount{m}
	}
	for _, m := range all {
		var st unix.Statfs_t
		err := unix.Statfs(m.dir, &st)
		for _, kind := range []struct{ what, target, client string }{{"mds", "MDT0000", "mdc"}, {"osts", "OST0000", "osc"}} {
			if args[0] != "servers" && args[0] != "all" && args[0] != kind.what {
				continue
			}
			name := fmt.Sprintf("%s-%s-%s-%s", m.name, kind.target, kind.client, m.instance())
			if err != nil {
				return fmt.Errorf("check: cannot check target '%s': %w", name, err)
			}
			fmt.Fprintf(r.stdout, "%s active.\n", name)
		}
	}
	return nil
}

func (r *run) osts(args []string) error {
	all, err := r.mounts()
	if err != nil {
		return err
	}
	if len(args) > 0 {
		m, err := r.at(args[0])
		if err != nil {
			return err
		}
		all = []mount{m}
	}
	for _, m := range all {
		fmt.Fprintf(r.stdout, "OBDS:\n0: %s ACTIVE\n", targets(m)[1].uuid)
	}
	return nil
}
