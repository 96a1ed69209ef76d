package compute

import (
	"errors"
	"reflect"
	"testing"

	api "google.golang.org/api/compute/v1"
)

func TestMoves(t *testing.T) {
	states := []string{"", "PROVISIONING", "STAGING", "RUNNING", "REPAIRING", "STOPPING", "TERMINATED"}
	legal := map[[2]string]bool{
		{"", "PROVISIONING"}: true, {"PROVISIONING", "STAGING"}: true, {"PROVISIONING", "STOPPING"}: true,
		{"STAGING", "RUNNING"}: true, {"STAGING", "STOPPING"}: true, {"RUNNING", "STOPPING"}: true,
		{"STOPPING", "TERMINATED"}: true, {"STOPPING", ""}: true,
		{"TERMINATED", "PROVISIONING"}: true, {"TERMINATED", "STOPPING"}: true,
		{"RUNNING", "REPAIRING"}: true, {"REPAIRING", "PROVISIONING"}: true, {"REPAIRING", "STOPPING"}: true,
	}
	for _, from := range states {
		for _, to := range states {
			in := &instance{api: &api.Instance{Status: from}, changed: make(chan struct{})}
			err := in.move(to)
			if want := legal[[2]string{from, to}] || from == to; (err == nil) != want {
				t.Errorf("move %q to %q: %v, want legal %v", from, to, err, want)
			}
			if err != nil && (!errors.Is(err, errMove) || in.api.Status != from) {
				t.Errorf("refused move %q to %q: %v, now %q", from, to, err, in.api.Status)
			}
		}
	}
}

func filterSample() *api.Instance {
	value := "v"
	return &api.Instance{
		Id: 7, Name: "node-1", Status: "RUNNING", Zone: "https://x/zones/us-central1-a",
		CreationTimestamp: "2026-01-02T03:04:05.000-00:00",
		Labels:            map[string]string{"a": "b", "sluice-deployment": "d 1"},
		Scheduling:        &api.Scheduling{ProvisioningModel: "SPOT", Preemptible: true},
		Tags:              &api.Tags{Items: []string{"one", "two"}},
		Metadata:          &api.Metadata{Items: []*api.MetadataItems{{Key: "k", Value: &value}}},
		Disks:             []*api.AttachedDisk{{DiskSizeGb: 10}, {DiskSizeGb: 200}},
	}
}

func TestFilter(t *testing.T) {
	for _, tt := range []struct {
		filter string
		want   bool
	}{
		{"", true},
		{"name=node-1", true},
		{"name = node-1", true},
		{`name="node-1"`, true},
		{"name=node", false},
		{"name=node-*", true},
		{"name!=node-1", false},
		{"name != x", true},
		{"status = RUNNING", true},
		{"status=running", false},
		{"labels.a=b", true},
		{"labels.a=c", false},
		{"labels.zz=b", false},
		{"labels.zz!=b", true},
		{"labels.a:*", true},
		{"labels.zz:*", false},
		{"labels:a", true},
		{"labels:zz", false},
		{`labels.sluice-deployment="d 1"`, true},
		{`labels.sluice-deployment='d 1'`, true},
		{"(status = RUNNING) AND (labels.a=b)", true},
		{"(status = RUNNING) (labels.a=c)", false},
		{"status=RUNNING labels.a=b", true},
		{"status=STOPPING OR labels.a=b", true},
		{"(status=STOPPING) OR (status=STAGING)", false},
		{"name=x AND status=RUNNING OR labels.a=b", false}, // OR binds tighter
		{"name=node-1 AND ((labels.a=x) OR (labels.a=b))", true},
		{"NOT status=STOPPING", true},
		{"NOT (status=RUNNING)", false},
		{"-status=STOPPING", true},
		{"name eq node-.", true},
		{"name eq node", false},
		{`name eq "node-[0-9]+"`, true},
		{`(name eq '.*-1') (status ne STOPPING)`, true},
		{"name ne node-.", false},
		{"tags.items=two", true},
		{"tags.items:one", true},
		{"tags.items:three", false},
		{"id=7", true},
		{"id>6", true},
		{"id>10", false},
		{"disks.diskSizeGb>=200", true},
		{"disks.diskSizeGb<10", false},
		{"scheduling.preemptible=true", true},
		{"canIpForward=false", true},
		{"canIpForward!=false", false},
		{"creationTimestamp>2026-01-01T00:00:00", true},
		{"zone=https://x/zones/us-central1-a", true},
		{"zone eq .*/us-central1-a", true},
		{"metadata.items.key=k", true},
	} {
		match, err := parseFilter(tt.filter, reflect.TypeFor[api.Instance]())
		if err != nil {
			t.Errorf("%s: %v", tt.filter, err)
			continue
		}
		if got := match(filterSample()); got != tt.want {
			t.Errorf("%s: got %v, want %v", tt.filter, got, tt.want)
		}
	}
	for _, bad := range []string{
		"name", "name=", "=x", "name x", "(name=x", "name=x)", "nmae=x", "labels.a.b=c", "name.x=y", "name='x", "AND", "name=x OR", "NOT",
		"name ! x", "name eq '('", "()", `name="a`, "status=a AND", "name==x",
	} {
		if _, err := parseFilter(bad, reflect.TypeFor[api.Instance]()); err == nil {
			t.Errorf("%s: no error", bad)
		}
	}
}

func FuzzFilter(f *testing.F) {
	for _, s := range []string{"name=x", "(a) AND (b)", "labels.a:* OR NOT name eq 'x'", "-name=x", "disks.diskSizeGb>=1", "((((", "\"", "name=\xff"} {
		f.Add(s)
	}
	sample := filterSample()
	f.Fuzz(func(t *testing.T, text string) {
		match, err := parseFilter(text, reflect.TypeFor[api.Instance]())
		if err == nil {
			match(sample)
		}
	})
}

func FuzzDecode(f *testing.F) {
	for _, s := range []string{`{"name":"x","id":"7"}`, `{"disks":[{"diskSizeGb":10}]}`, `{"disks":[null]}`, `{"scheduling":{"automaticRestart":true}}`, `[`, `{"labels":{"a":1}}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		in := new(api.Instance)
		if decode(body, in) != nil {
			return
		}
		for _, d := range in.Disks {
			if d == nil {
				t.Error("a nil disk came through")
			}
		}
	})
}

func TestDecode(t *testing.T) {
	for _, text := range []string{`{"id":"7","disks":[{"diskSizeGb":"10","index":"3"}]}`, `{"id":7,"disks":[{"diskSizeGb":10,"index":3}],"hostname":null}`} {
		in := new(api.Instance)
		if err := decode([]byte(text), in); err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if in.Id != 7 || in.Disks[0].DiskSizeGb != 10 || in.Disks[0].Index != 3 {
			t.Errorf("%s: got %+v", text, in)
		}
	}
}
