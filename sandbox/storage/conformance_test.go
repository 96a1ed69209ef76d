package storage

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	gcs "cloud.google.com/go/storage"
	"google.golang.org/api/iterator"

	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
)

// TestRoutes has every route of the JSON API; what goes over them is held against the description in all tests (see serve).
func TestRoutes(t *testing.T) {
	var routes []string
	for _, p := range prefixes {
		for _, r := range p.routes {
			switch {
			case r.method == http.MethodHead, p.media && (r.method != http.MethodGet || r.path != "b/{bucket}/o/{object}"):
				continue // HEAD is any GET without its body; of downloads, only this one is
			case strings.Contains(p.path, "upload") && r.method != http.MethodPost:
				continue // the later requests of a resumable upload go to a URL that the service made
			}
			routes = append(routes, r.method+" "+p.path+r.path)
		}
	}
	discoverytest.Routes(t, routes, "storage")
}

// TestConformance has Google's own client do everything that the product does, and more; nothing in it is wrong on purpose.
func TestConformance(t *testing.T) {
	h := httptest.NewServer(discoverytest.Strict(t, newServer(t, t.TempDir()), "storage"))
	t.Cleanup(h.Close)
	ctx := t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, reads := range []struct {
		name string
		c    *gcs.Client
	}{
		{"xml-reads", newClient(t, endpoint(h.URL)...)},
		{"json-reads", newClient(t, endpoint(h.URL, gcs.WithJSONReads())...)},
	} {
		b := reads.c.Bucket(reads.name)
		must(b.Create(ctx, testProject, &gcs.BucketAttrs{
			Location: "us-central1", UniformBucketLevelAccess: gcs.UniformBucketLevelAccess{Enabled: true}, Labels: map[string]string{"a": "b"},
			SoftDeletePolicy: &gcs.SoftDeletePolicy{}, VersioningEnabled: true,
			Lifecycle: gcs.Lifecycle{Rules: []gcs.LifecycleRule{{Action: gcs.LifecycleAction{Type: gcs.DeleteAction}, Condition: gcs.LifecycleCondition{AgeInDays: 3}}}},
		}))
		_, err := b.Update(ctx, gcs.BucketAttrsToUpdate{VersioningEnabled: false})
		must(err)
		_, err = b.Attrs(ctx)
		must(err)

		const large = 1 << 20
		for name, chunk := range map[string]int{"single shot": 0, "a/b//resumable ?#": 256 << 10} {
			w := b.Object(name).If(gcs.Conditions{DoesNotExist: true}).NewWriter(ctx)
			w.ChunkSize, w.ContentType, w.Metadata = chunk, "text/plain", map[string]string{"k": "v"}
			_, err := io.Copy(w, strings.NewReader(strings.Repeat("x", large)))
			must(err)
			must(w.Close())
		}
		o := b.Object("a/b//resumable ?#")
		_, err = o.Update(ctx, gcs.ObjectAttrsToUpdate{ContentType: "text/html"})
		must(err)
		r, err := o.Generation(mustAttrs(t, o).Generation).NewRangeReader(ctx, 5, 10)
		must(err)
		if got, err := io.ReadAll(r); err != nil || len(got) != 10 {
			t.Errorf("read %d bytes, %v", len(got), err)
		}
		must(r.Close())
		_, err = b.Object("composed").ComposerFrom(o, b.Object("single shot")).Run(ctx)
		must(err)
		_, err = b.Object("copied").CopierFrom(o).Run(ctx)
		must(err)
		_, err = b.Object("copied").Move(ctx, gcs.MoveObjectDestination{Object: "moved"})
		must(err)
		q := &gcs.Query{Prefix: "a/", Delimiter: "/", MatchGlob: "**", StartOffset: "a"}
		must(q.SetAttrSelection([]string{"Name", "Generation", "CRC32C", "Size", "Metadata"}))
		for _, q := range []*gcs.Query{nil, q, {Versions: true, Projection: gcs.ProjectionNoACL}} {
			for it := b.Objects(ctx, q); ; {
				_, err := it.Next()
				if err == iterator.Done {
					break
				}
				must(err)
			}
		}
		if _, err := b.Object("not there").Attrs(ctx); !errors.Is(err, gcs.ErrObjectNotExist) {
			t.Errorf("an object that is not there: %v", err)
		}
		if _, err := b.Object("not there").NewReader(ctx); err == nil {
			t.Error("an object that is not there was read")
		}
		if err := o.If(gcs.Conditions{GenerationMatch: 1}).Delete(ctx); err == nil {
			t.Error("a precondition that does not hold was passed over")
		}
		for _, name := range []string{"single shot", "a/b//resumable ?#", "composed", "moved"} {
			must(b.Object(name).Delete(ctx))
		}
		for it := reads.c.Buckets(ctx, testProject); ; {
			if _, err := it.Next(); err == iterator.Done {
				break
			} else {
				must(err)
			}
		}
	}
	if _, err := newClient(t, endpoint(h.URL)...).ServiceAccount(ctx, testProject); err != nil {
		t.Error(err)
	}
}

func mustAttrs(t *testing.T, o *gcs.ObjectHandle) *gcs.ObjectAttrs {
	t.Helper()
	a, err := o.Attrs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return a
}
