// Package lustre is the sandbox's Managed Lustre: its API, its transfers and its file systems.
//
// An instance is a directory on the host. The API follows google.cloud.lustre.v1 over REST;
// imports and exports copy between that directory and the sandbox's object storage, and
// ServeMount lets a virtual machine mount it.
package lustre

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	api "github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/iam"
)

// Options of the service.
type Options struct {
	// Dir holds the data of the instances: Dir/PROJECT/ZONE/ID.
	Dir string
	// Bucket is where imports come from and exports go.
	Bucket Bucket
	// Faults may be nil.
	Faults *faults.Set
	// IAM decides on every request and on every access to the bucket; with nil, everybody may do everything.
	IAM *iam.Server
	// Zones have the service; nil means those of us-central1.
	Zones []string
	// Addresses are given to instances, from the second one on; the zero value is 10.129.0.0/24.
	Addresses netip.Prefix
	// Listen makes an instance's address answer on TCP 988, and the address itself where that is
	// needed; closing the listener takes both away. nil: the address does not answer.
	Listen func(netip.AddrPort) (net.Listener, error)
	// ServeCommand starts the program around lustrefs.Main; lustrefs.Args are added to it.
	ServeCommand []string
	// Now tells the time; nil means time.Now.
	Now func() time.Time
	// Log gets what nobody waits for; nil means nowhere.
	Log *slog.Logger
}

// Server is the service. It is an http.Handler for /v1/projects/….
type Server struct {
	options Options
	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	work    sync.WaitGroup // operations and mounts that run

	mu         sync.Mutex // guards everything that follows, and the fields of instances and operations
	instances  map[string]*instance
	operations map[string]*operation
	requests   map[string]request // by request id
	lastAddr   netip.Addr
	mounts     map[*mount]bool
	lastFlush  int64
}

// New returns a service without instances. What an earlier one left in Dir is not taken up.
func New(o Options) (*Server, error) {
	if o.Dir == "" || !filepath.IsAbs(o.Dir) {
		return nil, fmt.Errorf("lustre: directory %q is not an absolute path", o.Dir)
	}
	if err := os.MkdirAll(o.Dir, 0o711); err != nil {
		return nil, fmt.Errorf("lustre: %w", err)
	}
	if o.Zones == nil {
		o.Zones = []string{"us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f"}
	}
	if !o.Addresses.IsValid() {
		o.Addresses = netip.MustParsePrefix("10.129.0.0/24")
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		options:    o,
		instances:  map[string]*instance{},
		operations: map[string]*operation{},
		requests:   map[string]request{},
		lastAddr:   o.Addresses.Masked().Addr().Next(), // the first is the network's router
		mounts:     map[*mount]bool{},
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s, nil
}

// Close ends all transfers and mounts and the listeners of the instances. The data stays.
func (s *Server) Close() {
	s.cancel()
	s.mu.Lock()
	for m := range s.mounts {
		m.process.Kill()
	}
	for _, inst := range s.instances {
		inst.stopListening()
	}
	s.mu.Unlock()
	s.work.Wait()
}

func (s *Server) now() time.Time { return s.options.Now().UTC() }

// maxBody bounds a request's body, in bytes.
const maxBody = 1 << 20

// ServeHTTP answers the API.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	r.Body = http.MaxBytesReader(w, r.Body, maxBody)
	answer, err := s.route(r)
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, answer)
}

// call is a request and what its path names.
type call struct {
	*http.Request
	project, zone string
	parent        string // projects/P/locations/Z
	name          string // parent/KIND/ID
}

// method is one of the API; permission is what it needs on the named resource, or on its parent.
type method struct {
	permission string
	handle     func(*Server, *call) (any, error)
}

// methods by HTTP method, number of the path's parts, kind of resource and verb.
var methods = map[string]method{
	"GET 3": {"lustre.locations.list", func(s *Server, c *call) (any, error) { return s.listLocations(c.project), nil }},
	"GET 4": {"lustre.locations.get", func(s *Server, c *call) (any, error) { return location(c.project, c.zone), nil }},

	"GET 5 instances":             {"lustre.instances.list", func(s *Server, c *call) (any, error) { return s.listInstances(c.project, c.zone, c.URL.Query()) }},
	"POST 5 instances":            {"lustre.instances.create", func(s *Server, c *call) (any, error) { return s.createInstance(c.Request, c.project, c.zone, c.parent) }},
	"GET 6 instances":             {"lustre.instances.get", func(s *Server, c *call) (any, error) { return s.getInstance(c.name) }},
	"PATCH 6 instances":           {"lustre.instances.update", func(s *Server, c *call) (any, error) { return s.updateInstance(c.Request, c.name) }},
	"DELETE 6 instances":          {"lustre.instances.delete", func(s *Server, c *call) (any, error) { return s.deleteInstance(c.Request, c.name) }},
	"POST 6 instances:importData": {"lustre.instances.importData", func(s *Server, c *call) (any, error) { return s.importData(c.Request, c.name) }},
	"POST 6 instances:exportData": {"lustre.instances.exportData", func(s *Server, c *call) (any, error) { return s.exportData(c.Request, c.name) }},

	"GET 5 operations":         {"lustre.operations.list", func(s *Server, c *call) (any, error) { return s.listOperations(c.parent, c.URL.Query()) }},
	"GET 6 operations":         {"lustre.operations.get", func(s *Server, c *call) (any, error) { return s.getOperation(c.name) }},
	"POST 6 operations:cancel": {"lustre.operations.cancel", func(s *Server, c *call) (any, error) { return s.cancelOperation(c.name) }},
	"DELETE 6 operations":      {"lustre.operations.delete", func(s *Server, c *call) (any, error) { return s.deleteOperation(c.name) }},
}

