package agent

import (
	"context"
)

// aboutMetadata names the obstacle of a metadata server that users can reach.
const aboutMetadata = "metadata"

// watchGuard keeps users from the metadata server, unless sluiced says that
// they may reach it. Rules that somebody took away are put again.
func (a *Agent) watchGuard(ctx context.Context) {
	for a.pause(ctx, a.pace.guard, nil) {
		a.checkGuard()
	}
}

func (a *Agent) checkGuard() {
	a.guarding.Lock()
	defer a.guarding.Unlock()
	a.mu.Lock()
	open, was := a.state.OpenMetadata, a.obstacles[aboutMetadata]
	a.mu.Unlock()
	var err error
	said := ""
	if open {
		if a.guarded {
			if err = a.guard.Remove(); err == nil {
				a.guarded = false
				a.log.Info("the metadata server is open to users, as sluice.yaml says")
			}
		}
	} else {
		var put bool
		put, err = a.guard.Ensure()
		if put {
			a.log.Info("the metadata server is for root only", "again", a.guarded)
		}
		if err == nil {
			a.guarded = true
		} else {
			said = "users can reach the metadata server: " + err.Error()
		}
	}
	if err != nil && was != said {
		a.log.Error("guard the metadata server", "error", err)
	}
	a.obstacle(aboutMetadata, said)
}

// allowMetadata takes sluiced's word on whether users may reach the metadata server.
func (a *Agent) allowMetadata(open bool) {
	a.mu.Lock()
	same := a.state.OpenMetadata == open
	a.state.OpenMetadata = open
	if !same {
		a.save()
	}
	a.mu.Unlock()
	if !same {
		a.checkGuard()
	}
}
