package staging_test

import (
	"strings"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/gcp/lustre"
)

// set sets faults of the cloud, with a seed that is shown when the test fails.
func (w *world) set(pairs ...string) {
	w.t.Helper()
	for _, p := range pairs {
		key, value, _ := strings.Cut(p, "=")
		if err := w.faults.Set(key, value); err != nil {
			w.t.Fatal(err)
		}
	}
	w.t.Cleanup(func() {
		if w.t.Failed() {
			log := w.faults.Log()
			w.t.Logf("seed %d; the last faults:", log.Seed)
			for _, e := range log.Entries[max(0, len(log.Entries)-40):] {
				w.t.Logf("%s %s=%s %s %s", e.At, e.Fault, e.Value, e.Request, e.What)
			}
		}
	})
}

// done says how often a fault did something.
func (w *world) done(key string) int {
	for _, f := range w.faults.List().Faults {
		if f.Key == key {
			return f.Hits
		}
	}
	return 0
}

// A whole job comes through what clouds do: each import and export is asked for once, and every byte is right (runJob looks).
func TestJobsSurviveTheCloud(t *testing.T) {
	for _, tt := range []struct {
		name   string
		faults []string
		hit    string // must have done something
	}{
		{"Lustre is overloaded", []string{"api.lustre.status=503,count=3"}, "api.lustre.status"},
		{"Lustre counts requests", []string{"api.lustre.status=429,count=3"}, "api.lustre.status"},
		{"Lustre's front end has no service", []string{"api.lustre.status=502,count=6"}, "api.lustre.status"},
		{"Storage is overloaded", []string{"api.storage.status=503,count=3"}, "api.storage.status"},
		{"Storage counts requests", []string{"api.storage.status=429,count=3"}, "api.storage.status"},
		{"IAM is overloaded", []string{"api.iam.status=503,count=4"}, "api.iam.status"},
		{"the reply of importData is lost", []string{"api.lustre.instances.importData.lost=reply,count=2"}, "api.lustre.instances.importData.lost"},
		{"the reply of importData is cut", []string{"api.lustre.instances.importData.lost=half,count=2"}, "api.lustre.instances.importData.lost"},
		{"the request importData is lost", []string{"api.lustre.instances.importData.lost=request,count=2"}, "api.lustre.instances.importData.lost"},
		{"the reply of exportData is lost", []string{"api.lustre.instances.exportData.lost=reply,count=2"}, "api.lustre.instances.exportData.lost"},
		{"replies of operations are lost", []string{"api.lustre.operations.get.lost=half,count=3"}, "api.lustre.operations.get.lost"},
		{"listings are cut", []string{"api.storage.objects.list.lost=half,count=3"}, "api.storage.objects.list.lost"},
		{"operations hang for a while", []string{"operation.lustre.hang=after,for=2s"}, ""},
		{"operations begin late", []string{"operation.lustre.hang=before,for=2s"}, ""},
		{"the cloud's clock is behind", []string{"clock.skew=-30m"}, ""},
		{"the cloud's clock is ahead", []string{"clock.skew=30m"}, ""},
		{"all of it, now and then", []string{
			"api.lustre.status=503,p=0.2", "api.storage.status=503,p=0.2", "api.iam.status=503,p=0.2",
			"api.lustre.lost=reply,p=0.1", "api.storage.lost=half,p=0.1", "api.*.latency=0s-200ms,p=0.5",
		}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.set(tt.faults...)
			w.runJob(7, "", "")
			if tt.hit != "" && w.done(tt.hit) == 0 {
				t.Errorf("%s did nothing", tt.hit)
			}
		})
	}
}

// Lost replies and kills of the daemon at once.
func TestLostRepliesAndKills(t *testing.T) {
	for _, point := range []string{"called", "request-stored"} {
		t.Run(point, func(t *testing.T) {
			w := newWorld(t)
			w.set("api.lustre.instances.importData.lost=reply,count=1", "api.lustre.instances.exportData.lost=reply,count=1")
			w.runJob(7, point, point)
		})
	}
}

// What cannot come right fails in words, once, and publishes nothing.
func TestTransfersThatFail(t *testing.T) {
	for _, tt := range []struct {
		name, fault string
		want        []string // in the message
	}{
		{"the operation fails", "operation.lustre.instances.importData.error=INTERNAL", []string{"gs://corpus/c4/", "the import failed"}},
		{"some objects are not copied", "operation.lustre.transfer.failed=3", []string{"gs://corpus/c4/", "3 of 24 objects were not imported"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.set(tt.fault)
			w.bucket("corpus", under("c4/", corpus()))
			w.start()
			job := callOf(7, script("stage_in source=gs://corpus/c4/ name=c4"))
			if err := w.call(api.OpSetup, job, nil); err != nil {
				t.Fatal(err)
			}
			s := w.stage(api.OpDataIn, job)
			if s.Phase != api.StageFailed {
				t.Fatalf("stage-in: %+v", s)
			}
			for _, want := range tt.want {
				if !strings.Contains(s.Message, want) {
					t.Errorf("message %q, want %q in it", s.Message, want)
				}
			}
			if got := w.operations(lustre.TypeImport); got != 1 {
				t.Errorf("%d imports were asked for, want 1", got)
			}
			// The end is stored before the rest is removed.
			for deadline := time.Now().Add(30 * time.Second); len(w.leftovers()) > 0; time.Sleep(5 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("left behind: %v", w.leftovers())
				}
			}
		})
	}
}
