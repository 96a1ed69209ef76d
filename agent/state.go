package agent

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"

	"github.com/sluicehpc/sluice/internal/atomicfile"
	"github.com/sluicehpc/sluice/prolog"
)

// load reads what an earlier agent of this boot left. What cannot be read is
// forgotten: sluiced and the kernel tell it again.
func (a *Agent) load() {
	data, err := os.ReadFile(a.config.Root + stateFile)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			a.log.Warn("read the earlier state", "error", err)
		}
		return
	}
	var s state
	if err := json.Unmarshal(data, &s); err != nil {
		a.log.Warn("read the earlier state", "error", err)
		return
	}
	if s.BootID != a.bootID {
		return
	}
	if s.Jobs == nil {
		s.Jobs = map[uint32]uint32{}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.state = s
	if s.Keyed {
		delete(a.obstacles, aboutKeys)
	}
	if s.Identity != (identity{}) {
		a.identified.open()
	}
}

// save writes the state; a.mu is held.
func (a *Agent) save() {
	a.state.BootID = a.bootID
	data, err := json.Marshal(a.state)
	if err == nil {
		err = atomicfile.Write(a.config.Root+stateFile, data, 0o600)
	}
	if err != nil {
		a.log.Error("write the state", "error", err)
	}
}

// adopt learns of the jobs that came and went while no agent answered their
// hooks: those left moments.
func (a *Agent) adopt() {
	files, err := prolog.Kept(a.spoolDir())
	if err != nil {
		a.log.Error("read the spool", "error", err)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range files { // oldest first
		m, err := prolog.ReadMoment(f)
		if err != nil {
			continue // sendKept says so and removes it
		}
		switch m.Event {
		case prolog.EventProlog:
			a.state.Jobs[m.JobID] = m.UID
		case prolog.EventEpilog:
			delete(a.state.Jobs, m.JobID)
		}
	}
	if len(files) > 0 {
		a.save()
	}
}
