package gcp

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/api/googleapi"
)

func TestIsDenied(t *testing.T) {
	for _, tt := range []struct {
		name string
		err  error
		want Denied
		no   bool
	}{
		{name: "Compute Engine", err: &googleapi.Error{Code: 403, Message: "Required 'compute.instances.create' permission for 'projects/p/zones/z/instances/n'",
			Errors: []googleapi.ErrorItem{{Reason: "forbidden"}}},
			want: Denied{"compute.instances.create", "projects/p/zones/z/instances/n", "Required 'compute.instances.create' permission for 'projects/p/zones/z/instances/n'"}},
		{name: "Cloud Storage", err: &googleapi.Error{Code: 403, Message: "a@p does not have storage.objects.list access to the Google Cloud Storage bucket. Permission 'storage.objects.list' denied on resource (or it may not exist)."},
			want: Denied{"storage.objects.list", "", "a@p does not have storage.objects.list access to the Google Cloud Storage bucket. Permission 'storage.objects.list' denied on resource (or it may not exist)."}},
		{name: "with ErrorInfo", err: &googleapi.Error{Code: 403, Message: "m", Body: `{"error":{"details":[{"reason":"x"},{"reason":"IAM_PERMISSION_DENIED","metadata":{"permission":"lustre.instances.get","resource":"projects/p/i"}}]}}`},
			want: Denied{"lustre.instances.get", "projects/p/i", "m"}},
		{name: "in words without ErrorInfo", err: &googleapi.Error{Code: 403, Message: "Permission 'iam.serviceAccounts.actAs' denied on resource '//iam/x' (or it may not exist)."},
			want: Denied{"iam.serviceAccounts.actAs", "//iam/x", "Permission 'iam.serviceAccounts.actAs' denied on resource '//iam/x' (or it may not exist)."}},
		{name: "it does not say what", err: &googleapi.Error{Code: 403, Message: "The caller has no permission", Body: "<html>"}, want: Denied{Message: "The caller has no permission"}},
		{name: "too many requests", err: &googleapi.Error{Code: 403, Errors: []googleapi.ErrorItem{{Reason: "rateLimitExceeded"}}}, no: true},
		{name: "not found", err: &googleapi.Error{Code: 404}, no: true},
		{name: "no answer", err: fmt.Errorf("dial"), no: true},
		{name: "nothing", no: true},
	} {
		got, ok := IsDenied(Wrap(tt.err, "do x"))
		if ok == tt.no || got != tt.want {
			t.Errorf("%s: got %v, %v, want %v\n%s", tt.name, got, ok, !tt.no, cmp.Diff(tt.want, got))
		}
	}
}
