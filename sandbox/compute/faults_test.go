package compute_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	api "google.golang.org/api/compute/v1"

	"github.com/sluicehpc/sluice/sandbox/compute"
)

func (w *world) fault(key, value string) {
	w.Helper()
	if err := w.faults.Set(key, value); err != nil {
		w.Fatal(err)
	}
}

// systemOperations are the types of what the service did by itself to an instance, sorted: several may be of one millisecond.
func (w *world) systemOperations(name string) []string {
	w.Helper()
	list, err := w.client.ZoneOperations.List(project, zone).Filter("user=system").Do()
	if err != nil {
		w.Fatal(err)
	}
	var types []string
	for _, op := range list.Items {
		if strings.HasSuffix(op.TargetLink, "/"+name) {
			if op.Status != "DONE" || op.StatusMessage == "" {
				w.Errorf("operation %+v", op)
			}
			types = append(types, op.OperationType)
		}
	}
	slices.Sort(types)
	return types
}

func (w *world) bulk(names ...string) *api.BulkInsertInstanceResource {
	per := map[string]api.BulkInsertInstanceResourcePerInstanceProperties{}
	for _, n := range names {
		per[n] = api.BulkInsertInstanceResourcePerInstanceProperties{}
	}
	return &api.BulkInsertInstanceResource{Count: int64(len(names)), PerInstanceProperties: per, InstanceProperties: properties()}
}

func (w *world) names() []string {
	names := []string{}
	for _, in := range w.server.Instances() {
		names = append(names, in.Name)
	}
	return names
}

func TestOperationsThatFail(t *testing.T) {
	for _, tt := range []struct {
		value, code string
		status      int64
	}{
		{"QUOTA_EXCEEDED/403", "QUOTA_EXCEEDED", 403},
		{"ZONE_RESOURCE_POOL_EXHAUSTED", "ZONE_RESOURCE_POOL_EXHAUSTED", 0},
		{"/503", "", 503},
	} {
		check := func(t *testing.T, op *api.Operation) {
			t.Helper()
			code := ""
			if op.Error != nil {
				code = op.Error.Errors[0].Code
			}
			if code != tt.code || op.HttpErrorStatusCode != tt.status {
				t.Errorf("code %q, status %d; want %q, %d", code, op.HttpErrorStatusCode, tt.code, tt.status)
			}
		}
		t.Run(tt.value, func(t *testing.T) {
			w := newWorld(t, nil)
			w.fault("operation.compute.error", tt.value+",count=1")
			check(t, w.wait(w.begun(w.client.Instances.Insert(project, zone, body("n-1")).Do())))
			w.fault("operation.compute.instances.bulkInsert.error", tt.value+",count=1")
			check(t, w.wait(w.begun(w.client.Instances.BulkInsert(project, zone, w.bulk("n-1", "n-2")).Do())))
			if got := w.names(); len(got) != 0 || w.vms.count() != 0 {
				t.Errorf("left behind: %v and %d machines", got, w.vms.count())
			}
			w.done(w.client.Instances.BulkInsert(project, zone, w.bulk("n-1", "n-2")).Do())
			w.fault("operation.compute.instances.delete.error", tt.value+",count=1")
			check(t, w.wait(w.begun(w.client.Instances.Delete(project, zone, "n-1").Do())))
			if got := w.vms.count(); got != 2 {
				t.Errorf("%d machines run, want 2", got)
			}
			w.done(w.client.Instances.Delete(project, zone, "n-1").Do())
			w.done(w.client.Instances.Stop(project, zone, "n-2").Do())
			w.fault("operation.compute.instances.start.error", tt.value+",count=1")
			check(t, w.wait(w.begun(w.client.Instances.Start(project, zone, "n-2").Do())))
			if got := w.status("n-2"); got != "TERMINATED" {
				t.Errorf("status %s after a start that failed", got)
			}
		})
	}
}

// A bulkInsert of which one VM fails: with minCount of all, nothing stays.
func TestOneVMOfABulkInsertFails(t *testing.T) {
	w := newWorld(t, nil)
	w.fault("operation.compute.instances.insert.error", "INTERNAL_ERROR,skip=1,count=1")
	op := w.wait(w.begun(w.client.Instances.BulkInsert(project, zone, w.bulk("n-1", "n-2", "n-3")).Do()))
	if op.Error == nil || op.Error.Errors[0].Code != "INTERNAL_ERROR" {
		t.Errorf("operation %+v", op)
	}
	if got := w.names(); len(got) != 0 || w.vms.count() != 0 {
		t.Errorf("left behind: %v and %d machines", got, w.vms.count())
	}
}

