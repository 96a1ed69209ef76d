package lustre_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
)

// allowed are values of fields that do not take any text.
var allowed = map[string]string{
	"Network": "projects/p/global/networks/n", "URI": "gs://b/x/", "Path": "/x", "DefaultSquashMode": "ROOT_SQUASH", "SquashMode": "NO_SQUASH",
	"Mode": "DEFAULT_CACHE", "RequestID": "6ba7b810-9dad-11d1-80b4-00c04fd430c8", "MaintenancePolicy": `{"weeklyMaintenanceWindows":[{"dayOfWeek":"MONDAY","startTime":{"hours":3}}]}`,
}

// output are the fields that the service fills in.
var output = map[string]bool{"State": true, "StateReason": true, "MountPoint": true, "UID": true, "CreateTime": true, "UpdateTime": true}

// fill sets every field of a message.
func fill(v reflect.Value, name string) {
	switch {
	case output[name]:
	case v.Type() == reflect.TypeFor[time.Time]():
		v.Set(reflect.ValueOf(time.Unix(0, 0)))
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), name)
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), v.Type().Field(i).Name)
		}
	case v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.Uint8:
		v.SetBytes([]byte(allowed[name]))
	case v.Kind() == reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0), name)
	case v.Kind() == reflect.Map:
		v.Set(reflect.ValueOf(map[string]string{"k": "v"}))
	case v.Kind() == reflect.String:
		text := allowed[name]
		if text == "" {
			text = "x"
		}
		v.SetString(text)
	case v.Kind() == reflect.Bool:
		v.SetBool(true)
	default:
		v.SetInt(1000)
	}
}

func filled[T any]() *T {
	v := new(T)
	fill(reflect.ValueOf(v).Elem(), "")
	return v
}

// TestConformance makes every call with every field set: the service must know them all.
func TestConformance(t *testing.T) {
	var calls int
	hs := httptest.NewServer(discoverytest.Client(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		calls++
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"name":"`+opName+`","done":true}`)
	}), "lustre"))
	t.Cleanup(hs.Close)
	c, err := lustre.NewClient(t.Context(), option.WithEndpoint(hs.URL), option.WithoutAuthentication())
	if err != nil {
		t.Fatal(err)
	}
	inst := filled[lustre.Instance]()
	inst.Name = name
	in, out := filled[lustre.ImportDataRequest](), filled[lustre.ExportDataRequest]()
	in.Name, out.Name = name, name
	id := allowed["RequestID"]
	ctx := t.Context()
	for what, call := range map[string]func() error{
		"create": func() error {
			_, err := c.CreateInstance(ctx, &lustre.CreateInstanceRequest{Parent: parent, InstanceID: "i1", Instance: inst, RequestID: id})
			return err
		},
		"get":  func() error { _, err := c.GetInstance(ctx, name); return err },
		"list": func() error { _, err := c.ListInstances(ctx, "projects/p/locations/-", "labels.a=b"); return err },
		"update": func() error {
			mask := strings.Split("capacityGib,description,labels,accessRulesOptions.accessRules,maintenancePolicy,placementPolicy", ",")
			_, err := c.UpdateInstance(ctx, &lustre.UpdateInstanceRequest{Instance: inst, UpdateMask: mask, RequestID: id})
			return err
		},
		"delete": func() error {
			_, err := c.DeleteInstance(ctx, &lustre.DeleteInstanceRequest{Name: name, RequestID: id})
			return err
		},
		"import":           func() error { _, err := c.ImportData(ctx, in); return err },
		"export":           func() error { _, err := c.ExportData(ctx, out); return err },
		"get operation":    func() error { _, err := c.GetOperation(ctx, opName); return err },
		"list operations":  func() error { _, err := c.ListOperations(ctx, parent, "done=true"); return err },
		"cancel operation": func() error { return c.CancelOperation(ctx, opName) },
		"delete operation": func() error { return c.DeleteOperation(ctx, opName) },
		"locations":        func() error { _, err := c.ListLocations(ctx, "projects/p"); return err },
	} {
		if err := call(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if calls != 12 {
		t.Errorf("%d calls were made, want 12", calls)
	}
}
