package compute_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	api "google.golang.org/api/compute/v1"
	"google.golang.org/api/googleapi"
	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/sandbox/compute"
	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
	"github.com/sluicehpc/sluice/sandbox/faults"
)

const (
	project = "sluice-sandbox"
	zone    = "us-central1-a"
)

// machines is a VMs whose machines are entries of a map.
type machines struct {
	mu      sync.Mutex
	running map[string]compute.Machine
	misuse  []string
	fail    func(name string) error                      // or nil
	block   func(ctx context.Context, name string) error // or nil: called at the start of Start
	stop    func(name string, grace time.Duration)       // or nil: called at the start of Stop
}

func (m *machines) Start(ctx context.Context, vm compute.Machine) error {
	if m.block != nil {
		if err := m.block(ctx, vm.Name); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		if err := m.fail(vm.Name); err != nil {
			return err
		}
	}
	for _, other := range m.running {
		if other.Name == vm.Name || other.Address == vm.Address {
			m.misuse = append(m.misuse, fmt.Sprintf("start %s %s beside %s %s", vm.Name, vm.Address, other.Name, other.Address))
		}
	}
	m.running[vm.Name] = vm
	return nil
}

func (m *machines) Stop(_ context.Context, name string, grace time.Duration) error {
	if m.stop != nil {
		m.stop(name, grace)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.running, name)
	return nil
}

func (m *machines) Remove(_ context.Context, name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.running[name]; ok {
		m.misuse = append(m.misuse, "removed while it runs: "+name)
	}
	return nil
}

func (m *machines) machine(name string) (compute.Machine, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	vm, ok := m.running[name]
	return vm, ok
}

func (m *machines) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.running)
}

type world struct {
	*testing.T
	vms    *machines
	faults *faults.Set
	server *compute.Server
	url    string
	client *api.Service
}

func newWorld(t *testing.T, change func(*compute.Config)) *world {
	t.Helper()
	w := &world{T: t, vms: &machines{running: map[string]compute.Machine{}}, faults: &faults.Set{}}
	cfg := compute.Config{VMs: w.vms, Faults: w.faults}
	if change != nil {
		change(&cfg)
	}
	var err error
	if w.server, err = compute.New(cfg); err != nil {
		t.Fatal(err)
	}
	web := httptest.NewServer(discoverytest.Server(t, w.server, "compute"))
	t.Cleanup(func() {
		web.CloseClientConnections()
		w.server.Close()
		web.Close()
		for _, m := range w.vms.misuse {
			t.Error(m)
		}
	})
	w.url = web.URL
	// This client is only a convenience of these tests; the product's own is tested in gcp/compute.
	w.client, err = api.NewService(t.Context(), option.WithEndpoint(web.URL+"/compute/v1/"), option.WithHTTPClient(web.Client()))
	if err != nil {
		t.Fatal(err)
	}
	if err := w.server.AddImage("debian-13", "debian", "the VMs' root"); err != nil {
		t.Fatal(err)
	}
	return w
}

func body(name string) *api.Instance {
	return &api.Instance{
		Name:        name,
		MachineType: "zones/" + zone + "/machineTypes/n2-standard-2",
		Disks: []*api.AttachedDisk{{
			Boot: true, AutoDelete: true,
			InitializeParams: &api.AttachedDiskInitializeParams{SourceImage: "global/images/family/debian"},
		}},
		NetworkInterfaces: []*api.NetworkInterface{{Network: "global/networks/default"}},
	}
}

func properties() *api.InstanceProperties {
	in := body("x")
	return &api.InstanceProperties{MachineType: "n2-standard-2", Disks: in.Disks, NetworkInterfaces: in.NetworkInterfaces}
}

// begun returns op; it fails the test on err.
func (w *world) begun(op *api.Operation, err error) *api.Operation {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
	return op
}

// done waits for op and fails the test unless it succeeded.
func (w *world) done(op *api.Operation, err error) *api.Operation {
	w.Helper()
	end := w.wait(w.begun(op, err))
	if end.Error != nil {
		w.Fatalf("%s failed: %s %s", end.OperationType, end.Error.Errors[0].Code, end.Error.Errors[0].Message)
	}
	return end
}

func (w *world) wait(op *api.Operation) *api.Operation {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), time.Minute)
	defer cancel()
	for op.Status != "DONE" {
		var err error
		switch {
		case op.Zone != "":
			op, err = w.client.ZoneOperations.Wait(project, zone, op.Name).Context(ctx).Do()
		case op.Region != "":
			op, err = w.client.RegionOperations.Wait(project, "us-central1", op.Name).Context(ctx).Do()
		default:
			op, err = w.client.GlobalOperations.Wait(project, op.Name).Context(ctx).Do()
		}
		if err != nil {
			w.Fatal(err)
		}
	}
	return op
}

