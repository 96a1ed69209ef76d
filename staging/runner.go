package staging

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/singleflight"

	"github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/gcp/storage"
	"github.com/sluicehpc/sluice/internal/atomicfile"
	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/staging/files"
)

// Lustre is what staging needs of Managed Lustre; *lustre.Client is it.
type Lustre interface {
	GetInstance(ctx context.Context, name string) (*lustre.Instance, error)
	ImportData(ctx context.Context, r *lustre.ImportDataRequest) (*lustre.Operation, error)
	ExportData(ctx context.Context, r *lustre.ExportDataRequest) (*lustre.Operation, error)
	GetOperation(ctx context.Context, name string) (*lustre.Operation, error)
	ListOperations(ctx context.Context, parent, filter string) ([]*lustre.Operation, error)
	CancelOperation(ctx context.Context, name string) error
}

// Files is the work on the mounted file system; *files.Client is it.
type Files interface {
	Prepare(ctx context.Context, mount, dataset, version, transfer string) (*files.Published, error)
	Verify(ctx context.Context, mount, path string, manifest []byte, progress func(files.Progress)) ([]string, error)
	Publish(ctx context.Context, mount string, p files.Published, manifest []byte) error
	Manifest(ctx context.Context, u files.User, mount, jobDir, from string, prefix int, progress func(files.Progress)) ([]files.Entry, []files.Skipped, error)
	Hold(ctx context.Context, mount, jobDir, from, transfer string, manifest []byte) error
	Unlink(ctx context.Context, u files.User, mount, jobDir, from string, manifest []byte) error
	Remove(ctx context.Context, mount, path string) error
	Sweep(ctx context.Context, mount string, keep []string) ([]string, error)
}

// Store keeps transfers. What a method stored survives a crash after it returned.
type Store interface {
	// ActiveTransfers returns those that have not ended, oldest first.
	ActiveTransfers(ctx context.Context) ([]Transfer, error)
	// SaveTransfer stores t, but for Cancel.
	SaveTransfer(ctx context.Context, t Transfer) error
	// SaveCounters stores t's counters; it may be lost in a crash.
	SaveCounters(ctx context.Context, t Transfer) error
	// Publish stores t, which is DONE, and that its version is on the file
	// system, both or neither.
	Publish(ctx context.Context, t Transfer, p files.Published) error
	// AttachStageIn attaches a job's directive number index to a transfer of
	// t's version: one that is done, on the same instance, or one that goes on
	// and is not to be cancelled. If there is none, it stores t and attaches to
	// it when create is set; else it does nothing and found is false.
	AttachStageIn(ctx context.Context, index int, t Transfer, create bool) (got Transfer, found bool, err error)
	// AttachStageOut does so for a stage-out: t, unless the job has it already.
	AttachStageOut(ctx context.Context, index int, t Transfer) (Transfer, error)
}

// FileSystem is one that the cluster has.
type FileSystem struct {
	Name     string
	Mount    string
	Instance string // projects/P/locations/ZONE/instances/I
}

// Runner drives transfers from QUEUED to their end. Whatever moment it is killed
// at, a new Runner on the same store finishes the same transfers, each import or
// export asked for once.
type Runner struct {
	Store       Store
	Bucket      Bucket
	Lustre      Lustre
	Files       Files
	FileSystems []FileSystem
	// Groups returns all groups of a user.
	Groups func(ctx context.Context, user string) ([]uint32, error)
	// Dir keeps listings and manifests of transfers that go on.
	Dir   string
	Clock clock.Clock
	Log   *slog.Logger
	// Changed is called after a transfer's state changed.
	Changed func(Transfer)
	// Fault is called at the points where a crash is interesting; tests die in it.
	Fault func(point string)

	wg       sync.WaitGroup
	ctx      context.Context // of Start: ends all work
	listings singleflight.Group

	mu    sync.Mutex // guards what follows
	runs  map[string]*run
	lanes map[string]*lane // by instance
}

