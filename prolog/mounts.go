package prolog

import (
	"fmt"
	"os"
	"strings"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/internal/atomicfile"
	"github.com/sluicehpc/sluice/lustre/probe"
)

// WriteMounts tells later Prologs, which may find no agent, what is to be
// mounted on the node: a line "source dir type,type" each. File systems without
// a source are left out.
func WriteMounts(path string, all []api.FileSystem) error {
	var b strings.Builder
	for _, f := range all {
		if f.Source == "" {
			continue
		}
		types := strings.Join(f.Types, ",")
		if types == "" {
			types = "lustre"
		}
		if strings.ContainsAny(f.Source+f.Dir+types, " \t\n") {
			return fmt.Errorf("file system %q: blanks in %q, %q or %q", f.Name, f.Source, f.Dir, types)
		}
		fmt.Fprintf(&b, "%s %s %s\n", f.Source, f.Dir, types)
	}
	return atomicfile.Write(path, []byte(b.String()), 0o644)
}

// ReadMounts reads what WriteMounts wrote.
func ReadMounts(path string) ([]probe.Check, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var checks []probe.Check
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		switch {
		case len(f) == 0:
			continue
		case len(f) != 3 || !strings.HasPrefix(f[1], "/"):
			return nil, fmt.Errorf("%s: %q is not: source dir types", path, line)
		}
		checks = append(checks, probe.Check{Source: f[0], Dir: f[1], Types: strings.Split(f[2], ",")})
	}
	return checks, nil
}
