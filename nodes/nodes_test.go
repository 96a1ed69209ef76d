package nodes_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/api/googleapi"

	"github.com/sluicehpc/sluice/controller/store"
	"github.com/sluicehpc/sluice/gcp/compute"
	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/nodes"
)

func TestMoves(t *testing.T) {
	states := []nodes.State{nodes.Absent, nodes.Requested, nodes.Present, nodes.Deleting}
	legal := map[string]bool{
		"absent requested": true, "absent present": true,
		"requested present": true, "requested deleting": true, "requested absent": true,
		"present deleting": true, "present requested": true, "present absent": true,
		"deleting absent": true, "deleting requested": true,
	}
	for _, from := range states {
		for _, to := range states {
			n := nodes.Node{Name: "n1", State: from}
			want := from == to || legal[string(from)+" "+string(to)]
			if err := n.Enter(to); (err == nil) != want {
				t.Errorf("%s to %s: %v, want legal %v", from, to, err, want)
			}
		}
	}
}

// fakeCompute makes VMs at once, unless it is told to fail or to hold.
type fakeCompute struct {
	mu       sync.Mutex // guards what follows
	vms      map[string]string
	requests map[string]string // request id to operation
	inserted []string          // names, in the order of calls
	failure  error             // of the operation
	callErr  error
	hold     chan struct{} // WaitOperation waits for it, if set
}

func (f *fakeCompute) BulkInsert(_ context.Context, r compute.BulkInsertRequest) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.callErr != nil {
		return "", f.callErr
	}
	if op, again := f.requests[r.RequestID]; again {
		return op, nil
	}
	op := fmt.Sprintf("op-%d", len(f.requests))
	f.requests[r.RequestID] = op
	f.inserted = append(f.inserted, strings.Join(r.Names, ","))
	if f.failure == nil {
		for _, n := range r.Names {
			f.vms[n] = "RUNNING"
		}
	}
	return op, nil
}

func (f *fakeCompute) Delete(_ context.Context, requestID, name string) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.vms[name]; !ok {
		return "", nil
	}
	delete(f.vms, name)
	return "delete-" + name, nil
}

func (f *fakeCompute) WaitOperation(ctx context.Context, name string) error {
	f.mu.Lock()
	hold, failure := f.hold, f.failure
	f.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if strings.HasPrefix(name, "op-") {
		return failure
	}
	return nil
}

func (f *fakeCompute) List(context.Context, string) ([]compute.Instance, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []compute.Instance
	for _, name := range slices.Sorted(maps.Keys(f.vms)) {
		list = append(list, compute.Instance{Name: name, Status: f.vms[name]})
	}
	return list, nil
}

func (f *fakeCompute) edit(g func(*fakeCompute)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	g(f)
}

func newFake() *fakeCompute {
	return &fakeCompute{vms: map[string]string{}, requests: map[string]string{}}
}

// soon makes every pause short.
type soon struct{ clock.Clock }

func (s soon) After(d time.Duration) <-chan time.Time {
	return s.Clock.After(min(d, 10*time.Millisecond))
}

type world struct {
	*nodes.Manager
	t     *testing.T
	fake  *fakeCompute
	store *store.Store
	stop  func()
}

func start(t *testing.T, fake *fakeCompute, path string, timeout time.Duration) *world {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	s, err := store.Open(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	m := &nodes.Manager{
		Cluster: "c", ResumeTimeout: timeout, Compute: fake, Store: s, Clock: soon{clock.System}, Log: slog.New(slog.DiscardHandler),
		NodeSets: []nodes.NodeSet{{Name: "a", Nodes: []string{"a1", "a2"}}, {Name: "b", Nodes: []string{"b1"}}},
	}
	if err := m.Start(ctx); err != nil {
		t.Fatal(err)
	}
	w := &world{Manager: m, t: t, fake: fake, store: s}
	w.stop = sync.OnceFunc(func() {
		cancel()
		m.Wait()
		s.Close()
	})
	t.Cleanup(w.stop)
	return w
}

func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("waited in vain until %s: %+v", what, w.List())
		}
	}
}

func (w *world) state(name string) nodes.State {
	n, _ := w.Node(name)
	return n.State
}

