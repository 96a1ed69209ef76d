package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/slurm/conf"
)

func uidOf(info fs.FileInfo) uint32 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Uid
	}
	return 0
}

// rerender is what brings Slurm's files back to what sluice.yaml says.
const rerender = "sluiced slurm-config, then systemctl restart slurmctld; what a site wants otherwise belongs in slurm.parameters: of sluice.yaml"

func slurmFiles(ctx context.Context, s *Site) Finding {
	list, err := s.config.SlurmFiles()
	if err != nil {
		return fail("mend sluice.yaml", "%v", err)
	}
	user, userErr := users.ByName(ctx, s.config.Slurm.User)
	var troubles []string
	for _, f := range list {
		path := filepath.Join(s.SlurmDir, f.Name)
		data, err := os.ReadFile(path)
		if err != nil {
			troubles = append(troubles, err.Error())
			continue
		}
		if at := firstDifference(f.Data, data); at != "" {
			troubles = append(troubles, path+" "+at)
		}
		info, err := os.Stat(path)
		if err != nil {
			troubles = append(troubles, err.Error())
			continue
		}
		switch mode := info.Mode().Perm(); {
		case mode != f.Mode.Perm():
			troubles = append(troubles, fmt.Sprintf("%s has mode %04o, want %04o", path, mode, f.Mode.Perm()))
		case f.Mode.Perm()&0o077 == 0 && userErr == nil && uidOf(info) != user.UID:
			troubles = append(troubles, fmt.Sprintf("%s belongs to uid %d, not to SlurmUser %s", path, uidOf(info), user.Name))
		}
	}
	if userErr != nil {
		troubles = append(troubles, fmt.Sprintf("SlurmUser %s: %v", s.config.Slurm.User, userErr))
	}
	if len(troubles) > 0 {
		return fail(rerender, "%s", strings.Join(troubles, "\n"))
	}
	return ok("%d files in %s are as sluice.yaml renders them", len(list), s.SlurmDir)
}

// firstDifference says where got leaves want, or "".
func firstDifference(want, got []byte) string {
	if bytes.Equal(want, got) {
		return ""
	}
	w, g := strings.Split(string(want), "\n"), strings.Split(string(got), "\n")
	for i := range max(len(w), len(g)) {
		var a, b string
		if i < len(w) {
			a = w[i]
		}
		if i < len(g) {
			b = g[i]
		}
		if a != b {
			return fmt.Sprintf("differs from line %d on: %.80q instead of %.80q", i+1, b, a)
		}
	}
	return "differs"
}

func programs(_ context.Context, s *Site) Finding {
	names := append([]string{"sluice-hook", "sluice-prolog", "sluice-epilog"}, conf.ProgramLinks...)
	var troubles []string
	for _, name := range names {
		path := filepath.Join(s.ProgramDir, name)
		target, err := filepath.EvalSymlinks(path)
		if err != nil {
			troubles = append(troubles, err.Error())
			continue
		}
		info, err := os.Stat(target)
		switch {
		case err != nil:
			troubles = append(troubles, err.Error())
		case !info.Mode().IsRegular() || info.Mode().Perm()&0o005 != 0o005:
			// slurmctld runs the hooks as SlurmUser.
			troubles = append(troubles, fmt.Sprintf("%s (%s) is not a program that SlurmUser can run", path, info.Mode()))
		case uidOf(info) != 0 || info.Mode().Perm()&0o022 != 0:
			troubles = append(troubles, fmt.Sprintf("%s can be changed by others than root (uid %d, %s), and root runs it", path, uidOf(info), info.Mode()))
		}
	}
	for _, link := range conf.ProgramLinks {
		if target, err := filepath.EvalSymlinks(filepath.Join(s.ProgramDir, link)); err == nil && filepath.Base(target) != "sluice-hook" {
			troubles = append(troubles, fmt.Sprintf("%s is %s, want a link to sluice-hook", filepath.Join(s.ProgramDir, link), target))
		}
	}
	if len(troubles) > 0 {
		return fail("install Sluice's package again on this VM", "%s", strings.Join(troubles, "\n"))
	}
	return ok("%d programs of Slurm's hooks in %s", len(names), s.ProgramDir)
}

// secrets looks at owners and modes of what others must not read, and of what root believes.
func secrets(ctx context.Context, s *Site) Finding {
	key := s.config.Slurm.KeyFile
	owner, err := users.ByName(ctx, s.config.Slurm.KeyOwner())
	if err != nil {
		return fail("make the user, or set slurm.user: in sluice.yaml", "owner of %s: %v", key, err)
	}
	state := filepath.Dir(s.config.StorePath())
	var troubles []string
	for _, f := range []struct {
		path     string
		owner    uint32
		deny     fs.FileMode // bits that must be off
		optional bool
	}{
		{s.ConfigPath, 0, 0o022, false},
		{key, owner.UID, 0o077, false},
		{state, 0, 0o077, false},
		{s.config.StorePath(), 0, 0o022, false},
		{s.Root + auditLog, 0, 0o077, true},
	} {
		info, err := os.Lstat(f.path)
		switch {
		case errors.Is(err, fs.ErrNotExist) && f.optional:
		case err != nil:
			troubles = append(troubles, err.Error())
		case info.Mode()&fs.ModeSymlink != 0:
			troubles = append(troubles, f.path+" is a symbolic link")
		case uidOf(info) != f.owner:
			troubles = append(troubles, fmt.Sprintf("%s belongs to uid %d, want %d", f.path, uidOf(info), f.owner))
		case info.Mode().Perm()&f.deny != 0:
			troubles = append(troubles, fmt.Sprintf("%s has mode %04o: the bits %04o must be off", f.path, info.Mode().Perm(), f.deny))
		}
	}
	if len(troubles) > 0 {
		return fail("chown and chmod as said; where others could read a key, make a new one", "%s", strings.Join(troubles, "\n"))
	}
	return ok("owners and modes of %s, the store and the audit log are right", key)
}

// auditLog is where policy's decisions are written.
const auditLog = "/var/log/sluice/audit.log"
