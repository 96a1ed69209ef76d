package staging_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/staging/files"
)

func script(lines ...string) string {
	return "#!/bin/bash\n#SLUICE " + strings.Join(lines, "\n#SLUICE ") + "\ntrue\n"
}

func callOf(id uint32, script string) api.JobCall {
	return api.JobCall{JobID: id, UID: alice, GID: 20001, Script: script, Name: "train", Account: "research", Partition: "main"}
}

func corpus() map[string]string {
	m := map[string]string{"a.txt": "alpha", "sub/b.txt": "beta", "sub/deeper/empty": "", "big.bin": strings.Repeat("0123456789abcdef", 1<<14)}
	for i := range 20 {
		m[fmt.Sprintf("many/%02d", i)] = strings.Repeat("x", i)
	}
	return m
}

func under(prefix string, m map[string]string) map[string]string {
	out := map[string]string{}
	for k, v := range m {
		out[prefix+k] = v
	}
	return out
}

// The points at which a kill is different from one a line before.
var (
	inPoints = []string{"listed", "attached", "before-request", "request-stored", "prepared", "called", "operation-stored",
		"operation-done", "verifying", "verified", "published", "done"}
	outPoints = []string{"attached", "manifest", "before-request", "request-stored", "held", "called", "operation-stored",
		"operation-done", "verifying", "verified", "moved", "done"}
)

// runJob takes a job through everything; the daemon is killed at the points.
func (w *world) runJob(id uint32, in, out string) {
	w.t.Helper()
	data := corpus()
	w.bucket("corpus", under("c4/", data))
	w.bucket("results", nil)
	job := callOf(id, script("stage_in source=gs://corpus/c4/ to=in/data", "stage_out from=out to=gs://results/%j/ move=yes"))
	if in != "" {
		w.arm(in)
	}
	w.start()
	if err := w.call(api.OpSetup, job, nil); err != nil {
		w.t.Fatalf("setup: %v", err)
	}
	if s := w.stage(api.OpDataIn, job); s.Phase != api.StageDone {
		w.t.Fatalf("stage-in: %+v", s)
	}
	env := w.env(id)
	if got, want := env["SLUICE_DATA_DATA"], filepath.Join(w.mount, files.JobDir("c", id), "in/data"); got != want {
		w.t.Errorf("SLUICE_DATA_DATA = %q, want %q", got, want)
	}
	if d := cmp.Diff(data, w.tree(env["SLUICE_DATA_DATA"])); d != "" {
		w.t.Errorf("staged data (-want +got):\n%s", d)
	}
	if got := w.operations(lustre.TypeImport); got != 1 {
		w.t.Errorf("%d imports were asked for, want 1", got)
	}

	result := filepath.Join(env["SLUICE_JOB_DIR"], "out")
	want := map[string]string{"loss.json": "[1,2]", "shards/0": "zero", "shards/1": strings.Repeat("1", 1<<20)}
	for path, text := range want {
		full := filepath.Join(result, path)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			w.t.Fatal(err)
		}
		if err := os.WriteFile(full, []byte(text), 0o644); err != nil {
			w.t.Fatal(err)
		}
	}
	for _, path := range []string{"", "loss.json", "shards", "shards/0", "shards/1"} {
		if err := os.Chown(filepath.Join(result, path), alice, 20001); err != nil {
			w.t.Fatal(err)
		}
	}
	w.write("jobstate", "COMPLETED")
	if out != "" {
		w.arm(out)
	}
	if err := w.call(api.OpPostRun, job, nil); err != nil {
		w.t.Fatal(err)
	}
	if s := w.stage(api.OpDataOut, job); s.Phase != api.StageDone {
		w.t.Fatalf("stage-out: %+v", s)
	}
	if err := w.call(api.OpTeardown, job, nil); err != nil {
		w.t.Fatal(err)
	}
	if d := cmp.Diff(want, w.objects("results", fmt.Sprintf("%d/", id))); d != "" {
		w.t.Errorf("results (-want +got):\n%s", d)
	}
	if got := w.operations(lustre.TypeExport); got != 1 {
		w.t.Errorf("%d exports were asked for, want 1", got)
	}
	if got := w.tree(result); len(got) != 0 {
		w.t.Errorf("move=yes left %v", slices.Sorted(maps.Keys(got)))
	}
	j := w.job(id)
	if j.Phase != "done" {
		w.t.Errorf("phase %s (%s), want done", j.Phase, j.Reason)
	}
	if got := w.leftovers(); len(got) != 0 {
		w.t.Errorf("left behind: %v", got)
	}
	left, err := os.ReadDir(filepath.Join(w.dir, "listings"))
	if err != nil || len(left) != 0 {
		w.t.Errorf("listings left behind: %v, %v", left, err)
	}
	for _, tr := range j.Transfers {
		if tr.State != "DONE" || tr.Verified != tr.Objects || tr.Objects == 0 {
			w.t.Errorf("transfer %s: %s, %d of %d verified", tr.Kind, tr.State, tr.Verified, tr.Objects)
		}
	}
	var names []string
	for _, e := range j.Events {
		names = append(names, e.Name)
	}
	wantEvents := []string{"submitted", "stage_in_started", "stage_in_done", "job_ended", "stage_out_started", "stage_out_done"}
	if d := cmp.Diff(wantEvents, names); d != "" {
		w.t.Errorf("events in the order of their times (-want +got):\n%s", d)
	}
}