func TestBulkInsertThatHalfSucceeds(t *testing.T) {
	w := newWorld(t, nil)
	w.fault("operation.compute.bulkInsert.partial", "1")
	part := w.bulk("n-1", "n-2", "n-3")
	part.MinCount = 1
	w.done(w.client.Instances.BulkInsert(project, zone, part).Do())
	if diff := cmp.Diff([]string{"n-1"}, w.names()); diff != "" {
		t.Errorf("instances (-want +got):\n%s", diff)
	}
	w.fault("operation.compute.bulkInsert.partial", "2")
	w.fault("operation.compute.bulkInsert.leftover", "1")
	op := w.wait(w.begun(w.client.Instances.BulkInsert(project, zone, w.bulk("m-1", "m-2", "m-3")).Do()))
	if op.Error == nil || op.Error.Errors[0].Code != "ZONE_RESOURCE_POOL_EXHAUSTED" {
		t.Errorf("operation %+v", op)
	}
	if diff := cmp.Diff([]string{"m-1", "n-1"}, w.names()); diff != "" {
		t.Errorf("instances (-want +got):\n%s", diff)
	}
}

func TestOperationsThatHang(t *testing.T) {
	for _, tt := range []struct {
		when     string
		machines int
	}{{"before", 0}, {"after", 1}} {
		t.Run(tt.when, func(t *testing.T) {
			w := newWorld(t, nil)
			const key = "operation.compute.instances.insert.hang"
			w.fault(key, tt.when+",count=1")
			op := w.begun(w.client.Instances.Insert(project, zone, body("n-1")).Do())
			w.eventually("it hangs", func() bool {
				l := w.faults.Log().Entries
				return strings.Contains(l[len(l)-1].What, "hangs")
			})
			now, err := w.client.ZoneOperations.Get(project, zone, op.Name).Do()
			if err != nil || now.Status != "RUNNING" || w.vms.count() != tt.machines {
				t.Errorf("operation %+v, %v; %d machines, want %d", now, err, w.vms.count(), tt.machines)
			}
			if err := w.faults.Clear(key); err != nil {
				t.Fatal(err)
			}
			w.done(op, nil)
			if got := w.status("n-1"); got != "RUNNING" {
				t.Errorf("status %s", got)
			}
		})
	}
	t.Run("deleted meanwhile", func(t *testing.T) {
		w := newWorld(t, nil)
		w.fault("operation.compute.instances.insert.hang", "before")
		op := w.begun(w.client.Instances.Insert(project, zone, body("n-1")).Do())
		w.done(w.client.Instances.Delete(project, zone, "n-1").Do())
		w.faults.ClearAll()
		if end := w.wait(op); end.Error == nil {
			t.Errorf("the insert succeeded: %+v", end)
		}
		if w.vms.count() != 0 {
			t.Error("the machine runs")
		}
	})
}

func TestStockout(t *testing.T) {
	w := newWorld(t, nil)
	w.fault("compute.stockout."+zone+".n2-standard-2", "details,count=2")
	for range 2 {
		op := w.wait(w.begun(w.client.Instances.Insert(project, zone, body("n-1")).Do()))
		if op.Error == nil || op.Error.Errors[0].Code != "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS" || op.HttpErrorStatusCode != 503 {
			t.Errorf("operation %+v", op)
		}
	}
	if got := w.names(); len(got) != 0 {
		t.Errorf("left behind: %v", got)
	}
	w.done(w.client.Instances.Insert(project, zone, body("n-1")).Do())
	w.done(w.client.Instances.Stop(project, zone, "n-1").Do())
	w.fault("compute.stockout.*", "on")
	op := w.wait(w.begun(w.client.Instances.Start(project, zone, "n-1").Do()))
	if op.Error == nil || w.status("n-1") != "TERMINATED" {
		t.Errorf("start without room: %+v, status %s", op, w.status("n-1"))
	}
}

