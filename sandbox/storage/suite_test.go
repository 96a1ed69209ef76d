package storage

import (
	"bytes"
	"context"
	"crypto/md5"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	gcs "cloud.google.com/go/storage"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/api/googleapi"
	"google.golang.org/api/iterator"
)

const testProject = "sluice-test"

// target is a server under the suite: a client of it and its URL.
type target struct {
	client *gcs.Client
	url    string
}

// env is what one case of the suite gets: a fresh bucket.
type env struct {
	target
	ctx  context.Context
	name string
	b    *gcs.BucketHandle
}

var bucketCount atomic.Int64

// suite runs every case against a server. faults names the cases that the server is known to fail, and why; a case in it
// that passes fails the test, so that the table stays true.
func suite(t *testing.T, to target, faults map[string]string) {
	to.client.SetRetry(gcs.WithMaxAttempts(2))
	known := map[string]bool{}
	for _, c := range suiteCases {
		known[c.name] = true
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			e := &env{target: to, ctx: ctx, name: fmt.Sprintf("suite-bucket-%d", bucketCount.Add(1))}
			e.b = e.client.Bucket(e.name)
			if err := e.b.Create(ctx, testProject, nil); err != nil {
				t.Fatalf("create bucket: %v", err)
			}
			err := c.run(e)
			reason, faulty := faults[c.name]
			switch {
			case faulty && err == nil:
				t.Errorf("passes, but is listed as a known fault (%s): take it off the list", reason)
			case faulty:
				t.Logf("known fault (%s): %v", reason, err)
			case err != nil:
				t.Error(err)
			}
		})
	}
	for name := range faults {
		if !known[name] {
			t.Errorf("known fault %q names no case", name)
		}
	}
}

func (e *env) put(name, data string, change ...func(*gcs.Writer)) error {
	return e.putTo(e.b.Object(name), data, change...)
}

func (e *env) putTo(o *gcs.ObjectHandle, data string, change ...func(*gcs.Writer)) error {
	w := o.NewWriter(e.ctx)
	for _, f := range change {
		f(w)
	}
	_, err := io.WriteString(w, data)
	return errors.Join(err, w.Close())
}

func (e *env) putAll(names ...string) error {
	for _, name := range names {
		if err := e.put(name, name); err != nil {
			return fmt.Errorf("put %q: %w", name, err)
		}
	}
	return nil
}

func (e *env) get(o *gcs.ObjectHandle) (string, error) {
	r, err := o.NewReader(e.ctx)
	if err != nil {
		return "", err
	}
	defer r.Close()
	data, err := io.ReadAll(r)
	return string(data), err
}

func (e *env) has(o *gcs.ObjectHandle, want string) error {
	got, err := e.get(o)
	if err != nil {
		return fmt.Errorf("read %s: %w", o.ObjectName(), err)
	}
	if got != want {
		return fmt.Errorf("%s has %d bytes %.40q, want %d bytes %.40q", o.ObjectName(), len(got), got, len(want), want)
	}
	return nil
}

// list returns the listing's names, prefixes with the mark "prefix:".
func (e *env) list(q *gcs.Query) ([]string, error) {
	got := []string{}
	it := e.b.Objects(e.ctx, q)
	for {
		o, err := it.Next()
		if err == iterator.Done {
			return got, nil
		}
		if err != nil {
			return nil, err
		}
		if o.Prefix != "" {
			got = append(got, "prefix:"+o.Prefix)
		} else {
			got = append(got, o.Name)
		}
	}
}

func (e *env) lists(q *gcs.Query, want ...string) error {
	got, err := e.list(q)
	if err != nil {
		return fmt.Errorf("list %+v: %w", q, err)
	}
	// The client yields prefixes and objects of a page apart; compare them as sets.
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		return fmt.Errorf("list %+v: got %q, want %q", q, got, want)
	}
	return nil
}

// code says whether err is an API error with an HTTP status.
func code(err error, want int) error {
	var e *googleapi.Error
	switch {
	case err == nil:
		return fmt.Errorf("got no error, want %d", want)
	case errors.As(err, &e) && e.Code == want:
		return nil
	case want == 404 && (errors.Is(err, gcs.ErrObjectNotExist) || errors.Is(err, gcs.ErrBucketNotExist)):
		return nil
	}
	return fmt.Errorf("got %w, want code %d", err, want)
}

func equal(what string, got, want any) error {
	if d := cmp.Diff(want, got); d != "" {
		return fmt.Errorf("%s (-want +got):\n%s", what, d)
	}
	return nil
}

// all runs steps until one fails.
func all(steps ...func() error) error {
	for i, f := range steps {
		if err := f(); err != nil {
			return fmt.Errorf("step %d: %w", i+1, err)
		}
	}
	return nil
}

func randomData(n int) string {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n), byte(n >> 8)})
	r.Read(b)
	return string(b)
}

func chunks(n int) func(*gcs.Writer) { return func(w *gcs.Writer) { w.ChunkSize = n } }

// request makes a call that the client library does not make.
func (e *env) request(method, path string, header map[string]string, body string) (*http.Response, string, error) {
	if !strings.HasPrefix(path, "http") {
		path = e.url + path
	}
	r, err := http.NewRequestWithContext(e.ctx, method, path, strings.NewReader(body))
	if err != nil {
		return nil, "", err
	}
	for k, v := range header {
		r.Header.Set(k, v)
	}
	res, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		return nil, "", err
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	return res, string(data), err
}

// answers makes a request and checks its status.
func (e *env) answers(status int, method, path string, header map[string]string, body string) (*http.Response, string, error) {
	res, data, err := e.request(method, path, header, body)
	if err == nil && res.StatusCode != status {
		err = fmt.Errorf("%s %s %v: got status %d %q, want %d", method, path, header, res.StatusCode, data, status)
	}
	return res, data, err
}

// startResumable begins a resumable upload by hand and returns its URL.
func (e *env) startResumable(name string) (string, error) {
	res, _, err := e.answers(200, "POST", "/upload/storage/v1/b/"+e.name+"/o?uploadType=resumable&name="+name, nil, "")
	if err != nil {
		return "", err
	}
	return res.Header.Get("Location"), nil
}

