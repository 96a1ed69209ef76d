package storage_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/gcp/storage"
)

func client(t *testing.T, h http.HandlerFunc) *storage.Client {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	c, err := storage.NewClient(t.Context(), s.URL, option.WithoutAuthentication())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func fail(code int, reason string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"error":{"code":%d,"message":"in words","errors":[{"reason":%q}]}}`, code, reason)
	}
}

func TestCheckBucket(t *testing.T) {
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
			if err := client(t, tt.answer).CheckBucket(t.Context(), tt.bucket); !errors.Is(err, tt.want) || tt.want == nil && err != nil {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := client(t, fail(503, "backendError")).CheckBucket(ctx, "good-bucket")
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
	for o, err := range c.ListPrefix(t.Context(), "good-bucket", "p/") {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, o)
	}
	if d := cmp.Diff([]storage.Object{{Name: "p/a", Generation: 7, Size: 5, CRC32C: 1}, {Name: "p/b", Generation: 8}}, got); d != "" {
		t.Errorf("objects (-want +got):\n%s", d)
	}
	for _, err := range client(t, fail(404, "notFound")).ListPrefix(t.Context(), "good-bucket", "") {
		if !errors.Is(err, storage.ErrNotFound) {
			t.Errorf("got %v, want ErrNotFound", err)
		}
	}
}
