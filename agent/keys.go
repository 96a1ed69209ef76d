package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/internal/atomicfile"
	"github.com/sluicehpc/sluice/internal/retry"
	"github.com/sluicehpc/sluice/internal/users"
)

// aboutKeys names the obstacle of keys that are not there yet.
const aboutKeys = "keys"

// serviceTimeout bounds one start of a service that needs the key.
const serviceTimeout = time.Minute

// getKeys brings what Slurm's processes know each other by to this VM, and
// starts those of them that need nothing else.
func (a *Agent) getKeys(ctx context.Context) {
	a.mu.Lock()
	done := a.state.Keyed
	a.mu.Unlock()
	if !a.identified.wait(ctx) {
		return
	}
	said := ""
	err := retry.Do(ctx, a.pace.keys, func(error) bool { return true }, func(ctx context.Context) error {
		err := a.getKeysOnce(ctx)
		if err != nil && ctx.Err() == nil && !done {
			a.obstacle(aboutKeys, "Slurm's key: "+err.Error())
		}
		if err != nil && err.Error() != said {
			said = err.Error()
			a.log.Warn("get Slurm's key", "error", err)
		}
		return err
	})
	if err != nil {
		return // ctx ended
	}
	a.mu.Lock()
	a.state.Keyed = true
	a.save()
	a.mu.Unlock()
	a.obstacle(aboutKeys, "")
}

func (a *Agent) getKeysOnce(ctx context.Context) error {
	var keys api.Keys
	if err := a.call(ctx, a.pace.call, api.OpAgentKeys, api.Ack{}, &keys); err != nil {
		return err
	}
	changed := false
	for _, f := range keys.Files {
		c, err := a.place(ctx, f)
		if err != nil {
			return err
		}
		changed = changed || c
	}
	a.mu.Lock()
	done := a.state.Keyed
	a.mu.Unlock()
	if done && !changed {
		return nil // also what an admin has stopped since stays stopped
	}
	for _, unit := range keys.Services {
		// One that ran before, with a key of the image's, has to read the new one.
		ctx, cancel := context.WithTimeout(ctx, serviceTimeout)
		err := a.systemctl(ctx, "restart", unit)
		cancel()
		if err != nil {
			return fmt.Errorf("start %s: %w", unit, err)
		}
		a.log.Info("started", "unit", unit)
	}
	return nil
}

// place writes a key file unless it is as it should be already.
func (a *Agent) place(ctx context.Context, f api.KeyFile) (changed bool, err error) {
	if !filepath.IsAbs(f.Path) || filepath.Clean(f.Path) != f.Path || len(f.Data) == 0 {
		return false, fmt.Errorf("sluiced sent a key for %q", f.Path)
	}
	owner, err := a.user(ctx, f.Owner)
	if err != nil {
		return false, fmt.Errorf("owner of %s: %w", f.Path, err)
	}
	path := a.config.Root + f.Path
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return false, err
	}
	old, err := own(path, owner)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	if bytes.Equal(old, f.Data) {
		return false, nil
	}
	if err := atomicfile.Write(path, f.Data, 0o600); err != nil {
		return false, err
	}
	a.log.Info("key written", "path", path)
	_, err = own(path, owner)
	return true, err
}

// own makes the file the owner's, and for it alone, and returns what it holds.
// The directory may be the owner's too: nothing but a plain file is touched.
func own(path string, owner users.User) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || !info.Mode().IsRegular() || st.Nlink != 1 {
		return nil, fmt.Errorf("%s is not a plain file", path)
	}
	if err := errors.Join(f.Chmod(0o600), f.Chown(int(owner.UID), int(owner.GID))); err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(f, api.MaxMessage))
}