// eventually waits until f holds.
func (w *world) eventually(what string, f func() bool) {
	w.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !f() {
		if time.Now().After(deadline) {
			w.Fatalf("never: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func (w *world) status(name string) string {
	in, err := w.client.Instances.Get(project, zone, name).Do()
	if err != nil {
		return ""
	}
	return in.Status
}

func code(err error) int {
	if e, ok := errors.AsType[*googleapi.Error](err); ok {
		return e.Code
	}
	return 0
}

func TestLife(t *testing.T) {
	w := newWorld(t, nil)
	vm := body("n-1")
	vm.Labels = map[string]string{"sluice-deployment": "d"}
	vm.ServiceAccounts = []*api.ServiceAccount{{Email: "default", Scopes: []string{"https://www.googleapis.com/auth/cloud-platform"}}}
	op := w.begun(w.client.Instances.Insert(project, zone, vm).Do())
	if op.Kind != "compute#operation" || op.OperationType != "insert" || op.Status == "DONE" || op.InsertTime == "" ||
		!strings.HasSuffix(op.TargetLink, "/projects/sluice-sandbox/zones/us-central1-a/instances/n-1") {
		t.Errorf("operation as begun: %+v", op)
	}
	op = w.done(op, nil)
	if op.Progress != 100 || op.StartTime == "" || op.EndTime == "" || op.User == "" || op.TargetId == 0 {
		t.Errorf("operation as ended: %+v", op)
	}
	got, err := w.client.Instances.Get(project, zone, "n-1").Do()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"kind": "compute#instance", "status": "RUNNING", "id": op.TargetId, "ip": "10.128.0.2",
		"self": "https://www.googleapis.com/compute/v1/projects/sluice-sandbox/zones/us-central1-a/instances/n-1",
		"zone": "https://www.googleapis.com/compute/v1/projects/sluice-sandbox/zones/us-central1-a",
		"type": "https://www.googleapis.com/compute/v1/projects/sluice-sandbox/zones/us-central1-a/machineTypes/n2-standard-2",
		"acct": "100000000001-compute@developer.gserviceaccount.com",
	}
	have := map[string]any{
		"kind": got.Kind, "status": got.Status, "id": got.Id, "ip": got.NetworkInterfaces[0].NetworkIP,
		"self": got.SelfLink, "zone": got.Zone, "type": got.MachineType, "acct": got.ServiceAccounts[0].Email,
	}
	if d := cmp.Diff(want, have); d != "" {
		t.Errorf("instance (-want +got):\n%s", d)
	}
	if got.Fingerprint == "" || got.LabelFingerprint == "" || got.Metadata.Fingerprint == "" || got.Tags.Fingerprint == "" || got.CreationTimestamp == "" {
		t.Errorf("a fingerprint or time is missing: %+v", got)
	}
	m, ok := w.vms.machine("n-1")
	if !ok {
		t.Fatal("the machine does not run")
	}
	m.Ended = nil
	if d := cmp.Diff(compute.Machine{
		ID: got.Id, Name: "n-1", Hostname: "n-1.us-central1-a.c.sluice-sandbox.internal", Zone: zone,
		Address: netip.MustParseAddr("10.128.0.2"), Image: "debian-13", MachineType: "n2-standard-2", CPUs: 2, MemoryMB: 8192, NewDisk: true,
	}, m, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
		t.Errorf("machine (-want +got):\n%s", d)
	}

	w.done(w.client.Instances.Stop(project, zone, "n-1").Do())
	if got := w.status("n-1"); got != "TERMINATED" || w.vms.count() != 0 {
		t.Errorf("after stop: %s, %d machines", got, w.vms.count())
	}
	w.done(w.client.Instances.Start(project, zone, "n-1").Do())
	if m, _ := w.vms.machine("n-1"); m.Address != netip.MustParseAddr("10.128.0.2") || m.NewDisk {
		t.Errorf("after start: address %s, new disk %v, want the old ones", m.Address, m.NewDisk)
	}
	w.done(w.client.Instances.Delete(project, zone, "n-1").Do())
	if _, err := w.client.Instances.Get(project, zone, "n-1").Do(); code(err) != 404 {
		t.Errorf("get after delete: %v, want 404", err)
	}
	if got := len(w.server.Addresses()); got != 0 {
		t.Errorf("%d addresses in use after delete", got)
	}
}

func TestGuestPowersOff(t *testing.T) {
	w := newWorld(t, nil)
	w.done(w.client.Instances.Insert(project, zone, body("n-1")).Do())
	first, _ := w.vms.machine("n-1")
	first.Ended()
	first.Ended()
	w.eventually("TERMINATED", func() bool { return w.status("n-1") == "TERMINATED" })
	w.done(w.client.Instances.Start(project, zone, "n-1").Do())
	first.Ended() // a late word about the machine before
	w.done(w.client.Instances.Insert(project, zone, body("n-2")).Do())
	if got := w.status("n-1"); got != "RUNNING" {
		t.Errorf("status after a late end of the earlier machine = %s, want RUNNING", got)
	}
}

func TestBulkInsertOf200(t *testing.T) {
	w := newWorld(t, nil)
	per := map[string]api.BulkInsertInstanceResourcePerInstanceProperties{}
	for i := range 200 {
		per[fmt.Sprintf("node-%d", i)] = api.BulkInsertInstanceResourcePerInstanceProperties{}
	}
	op := w.done(w.client.Instances.BulkInsert(project, zone, &api.BulkInsertInstanceResource{
		Count: 200, MinCount: 200, PerInstanceProperties: per, InstanceProperties: properties(),
	}).Do())
	status := op.InstancesBulkInsertOperationMetadata.PerLocationStatus["zones/"+zone]
	if status.CreatedVmCount != 200 || status.TargetVmCount != 200 || status.Status != "DONE" || op.OperationGroupId == "" {
		t.Errorf("operation: %+v, group %q", status, op.OperationGroupId)
	}
	if got := w.vms.count(); got != 200 {
		t.Errorf("%d machines run, want 200", got)
	}
	addresses := map[netip.Addr]bool{}
	for name, a := range w.server.Addresses() {
		if _, ok := per[name]; !ok || addresses[a] || a == netip.MustParseAddr("10.128.0.1") {
			t.Errorf("address %s of %s", a, name)
		}
		addresses[a] = true
	}
	children, err := w.client.ZoneOperations.List(project, zone).Filter(fmt.Sprintf("operationType=insert AND operationGroupId=%s", op.OperationGroupId)).Do()
	if err != nil || len(children.Items) != 200 {
		t.Errorf("%d insert operations of the group, %v, want 200", len(children.Items), err)
	}
	n := 0
	err = w.client.Instances.List(project, zone).MaxResults(33).Pages(t.Context(), func(l *api.InstanceList) error { n += len(l.Items); return nil })
	if err != nil || n != 200 {
		t.Errorf("listed %d in pages, %v, want 200", n, err)
	}
}

func TestBulkInsertNames(t *testing.T) {
	w := newWorld(t, nil)
	w.done(w.client.Instances.Insert(project, zone, body("n-0050")).Do())
	w.done(w.client.RegionInstances.BulkInsert(project, "us-central1", &api.BulkInsertInstanceResource{
		Count: 2, NamePattern: "n-####", InstanceProperties: properties(),
		LocationPolicy: &api.LocationPolicy{Locations: map[string]api.LocationPolicyLocation{"zones/" + zone: {Preference: "ALLOW"}}},
	}).Do())
	for _, name := range []string{"n-0051", "n-0052"} {
		if w.status(name) != "RUNNING" {
			t.Errorf("%s does not run", name)
		}
	}
	template := &api.InstanceTemplate{Name: "t", Properties: properties()}
	template.Properties.Labels = map[string]string{"a": "1", "b": "2"}
	w.done(w.client.InstanceTemplates.Insert(project, template).Do())
	w.done(w.client.Instances.BulkInsert(project, zone, &api.BulkInsertInstanceResource{
		Count:                  1,
		PerInstanceProperties:  map[string]api.BulkInsertInstanceResourcePerInstanceProperties{"m": {Hostname: "m.example.org"}},
		SourceInstanceTemplate: "global/instanceTemplates/t",
		InstanceProperties:     &api.InstanceProperties{Labels: map[string]string{"b": "3"}, MachineType: "c2-standard-4"},
	}).Do())
	in, err := w.client.Instances.Get(project, zone, "m").Do()
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(map[string]string{"a": "1", "b": "3"}, in.Labels); d != "" || !strings.HasSuffix(in.MachineType, "/c2-standard-4") {
		t.Errorf("of template and override: %s %s", in.MachineType, d)
	}
	if m, _ := w.vms.machine("m"); m.Hostname != "m.example.org" {
		t.Errorf("hostname = %q", m.Hostname)
	}
	w.done(w.client.Instances.Insert(project, zone, &api.Instance{Name: "from-template"}).SourceInstanceTemplate("global/instanceTemplates/t").Do())
}

func TestBulkInsertThatFailsInPart(t *testing.T) {
	w := newWorld(t, nil)
	w.vms.fail = func(name string) error {
		if name == "n-2" {
			return errors.New("no room")
		}
		return nil
	}
	w.done(w.client.Instances.Insert(project, zone, body("n-3")).Do())
	request := func(min int64) *api.BulkInsertInstanceResource {
		return &api.BulkInsertInstanceResource{
			Count: 3, MinCount: min, InstanceProperties: properties(),
			PerInstanceProperties: map[string]api.BulkInsertInstanceResourcePerInstanceProperties{"n-1": {}, "n-2": {}, "n-3": {}},
		}
	}
	// Below minCount: what came up goes again, but not what was there before.
	op := w.wait(w.begun(w.client.Instances.BulkInsert(project, zone, request(2)).Do()))
	var codes []string
	for _, e := range op.Error.Errors {
		codes = append(codes, e.Code)
	}
	if d := cmp.Diff([]string{"INTERNAL_ERROR", "RESOURCE_ALREADY_EXISTS"}, codes); d != "" || op.HttpErrorStatusCode != 500 {
		t.Errorf("errors %d (-want +got):\n%s", op.HttpErrorStatusCode, d)
	}
	if d := cmp.Diff([]string{"n-3"}, names(w)); d != "" {
		t.Errorf("instances (-want +got):\n%s", d)
	}
	if s := op.InstancesBulkInsertOperationMetadata.PerLocationStatus["zones/"+zone]; s.CreatedVmCount != 1 || s.DeletedVmCount != 1 || s.FailedToCreateVmCount != 2 {
		t.Errorf("counts: %+v", s)
	}
	// At minCount: it stays.
	op = w.wait(w.begun(w.client.Instances.BulkInsert(project, zone, request(1)).Do()))
	if op.Error != nil {
		t.Errorf("error with minCount reached: %+v", op.Error.Errors)
	}
	if d := cmp.Diff([]string{"n-1", "n-3"}, names(w)); d != "" {
		t.Errorf("instances (-want +got):\n%s", d)
	}
	if got := w.vms.count(); got != 2 {
		t.Errorf("%d machines, want 2", got)
	}
}

func names(w *world) []string {
	var all []string
	for _, in := range w.server.Instances() {
		all = append(all, in.Name)
	}
	return all
}

func TestFailedInsertLeavesNothing(t *testing.T) {
	w := newWorld(t, nil)
	w.vms.fail = func(string) error { return errors.New("no room") }
	op := w.wait(w.begun(w.client.Instances.Insert(project, zone, body("n-1")).Do()))
	if op.Error == nil || op.Error.Errors[0].Code != "INTERNAL_ERROR" || op.HttpErrorStatusCode != 500 {
		t.Errorf("operation: %+v", op)
	}
	if got := len(w.server.Addresses()); got != 0 || len(names(w)) != 0 {
		t.Errorf("left: %v, %d addresses", names(w), got)
	}
}

func TestDeleteDuringInsert(t *testing.T) {
	for _, phase := range []string{"PROVISIONING", "STAGING"} {
		t.Run(phase, func(t *testing.T) {
			w := newWorld(t, nil)
			if phase == "PROVISIONING" {
				if err := w.faults.Set(faults.ComputeInsertDelay, "1h"); err != nil {
					t.Fatal(err)
				}
			} else {
				w.vms.block = func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() }
			}
			insert := w.begun(w.client.Instances.Insert(project, zone, body("n-1")).Do())
			w.eventually(phase, func() bool { return w.status("n-1") == phase })
			remove := w.begun(w.client.Instances.Delete(project, zone, "n-1").Do())
			if again, err := w.client.Instances.Delete(project, zone, "n-1").Do(); code(err) != 404 {
				w.done(again, err)
			}
			w.done(remove, nil)
			op := w.wait(insert)
			if op.Error == nil || op.Error.Errors[0].Code != "OPERATION_CANCELED_BY_USER" {
				t.Errorf("insert: %+v", op.Error)
			}
			if len(names(w)) != 0 || w.vms.count() != 0 || len(w.server.Addresses()) != 0 {
				t.Error("something is left")
			}
		})
	}
}

func TestRequestIDs(t *testing.T) {
	w := newWorld(t, nil)
	id := uuid.NewString()
	ops := make([]string, 20)
	var all sync.WaitGroup
	for i := range ops {
		all.Go(func() {
			op, err := w.client.Instances.Insert(project, zone, body("n-1")).RequestId(id).Do()
			if err != nil {
				t.Error(err)
				return
			}
			ops[i] = op.Name
		})
	}
	all.Wait()
	for _, name := range ops {
		if name != ops[0] {
			t.Errorf("operations %s and %s of one request id", name, ops[0])
		}
	}
	w.wait(&api.Operation{Name: ops[0], Zone: zone})
	if _, err := w.client.Instances.Insert(project, zone, body("n-2")).RequestId(id).Do(); code(err) != 400 {
		t.Errorf("another body with the id: %v, want 400", err)
	}
	if _, err := w.client.Instances.Delete(project, zone, "n-1").RequestId(id).Do(); code(err) != 400 {
		t.Errorf("another method with the id: %v, want 400", err)
	}
	if _, err := w.client.Instances.Delete(project, zone, "n-1").RequestId(uuid.Nil.String()).Do(); code(err) != 400 {
		t.Errorf("zero id: %v, want 400", err)
	}
	removed := uuid.NewString()
	first := w.done(w.client.Instances.Delete(project, zone, "n-1").RequestId(removed).Do())
	again := w.begun(w.client.Instances.Delete(project, zone, "n-1").RequestId(removed).Do())
	if again.Name != first.Name || again.Status != "DONE" {
		t.Errorf("replayed delete: %s %s, want %s DONE", again.Name, again.Status, first.Name)
	}
	// Blanks and order are not the request.
	refused := uuid.NewString()
	for i, text := range []string{`{"name": "bad"}`, `{"sourceImage":"global/images/debian-13", "name":"i-1"}`, "{ \"name\":\"i-1\",\n\"sourceImage\":\"global/images/debian-13\" }"} {
		status, answer := w.raw("POST", "/projects/sluice-sandbox/global/images?requestId="+refused, text)
		if want := []int{400, 200, 200}[i]; status != want {
			t.Errorf("%s: %d %s, want %d", text, status, answer, want)
		}
	}
}

func (w *world) raw(method, path, body string) (int, string) {
	w.Helper()
	r, err := http.NewRequestWithContext(w.Context(), method, w.url+"/compute/v1"+path, strings.NewReader(body))
	if err != nil {
		w.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		w.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		w.Fatal(err)
	}
	return answer.StatusCode, string(text)
}

func TestRefusals(t *testing.T) {
	w := newWorld(t, nil)
	w.done(w.client.Instances.Insert(project, zone, body("taken")).Do())
	const instances = "/projects/sluice-sandbox/zones/us-central1-a/instances"
	valid := func(change string) string {
		text := `{"name":"n","machineType":"zones/us-central1-a/machineTypes/n2-standard-2",
			"disks":[{"boot":true,"initializeParams":{"sourceImage":"global/images/debian-13"}}],"networkInterfaces":[{}]}`
		old, now, _ := strings.Cut(change, " -> ")
		if !strings.Contains(text, old) {
			t.Fatalf("no %s in the body", old)
		}
		return strings.Replace(text, old, now, 1)
	}
	bulk := func(change string) string {
		text := `{"count":"2","namePattern":"n-#","instanceProperties":{"machineType":"n2-standard-2",
			"disks":[{"boot":true,"initializeParams":{"sourceImage":"global/images/debian-13"}}],"networkInterfaces":[{}]}}`
		old, now, _ := strings.Cut(change, " -> ")
		if !strings.Contains(text, old) {
			t.Fatalf("no %s in the body", old)
		}
		return strings.Replace(text, old, now, 1)
	}
	for _, tt := range []struct {
		name, method, path, body string
		status                   int
		reason, message          string
	}{
		{"missing instance", "GET", instances + "/nope", "", 404, "notFound", "The resource 'projects/sluice-sandbox/zones/us-central1-a/instances/nope' was not found"},
		{"instance of another zone", "GET", "/projects/sluice-sandbox/zones/us-central1-b/instances/taken", "", 404, "notFound", "was not found"},
		{"delete of a missing instance", "DELETE", instances + "/nope", "", 404, "notFound", "was not found"},
		{"unknown zone", "GET", "/projects/sluice-sandbox/zones/mars-1-a/instances", "", 400, "invalid", "Invalid value for field 'zone': 'mars-1-a'. Unknown zone."},
		{"unknown region", "GET", "/projects/sluice-sandbox/regions/mars-1/operations", "", 400, "invalid", "'region'"},
		{"unknown project", "GET", "/projects/other/zones", "", 404, "notFound", "The resource 'projects/other' was not found"},
		{"unknown method", "GET", "/projects/sluice-sandbox/global/firewalls", "", 404, "notFound", "has no method"},
		{"taken name", "POST", instances, valid(`"n" -> "taken"`), 409, "alreadyExists", "The resource 'projects/sluice-sandbox/zones/us-central1-a/instances/taken' already exists"},
		{"no name", "POST", instances, valid(`"name":"n", -> `), 400, "required", "Required field 'resource.name' not specified"},
		{"bad name", "POST", instances, valid(`"n" -> "N_1"`), 400, "invalid", "Invalid value for field 'resource.name': 'N_1'. Must be a match of regex '(?:[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)'"},
		{"long name", "POST", instances, valid(`"n" -> "` + strings.Repeat("a", 64) + `"`), 400, "invalid", "'resource.name'"},
		{"bare machine type", "POST", instances, valid(`"zones/us-central1-a/machineTypes/n2-standard-2" -> "n2-standard-2"`), 400, "invalid", "The URL is malformed."},
		{"unknown machine type", "POST", instances, valid(`n2-standard-2 -> n9-giant`), 400, "invalid", "Machine type with name 'n9-giant' does not exist in zone 'us-central1-a'."},
		{"other zone's machine type", "POST", instances, valid(`zones/us-central1-a -> zones/us-central1-b`), 400, "invalid", "'resource.machineType'"},
		{"unknown image", "POST", instances, valid(`images/debian-13 -> images/nope`), 400, "invalid", "The referenced image resource cannot be found."},
		{"no disk", "POST", instances, valid(`"boot":true, -> `), 400, "invalid", "'resource.disks'"},
		{"no interface", "POST", instances, valid(`[{}] -> []`), 400, "invalid", "'resource.networkInterfaces'"},
		{"null interface", "POST", instances, valid(`[{}] -> [null]`), 400, "badRequest", "null"},
		{"unknown network", "POST", instances, valid(`[{}] -> [{"network":"global/networks/x"}]`), 400, "invalid", "'resource.networkInterfaces[0].network'"},
		{"gateway's address", "POST", instances, valid(`[{}] -> [{"networkIP":"10.128.0.1"}]`), 400, "invalid", "networkIP"},
		{"bad label", "POST", instances, valid(`"name" -> "labels":{"A":"b"},"name"`), 400, "invalid", "'resource.labels'"},
		{"bad metadata key", "POST", instances, valid(`"name" -> "metadata":{"items":[{"key":"a b","value":""}]},"name"`), 400, "invalid", "'resource.metadata.items[0].key'"},
		{"duplicate metadata key", "POST", instances, valid(`"name" -> "metadata":{"items":[{"key":"a"},{"key":"a"}]},"name"`), 400, "invalid", "duplicate key: a"},
		{"long metadata", "POST", instances, valid(`"name" -> "metadata":{"items":[{"key":"a","value":"` + strings.Repeat("x", 256<<10+1) + `"}]},"name"`), 400, "invalid", "maximum size"},
		{"bad model", "POST", instances, valid(`"name" -> "scheduling":{"provisioningModel":"CHEAP"},"name"`), 400, "invalid", "'resource.scheduling.provisioningModel'"},
		{"unknown field", "POST", instances, valid(`"name" -> "colour":1,"name"`), 400, "badRequest", `Unknown name "colour"`},
		{"not JSON", "POST", instances, `{"name":`, 400, "badRequest", "Invalid JSON payload received."},
		{"not an object", "POST", instances, `[]`, 400, "badRequest", "An object is expected."},
		{"wrong type", "POST", instances, `{"name":{"a":1}}`, 400, "badRequest", "Invalid JSON payload received."},
		{"too long", "POST", instances, `{"description":"` + strings.Repeat("x", 9<<20) + `"}`, 413, "uploadTooLarge", "longer than"},
		{"count 0", "POST", instances + "/bulkInsert", bulk(`"2" -> "0"`), 400, "invalid", "'resource.count'"},
		{"count as a number is fine, minCount above is not", "POST", instances + "/bulkInsert", bulk(`"2" -> 2,"minCount":3`), 400, "invalid", "'resource.minCount'"},
		{"no pattern", "POST", instances + "/bulkInsert", bulk(`"namePattern":"n-#", -> `), 400, "required", "resource.namePattern"},
		{"pattern without #", "POST", instances + "/bulkInsert", bulk(`n-# -> n`), 400, "invalid", "'resource.namePattern'"},
		{"pattern too narrow", "POST", instances + "/bulkInsert", bulk(`"2" -> "11"`), 400, "invalid", "'resource.namePattern'"},
		{"bulk's machine type as a URL", "POST", instances + "/bulkInsert", bulk(`"n2-standard-2" -> "zones/us-central1-a/machineTypes/n2-standard-2"`), 400, "invalid", "'resource.instanceProperties.machineType'"},
		{"too few exact names", "POST", instances + "/bulkInsert", bulk(`"namePattern":"n-#" -> "perInstanceProperties":{"a":{}}`), 400, "invalid", "'resource.perInstanceProperties'"},
		{"bad exact name", "POST", instances + "/bulkInsert", bulk(`"namePattern" -> "perInstanceProperties":{"A":{}},"namePattern"`), 400, "invalid", "perInstanceProperties[A]"},
		{"unknown template", "POST", instances + "/bulkInsert", bulk(`"count" -> "sourceInstanceTemplate":"global/instanceTemplates/x","count"`), 404, "notFound", "global/instanceTemplates/x"},
		{"old fingerprint", "POST", instances + "/taken/setMetadata", `{"fingerprint":"AAAA","items":[]}`, 412, "conditionNotMet", "Supplied fingerprint does not match current metadata fingerprint."},
		{"no fingerprint", "POST", instances + "/taken/setMetadata", `{}`, 412, "conditionNotMet", "fingerprint"},
		{"old label fingerprint", "POST", instances + "/taken/setLabels", `{"labelFingerprint":"AAAA","labels":{}}`, 412, "conditionNotMet", "Labels fingerprint"},
		{"bad request id", "DELETE", instances + "/taken?requestId=1", "", 400, "invalid", "'requestId'"},
		{"bad filter", "GET", instances + "?filter=name%3D", "", 400, "invalid", "'filter'"},
		{"filter on an unknown field", "GET", instances + "?filter=nmae%3Dx", "", 400, "invalid", `unknown field "nmae"`},
		{"maxResults", "GET", instances + "?maxResults=501", "", 400, "invalid", "'maxResults'"},
		{"orderBy", "GET", instances + "?orderBy=size", "", 400, "invalid", "'orderBy'"},
		{"page token", "GET", instances + "?pageToken=x", "", 400, "invalid", "'pageToken'"},
		{"missing operation", "GET", "/projects/sluice-sandbox/zones/us-central1-a/operations/x", "", 404, "notFound", "operations/x"},
		{"missing image", "GET", "/projects/sluice-sandbox/global/images/x", "", 404, "notFound", "global/images/x"},
		{"missing family", "GET", "/projects/sluice-sandbox/global/images/family/x", "", 404, "notFound", "family/x"},
		{"missing machine type", "GET", "/projects/sluice-sandbox/zones/us-central1-a/machineTypes/x", "", 404, "notFound", "machineTypes/x"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			status, text := w.raw(tt.method, tt.path, tt.body)
			answer := &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(text)), Header: http.Header{}}
			e, ok := errors.AsType[*googleapi.Error](googleapi.CheckResponse(answer))
			if !ok || len(e.Errors) == 0 {
				t.Fatalf("%d %s", status, text)
			}
			if e.Code != tt.status || e.Errors[0].Reason != tt.reason || !strings.Contains(e.Message, tt.message) {
				t.Errorf("got %d %s %q, want %d %s %q", e.Code, e.Errors[0].Reason, e.Message, tt.status, tt.reason, tt.message)
			}
		})
	}
	if d := cmp.Diff([]string{"taken"}, names(w)); d != "" {
		t.Errorf("instances (-want +got):\n%s", d)
	}
}

