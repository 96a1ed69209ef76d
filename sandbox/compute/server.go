// Package compute is the sandbox's Compute Engine: its v1 REST interface, with machines behind an interface.
package compute

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	api "google.golang.org/api/compute/v1"

	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/iam"
)

// VMs starts and ends machines. Its methods are called for different machines at the same time,
// never twice at a time for the same name.
type VMs interface {
	// Start returns once the machine runs. When ctx ends first it must not leave it running.
	Start(ctx context.Context, m Machine) error
	// Stop presses the machine's power button, and cuts its power when it still runs after the grace, at once when that is 0, or
	// when ctx ends. It succeeds for a machine that does not run. The disk stays.
	Stop(ctx context.Context, name string, grace time.Duration) error
	// Remove frees the disk of a machine that does not run.
	Remove(ctx context.Context, name string) error
}

// Machine is what VMs needs to start an instance.
type Machine struct {
	ID          uint64 // the instance's: another one for each instance of the name
	Name        string // the instance's, unique in the sandbox
	Hostname    string // fully qualified: NAME.ZONE.c.PROJECT.internal, or the instance's own
	Zone        string
	Address     netip.Addr
	Image       string // name of the image of the boot disk
	MachineType string // name, for example "n2-standard-2"
	CPUs        int
	MemoryMB    int
	NewDisk     bool // the boot disk is made from the image; else it is as the last start left it
	// Ended is to be called when the machine ended by itself (poweroff in the guest, or its death).
	// It returns at once and may be called more than once; after Stop it changes nothing.
	Ended func()
}

// Config says what the sandbox's project looks like.
type Config struct {
	Project       string       // default "sluice-sandbox"
	ProjectNumber uint64       // default 100000000001
	Zone          string       // where things are unless a call says otherwise; default "us-central1-a"
	Subnet        netip.Prefix // default 10.128.0.0/20; its first address is the gateway's
	VMs           VMs
	Faults        *faults.Set // or nil
	Clock         clock.Clock // default clock.System
	// IAM decides on every request; with nil, everybody may do everything.
	IAM *iam.Server
	// Caller returns the account that sends a request, for operations' user field; or nil.
	Caller func(*http.Request) string
	// Console returns what a machine has written to its console from byte from on; or nil.
	Console func(name string, from int64) ([]byte, error)
}

// Server is the project. Its state is in memory.
type Server struct {
	cfg     Config
	region  string
	zones   []string
	mux     *http.ServeMux
	methods []string        // their patterns, below projectPrefix
	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	running sync.WaitGroup // operations at work

	mu         sync.Mutex // guards everything below
	closed     bool
	instances  map[string]*instance // by name: see instance
	addresses  *pool
	operations map[string]*operation // by scope and name
	oldest     []*operation          // in the order of their start
	requests   map[string]*operation // by request id
	images     map[string]*api.Image
	templates  map[string]*api.InstanceTemplate // by scope and name
	project    *api.Project                     // replaced, never changed
	runs       chan struct{}                    // closed and replaced when an instance has become RUNNING
	changed    chan struct{}                    // closed and replaced when project changes
}

// New makes a project without instances. Close it after use.
func New(cfg Config) (*Server, error) {
	if cfg.Project == "" {
		cfg.Project = "sluice-sandbox"
	}
	if cfg.ProjectNumber == 0 {
		cfg.ProjectNumber = 100000000001
	}
	if cfg.Zone == "" {
		cfg.Zone = "us-central1-a"
	}
	if !cfg.Subnet.IsValid() {
		cfg.Subnet = netip.MustParsePrefix("10.128.0.0/20")
	}
	if cfg.Clock == nil {
		cfg.Clock = clock.System
	}
	if cfg.VMs == nil {
		return nil, errors.New("compute: no VMs given")
	}
	dash := strings.LastIndexByte(cfg.Zone, '-')
	if dash < 0 || !nameRE.MatchString(cfg.Zone) {
		return nil, fmt.Errorf("compute: zone %q has no region", cfg.Zone)
	}
	addresses, err := newPool(cfg.Subnet)
	if err != nil {
		return nil, fmt.Errorf("compute: %w", err)
	}
	s := &Server{
		cfg:        cfg,
		region:     cfg.Zone[:dash],
		instances:  map[string]*instance{},
		addresses:  addresses,
		operations: map[string]*operation{},
		requests:   map[string]*operation{},
		images:     map[string]*api.Image{},
		templates:  map[string]*api.InstanceTemplate{},
		runs:       make(chan struct{}),
		changed:    make(chan struct{}),
	}
	for _, letter := range []string{"a", "b", "c", "f"} {
		s.zones = append(s.zones, s.region+"-"+letter)
	}
	if !slices.Contains(s.zones, cfg.Zone) {
		s.zones = append(s.zones, cfg.Zone)
	}
	s.project = s.newProject()
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.mux = s.routes()
	if cfg.Faults != nil {
		s.running.Go(s.watchFaults)
	}
	return s, nil
}

