package compute

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"regexp"
	"strings"

	api "google.golang.org/api/compute/v1"
)

// linkPrefix begins every selfLink, whatever the endpoint, as in the real service.
const linkPrefix = "https://www.googleapis.com/compute/v1/"

const nameRule = "[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?"

var (
	nameRE     = regexp.MustCompile(`^` + nameRule + `$`)
	hostnameRE = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)+$`)
	labelKeyRE = regexp.MustCompile(`^[\p{Ll}\p{Lo}][\p{Ll}\p{Lo}\p{N}_-]{0,62}$`)
	labelRE    = regexp.MustCompile(`^[\p{Ll}\p{Lo}\p{N}_-]{0,63}$`)
	keyRE      = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,128}$`)
)

func checkName(field, name string) *apiError {
	if name == "" {
		return required(field)
	}
	if !nameRE.MatchString(name) {
		return invalid(field, name, fmt.Sprintf("Must be a match of regex '(?:%s)'", nameRule))
	}
	return nil
}

func checkLabels(field string, labels map[string]string) *apiError {
	if len(labels) > 64 {
		return invalid(field, fmt.Sprint(len(labels)), "No more than 64 labels are allowed.")
	}
	for k, v := range labels {
		if !labelKeyRE.MatchString(k) {
			return invalid(field, k, "Label keys must begin with a lower-case letter and contain at most 63 lower-case letters, digits, underscores and dashes.")
		}
		if !labelRE.MatchString(v) {
			return invalid(field, v, "Label values must contain at most 63 lower-case letters, digits, underscores and dashes.")
		}
	}
	return nil
}

// Limits of metadata, in bytes (the documentation of VM metadata).
const (
	maxMetadataValue = 256 << 10
	maxMetadataTotal = 512 << 10
)

func checkMetadata(field string, m *api.Metadata) *apiError {
	if m == nil {
		return nil
	}
	seen, total := map[string]bool{}, 0
	for i, item := range m.Items {
		at := fmt.Sprintf("%s.items[%d]", field, i)
		switch {
		case item.Key == "":
			return required(at + ".key")
		case !keyRE.MatchString(item.Key):
			return invalid(at+".key", item.Key, "Must be a match of regex '[a-zA-Z0-9-_]{1,128}'")
		case seen[item.Key]:
			return invalid(field, "", fmt.Sprintf("Metadata has duplicate key: %s", item.Key))
		}
		seen[item.Key] = true
		if item.Value == nil {
			item.Value = new(string)
		}
		if len(*item.Value) > maxMetadataValue {
			return invalid(at+".value", (*item.Value)[:20]+"…", "Value is too large: maximum size is 262144 character(s).")
		}
		if total += len(item.Key) + len(*item.Value); total > maxMetadataTotal {
			return invalid(field, "", "Metadata is too large: maximum size is 524288 character(s).")
		}
	}
	return nil
}

// fingerprint is 8 bytes in base64 that change with the values.
func fingerprint(values ...any) string {
	h := fnv.New64a()
	for _, v := range values {
		body, _ := json.Marshal(v) // cannot fail: only structs of the API come here
		h.Write(body)
		h.Write([]byte{0})
	}
	return base64.URLEncoding.EncodeToString(h.Sum(nil))
}

func metadataFingerprint(m *api.Metadata) string { return fingerprint("metadata", m.Items) }

// stableID is the id of a resource that was always there.
func stableID(link string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(link))
	return binary.BigEndian.Uint64(h.Sum(nil))>>2 | 1<<60
}

// link makes a selfLink of path elements.
func link(parts ...string) string { return linkPrefix + strings.Join(parts, "/") }

// resource is the name that messages use: "projects/P/zones/Z/instances/N".
func resource(selfLink string) string { return strings.TrimPrefix(selfLink, linkPrefix) }

// relative cuts a reference to a resource ("https://…/compute/v1/projects/P/zones/Z/…", "projects/P/zones/Z/…",
// "zones/Z/…") down to what follows the project. ok is false for another project or a malformed one.
func (s *Server) relative(reference string) (parts []string, ok bool) {
	ref := reference
	if strings.Contains(ref, "://") {
		_, rest, found := strings.Cut(ref, "/compute/v1/")
		if !found {
			return nil, false
		}
		ref = rest
	}
	ref = strings.TrimPrefix(ref, "/")
	if rest, found := strings.CutPrefix(ref, "projects/"); found {
		project, rest, found := strings.Cut(rest, "/")
		if !found || project != s.cfg.Project && project != fmt.Sprint(s.cfg.ProjectNumber) {
			return nil, false
		}
		ref = rest
	}
	parts = strings.Split(ref, "/")
	for _, p := range parts {
		if p == "" {
			return nil, false
		}
	}
	return parts, true
}

// last returns what follows the last slash.
func last(link string) string { return link[strings.LastIndexByte(link, '/')+1:] }
