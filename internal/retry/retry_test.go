package retry

import (
	"context"
	"errors"
	"testing"
	"time"
)

// recorder is a clock whose pauses end at once and are remembered.
type recorder struct{ pauses []time.Duration }

func (r *recorder) Now() time.Time { return time.Unix(0, 0) }

func (r *recorder) After(d time.Duration) <-chan time.Time {
	r.pauses = append(r.pauses, d)
	c := make(chan time.Time, 1)
	c <- time.Time{}
	return c
}

var errAgain = errors.New("again")

func again(err error) bool { return errors.Is(err, errAgain) }

func TestDo(t *testing.T) {
	errFatal := errors.New("fatal")
	for _, test := range []struct {
		name     string
		attempts int
		errs     []error // what the calls return; then nil
		want     error
		calls    int
	}{
		{"at once", 0, nil, nil, 1},
		{"after three failures", 0, []error{errAgain, errAgain, errAgain}, nil, 4},
		{"not worth repeating", 0, []error{errAgain, errFatal}, errFatal, 2},
		{"attempts used up", 2, []error{errAgain, errAgain, errAgain}, errAgain, 2},
		{"one attempt", 1, []error{errAgain}, errAgain, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			clock := &recorder{}
			calls := 0
			err := Do(context.Background(), Policy{Attempts: test.attempts, Clock: clock}, again, func(context.Context) error {
				calls++
				if calls <= len(test.errs) {
					return test.errs[calls-1]
				}
				return nil
			})
			if !errors.Is(err, test.want) || calls != test.calls {
				t.Errorf("%d calls, error %v; want %d, %v", calls, err, test.calls, test.want)
			}
			if len(clock.pauses) != calls-1 {
				t.Errorf("%d pauses between %d calls", len(clock.pauses), calls)
			}
		})
	}
}

func TestPausesGrowToTheirLimit(t *testing.T) {
	clock := &recorder{}
	Do(context.Background(), Policy{First: 100 * time.Millisecond, Max: time.Second, Attempts: 50, Clock: clock}, again, func(context.Context) error { return errAgain })
	limit, longest := 100*time.Millisecond, time.Duration(0)
	for i, p := range clock.pauses {
		if p <= 0 || p > limit {
			t.Errorf("pause %d is %v, want up to %v", i, p, limit)
		}
		longest = max(longest, p)
		limit = min(2*limit, time.Second)
	}
	if longest <= 400*time.Millisecond {
		t.Errorf("the longest of 49 pauses is %v: they do not grow", longest)
	}
}

func TestContextEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	calls := 0
	err := Do(ctx, Policy{First: time.Hour}, again, func(context.Context) error {
		calls++
		cancel()
		return errAgain
	})
	if !errors.Is(err, errAgain) || calls != 1 {
		t.Errorf("%d calls, error %v; want the call's own error after one", calls, err)
	}
	// ctx ends during a pause.
	ctx, cancel = context.WithCancel(context.Background())
	asked := make(chan struct{}, 1)
	go func() { <-asked; cancel() }()
	err = Do(ctx, Policy{First: time.Hour, Clock: stuck{asked}}, again, func(context.Context) error { return errAgain })
	if !errors.Is(err, errAgain) {
		t.Errorf("error %v", err)
	}
}

// stuck is a clock whose pauses never end.
type stuck struct{ asked chan struct{} }

func (s stuck) Now() time.Time { return time.Unix(0, 0) }
func (s stuck) After(time.Duration) <-chan time.Time {
	s.asked <- struct{}{}
	return nil
}
