package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/sluicehpc/sluice/sandbox/rootfs"
)

// Names lists the sandboxes of this machine that run or left state or data behind, sorted.
func Names() ([]string, error) {
	p, err := pathsOf(DefaultName)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, dir := range []string{filepath.Dir(p.state), filepath.Join(rootfs.Cache(), "sandboxes")} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("list sandboxes: %w", err)
		}
		for _, e := range entries {
			if e.IsDir() && nameRule.MatchString(e.Name()) {
				names = append(names, e.Name())
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}
