package faults

import (
	"errors"
	"flag"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/internal/clock"
)

var update = flag.Bool("update", false, "rewrite docs/faults.md")

func set(t *testing.T, s *Set, key, value string) {
	t.Helper()
	if err := s.Set(key, value); err != nil {
		t.Fatal(err)
	}
}

func TestSetAndClear(t *testing.T) {
	var s Set
	for key, value := range map[string]string{
		LustreImportCorrupt:    "gs://corpus/a b/c,count=1.txt",
		LustreTransferRate:     "1048576",
		LustreTransferParallel: "on",
		ComputeInsertDelay:     "1.5s",
	} {
		set(t, &s, key, value)
	}
	if got, want := s.Int(LustreTransferRate), int64(1048576); got != want {
		t.Errorf("Int = %d, want %d", got, want)
	}
	if got, want := s.Duration(ComputeInsertDelay), 1500*time.Millisecond; got != want {
		t.Errorf("Duration = %v, want %v", got, want)
	}
	if !s.On(LustreTransferParallel) {
		t.Error("On = false, want true")
	}
	changed := s.Changed()
	if err := s.Clear(LustreTransferParallel); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	default:
		t.Error("Clear is no change")
	}
	got := map[string]string{}
	for _, f := range s.List().Faults {
		got[f.Key] = f.Value
	}
	want := map[string]string{
		LustreImportCorrupt: "gs://corpus/a b/c,count=1.txt",
		LustreTransferRate:  "1048576",
		ComputeInsertDelay:  "1.5s",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("List (-want +got):\n%s", diff)
	}
	s.ClearAll()
	if got := s.List().Faults; len(got) != 0 {
		t.Errorf("after ClearAll: %v", got)
	}
}

func TestNilSetIsEmpty(t *testing.T) {
	var s *Set
	if _, on := s.Get(LustreTransferRate); on {
		t.Error("a nil set has a fault")
	}
	if _, ok := s.Take(APIStatus, "compute", "instances.get"); ok {
		t.Error("a nil set has a fault to do")
	}
	if got := s.Int(LustreTransferRate); got != 0 {
		t.Errorf("Int = %d, want 0", got)
	}
	if got := s.Clock(clock.System).Now(); time.Since(got) > time.Minute {
		t.Errorf("its clock says %v", got)
	}
}

func TestRefusals(t *testing.T) {
	for _, tc := range []struct {
		name, key, value string
		want             error
		text             string
	}{
		{"unknown key names the nearest", "lustre.import.corupt", "gs://b/o", ErrUnknownKey, "did you mean lustre.import.corrupt?"},
		{"empty key", "", "1", ErrUnknownKey, "did you mean"},
		{"very long key", strings.Repeat("x", 1<<20), "1", ErrUnknownKey, "did you mean"},
		{"key with a line break", "api.compute.latency\n", "1s", ErrUnknownKey, "did you mean"},
		{"unknown service", "api.comput.latency", "1s", ErrUnknownKey, "compute, iam, lustre, metadata, monitoring or storage"},
		{"service without operations", "operation.storage.hang", "after", ErrUnknownKey, "SERVICE is compute or lustre"},
		{"unknown method", "api.lustre.instances.import.latency", "1s", ErrUnknownKey, "instances.importData"},
		{"unknown metric", "compute.quota.CPU", "1", ErrUnknownKey, "CPUS, GPUS_ALL_REGIONS"},
		{"not a gs URL", LustreImportCorrupt, "/b/o", ErrBadValue, "want gs://BUCKET/OBJECT"},
		{"a bucket only", LustreImportCorrupt, "gs://b/", ErrBadValue, "want gs://BUCKET/OBJECT"},
		{"rate zero", LustreTransferRate, "0", ErrBadValue, "above 0"},
		{"switch off", LustreTransferParallel, "off", ErrBadValue, "want on"},
		{"negative delay", ComputeInsertDelay, "-1s", ErrBadValue, "negative"},
		{"backward range", "api.*.latency", "2s-1s", ErrBadValue, "shorter"},
		{"status", "api.compute.status", "200", ErrBadValue, "want 403, 408, 429"},
		{"count zero", "api.compute.status", "503,count=0", ErrBadValue, "above 0"},
		{"probability", "api.compute.status", "503,p=1.5", ErrBadValue, "up to 1"},
		{"probability NaN", "api.compute.status", "503,p=NaN", ErrBadValue, "up to 1"},
		{"time", "api.compute.status", "503,for=-1s", ErrBadValue, "want a duration"},
		{"modifier", "api.compute.status", "503,times=3", ErrBadValue, "count, for, p or skip"},
		{"modifier of another kind", "clock.skew", "5s,count=3", ErrBadValue, "what may follow the value is for"},
		{"operation error", "operation.compute.error", "quota", ErrBadValue, "QUOTA_EXCEEDED/403"},
		{"seed", "seed", "x", ErrBadValue, "whole number"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var s Set
			err := s.Set(tc.key, tc.value)
			if !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("Set = %v, want %v with %q", err, tc.want, tc.text)
			}
			if len(s.List().Faults) != 0 {
				t.Error("a refused fault was set")
			}
		})
	}
}