// Close ends all operations at work and waits for them. It does not stop the machines.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.running.Wait()
}

// ServeHTTP answers below /compute/v1/.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// The mux would redirect to a clean path, and has words of its own for "*" and for CONNECT.
	if clean := path.Clean(r.URL.Path); r.Method == http.MethodConnect || !strings.HasPrefix(clean, "/") || strings.TrimSuffix(r.URL.Path, "/") != strings.TrimSuffix(clean, "/") {
		noMethod(w, r)
		return
	}
	s.mux.ServeHTTP(w, r)
}

func noMethod(w http.ResponseWriter, r *http.Request) {
	(&apiError{404, "notFound", fmt.Sprintf("The sandbox has no method %s %s", r.Method, r.URL.Path)}).write(w)
}

// request is one call, its project, zone and region checked.
type request struct {
	*http.Request
	s      *Server
	scope  string // "zones/Z", "regions/R" or "global"
	zone   string // or ""
	body   []byte
	replay string // the request id, or ""
	hash   [sha256.Size]byte
}

type handler func(*request) (any, *apiError)

// maxBody is the longest body that is read, in bytes.
const maxBody = 8 << 20

func (s *Server) routes() *http.ServeMux {
	mux := http.NewServeMux()
	add := func(pattern string, h handler) {
		method, path, _ := strings.Cut(pattern, " ")
		s.methods = append(s.methods, pattern)
		mux.HandleFunc(method+" "+projectPrefix+path, func(w http.ResponseWriter, r *http.Request) { s.serve(w, r, h) })
	}
	const zone, region, global = "/zones/{zone}", "/regions/{region}", "/global"

	add("GET ", s.getProject)
	add("POST /setCommonInstanceMetadata", s.setProjectMetadata)

	add("GET /zones", s.listZones)
	add("GET "+zone, s.getZone)
	add("GET /regions", s.listRegions)
	add("GET "+region, s.getRegion)

	add("POST "+zone+"/instances", s.insertInstance)
	add("POST "+zone+"/instances/bulkInsert", s.bulkInsert)
	add("POST "+region+"/instances/bulkInsert", s.bulkInsert)
	add("GET "+zone+"/instances", s.listInstances)
	add("GET /aggregated/instances", s.aggregatedInstances)
	add("GET "+zone+"/instances/{name}", s.getInstance)
	add("DELETE "+zone+"/instances/{name}", s.deleteInstance)
	add("POST "+zone+"/instances/{name}/setMetadata", s.setMetadata)
	add("POST "+zone+"/instances/{name}/setLabels", s.setLabels)
	add("POST "+zone+"/instances/{name}/start", s.startInstance)
	add("POST "+zone+"/instances/{name}/stop", s.stopInstance)
	add("GET "+zone+"/instances/{name}/serialPort", s.serialPort)

	for _, scope := range []string{zone, region, global} {
		add("GET "+scope+"/operations", s.listOperations)
		add("GET "+scope+"/operations/{name}", s.getOperation)
		add("POST "+scope+"/operations/{name}/wait", s.waitOperation)
		add("DELETE "+scope+"/operations/{name}", s.deleteOperation)
	}
	add("GET /aggregated/operations", s.aggregatedOperations)

	add("GET "+zone+"/machineTypes", s.listMachineTypes)
	add("GET "+zone+"/machineTypes/{name}", s.getMachineType)
	add("GET /aggregated/machineTypes", s.aggregatedMachineTypes)

	add("GET "+global+"/images", s.listImages)
	add("POST "+global+"/images", s.insertImage)
	add("GET "+global+"/images/{name}", s.getImage)
	add("DELETE "+global+"/images/{name}", s.deleteImage)
	add("GET "+global+"/images/family/{name}", s.getImageFromFamily)

	for _, scope := range []string{region, global} {
		add("GET "+scope+"/instanceTemplates", s.listTemplates)
		add("POST "+scope+"/instanceTemplates", s.insertTemplate)
		add("GET "+scope+"/instanceTemplates/{name}", s.getTemplate)
		add("DELETE "+scope+"/instanceTemplates/{name}", s.deleteTemplate)
	}

	add("GET "+global+"/networks", s.listNetworks)
	add("GET "+global+"/networks/{name}", s.getNetwork)
	add("GET "+region+"/subnetworks", s.listSubnetworks)
	add("GET "+region+"/subnetworks/{name}", s.getSubnetwork)
	add("GET /aggregated/subnetworks", s.aggregatedSubnetworks)

	mux.HandleFunc("/", noMethod)
	return mux
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request, h handler) {
	if err := s.authorizeMethod(r); err != nil {
		err.write(w)
		return
	}
	rq := &request{Request: r, s: s}
	if err := rq.prepare(w); err != nil {
		err.write(w)
		return
	}
	v, err := h(rq)
	if err != nil {
		err.write(w)
		return
	}
	if v == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	writeJSON(w, http.StatusOK, v)
}

