// Package epilog is Slurm's Epilog on a compute node: it tells the node's agent
// that a job has left. An Epilog that fails drains its node, so it never does.
package epilog

import (
	"fmt"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/prolog"
)

// Run is the Epilog; it returns the exit code, which is 0.
func Run(h prolog.Hook) int {
	call, ok := prolog.Call(h.Getenv)
	if !ok {
		h.Say("no job id in the environment, nothing told")
		return 0
	}
	at := h.Now()
	var ack api.Ack
	if err := prolog.Ask(h.Root+api.AgentSocket, api.OpEpilog, call, &ack, prolog.AnswerTimeout); err != nil {
		h.Say(fmt.Sprintf("job %d: %v", call.JobID, err))
		h.Keep(call, prolog.EventEpilog, at)
	}
	return 0
}
