package compute_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/compute"
	sandbox "github.com/sluicehpc/sluice/sandbox/compute"
	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
	"github.com/sluicehpc/sluice/sandbox/metadata"
)

// machines is a sandbox.VMs that only counts.
type machines struct {
	mu      sync.Mutex
	running map[string]bool
	fail    map[string]error
}

func (m *machines) Start(_ context.Context, vm sandbox.Machine) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fail[vm.Name]; err != nil {
		return err
	}
	m.running[vm.Name] = true
	return nil
}

func (m *machines) Stop(_ context.Context, name string, _ time.Duration) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.running, name)
	return nil
}

func (m *machines) Remove(context.Context, string) error { return nil }

// tokens is what the metadata server handed out.
type tokens struct {
	mu    sync.Mutex
	known map[string]bool
}

func (t *tokens) Register(token, _ string, _ []string, _ time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.known[token] = true
}

// world is a project over TCP, with a metadata server, so that the client finds its credentials as
// it does on a VM.
type world struct {
	vms    *machines
	client *compute.Client

	mu       sync.Mutex
	refuse   func(*http.Request) int // status to answer instead, or 0; or nil
	lose     func(*http.Request) bool
	requests []string
	strange  int // requests without a token of the metadata server
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{vms: &machines{running: map[string]bool{}, fail: map[string]error{}}}
	known := &tokens{known: map[string]bool{}}
	project, err := sandbox.New(sandbox.Config{VMs: w.vms})
	if err != nil {
		t.Fatal(err)
	}
	if err := project.AddImage("debian-13", "debian", ""); err != nil {
		t.Fatal(err)
	}
	apis := httptest.NewServer(discoverytest.Client(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		known.mu.Lock()
		ok := known.known[strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")]
		known.mu.Unlock()
		w.mu.Lock()
		if !ok {
			w.strange++
		}
		w.requests = append(w.requests, r.Method+" "+r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:])
		status, lost := 0, false
		if w.refuse != nil {
			status = w.refuse(r)
		}
		if w.lose != nil {
			lost = w.lose(r)
		}
		w.mu.Unlock()
		switch {
		case status != 0:
			http.Error(rw, fmt.Sprintf(`{"error":{"code":%d,"message":"try again"}}`, status), status)
		case lost:
			project.ServeHTTP(httptest.NewRecorder(), r) // it happens, but nobody hears of it
			panic(http.ErrAbortHandler)
		default:
			project.ServeHTTP(rw, r)
		}
	}), "compute"))
	guest := httptest.NewServer(metadata.New(metadata.Config{
		Instances: project, Tokens: known, Workstation: []netip.Addr{netip.MustParseAddr("127.0.0.1")},
	}))
	t.Setenv("GCE_METADATA_HOST", strings.TrimPrefix(guest.URL, "http://"))
	t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
	t.Setenv("HOME", t.TempDir()) // nobody's own credentials
	w.client, err = compute.New(t.Context(), compute.Config{Project: "sluice-sandbox", Zone: "us-central1-a", Endpoint: apis.URL})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.client.Close()
		apis.CloseClientConnections()
		project.Close()
		apis.Close()
		guest.Close()
		if w.strange > 0 {
			t.Errorf("%d requests without a token of the metadata server", w.strange)
		}
	})
	return w
}

func spec() compute.Spec {
	return compute.Spec{
		MachineType:    "n2-standard-2",
		Image:          "projects/sluice-sandbox/global/images/family/debian",
		Network:        "global/networks/default",
		ServiceAccount: "node@sluice-sandbox.iam.gserviceaccount.com",
		Tags:           []string{"compute"},
		Labels:         map[string]string{"sluice-deployment": "d", "role": "node"},
		Metadata:       map[string]string{"startup-script": "#!/bin/sh\n", "a": "b", "c": "d"},
	}
}

func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func nodes(n int) []string {
	var names []string
	for i := range n {
		names = append(names, fmt.Sprintf("node-%03d", i))
	}
	return names
}