func TestResumeAndSuspend(t *testing.T) {
	w := start(t, newFake(), t.TempDir()+"/db", time.Minute)
	for range 2 { // Slurm may resume the same nodes twice
		if err := w.Resume(t.Context(), []string{"a1", "a2", "b1"}, time.Time{}); err != nil {
			t.Fatal(err)
		}
	}
	w.until("all are present", func() bool {
		return w.state("a1") == nodes.Present && w.state("a2") == nodes.Present && w.state("b1") == nodes.Present
	})
	slices.Sort(w.fake.inserted)
	if d := cmp.Diff([]string{"a1,a2", "b1"}, w.fake.inserted); d != "" {
		t.Errorf("bulkInserts, one a node set (-want +got):\n%s", d)
	}
	at := time.Now()
	for i, want := range []bool{true, false} {
		news, err := w.Ready(t.Context(), "a1", at)
		if err != nil || news != want {
			t.Errorf("Ready, time %d = %v, %v, want %v", i, news, err, want)
		}
	}
	if news, _ := w.Ready(t.Context(), "a2", at.Add(-time.Hour)); news {
		t.Error("a word of the node's earlier life is news")
	}
	if err := w.Suspend(t.Context(), []string{"a1"}, ""); err != nil {
		t.Fatal(err)
	}
	w.until("a1 is gone", func() bool { return w.state("a1") == nodes.Absent })
	if got := w.fake.vms["a1"]; got != "" {
		t.Errorf("VM a1 is %s", got)
	}
	if err := w.Resume(t.Context(), []string{"zz"}, time.Time{}); err == nil {
		t.Error("an unknown node was taken")
	}
}

// A node that was ready before Slurm asked for it: slurmctld believes that it is
// off, and takes it only after another boot. A repeated word of the call that it
// was made for changes nothing.
func TestResumeOfAStaleNode(t *testing.T) {
	fake := newFake()
	w := start(t, fake, t.TempDir()+"/db", time.Minute)
	asked := time.Now()
	resume := func(at time.Time) {
		t.Helper()
		if err := w.Resume(t.Context(), []string{"a1"}, at); err != nil {
			t.Fatal(err)
		}
	}
	resume(asked)
	w.until("a1 is present", func() bool { return w.state("a1") == nodes.Present })
	ready := time.Now()
	if _, err := w.Ready(t.Context(), "a1", ready); err != nil {
		t.Fatal(err)
	}
	for _, at := range []time.Time{asked, {}} {
		resume(at)
		if n, _ := w.Node("a1"); n.State != nodes.Present || !n.ReadyAt.Equal(ready) {
			t.Errorf("after a repeated call a1 is %s, ready at %v", n.State, n.ReadyAt)
		}
	}
	resume(ready.Add(time.Millisecond))
	w.until("a1 was made anew", func() bool {
		n, _ := w.Node("a1")
		return n.State == nodes.Present && n.ReadyAt.IsZero()
	})
	fake.edit(func(f *fakeCompute) {
		if len(f.inserted) != 2 {
			t.Errorf("bulkInserts %v, want two", f.inserted)
		}
	})
}

// A node that is resumed while its VM is being deleted comes back.
func TestResumeDuringDeletion(t *testing.T) {
	fake := newFake()
	w := start(t, fake, t.TempDir()+"/db", time.Minute)
	if err := w.Resume(t.Context(), []string{"a1"}, time.Time{}); err != nil {
		t.Fatal(err)
	}
	w.until("a1 is present", func() bool { return w.state("a1") == nodes.Present })
	hold := make(chan struct{})
	fake.edit(func(f *fakeCompute) { f.hold = hold })
	if err := w.Suspend(t.Context(), []string{"a1"}, ""); err != nil {
		t.Fatal(err)
	}
	if err := w.Resume(t.Context(), []string{"a1"}, time.Time{}); err != nil {
		t.Fatal(err)
	}
	fake.edit(func(f *fakeCompute) { f.hold = nil })
	close(hold)
	w.until("a1 is back", func() bool { return w.state("a1") == nodes.Present })
	fake.edit(func(f *fakeCompute) {
		if len(f.inserted) != 2 {
			t.Errorf("bulkInserts %v, want two", f.inserted)
		}
	})
}