// prepare checks what all calls have in common and reads the body.
func (r *request) prepare(w http.ResponseWriter) *apiError {
	s := r.s
	if p := r.PathValue("project"); p != s.cfg.Project && p != fmt.Sprint(s.cfg.ProjectNumber) {
		return notFound("projects/" + p)
	}
	r.scope = "global"
	if z := r.PathValue("zone"); z != "" {
		if !slices.Contains(s.zones, z) {
			return invalid("zone", z, "Unknown zone.")
		}
		r.zone, r.scope = z, "zones/"+z
	}
	if g := r.PathValue("region"); g != "" {
		if g != s.region {
			return invalid("region", g, "Unknown region.")
		}
		r.scope = "regions/" + g
	}
	if r.Method == http.MethodGet {
		return nil
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		if _, tooLong := errors.AsType[*http.MaxBytesError](err); tooLong {
			return &apiError{413, "uploadTooLarge", fmt.Sprintf("The request is longer than %d bytes.", maxBody)}
		}
		return &apiError{400, "badRequest", "The request's body could not be read."}
	}
	r.body = body
	if id := r.URL.Query().Get("requestId"); id != "" {
		u, err := uuid.Parse(id)
		if err != nil || u == uuid.Nil {
			return invalid("requestId", id, "Must be a valid, non-zero UUID.")
		}
		r.replay = u.String()
		// The client's JSON differs from call to call in blanks, so what it means is compared.
		var meaning any
		if json.Unmarshal(body, &meaning) == nil {
			body, _ = json.Marshal(meaning)
		}
		query := r.URL.Query()
		query.Del("requestId")
		r.hash = sha256.Sum256(fmt.Appendf(nil, "%s %s?%s\n%s", r.Method, r.URL.Path, query.Encode(), body))
	}
	return nil
}

// earlier returns the operation that an earlier call with this request id began, if any, and
// refuses an id that stands for another call. s.mu is held.
func (r *request) earlier() (*api.Operation, *apiError) {
	if r.replay == "" {
		return nil, nil
	}
	op := r.s.requests[r.replay]
	if op == nil {
		return nil, nil
	}
	if op.hash != r.hash {
		return nil, invalid("requestId", r.replay, "The request ID was used before for a different request.")
	}
	return op.api, nil
}

// change runs a mutation: check validates and applies under the lock, and returns the operation
// that it began. A known request id replays its operation instead.
func (r *request) change(check func() (*operation, *apiError)) (any, *apiError) {
	s := r.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, &apiError{503, "backendError", "The sandbox is going down."}
	}
	if op, err := r.earlier(); op != nil || err != nil {
		return op, err
	}
	op, err := check()
	if err != nil {
		return nil, err
	}
	if r.replay != "" {
		op.requestID, op.hash = r.replay, r.hash
		s.requests[r.replay] = op
	}
	return op.api, nil
}

func (r *request) user() string {
	if r.s.cfg.Caller != nil {
		if email := r.s.cfg.Caller(r.Request); email != "" {
			return email
		}
	}
	return r.s.DefaultServiceAccount()
}

// DefaultServiceAccount is the account that an instance with the service account "default" has.
func (s *Server) DefaultServiceAccount() string {
	return fmt.Sprintf("%d-compute@developer.gserviceaccount.com", s.cfg.ProjectNumber)
}

