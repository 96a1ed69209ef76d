package lustre_test

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/google/uuid"

	"github.com/sluicehpc/sluice/gcp"
	api "github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/sandbox/lustre"
)

func TestInstanceLife(t *testing.T) {
	var ports sync.Map
	hold := make(chan struct{})
	w := newWorld(t, func(o *lustre.Options) {
		listen := loopback(&ports)
		o.Listen = func(a netip.AddrPort) (net.Listener, error) { <-hold; return listen(a) }
	})
	ctx := w.ctx()
	in := spec()
	in.Labels = map[string]string{"sluice-deployment": "demo"}
	op, err := w.CreateInstance(ctx, &api.CreateInstanceRequest{Parent: parent, InstanceID: "scratch", Instance: in, RequestID: uuid.NewString()})
	if err != nil {
		t.Fatal(err)
	}
	if op.Done || op.Metadata.Verb != "create" || op.Metadata.Target != scratch || op.Metadata.APIVersion != "v1" || op.Metadata.Type != api.TypeOperation {
		t.Errorf("operation %+v, metadata %+v", op, op.Metadata)
	}
	if got, err := w.GetInstance(ctx, scratch); err != nil || got.State != api.StateCreating || got.MountPoint != "" {
		t.Errorf("while it is made: %+v, %v", got, err)
	}
	if _, err := w.ImportData(ctx, importOf("gs://corpus", "")); gcp.Status(err) != "FAILED_PRECONDITION" {
		t.Errorf("import while it is made: %v", err)
	}
	close(hold)
	done := w.wait(op)
	if !strings.Contains(string(done.Response), `"@type":"type.googleapis.com/google.cloud.lustre.v1.Instance"`) {
		t.Errorf("response %s", done.Response)
	}
	want := spec()
	want.Name, want.State, want.MountPoint, want.Labels = scratch, api.StateActive, "10.129.0.2@tcp:/scratch", in.Labels
	got, err := w.GetInstance(ctx, scratch)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got, cmpopts.IgnoreFields(api.Instance{}, "UID", "CreateTime", "UpdateTime")); d != "" {
		t.Errorf("instance (-want +got):\n%s", d)
	}
	if uuid.Validate(got.UID) != nil || got.CreateTime.IsZero() {
		t.Errorf("uid %q, create time %v", got.UID, got.CreateTime)
	}
	port, ok := ports.Load("10.129.0.2:988")
	if !ok {
		t.Fatal("nobody listens on 10.129.0.2:988")
	}
	c, err := net.Dial("tcp", port.(string))
	if err != nil {
		t.Fatal(err)
	}
	c.Close()

	op, err = w.UpdateInstance(ctx, &api.UpdateInstanceRequest{
		Instance:   &api.Instance{Name: scratch, CapacityGib: 27000, Labels: map[string]string{"a": "b"}, Description: "not in the mask"},
		UpdateMask: []string{"capacityGib", "labels"},
	})
	if err != nil {
		t.Fatal(err)
	}
	w.wait(op)
	want.CapacityGib, want.Labels = 27000, map[string]string{"a": "b"}
	got, _ = w.GetInstance(ctx, scratch)
	if d := cmp.Diff(want, got, cmpopts.IgnoreFields(api.Instance{}, "UID", "CreateTime", "UpdateTime")); d != "" {
		t.Errorf("after the update (-want +got):\n%s", d)
	}

	dir := w.data()
	if err := os.WriteFile(filepath.Join(dir, "f"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	uid := got.UID
	op, err = w.DeleteInstance(ctx, &api.DeleteInstanceRequest{Name: scratch})
	if err != nil {
		t.Fatal(err)
	}
	if done := w.wait(op); string(done.Response) != `{"@type":"type.googleapis.com/google.protobuf.Empty"}` {
		t.Errorf("response %s", done.Response)
	}
	if _, err := w.GetInstance(ctx, scratch); !gcp.IsNotFound(err) {
		t.Errorf("after the deletion: %v", err)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the data is still there: %v", err)
	}
	if _, err := net.Dial("tcp", port.(string)); err == nil {
		t.Error("the address still answers")
	}
	if again := w.create(); again.UID == uid || again.MountPoint != "10.129.0.3@tcp:/scratch" {
		t.Errorf("made again: uid %s, mount point %s", again.UID, again.MountPoint)
	}
}

func TestCreateRefused(t *testing.T) {
	w := newWorld(t)
	w.create()
	for _, tt := range []struct {
		name, id string
		change   func(*api.Instance)
		status   string
		says     string
	}{
		{"id", "Bad_Id", func(*api.Instance) {}, "INVALID_ARGUMENT", "instance_id"},
		{"id of nothing", "", func(*api.Instance) {}, "INVALID_ARGUMENT", "instance_id"},
		{"exists", "scratch", func(*api.Instance) {}, "ALREADY_EXISTS", "already exists"},
		{"file system with a dash", "a", func(i *api.Instance) { i.Filesystem = "my-fs" }, "INVALID_ARGUMENT", "filesystem"},
		{"long file system", "a", func(i *api.Instance) { i.Filesystem = "scratches" }, "INVALID_ARGUMENT", "filesystem"},
		{"tier", "a", func(i *api.Instance) { i.PerUnitStorageThroughput = 200 }, "INVALID_ARGUMENT", "per_unit_storage_throughput"},
		{"no tier", "a", func(i *api.Instance) { i.PerUnitStorageThroughput = 0 }, "INVALID_ARGUMENT", "per_unit_storage_throughput"},
		{"too small", "a", func(i *api.Instance) { i.PerUnitStorageThroughput = 125 }, "INVALID_ARGUMENT", "72000"},
		{"between steps", "a", func(i *api.Instance) { i.CapacityGib = 18001 }, "INVALID_ARGUMENT", "18000 or 27000"},
		{"network", "a", func(i *api.Instance) { i.Network = "default" }, "INVALID_ARGUMENT", "network"},
		{"label", "a", func(i *api.Instance) { i.Labels = map[string]string{"A": "b"} }, "INVALID_ARGUMENT", "label"},
		{"squash", "a", func(i *api.Instance) {
			i.AccessRulesOptions = &api.AccessRulesOptions{DefaultSquashMode: "NO_SQUASH", DefaultSquashUID: 1}
		}, "INVALID_ARGUMENT", "default_squash_uid"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := spec()
			tt.change(in)
			_, err := w.CreateInstance(w.ctx(), &api.CreateInstanceRequest{Parent: parent, InstanceID: tt.id, Instance: in})
			if gcp.Status(err) != tt.status || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("got %v, want %s and %q", err, tt.status, tt.says)
			}
		})
	}
	if _, err := w.CreateInstance(w.ctx(), &api.CreateInstanceRequest{Parent: "projects/sluice-sandbox/locations/moon-a", InstanceID: "a", Instance: spec()}); !gcp.IsNotFound(err) {
		t.Errorf("unknown zone: %v", err)
	}
	dynamic := spec()
	dynamic.PerUnitStorageThroughput, dynamic.CapacityGib = 0, 472000
	dynamic.DynamicTierOptions = &api.DynamicTierOptions{Mode: "DEFAULT_CACHE"}
	op, err := w.CreateInstance(w.ctx(), &api.CreateInstanceRequest{Parent: parent, InstanceID: "dynamic", Instance: dynamic})
	if err != nil {
		t.Fatal(err)
	}
	w.wait(op)
}