// lane is one instance's queue: the service runs one transfer at a time.
type lane struct {
	slot  chan struct{} // holds one token while a transfer runs
	sweep sync.Mutex    // guards swept
	swept bool
}

// run is a transfer at work.
type run struct {
	lane     *lane
	fs       FileSystem
	cancel   chan struct{} // closed when Cancel is set
	once     sync.Once
	holds    bool // the lane's slot
	resumed  bool // an earlier process began it
	lastSave time.Time

	mu    sync.Mutex // guards what follows
	t     Transfer
	wait  string // what it waits for, in words, or ""
	meter meter
}

// Start takes up what an earlier process left, and returns. Work ends with ctx;
// Wait waits for it.
func (r *Runner) Start(ctx context.Context) error {
	r.ctx = ctx
	r.runs, r.lanes = map[string]*run{}, map[string]*lane{}
	if err := os.MkdirAll(r.Dir, 0o700); err != nil {
		return fmt.Errorf("staging: %w", err)
	}
	active, err := r.Store.ActiveTransfers(ctx)
	if err != nil {
		return err
	}
	r.sweepListings(active)
	// What already runs at the service takes its instance's slot first.
	for _, first := range []bool{true, false} {
		for _, t := range active {
			holds := t.State == Running || t.State == Verifying && t.Kind == StageOut
			if holds == first {
				r.start(t, true, holds)
			}
		}
	}
	return nil
}

// Wait returns when all work has ended.
func (r *Runner) Wait() { r.wg.Wait() }

func (r *Runner) start(t Transfer, resumed, holds bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.runs[t.ID] != nil || t.State.Ended() {
		return
	}
	x := &run{t: t, cancel: make(chan struct{}), resumed: resumed}
	for _, fs := range r.FileSystems {
		if fs.Name == t.FS {
			x.fs = fs
		}
	}
	x.lane = r.lanes[x.fs.Instance]
	if x.lane == nil {
		x.lane = &lane{slot: make(chan struct{}, 1)}
		r.lanes[x.fs.Instance] = x.lane
	}
	if t.Cancel {
		x.stop()
	}
	if holds {
		select {
		case x.lane.slot <- struct{}{}:
			x.holds = true
		default: // cannot be: one at a time was started
		}
	}
	r.runs[t.ID] = x
	r.wg.Go(func() {
		defer r.forget(x)
		r.drive(r.ctx, x)
	})
}

func (r *Runner) forget(x *run) {
	x.release()
	r.mu.Lock()
	delete(r.runs, x.t.ID)
	r.mu.Unlock()
}

func (x *run) stop() { x.once.Do(func() { close(x.cancel) }) }

func (x *run) release() {
	if x.holds {
		x.holds = false
		<-x.lane.slot
	}
}

// CancelNow makes a transfer end that the store has marked.
func (r *Runner) CancelNow(id string) {
	r.mu.Lock()
	x := r.runs[id]
	r.mu.Unlock()
	if x != nil {
		x.stop()
	}
}

// Live is a transfer as it is at this moment.
type Live struct {
	Transfer
	BytesPerSec float64
	ETA         time.Duration // negative when unknown
	Wait        string        // what it waits for, or ""
}