func TestQuota(t *testing.T) {
	w := newWorld(t, nil)
	w.fault("compute.quota.CPUS", "4")
	w.fault("compute.quota.PREEMPTIBLE_CPUS", "0")
	w.done(w.client.Instances.BulkInsert(project, zone, w.bulk("n-1", "n-2")).Do())
	refused := func(what string, op *api.Operation) {
		t.Helper()
		if op.Error == nil || op.Error.Errors[0].Code != "QUOTA_EXCEEDED" || op.HttpErrorStatusCode != 403 {
			t.Errorf("%s: operation %+v", what, op)
		}
	}
	refused("a third", w.wait(w.begun(w.client.Instances.Insert(project, zone, body("n-3")).Do())))
	spot := body("s-1")
	spot.Scheduling = &api.Scheduling{ProvisioningModel: "SPOT"}
	refused("a Spot VM", w.wait(w.begun(w.client.Instances.Insert(project, zone, spot).Do())))
	refused("two more", w.wait(w.begun(w.client.Instances.BulkInsert(project, zone, w.bulk("n-3", "n-4")).Do())))
	w.done(w.client.Instances.Stop(project, zone, "n-1").Do())
	w.done(w.client.Instances.Insert(project, zone, body("n-3")).Do())
	if diff := cmp.Diff([]string{"n-1", "n-2", "n-3"}, w.names()); diff != "" {
		t.Errorf("instances (-want +got):\n%s", diff)
	}
}

func (w *world) view(name string) compute.View {
	w.Helper()
	v, ok := w.server.ByAddress(w.server.Addresses()[name])
	if !ok {
		w.Fatalf("%s has no address", name)
	}
	return v
}

func TestPreemption(t *testing.T) {
	for _, action := range []string{"STOP", "DELETE"} {
		t.Run(action, func(t *testing.T) {
			w := newWorld(t, nil)
			pressed, release := make(chan time.Duration), make(chan bool)
			vm := body("n-1")
			vm.Scheduling = &api.Scheduling{ProvisioningModel: "SPOT", InstanceTerminationAction: action}
			w.fault("compute.instance.n-*.preempt", "on") // before it runs
			w.vms.stop = func(_ string, grace time.Duration) { pressed <- grace; <-release }
			w.done(w.client.Instances.Insert(project, zone, vm).Do())
			if got := <-pressed; got != 30*time.Second {
				t.Errorf("it has %v to shut down, want 30s", got)
			}
			if v := w.view("n-1"); !v.Preempted || v.Instance.Status != "STOPPING" {
				t.Errorf("while it shuts down: preempted %v, status %s", v.Preempted, v.Instance.Status)
			}
			w.vms.stop = nil
			release <- true
			want := map[string]string{"STOP": "TERMINATED", "DELETE": ""}[action]
			w.eventually("it is "+want, func() bool { return w.status("n-1") == want })
			if diff := cmp.Diff([]string{"compute.instances.preempted"}, w.systemOperations("n-1")); diff != "" {
				t.Errorf("operations (-want +got):\n%s", diff)
			}
			if action == "DELETE" {
				if len(w.server.Addresses()) != 0 {
					t.Error("its address is not free")
				}
				w.done(w.client.Instances.Insert(project, zone, vm).Do())
			} else {
				w.done(w.client.Instances.Start(project, zone, "n-1").Do())
			}
			if v := w.view("n-1"); v.Preempted || v.Instance.Status != "RUNNING" {
				t.Errorf("started again: preempted %v, status %s; the fault is once", v.Preempted, v.Instance.Status)
			}
		})
	}
}

// The metadata server tells it before the power button is pressed, when the instance asks for that.
func TestPreemptionNotice(t *testing.T) {
	w := newWorld(t, nil)
	vm := body("n-1")
	vm.Scheduling = &api.Scheduling{ProvisioningModel: "SPOT", PreemptionNoticeDuration: &api.Duration{Seconds: 3600}}
	w.done(w.client.Instances.Insert(project, zone, vm).Do())
	w.fault("compute.instance.n-1.preempt", "1s")
	w.eventually("it is told", func() bool { return w.view("n-1").Preempted })
	if got := w.status("n-1"); got != "RUNNING" {
		t.Errorf("status %s during the notice", got)
	}
	w.done(w.client.Instances.Delete(project, zone, "n-1").Do())
	if diff := cmp.Diff([]string{"compute.instances.preempted"}, w.systemOperations("n-1")); diff != "" {
		t.Errorf("operations (-want +got):\n%s", diff)
	}
}

