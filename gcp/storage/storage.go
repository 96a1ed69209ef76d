// Package storage lists Cloud Storage and says why a bucket cannot be used.
package storage

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"regexp"
	"time"

	"cloud.google.com/go/storage"
	"google.golang.org/api/googleapi"
	"google.golang.org/api/iterator"
	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/gcp"
)

// The library repeats failed reads until its context ends, so every call has an
// end of its own.
const (
	// ListTimeout bounds one listing: a thousand objects take about 0.1 s, ten million a quarter of an hour.
	ListTimeout = 30 * time.Minute
	// CheckTimeout bounds CheckBucket.
	CheckTimeout = 30 * time.Second
)

// Object is one object of a listing.
type Object struct {
	Name       string // whole, with the prefix
	Generation int64
	Size       int64 // bytes
	CRC32C     uint32
	Updated    time.Time
}

// Client speaks Cloud Storage's JSON API. All methods may be called at the same time.
type Client struct{ c *storage.Client }

// NewClient returns a client with the application's default credentials. The
// endpoint is a URL without a path, or "" for Google's own.
func NewClient(ctx context.Context, endpoint string, opts ...option.ClientOption) (*Client, error) {
	opts = append(opts, storage.WithJSONReads())
	if endpoint != "" {
		opts = append(opts, option.WithEndpoint(endpoint+"/storage/v1/"))
	}
	c, err := storage.NewClient(ctx, opts...)
	if err != nil {
		return nil, fmt.Errorf("storage client: %w", err)
	}
	return &Client{c}, nil
}

// Close releases the client's connections.
func (c *Client) Close() error { return c.c.Close() }

// Why a bucket cannot be used; wrapped by the errors of this package.
var (
	ErrNotFound = errors.New("bucket does not exist")
	ErrDenied   = errors.New("access denied")
)

// classify gives a service's answer about a bucket its class.
func classify(bucket string, err error) error {
	if err == nil {
		return nil
	}
	code := gcp.Code(err)
	switch {
	case errors.Is(err, storage.ErrBucketNotExist) || code == 404:
		return fmt.Errorf("gs://%s: %w", bucket, ErrNotFound)
	case code == 401 || code == 403 && !gcp.Retryable(err):
		detail := ""
		if e, ok := errors.AsType[*googleapi.Error](err); ok && e.Message != "" {
			detail = ": " + e.Message
		}
		return fmt.Errorf("gs://%s: %w%s", bucket, ErrDenied, detail)
	}
	return fmt.Errorf("gs://%s: %w", bucket, err)
}

// bucketName is what the service takes for a bucket: 3 to 63 characters, or up
// to 222 with dots. Anything else cannot exist and is not asked for.
var bucketName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$`)

// CheckBucket says whether the bucket's objects can be listed: nil, ErrNotFound,
// ErrDenied, or another error when the service could not say within CheckTimeout.
func (c *Client) CheckBucket(ctx context.Context, bucket string) error {
	if !bucketName.MatchString(bucket) {
		return fmt.Errorf("gs://%s: %w", bucket, ErrNotFound)
	}
	ctx, cancel := context.WithTimeout(ctx, CheckTimeout)
	defer cancel()
	q := &storage.Query{Projection: storage.ProjectionNoACL}
	if err := q.SetAttrSelection([]string{"Name"}); err != nil {
		return err
	}
	it := c.c.Bucket(bucket).Objects(ctx, q)
	it.PageInfo().MaxSize = 1
	_, err := it.Next()
	if errors.Is(err, iterator.Done) {
		return nil
	}
	return classify(bucket, err)
}

// ListPrefix yields the live objects whose names begin with prefix, in the
// order of their names. An error ends it; its class is CheckBucket's.
func (c *Client) ListPrefix(ctx context.Context, bucket, prefix string) iter.Seq2[Object, error] {
	return func(yield func(Object, error) bool) {
		if !bucketName.MatchString(bucket) {
			yield(Object{}, fmt.Errorf("gs://%s: %w", bucket, ErrNotFound))
			return
		}
		ctx, cancel := context.WithTimeout(ctx, ListTimeout)
		defer cancel()
		q := &storage.Query{Prefix: prefix, Projection: storage.ProjectionNoACL}
		if err := q.SetAttrSelection([]string{"Name", "Generation", "Size", "CRC32C", "Updated"}); err != nil {
			yield(Object{}, err)
			return
		}
		it := c.c.Bucket(bucket).Objects(ctx, q)
		for {
			a, err := it.Next()
			if errors.Is(err, iterator.Done) {
				return
			}
			if err != nil {
				yield(Object{}, classify(bucket, err))
				return
			}
			if !yield(Object{Name: a.Name, Generation: a.Generation, Size: a.Size, CRC32C: a.CRC32C, Updated: a.Updated}, nil) {
				return
			}
		}
	}
}