// Live returns the transfer id if it goes on.
func (r *Runner) Live(id string) (Live, bool) {
	r.mu.Lock()
	x := r.runs[id]
	r.mu.Unlock()
	if x == nil {
		return Live{}, false
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	rate := x.meter.rate(r.Clock.Now())
	l := Live{Transfer: x.t, BytesPerSec: rate, ETA: -1, Wait: x.wait}
	if left := x.t.Bytes - x.meter.last(); rate > 0 && left >= 0 {
		l.ETA = time.Duration(float64(left) / rate * float64(time.Second))
	}
	return l, true
}

// drive runs x until it ends or ctx does.
func (r *Runner) drive(ctx context.Context, x *run) {
	pause, failures := firstPause, 0
	for ctx.Err() == nil {
		if x.fs.Name == "" {
			r.fail(ctx, x, &Error{Message: fmt.Sprintf("file system %s is not in sluice.yaml any more", x.t.FS)})
			return
		}
		var err error
		switch x.t.State {
		case Queued:
			err = r.queued(ctx, x)
		case Running:
			err = r.running(ctx, x)
		case Verifying:
			if x.t.Kind == StageIn {
				err = r.verifyIn(ctx, x)
			} else {
				err = r.verifyOut(ctx, x)
			}
		default:
			return
		}
		err = denied(err)
		var final *Error
		var broken *files.Error
		if errors.As(err, &broken) && !errors.As(err, &final) {
			// The file system answers, with an error: patience has an end.
			if failures++; failures == maxFailures {
				err = &Error{Message: fmt.Sprintf("file system %s: %s", x.t.FS, broken.Message), Hint: broken.Hint, Err: err}
			}
		}
		switch {
		case err == nil:
			pause, failures = firstPause, 0
		case ctx.Err() != nil:
			return
		case errors.Is(err, errCancelled):
			r.end(ctx, x, Cancelled, &Error{Message: x.t.URL() + ": cancelled, since no job wants it any more"})
			return
		case errors.As(err, &final):
			r.fail(ctx, x, final)
			return
		default:
			// The file system or the service does not answer: wait, as for Lustre's maintenance.
			r.Log.Warn("transfer waits", "transfer", x.t.ID, "err", err)
			x.waitFor(err.Error())
			if x.cancelled() {
				select {
				case <-ctx.Done():
				case <-r.Clock.After(pause):
				}
			} else {
				r.sleep(ctx, x, pause)
			}
			pause = min(2*pause, lastPause)
		}
	}
}

// Pauses between two tries of what does not answer, and how many errors of the
// file system itself are too many.
const (
	firstPause  = time.Second
	lastPause   = 30 * time.Second
	maxFailures = 5
)

var errCancelled = errors.New("cancelled")

func (x *run) cancelled() bool {
	select {
	case <-x.cancel:
		return true
	default:
		return false
	}
}

func (x *run) waitFor(what string) {
	x.mu.Lock()
	x.wait = what
	x.mu.Unlock()
}

// sleep waits for d; false: ctx ended or the transfer was cancelled before.
func (r *Runner) sleep(ctx context.Context, x *run, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-x.cancel:
		return false
	case <-r.Clock.After(d):
		return true
	}
}

// change edits the transfer in memory.
func (x *run) change(f func(*Transfer)) {
	x.mu.Lock()
	f(&x.t)
	x.mu.Unlock()
}

// enter moves the transfer, edits it and stores it: the only way to another state.
func (r *Runner) enter(ctx context.Context, x *run, to State, edit func(*Transfer)) error {
	next := x.t
	if err := next.Enter(to); err != nil {
		return err
	}
	if edit != nil {
		edit(&next)
	}
	if err := r.save(ctx, x, next); err != nil {
		return err
	}
	if r.Changed != nil {
		r.Changed(next)
	}
	return nil
}

// save stores next and makes it the transfer.
func (r *Runner) save(ctx context.Context, x *run, next Transfer) error {
	if err := r.Store.SaveTransfer(ctx, next); err != nil {
		return err
	}
	x.change(func(t *Transfer) { *t = next })
	x.lastSave = r.Clock.Now()
	return nil
}

// counters are stored every so often: the truth is at the service.
const saveEvery = 2 * time.Second

func (r *Runner) count(ctx context.Context, x *run, phaseBytes int64, edit func(*Transfer)) {
	now := r.Clock.Now()
	x.mu.Lock()
	edit(&x.t)
	x.meter.add(now, phaseBytes)
	x.wait = ""
	t := x.t
	x.mu.Unlock()
	if now.Sub(x.lastSave) >= saveEvery {
		x.lastSave = now
		if err := r.Store.SaveCounters(ctx, t); err != nil {
			r.Log.Warn("store counters", "transfer", t.ID, "err", err)
		}
	}
}

func (r *Runner) fault(point string) {
	if r.Fault != nil {
		r.Fault(point)
	}
}

