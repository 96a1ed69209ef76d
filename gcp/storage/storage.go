// Package storage lists Cloud Storage and says why a bucket cannot be used.
package storage

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"regexp"
	"sync"
	"time"

	"cloud.google.com/go/storage"
	"golang.org/x/oauth2"
	"google.golang.org/api/iterator"
	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/gcp"
)

// The library repeats failed reads until its context ends, so every call has an
// end of its own.
const (
	// ListTimeout bounds one listing: a thousand objects take about 0.1 s, ten million a quarter of an hour.
	ListTimeout = 30 * time.Minute
	// CheckTimeout bounds Check.
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

// Place is the objects of a bucket whose names begin with Prefix ("": all), and
// the service account (its email) as which they are looked at.
type Place struct{ Account, Bucket, Prefix string }

func (p Place) String() string { return "gs://" + p.Bucket + "/" + p.Prefix }

// Client looks at buckets through Cloud Storage's JSON API, each place with a
// token for that place alone. All methods may be called at the same time.
type Client struct {
	c      *storage.Client
	tokens func(Place) oauth2.TokenSource

	mu      sync.Mutex // guards sources
	sources map[Place]oauth2.TokenSource
}

// NewClient returns a client. tokens is asked once for each place, as long as it
// is remembered. The endpoint is a URL without a path, or "" for Google's own.
func NewClient(endpoint string, tokens func(Place) oauth2.TokenSource) (*Client, error) {
	opts := []option.ClientOption{
		storage.WithJSONReads(), option.WithoutAuthentication(),
		option.WithHTTPClient(&http.Client{Transport: transport{http.DefaultTransport.(*http.Transport).Clone()}}),
	}
	if endpoint != "" {
		opts = append(opts, option.WithEndpoint(endpoint+"/storage/v1/"))
	}
	c, err := storage.NewClient(context.Background(), opts...)
	if err != nil {
		return nil, fmt.Errorf("storage client: %w", err)
	}
	return &Client{c: c, tokens: tokens, sources: map[Place]oauth2.TokenSource{}}, nil
}

// Close releases the client's connections.
func (c *Client) Close() error { return c.c.Close() }

// transport sends each request with the token of the place that its context
// carries. Without one nothing is sent: this process has no rights of its own.
type transport struct{ base http.RoundTripper }

type sourceKey struct{}

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	source, ok := r.Context().Value(sourceKey{}).(oauth2.TokenSource)
	if !ok {
		return nil, errors.New("a request to Cloud Storage without a place's token")
	}
	token, err := source.Token()
	if err != nil {
		return nil, err
	}
	r = r.Clone(r.Context())
	token.SetAuthHeader(r)
	return t.base.RoundTrip(r)
}

func (t transport) CloseIdleConnections() { t.base.(*http.Transport).CloseIdleConnections() }

// maxSources bounds the memory for tokens: places come from users.
const maxSources = 1024

// as returns a context whose requests carry the place's token.
func (c *Client) as(ctx context.Context, p Place) (context.Context, error) {
	c.mu.Lock()
	source := c.sources[p]
	if source == nil {
		if len(c.sources) >= maxSources {
			clear(c.sources)
		}
		source = c.tokens(p)
		c.sources[p] = source
	}
	c.mu.Unlock()
	// The first one here: a failure is the account's, not the bucket's.
	failed := make(chan error, 1)
	go func() {
		_, err := source.Token()
		failed <- err
	}()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case err := <-failed:
		if code := gcp.Code(err); code == 404 || code == 401 || code == 403 && !gcp.Retryable(err) {
			err = fmt.Errorf("%s: %w: %w", p, ErrAccount, err)
		}
		return context.WithValue(ctx, sourceKey{}, source), err
	}
}

// Why a bucket cannot be used; wrapped by the errors of this package, as is the
// service's own error.
var (
	ErrNotFound = errors.New("bucket does not exist")
	ErrDenied   = errors.New("access denied")
	ErrAccount  = errors.New("its service account cannot be used")
)

// classify gives a service's answer about a place its class.
func classify(p Place, err error) error {
	if err == nil {
		return nil
	}
	code := gcp.Code(err)
	switch {
	case errors.Is(err, storage.ErrBucketNotExist) || code == 404:
		return fmt.Errorf("%s: %w", p, ErrNotFound)
	case code == 401 || code == 403 && !gcp.Retryable(err):
		return fmt.Errorf("%s: %w: %w", p, ErrDenied, err)
	}
	return fmt.Errorf("%s: %w", p, err)
}

// bucketName is what the service takes for a bucket: 3 to 63 characters, or up
// to 222 with dots. Anything else cannot exist and is not asked for.
var bucketName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$`)

// Check says whether the place's objects can be listed: nil, ErrNotFound,
// ErrDenied, ErrAccount, or another error when the services could not say within CheckTimeout.
func (c *Client) Check(ctx context.Context, p Place) error {
	ctx, cancel := context.WithTimeout(ctx, CheckTimeout)
	defer cancel()
	for _, err := range c.list(ctx, p, 1) {
		return err
	}
	return nil
}

// ListPrefix yields the place's live objects in the order of their names. An error
// ends it; its class is Check's.
func (c *Client) ListPrefix(ctx context.Context, p Place) iter.Seq2[Object, error] {
	return func(yield func(Object, error) bool) {
		ctx, cancel := context.WithTimeout(ctx, ListTimeout)
		defer cancel()
		for o, err := range c.list(ctx, p, 0) {
			if !yield(o, err) {
				return
			}
		}
	}
}

// list is ListPrefix with pages of that many objects, 0 for the service's own size.
func (c *Client) list(ctx context.Context, p Place, page int) iter.Seq2[Object, error] {
	return func(yield func(Object, error) bool) {
		if !bucketName.MatchString(p.Bucket) {
			yield(Object{}, fmt.Errorf("%s: %w", p, ErrNotFound))
			return
		}
		ctx, err := c.as(ctx, p)
		if err != nil {
			yield(Object{}, err)
			return
		}
		q := &storage.Query{Prefix: p.Prefix, Projection: storage.ProjectionNoACL}
		if err := q.SetAttrSelection([]string{"Name", "Generation", "Size", "CRC32C", "Updated"}); err != nil {
			yield(Object{}, err)
			return
		}
		it := c.c.Bucket(p.Bucket).Objects(ctx, q)
		it.PageInfo().MaxSize = page
		for {
			a, err := it.Next()
			if errors.Is(err, iterator.Done) {
				return
			}
			if err != nil {
				yield(Object{}, classify(p, err))
				return
			}
			if !yield(Object{Name: a.Name, Generation: a.Generation, Size: a.Size, CRC32C: a.CRC32C, Updated: a.Updated}, nil) {
				return
			}
		}
	}
}