func TestAddressesAreNeverShared(t *testing.T) {
	w := newWorld(t, func(c *compute.Config) { c.Subnet = netip.MustParsePrefix("10.1.2.0/28") }) // 12 usable: .2 to .13
	ask := body("fixed")
	ask.NetworkInterfaces[0].NetworkIP = "10.1.2.2"
	w.done(w.client.Instances.Insert(project, zone, ask).Do())
	ask.Name = "second"
	op := w.wait(w.begun(w.client.Instances.Insert(project, zone, ask).Do()))
	if op.Error == nil || op.Error.Errors[0].Code != "IP_IN_USE_BY_ANOTHER_RESOURCE" {
		t.Errorf("taken address: %+v", op.Error)
	}
	op = w.wait(w.begun(w.client.Instances.BulkInsert(project, zone, &api.BulkInsertInstanceResource{
		Count: 12, MinCount: 1, NamePattern: "n-##", InstanceProperties: properties(),
	}).Do()))
	if s := op.InstancesBulkInsertOperationMetadata.PerLocationStatus["zones/"+zone]; s.CreatedVmCount != 11 || s.FailedToCreateVmCount != 1 {
		t.Errorf("12 more of 11 addresses: %+v", s)
	}
	// Churn: one gone, one new, many times at once. The fake machines check that none share an address.
	var all sync.WaitGroup
	for i := range 11 {
		all.Go(func() {
			name := fmt.Sprintf("n-%02d", i+1)
			for range 5 {
				remove, err := w.client.Instances.Delete(project, zone, name).Do()
				if err != nil {
					t.Error(err)
					return
				}
				w.wait(remove)
				op, err := w.client.Instances.Insert(project, zone, body(name)).Do()
				if err != nil {
					t.Error(err)
					return
				}
				w.wait(op)
			}
		})
	}
	all.Wait()
	for name, a := range w.server.Addresses() {
		v, ok := w.server.ByAddress(a)
		if !ok || v.Instance.Name != name {
			t.Errorf("ByAddress(%s) is not %s", a, name)
		}
	}
}