func (r *Runner) fail(ctx context.Context, x *run, e *Error) { r.end(ctx, x, Failed, e) }

// end stores the bad end first, so that no crash can lose it, then removes what
// was not published; what a crash leaves, the next start sweeps.
func (r *Runner) end(ctx context.Context, x *run, to State, e *Error) {
	for {
		err := r.enter(ctx, x, to, func(t *Transfer) {
			t.Error, t.Hint, t.EndedAt = files.Shorten(e.Message), e.Hint, r.Clock.Now()
		})
		if err == nil || ctx.Err() != nil {
			break
		}
		r.Log.Error("store the end of a transfer", "transfer", x.t.ID, "err", err)
		if !r.sleep(ctx, x, time.Second) && ctx.Err() != nil {
			return
		}
	}
	r.fault("ended")
	r.Log.Info("transfer ended", "transfer", x.t.ID, "state", to, "err", e.Message)
	r.removeWork(ctx, x)
	r.removeListings(x.t.ID)
}

// removeWork removes what a transfer that has ended had on the file system for itself.
func (r *Runner) removeWork(ctx context.Context, x *run) {
	if x.fs.Name == "" {
		return
	}
	dir := files.ExportDir(x.t.ID)
	if x.t.Kind == StageIn {
		dir = files.PartialDir(x.t.Dataset, x.t.Version, x.t.ID)
	}
	if err := r.Files.Remove(ctx, x.fs.Mount, dir); err != nil {
		r.Log.Warn("remove a transfer's directory; the next start of sluiced tries again", "transfer", x.t.ID, "err", err)
	}
}

// sweep removes, once a process and file system and before the first new
// directory is made, the partial and export directories of transfers that nobody knows.
func (r *Runner) sweep(ctx context.Context, x *run) error {
	x.lane.sweep.Lock()
	defer x.lane.sweep.Unlock()
	if x.lane.swept {
		return nil
	}
	// A transfer is stored before its directory is made, so none is missing here.
	active, err := r.Store.ActiveTransfers(ctx)
	if err != nil {
		return err
	}
	var keep []string
	for _, t := range active {
		keep = append(keep, t.ID)
	}
	removed, err := r.Files.Sweep(ctx, x.fs.Mount, keep)
	if err != nil {
		return fmt.Errorf("sweep %s: %w", x.fs.Mount, err)
	}
	for _, path := range removed {
		r.Log.Info("removed the directory of an unknown transfer", "path", path)
	}
	x.lane.swept = true
	return nil
}

// Files beside the store: a transfer's listing or manifest, and what was in the
// bucket before an export.
func (r *Runner) listingFile(id string) string { return filepath.Join(r.Dir, id+".manifest") }
func (r *Runner) beforeFile(id string) string  { return filepath.Join(r.Dir, id+".before") }

func (r *Runner) removeListings(id string) {
	os.Remove(r.listingFile(id))
	os.Remove(r.beforeFile(id))
}

// sweepListings removes files of transfers that have ended. It runs before any
// new one can be made.
func (r *Runner) sweepListings(active []Transfer) {
	keep := map[string]bool{}
	for _, t := range active {
		keep[t.ID] = true
	}
	names, err := os.ReadDir(r.Dir)
	if err != nil {
		return
	}
	for _, n := range names {
		base := n.Name()[:len(n.Name())-len(filepath.Ext(n.Name()))]
		if !keep[base] {
			os.Remove(filepath.Join(r.Dir, n.Name()))
		}
	}
}

func (r *Runner) fileSystem(name string) (FileSystem, error) {
	for _, fs := range r.FileSystems {
		if fs.Name == name {
			return fs, nil
		}
	}
	return FileSystem{}, &Error{Message: fmt.Sprintf("file system %q does not exist in this cluster", name)}
}

// instanceWords says what an instance that is not ACTIVE does, or "".
func instanceWords(fs string, i *lustre.Instance) string {
	switch i.State {
	case lustre.StateActive, "":
		return ""
	case lustre.StateUpgrading:
		return fmt.Sprintf("file system %s is being upgraded", fs)
	}
	return fmt.Sprintf("file system %s is %s", fs, i.State)
}

