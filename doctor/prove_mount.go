package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehpc/sluice/lustre/probe"
)

func proveMountType(ctx context.Context, l *Lab) (string, error) {
	in, err := l.Lustre.GetInstance(ctx, l.FS.Instance)
	if err != nil {
		return "", err
	}
	mounts, err := probe.Mounts()
	if err != nil {
		return "", err
	}
	m := probe.At(mounts, l.FS.Mount)
	switch {
	case m == nil:
		return "", fmt.Errorf("nothing is mounted at %s", l.FS.Mount)
	case m.Source != in.MountPoint:
		return "", refuted("the source is %q, the instance's mountPoint %q", m.Source, in.MountPoint)
	case !slices.Contains(l.FS.Types, m.Type):
		return "", refuted("the type is %q, accepted are %s", m.Type, strings.Join(l.FS.Types, ", "))
	}
	return fmt.Sprintf("type %s, source %s", m.Type, m.Source), nil
}

func proveHardLinks(_ context.Context, l *Lab) (string, error) {
	dir, err := l.mkdir("hard-links")
	if err != nil {
		return "", err
	}
	file, link := filepath.Join(dir, "version/sub/file"), filepath.Join(dir, "gates/1000/sub/file")
	err = errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.MkdirAll(filepath.Dir(link), 0o755), os.WriteFile(file, []byte("x"), 0o444))
	if err != nil {
		return "", err
	}
	if err := os.Link(file, link); err != nil {
		return "", refuted("%v", err)
	}
	a, errA := os.Lstat(file)
	b, errB := os.Lstat(link)
	if err := errors.Join(errA, errB); err != nil {
		return "", err
	}
	st, _ := b.Sys().(*syscall.Stat_t)
	if !os.SameFile(a, b) || st == nil || st.Nlink != 2 {
		return "", refuted("the link is another file than what it was made of: %+v", st)
	}
	return "a file of one directory was linked into another: one inode, two names", nil
}

func proveRootWrites(ctx context.Context, l *Lab) (string, error) {
	dir, err := l.mkdir("root")
	if errors.Is(err, os.ErrPermission) {
		return "", refuted("%v: is root squashed for this VM? See accessRulesOptions of the instance", err)
	}
	if err != nil {
		return "", err
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		return "", refuted("%v", err)
	}
	info, err := os.Lstat(file)
	if err != nil {
		return "", err
	}
	if uidOf(info) != 0 {
		return "", refuted("a file that root wrote belongs to uid %d: root is squashed", uidOf(info))
	}
	if err := errors.Join(os.Chown(file, nobody, nobody), os.Chmod(file, 0o640)); err != nil {
		return "", refuted("%v", err)
	}
	rules := "no access rules"
	if in, err := l.Lustre.GetInstance(ctx, l.FS.Instance); err == nil && in.AccessRulesOptions != nil {
		rules = "default squash mode " + in.AccessRulesOptions.DefaultSquashMode
	}
	return "root wrote a file, which is root's, and gave it away; the instance has " + rules, nil
}

// proveHang needs a mount that hangs: cutting the only one of the controller is not for a program to decide.
func proveHang(_ context.Context, l *Lab) (string, error) {
	var p probe.Prober
	check := probe.Check{Dir: l.FS.Mount, Types: l.FS.Types}
	first := p.Probe(check)
	switch first.State {
	case probe.OK:
		return "", notApplicable("%s answers: cut it off from its servers and run this proof alone (--only hung-mount)", l.FS.Mount)
	case probe.Hung:
	default:
		return "", refuted("a client without its servers shows %s, not a hang: %s", first.State, first.Detail)
	}
	// What hangs must not grow: a second probe starts no second child.
	second := p.Probe(check)
	if limit := probe.DefaultTimeout + time.Second; first.Took > limit || second.Took > limit || second.State != probe.Hung {
		return "", refuted("a probe of the hung mount took %s, the next one %s and said %s", first.Took, second.Took, second.State)
	}
	return fmt.Sprintf("statfs blocks, the probe came back in %s and left its child behind; the next one in %s", first.Took.Round(time.Millisecond), second.Took.Round(time.Millisecond)), nil
}