// chunk sends a part of a resumable upload and checks the status and the Range that comes back.
func (e *env) chunk(url, contentRange, body string, status int, wantRange string) error {
	res, _, err := e.answers(status, "PUT", url, map[string]string{"Content-Range": contentRange}, body)
	if err == nil && res.Header.Get("Range") != wantRange {
		err = fmt.Errorf("after %s: got Range %q, want %q", contentRange, res.Header.Get("Range"), wantRange)
	}
	return err
}

func (e *env) missing(name string) error {
	if _, err := e.b.Object(name).Attrs(e.ctx); !errors.Is(err, gcs.ErrObjectNotExist) {
		return fmt.Errorf("%s: got %v, want that it does not exist", name, err)
	}
	return nil
}

var suiteCases = []struct {
	name string
	run  func(*env) error
}{
	{"bucket is created, listed and deleted", func(e *env) error {
		a, err := e.b.Attrs(e.ctx)
		if err != nil {
			return err
		}
		if a.Name != e.name || a.MetaGeneration != 1 || a.Created.IsZero() || a.StorageClass != "STANDARD" {
			return fmt.Errorf("got %+v", a)
		}
		it, found := e.client.Buckets(e.ctx, testProject), false
		for {
			b, err := it.Next()
			if err == iterator.Done {
				break
			}
			if err != nil {
				return err
			}
			found = found || b.Name == e.name
		}
		if !found {
			return errors.New("bucket is not listed")
		}
		if err := e.b.Delete(e.ctx); err != nil {
			return err
		}
		_, err = e.b.Attrs(e.ctx)
		return code(err, 404)
	}},
	{"bucket list has prefix and pages", func(e *env) error {
		for _, suffix := range []string{"-a", "-b", "-c"} {
			if err := e.client.Bucket(e.name+suffix).Create(e.ctx, testProject, nil); err != nil {
				return err
			}
		}
		it := e.client.Buckets(e.ctx, testProject)
		it.Prefix = e.name + "-"
		var got []string
		p := iterator.NewPager(it, 2, "")
		for {
			var page []*gcs.BucketAttrs
			token, err := p.NextPage(&page)
			if err != nil {
				return err
			}
			got = append(got, fmt.Sprint(len(page)))
			for _, b := range page {
				got = append(got, strings.TrimPrefix(b.Name, e.name))
			}
			if token == "" {
				return equal("pages", got, []string{"2", "-a", "-b", "1", "-c"})
			}
		}
	}},
	{"bucket twice is a conflict", func(e *env) error {
		return code(e.b.Create(e.ctx, testProject, nil), 409)
	}},
	{"bucket with objects is not deleted", func(e *env) error {
		if err := e.put("x", "x"); err != nil {
			return err
		}
		return code(e.b.Delete(e.ctx), 409)
	}},
	{"bucket names have rules", func(e *env) error {
		for _, name := range []string{"ab", "Upper", "goog-x", "my-google-b", "10.0.0.1", "-x-", "a..b", "x_", strings.Repeat("x", 64)} {
			if err := code(e.client.Bucket(name).Create(e.ctx, testProject, nil), 400); err != nil {
				return fmt.Errorf("%q: %w", name, err)
			}
		}
		return nil
	}},
	{"bucket attributes are stored", func(e *env) error {
		b := e.client.Bucket(e.name + "-full")
		want := &gcs.BucketAttrs{
			Location: "US-CENTRAL1", StorageClass: "NEARLINE", VersioningEnabled: true, Labels: map[string]string{"team": "hpc"},
			Lifecycle: gcs.Lifecycle{Rules: []gcs.LifecycleRule{
				{Action: gcs.LifecycleAction{Type: "Delete"}, Condition: gcs.LifecycleCondition{AgeInDays: 30, MatchesPrefix: []string{"tmp/"}}},
				{Action: gcs.LifecycleAction{Type: "SetStorageClass", StorageClass: "ARCHIVE"}, Condition: gcs.LifecycleCondition{NumNewerVersions: 3}},
			}},
			UniformBucketLevelAccess: gcs.UniformBucketLevelAccess{Enabled: true},
			SoftDeletePolicy:         &gcs.SoftDeletePolicy{RetentionDuration: 10 * 24 * time.Hour},
		}
		if err := b.Create(e.ctx, testProject, want); err != nil {
			return err
		}
		a, err := b.Attrs(e.ctx)
		if err != nil {
			return err
		}
		if a.SoftDeletePolicy == nil || a.SoftDeletePolicy.EffectiveTime.IsZero() {
			return fmt.Errorf("soft delete policy: %+v", a.SoftDeletePolicy)
		}
		return equal("attributes", []any{a.Location, a.LocationType, a.StorageClass, a.VersioningEnabled, a.Labels, a.Lifecycle, a.UniformBucketLevelAccess.Enabled, a.SoftDeletePolicy.RetentionDuration},
			[]any{want.Location, "region", want.StorageClass, true, want.Labels, want.Lifecycle, true, want.SoftDeletePolicy.RetentionDuration})
	}},
	{"bucket has autoclass and hierarchical namespace", func(e *env) error {
		b := e.client.Bucket(e.name + "-hns")
		err := b.Create(e.ctx, testProject, &gcs.BucketAttrs{
			Autoclass:                &gcs.Autoclass{Enabled: true},
			HierarchicalNamespace:    &gcs.HierarchicalNamespace{Enabled: true},
			UniformBucketLevelAccess: gcs.UniformBucketLevelAccess{Enabled: true},
		})
		if err != nil {
			return err
		}
		a, err := b.Attrs(e.ctx)
		if err != nil {
			return err
		}
		if a.Autoclass == nil || !a.Autoclass.Enabled || a.Autoclass.TerminalStorageClass != "NEARLINE" || a.Autoclass.ToggleTime.IsZero() ||
			a.HierarchicalNamespace == nil || !a.HierarchicalNamespace.Enabled {
			return fmt.Errorf("got autoclass %+v, namespace %+v", a.Autoclass, a.HierarchicalNamespace)
		}
		return nil
	}},
	{"hierarchical namespace needs uniform access", func(e *env) error {
		return code(e.client.Bucket(e.name+"-hns").Create(e.ctx, testProject, &gcs.BucketAttrs{HierarchicalNamespace: &gcs.HierarchicalNamespace{Enabled: true}}), 400)
	}},
	{"bucket update merges", func(e *env) error {
		u := gcs.BucketAttrsToUpdate{VersioningEnabled: true, Lifecycle: &gcs.Lifecycle{Rules: []gcs.LifecycleRule{
			{Action: gcs.LifecycleAction{Type: "Delete"}, Condition: gcs.LifecycleCondition{AgeInDays: 1}}}}}
		u.SetLabel("a", "1")
		u.SetLabel("b", "2")
		if _, err := e.b.Update(e.ctx, u); err != nil {
			return err
		}
		u = gcs.BucketAttrsToUpdate{}
		u.DeleteLabel("a")
		a, err := e.b.Update(e.ctx, u)
		if err != nil {
			return err
		}
		return equal("attributes", []any{a.Labels, a.VersioningEnabled, len(a.Lifecycle.Rules), a.MetaGeneration},
			[]any{map[string]string{"b": "2"}, true, 1, int64(3)})
	}},
	{"bucket update checks metageneration", func(e *env) error {
		_, err := e.b.If(gcs.BucketConditions{MetagenerationMatch: 7}).Update(e.ctx, gcs.BucketAttrsToUpdate{VersioningEnabled: true})
		return code(err, 412)
	}},
	{"bucket delete checks metageneration", func(e *env) error {
		return code(e.b.If(gcs.BucketConditions{MetagenerationMatch: 7}).Delete(e.ctx), 412)
	}},
	{"upload to a missing bucket fails", func(e *env) error {
		return code(e.putTo(e.client.Bucket("no-such-bucket").Object("x"), "x"), 404)
	}},
	{"single upload", func(e *env) error {
		data := randomData(300_000)
		return all(func() error { return e.put("x", data, chunks(0)) }, func() error { return e.has(e.b.Object("x"), data) })
	}},
	{"multipart upload", func(e *env) error {
		data := "--boundary\r\n--\r\n" + randomData(1000)
		return all(func() error { return e.put("x", data) }, func() error { return e.has(e.b.Object("x"), data) })
	}},
	{"resumable upload", func(e *env) error {
		data := randomData(3<<18 + 5)
		return all(func() error { return e.put("x", data, chunks(1<<18)) }, func() error { return e.has(e.b.Object("x"), data) })
	}},
	{"resumable upload of whole chunks", func(e *env) error {
		data := randomData(2 << 18)
		return all(func() error { return e.put("x", data, chunks(1<<18)) }, func() error { return e.has(e.b.Object("x"), data) })
	}},
	{"empty object", func(e *env) error {
		return all(
			func() error { return e.put("a", "") },
			func() error { return e.put("b", "", chunks(0)) },
			func() error { return e.has(e.b.Object("a"), "") },
			func() error { return e.has(e.b.Object("b"), "") },
		)
	}},
	{"object has its attributes", func(e *env) error {
		custom := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
		err := e.put("dir/x", "hello", func(w *gcs.Writer) {
			w.ContentType, w.CacheControl, w.ContentDisposition, w.ContentLanguage = "text/x-test", "no-store", "inline", "en"
			w.Metadata, w.CustomTime, w.StorageClass = map[string]string{"k": "v w"}, custom, "NEARLINE"
		})
		if err != nil {
			return err
		}
		a, err := e.b.Object("dir/x").Attrs(e.ctx)
		if err != nil {
			return err
		}
		sum := md5.Sum([]byte("hello"))
		if a.Generation <= 0 || a.Etag == "" || a.Created.IsZero() || a.Updated.IsZero() || a.MediaLink == "" {
			return fmt.Errorf("got %+v", a)
		}
		return equal("attributes", []any{a.Bucket, a.Name, a.Size, a.ContentType, a.CacheControl, a.ContentDisposition, a.ContentLanguage, a.Metadata, a.CustomTime, a.StorageClass, a.Metageneration, a.CRC32C, a.MD5, a.ComponentCount},
			[]any{e.name, "dir/x", int64(5), "text/x-test", "no-store", "inline", "en", map[string]string{"k": "v w"}, custom, "NEARLINE", int64(1), crc32.Checksum([]byte("hello"), castagnoli), sum[:], int64(0)})
	}},
	{"reader has its attributes", func(e *env) error {
		if err := e.put("x", "hello", func(w *gcs.Writer) { w.ContentType, w.CacheControl = "text/x-test", "no-store" }); err != nil {
			return err
		}
		a, err := e.b.Object("x").Attrs(e.ctx)
		if err != nil {
			return err
		}
		r, err := e.b.Object("x").NewReader(e.ctx)
		if err != nil {
			return err
		}
		defer r.Close()
		g := r.Attrs
		return equal("attributes", []any{g.Size, g.ContentType, g.CacheControl, g.Generation, g.Metageneration, g.CRC32C, g.LastModified.Unix()},
			[]any{int64(5), "text/x-test", "no-store", a.Generation, int64(1), a.CRC32C, a.Updated.Unix()})
	}},
	{"wrong CRC32C is refused", func(e *env) error {
		wrong := func(w *gcs.Writer) { w.CRC32C, w.SendCRC32C = 1, true }
		return all(
			func() error { return code(e.put("x", "data", wrong), 400) },
			func() error { return code(e.put("x", randomData(1<<19), wrong, chunks(1<<18)), 400) },
			func() error { return e.missing("x") },
		)
	}},
	{"wrong MD5 is refused", func(e *env) error {
		return all(
			func() error {
				return code(e.put("x", "data", func(w *gcs.Writer) { w.MD5 = bytes.Repeat([]byte{1}, 16) }), 400)
			},
			func() error { return e.missing("x") },
		)
	}},
	{"right checksums are accepted", func(e *env) error {
		sum := md5.Sum([]byte("data"))
		return e.put("x", "data", func(w *gcs.Writer) {
			w.MD5, w.CRC32C, w.SendCRC32C = sum[:], crc32.Checksum([]byte("data"), castagnoli), true
		})
	}},
	{"ranges", func(e *env) error {
		if err := e.put("x", "0123456789"); err != nil {
			return err
		}
		for _, c := range []struct {
			offset, length int64
			want           string
		}{{0, 4, "0123"}, {3, 4, "3456"}, {8, 100, "89"}, {4, -1, "456789"}, {-3, -1, "789"}, {-30, -1, "0123456789"}, {0, -1, "0123456789"}, {5, 0, ""}} {
			r, err := e.b.Object("x").NewRangeReader(e.ctx, c.offset, c.length)
			if err != nil {
				return fmt.Errorf("%d+%d: %w", c.offset, c.length, err)
			}
			got, err := io.ReadAll(r)
			r.Close()
			if err != nil || string(got) != c.want || r.Attrs.Size != 10 {
				return fmt.Errorf("%d+%d: got %q of %d, %v, want %q of 10", c.offset, c.length, got, r.Attrs.Size, err, c.want)
			}
		}
		return nil
	}},
	{"range past the end is 416", func(e *env) error {
		if err := e.put("x", "0123456789"); err != nil {
			return err
		}
		_, err := e.b.Object("x").NewRangeReader(e.ctx, 10, 1)
		return code(err, 416)
	}},
	{"read of a missing object", func(e *env) error {
		_, err := e.get(e.b.Object("none"))
		return code(err, 404)
	}},
	{"read with preconditions", func(e *env) error {
		if err := e.put("x", "data"); err != nil {
			return err
		}
		a, err := e.b.Object("x").Attrs(e.ctx)
		if err != nil {
			return err
		}
		return all(
			func() error {
				return e.has(e.b.Object("x").If(gcs.Conditions{GenerationMatch: a.Generation, MetagenerationMatch: 1}), "data")
			},
			func() error {
				_, err := e.get(e.b.Object("x").If(gcs.Conditions{GenerationMatch: a.Generation + 1}))
				return code(err, 412)
			},
			func() error {
				_, err := e.get(e.b.Object("x").If(gcs.Conditions{MetagenerationMatch: 2}))
				return code(err, 412)
			},
		)
	}},
	{"attributes with preconditions", func(e *env) error {
		if err := e.put("x", "data"); err != nil {
			return err
		}
		a, err := e.b.Object("x").Attrs(e.ctx)
		if err != nil {
			return err
		}
		return all(
			func() error {
				_, err := e.b.Object("x").If(gcs.Conditions{GenerationMatch: a.Generation + 1}).Attrs(e.ctx)
				return code(err, 412)
			},
			func() error {
				_, err := e.b.Object("x").If(gcs.Conditions{GenerationNotMatch: a.Generation}).Attrs(e.ctx)
				return code(err, 304)
			},
			func() error {
				_, err := e.b.Object("x").If(gcs.Conditions{MetagenerationNotMatch: 5}).Attrs(e.ctx)
				return err
			},
		)
	}},
	{"upload if it does not exist", func(e *env) error {
		o := e.b.Object("x").If(gcs.Conditions{DoesNotExist: true})
		return all(
			func() error { return e.putTo(o, "one") },
			func() error { return code(e.putTo(o, "two"), 412) },
			func() error { return code(e.putTo(o, randomData(1<<19), chunks(1<<18)), 412) },
			func() error { return e.has(e.b.Object("x"), "one") },
		)
	}},
	{"upload over a generation", func(e *env) error {
		if err := e.put("x", "one"); err != nil {
			return err
		}
		a, err := e.b.Object("x").Attrs(e.ctx)
		if err != nil {
			return err
		}
		return all(
			func() error {
				return code(e.putTo(e.b.Object("x").If(gcs.Conditions{GenerationMatch: a.Generation + 1}), "two"), 412)
			},
			func() error {
				return e.putTo(e.b.Object("x").If(gcs.Conditions{GenerationMatch: a.Generation}), "three")
			},
			func() error {
				return code(e.putTo(e.b.Object("x").If(gcs.Conditions{GenerationMatch: a.Generation}), "four"), 412)
			},
			func() error { return e.has(e.b.Object("x"), "three") },
			func() error {
				b, err := e.b.Object("x").Attrs(e.ctx)
				if err == nil && b.Generation <= a.Generation {
					err = fmt.Errorf("generation went from %d to %d", a.Generation, b.Generation)
				}
				return err
			},
		)
	}},
	{"64 writers of one name: one wins", func(e *env) error {
		var wg sync.WaitGroup
		results := make([]error, 64)
		for i := range results {
			wg.Go(func() {
				w := e.b.Object("x").Retryer(gcs.WithPolicy(gcs.RetryNever)).If(gcs.Conditions{DoesNotExist: true}).NewWriter(e.ctx)
				fmt.Fprintf(w, "writer %d", i)
				results[i] = w.Close()
			})
		}
		wg.Wait()
		winner := -1
		for i, err := range results {
			if err != nil {
				if err := code(err, 412); err != nil {
					return err
				}
				continue
			}
			if winner >= 0 {
				return fmt.Errorf("writers %d and %d both won", winner, i)
			}
			winner = i
		}
		return e.has(e.b.Object("x"), fmt.Sprintf("writer %d", winner))
	}},
	{"object update merges metadata", func(e *env) error {
		if err := e.put("x", "data", func(w *gcs.Writer) { w.ContentType, w.Metadata = "text/plain", map[string]string{"a": "1"} }); err != nil {
			return err
		}
		a, err := e.b.Object("x").Update(e.ctx, gcs.ObjectAttrsToUpdate{ContentType: "text/x-new", Metadata: map[string]string{"b": "2"}})
		if err != nil {
			return err
		}
		if err := equal("attributes", []any{a.ContentType, a.Metadata, a.Metageneration}, []any{"text/x-new", map[string]string{"a": "1", "b": "2"}, int64(2)}); err != nil {
			return err
		}
		if a, err = e.b.Object("x").Update(e.ctx, gcs.ObjectAttrsToUpdate{Metadata: map[string]string{}}); err != nil {
			return err
		}
		if err := equal("attributes", []any{a.ContentType, len(a.Metadata), a.Metageneration}, []any{"text/x-new", 0, int64(3)}); err != nil {
			return err
		}
		return e.has(e.b.Object("x"), "data")
	}},
	{"object update checks metageneration", func(e *env) error {
		if err := e.put("x", "data"); err != nil {
			return err
		}
		o := e.b.Object("x").If(gcs.Conditions{MetagenerationMatch: 2})
		_, err := o.Update(e.ctx, gcs.ObjectAttrsToUpdate{ContentType: "text/x-new"})
		return code(err, 412)
	}},
	{"delete", func(e *env) error {
		return all(
			func() error { return e.put("x", "data") },
			func() error { return e.b.Object("x").Delete(e.ctx) },
			func() error { return e.missing("x") },
			func() error { return code(e.b.Object("x").Delete(e.ctx), 404) },
		)
	}},
	{"delete checks generation", func(e *env) error {
		if err := e.put("x", "data"); err != nil {
			return err
		}
		a, err := e.b.Object("x").Attrs(e.ctx)
		if err != nil {
			return err
		}
		return all(
			func() error {
				return code(e.b.Object("x").If(gcs.Conditions{GenerationMatch: a.Generation + 1}).Delete(e.ctx), 412)
			},
			func() error { return e.has(e.b.Object("x"), "data") },
			func() error { return e.b.Object("x").If(gcs.Conditions{GenerationMatch: a.Generation}).Delete(e.ctx) },
		)
	}},
	{"list in order", func(e *env) error {
		if err := e.putAll("b", "a/b", "a", "a!", "é", "Z"); err != nil {
			return err
		}
		got, err := e.list(nil)
		if err != nil {
			return err
		}
		return equal("names", got, []string{"Z", "a", "a!", "a/b", "b", "é"})
	}},
	{"list with prefix and delimiter", func(e *env) error {
		if err := e.putAll("a/b", "a/c", "d", "e", "e/f", "e/g/h", "e/g/i", "ez"); err != nil {
			return err
		}
		return all(
			func() error { return e.lists(&gcs.Query{Prefix: "e/"}, "e/f", "e/g/h", "e/g/i") },
			func() error { return e.lists(&gcs.Query{Prefix: "e"}, "e", "e/f", "e/g/h", "e/g/i", "ez") },
			func() error { return e.lists(&gcs.Query{Delimiter: "/"}, "prefix:a/", "d", "e", "prefix:e/", "ez") },
			func() error { return e.lists(&gcs.Query{Delimiter: "/", Prefix: "e/"}, "e/f", "prefix:e/g/") },
			func() error { return e.lists(&gcs.Query{Delimiter: "/", Prefix: "e"}, "e", "prefix:e/", "ez") },
			func() error { return e.lists(&gcs.Query{Prefix: "none"}) },
		)
	}},
	{"list with another delimiter", func(e *env) error {
		if err := e.putAll("a--b", "a--c", "a-d"); err != nil {
			return err
		}
		return e.lists(&gcs.Query{Delimiter: "--"}, "prefix:a--", "a-d")
	}},
	{"list with offsets", func(e *env) error {
		if err := e.putAll("a", "b", "b/x", "c", "d"); err != nil {
			return err
		}
		return all(
			func() error { return e.lists(&gcs.Query{StartOffset: "b"}, "b", "b/x", "c", "d") },
			func() error { return e.lists(&gcs.Query{EndOffset: "c"}, "a", "b", "b/x") },
			func() error { return e.lists(&gcs.Query{StartOffset: "b/", EndOffset: "d"}, "b/x", "c") },
		)
	}},
	{"list with trailing delimiter", func(e *env) error {
		if err := e.putAll("a/", "a/b", "c"); err != nil {
			return err
		}
		return all(
			func() error { return e.lists(&gcs.Query{Delimiter: "/"}, "prefix:a/", "c") },
			func() error {
				return e.lists(&gcs.Query{Delimiter: "/", IncludeTrailingDelimiter: true}, "prefix:a/", "a/", "c")
			},
		)
	}},
	{"list with glob", func(e *env) error {
		if err := e.putAll("a.txt", "b.txt", "d/a.txt", "d/e/a.txt", "d/e/b.bin", "{x}"); err != nil {
			return err
		}
		return all(
			func() error { return e.lists(&gcs.Query{MatchGlob: "*.txt"}, "a.txt", "b.txt") },
			func() error {
				return e.lists(&gcs.Query{MatchGlob: "**.txt"}, "a.txt", "b.txt", "d/a.txt", "d/e/a.txt")
			},
			func() error { return e.lists(&gcs.Query{MatchGlob: "d/*/?.{txt,bin}"}, "d/e/a.txt", "d/e/b.bin") },
			func() error { return e.lists(&gcs.Query{MatchGlob: "[!a].txt"}, "b.txt") },
			func() error { return e.lists(&gcs.Query{MatchGlob: "d/**", Prefix: "d/e"}, "d/e/a.txt", "d/e/b.bin") },
			func() error { return e.lists(&gcs.Query{MatchGlob: `\{x\}`}, "{x}") },
		)
	}},
	{"bad glob is refused", func(e *env) error {
		_, err := e.list(&gcs.Query{MatchGlob: "{a"})
		return code(err, 400)
	}},
	{"list in pages", func(e *env) error {
		var names []string
		for i := range 7 {
			names = append(names, fmt.Sprintf("d%d/a", i), fmt.Sprintf("d%d/b", i), fmt.Sprintf("n%d", i))
		}
		if err := e.putAll(names...); err != nil {
			return err
		}
		p := iterator.NewPager(e.b.Objects(e.ctx, &gcs.Query{Delimiter: "/"}), 3, "")
		var got []string
		for {
			var page []*gcs.ObjectAttrs
			token, err := p.NextPage(&page)
			if err != nil {
				return err
			}
			if len(page) > 3 {
				return fmt.Errorf("a page of %d", len(page))
			}
			for _, o := range page {
				got = append(got, o.Prefix+o.Name)
			}
			if token == "" {
				break
			}
		}
		slices.Sort(got) // within a page the client yields objects first
		return equal("entries", got, []string{"d0/", "d1/", "d2/", "d3/", "d4/", "d5/", "d6/", "n0", "n1", "n2", "n3", "n4", "n5", "n6"})
	}},
	{"list of a missing bucket", func(e *env) error {
		_, err := e.client.Bucket("no-such-bucket").Objects(e.ctx, nil).Next()
		return code(err, 404)
	}},
	{"versions", func(e *env) error {
		if _, err := e.b.Update(e.ctx, gcs.BucketAttrsToUpdate{VersioningEnabled: true}); err != nil {
			return err
		}
		o := e.b.Object("x")
		if err := e.put("x", "one"); err != nil {
			return err
		}
		first, err := o.Attrs(e.ctx)
		if err != nil {
			return err
		}
		return all(
			func() error { return e.put("x", "two") },
			func() error { return e.lists(nil, "x") },
			func() error { return e.lists(&gcs.Query{Versions: true}, "x", "x") },
			func() error { return e.has(o, "two") },
			func() error { return e.has(o.Generation(first.Generation), "one") },
			func() error { return o.Delete(e.ctx) },
			func() error { return e.missing("x") },
			func() error { return e.lists(&gcs.Query{Versions: true}, "x", "x") },
			func() error { return e.lists(nil) },
			func() error {
				a, err := o.Generation(first.Generation).Attrs(e.ctx)
				if err == nil && a.Deleted.IsZero() {
					err = errors.New("a noncurrent version has no deletion time")
				}
				return err
			},
			func() error { return code(e.b.Delete(e.ctx), 409) },
			func() error { return o.Generation(first.Generation).Delete(e.ctx) },
			func() error { return e.lists(&gcs.Query{Versions: true}, "x") },
		)
	}},
	{"compose", func(e *env) error {
		if err := all(func() error { return e.put("a", "one") }, func() error { return e.put("b", "two") }); err != nil {
			return err
		}
		c := e.b.Object("c").ComposerFrom(e.b.Object("a"), e.b.Object("b"), e.b.Object("a"))
		c.ContentType = "text/plain"
		a, err := c.Run(e.ctx)
		if err != nil {
			return err
		}
		if err := e.has(e.b.Object("c"), "onetwoone"); err != nil {
			return err
		}
		return equal("attributes", []any{a.Size, a.CRC32C, len(a.MD5), a.ComponentCount, a.ContentType},
			[]any{int64(9), crc32.Checksum([]byte("onetwoone"), castagnoli), 0, int64(3), "text/plain"})
	}},
	{"compose counts components", func(e *env) error {
		if err := e.put("a", "x"); err != nil {
			return err
		}
		if _, err := e.b.Object("b").ComposerFrom(e.b.Object("a"), e.b.Object("a")).Run(e.ctx); err != nil {
			return err
		}
		a, err := e.b.Object("b").ComposerFrom(e.b.Object("b"), e.b.Object("a")).Run(e.ctx)
		if err != nil {
			return err
		}
		return equal("components", a.ComponentCount, int64(3))
	}},
	{"compose takes at most 32", func(e *env) error {
		if err := e.put("a", "x"); err != nil {
			return err
		}
		_, body, err := e.answers(400, "POST", "/storage/v1/b/"+e.name+"/o/c/compose", map[string]string{"Content-Type": "application/json"},
			`{"sourceObjects":[`+strings.Repeat(`{"name":"a"},`, 32)+`{"name":"a"}]}`)
		if err != nil {
			return fmt.Errorf("%w: %s", err, body)
		}
		return nil
	}},
	{"compose checks preconditions", func(e *env) error {
		if err := all(func() error { return e.put("a", "one") }, func() error { return e.put("c", "old") }); err != nil {
			return err
		}
		return all(
			func() error {
				_, err := e.b.Object("c").If(gcs.Conditions{DoesNotExist: true}).ComposerFrom(e.b.Object("a")).Run(e.ctx)
				return code(err, 412)
			},
			func() error {
				_, err := e.b.Object("c").ComposerFrom(e.b.Object("a").If(gcs.Conditions{GenerationMatch: 5})).Run(e.ctx)
				return code(err, 412)
			},
			func() error {
				_, err := e.b.Object("c").ComposerFrom(e.b.Object("none")).Run(e.ctx)
				return code(err, 404)
			},
			func() error { return e.has(e.b.Object("c"), "old") },
		)
	}},
	{"copy keeps attributes", func(e *env) error {
		other := e.client.Bucket(e.name + "-to")
		if err := other.Create(e.ctx, testProject, nil); err != nil {
			return err
		}
		if err := e.put("dir/x", "data", func(w *gcs.Writer) { w.ContentType, w.Metadata = "text/x-a", map[string]string{"a": "1"} }); err != nil {
			return err
		}
		a, err := other.Object("y/z").CopierFrom(e.b.Object("dir/x")).Run(e.ctx)
		if err != nil {
			return err
		}
		if err := equal("attributes", []any{a.Bucket, a.Name, a.ContentType, a.Metadata, a.Size}, []any{e.name + "-to", "y/z", "text/x-a", map[string]string{"a": "1"}, int64(4)}); err != nil {
			return err
		}
		return all(
			func() error { return e.b.Object("dir/x").Delete(e.ctx) },
			func() error { return e.has(other.Object("y/z"), "data") },
		)
	}},
	{"copy replaces attributes", func(e *env) error {
		if err := e.put("x", "data", func(w *gcs.Writer) { w.ContentType, w.Metadata = "text/x-a", map[string]string{"a": "1"} }); err != nil {
			return err
		}
		c := e.b.Object("y").CopierFrom(e.b.Object("x"))
		c.ContentType, c.Metadata = "text/x-b", map[string]string{"b": "2"}
		a, err := c.Run(e.ctx)
		if err != nil {
			return err
		}
		return equal("attributes", []any{a.ContentType, a.Metadata}, []any{"text/x-b", map[string]string{"b": "2"}})
	}},
	{"copy checks the destination", func(e *env) error {
		if err := e.putAll("x", "y"); err != nil {
			return err
		}
		_, err := e.b.Object("y").If(gcs.Conditions{DoesNotExist: true}).CopierFrom(e.b.Object("x")).Run(e.ctx)
		return code(err, 412)
	}},
	{"copy checks the source", func(e *env) error {
		if err := e.putAll("x"); err != nil {
			return err
		}
		_, err := e.b.Object("y").CopierFrom(e.b.Object("x").If(gcs.Conditions{GenerationMatch: 5})).Run(e.ctx)
		return code(err, 412)
	}},
	{"copy of a missing object", func(e *env) error {
		_, err := e.b.Object("y").CopierFrom(e.b.Object("none")).Run(e.ctx)
		return code(err, 404)
	}},
	{"move", func(e *env) error {
		if err := e.put("a/x", "data", func(w *gcs.Writer) { w.Metadata = map[string]string{"a": "1"} }); err != nil {
			return err
		}
		a, err := e.b.Object("a/x").Move(e.ctx, gcs.MoveObjectDestination{Object: "b/y"})
		if err != nil {
			return err
		}
		return all(
			func() error { return equal("metadata", a.Metadata, map[string]string{"a": "1"}) },
			func() error { return e.lists(nil, "b/y") },
			func() error { return e.has(e.b.Object("b/y"), "data") },
			func() error {
				_, err := e.b.Object("a/x").Move(e.ctx, gcs.MoveObjectDestination{Object: "c"})
				return code(err, 404)
			},
			func() error { return e.put("d", "other") },
			func() error {
				_, err := e.b.Object("b/y").Move(e.ctx, gcs.MoveObjectDestination{Object: "d", Conditions: &gcs.Conditions{DoesNotExist: true}})
				return code(err, 412)
			},
		)
	}},
	{"names are only names", func(e *env) error {
		names := hostileNames()
		for _, name := range names {
			if err := e.put(name, "data of "+name); err != nil {
				return fmt.Errorf("put %.60q: %w", name, err)
			}
		}
		for _, name := range names {
			if err := e.has(e.b.Object(name), "data of "+name); err != nil {
				return err
			}
		}
		if err := e.lists(nil, names...); err != nil {
			return err
		}
		for _, name := range names {
			if err := e.b.Object(name).Delete(e.ctx); err != nil {
				return fmt.Errorf("delete %.60q: %w", name, err)
			}
		}
		return e.lists(nil)
	}},
	{"bad names are refused", func(e *env) error {
		for _, name := range []string{"a\nb", "a\rb", strings.Repeat("x", 1025), ".", ".."} {
			if err := code(e.put(name, "x"), 400); err != nil {
				return fmt.Errorf("%.20q: %w", name, err)
			}
		}
		return nil
	}},
	{"service account", func(e *env) error {
		account, err := e.client.ServiceAccount(e.ctx, testProject)
		if err == nil && !strings.Contains(account, "@gs-project-accounts.iam.gserviceaccount.com") {
			err = fmt.Errorf("got %q", account)
		}
		return err
	}},
	{"JSON errors have their shape", func(e *env) error {
		_, body, err := e.answers(404, "GET", "/storage/v1/b/"+e.name+"/o/none", nil, "")
		if err != nil {
			return err
		}
		want := fmt.Sprintf(`{"error":{"code":404,"message":"No such object: %s/none","errors":[{"message":"No such object: %s/none","domain":"global","reason":"notFound"}]}}`, e.name, e.name)
		return equal("body", strings.TrimSpace(body), want)
	}},
	{"XML errors have their shape", func(e *env) error {
		_, body, err := e.answers(404, "GET", "/"+e.name+"/none", nil, "")
		if err == nil && !strings.Contains(body, "<Error><Code>NoSuchKey</Code><Message>") {
			err = fmt.Errorf("got %q", body)
		}
		return err
	}},
	{"XML HEAD has the object's headers", func(e *env) error {
		if err := e.put("d/x", "hello", func(w *gcs.Writer) { w.ContentType, w.Metadata = "text/x-a", map[string]string{"k": "v"} }); err != nil {
			return err
		}
		a, err := e.b.Object("d/x").Attrs(e.ctx)
		if err != nil {
			return err
		}
		res, _, err := e.answers(200, "HEAD", "/"+e.name+"/d/x", nil, "")
		if err != nil {
			return err
		}
		got := map[string]string{}
		for _, k := range []string{"Content-Type", "Content-Length", "X-Goog-Generation", "X-Goog-Metageneration", "X-Goog-Storage-Class", "X-Goog-Stored-Content-Length", "X-Goog-Meta-K", "Accept-Ranges"} {
			got[k] = res.Header.Get(k)
		}
		got["X-Goog-Hash"] = strings.Join(res.Header.Values("X-Goog-Hash"), ",")
		return equal("headers", got, map[string]string{
			"Content-Type": "text/x-a", "Content-Length": "5", "X-Goog-Generation": fmt.Sprint(a.Generation), "X-Goog-Metageneration": "1",
			"X-Goog-Storage-Class": "STANDARD", "X-Goog-Stored-Content-Length": "5", "X-Goog-Meta-K": "v", "Accept-Ranges": "bytes",
			"X-Goog-Hash": "crc32c=mnG7TA==,md5=XUFAKrxLKna5cZ2REBfFkg==",
		})
	}},
	{"XML read with conditions", func(e *env) error {
		if err := e.put("x", "hello"); err != nil {
			return err
		}
		a, err := e.b.Object("x").Attrs(e.ctx)
		if err != nil {
			return err
		}
		gen, path := fmt.Sprint(a.Generation), "/"+e.name+"/x"
		for _, c := range []struct {
			header, value string
			status        int
		}{
			{"x-goog-if-generation-match", gen, 200}, {"x-goog-if-generation-match", "5", 412}, {"x-goog-if-generation-not-match", gen, 304},
			{"x-goog-if-metageneration-match", "1", 200}, {"x-goog-if-metageneration-match", "9", 412}, {"x-goog-if-generation-match", "x", 400},
		} {
			if _, _, err := e.answers(c.status, "GET", path, map[string]string{c.header: c.value}, ""); err != nil {
				return err
			}
		}
		if _, _, err := e.answers(404, "GET", path+"?generation=5", nil, ""); err != nil {
			return err
		}
		_, _, err = e.answers(200, "GET", path+"?generation="+gen, nil, "")
		return err
	}},
	{"download path", func(e *env) error {
		if err := e.put("d/x", "hello"); err != nil {
			return err
		}
		_, body, err := e.answers(200, "GET", "/download/storage/v1/b/"+e.name+"/o/d%2Fx?alt=media", nil, "")
		if err != nil {
			return err
		}
		return equal("body", body, "hello")
	}},
	{"resumable protocol", func(e *env) error {
		const k = 1 << 18
		data := randomData(2*k + 100)
		url, err := e.startResumable("x")
		if err != nil {
			return err
		}
		return all(
			func() error { return e.chunk(url, "bytes */*", "", 308, "") },
			func() error { return e.chunk(url, fmt.Sprintf("bytes 0-%d/*", k-1), data[:k], 308, "bytes=0-262143") },
			func() error { return e.chunk(url, fmt.Sprintf("bytes */%d", len(data)), "", 308, "bytes=0-262143") },
			func() error { return e.missing("x") },
			func() error {
				return e.chunk(url, fmt.Sprintf("bytes %d-%d/*", k, 2*k-1), data[k:2*k], 308, "bytes=0-524287")
			},
			func() error {
				return e.chunk(url, fmt.Sprintf("bytes %d-%d/%d", 2*k, len(data)-1, len(data)), data[2*k:], 200, "")
			},
			func() error { return e.has(e.b.Object("x"), data) },
		)
	}},
	{"resumable upload takes a chunk again", func(e *env) error {
		const k = 1 << 18
		data := randomData(2 * k)
		url, err := e.startResumable("x")
		if err != nil {
			return err
		}
		return all(
			func() error { return e.chunk(url, fmt.Sprintf("bytes 0-%d/*", k-1), data[:k], 308, "bytes=0-262143") },
			func() error { return e.chunk(url, fmt.Sprintf("bytes 0-%d/*", 2*k-1), data, 308, "bytes=0-524287") },
			func() error { return e.chunk(url, fmt.Sprintf("bytes */%d", 2*k), "", 200, "") },
			func() error { return e.chunk(url, fmt.Sprintf("bytes */%d", 2*k), "", 200, "") },
			func() error { return e.has(e.b.Object("x"), data) },
		)
	}},
	{"resumable upload keeps whole blocks", func(e *env) error {
		data := randomData(1<<18 + 10)
		url, err := e.startResumable("x")
		if err != nil {
			return err
		}
		return all(
			func() error { return e.chunk(url, "bytes 0-99/*", data[:100], 308, "") },
			func() error {
				return e.chunk(url, fmt.Sprintf("bytes 0-%d/*", len(data)-1), data, 308, "bytes=0-262143")
			},
			func() error {
				return e.chunk(url, fmt.Sprintf("bytes %d-%d/%d", 1<<18, len(data)-1, len(data)), data[1<<18:], 200, "")
			},
			func() error { return e.has(e.b.Object("x"), data) },
		)
	}},
	{"resumable upload refuses a gap", func(e *env) error {
		url, err := e.startResumable("x")
		if err != nil {
			return err
		}
		return e.chunk(url, "bytes 100-199/200", randomData(100), 400, "")
	}},
	{"resumable upload refuses nonsense", func(e *env) error {
		url, err := e.startResumable("x")
		if err != nil {
			return err
		}
		for _, r := range []string{"bytes 5-1/10", "bytes 0-9/5", "octets 0-3/4", "bytes 0-3", "bytes -1-3/4", "bytes 0-3/x"} {
			if err := e.chunk(url, r, "data", 400, ""); err != nil {
				return err
			}
		}
		return nil
	}},
	{"resumable upload in one request", func(e *env) error {
		url, err := e.startResumable("x")
		if err != nil {
			return err
		}
		if _, _, err := e.answers(200, "PUT", url, nil, "whole"); err != nil {
			return err
		}
		return e.has(e.b.Object("x"), "whole")
	}},
	{"resumable upload is cancelled", func(e *env) error {
		url, err := e.startResumable("x")
		if err != nil {
			return err
		}
		if _, _, err := e.answers(499, "DELETE", url, nil, ""); err != nil {
			return err
		}
		if _, _, err := e.answers(404, "PUT", url, nil, "data"); err != nil {
			return err
		}
		return e.missing("x")
	}},
	{"resumable upload checks its checksum header", func(e *env) error {
		url, err := e.startResumable("x")
		if err != nil {
			return err
		}
		if _, _, err := e.answers(400, "PUT", url, map[string]string{"X-Goog-Hash": "crc32c=AAAAAA=="}, "data"); err != nil {
			return err
		}
		return e.missing("x")
	}},
	{"resumable upload checks its precondition at its end", func(e *env) error {
		res, _, err := e.answers(200, "POST", "/upload/storage/v1/b/"+e.name+"/o?uploadType=resumable&ifGenerationMatch=0&name=x", nil, "")
		if err != nil {
			return err
		}
		if err := e.put("x", "first"); err != nil {
			return err
		}
		if _, _, err := e.answers(412, "PUT", res.Header.Get("Location"), nil, "second"); err != nil {
			return err
		}
		return e.has(e.b.Object("x"), "first")
	}},
	{"bad page token is refused", func(e *env) error {
		_, _, err := e.answers(400, "GET", "/storage/v1/b/"+e.name+"/o?pageToken=!", nil, "")
		return err
	}},
}

// hostileNames are valid object names that would be trouble as paths, URLs, SQL or JSON.
func hostileNames() []string {
	return []string{
		"../../../../tmp/escape", "..\\..\\x", "/", "//", "/etc/passwd", "a", "a/b", "a/b/c", "a/", "a//b", "a/../b", "./a", "...", ".hidden",
		"name with spaces", "percent%2Fencoded%00", "quote'\"`;--", "new?query=1&x=2#frag", "\x00nul\x00", "tab\tbell\a", "\u202egnp.exe", "日本語/ファイル",
		"emoji 🚀", "e\u0301", "é", "rewriteTo", "o/b/o", "CON", "a:b|c<d>e*f", "~", "-rf", "$(touch x)", strings.Repeat("é", 512), "\U0010ffff",
	}
}
