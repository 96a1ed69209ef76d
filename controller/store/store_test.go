package store_test

import (
	"database/sql"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/controller/store"
	"github.com/sluicehpc/sluice/staging"
	"github.com/sluicehpc/sluice/staging/files"
)

func open(t *testing.T) *store.Store {
	t.Helper()
	s, err := store.Open(t.Context(), filepath.Join(t.TempDir(), "a b?c", "db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func job(t *testing.T, s *store.Store, id uint32, gen int, active bool) store.Job {
	t.Helper()
	j := store.Job{Key: store.Key{ID: id, Gen: gen}, UID: 1000 + id, Active: active, CreatedAt: time.Unix(int64(id), 0), Phase: store.PhaseAccepted}
	if err := s.PutJob(t.Context(), j); err != nil {
		t.Fatal(err)
	}
	return j
}

func transfer(id string, jobID uint32, uid string) staging.Transfer {
	return staging.Transfer{ID: id, Kind: staging.StageIn, State: staging.Queued, FS: "fast", Dataset: "d", Version: "v", InstanceUID: uid,
		JobID: jobID, Gen: 1, UID: 1000 + jobID, QueuedAt: time.Unix(1, 0)}
}

func TestAttachStageIn(t *testing.T) {
	s := open(t)
	ctx := t.Context()
	attach := func(tr staging.Transfer, create bool) (string, bool) {
		t.Helper()
		got, found, err := s.AttachStageIn(ctx, 0, tr, create)
		if err != nil {
			t.Fatal(err)
		}
		return got.ID, found
	}
	for id := range uint32(6) {
		job(t, s, id+1, 1, true)
	}
	if _, found := attach(transfer("t1", 1, "u1"), false); found {
		t.Error("found a transfer in an empty store")
	}
	if id, _ := attach(transfer("t1", 1, "u1"), true); id != "t1" {
		t.Errorf("attached to %s, want the new t1", id)
	}
	if id, found := attach(transfer("t2", 2, "u1"), false); id != "t1" || !found {
		t.Errorf("attached to %s, %v, want t1, which goes on", id, found)
	}
	other := transfer("t3", 3, "u1")
	other.Version = "w"
	if id, _ := attach(other, true); id != "t3" {
		t.Errorf("another version is attached to %s", id)
	}

	// One that somebody wants is not cancelled; one that nobody wants is, and takes nobody any more.
	if marked, err := s.CancelIfUnwanted(ctx, "t1"); marked || err != nil {
		t.Errorf("CancelIfUnwanted with jobs = %v, %v", marked, err)
	}
	job(t, s, 1, 1, false)
	job(t, s, 2, 1, false)
	if marked, err := s.CancelIfUnwanted(ctx, "t1"); !marked || err != nil {
		t.Errorf("CancelIfUnwanted without jobs = %v, %v", marked, err)
	}
	// The runner's own writes keep the mark.
	if err := s.SaveTransfer(ctx, transfer("t1", 1, "u1")); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Transfer(ctx, "t1"); err != nil || !got.Cancel {
		t.Errorf("transfer %+v, %v, want it marked", got, err)
	}
	if id, _ := attach(transfer("t4", 4, "u1"), true); id != "t4" {
		t.Errorf("attached to %s, want a new one beside the cancelled", id)
	}

	// Done: shared on the same instance, and absent at once on another.
	done := transfer("t4", 4, "u1")
	done.State = staging.Done
	if err := s.Publish(ctx, done, files.Published{Dataset: "d", Version: "v", InstanceUID: "u1"}); err != nil {
		t.Fatal(err)
	}
	if id, _ := attach(transfer("t5", 5, "u1"), true); id != "t4" {
		t.Errorf("attached to %s, want t4, which is done", id)
	}
	if id, _ := attach(transfer("t6", 6, "u2"), true); id != "t6" {
		t.Errorf("attached to %s, want a new one: the instance is another", id)
	}
	list, err := s.JobTransfers(ctx, 5, 1)
	if err != nil || len(list) != 1 || list[0].ID != "t4" || list[0].Jobs != 2 {
		t.Errorf("transfers of job 5: %+v, %v, want t4 with two jobs", list, err)
	}
	active, err := s.ActiveTransfers(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, tr := range active {
		ids = append(ids, tr.ID)
	}
	if d := cmp.Diff([]string{"t1", "t3", "t6"}, ids); d != "" {
		t.Errorf("active (-want +got):\n%s", d)
	}
}

func TestStageOutIsAskedForOnce(t *testing.T) {
	s := open(t)
	job(t, s, 1, 1, true)
	out := transfer("o1", 1, "")
	out.Kind = staging.StageOut
	for _, id := range []string{"o1", "o2"} {
		out.ID = id
		if got, err := s.AttachStageOut(t.Context(), 0, out); err != nil || got.ID != "o1" {
			t.Errorf("attached to %s, %v, want o1", got.ID, err)
		}
	}
	out.ID, out.Gen = "o3", 2
	if got, err := s.AttachStageOut(t.Context(), 0, out); err != nil || got.ID != "o3" {
		t.Errorf("another run is attached to %s, %v, want o3", got.ID, err)
	}
}

func TestEvents(t *testing.T) {
	s := open(t)
	k := store.Key{ID: 1, Gen: 1}
	at := func(n int64) time.Time { return time.Unix(0, n).UTC() }
	for _, e := range []struct {
		name   string
		at     int64
		latest bool
	}{{"first", 5, false}, {"first", 3, false}, {"last", 7, true}, {"last", 9, true}, {"last", 8, true}} {
		if err := s.AddEvent(t.Context(), k, e.name, at(e.at), e.latest); err != nil {
			t.Fatal(err)
		}
	}
	got, err := s.Events(t.Context(), k)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]store.Event{{Name: "first", At: at(5)}, {Name: "last", At: at(9)}}, got); d != "" {
		t.Errorf("events (-want +got):\n%s", d)
	}
}

func TestUpdateJobIsAllOrNothing(t *testing.T) {
	s := open(t)
	j := job(t, s, 1, 1, true)
	refused := errors.New("refused")
	_, err := s.UpdateJob(t.Context(), j.Key, func(j *store.Job) error { j.Phase = "x"; return refused })
	if !errors.Is(err, refused) {
		t.Errorf("got %v, want the edit's error", err)
	}
	if got, err := s.Job(t.Context(), 1); err != nil || got.Phase != store.PhaseAccepted {
		t.Errorf("phase %s, %v, want what it was", got.Phase, err)
	}
	if _, err := s.UpdateJob(t.Context(), store.Key{ID: 9, Gen: 1}, func(*store.Job) error { return nil }); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("an unknown job: %v, want ErrNotFound", err)
	}
}

func TestOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s, err := store.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Open(t.Context(), path); err == nil {
		t.Error("two have the store open at a time")
	}
	job(t, s, 1, 1, true)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s, err = store.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Job(t.Context(), 1); err != nil {
		t.Errorf("after opening again: %v", err)
	}
	s.Close()
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for pragma, want := range map[string]string{"journal_mode": "wal"} {
		var got string
		if err := db.QueryRow("PRAGMA " + pragma).Scan(&got); err != nil || got != want {
			t.Errorf("%s = %s, %v, want %s", pragma, got, err, want)
		}
	}
	if _, err := db.Exec("PRAGMA user_version = 99"); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Open(t.Context(), path); err == nil {
		t.Error("a newer sluiced's store was opened")
	}
}
