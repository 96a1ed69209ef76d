package agent

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/internal/retry"
	"github.com/sluicehpc/sluice/lustre"
	"github.com/sluicehpc/sluice/lustre/probe"
	"github.com/sluicehpc/sluice/prolog"
)

// mount is one file system on this node; the agent's mu guards what changes in it.
type mount struct {
	fs     api.FileSystem
	state  probe.State
	detail string
	stop   context.CancelFunc // of its watcher, or nil while it has none
}

func newMount(f api.FileSystem) *mount {
	m := &mount{fs: f, state: probe.NotMounted, detail: "not looked at yet"}
	if f.Source == "" {
		m.detail = "the instance has no address yet"
	}
	return m
}

func check(f api.FileSystem) probe.Check {
	return probe.Check{Dir: f.Dir, Source: f.Source, Types: f.Types}
}

// look probes once what an earlier agent was told to mount, so that a restart
// is not seen as trouble. It takes as long as the slowest probe.
func (a *Agent) look() {
	a.mu.Lock()
	for _, f := range a.state.FileSystems {
		a.mounts[f.Name] = newMount(f)
	}
	all := a.list()
	a.mu.Unlock()
	var probes sync.WaitGroup
	for _, m := range all {
		if m.fs.Source != "" {
			probes.Go(func() {
				r := a.probe(check(m.fs))
				a.found(m, r.State, r.Detail)
			})
		}
	}
	probes.Wait()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.judgeReady()
}

// watchKnown starts watching what look looked at.
func (a *Agent) watchKnown(ctx context.Context) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, m := range a.mounts {
		a.watchOver(ctx, m)
	}
}

// apply takes sluiced's word on what is to be mounted. What is mounted and not
// named any more stays mounted, since jobs may use it; it is only not watched.
func (a *Agent) apply(ctx context.Context, want []api.FileSystem) {
	a.mu.Lock()
	defer a.mu.Unlock()
	want = slices.Clone(want)
	for i, f := range want {
		// A sluiced that has just started does not know the address yet; what is mounted is no worse for that.
		if old := a.mounts[f.Name]; old != nil && f.Source == "" && old.fs.Dir == f.Dir {
			want[i].Source = old.fs.Source
		}
	}
	if a.state.Known && reflect.DeepEqual(want, a.state.FileSystems) {
		return
	}
	named := map[string]bool{}
	for _, f := range want {
		named[f.Name] = true
		old := a.mounts[f.Name]
		if old != nil && reflect.DeepEqual(old.fs, f) {
			continue
		}
		if old != nil && old.stop != nil {
			old.stop()
		}
		a.mounts[f.Name] = newMount(f)
		a.watchOver(ctx, a.mounts[f.Name])
	}
	for name, m := range a.mounts {
		if !named[name] {
			if m.stop != nil {
				m.stop()
			}
			delete(a.mounts, name)
		}
	}
	a.state.Known, a.state.FileSystems = true, want
	a.stateChanged()
	a.save()
	if err := prolog.WriteMounts(a.config.Root+prolog.MountsFile, want); err != nil {
		a.log.Error("write the mounts for later Prologs", "error", err)
	}
}

// watchOver starts m's watcher unless it has one; a.mu is held.
func (a *Agent) watchOver(ctx context.Context, m *mount) {
	if m.fs.Source == "" || m.stop != nil || ctx.Err() != nil {
		return
	}
	ctx, m.stop = context.WithCancel(ctx)
	a.watchers.Go(func() { a.watch(ctx, m) })
}

// watch mounts the file system and probes it until ctx ends.
func (a *Agent) watch(ctx context.Context, m *mount) {
	for {
		r := a.probe(check(m.fs))
		if ctx.Err() != nil {
			return
		}
		if r.State == probe.NotMounted {
			// The error of an earlier attempt says more than that it is not mounted.
			if a.mountIt(ctx, m) != nil {
				return
			}
			continue
		}
		a.found(m, r.State, r.Detail)
		if !a.pause(ctx, a.pace.probe, nil) {
			return
		}
	}
}

// mountIt tries until it succeeds or ctx ends.
func (a *Agent) mountIt(ctx context.Context, m *mount) error {
	a.found(m, probe.NotMounted, "being mounted")
	said := ""
	return retry.Do(ctx, a.pace.mount, func(error) bool { return true }, func(ctx context.Context) error {
		err := a.mount(ctx, lustre.Spec{Source: m.fs.Source, Dir: m.fs.Dir, Types: m.fs.Types})
		if err != nil && ctx.Err() == nil {
			a.found(m, probe.NotMounted, err.Error())
			if err.Error() != said {
				said = err.Error()
				a.log.Error("mount", "file_system", m.fs.Name, "error", err)
			}
		}
		return err
	})
}

// found notes what a look at m has shown.
func (a *Agent) found(m *mount, s probe.State, detail string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mounts[m.fs.Name] != m {
		return // replaced meanwhile
	}
	old := m.state
	m.state, m.detail = s, detail
	if old == s {
		return
	}
	a.log.Info("file system", "name", m.fs.Name, "dir", m.fs.Dir, "was", old, "is", s, "detail", detail)
	a.stateChanged()
}

// stateChanged makes the agent report at once; a.mu is held.
func (a *Agent) stateChanged() {
	a.generation++
	a.cause = "" // it was of another state
	a.judgeReady()
	poke(a.changed)
}

// judgeReady notes the first moment when everything answers; a.mu is held.
func (a *Agent) judgeReady() {
	if a.trouble() != "" {
		return
	}
	if a.state.ReadyAt == "" {
		a.state.ReadyAt = api.FormatTime(a.clock.Now())
		a.save()
		a.log.Info("ready")
	}
	a.ready.open()
}

// trouble says why the node is not ready, or ""; a.mu is held.
func (a *Agent) trouble() string {
	if !a.state.Known {
		if a.lastError != "" {
			return "no word from sluiced: " + a.lastError
		}
		return "sluiced has not said yet what is to be mounted"
	}
	var parts []string
	for _, m := range a.list() {
		if m.state != probe.OK {
			parts = append(parts, fmt.Sprintf("file system %s at %s: %s: %s", m.fs.Name, m.fs.Dir, m.state, m.detail))
		}
	}
	if o := a.otherTrouble(); o != "" {
		parts = append(parts, o)
	}
	return strings.Join(parts, "; ")
}

// otherTrouble is what apart from the mounts keeps the node from being ready; a.mu is held.
func (a *Agent) otherTrouble() string {
	var parts []string
	for _, about := range slices.Sorted(maps.Keys(a.obstacles)) {
		parts = append(parts, a.obstacles[about])
	}
	return strings.Join(parts, "; ")
}

// obstacle notes what keeps the node from being ready, or that nothing of that kind does ("").
func (a *Agent) obstacle(about, what string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.obstacles[about] == what {
		return
	}
	a.obstacles[about] = what
	if what == "" {
		delete(a.obstacles, about)
	}
	a.stateChanged()
}

// list returns the mounts in the order of their names; a.mu is held.
func (a *Agent) list() []*mount {
	var all []*mount
	for _, m := range a.mounts {
		all = append(all, m)
	}
	slices.SortFunc(all, func(x, y *mount) int { return strings.Compare(x.fs.Name, y.fs.Name) })
	return all
}