func (s *Server) link(parts ...string) string {
	return link(append([]string{"projects", s.cfg.Project}, parts...)...)
}

// resource is a path below the project as messages name it.
func (s *Server) resource(parts ...string) string { return resource(s.link(parts...)) }

func (s *Server) now() time.Time { return s.cfg.Clock.Now() }

func timestamp(t time.Time) string { return t.Format("2006-01-02T15:04:05.000-07:00") }

func newID() uint64 { return rand.Uint64()>>2 | 1<<60 }

func (s *Server) newProject() *api.Project {
	meta := &api.Metadata{Kind: "compute#metadata"}
	meta.Fingerprint = metadataFingerprint(meta)
	return &api.Project{
		Kind:                   "compute#project",
		Id:                     s.cfg.ProjectNumber,
		Name:                   s.cfg.Project,
		SelfLink:               s.link(),
		CreationTimestamp:      timestamp(s.now()),
		DefaultServiceAccount:  s.DefaultServiceAccount(),
		CommonInstanceMetadata: meta,
	}
}

func (s *Server) getProject(r *request) (any, *apiError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.project, nil
}

func (s *Server) setProjectMetadata(r *request) (any, *apiError) {
	var meta api.Metadata
	if err := decode(r.body, &meta); err != nil {
		return nil, err
	}
	if err := checkMetadata("resource", &meta); err != nil {
		return nil, err
	}
	if err := s.authorize(r.Request, actAs, s.resource()); err != nil {
		return nil, err
	}
	return r.change(func() (*operation, *apiError) {
		if meta.Fingerprint != s.project.CommonInstanceMetadata.Fingerprint {
			return nil, conditionNotMet("Supplied fingerprint does not match current metadata fingerprint.")
		}
		meta.Kind = "compute#metadata"
		meta.Fingerprint = metadataFingerprint(&meta)
		project := *s.project
		project.CommonInstanceMetadata = &meta
		s.project = &project
		close(s.changed)
		s.changed = make(chan struct{})
		for _, in := range s.instances {
			in.notify()
		}
		return s.begin(r.user(), "global", "compute.projects.setCommonInstanceMetadata", project.SelfLink, project.Id, nil), nil
	})
}

// ProjectView is the project as the metadata server shows it.
type ProjectView struct {
	Project *api.Project    // not to be changed
	Zone    string          // the default one
	Changed <-chan struct{} // closed when this view is out of date
}

// Project returns the project.
func (s *Server) Project() ProjectView {
	s.mu.Lock()
	defer s.mu.Unlock()
	return ProjectView{s.project, s.cfg.Zone, s.changed}
}

// View is an instance as the metadata server shows it.
type View struct {
	Instance         *api.Instance // not to be changed
	Project          *api.Project  // not to be changed
	Hostname         string
	Image            string                   // projects/P/global/images/NAME
	Preempted        bool                     // since it was told so
	MaintenanceEvent string                   // "NONE", "MIGRATE_ON_HOST_MAINTENANCE" or "TERMINATE_ON_HOST_MAINTENANCE"
	Upcoming         *api.UpcomingMaintenance // or nil; not to be changed
	Changed          <-chan struct{}          // closed when this view is out of date, or the instance gone
}

// ByAddress returns the instance that has an address now.
func (s *Server) ByAddress(a netip.Addr) (View, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	name, ok := s.addresses.used[a.Unmap()]
	if !ok {
		return View{}, false
	}
	in := s.instances[name]
	v := View{
		Instance:         in.api,
		Project:          s.project,
		Hostname:         s.hostname(in.api),
		Image:            s.resource("global", "images", in.image),
		Preempted:        in.preempted,
		MaintenanceEvent: in.maintenance,
		Upcoming:         in.upcoming,
		Changed:          in.changed,
	}
	return v, true
}

// Addresses returns the address of each instance that exists, by name.
func (s *Server) Addresses() map[string]netip.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make(map[string]netip.Addr, len(s.instances))
	for a, name := range s.addresses.used {
		all[name] = a
	}
	return all
}

// Instances returns all instances, sorted by name. They are not to be changed.
func (s *Server) Instances() []*api.Instance {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*api.Instance
	for _, name := range slices.Sorted(maps.Keys(s.instances)) {
		all = append(all, s.instances[name].api)
	}
	return all
}
