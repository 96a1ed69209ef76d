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
)

// Options of the service.
type Options struct {
	// Dir holds the data of the instances: Dir/PROJECT/ZONE/ID.
	Dir string
	// Bucket is where imports come from and exports go.
	Bucket Bucket
	// Faults may be nil.
	Faults *faults.Set
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
	project := part[1]
	if !projectID.MatchString(project) {
		return nil, invalid("project %q is not a project's id", project)
	}
	if len(part) == 3 && r.Method == "GET" {
		return s.listLocations(project), nil
	}
	if len(part) == 3 {
		return nil, unknown
	}
	zone := part[3]
	if err := s.checkZone(zone, len(part) == 5 && r.Method == "GET"); err != nil {
		return nil, err
	}
	parent := "projects/" + project + "/locations/" + zone
	kind := ""
	if len(part) > 4 {
		kind = part[4]
	}
	name, verb := path, ""
	if len(part) == 6 {
		if i := strings.LastIndexByte(part[5], ':'); i >= 0 {
			verb = part[5][i:]
			name = strings.TrimSuffix(path, verb)
		}
	}
	switch fmt.Sprintf("%s %d %s%s", r.Method, len(part), kind, verb) {
	case "GET 4 ":
		return location(project, zone), nil
	case "GET 5 instances":
		return s.listInstances(project, zone, r.URL.Query())
	case "POST 5 instances":
		return s.createInstance(r, project, zone, parent)
	case "GET 6 instances":
		return s.getInstance(name)
	case "PATCH 6 instances":
		return s.updateInstance(r, name)
	case "DELETE 6 instances":
		return s.deleteInstance(r, name)
	case "POST 6 instances:importData":
		return s.importData(r, name)
	case "POST 6 instances:exportData":
		return s.exportData(r, name)
	case "GET 5 operations":
		return s.listOperations(parent, r.URL.Query())
	case "GET 6 operations":
		return s.getOperation(name)
	case "POST 6 operations:cancel":
		return s.cancelOperation(name)
	case "DELETE 6 operations":
		return s.deleteOperation(name)
	}
	return nil, unknown
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
	e := rpcOf(err)
	c := rpcCodes[e.code]
	writeJSON(w, c.http, map[string]any{"error": map[string]any{"code": c.http, "message": e.message, "status": c.name}})
}
