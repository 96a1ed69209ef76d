package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/controller/store"
	"github.com/sluicehpc/sluice/gcp/iam"
	"github.com/sluicehpc/sluice/gcp/storage"
	"github.com/sluicehpc/sluice/policy"
	"github.com/sluicehpc/sluice/staging"
)

// refusedAgain is how long a node's further refusals are not written down: root
// of a node may ask as often as it likes.
const refusedAgain = time.Minute

// agentToken gives a node that moves a transfer's bytes a token for them alone. It
// was decided when the transfer was asked for that its account may be used.
func (c *Controller) agentToken(ctx context.Context, w Caller, in api.TransferID) (any, error) {
	e := policy.Entry{Event: "token", Who: w.String(), What: "transfer " + in.ID, Decision: policy.Denied, Why: "it does not run on that node"}
	t, err := c.Store.Transfer(ctx, in.ID)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return nil, err
	}
	if err != nil || t.State != staging.Running && t.State != staging.Verifying || t.Cancel || !slices.Contains(t.Movers, w.Agent.Node) {
		now := c.Clock.Now()
		c.mu.Lock()
		last := c.refused[w.Agent.Node]
		again := now.Sub(last) < refusedAgain
		if !again {
			c.refused[w.Agent.Node] = now // of enrolled nodes only: bounded
		}
		c.mu.Unlock()
		if !again {
			if err := c.Audit.Write(e); err != nil {
				c.Log.Error("a refused token is not in the audit log", "node", w.Agent.Node, "err", err)
			}
		}
		return nil, api.Errorf(api.CodeDenied, "transfer %.64q does not run on %s", in.ID, w.Agent.Node)
	}
	place := storage.Place{Account: t.Account, Bucket: t.Bucket, Prefix: t.Prefix}
	data := iam.DataToken{Account: t.Account, Bucket: t.Bucket, Prefix: t.Prefix, Write: t.Kind == staging.StageOut, Lifetime: iam.DefaultDataLifetime}
	verb := policy.Read
	if data.Write {
		verb = policy.Write
	}
	e.What, e.Decision, e.Why = fmt.Sprintf("%s %s for transfer %s", verb, place, t.ID), policy.Allowed, "it moves the transfer's bytes"
	e.Job, e.ServiceAccount = t.JobID, t.Account
	if err := c.Audit.Write(e); err != nil {
		return nil, api.Errorf(api.CodeUnavailable, "%v", err)
	}
	token, err := c.IAM.DataToken(ctx, data)
	if err != nil {
		return nil, api.Errorf(api.CodeUnavailable, "%v", err)
	}
	return api.Token{AccessToken: token.AccessToken, ExpiresAt: api.FormatTime(token.Expiry)}, nil
}