// Killed between intent and operation, the next process asks with the same
// request id, and after it, not again.
func TestRestartAsksOnce(t *testing.T) {
	fake := newFake()
	fake.hold = make(chan struct{})
	path := t.TempDir() + "/db"
	w := start(t, fake, path, time.Minute)
	if err := w.Resume(t.Context(), []string{"a1", "a2"}, time.Time{}); err != nil {
		t.Fatal(err)
	}
	asked := func() int {
		fake.mu.Lock()
		defer fake.mu.Unlock()
		return len(fake.requests)
	}
	w.until("the operation runs", func() bool { return asked() == 1 })
	w.stop()
	w = start(t, fake, path, time.Minute)
	close(fake.hold)
	w.until("both are present", func() bool { return w.state("a1") == nodes.Present && w.state("a2") == nodes.Present })
	if got := asked(); got != 1 {
		t.Errorf("asked for VMs %d times, want once", got)
	}
}

func TestFailuresAreRepeatedUntilSlurmGivesUp(t *testing.T) {
	stockout := &compute.OperationError{Type: "bulkInsert", Failures: []compute.Failure{{Code: "ZONE_RESOURCE_POOL_EXHAUSTED", Message: "no A3"}}}
	fake := newFake()
	fake.failure = stockout
	w := start(t, fake, t.TempDir()+"/db", time.Hour)
	if err := w.Resume(t.Context(), []string{"a1"}, time.Time{}); err != nil {
		t.Fatal(err)
	}
	w.until("the reason is known", func() bool {
		n, _ := w.Node("a1")
		return strings.Contains(n.Reason, "no capacity")
	})
	n, _ := w.Node("a1")
	if n.State != nodes.Requested || !n.Want || n.NotBefore.Before(time.Now()) {
		t.Errorf("node %+v, want one that is tried again later", n)
	}
	// Slurm gives up: resume_fail.
	if err := w.Suspend(t.Context(), []string{"a1"}, ""); err != nil {
		t.Fatal(err)
	}
	w.until("a1 is absent", func() bool { return w.state("a1") == nodes.Absent })

	fake.edit(func(f *fakeCompute) { f.failure, f.callErr = nil, &googleapi.Error{Code: 403, Message: "quota"} })
	short := start(t, fake, t.TempDir()+"/db", time.Millisecond)
	if err := short.Resume(t.Context(), []string{"b1"}, time.Time{}); err != nil {
		t.Fatal(err)
	}
	short.until("sluiced gives up", func() bool {
		n, _ := short.Node("b1")
		return n.State == nodes.Absent && n.Reason != ""
	})
}

// What runs without the store's knowledge is noted, never deleted; and when
// Slurm resumes it, it is made anew.
func TestOrphans(t *testing.T) {
	fake := newFake()
	fake.vms["a1"], fake.vms["controller"] = "RUNNING", "RUNNING"
	w := start(t, fake, t.TempDir()+"/db", time.Minute)
	w.until("a1 is noted", func() bool { return w.state("a1") == nodes.Present })
	fake.edit(func(f *fakeCompute) {
		if f.vms["a1"] == "" || f.vms["controller"] == "" {
			t.Errorf("VMs %v: one was deleted", f.vms)
		}
	})
	if err := w.Resume(t.Context(), []string{"a1"}, time.Time{}); err != nil {
		t.Fatal(err)
	}
	w.until("a1 is made anew", func() bool {
		fake.mu.Lock()
		defer fake.mu.Unlock()
		return len(fake.inserted) == 1 && fake.vms["a1"] == "RUNNING"
	})
}

func TestReason(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want string
	}{
		{&compute.OperationError{Failures: []compute.Failure{{Code: "QUOTA_EXCEEDED", Message: "CPUS"}}}, "the project's quota is used up: "},
		{&googleapi.Error{Code: 429, Message: "slow"}, "the project asks too often: "},
		{errors.New("plain"), "plain"},
	} {
		if got := nodes.Reason(tt.err); !strings.HasPrefix(got, tt.want) {
			t.Errorf("Reason(%v) = %q, want %q…", tt.err, got, tt.want)
		}
	}
}
