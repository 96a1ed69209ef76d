package gcp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/api/googleapi"

	"github.com/sluicehpc/sluice/gcp"
)

func apiError(code int, reason, status string) error {
	e := &googleapi.Error{Code: code, Message: "The thing is wrong."}
	if reason != "" {
		e.Errors = []googleapi.ErrorItem{{Reason: reason}}
	}
	e.Body = fmt.Sprintf(`{"error":{"code":%d,"status":%q}}`, code, status)
	return fmt.Errorf("call: %w", e)
}

func TestErrorKinds(t *testing.T) {
	for _, tt := range []struct {
		name                               string
		err                                error
		notFound, exists, conflict, repeat bool
	}{
		{"nil", nil, false, false, false, false},
		{"not found", apiError(404, "notFound", ""), true, false, false, false},
		{"compute exists", apiError(409, "alreadyExists", ""), false, true, false, false},
		{"lustre exists", apiError(409, "", "ALREADY_EXISTS"), false, true, false, false},
		{"bucket exists", apiError(409, "conflict", ""), false, true, false, false},
		{"transfer busy", apiError(409, "", "ABORTED"), false, false, true, false},
		{"quota", apiError(403, "quotaExceeded", ""), false, false, false, false},
		{"rate", apiError(403, "rateLimitExceeded", ""), false, false, false, true},
		{"unavailable", apiError(503, "backendError", "UNAVAILABLE"), false, false, false, true},
		{"too many", apiError(429, "", ""), false, false, false, true},
		{"not implemented", apiError(501, "", ""), false, false, false, false},
		{"refused", &url.Error{Op: "Get", Err: syscall.ECONNREFUSED}, false, false, false, true},
		{"reply lost", &url.Error{Op: "Get", Err: io.EOF}, false, false, false, true},
		{"deadline", &url.Error{Op: "Get", Err: context.DeadlineExceeded}, false, false, false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := []bool{gcp.IsNotFound(tt.err), gcp.IsAlreadyExists(tt.err), gcp.IsConflict(tt.err), gcp.Retryable(tt.err)}
			want := []bool{tt.notFound, tt.exists, tt.conflict, tt.repeat}
			for i, name := range []string{"IsNotFound", "IsAlreadyExists", "IsConflict", "Retryable"} {
				if got[i] != want[i] {
					t.Errorf("%s(%v) = %v, want %v", name, tt.err, got[i], want[i])
				}
			}
		})
	}
}

func TestWrap(t *testing.T) {
	err := gcp.Wrap(apiError(403, "forbidden", ""), "read gs://b/x")
	if got, want := err.Error(), "read gs://b/x: The thing is wrong (HTTP 403 forbidden)"; !strings.HasPrefix(got, want) {
		t.Errorf("got %q, want prefix %q", got, want)
	}
	if gcp.Code(err) != 403 {
		t.Errorf("Code after Wrap = %d, want 403", gcp.Code(err))
	}
	plain := errors.New("no route")
	if got, want := gcp.Wrap(plain, "list nodes").Error(), "list nodes: no route"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if gcp.Wrap(nil, "x") != nil {
		t.Error("Wrap(nil) is not nil")
	}
}

func TestRetry(t *testing.T) {
	n := 0
	err := gcp.Retry(t.Context(), func(context.Context) error {
		if n++; n < 3 {
			return apiError(503, "", "")
		}
		return nil
	})
	if err != nil || n != 3 {
		t.Errorf("got %v after %d calls, want success after 3", err, n)
	}
	n = 0
	err = gcp.Retry(t.Context(), func(context.Context) error { n++; return apiError(400, "invalid", "") })
	if gcp.Code(err) != 400 || n != 1 {
		t.Errorf("got %v after %d calls, want 400 after 1", err, n)
	}
}

func TestEndpointsFromEnv(t *testing.T) {
	t.Setenv("SLUICE_ENDPOINT_COMPUTE", "http://c")
	t.Setenv("SLUICE_ENDPOINT_LUSTRE", "http://l")
	t.Setenv("SLUICE_ENDPOINT_STORAGE", "http://s")
	if got, want := gcp.EndpointsFromEnv(), (gcp.Endpoints{Compute: "http://c", Lustre: "http://l", Storage: "http://s"}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := len(gcp.ClientOptions("")); got != 0 {
		t.Errorf("options for Google's own endpoint = %d, want 0", got)
	}
}