func TestUpdateRefused(t *testing.T) {
	w := newWorld(t)
	w.create()
	for _, tt := range []struct {
		name string
		inst api.Instance
		mask []string
		says string
	}{
		{"shrink", api.Instance{CapacityGib: 9000}, []string{"capacityGib"}, "shrink"},
		{"past the small step", api.Instance{CapacityGib: 1584000}, []string{"capacityGib"}, "1530000"},
		{"file system", api.Instance{Filesystem: "other"}, []string{"filesystem"}, "cannot be updated"},
		{"tier", api.Instance{PerUnitStorageThroughput: 500}, []string{"perUnitStorageThroughput"}, "cannot be updated"},
		{"tier in snake case", api.Instance{PerUnitStorageThroughput: 500}, []string{"per_unit_storage_throughput"}, "cannot be updated"},
		{"network without a mask", api.Instance{Network: network}, nil, "cannot be updated"},
		{"unknown", api.Instance{}, []string{"color"}, "cannot be updated"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inst := tt.inst
			inst.Name = scratch
			_, err := w.UpdateInstance(w.ctx(), &api.UpdateInstanceRequest{Instance: &inst, UpdateMask: tt.mask})
			if gcp.Code(err) != 400 || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("got %v, want 400 and %q", err, tt.says)
			}
		})
	}
}

