package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/controller/store"
	"github.com/sluicehpc/sluice/gcp/storage"
	"github.com/sluicehpc/sluice/internal/diag"
	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/policy"
	"github.com/sluicehpc/sluice/slurm/directive"
	"github.com/sluicehpc/sluice/staging/files"
)

// ask is a place that a script names, and what for.
type ask struct {
	at   directive.Pos
	verb policy.Verb
	url  directive.URL
}

// grant is an ask that policy allows: as which service account, and which group
// may read what is staged.
type grant struct {
	ask
	storage.Place
	gid uint32
}

func reads(s directive.Script) []ask {
	var list []ask
	for _, in := range s.StageIns {
		list = append(list, ask{in.Of("source"), policy.Read, in.Source})
	}
	return list
}

func writes(s directive.Script) []ask {
	var list []ask
	for _, out := range s.StageOuts {
		list = append(list, ask{out.Of("to"), policy.Write, out.To})
	}
	return list
}

// refusedWords begin every refusal by policy.
const refusedWords = "refused by policy: "

// permit asks policy for a job's places, symbols replaced, and writes to the audit
// log what it has not said of this run before. A refusal is an *api.Error of
// CodeDenied; with any other error it is to be asked again. Nothing is granted
// that could not be written down.
func (c *Controller) permit(ctx context.Context, j store.Job, s directive.Script, asks []ask) ([]grant, error) {
	groups, err := c.policyGroups(ctx, j.User)
	if err != nil {
		return nil, fmt.Errorf("groups of %s: %w", j.User, err)
	}
	var grants []grant
	var refusal *api.Error
	var told []string
	tell := func(e policy.Entry) error {
		e.Job = j.ID
		line := fmt.Sprint(e)
		if slices.Contains(j.Told, line) || slices.Contains(told, line) {
			return nil
		}
		told = append(told, line)
		return c.Audit.Write(e)
	}
	who := fmt.Sprintf("%s (uid %d)", j.User, j.UID)
	denied := 0
	for _, a := range asks {
		d := c.Config.Policy.Decide(policy.Ask{User: j.User, Account: j.Account, Groups: groups.names(),
			Verb: a.verb, Bucket: a.url.Bucket, Prefix: a.url.Prefix})
		if !d.Allowed {
			denied++
		}
		if d.Allowed || denied <= maxDenied {
			if err := tell(entry(who, j.Account, a, d)); err != nil {
				return nil, err
			}
		}
		if !d.Allowed {
			if refusal == nil {
				g := s.Diagnostic(a.at, refusedWords+d.Why, d.Hint)
				refusal = &api.Error{Code: api.CodeDenied, Message: files.Shorten(g.Short()), Hint: g.Hint}
			}
			continue
		}
		g := grant{a, storage.Place{Account: d.ServiceAccount, Bucket: a.url.Bucket, Prefix: a.url.Prefix}, j.GID}
		if d.Group != "" {
			g.gid = groups[d.Group]
		}
		grants = append(grants, g)
	}
	if denied > maxDenied {
		if err := tell(more(who, j.Account, denied-maxDenied)); err != nil {
			return nil, err
		}
	}
	if len(told) > 0 {
		_, err := c.Store.UpdateJob(ctx, j.Key, func(j *store.Job) error { j.Told = append(j.Told, told...); return nil })
		if err != nil {
			return nil, err
		}
	}
	if refusal != nil {
		return nil, refusal
	}
	return grants, nil
}

// entry is a decision's line in the audit log.
func entry(who, account string, a ask, d policy.Decision) policy.Entry {
	e := policy.Entry{Event: "directive", Who: who, Account: account, What: string(a.verb) + " " + a.url.String(),
		Decision: policy.Denied, Why: d.Why, Rule: d.Rule, ServiceAccount: d.ServiceAccount}
	if d.Allowed {
		e.Decision = policy.Allowed
	}
	return e
}

// maxDenied is how many refusals of one script are written down each; what the
// script names beyond them is one line, so that nobody fills the disk.
const maxDenied = 20