func TestHostError(t *testing.T) {
	for _, again := range []bool{true, false} {
		t.Run(fmt.Sprintf("automaticRestart %v", again), func(t *testing.T) {
			w := newWorld(t, nil)
			graces := make(chan time.Duration, 10)
			w.vms.stop = func(_ string, grace time.Duration) { graces <- grace }
			vm := body("n-1")
			vm.Scheduling = &api.Scheduling{AutomaticRestart: &again}
			w.done(w.client.Instances.Insert(project, zone, vm).Do())
			w.fault("compute.instance.n-1.host-error", "on")
			want, operations := "TERMINATED", []string{"compute.instances.hostError"}
			if again {
				want, operations = "RUNNING", []string{"compute.instances.automaticRestart", "compute.instances.hostError"}
			}
			w.eventually("it is "+want, func() bool {
				return w.status("n-1") == want && len(w.systemOperations("n-1")) == len(operations)
			})
			if got := <-graces; got != 0 {
				t.Errorf("it had %v to shut down", got)
			}
			if diff := cmp.Diff(operations, w.systemOperations("n-1")); diff != "" {
				t.Errorf("operations (-want +got):\n%s", diff)
			}
			if m, ok := w.vms.machine("n-1"); again && (!ok || m.NewDisk) {
				t.Errorf("machine %+v, %v: want it on its old disk", m, ok)
			}
		})
	}
}

func TestMaintenance(t *testing.T) {
	for _, tt := range []struct {
		policy string
		want   []string
	}{
		{"MIGRATE", []string{"compute.instances.migrateOnHostMaintenance"}},
		{"TERMINATE", []string{"compute.instances.automaticRestart", "compute.instances.terminateOnHostMaintenance"}},
	} {
		t.Run(tt.policy, func(t *testing.T) {
			w := newWorld(t, nil)
			vm := body("n-1")
			vm.Scheduling = &api.Scheduling{OnHostMaintenance: tt.policy}
			w.done(w.client.Instances.Insert(project, zone, vm).Do())
			w.fault("compute.instance.n-1.maintenance", "1h")
			w.eventually("it is told", func() bool { return w.view("n-1").MaintenanceEvent == tt.policy+"_ON_HOST_MAINTENANCE" })
			v := w.view("n-1")
			at, err := time.Parse(time.RFC3339, v.Upcoming.WindowStartTime)
			if d := time.Until(at); err != nil || d < 59*time.Minute || d > 61*time.Minute {
				t.Errorf("maintenance in %v, want 1h; %v", d, err)
			}
			if up := v.Instance.ResourceStatus.UpcomingMaintenance; up == nil || up.MaintenanceStatus != "PENDING" {
				t.Errorf("the API shows %+v", up)
			}
			w.done(w.client.Instances.Delete(project, zone, "n-1").Do())

			w.done(w.client.Instances.Insert(project, zone, vm).Do())
			w.fault("compute.instance.n-1.maintenance", "0s")
			w.eventually("it is over", func() bool {
				v := w.view("n-1")
				return v.Instance.Status == "RUNNING" && v.MaintenanceEvent == "NONE" && v.Upcoming == nil &&
					slices.Equal(w.systemOperations("n-1"), tt.want)
			})
		})
	}
}

// A lost reply is asked for again with the same request id: that begins nothing new, whatever fails.
func TestFaultsDoNotBreakRequestIDs(t *testing.T) {
	w := newWorld(t, nil)
	w.fault("operation.compute.instances.bulkInsert.error", "INTERNAL_ERROR/500,count=1")
	id := uuid.NewString()
	first := w.begun(w.client.Instances.BulkInsert(project, zone, w.bulk("n-1")).RequestId(id).Do())
	w.wait(first)
	again := w.begun(w.client.Instances.BulkInsert(project, zone, w.bulk("n-1")).RequestId(id).Do())
	if again.Name != first.Name || again.Error == nil {
		t.Errorf("the second call began %s, the first %s", again.Name, first.Name)
	}
}