func TestRequestIDs(t *testing.T) {
	w := newWorld(t)
	create := &api.CreateInstanceRequest{Parent: parent, InstanceID: "scratch", Instance: spec(), RequestID: uuid.NewString()}
	first, err := w.CreateInstance(w.ctx(), create)
	if err != nil {
		t.Fatal(err)
	}
	w.wait(first)
	again, err := w.CreateInstance(w.ctx(), create)
	if err != nil || again.Name != first.Name {
		t.Errorf("the same request again: %v, %v; want operation %s", again, err, first.Name)
	}
	other := *create
	other.Instance = spec()
	other.Instance.CapacityGib = 27000
	if _, err := w.CreateInstance(w.ctx(), &other); gcp.Status(err) != "INVALID_ARGUMENT" {
		t.Errorf("another body with the same id: %v", err)
	}
	for _, bad := range []string{"1", "00000000-0000-0000-0000-000000000000"} {
		other.RequestID = bad
		if _, err := w.CreateInstance(w.ctx(), &other); gcp.Status(err) != "INVALID_ARGUMENT" {
			t.Errorf("request id %q: %v", bad, err)
		}
	}

	// A transfer that is replayed is not refused because it runs itself.
	w.put("a", "a")
	w.set("lustre.transfer.rate", "1")
	transfer := importOf("gs://corpus", "")
	transfer.RequestID = uuid.NewString()
	op, err := w.ImportData(w.ctx(), transfer)
	if err != nil {
		t.Fatal(err)
	}
	again, err = w.ImportData(w.ctx(), transfer)
	if err != nil || again.Name != op.Name {
		t.Errorf("the same import again: %v, %v; want operation %s", again, err, op.Name)
	}
	export := &api.ExportDataRequest{Name: scratch, GcsPath: transfer.GcsPath, RequestID: transfer.RequestID}
	if _, err := w.ExportData(w.ctx(), export); gcp.Status(err) != "INVALID_ARGUMENT" {
		t.Errorf("an export with the import's id: %v", err)
	}

	w.clock.advance(2 * time.Hour) // ids are forgotten
	if _, err := w.CreateInstance(w.ctx(), create); !gcp.IsAlreadyExists(err) {
		t.Errorf("after two hours: %v", err)
	}
}

func TestLists(t *testing.T) {
	w := newWorld(t)
	for _, id := range []string{"c", "a", "b"} {
		in := spec()
		in.Labels = map[string]string{"name": id}
		op, err := w.CreateInstance(w.ctx(), &api.CreateInstanceRequest{Parent: parent, InstanceID: id, Instance: in})
		if err != nil {
			t.Fatal(err)
		}
		w.wait(op)
	}
	names := func(list []*api.Instance, err error) string {
		t.Helper()
		if err != nil {
			return err.Error()
		}
		var all []string
		for _, i := range list {
			all = append(all, i.Name[strings.LastIndex(i.Name, "/")+1:])
		}
		return strings.Join(all, " ")
	}
	for _, tt := range []struct{ parent, filter, want string }{
		{parent, "", "a b c"},
		{"projects/sluice-sandbox/locations/-", "", "a b c"},
		{"projects/sluice-sandbox/locations/us-central1-b", "", ""},
		{"projects/other-project/locations/-", "", ""},
		{parent, `labels.name="b"`, "b"},
		{parent, `state=ACTIVE AND labels.name!=b`, "a c"},
	} {
		if got := names(w.ListInstances(w.ctx(), tt.parent, tt.filter)); got != tt.want {
			t.Errorf("list %s %q = %q, want %q", tt.parent, tt.filter, got, tt.want)
		}
	}
	if _, err := w.ListInstances(w.ctx(), parent, "name ~ b"); gcp.Code(err) != 400 {
		t.Errorf("a filter that is not understood: %v", err)
	}
	_, page := w.call("GET", "/v1/"+parent+"/instances?pageSize=2", "")
	if page["nextPageToken"] != "2" || len(page["instances"].([]any)) != 2 {
		t.Errorf("first page: %v", page)
	}
	_, page = w.call("GET", "/v1/"+parent+"/instances?pageSize=2&pageToken=2", "")
	if page["nextPageToken"] != nil || len(page["instances"].([]any)) != 1 {
		t.Errorf("last page: %v", page)
	}

	ops, err := w.ListOperations(w.ctx(), parent, `metadata.target="`+parent+`/instances/b"`)
	if err != nil || len(ops) != 1 || ops[0].Metadata.Verb != "create" {
		t.Errorf("operations of b: %v, %v", ops, err)
	}
	if err := w.DeleteOperation(w.ctx(), ops[0].Name); err != nil {
		t.Error(err)
	}
	if _, err := w.GetOperation(w.ctx(), ops[0].Name); !gcp.IsNotFound(err) {
		t.Errorf("a deleted operation: %v", err)
	}
	zones, err := w.ListLocations(w.ctx(), "projects/sluice-sandbox")
	if err != nil || len(zones) != 4 || zones[0].LocationID != "us-central1-a" || zones[0].Name != parent {
		t.Errorf("locations: %v, %v", zones, err)
	}
}