func TestLifeOf200(t *testing.T) {
	w, ctx := newWorld(t), deadline(t)
	request := compute.BulkInsertRequest{RequestID: uuid.NewString(), Names: nodes(200), Spec: spec()}
	op, err := w.client.BulkInsert(ctx, request)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := w.client.BulkInsert(ctx, request); err != nil || again != op {
		t.Errorf("the same request again: %s, %v, want %s", again, err, op)
	}
	if err := w.client.WaitOperation(ctx, op); err != nil {
		t.Fatal(err)
	}
	all, err := w.client.List(ctx, "labels.sluice-deployment=d AND status=RUNNING")
	if err != nil || len(all) != 200 {
		t.Fatalf("listed %d, %v, want 200", len(all), err)
	}
	got := all[7]
	if got.ID == 0 || got.Created.IsZero() {
		t.Errorf("instance: %+v", got)
	}
	got.ID, got.Created = 0, time.Time{}
	want := compute.Instance{
		Name: "node-007", Status: "RUNNING", Address: netip.MustParseAddr("10.128.0.9"),
		MachineType: "n2-standard-2", Zone: "us-central1-a", Labels: map[string]string{"sluice-deployment": "d", "role": "node"},
		Metadata: map[string]string{"a": "b", "c": "d", "startup-script": "#!/bin/sh\n"},
	}
	if d := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
		t.Errorf("instance (-want +got):\n%s", d)
	}
	var gone sync.WaitGroup
	for _, in := range all {
		gone.Go(func() {
			op, err := w.client.Delete(ctx, uuid.NewString(), in.Name)
			if err == nil {
				err = w.client.WaitOperation(ctx, op)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	gone.Wait()
	if len(w.vms.running) != 0 {
		t.Errorf("%d machines are left", len(w.vms.running))
	}
}

func TestInsertGetDelete(t *testing.T) {
	w, ctx := newWorld(t), deadline(t)
	request := compute.InsertRequest{RequestID: uuid.NewString(), Name: "controller", Address: netip.MustParseAddr("10.128.0.77"), Spec: spec()}
	op, err := w.client.Insert(ctx, request)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.client.WaitOperation(ctx, op); err != nil {
		t.Fatal(err)
	}
	if in, err := w.client.Get(ctx, "controller"); err != nil || in.Address != request.Address || in.Status != "RUNNING" {
		t.Errorf("got %+v, %v", in, err)
	}
	request.RequestID = uuid.NewString()
	if _, err := w.client.Insert(ctx, request); !gcp.IsAlreadyExists(err) {
		t.Errorf("a taken name: %v", err)
	}
	id := uuid.NewString()
	op, err = w.client.Delete(ctx, id, "controller")
	if err != nil {
		t.Fatal(err)
	}
	if err := w.client.WaitOperation(ctx, op); err != nil {
		t.Fatal(err)
	}
	if again, err := w.client.Delete(ctx, id, "controller"); err != nil || again != op {
		t.Errorf("the same delete again: %q, %v, want %q", again, err, op)
	}
	if op, err := w.client.Delete(ctx, uuid.NewString(), "controller"); err != nil || op != "" {
		t.Errorf("delete of what is gone: %q, %v", op, err)
	}
	if _, err := w.client.Get(ctx, "controller"); !gcp.IsNotFound(err) || !strings.HasPrefix(err.Error(), "look at instance controller: The resource ") {
		t.Errorf("get of what is gone: %v", err)
	}
	if err := w.client.WaitOperation(ctx, "operation-of-no-one"); !gcp.IsNotFound(err) {
		t.Errorf("an unknown operation: %v", err)
	}
	if _, err := w.client.List(ctx, "nmae=x"); gcp.Code(err) != 400 {
		t.Errorf("a bad filter: %v", err)
	}
	if _, err := w.client.BulkInsert(ctx, compute.BulkInsertRequest{Names: []string{"x"}}); err == nil {
		t.Error("no request id, no error")
	}
}

func TestFailedOperations(t *testing.T) {
	w, ctx := newWorld(t), deadline(t)
	w.vms.fail["node-001"] = errors.New("no room")
	op, err := w.client.BulkInsert(ctx, compute.BulkInsertRequest{RequestID: uuid.NewString(), Names: nodes(3), Spec: spec()})
	if err != nil {
		t.Fatal(err)
	}
	err = w.client.WaitOperation(ctx, op)
	failed, ok := errors.AsType[*compute.OperationError](err)
	if !ok || !failed.Has("INTERNAL_ERROR") || failed.Has("QUOTA_EXCEEDED") || failed.Type != "bulkInsert" || failed.HTTPStatus != 500 {
		t.Errorf("got %v", err)
	}
	if want := "bulkInsert us-central1-a: INTERNAL_ERROR: Internal error: start machine node-001: no room"; err.Error() != want {
		t.Errorf("got %q, want %q", err, want)
	}
	op, err = w.client.BulkInsert(ctx, compute.BulkInsertRequest{RequestID: uuid.NewString(), Names: nodes(3), MinCount: 1, Spec: spec()})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.client.WaitOperation(ctx, op); err != nil {
		t.Errorf("with enough of them: %v", err)
	}
	if all, err := w.client.List(ctx, ""); err != nil || len(all) != 2 {
		t.Errorf("listed %d, %v, want 2", len(all), err)
	}
}

// TestBusyService has every second call fail, and replies that are lost after the work was done.
func TestBusyService(t *testing.T) {
	for name, status := range map[string]int{"429": 429, "503": 503, "lost replies": 0} {
		t.Run(name, func(t *testing.T) {
			w, ctx := newWorld(t), deadline(t)
			n := 0
			w.refuse = func(*http.Request) int {
				if n++; status != 0 && n%2 == 1 {
					return status
				}
				return 0
			}
			w.lose = func(*http.Request) bool { return status == 0 && n%2 == 1 }
			op, err := w.client.BulkInsert(ctx, compute.BulkInsertRequest{RequestID: uuid.NewString(), Names: nodes(5), Spec: spec()})
			if err != nil {
				t.Fatal(err)
			}
			if err := w.client.WaitOperation(ctx, op); err != nil {
				t.Fatal(err)
			}
			if all, err := w.client.List(ctx, ""); err != nil || len(all) != 5 {
				t.Errorf("listed %d, %v, want 5", len(all), err)
			}
			op, err = w.client.Delete(ctx, uuid.NewString(), "node-000")
			if err != nil || op == "" {
				t.Fatalf("delete: %q, %v", op, err)
			}
			if err := w.client.WaitOperation(ctx, op); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestOperationsAsTheyMayBe judges operations that the sandbox does not make.
func TestOperationsAsTheyMayBe(t *testing.T) {
	newWorld(t) // for the metadata server
	for _, tt := range []struct {
		name, body, want string
	}{
		{"errors without a status", `{"status":"DONE","name":"o","operationType":"insert","targetLink":"x/n-1","error":{"errors":[{"code":"ZONE_RESOURCE_POOL_EXHAUSTED","message":"no a3 left."}]}}`, "insert n-1: ZONE_RESOURCE_POOL_EXHAUSTED: no a3 left"},
		{"with both", `{"status":"DONE","name":"o","operationType":"insert","targetLink":"x/n-1","httpErrorStatusCode":403,"error":{"errors":[{"code":"QUOTA_EXCEEDED","message":"m"}]}}`, "insert n-1: QUOTA_EXCEEDED: m"},
		{"a status alone", `{"status":"DONE","name":"o","operationType":"delete","targetLink":"x/n-1","httpErrorStatusCode":503,"httpErrorMessage":"SERVICE UNAVAILABLE"}`, "delete n-1: HTTP_503: SERVICE UNAVAILABLE"},
		{"good", `{"status":"DONE","name":"o","operationType":"delete","httpErrorStatusCode":200}`, "<nil>"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := 0
			web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				if n++; n == 1 {
					fmt.Fprint(w, `{"status":"RUNNING","name":"o"}`) // wait may come back early
					return
				}
				fmt.Fprint(w, tt.body)
			}))
			defer web.Close()
			c, err := compute.New(t.Context(), compute.Config{Project: "p", Zone: "z", Endpoint: web.URL})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if got := fmt.Sprint(c.WaitOperation(deadline(t), "o")); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	newWorld(t)
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer web.Close()
	c, err := compute.New(t.Context(), compute.Config{Project: "p", Zone: "z", Endpoint: web.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := c.WaitOperation(ctx, "o"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the context's error", err)
	}
}
