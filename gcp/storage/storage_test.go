package storage_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/oauth2"
	"google.golang.org/api/googleapi"

	"github.com/sluicehpc/sluice/gcp/storage"
	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
)

// client's tokens name the place that they are for.
func client(t *testing.T, h http.HandlerFunc) *storage.Client {
	t.Helper()
	return clientWith(t, h, func(p storage.Place) oauth2.TokenSource {
		return oauth2.StaticTokenSource(&oauth2.Token{AccessToken: p.Account + " " + p.String()})
	})
}

func clientWith(t *testing.T, h http.HandlerFunc, tokens func(storage.Place) oauth2.TokenSource) *storage.Client {
	t.Helper()
	s := httptest.NewServer(discoverytest.Client(t, h, "storage"))
	t.Cleanup(s.Close)
	c, err := storage.NewClient(s.URL, tokens)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func place(bucket, prefix string) storage.Place {
	return storage.Place{Account: "data@p", Bucket: bucket, Prefix: prefix}
}

func fail(code int, reason string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"error":{"code":%d,"message":"in words","errors":[{"reason":%q}]}}`, code, reason)
	}
}

func TestCheck(t *testing.T) {
	ok := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Write([]byte(`{"items":[{"name":"x","bucket":"good-bucket"}]}`))
	}
	for _, tt := range []struct {
		name, bucket string
		answer       http.HandlerFunc
		want         error
	}{
		{"readable", "good-bucket", ok, nil},
		{"not found", "good-bucket", fail(404, "notFound"), storage.ErrNotFound},
		{"denied", "good-bucket", fail(403, "forbidden"), storage.ErrDenied},
		{"without credentials", "good-bucket", fail(401, "required"), storage.ErrDenied},
		{"a name that no bucket has", "No/../Bucket", func(http.ResponseWriter, *http.Request) { t.Error("the service was asked") }, storage.ErrNotFound},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := client(t, tt.answer).Check(t.Context(), place(tt.bucket, "p/")); !errors.Is(err, tt.want) || tt.want == nil && err != nil {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := client(t, fail(503, "backendError")).Check(ctx, place("good-bucket", ""))
	if err == nil || errors.Is(err, storage.ErrNotFound) || errors.Is(err, storage.ErrDenied) {
		t.Errorf("an unreachable service: %v, want no verdict", err)
	}
}

func TestListPrefix(t *testing.T) {
	page := 0
	c := client(t, func(w http.ResponseWriter, r *http.Request) {
		if got, want := r.URL.Query().Get("prefix"), "p/"; got != want {
			t.Errorf("prefix %q, want %q", got, want)
		}
		if got, want := r.Header.Get("Authorization"), "Bearer data@p gs://good-bucket/p/"; got != want {
			t.Errorf("authorization %q, want %q", got, want)
		}
		if page++; page == 1 { // reads are repeated
			fail(503, "backendError")(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Query().Get("pageToken") == "" {
			// CRC32C is big-endian in base64.
			w.Write([]byte(`{"items":[{"name":"p/a","generation":"7","size":"5","crc32c":"AAAAAQ=="}],"nextPageToken":"t"}`))
		} else {
			w.Write([]byte(`{"items":[{"name":"p/b","generation":"8","size":"0","crc32c":"AAAAAA=="}]}`))
		}
	})
	var got []storage.Object
	for o, err := range c.ListPrefix(t.Context(), place("good-bucket", "p/")) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, o)
	}
	if d := cmp.Diff([]storage.Object{{Name: "p/a", Generation: 7, Size: 5, CRC32C: 1}, {Name: "p/b", Generation: 8}}, got); d != "" {
		t.Errorf("objects (-want +got):\n%s", d)
	}
	for _, err := range client(t, fail(404, "notFound")).ListPrefix(t.Context(), place("good-bucket", "")) {
		if !errors.Is(err, storage.ErrNotFound) {
			t.Errorf("got %v, want ErrNotFound", err)
		}
	}
}

// broken is a source whose account cannot be used, or whose service is away.
type broken struct{ err error }

func (b broken) Token() (*oauth2.Token, error) { return nil, b.err }

type hung struct{}

func (hung) Token() (*oauth2.Token, error) { select {} }

func TestAccountThatCannotBeUsed(t *testing.T) {
	asked := func(http.ResponseWriter, *http.Request) { t.Error("Cloud Storage was asked without a token") }
	with := func(s oauth2.TokenSource) *storage.Client {
		return clientWith(t, asked, func(storage.Place) oauth2.TokenSource { return s })
	}
	denied := &googleapi.Error{Code: 403, Message: "Permission 'iam.serviceAccounts.getAccessToken' denied on resource"}
	err := with(broken{denied}).Check(t.Context(), place("good-bucket", ""))
	if !errors.Is(err, storage.ErrAccount) || !errors.Is(err, denied) {
		t.Errorf("got %v, want ErrAccount and the service's own words", err)
	}
	err = with(broken{&googleapi.Error{Code: 503}}).Check(t.Context(), place("good-bucket", ""))
	if err == nil || errors.Is(err, storage.ErrAccount) || errors.Is(err, storage.ErrDenied) {
		t.Errorf("a service that is away: %v, want no verdict", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := with(hung{}).Check(ctx, place("good-bucket", "")); !errors.Is(err, context.Canceled) {
		t.Errorf("a service that hangs: %v, want %v", err, context.Canceled)
	}
}

// A place's token is kept, and never used for another place.
func TestTokensAreOfTheirPlaceAlone(t *testing.T) {
	minted := 0
	c := clientWith(t, func(w http.ResponseWriter, r *http.Request) {
		want := "Bearer a gs:/" + "/bucket/" + r.URL.Query().Get("prefix")
		if got := r.Header.Get("Authorization"); got != want {
			t.Errorf("authorization %q, want %q", got, want)
		}
		w.Header().Set("Content-Type", "application/json")
		w.Write([]byte(`{}`))
	}, func(p storage.Place) oauth2.TokenSource {
		minted++
		return oauth2.StaticTokenSource(&oauth2.Token{AccessToken: p.Account + " " + p.String()})
	})
	for i := range 3000 {
		for range 2 {
			if err := c.Check(t.Context(), storage.Place{Account: "a", Bucket: "bucket", Prefix: fmt.Sprintf("%d/", i%1500)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if minted < 1500 || minted > 3000 {
		t.Errorf("%d sources were made for 1500 places that were asked four times each", minted)
	}
}
