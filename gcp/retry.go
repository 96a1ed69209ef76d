package gcp

import (
	"context"
	"errors"
	"io"
	"syscall"
	"time"

	"github.com/googleapis/gax-go/v2"

	"github.com/sluicehpc/sluice/internal/retry"
)

// Retry calls f until it succeeds, its error is not Retryable or ctx ends, and returns f's last
// error. f must be safe to repeat: a read, or a change that carries a request id or precondition.
// Give ctx a deadline; without one a dead service is asked for ever.
func Retry(ctx context.Context, f func(context.Context) error) error {
	return retry.Do(ctx, retry.Default, Retryable, f)
}

// CallOption is Retry's policy for the calls of Google's generated clients. Pass it to each call:
// their changes and lists have no retry of their own.
func CallOption() gax.CallOption {
	return gax.WithRetry(func() gax.Retryer {
		return &retryer{gax.Backoff{Initial: retry.Default.First, Max: retry.Default.Max, Multiplier: 2}}
	})
}

type retryer struct{ backoff gax.Backoff }

func (r *retryer) Retry(err error) (time.Duration, bool) {
	if !Retryable(err) {
		return 0, false
	}
	return r.backoff.Pause(), true
}

// Retryable reports whether the same call may succeed later: too many requests (429, or Compute
// Engine's 403 rateLimitExceeded), 500, 502, 503, 504, or a connection that was refused or broke.
func Retryable(err error) bool {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	switch Code(err) {
	case 429, 500, 502, 503, 504:
		return true
	case 403:
		r := Reason(err)
		return r == "rateLimitExceeded" || r == "userRateLimitExceeded"
	case 0:
		for _, broken := range []error{syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EPIPE, io.EOF, io.ErrUnexpectedEOF} {
			if errors.Is(err, broken) {
				return true
			}
		}
	}
	return false
}