// newTransfer fills what both kinds have.
func (r *Runner) newTransfer(j Job, kind Kind, fs string) Transfer {
	return Transfer{
		ID: uuid.NewString(), Kind: kind, State: Queued, FS: fs,
		JobID: j.ID, Gen: j.Gen, UID: j.UID, GID: j.GID, User: j.User, QueuedAt: r.Clock.Now(),
	}
}

// Job is for whom something is staged.
type Job struct {
	ID       uint32
	Gen      int // counts the runs under one id: a requeued job keeps its id
	UID, GID uint32
	User     string
	Dir      string // relative to the file system
}

// In asks for a place's data on a file system.
type In struct {
	storage.Place
	FS         string
	AllowEmpty bool
}

// StageIn attaches a job's stage-in number index to a transfer that brings, or
// has brought, what the bucket holds now. Failures for a person are an *Error.
func (r *Runner) StageIn(ctx context.Context, j Job, index int, in In) (Transfer, error) {
	fs, err := r.fileSystem(in.FS)
	if err != nil {
		return Transfer{}, err
	}
	l, err := r.list(ctx, in)
	if err != nil {
		return Transfer{}, err
	}
	inst, err := r.Lustre.GetInstance(ctx, fs.Instance)
	if err != nil {
		return Transfer{}, denied(err)
	}
	t := r.newTransfer(j, StageIn, fs.Name)
	t.Bucket, t.Prefix, t.Account = in.Bucket, in.Prefix, in.Account
	t.Dataset, t.Version, t.InstanceUID = DatasetID(in.Bucket, in.Prefix), l.Version, inst.UID
	t.Objects, t.Bytes = l.Objects, l.Bytes
	got, found, err := r.Store.AttachStageIn(ctx, index, t, false)
	if err != nil || found {
		return got, err
	}
	// The listing first: a transfer without it could not be verified.
	if err := atomicfile.Write(r.listingFile(t.ID), files.Lines(l.Entries), 0o600); err != nil {
		return Transfer{}, err
	}
	r.fault("listed")
	got, _, err = r.Store.AttachStageIn(ctx, index, t, true)
	if err != nil {
		r.removeListings(t.ID)
		return Transfer{}, err
	}
	r.fault("attached")
	if got.ID != t.ID {
		r.removeListings(t.ID)
	}
	r.start(got, false, false)
	return got, nil
}

// list lists a prefix once for all that ask while it is being listed: the tasks
// of an array all want the same.
func (r *Runner) list(ctx context.Context, in In) (Listing, error) {
	// As each account, since each must have the right to.
	key := fmt.Sprintf("%t %s %s", in.AllowEmpty, in.Account, in.Place)
	answer := r.listings.DoChan(key, func() (any, error) {
		return List(r.ctx, r.Bucket, in.Place, in.AllowEmpty)
	})
	select {
	case a := <-answer:
		l, _ := a.Val.(Listing)
		return l, a.Err
	case <-ctx.Done():
		return Listing{}, ctx.Err()
	}
}

// Out asks for a directory of a job in a bucket.
type Out struct {
	storage.Place
	From string // relative to the job's directory
	FS   string
	Move bool
}

// StageOut attaches a job's stage-out number index to the transfer that brings
// its results to the bucket. Failures for a person are an *Error.
func (r *Runner) StageOut(ctx context.Context, j Job, index int, out Out) (Transfer, error) {
	fs, err := r.fileSystem(out.FS)
	if err != nil {
		return Transfer{}, err
	}
	t := r.newTransfer(j, StageOut, fs.Name)
	t.Bucket, t.Prefix, t.Account = out.Bucket, out.Prefix, out.Account
	t.JobDir, t.From, t.Move = j.Dir, out.From, out.Move
	got, err := r.Store.AttachStageOut(ctx, index, t)
	if err != nil {
		return Transfer{}, err
	}
	r.fault("attached")
	r.start(got, false, false)
	return got, nil
}
