// Package clock is the one source of time, so that tests replace it.
package clock

import "time"

// Clock tells the time and makes timers. The zero value is not usable: take
// System, or a Fake in tests.
type Clock interface {
	Now() time.Time
	// After delivers once d has passed.
	After(d time.Duration) <-chan time.Time
}

// System is the machine's clock.
var System Clock = system{}

type system struct{}

func (system) Now() time.Time                         { return time.Now() }
func (system) After(d time.Duration) <-chan time.Time { return time.After(d) }