func TestMetadataChanges(t *testing.T) {
	w := newWorld(t, nil)
	w.done(w.client.Instances.Insert(project, zone, body("n-1")).Do())
	before, _ := w.server.ByAddress(netip.MustParseAddr("10.128.0.2"))
	// Of many writers that read the same fingerprint one wins.
	won := make(chan string, 20)
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			value := fmt.Sprint(i)
			_, err := w.client.Instances.SetMetadata(project, zone, "n-1", &api.Metadata{
				Fingerprint: before.Instance.Metadata.Fingerprint, Items: []*api.MetadataItems{{Key: "k", Value: &value}},
			}).Do()
			switch {
			case err == nil:
				won <- value
			case code(err) != 412:
				t.Error(err)
			}
		})
	}
	all.Wait()
	close(won)
	if len(won) != 1 {
		t.Fatalf("%d writers won, want 1", len(won))
	}
	select {
	case <-before.Changed:
	default:
		t.Error("the change was not told")
	}
	after, _ := w.server.ByAddress(netip.MustParseAddr("10.128.0.2"))
	if got, want := *after.Instance.Metadata.Items[0].Value, <-won; got != want {
		t.Errorf("value %q, want the winner's %q", got, want)
	}
	w.done(w.client.Instances.SetLabels(project, zone, "n-1", &api.InstancesSetLabelsRequest{
		LabelFingerprint: after.Instance.LabelFingerprint, Labels: map[string]string{"a": "b"},
	}).Do())
	if got, err := w.client.Instances.List(project, zone).Filter("labels.a=b").Do(); err != nil || len(got.Items) != 1 {
		t.Errorf("by the new label: %v %v", got, err)
	}
}