// TestWire compares bare JSON with what the real service sends and takes (facts, section 1).
func TestWire(t *testing.T) {
	w := newWorld(t)
	// This is the call of the official Go client.
	code, op := w.call("POST", "/v1/"+parent+"/instances?%24alt=json%3Benum-encoding%3Dint&instanceId=scratch&requestId="+uuid.NewString(),
		`{"filesystem":"lfs1","capacityGib":"18000","network":"projects/p1/global/networks/n","perUnitStorageThroughput":"1000"}`)
	name, _ := op["name"].(string)
	meta, _ := op["metadata"].(map[string]any)
	if code != 200 || !strings.HasPrefix(name, parent+"/operations/") || meta["@type"] != "type.googleapis.com/google.cloud.lustre.v1.OperationMetadata" {
		t.Fatalf("create: %d %v", code, op)
	}
	w.wait(&api.Operation{Name: name})
	_, inst := w.call("GET", "/v1/"+scratch+"?%24alt=json%3Benum-encoding%3Dint", "")
	for _, field := range []string{"uid", "createTime", "updateTime"} {
		if inst[field] == "" {
			t.Errorf("no %s", field)
		}
		delete(inst, field)
	}
	want := map[string]any{
		"name": scratch, "filesystem": "lfs1", "capacityGib": "18000", "perUnitStorageThroughput": "1000",
		"network": "projects/p1/global/networks/n", "state": "ACTIVE", "mountPoint": "10.129.0.2@tcp:/lfs1",
	}
	if d := cmp.Diff(want, inst); d != "" {
		t.Errorf("instance (-want +got):\n%s", d)
	}

	w.put("x/ok", "12345")
	w.put("x/bad/", "")
	code, op = w.call("POST", "/v1/"+scratch+":importData?%24alt=json%3Benum-encoding%3Dint",
		`{"gcsPath":{"uri":"gs://corpus/x/"},"lustrePath":{"path":"/"},"name":"`+scratch+`","serviceAccount":"projects/-/serviceAccounts/sa@p.iam.gserviceaccount.com"}`)
	if code != 200 {
		t.Fatalf("import: %d %v", code, op)
	}
	w.wait(&api.Operation{Name: op["name"].(string)})
	_, op = w.call("GET", "/v1/"+op["name"].(string), "")
	meta = op["metadata"].(map[string]any)
	delete(meta, "createTime")
	delete(meta, "endTime")
	delete(op, "name")
	want = map[string]any{
		"done":     true,
		"response": map[string]any{"@type": "type.googleapis.com/google.cloud.lustre.v1.ImportDataResponse"},
		"metadata": map[string]any{
			"@type": "type.googleapis.com/google.cloud.lustre.v1.ImportDataMetadata", "apiVersion": "v1", "target": scratch,
			"operationMetadata": map[string]any{
				"sourceGcsPath": map[string]any{"uri": "gs://corpus/x/"}, "destinationLustrePath": map[string]any{"path": "/"},
				"transferType": "IMPORT",
				"counters": map[string]any{
					"foundObjectsCount": "2", "bytesFoundCount": "5", "objectsCopiedCount": "1", "bytesCopiedCount": "5", "objectsFailedCount": "1",
				},
				"errorSummaries": []any{map[string]any{
					"errorCode": "INVALID_ARGUMENT", "errorCount": "1",
					"errorLogEntries": []any{map[string]any{"uri": "gs://corpus/x/bad/", "errorDetails": []any{"the name ends in a slash, as a directory's"}}},
				}},
			},
		},
	}
	if d := cmp.Diff(want, op); d != "" {
		t.Errorf("import (-want +got):\n%s", d)
	}

	code, answer := w.call("GET", "/v1/"+parent+"/instances/none", "")
	want = map[string]any{"error": map[string]any{"code": 404.0, "status": "NOT_FOUND", "message": `resource "` + parent + `/instances/none" was not found`}}
	if d := cmp.Diff(want, answer); code != 404 || d != "" {
		t.Errorf("error %d (-want +got):\n%s", code, d)
	}
	for _, tt := range []struct {
		method, path, body string
		code               int
	}{
		{"POST", "/v1/" + parent + "/instances?instanceId=a", `{"filesystem":"a","capacityGib":18000,"perUnitStorageThroughput":1000,"network":"` + network + `"}`, 200},
		{"POST", "/v1/" + parent + "/instances?instanceId=b", `{"colour":"red"}`, 400},
		{"POST", "/v1/" + parent + "/instances?instanceId=b", `{`, 400},
		{"POST", "/v1/" + parent + "/instances?instanceId=b", strings.Repeat(" ", 2<<20) + "{}", 400},
		{"PUT", "/v1/" + scratch, "", 404},
		{"GET", "/v1/" + scratch + ":importData", "", 404},
		{"GET", "/v1/projects//locations/us-central1-a/instances", "", 404},
		{"GET", "/v1/" + parent + "/instances/a/b", "", 404},
		{"GET", "/v2/" + parent, "", 404},
		{"GET", "/v1/" + parent, "", 200},
	} {
		if code, answer := w.call(tt.method, tt.path, tt.body); code != tt.code {
			t.Errorf("%s %s: %d %v, want %d", tt.method, tt.path, code, answer, tt.code)
		}
	}
}