// route finds the method of a request. Paths are /v1/projects/P/locations[/Z[/KIND[/ID[:VERB]]]].
func (s *Server) route(r *http.Request) (any, error) {
	path, ok := strings.CutPrefix(r.URL.Path, "/v1/")
	part := strings.Split(path, "/")
	unknown := &rpcError{codeNotFound, fmt.Sprintf("method %s %s does not exist", r.Method, r.URL.Path)}
	if !ok || len(part) < 3 || len(part) > 6 || part[0] != "projects" || part[2] != "locations" {
		return nil, unknown
	}
	for _, p := range part {
		if p == "" || p == "." || p == ".." {
			return nil, unknown
		}
	}
	c := &call{Request: r, project: part[1], name: path}
	key := fmt.Sprintf("%s %d", r.Method, len(part))
	resource := "projects/" + c.project
	if len(part) > 3 {
		c.zone = part[3]
		c.parent = resource + "/locations/" + c.zone
		resource = c.parent
	}
	if len(part) > 4 {
		key += " " + part[4]
	}
	if len(part) == 6 {
		if i := strings.LastIndexByte(part[5], ':'); i >= 0 {
			key += part[5][i:]
			c.name = strings.TrimSuffix(path, part[5][i:])
		}
		resource = c.name
	}
	m, ok := methods[key]
	if !ok {
		return nil, unknown
	}
	if !projectID.MatchString(c.project) {
		return nil, invalid("project %q is not a project's id", c.project)
	}
	if err := s.authorize(r, m.permission, resource); err != nil {
		return nil, err
	}
	if c.zone != "" {
		if err := s.checkZone(c.zone, len(part) == 5 && r.Method == "GET"); err != nil {
			return nil, err
		}
	}
	return m.handle(s, c)
}

func (s *Server) checkZone(zone string, allowAll bool) error {
	if zone == "-" && allowAll {
		return nil
	}
	for _, z := range s.options.Zones {
		if z == zone {
			return nil
		}
	}
	return &rpcError{codeNotFound, fmt.Sprintf("location %q has no Managed Lustre", zone)}
}

func location(project, zone string) *api.Location {
	return &api.Location{Name: "projects/" + project + "/locations/" + zone, LocationID: zone}
}

func (s *Server) listLocations(project string) any {
	var all []*api.Location
	for _, z := range s.options.Zones {
		all = append(all, location(project, z))
	}
	return struct {
		Locations []*api.Location `json:"locations"`
	}{all}
}

// decode reads a request's body into v. Like the real service it refuses fields that it does not know.
func decode(r *http.Request, v any) ([]byte, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, invalid("the body cannot be read: %v", err)
	}
	d := json.NewDecoder(strings.NewReader(string(body)))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return nil, invalid("invalid JSON payload received: %v", err)
	}
	if d.More() {
		return nil, invalid("invalid JSON payload received: more than one value")
	}
	return body, nil
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json; charset=UTF-8")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(v)
}

// The codes of google.rpc.Code that the service uses.
type rpcCode int

const (
	codeCancelled          rpcCode = 1
	codeUnknown            rpcCode = 2
	codeInvalidArgument    rpcCode = 3
	codeNotFound           rpcCode = 5
	codeAlreadyExists      rpcCode = 6
	codePermissionDenied   rpcCode = 7
	codeResourceExhausted  rpcCode = 8
	codeFailedPrecondition rpcCode = 9
	codeAborted            rpcCode = 10
	codeInternal           rpcCode = 13
)

var rpcCodes = map[rpcCode]struct {
	name string
	http int
}{
	codeCancelled:          {"CANCELLED", 499},
	codeUnknown:            {"UNKNOWN", 500},
	codeInvalidArgument:    {"INVALID_ARGUMENT", 400},
	codeNotFound:           {"NOT_FOUND", 404},
	codeAlreadyExists:      {"ALREADY_EXISTS", 409},
	codePermissionDenied:   {"PERMISSION_DENIED", 403},
	codeResourceExhausted:  {"RESOURCE_EXHAUSTED", 429},
	codeFailedPrecondition: {"FAILED_PRECONDITION", 400},
	codeAborted:            {"ABORTED", 409},
	codeInternal:           {"INTERNAL", 500},
}

type rpcError struct {
	code    rpcCode
	message string
}

func (e *rpcError) Error() string { return e.message }

func invalid(format string, args ...any) error {
	return &rpcError{codeInvalidArgument, fmt.Sprintf(format, args...)}
}

// rpcOf is err as the service names it.
func rpcOf(err error) *rpcError {
	if e, ok := errors.AsType[*rpcError](err); ok {
		return e
	}
	return &rpcError{codeOf(err), err.Error()}
}

func writeError(w http.ResponseWriter, err error) {
	if e, ok := errors.AsType[*iam.Error](err); ok {
		e.Write(w)
		return
	}
	e := rpcOf(err)
	c := rpcCodes[e.code]
	writeJSON(w, c.http, map[string]any{"error": map[string]any{"code": c.http, "message": e.message, "status": c.name}})
}
