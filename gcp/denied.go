package gcp

import (
	"encoding/json"
	"errors"
	"regexp"

	"google.golang.org/api/googleapi"
)

// Denied is a service's refusal for want of a permission.
type Denied struct {
	Permission string // "lustre.instances.importData"; "" where the service does not say
	Resource   string // as the service names it, "" where it does not
	Message    string // the service's own words
}

// permissionWords are how services without ErrorInfo name what is missing:
// "Required 'compute.instances.create' permission for 'projects/p/…'",
// "Permission 'storage.objects.list' denied on resource (or it may not exist)".
var (
	permissionWords = regexp.MustCompile(`'([a-z]+(?:\.[A-Za-z]+){2,})'`)
	resourceWords   = regexp.MustCompile(`(?: permission for| on resource:?) '([^']+)'`)
)

// PermissionIn returns the permission whose lack a message tells of, or "".
func PermissionIn(message string) string {
	if m := permissionWords.FindStringSubmatch(message); m != nil {
		return m[1]
	}
	return ""
}

// IsDenied says what is missing when err is a refusal (403) that repeating cannot
// help.
func IsDenied(err error) (Denied, bool) {
	e, ok := errors.AsType[*googleapi.Error](err)
	if !ok || e.Code != 403 || Retryable(err) {
		return Denied{}, false
	}
	d := Denied{Message: e.Message}
	var body struct {
		Error struct {
			Details []struct {
				Reason   string            `json:"reason"`
				Metadata map[string]string `json:"metadata"`
			} `json:"details"`
		} `json:"error"`
	}
	if json.Unmarshal([]byte(e.Body), &body) == nil {
		for _, info := range body.Error.Details {
			if info.Reason == "IAM_PERMISSION_DENIED" {
				d.Permission, d.Resource = info.Metadata["permission"], info.Metadata["resource"]
			}
		}
	}
	if d.Permission == "" {
		d.Permission = PermissionIn(e.Message)
	}
	if m := resourceWords.FindStringSubmatch(e.Message); d.Resource == "" && m != nil {
		d.Resource = m[1]
	}
	return d, true
}
