package controller

import (
	"context"
	"sync"
	"time"
)

// directory remembers who users are, for the answers that slurmctld waits for: a
// directory server may be slow.
type directory struct {
	ask func(ctx context.Context, uid uint32) (person, error)
	now func() time.Time
	run func(func()) // beside the caller

	mu    sync.Mutex // guards known
	known map[uint32]*lookup
}

// person is what policy asks of a user.
type person struct {
	name   string
	groups groupIDs
}

// lookup is one question to the directory; once done is closed, the rest is there.
type lookup struct {
	done chan struct{}
	person
	err error
	at  time.Time
}

// personFor is how long a person's groups are believed while sbatch waits; setup
// asks anew.
const personFor = time.Minute

// lookup returns what is known of a user, or false when the directory did not
// answer before over.
func (d *directory) lookup(ctx context.Context, uid uint32, over <-chan time.Time) (person, bool) {
	d.mu.Lock()
	l := d.known[uid]
	if l == nil || l.stale(d.now()) {
		if len(d.known) >= maxKnown {
			clear(d.known)
		}
		l = &lookup{done: make(chan struct{})}
		d.known[uid] = l
		d.run(func() {
			l.person, l.err = d.ask(ctx, uid)
			l.at = d.now()
			close(l.done)
		})
	}
	d.mu.Unlock()
	select {
	case <-l.done:
		return l.person, l.err == nil
	case <-over:
		return person{}, false
	}
}

// stale reports that the answer is there, and too old or none.
func (l *lookup) stale(now time.Time) bool {
	select {
	case <-l.done:
		return l.err != nil || now.Sub(l.at) > personFor
	default:
		return false
	}
}

// askPerson is the directory's question.
func (c *Controller) askPerson(ctx context.Context, uid uint32) (person, error) {
	u, err := c.Users.ByID(ctx, uid)
	if err != nil {
		return person{}, err
	}
	groups, err := c.policyGroups(ctx, u.Name)
	return person{u.Name, groups}, err
}
