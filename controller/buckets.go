package controller

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/sluicehpc/sluice/gcp/storage"
	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/staging"
)

// How long a verdict on a place is believed while sbatch waits. A bad one only
// shortly: the user may just have made the bucket.
const (
	goodFor  = 10 * time.Minute
	badFor   = 30 * time.Second
	maxKnown = 10000
)

// buckets remembers whether places can be read.
type buckets struct {
	bucket staging.Bucket
	clock  clock.Clock

	mu    sync.Mutex // guards what follows
	known map[storage.Place]bucketVerdict
	asked map[storage.Place]bool
}

type bucketVerdict struct {
	err error // nil, or of a class that a person can act on
	at  time.Time
}

func newBuckets(b staging.Bucket, c clock.Clock) *buckets {
	return &buckets{bucket: b, clock: c, known: map[storage.Place]bucketVerdict{}, asked: map[storage.Place]bool{}}
}

// remembered answers from memory; known is false when nobody asked lately.
func (b *buckets) remembered(p storage.Place) (err error, known bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	v, ok := b.known[p]
	age := b.clock.Now().Sub(v.at)
	if !ok || age > goodFor || v.err != nil && age > badFor {
		return nil, false
	}
	return v.err, true
}

// check asks the service and remembers what it says for sure.
func (b *buckets) check(ctx context.Context, p storage.Place) error {
	err := b.bucket.Check(ctx, p)
	if err != nil && !errors.Is(err, storage.ErrNotFound) && !errors.Is(err, storage.ErrDenied) && !errors.Is(err, storage.ErrAccount) {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.known) >= maxKnown {
		clear(b.known) // names come from users: memory stays bounded
	}
	b.known[p] = bucketVerdict{err, b.clock.Now()}
	return err
}

// refresh asks in the background, once at a time a bucket.
func (b *buckets) refresh(ctx context.Context, wg *sync.WaitGroup, p storage.Place) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.asked[p] || len(b.asked) >= 64 {
		return
	}
	b.asked[p] = true
	wg.Go(func() {
		b.check(ctx, p) // a failure is no verdict: setup asks again
		b.mu.Lock()
		delete(b.asked, p)
		b.mu.Unlock()
	})
}
