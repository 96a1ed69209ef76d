// Package retry repeats what may succeed later, with full jitter.
package retry

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/sluicehpc/sluice/internal/clock"
)

// Policy says how often and how long. The zero value is Default.
type Policy struct {
	First    time.Duration // longest first pause
	Max      time.Duration // longest pause
	Attempts int           // 0: until ctx ends
	Clock    clock.Clock   // nil: clock.System
}

// Default suits calls to the cloud: 100 ms doubling to 30 s, until ctx ends.
var Default = Policy{First: 100 * time.Millisecond, Max: 30 * time.Second}

// Do calls f until it succeeds, retryable says no, the attempts are used up or
// ctx ends; it returns f's last error.
func Do(ctx context.Context, p Policy, retryable func(error) bool, f func(context.Context) error) error {
	if p.First == 0 {
		p.First = Default.First
	}
	if p.Max == 0 {
		p.Max = Default.Max
	}
	if p.Clock == nil {
		p.Clock = clock.System
	}
	pause := p.First
	for n := 1; ; n++ {
		err := f(ctx)
		if err == nil || ctx.Err() != nil || !retryable(err) || n == p.Attempts {
			return err
		}
		d := time.Duration(rand.Int64N(int64(pause)) + 1)
		select {
		case <-ctx.Done():
			return err
		case <-p.Clock.After(d):
		}
		pause = min(2*pause, p.Max)
	}
}