func TestCatalog(t *testing.T) {
	w := newWorld(t, nil)
	mt, err := w.client.MachineTypes.Get(project, zone, "a3-megagpu-8g").Do()
	if err != nil {
		t.Fatal(err)
	}
	if mt.GuestCpus != 208 || mt.MemoryMb != 1872<<10 || mt.Accelerators[0].GuestAcceleratorCount != 8 || mt.Accelerators[0].GuestAcceleratorType != "nvidia-h100-mega-80gb" {
		t.Errorf("a3-megagpu-8g: %+v", mt)
	}
	all, err := w.client.MachineTypes.AggregatedList(project).MaxResults(500).Do()
	if err != nil || len(all.Items["zones/us-central1-b"].MachineTypes) == 0 {
		t.Errorf("aggregated machine types: %v", err)
	}
	zones, err := w.client.Zones.List(project).Filter("name eq us-central1-.").Do()
	if err != nil || len(zones.Items) != 4 {
		t.Errorf("zones: %v %v", zones, err)
	}
	region, err := w.client.Regions.Get(project, "us-central1").Do()
	if err != nil || len(region.Zones) != 4 {
		t.Errorf("region: %v %v", region, err)
	}
	network, err := w.client.Networks.Get(project, "default").Do()
	if err != nil || network.Kind != "compute#network" {
		t.Errorf("network: %v %v", network, err)
	}
	subnet, err := w.client.Subnetworks.Get(project, "us-central1", "default").Do()
	if err != nil || subnet.IpCidrRange != "10.128.0.0/20" || subnet.GatewayAddress != "10.128.0.1" {
		t.Errorf("subnetwork: %v %v", subnet, err)
	}
	w.done(w.client.Images.Insert(project, &api.Image{Name: "derived", Family: "debian", SourceImage: "global/images/debian-13"}).Do())
	image, err := w.client.Images.GetFromFamily(project, "debian").Do()
	if err != nil || image.Name != "derived" && image.Name != "debian-13" {
		t.Errorf("family: %v %v", image, err)
	}
	w.done(w.client.Images.Delete(project, "derived").Do())
	if image, err = w.client.Images.GetFromFamily(project, "debian").Do(); err != nil || image.Name != "debian-13" {
		t.Errorf("family after delete: %v %v", image, err)
	}
	w.done(w.client.RegionInstanceTemplates.Insert(project, "us-central1", &api.InstanceTemplate{Name: "t", Properties: properties()}).Do())
	templates, err := w.client.RegionInstanceTemplates.List(project, "us-central1").Do()
	if err != nil || len(templates.Items) != 1 || templates.Items[0].Region == "" {
		t.Errorf("templates: %v %v", templates, err)
	}
	w.done(w.client.RegionInstanceTemplates.Delete(project, "us-central1", "t").Do())
}