func TestJobWithoutCrash(t *testing.T) {
	w := newWorld(t)
	w.runJob(7, "", "")
	if w.starts != 1 {
		t.Errorf("the daemon was started %d times, want once", w.starts)
	}
}

// Killed at any point, the daemon finishes the same transfer, asked for once.
func TestKilledAtEveryPoint(t *testing.T) {
	n := max(len(inPoints), len(outPoints))
	for i := range n {
		in, out := inPoints[i%len(inPoints)], outPoints[i%len(outPoints)]
		t.Run(in+" and "+out, func(t *testing.T) {
			w := newWorld(t)
			w.runJob(7, in, out)
			if w.armed() {
				t.Error("the daemon never came to the last point")
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.starts != 3 {
				t.Errorf("the daemon was started %d times, want 3", w.starts)
			}
		})
	}
}

func TestKilledAtRandom(t *testing.T) {
	w := newWorld(t)
	if err := w.faults.Set(faults.LustreTransferRate, "1000000"); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 25 {
			select {
			case <-done:
				return
			case <-time.After(time.Duration(20+rand.IntN(150)) * time.Millisecond):
				w.kill()
			}
		}
	})
	w.runJob(9, "", "")
	close(done)
	wg.Wait()
}

// Two jobs that want the same data share one import; each group has its gate.
func TestSingleFlight(t *testing.T) {
	w := newWorld(t)
	w.bucket("corpus", under("c4/", corpus()))
	w.start()
	if err := w.faults.Set(faults.LustreTransferRate, "200000"); err != nil {
		t.Fatal(err)
	}
	text := script("stage_in source=gs://corpus/c4/ name=c4")
	first, second := callOf(1, text), callOf(2, text)
	second.UID, second.GID = bob, 20002
	for _, job := range []api.JobCall{first, second} {
		if err := w.call(api.OpSetup, job, nil); err != nil {
			t.Fatal(err)
		}
		if err := w.call(api.OpDataIn, api.StageCall{JobCall: job}, nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, job := range []api.JobCall{first, second} {
		if s := w.stage(api.OpDataIn, job); s.Phase != api.StageDone {
			t.Fatalf("stage-in: %+v", s)
		}
	}
	if got := w.operations(lustre.TypeImport); got != 1 {
		t.Errorf("%d imports, want 1", got)
	}
	one, two := w.job(1), w.job(2)
	if one.Transfers[0].ID != two.Transfers[0].ID || one.Transfers[0].AttachedJobs != 2 {
		t.Errorf("transfers %+v and %+v, want one with two jobs", one.Transfers, two.Transfers)
	}
	if a, b := w.env(1)["SLUICE_DATA_C4"], w.env(2)["SLUICE_DATA_C4"]; a == b || filepath.Base(a) != "20001" || filepath.Base(b) != "20002" {
		t.Errorf("data at %s and %s, want a gate for each group", a, b)
	}
	// The third finds it there, and a changed bucket is another version.
	third := callOf(3, text)
	if err := w.call(api.OpSetup, third, nil); err != nil {
		t.Fatal(err)
	}
	w.stage(api.OpDataIn, third)
	if got := w.operations(lustre.TypeImport); got != 1 {
		t.Errorf("%d imports after a third job, want 1", got)
	}
	w.put("corpus", "c4/new.txt", "new")
	fourth := callOf(4, text)
	if err := w.call(api.OpSetup, fourth, nil); err != nil {
		t.Fatal(err)
	}
	w.stage(api.OpDataIn, fourth)
	if got := w.operations(lustre.TypeImport); got != 2 {
		t.Errorf("%d imports after the bucket changed, want 2", got)
	}
	if got := w.tree(w.env(4)["SLUICE_DATA_C4"])["new.txt"]; got != "new" {
		t.Errorf("new.txt = %q, want new", got)
	}
	if _, ok := w.tree(w.env(3)["SLUICE_DATA_C4"])["new.txt"]; ok {
		t.Error("a published version changed")
	}
	// Somebody removes a version behind sluiced's back: it comes again.
	if err := os.RemoveAll(filepath.Join(w.mount, files.Datasets)); err != nil {
		t.Fatal(err)
	}
	fifth := callOf(5, text)
	if err := w.call(api.OpSetup, fifth, nil); err != nil {
		t.Fatal(err)
	}
	if s := w.stage(api.OpDataIn, fifth); s.Phase != api.StageDone {
		t.Fatalf("stage-in after the removal: %+v", s)
	}
	if got := w.tree(w.env(5)["SLUICE_DATA_C4"])["new.txt"]; got != "new" {
		t.Errorf("new.txt = %q after the removal, want new", got)
	}
}

// Failures are told in words that stand for themselves, and nothing is published.
func TestStageInFailsInWords(t *testing.T) {
	for _, tt := range []struct {
		name, source string
		objects      map[string]string
		fault, value string
		setup        bool // it fails in setup already
		want         []string
	}{
		{name: "no bucket", source: "gs://nowhere-at-all/x/", setup: true, want: []string{"script:2:", "gs://nowhere-at-all/x/", "does not exist"}},
		{name: "empty prefix", source: "gs://b-data/nothing/", objects: map[string]string{"other": "x"}, want: []string{"script:2:", "gs://b-data/nothing/", "no object"}},
		{name: "corrupted", source: "gs://b-data/p/", objects: map[string]string{"p/good": "good", "p/bad": "bad"},
			fault: faults.LustreImportCorrupt, value: "gs://b-data/p/bad", want: []string{"gs://b-data/p/", "bad: CRC32C is"}},
		{name: "disk full", source: "gs://b-data/p/", objects: map[string]string{"p/a": strings.Repeat("a", 1<<20)},
			fault: faults.LustreCapacity, value: "4096", want: []string{"file system scratch is full", "1.0 MiB"}},
		{name: "file and directory", source: "gs://b-data/p/", objects: map[string]string{"p/a": "x", "p/a/b": "y"}, want: []string{"p/a", "cannot be a file"}},
		{name: "two slashes", source: "gs://b-data/p/", objects: map[string]string{"p/a//b": "x"}, want: []string{"cannot be a file", "empty component"}},
		{name: "dot dot", source: "gs://b-data/p/", objects: map[string]string{"p/../etc/passwd": "x"}, want: []string{"cannot be a file", ".."}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.bucket("b-data", tt.objects)
			if tt.fault != "" {
				if err := w.faults.Set(tt.fault, tt.value); err != nil {
					t.Fatal(err)
				}
			}
			w.start()
			job := callOf(5, script("stage_in source="+tt.source+" name=x"))
			message := ""
			err := w.call(api.OpSetup, job, nil)
			if (err != nil) != tt.setup {
				t.Fatalf("setup: %v", err)
			}
			if err != nil {
				message = err.Error()
			} else {
				s := w.stage(api.OpDataIn, job)
				if s.Phase != api.StageFailed {
					t.Fatalf("got %+v, want a failure", s)
				}
				message = s.Message
			}
			first, _, _ := strings.Cut(message, "\n")
			for _, want := range tt.want {
				if !strings.Contains(first, want) {
					t.Errorf("first line %q lacks %q", first, want)
				}
			}
			if len(first) > 200 {
				t.Errorf("first line has %d bytes: %q", len(first), first)
			}
			j := w.job(5)
			if j.Phase != "failed" || j.Reason != first {
				t.Errorf("job is %s with the reason %q, want failed with %q", j.Phase, j.Reason, first)
			}
			published, _ := filepath.Glob(filepath.Join(w.mount, files.Datasets, "*", "*.manifest"))
			if len(published) != 0 {
				t.Errorf("published: %v", published)
			}
			deadline := time.Now().Add(20 * time.Second)
			for len(w.leftovers()) > 0 && time.Now().Before(deadline) {
				time.Sleep(5 * time.Millisecond)
			}
			if left := w.leftovers(); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
			// The cause gone, it works: Slurm sets a released job up again.
			if tt.fault != "" {
				if err := w.faults.Clear(tt.fault); err != nil {
					t.Fatal(err)
				}
				if err := w.call(api.OpSetup, job, nil); err != nil {
					t.Fatal(err)
				}
				if s := w.stage(api.OpDataIn, job); s.Phase != api.StageDone {
					t.Errorf("after the fault: %+v, want done", s)
				}
			}
		})
	}
}

func TestStageOutKeepsEverythingWhenItFails(t *testing.T) {
	for _, tt := range []struct {
		name  string
		plant func(t *testing.T, w *world, out string)
		want  string
	}{
		{"symlink", func(t *testing.T, w *world, out string) {
			if err := os.Symlink("/etc", out); err != nil {
				t.Fatal(err)
			}
		}, "symbolic link"},
		{"missing", func(*testing.T, *world, string) {}, "no such directory"},
		{"corrupted export", func(t *testing.T, w *world, out string) {
			if err := os.Mkdir(out, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(out+"/f", []byte("data"), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := w.faults.Set(faults.LustreExportCorrupt, "gs://results/r/f"); err != nil {
				t.Fatal(err)
			}
		}, "CRC32C"},
		{"not the user's to remove", func(t *testing.T, w *world, out string) {
			if err := os.Mkdir(out, 0o755); err != nil { // root's
				t.Fatal(err)
			}
			if err := os.WriteFile(out+"/f", []byte("data"), 0o644); err != nil {
				t.Fatal(err)
			}
		}, "copied and verified, but not all of it could be removed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.bucket("results", nil)
			w.start()
			job := callOf(6, script("stage_out from=out to=gs://results/r/ move=yes"))
			if err := w.call(api.OpSetup, job, nil); err != nil {
				t.Fatal(err)
			}
			if s := w.stage(api.OpDataIn, job); s.Phase != api.StageDone {
				t.Fatalf("stage-in: %+v", s)
			}
			dir := w.job(6).Dir
			tt.plant(t, w, filepath.Join(dir, "out"))
			w.write("jobstate", "COMPLETED")
			s := w.stage(api.OpDataOut, job)
			if s.Phase != api.StageFailed || !strings.Contains(s.Message, tt.want) {
				t.Errorf("got %+v, want a failure that says %q", s, tt.want)
			}
			if tt.name == "corrupted export" {
				if _, err := os.Stat(filepath.Join(dir, "out/f")); err != nil {
					t.Errorf("the source is gone: %v", err)
				}
			}
			if j := w.job(6); j.Phase != "failed" {
				t.Errorf("phase %s, want failed", j.Phase)
			}
		})
	}
}

// A cancelled job's transfer ends when nobody else wants it; a torn down job
// that still waits in Slurm keeps it.
func TestTeardown(t *testing.T) {
	w := newWorld(t)
	w.bucket("corpus", under("c4/", corpus()))
	if err := w.faults.Set(faults.LustreTransferRate, "20000"); err != nil {
		t.Fatal(err)
	}
	w.start()
	text := script("stage_in source=gs://corpus/c4/ name=c4")
	one, two := callOf(1, text), callOf(2, text)
	running := func(id uint32) api.Transfer {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			j := w.job(id)
			if len(j.Transfers) == 1 && j.Transfers[0].State == "RUNNING" && j.Transfers[0].Operation != "" {
				return j.Transfers[0]
			}
			if time.Now().After(deadline) {
				t.Fatalf("job %d: %+v", id, j)
			}
		}
	}
	for _, job := range []api.JobCall{one, two} {
		if err := w.call(api.OpSetup, job, nil); err != nil {
			t.Fatal(err)
		}
		if err := w.call(api.OpDataIn, api.StageCall{JobCall: job}, nil); err != nil {
			t.Fatal(err)
		}
		running(job.JobID)
	}
	transfer := running(1)

	// slurmctld restarts: everything is torn down, and set up again.
	one.Hurry, two.Hurry = true, true
	for _, job := range []api.JobCall{one, two} {
		if err := w.call(api.OpTeardown, job, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.call(api.OpSetup, two, nil); err != nil {
		t.Fatal(err)
	}
	if err := w.call(api.OpDataIn, api.StageCall{JobCall: two}, nil); err != nil {
		t.Fatal(err)
	}
	// Job 1 is cancelled; job 2 still wants the transfer.
	w.write("jobstate", "CANCELLED")
	if err := w.call(api.OpTeardown, one, nil); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); w.job(1).Phase != "cancelled"; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("job 1 is %s, want cancelled", w.job(1).Phase)
		}
	}
	if got := running(2); got.ID != transfer.ID || got.Operation != transfer.Operation {
		t.Errorf("job 2 has the transfer %s (%s), want %s (%s)", got.ID, got.Operation, transfer.ID, transfer.Operation)
	}
	// Nobody wants it any more.
	if err := w.call(api.OpTeardown, two, nil); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		var got api.Transfer
		if err := w.call(api.OpTransferShow, api.TransferID{ID: transfer.ID}, &got); err != nil {
			t.Fatal(err)
		}
		if got.State == "CANCELLED" && len(w.leftovers()) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("transfer is %s, left behind %v", got.State, w.leftovers())
		}
	}
	if got := w.operations(lustre.TypeImport); got != 1 {
		t.Errorf("%d imports, want 1", got)
	}
}
