package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"time"
)

// Manager is the part of systemd that the guest needs: it starts units in their order, watches
// them, and stops them. Make one with NewManager.
type Manager struct {
	UnitDirs   []string      // where units are found, the first wins
	VendorDir  string        // the distribution's own services; its targets are for real machines and not read
	ConfigDir  string        // where enable makes links: /etc/systemd/system
	RunDir     string        // for notify sockets: /run/systemd
	JournalDir string        // one file a unit
	Console    io.Writer     // what the machine says about itself
	Binary     string        // the guest binary, for "exec"
	StopLimit  time.Duration // the most that a unit gets to stop at shutdown

	mu       sync.Mutex
	services map[string]*service // mu guards the map, not the services
}

// NewManager returns a manager of the VM it runs in.
func NewManager(console io.Writer) *Manager {
	return &Manager{
		UnitDirs: []string{"/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system"}, VendorDir: "/usr/lib/systemd/system",
		ConfigDir: "/etc/systemd/system", RunDir: "/run/systemd", JournalDir: JournalDir, Console: console, Binary: Binary,
		StopLimit: 2 * time.Second,
	}
}

// Errors of Manager's methods, to be compared with errors.Is.
var (
	ErrNoUnit     = errors.New("unit not found")
	ErrDependency = errors.New("a unit that it requires failed")
)

func (m *Manager) logf(format string, args ...any) {
	fmt.Fprintf(m.Console, "%s init: %s\n", time.Now().UTC().Format(stamp), fmt.Sprintf(format, args...))
}

// unitName completes a name as systemctl does: "slurmd" is slurmd.service.
func unitName(name string) (string, error) {
	if name == "" || strings.ContainsAny(name, "/\x00\n") || strings.HasPrefix(name, ".") {
		return "", fmt.Errorf("%q is not a unit's name", name)
	}
	switch filepath.Ext(name) {
	case ".service", ".target", ".socket", ".mount", ".timer", ".path", ".slice", ".device", ".swap", ".automount":
		return name, nil
	}
	return name + ".service", nil
}

// builtins are units that every VM has; a file of the same name replaces one.
var builtins = map[string]string{
	"google-startup-scripts.service": `[Unit]
Description=Google Compute Engine Startup Scripts
Wants=network-online.target
After=network-online.target
[Service]
Type=oneshot
ExecStart=` + Binary + ` startup-script
KillMode=process
`,
}

// dirs are the directories that a unit of that name may be in.
func (m *Manager) dirs(name string) []string {
	if strings.HasSuffix(name, ".target") {
		return m.UnitDirs
	}
	return append(m.UnitDirs[:len(m.UnitDirs):len(m.UnitDirs)], m.VendorDir)
}

// load reads a unit with its drop-ins. Targets need no file; of the other kinds only services are known.
func (m *Manager) load(name string) (*Unit, error) {
	dirs := m.dirs(name)
	if !strings.HasSuffix(name, ".service") && !strings.HasSuffix(name, ".target") {
		return nil, fmt.Errorf("%w: %s (only services and targets are known here)", ErrNoUnit, name)
	}
	var files []io.Reader
	for _, candidate := range []string{name, template(name)} {
		if candidate == "" || len(files) > 0 {
			continue
		}
		for _, dir := range dirs {
			path := filepath.Join(dir, candidate)
			if target, err := os.Readlink(path); err == nil && target == "/dev/null" {
				return nil, fmt.Errorf("%s is masked", name)
			}
			data, err := os.ReadFile(path)
			if err == nil {
				files = append(files, strings.NewReader(string(data)))
				break
			}
			if !errors.Is(err, os.ErrNotExist) {
				return nil, err
			}
		}
	}
	if len(files) == 0 {
		switch text, ok := builtins[name]; {
		case ok:
			files = append(files, strings.NewReader(text))
		case strings.HasSuffix(name, ".target"):
		default:
			return nil, fmt.Errorf("%w: %s", ErrNoUnit, name)
		}
	}
	for i := len(dirs) - 1; i >= 0; i-- {
		dropIns, err := filepath.Glob(filepath.Join(dirs[i], name+".d", "*.conf"))
		if err != nil {
			return nil, err
		}
		sort.Strings(dropIns)
		for _, path := range dropIns {
			data, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			files = append(files, strings.NewReader(string(data)))
		}
	}
	u, err := ParseUnit(name, files...)
	if err != nil {
		return nil, err
	}
	for _, dir := range m.UnitDirs {
		for kind, list := range map[string]*[]string{".wants": &u.Wants, ".requires": &u.Requires} {
			entries, err := os.ReadDir(filepath.Join(dir, name+kind))
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return nil, err
			}
			for _, e := range entries {
				*list = append(*list, e.Name())
			}
		}
	}
	if name == "multi-user.target" {
		u.Wants = append(u.Wants, "google-startup-scripts.service")
	}
	if strings.HasSuffix(name, ".target") { // a target is reached when what it pulls in has started
		u.After = append(append(u.After, u.Wants...), u.Requires...)
	}
	return u, nil
}

