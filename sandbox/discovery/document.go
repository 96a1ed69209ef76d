// Package discovery holds HTTP exchanges against Google's machine-readable API descriptions, the discovery documents.
package discovery

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	lustre "github.com/sluicehpc/sluice/gcp/lustre/description"
)

// API is one service's description, cut down to what is checked.
type API struct {
	ID          string               `json:"id"`          // "compute:v1"
	ServicePath string               `json:"servicePath"` // "compute/v1/", or "" for newer services
	Parameters  map[string]*schema   `json:"parameters"`  // of every method
	Schemas     map[string]*schema   `json:"schemas"`
	Methods     map[string]*method   `json:"methods"`
	Resources   map[string]*resource `json:"resources"`
}

type resource struct {
	Methods   map[string]*method   `json:"methods"`
	Resources map[string]*resource `json:"resources"`
}

// method is one call.
type method struct {
	ID          string             `json:"id"` // "compute.instances.insert"
	HTTPMethod  string             `json:"httpMethod"`
	Path        string             `json:"path"`     // {x} is one segment of the path, {+x} any number of them
	FlatPath    string             `json:"flatPath"` // without {+x}; or ""
	Parameters  map[string]*schema `json:"parameters"`
	Request     *schema            `json:"request"`
	Response    *schema            `json:"response"`
	Download    bool               `json:"supportsMediaDownload"`
	MediaUpload *struct {
		Protocols map[string]struct {
			Path string `json:"path"`
		} `json:"protocols"`
	} `json:"mediaUpload"`

	api  *API
	path *regexp.Regexp // of a Path with {+x}, or nil
}

// schema describes a value, or a parameter.
type schema struct {
	ID          string             `json:"id"`
	Ref         string             `json:"$ref"`
	Type        string             `json:"type"`
	Format      string             `json:"format"`
	Pattern     string             `json:"pattern"`
	Enum        []string           `json:"enum"`
	Default     string             `json:"default"`
	Properties  map[string]*schema `json:"properties"`
	Items       *schema            `json:"items"`
	Additional  *schema            `json:"additionalProperties"`
	ReadOnly    bool               `json:"readOnly"`
	Description note               `json:"description"`
	Annotations struct {
		Required []string `json:"required"` // ids of the methods whose requests must have it
	} `json:"annotations"`

	Location string `json:"location"` // of a parameter: path or query
	Required bool   `json:"required"` // of a parameter
	Repeated bool   `json:"repeated"` // of a parameter

	// Immutable is an addition of ours: the value never changes after its creation.
	Immutable bool `json:"x-immutable"`
}

// note keeps of a description whether it says that the field is required: newer services have no other mark.
type note bool

func (n *note) UnmarshalJSON(text []byte) error {
	s := string(text)
	*n = note(strings.HasPrefix(s, `"Required.`) || strings.HasPrefix(s, `"REQUIRED:`))
	return nil
}

// Parse reads a discovery document.
func Parse(r io.Reader) (*API, error) {
	api := new(API)
	if err := json.NewDecoder(r).Decode(api); err != nil {
		return nil, fmt.Errorf("discovery document: %w", err)
	}
	if api.ID == "" || len(api.Schemas) == 0 && len(api.Resources) == 0 {
		return nil, fmt.Errorf("not a discovery document: no id, schemas or resources")
	}
	api.each(func(m *method) {
		m.api = api
		if strings.Contains(m.Path, "{+") {
			m.path = pathRegexp(m.Path)
		}
	})
	return api, nil
}

// Files are the documents of Google's Go module google.golang.org/api that cover the sandbox, by the first word of their API's id.
var Files = map[string]string{
	"compute":              "compute/v1/compute-api.json",
	"storage":              "storage/v1/storage-api.json",
	"iam":                  "iam/v1/iam-api.json",
	"iamcredentials":       "iamcredentials/v1/iamcredentials-api.json",
	"sts":                  "sts/v1/sts-api.json",
	"cloudresourcemanager": "cloudresourcemanager/v1/cloudresourcemanager-api.json",
	"monitoring":           "monitoring/v3/monitoring-api.json",
}

// Load reads one API's description: "lustre" and "prose" are ours, the others come from the module's directory.
func Load(moduleDir, name string) (*API, error) {
	switch name {
	case "lustre":
		return Parse(strings.NewReader(lustre.Document))
	case "prose":
		return Parse(strings.NewReader(prose))
	}
	file, ok := Files[name]
	if !ok {
		return nil, fmt.Errorf("discovery: no document of %q is known", name)
	}
	f, err := os.Open(filepath.Join(moduleDir, file))
	if err != nil {
		return nil, fmt.Errorf("discovery: %w", err)
	}
	defer f.Close()
	api, err := Parse(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.Name(), err)
	}
	return api, nil
}

// LoadAll reads the descriptions of everything that the sandbox serves. moduleDir is the directory of the module google.golang.org/api.
func LoadAll(moduleDir string) ([]*API, error) {
	names := []string{"lustre", "prose"}
	for name := range Files {
		names = append(names, name)
	}
	var all []*API
	for _, name := range names {
		api, err := Load(moduleDir, name)
		if err != nil {
			return nil, err
		}
		all = append(all, api)
	}
	return all, nil
}

// prose describes what Google describes only in words: OAuth's endpoints and the bodies of errors.
//
//go:embed prose.json
var prose string

// each calls f for every method.
func (a *API) each(f func(*method)) {
	var walk func(map[string]*method, map[string]*resource)
	walk = func(methods map[string]*method, resources map[string]*resource) {
		for _, m := range methods {
			f(m)
		}
		for _, r := range resources {
			walk(r.Methods, r.Resources)
		}
	}
	walk(a.Methods, a.Resources)
}

// resolve follows references.
func (a *API) resolve(s *schema) *schema {
	for s != nil && s.Ref != "" {
		s = a.Schemas[s.Ref]
	}
	return s
}