// more is that line.
func more(who, account string, n int) policy.Entry {
	return policy.Entry{Event: "directive", Who: who, Account: account, What: fmt.Sprintf("%d more places of the same script", n),
		Decision: policy.Denied, Why: "policy refuses them, too"}
}

// earlyPatience is how long sbatch waits for the directory's word on its user.
const earlyPatience = 25 * time.Millisecond

// permitEarly is permit while sbatch waits: what is certain by now. Symbols are
// not replaced yet, so a place with one is refused only where no value of it could
// be allowed. unknown is what setup will judge. An allowed place is written down
// by setup, a refusal here: no job comes of it.
func (c *Controller) permitEarly(in api.JobProcess, s directive.Script) (grants []grant, unknown []ask, refused diag.List) {
	asks := append(reads(s), writes(s)...)
	if !in.HasUID || in.Account == "" && c.Config.Slurm.AccountingHost != "" {
		return nil, asks, nil
	}
	who := person{name: "this user"}
	known := false
	look := func() {
		if p, ok := c.directory.lookup(c.ctx, in.UID, c.Clock.After(earlyPatience)); ok {
			who, known = p, true
		}
	}
	if slices.ContainsFunc(c.Config.Policy, needsName) {
		if look(); !known {
			return nil, asks, nil
		}
	}
	subject := fmt.Sprintf("%s (uid %d)", who.name, in.UID)
	var entries []policy.Entry
	for _, a := range asks {
		prefix, _, open := strings.Cut(a.url.Prefix, "%")
		if strings.Contains(a.url.Bucket, "%") {
			unknown = append(unknown, a)
			continue
		}
		decide := func() policy.Decision {
			return c.Config.Policy.Decide(policy.Ask{User: who.name, Account: in.Account, Groups: who.groups.names(),
				Verb: a.verb, Bucket: a.url.Bucket, Prefix: prefix, Open: open})
		}
		d := decide()
		if !d.Allowed && !known { // the words want the name
			look()
			d = decide()
		}
		switch {
		case !d.Allowed:
			refused = append(refused, s.Diagnostic(a.at, refusedWords+d.Why, d.Hint))
			entries = append(entries, entry(subject, in.Account, a, d))
		case open:
			unknown = append(unknown, a)
		default:
			grants = append(grants, grant{ask: a, Place: storage.Place{Account: d.ServiceAccount, Bucket: a.url.Bucket, Prefix: prefix}})
		}
	}
	if n := len(entries) - maxDenied; n > 0 {
		entries = append(entries[:maxDenied], more(subject, in.Account, n))
	}
	if len(entries) > 0 {
		c.wg.Go(func() { // slurmctld must not wait for the disk
			for _, e := range entries {
				if err := c.Audit.Write(e); err != nil {
					c.Log.Error("a refusal at sbatch is not in the audit log", "who", e.Who, "what", e.What, "err", err)
				}
			}
		})
	}
	return grants, unknown, refused
}

// needsName reports that a rule asks for more than the account.
func needsName(r policy.Rule) bool {
	return r.Group != "" || len(r.Users) > 0 && !slices.Contains(r.Users, "*")
}

// groupIDs are groups that policy names, with their gids.
type groupIDs map[string]uint32

func (g groupIDs) names() []string { return slices.Collect(maps.Keys(g)) }

// policyGroups returns those of policy's groups in which the user is.
func (c *Controller) policyGroups(ctx context.Context, user string) (groupIDs, error) {
	named := c.Config.Policy.Groups()
	if len(named) == 0 {
		return nil, nil
	}
	gids, err := c.Users.GroupIDs(ctx, user)
	if err != nil {
		return nil, err
	}
	in := groupIDs{}
	for _, name := range named {
		gid, err := c.Users.GroupID(ctx, name)
		if errors.Is(err, users.ErrUnknown) {
			c.Log.Warn("policy names a group that nobody knows", "group", name)
			continue
		}
		if err != nil {
			return nil, err
		}
		if slices.Contains(gids, gid) {
			in[name] = gid
		}
	}
	return in, nil
}