// template returns the file that an instance is made from: "x@.service" for "x@1.service".
func template(name string) string {
	prefix, rest, ok := strings.Cut(name, "@")
	ext := filepath.Ext(name)
	if !ok || rest == ext {
		return ""
	}
	return prefix + "@" + ext
}

// service returns the record of a unit, and makes it when there is none.
func (m *Manager) service(name string) *service {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.services == nil {
		m.services = map[string]*service{}
	}
	s := m.services[name]
	if s == nil {
		s = newService(m, name)
		m.services[name] = s
	}
	return s
}

func (m *Manager) known() []*service {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []*service
	for _, s := range m.services {
		all = append(all, s)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].name < all[j].name })
	return all
}

// transaction is the units that one start pulls in.
type transaction struct {
	units map[string]*Unit
	after map[string][]string // each waits for these
	jobs  map[string]*job
}

type job struct {
	done chan struct{} // closed after err is set
	err  error
}

// Start starts the units and all that they pull in, each after what it is ordered after, and waits.
// The error joins those of the named units; a unit that is only wanted may fail.
func (m *Manager) Start(ctx context.Context, names ...string) error {
	t := &transaction{units: map[string]*Unit{}, after: map[string][]string{}, jobs: map[string]*job{}}
	var errs []error
	for _, name := range names {
		if err := m.pull(t, name); err != nil {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	m.order(t)
	for name := range t.units {
		t.jobs[name] = &job{done: make(chan struct{})}
	}
	for name, u := range t.units {
		go func() {
			j := t.jobs[name]
			defer close(j.done)
			j.err = m.run(ctx, t, u)
		}()
	}
	for _, name := range names {
		j := t.jobs[name]
		<-j.done
		if j.err != nil {
			errs = append(errs, j.err)
		}
	}
	return errors.Join(errs...)
}

func (m *Manager) pull(t *transaction, name string) error {
	if t.units[name] != nil {
		return nil
	}
	u, err := m.load(name)
	if err != nil {
		return err
	}
	t.units[name] = u
	for _, r := range u.Requires {
		if err := m.pull(t, r); err != nil {
			return fmt.Errorf("%s requires %s: %w", name, r, err)
		}
	}
	for _, w := range u.Wants {
		switch err := m.pull(t, w); {
		case errors.Is(err, ErrNoUnit): // as systemd does, without a word
		case err != nil:
			m.logf("%s wants %s: %v", name, w, err)
		}
	}
	return nil
}

// order turns After= and Before= into t.after, and drops the edges that would close a circle.
func (m *Manager) order(t *transaction) {
	names := make([]string, 0, len(t.units))
	for name := range t.units {
		names = append(names, name)
	}
	sort.Strings(names)
	edges := map[string]map[string]bool{}
	for _, name := range names {
		edges[name] = map[string]bool{}
	}
	for _, name := range names {
		for _, a := range t.units[name].After {
			if t.units[a] != nil && a != name {
				edges[name][a] = true
			}
		}
		for _, b := range t.units[name].Before {
			if t.units[b] != nil && b != name {
				edges[b][name] = true
			}
		}
	}
	const entered, left = 1, 2
	state := map[string]int{}
	var visit func(name string)
	visit = func(name string) {
		state[name] = entered
		var deps []string
		for d := range edges[name] {
			deps = append(deps, d)
		}
		sort.Strings(deps)
		for _, d := range deps {
			if state[d] == entered {
				m.logf("%s and %s are ordered after each other: the first no longer waits", name, d)
				continue
			}
			t.after[name] = append(t.after[name], d)
			if state[d] == 0 {
				visit(d)
			}
		}
		state[name] = left
	}
	for _, name := range names {
		if state[name] == 0 {
			visit(name)
		}
	}
}

func (m *Manager) run(ctx context.Context, t *transaction, u *Unit) error {
	for _, a := range t.after[u.Name] {
		select {
		case <-t.jobs[a].done:
		case <-ctx.Done():
			return fmt.Errorf("starting %s: %w", u.Name, ctx.Err())
		}
	}
	for _, r := range u.Requires {
		if j := t.jobs[r]; j != nil && contains(t.after[u.Name], r) && j.err != nil {
			return fmt.Errorf("%s: %w: %s", u.Name, ErrDependency, r)
		}
	}
	return m.service(u.Name).start(ctx, u)
}

func contains(list []string, s string) bool {
	for _, l := range list {
		if l == s {
			return true
		}
	}
	return false
}

// Stop stops the units, and first those that require them. Stopping what does not run is no error.
func (m *Manager) Stop(ctx context.Context, names ...string) error {
	var errs []error
	for _, name := range names {
		for _, s := range m.known() {
			u, state := s.unitAndState()
			if u != nil && s.name != name && contains(u.Requires, name) && (state == Active || state == Activating) {
				errs = append(errs, s.stop(ctx, 0))
			}
		}
		errs = append(errs, m.service(name).stop(ctx, 0))
	}
	return errors.Join(errs...)
}

// Shutdown stops everything, the last started first; units that wait for each other stop in that order, each
// within StopLimit.
func (m *Manager) Shutdown(ctx context.Context) {
	var all []*service
	for _, s := range m.known() {
		if s.State() != Inactive {
			all = append(all, s)
		}
	}
	gone := map[string]chan struct{}{}
	for _, s := range all {
		gone[s.name] = make(chan struct{})
	}
	// A unit stops once those that are ordered after it have stopped.
	waits := map[string][]string{}
	for _, s := range all {
		if u, _ := s.unitAndState(); u != nil {
			for _, a := range u.After {
				waits[a] = append(waits[a], s.name)
			}
			waits[s.name] = append(waits[s.name], u.Before...)
		}
	}
	var wg sync.WaitGroup
	for _, s := range all {
		wg.Go(func() {
			defer close(gone[s.name])
			for _, w := range waits[s.name] {
				if ch := gone[w]; ch != nil && w != s.name {
					select {
					case <-ch:
					case <-ctx.Done():
					case <-time.After(m.StopLimit + time.Second): // a circle
					}
				}
			}
			if err := s.stop(ctx, m.StopLimit); err != nil {
				m.logf("stopping %s: %v", s.name, err)
			}
		})
	}
	wg.Wait()
}

// Enable makes the links that WantedBy= asks for; Disable removes all links of that name.
func (m *Manager) Enable(name string) error {
	u, err := m.load(name)
	if err != nil {
		return err
	}
	path := ""
	for _, file := range []string{name, template(name)} {
		for _, dir := range m.dirs(name) {
			if p := filepath.Join(dir, file); path == "" && file != "" && isFile(p) {
				path = p
			}
		}
	}
	for _, target := range u.WantedBy {
		target, err := unitName(target)
		if err != nil {
			return err
		}
		dir := filepath.Join(m.ConfigDir, target+".wants")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := os.Symlink(path, filepath.Join(dir, name)); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return nil
}

// Disable removes the links that Enable made; a unit that is not enabled stays so.
func (m *Manager) Disable(name string) error {
	links, err := filepath.Glob(filepath.Join(m.ConfigDir, "*.wants", name))
	if err != nil {
		return err
	}
	for _, l := range links {
		if err := os.Remove(l); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Enabled reports whether a target pulls the unit in at boot.
func (m *Manager) Enabled(name string) bool {
	for _, dir := range m.UnitDirs {
		if links, err := filepath.Glob(filepath.Join(dir, "*.wants", name)); err == nil && len(links) > 0 {
			return true
		}
	}
	return false
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}