func TestLists(t *testing.T) {
	w := newWorld(t, nil)
	for _, name := range []string{"b", "a", "c"} {
		w.done(w.client.Instances.Insert(project, zone, body(name)).Do())
	}
	other := body("d")
	other.MachineType = "zones/us-central1-b/machineTypes/e2-small"
	w.begun(w.client.Instances.Insert(project, "us-central1-b", other).Do())
	var pages [][]string
	err := w.client.Instances.List(project, zone).MaxResults(2).Pages(t.Context(), func(l *api.InstanceList) error {
		var page []string
		for _, in := range l.Items {
			page = append(page, in.Name)
		}
		pages = append(pages, page)
		return nil
	})
	if d := cmp.Diff([][]string{{"a", "b"}, {"c"}}, pages); d != "" || err != nil {
		t.Errorf("pages: %v\n%s", err, d)
	}
	byAge, err := w.client.Instances.List(project, zone).OrderBy("creationTimestamp desc").Do()
	if err != nil || len(byAge.Items) != 3 || byAge.Items[2].CreationTimestamp > byAge.Items[0].CreationTimestamp {
		t.Errorf("by age: %v %v", byAge, err)
	}
	all, err := w.client.Instances.AggregatedList(project).Do()
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]int{}
	for scope, list := range all.Items {
		counts[scope] = len(list.Instances)
		if (list.Warning != nil) != (len(list.Instances) == 0) {
			t.Errorf("warning of %s: %+v", scope, list.Warning)
		}
	}
	if d := cmp.Diff(map[string]int{"zones/us-central1-a": 3, "zones/us-central1-b": 1, "zones/us-central1-c": 0, "zones/us-central1-f": 0}, counts); d != "" {
		t.Errorf("aggregated (-want +got):\n%s", d)
	}
	ops, err := w.client.GlobalOperations.AggregatedList(project).Do()
	if err != nil || len(ops.Items["zones/"+zone].Operations) != 3 {
		t.Errorf("aggregated operations: %v %v", ops, err)
	}
	op := ops.Items["zones/"+zone].Operations[0]
	if err := w.client.ZoneOperations.Delete(project, zone, op.Name).Do(); err != nil {
		t.Error(err)
	}
	if _, err := w.client.ZoneOperations.Get(project, zone, op.Name).Do(); code(err) != 404 {
		t.Errorf("deleted operation: %v, want 404", err)
	}
}

func TestSerialPort(t *testing.T) {
	w := newWorld(t, func(c *compute.Config) {
		c.Console = func(name string, from int64) ([]byte, error) { return []byte("boot of " + name)[from:], nil }
	})
	w.done(w.client.Instances.Insert(project, zone, body("n-1")).Do())
	out, err := w.client.Instances.GetSerialPortOutput(project, zone, "n-1").Start(5).Do()
	if err != nil || out.Contents != "of n-1" || out.Next != 11 {
		t.Errorf("got %+v, %v", out, err)
	}
}

func TestOperationNames(t *testing.T) {
	w := newWorld(t, nil)
	op := w.done(w.client.Instances.Insert(project, zone, body("n-1")).Do())
	if ok := regexp.MustCompile(`^operation-\d{13}-[0-9a-f]{13}-[0-9a-f]{8}-[0-9a-f]{8}$`).MatchString(op.Name); !ok {
		t.Errorf("name %q", op.Name)
	}
	if status, text := w.raw("GET", "/projects/sluice-sandbox/zones/us-central1-a/operations/"+op.Name, ""); status != 200 || !regexp.MustCompile(`"id": "\d+"`).MatchString(text) {
		t.Errorf("%d %s", status, text)
	}
}
