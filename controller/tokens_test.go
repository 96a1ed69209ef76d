package controller_test

import (
	"strings"
	"testing"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/staging"
)

// A node gets a token for the prefix of a transfer that it moves, for nothing
// else; both ends are written down.
func TestTokensForMovers(t *testing.T) {
	w := newWorld(t)
	save := func(id string, kind staging.Kind, state staging.State, movers ...string) {
		t.Helper()
		err := w.Store.SaveTransfer(t.Context(), staging.Transfer{ID: id, Kind: kind, State: state, FS: "fast", JobID: 7,
			Bucket: "corpus", Prefix: "c4/", Account: dataAccount, Movers: movers})
		if err != nil {
			t.Fatal(err)
		}
	}
	save("in", staging.StageIn, staging.Running, "n1", "n2")
	save("out", staging.StageOut, staging.Verifying, "n1")
	save("done", staging.StageIn, staging.Done, "n1")
	save("queued", staging.StageIn, staging.Queued, "n1")
	save("managed", staging.StageIn, staging.Running)
	for _, tt := range []struct {
		name, node, transfer, want string // "": denied
	}{
		{"one of its nodes", "n1", "in", dataAccount + " gs://corpus/c4/ write=false"},
		{"another of its nodes", "n2", "in", dataAccount + " gs://corpus/c4/ write=false"},
		{"a stage-out", "n1", "out", dataAccount + " gs://corpus/c4/ write=true"},
		{"a node that does not move it", "n2", "out", ""},
		{"the login VM", "login", "in", ""},
		{"a transfer that is over", "n1", "done", ""},
		{"one that has not begun", "n1", "queued", ""},
		{"one that the service moves", "n1", "managed", ""},
		{"one that is not known", "n1", "nothing", ""},
		{"no transfer", "n1", "", ""},
	} {
		got, err := w.agent(tt.node, api.RoleCompute, api.OpAgentToken, api.TransferID{ID: tt.transfer})
		token, _ := got.(api.Token)
		if token.AccessToken != tt.want || tt.want == "" && api.CodeOf(err) != api.CodeDenied || tt.want != "" && (err != nil || token.ExpiresAt == "") {
			t.Errorf("%s: got %+v, %v, want %q", tt.name, got, err, tt.want)
		}
	}
	for _, uid := range []uint32{0, slurmUID, alice} {
		if _, err := w.as(uid, api.OpAgentToken, api.TransferID{ID: "in"}); api.CodeOf(err) != api.CodeDenied {
			t.Errorf("uid %d asks for a token: %v, want denied", uid, err)
		}
	}
	count := map[string]int{}
	for _, e := range w.waitAudit(6) {
		count[strings.Join([]string{e.Event, e.Who, e.Decision}, " ")]++
	}
	for want, n := range map[string]int{
		"token the agent of n1 allowed": 2, "token the agent of n2 allowed": 1,
		// Once a minute and node, however often it asks.
		"token the agent of n1 denied": 1, "token the agent of n2 denied": 1, "token the agent of login denied": 1,
	} {
		if count[want] != n {
			t.Errorf("the audit log has %d times %q, want %d", count[want], want, n)
		}
	}
	w.mu.Lock()
	w.auditErr = errAudit
	w.mu.Unlock()
	if got, err := w.agent("n1", api.RoleCompute, api.OpAgentToken, api.TransferID{ID: "in"}); api.CodeOf(err) != api.CodeUnavailable {
		t.Errorf("a token that cannot be written down: %v, %v", got, err)
	}
}