// Every row's example is one of that row, and of no other.
func TestTable(t *testing.T) {
	for _, k := range Keys() {
		t.Run(k.Name, func(t *testing.T) {
			key, value, _ := strings.Cut(k.Example, "=")
			row, _, err := lookup(key)
			if err != nil {
				t.Fatal(err)
			}
			if row.Name != k.Name {
				t.Errorf("%s is of the row %s", key, row.Name)
			}
			for _, other := range Keys() {
				if other.Name != k.Name && patterns[other.Name].MatchString(key) {
					t.Errorf("%s is of the row %s too", key, other.Name)
				}
			}
			var s Set
			if err := s.Set(key, value); err != nil {
				t.Error(err)
			}
			if !strings.HasSuffix(k.Effect, ".") || strings.Contains(k.Effect, "|") {
				t.Errorf("effect %q is no sentence of a table", k.Effect)
			}
		})
	}
}

func TestTheDocumentationIsTheTable(t *testing.T) {
	const page = "../../docs/faults.md"
	if *update {
		if err := os.WriteFile(page, []byte(Markdown()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Markdown(), string(got)); diff != "" {
		t.Errorf("%s is out of date: go test ./sandbox/faults -update (-want +got):\n%s", page, diff)
	}
}

func TestTakeCountsAndIsNoted(t *testing.T) {
	var s Set
	var told []Entry
	s.Journal = func(e Entry) { told = append(told, e) }
	set(t, &s, "api.compute.status", "503,count=2,skip=1")
	take := func(method string) bool {
		h, ok := s.Take(APIStatus, "compute", method)
		if ok {
			if h.Value != "503" {
				t.Errorf("value %q", h.Value)
			}
			h.Note("GET "+method, "answered 503")
		}
		return ok
	}
	got := []bool{take("instances.get"), take("instances.get"), take("instances.list"), take("instances.get")}
	if diff := cmp.Diff([]bool{false, true, true, false}, got); diff != "" {
		t.Errorf("skip 1, then 2 times (-want +got):\n%s", diff)
	}
	if _, ok := s.Take(APIStatus, "lustre", "instances.get"); ok {
		t.Error("another service was hit")
	}
	f := s.List().Faults[0]
	if f.Hits != 2 || !f.Spent {
		t.Errorf("listed as %+v, want spent after 2 hits", f)
	}
	l := s.Log()
	if diff := cmp.Diff(l.Entries, told); diff != "" {
		t.Errorf("the journal and what it told differ:\n%s", diff)
	}
	var lines []string
	for i, e := range l.Entries {
		lines = append(lines, e.Fault+"="+e.Value+" "+e.Request+" "+e.What)
		if at, err := time.Parse(TimeFormat, e.At); err != nil || time.Since(at) > time.Minute || e.Seq != int64(i+1) {
			t.Errorf("entry %+v", e)
		}
	}
	want := []string{
		"api.compute.status=503,count=2,skip=1  set",
		"api.compute.status=503,count=2,skip=1 GET instances.get answered 503",
		"api.compute.status=503,count=2,skip=1 GET instances.list answered 503",
	}
	if diff := cmp.Diff(want, lines); diff != "" {
		t.Errorf("journal (-want +got):\n%s", diff)
	}
}

func TestTheMostPreciseActs(t *testing.T) {
	var s Set
	set(t, &s, "api.*.status", "500")
	set(t, &s, "api.compute.instances.*.status", "429,count=1")
	set(t, &s, "api.compute.status", "503")
	for i, want := range []string{"429", "503"} {
		if h, _ := s.Take(APIStatus, "compute", "instances.insert"); h.Value != want {
			t.Errorf("take %d: %q, want %q", i, h.Value, want)
		}
	}
	if h, _ := s.Take(APIStatus, "storage", "objects.get"); h.Value != "500" {
		t.Errorf("storage: %q, want 500", h.Value)
	}
	set(t, &s, "compute.quota.CPUS", "8")
	if got := s.Int(ComputeQuota, "CPUS"); got != 8 {
		t.Errorf("quota %d, want 8", got)
	}
	if _, on := s.Get(ComputeQuota, "INSTANCES"); on {
		t.Error("another metric has a quota")
	}
}

func TestOverAfterItsTime(t *testing.T) {
	var s Set
	set(t, &s, "operation.compute.hang", "before,for=20ms,count=1")
	h, ok := s.Take(OperationHang, "compute", "instances.insert")
	if !ok {
		t.Fatal("no hit")
	}
	select {
	case <-h.Gone:
	case <-time.After(10 * time.Second):
		t.Fatal("it is not over")
	}
	if got := s.List().Faults; len(got) != 0 {
		t.Errorf("still set: %v", got)
	}
	if l := s.Log().Entries; l[len(l)-1].What != "over" {
		t.Errorf("the journal ends with %+v", l[len(l)-1])
	}
}

// The same seed gives the same faults; another one gives others.
func TestSeed(t *testing.T) {
	run := func(seed string) (s string) {
		var f Set
		set(t, &f, "api.compute.latency", "0s-1s,p=0.5")
		set(t, &f, Seed, seed)
		set(t, &f, "api.storage.latency", "0s-1s,p=0.5")
		for range 40 {
			for _, service := range []string{"compute", "storage"} {
				if h, ok := f.Take(APILatency, service, "other"); ok {
					s += h.Latency().String() + " "
				} else {
					s += "- "
				}
			}
		}
		return s
	}
	a, b, c := run("1"), run("1"), run("2")
	if a != b {
		t.Errorf("seed 1 gave\n%s\nand then\n%s", a, b)
	}
	if a == c {
		t.Error("seeds 1 and 2 give the same")
	}
	if n := strings.Count(a, "-"); n < 15 || n > 65 {
		t.Errorf("p=0.5 missed %d of 80", n)
	}
}

func TestClock(t *testing.T) {
	var s Set
	c := s.Clock(clock.System)
	set(t, &s, ClockSkew, "-1h")
	if d := time.Since(c.Now()); d < time.Hour || d > 61*time.Minute {
		t.Errorf("the clock is %v behind, want 1h", d)
	}
}

func TestMethodOf(t *testing.T) {
	for _, tt := range []struct{ service, method, path, want string }{
		{"compute", "GET", "/compute/v1/projects/p", "projects.get"},
		{"compute", "POST", "/compute/v1/projects/p/setCommonInstanceMetadata", "projects.setCommonInstanceMetadata"},
		{"compute", "GET", "/compute/v1/projects/p/zones", "zones.list"},
		{"compute", "GET", "/compute/v1/projects/p/zones/z", "zones.get"},
		{"compute", "GET", "/compute/v1/projects/p/regions/r", "regions.get"},
		{"compute", "POST", "/compute/v1/projects/p/zones/z/instances", "instances.insert"},
		{"compute", "POST", "/compute/v1/projects/p/zones/z/instances/bulkInsert", "instances.bulkInsert"},
		{"compute", "POST", "/compute/v1/projects/p/regions/r/instances/bulkInsert", "regionInstances.bulkInsert"},
		{"compute", "GET", "/compute/v1/projects/p/zones/z/instances", "instances.list"},
		{"compute", "GET", "/compute/v1/projects/p/aggregated/instances", "instances.aggregatedList"},
		{"compute", "GET", "/compute/v1/projects/p/zones/z/instances/n", "instances.get"},
		{"compute", "DELETE", "/compute/v1/projects/p/zones/z/instances/n", "instances.delete"},
		{"compute", "POST", "/compute/v1/projects/p/zones/z/instances/n/stop", "instances.stop"},
		{"compute", "GET", "/compute/v1/projects/p/zones/z/instances/n/serialPort", "instances.getSerialPortOutput"},
		{"compute", "POST", "/compute/v1/projects/p/zones/z/operations/o/wait", "zoneOperations.wait"},
		{"compute", "GET", "/compute/v1/projects/p/global/operations/o", "globalOperations.get"},
		{"compute", "GET", "/compute/v1/projects/p/regions/r/operations", "regionOperations.list"},
		{"compute", "GET", "/compute/v1/projects/p/global/images/family/f", "images.getFromFamily"},
		{"compute", "GET", "/compute/v1/projects/p/regions/r/subnetworks/s", "subnetworks.get"},
		{"compute", "POST", "/compute/v1/projects/p/regions/r/instanceTemplates", "regionInstanceTemplates.insert"},
		{"compute", "GET", "/compute/v1/projects/p/zones/z//", "other"},
		{"compute", "GET", "/compute/v1/", "other"},
		{"compute", "BREW", "/compute/v1/projects/p/zones/z/instances", "other"},
		{"lustre", "GET", "/v1/projects/p/locations", "locations.list"},
		{"lustre", "POST", "/v1/projects/p/locations/z/instances", "instances.create"},
		{"lustre", "PATCH", "/v1/projects/p/locations/z/instances/i", "instances.patch"},
		{"lustre", "POST", "/v1/projects/p/locations/z/instances/i:importData", "instances.importData"},
		{"lustre", "GET", "/v1/projects/p/locations/z/operations/o", "operations.get"},
		{"lustre", "POST", "/v1/projects/p/locations/z/operations/o:cancel", "operations.cancel"},
		{"lustre", "GET", "/v1/projects", "other"},
		{"storage", "POST", "/storage/v1/b", "buckets.insert"},
		{"storage", "GET", "/storage/v1/b/x", "buckets.get"},
		{"storage", "GET", "/storage/v1/b/x/iam", "buckets.getIamPolicy"},
		{"storage", "GET", "/storage/v1/b/x/iam/testPermissions", "buckets.testIamPermissions"},
		{"storage", "GET", "/storage/v1/b/x/o", "objects.list"},
		{"storage", "GET", "/storage/v1/b/x/o/a%2Fb", "objects.get"},
		{"storage", "POST", "/storage/v1/b/x/o/a%2Fb/rewriteTo/b/y/o/c", "objects.rewrite"},
		{"storage", "POST", "/upload/storage/v1/b/x/o", "objects.insert"},
		{"storage", "PUT", "/resumable/upload/storage/v1/b/x/o", "objects.insert"},
		{"storage", "GET", "/download/storage/v1/b/x/o/a", "objects.get"},
		{"storage", "GET", "/bucket/an/object", "objects.get"},
		{"storage", "GET", "/storage/v1/projects/p/serviceAccount", "serviceAccount.get"},
		{"storage", "DELETE", "/bucket/an/object", "other"},
		{"storage", "GET", "/", "other"},
		{"iam", "POST", "/v1/projects/-/serviceAccounts/e@x:generateAccessToken", "generateAccessToken"},
		{"iam", "POST", "/v1/projects/p/serviceAccounts", "serviceAccounts.create"},
		{"iam", "GET", "/v1/projects/p/roles/r", "roles.get"},
		{"iam", "POST", "/v1/projects/p:setIamPolicy", "setIamPolicy"},
		{"iam", "POST", "/v1/token", "token"},
		{"iam", "GET", "/oauth2/v3/certs", "certs"},
		{"metadata", "GET", "/computeMetadata/v1/instance/service-accounts/default/token", "token"},
		{"metadata", "GET", "/computeMetadata/v1/instance/id", "get"},
	} {
		r, err := http.NewRequest(tt.method, "http://x"+tt.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := MethodOf(tt.service, r); got != tt.want {
			t.Errorf("%s %s: %s, want %s", tt.method, tt.path, got, tt.want)
		}
		if !slices.Contains(Methods(tt.service), tt.want) {
			t.Errorf("%s is no method of %s", tt.want, tt.service)
		}
	}
}

func FuzzSet(f *testing.F) {
	for _, k := range Keys() {
		key, value, _ := strings.Cut(k.Example, "=")
		f.Add(key, value)
	}
	f.Add("api.*.*.latency", "1s-2s,count=3,for=1h,p=0.1,skip=2")
	f.Fuzz(func(t *testing.T, key, value string) {
		var s Set
		err := s.Set(key, value)
		switch {
		case err == nil && key != Seed && len(s.List().Faults) != 1:
			t.Errorf("%q=%q was set and is not listed", key, value)
		case err != nil && !errors.Is(err, ErrBadValue) && !errors.Is(err, ErrUnknownKey):
			t.Errorf("%q=%q: %v", key, value, err)
		}
		for _, k := range Keys() {
			names := make([]string, strings.Count(patterns[k.Name].String(), "([A-Za-z"))
			for i := range names {
				names[i] = "compute"
			}
			if h, ok := s.Take(k.Name, names...); ok {
				if d := h.Latency(); d < 0 {
					t.Errorf("%q=%q: latency %v", key, value, d)
				}
				h.OperationError()
			}
		}
		s.ClearAll()
	})
}

func FuzzMethodOf(f *testing.F) {
	f.Add("GET", "/compute/v1/projects/p/zones/z/instances/n/stop")
	f.Add("POST", "/v1/projects/p/locations/z/instances/i:importData")
	f.Add("PUT", "/storage/v1/b/x/o/a%2Fb/rewriteTo/b/y/o/c")
	f.Add("GET", "/compute/v1/projects/p/regions/r//")
	f.Fuzz(func(t *testing.T, method, path string) {
		r, err := http.NewRequest("GET", "http://x/"+path, nil)
		if err != nil {
			return
		}
		r.Method = method
		for _, s := range Services() {
			if got := MethodOf(s, r); !slices.Contains(Methods(s), got) {
				t.Errorf("%s %s %s: %q is no method", s, method, path, got)
			}
		}
	})
}
