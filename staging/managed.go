package staging

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/staging/files"
)

// requestMemory is for how long the service surely knows a request id: it
// remembers them for 60 minutes (Managed Lustre API, field request_id).
const requestMemory = 50 * time.Minute

// Pauses of the managed engine.
const (
	firstPoll = 200 * time.Millisecond
	lastPoll  = 2 * time.Second
	// After ABORTED: somebody else's transfer runs on the instance.
	firstBusy = time.Second
	lastBusy  = time.Minute
)

// queued waits for the instance and starts the transfer's intent.
func (r *Runner) queued(ctx context.Context, x *run) error {
	if x.cancelled() {
		return errCancelled
	}
	if x.t.Kind == StageOut {
		if err := r.makeManifest(ctx, x); err != nil || x.t.State != Queued {
			return err
		}
	}
	if d := x.t.NotBefore.Sub(r.Clock.Now()); d > 0 {
		x.waitFor(fmt.Sprintf("another transfer runs on file system %s", x.t.FS))
		if !r.sleep(ctx, x, d) {
			return errors.Join(ctx.Err(), errCancelled)
		}
	}
	select {
	case x.lane.slot <- struct{}{}:
	default:
		x.waitFor(fmt.Sprintf("queued: another transfer runs on file system %s", x.t.FS))
		select {
		case x.lane.slot <- struct{}{}:
		case <-x.cancel:
			return errCancelled
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	x.holds = true
	x.waitFor("")
	err := r.begin(ctx, x)
	if err != nil || x.t.State != Running {
		x.release()
	}
	return err
}

func (r *Runner) begin(ctx context.Context, x *run) error {
	inst, err := r.Lustre.GetInstance(ctx, x.fs.Instance)
	if gcp.IsNotFound(err) {
		return &Error{Message: fmt.Sprintf("file system %s: its instance does not exist", x.t.FS), Err: err}
	}
	if err != nil {
		return err
	}
	if words := instanceWords(x.t.FS, inst); words != "" {
		return errors.New(words)
	}
	if x.t.Kind == StageOut {
		if err := r.listBefore(ctx, x); err != nil {
			return err
		}
	}
	r.fault("before-request")
	now := r.Clock.Now()
	err = r.enter(ctx, x, Running, func(t *Transfer) {
		t.RequestID, t.Operation, t.CalledAt = uuid.NewString(), "", now
		if t.StartedAt.IsZero() {
			t.StartedAt = now
		}
		if t.Kind == StageIn {
			t.InstanceUID = inst.UID
		}
	})
	r.fault("request-stored")
	return err
}

// lustrePath is the transfer's directory as the service names it.
func (x *run) lustrePath() string {
	if x.t.Kind == StageIn {
		return "/" + files.PartialDir(x.t.Dataset, x.t.Version, x.t.ID) + "/"
	}
	return "/" + files.ExportDir(x.t.ID) + "/"
}

// running calls the service, or finds the call of an earlier process, and
// follows the operation to its end.
func (r *Runner) running(ctx context.Context, x *run) error {
	if err := r.sweep(ctx, x); err != nil {
		return err
	}
	if x.t.Kind == StageIn {
		pub, err := r.Files.Prepare(ctx, x.fs.Mount, x.t.Dataset, x.t.Version, x.t.ID)
		if err != nil {
			return fileError(x, err)
		}
		if pub != nil {
			// Published, and the store does not know: it was lost.
			err := r.enter(ctx, x, Verifying, nil)
			x.release()
			return err
		}
		r.fault("prepared")
	}
	if x.t.Objects > 0 {
		if x.t.Operation == "" {
			if x.t.Kind == StageOut {
				if err := r.hold(ctx, x); err != nil {
					return err
				}
			}
			if err := r.call(ctx, x); err != nil || x.t.State != Running {
				return err
			}
		}
		op, err := r.follow(ctx, x)
		if err != nil {
			return err
		}
		r.fault("operation-done")
		if err := r.judge(x, op); err != nil {
			return err
		}
	}
	err := r.enter(ctx, x, Verifying, nil)
	if x.t.Kind == StageIn {
		x.release() // an export keeps it until the bucket was listed again
	}
	r.fault("verifying")
	return err
}

// call starts the operation once: with a request id that was stored before, the
// service gives the same operation to a repeated call, and for the time when it
// has forgotten the id, the operation is known by its path.
func (r *Runner) call(ctx context.Context, x *run) error {
	var op *lustre.Operation
	var err error
	if x.resumed && (x.t.Kind == StageIn || r.Clock.Now().Sub(x.t.CalledAt) > requestMemory) {
		if op, err = r.find(ctx, x); err != nil {
			return err
		}
	}
	if op == nil && x.cancelled() && !(x.resumed && x.t.Kind == StageOut) {
		return errCancelled
	}
	if op == nil {
		gcs, lpath := &lustre.GcsPath{URI: x.t.URL()}, &lustre.LustrePath{Path: x.lustrePath()}
		if x.t.Kind == StageIn {
			op, err = r.Lustre.ImportData(ctx, &lustre.ImportDataRequest{
				Name: x.fs.Instance, GcsPath: gcs, LustrePath: lpath, RequestID: x.t.RequestID, ServiceAccount: x.t.Account})
		} else {
			op, err = r.Lustre.ExportData(ctx, &lustre.ExportDataRequest{
				Name: x.fs.Instance, GcsPath: gcs, LustrePath: lpath, RequestID: x.t.RequestID, ServiceAccount: x.t.Account})
		}
		r.fault("called")
	}
	if gcp.IsConflict(err) {
		busy := min(firstBusy<<min(x.t.Attempt, 10), lastBusy)
		x.release()
		return r.enter(ctx, x, Queued, func(t *Transfer) {
			t.Attempt++
			t.NotBefore = r.Clock.Now().Add(busy)
			t.RequestID = ""
		})
	}
	if err != nil {
		if _, no := gcp.IsDenied(err); no {
			return err
		}
		if code := gcp.Code(err); code >= 400 && code < 500 && !gcp.Retryable(err) {
			return &Error{Message: fmt.Sprintf("%s: %v", x.t.URL(), err), Hint: "see sluiced's log on the controller", Err: err}
		}
		x.resumed = true // the call may have arrived
		return err
	}
	next := x.t
	next.Operation = op.Name
	err = r.save(ctx, x, next)
	r.fault("operation-stored")
	return err
}

// find looks for the operation of a call whose answer was lost.
func (r *Runner) find(ctx context.Context, x *run) (*lustre.Operation, error) {
	parent := x.fs.Instance[:strings.Index(x.fs.Instance, "/instances/")]
	ops, err := r.Lustre.ListOperations(ctx, parent, fmt.Sprintf("metadata.target=%q", x.fs.Instance))
	if err != nil {
		return nil, err
	}
	same := func(p *lustre.LustrePath) bool {
		return p != nil && strings.TrimSuffix(p.Path, "/") == strings.TrimSuffix(x.lustrePath(), "/")
	}
	for _, op := range ops {
		m := op.Metadata
		if m == nil || m.Transfer == nil {
			continue
		}
		// The directory is this transfer's alone.
		if x.t.Kind == StageIn && same(m.Transfer.DestinationLustrePath) || x.t.Kind == StageOut && same(m.Transfer.SourceLustrePath) {
			return op, nil
		}
	}
	return nil, nil
}

// follow polls the operation until it is done.
func (r *Runner) follow(ctx context.Context, x *run) (*lustre.Operation, error) {
	asked := false
	for pause := firstPoll; ; pause = min(pause*3/2, lastPoll) {
		if x.cancelled() && !asked {
			err := r.Lustre.CancelOperation(ctx, x.t.Operation)
			if final, ok := errors.AsType[*Error](denied(err)); ok {
				// Its writes must end all the same.
				r.Log.Error("a transfer cannot be cancelled and goes on", "transfer", x.t.ID, "err", final)
			} else if err != nil {
				return nil, err
			}
			asked = true
		}
		op, err := r.Lustre.GetOperation(ctx, x.t.Operation)
		if gcp.IsNotFound(err) {
			return nil, &Error{Message: x.t.URL() + ": the service does not know the transfer's operation any more",
				Hint: "submit the job again", Err: err}
		}
		if err != nil {
			return nil, err
		}
		if m := op.Metadata; m != nil && m.Transfer != nil {
			c := m.Transfer.Counters
			r.count(ctx, x, c.BytesCopiedCount, func(t *Transfer) {
				t.ObjectsDone, t.BytesDone = c.ObjectsCopiedCount, c.BytesCopiedCount
			})
		}
		if op.Done {
			return op, nil
		}
		if asked {
			// Its writes must end before the directory is removed.
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case <-r.Clock.After(pause):
			}
			continue
		}
		if !r.sleep(ctx, x, pause) && ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

// judge says whether a finished operation copied everything: "done" alone says nothing.
func (r *Runner) judge(x *run, op *lustre.Operation) error {
	url := x.t.URL()
	if op.Error != nil && op.Error.Code == lustre.Cancelled {
		if x.cancelled() {
			return errCancelled
		}
		return &Error{Message: url + ": the service's transfer was cancelled by somebody else", Hint: "submit the job again"}
	}
	if x.cancelled() {
		return errCancelled
	}
	verb := map[Kind]string{StageIn: "import", StageOut: "export"}[x.t.Kind]
	var m lustre.TransferMetadata
	if op.Metadata != nil && op.Metadata.Transfer != nil {
		m = *op.Metadata.Transfer
	}
	failed := m.Counters.ObjectsFailedCount
	if op.Error == nil && failed == 0 && len(m.ErrorSummaries) == 0 {
		return nil
	}
	text := ""
	if op.Error != nil {
		text = op.Error.Message
	}
	example := ""
	for _, s := range m.ErrorSummaries {
		if failed == 0 {
			failed += s.ErrorCount
		}
		for _, e := range s.ErrorLogEntries {
			text += " " + strings.Join(e.ErrorDetails, " ")
			if example == "" {
				example = strings.TrimSpace(e.URI + ": " + strings.Join(e.ErrorDetails, "; "))
			}
		}
		if example == "" {
			example = s.ErrorCode
		}
	}
	if full(text) && x.t.Kind == StageIn {
		return &Error{
			Message: fmt.Sprintf("file system %s is full: %s needs %s", x.t.FS, url, size(x.t.Bytes)),
			Hint:    "delete data on it, or ask the site's admin to enlarge it",
		}
	}
	msg := fmt.Sprintf("%s: the %s failed", url, verb)
	if failed > 0 {
		msg = fmt.Sprintf("%s: %d of %d objects were not %sed", url, failed, max(x.t.Objects, failed), verb)
	}
	if p := gcp.PermissionIn(text); p != "" { // before what is cut off
		msg += " for want of " + p
	}
	if example != "" {
		msg += ": " + example
	} else if op.Error != nil {
		msg += ": " + op.Error.Message
	}
	hint := "submit the job again once the cause is gone; see transfer " + x.t.ID
	return &Error{Message: msg, Hint: hint}
}

func full(text string) bool {
	text = strings.ToLower(text)
	for _, s := range []string{"no space left", "enospc", "disk full", "file system is full", "filesystem is full", "out of space"} {
		if strings.Contains(text, s) {
			return true
		}
	}
	return false
}

// size is bytes for people.
func size(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/1024, 0
	for v >= 1024 && i < len(units)-1 {
		v, i = v/1024, i+1
	}
	return fmt.Sprintf("%.1f %ciB", v, units[i])
}

// fileError makes a failure that repeating cannot help final.
func fileError(x *run, err error) error {
	var e *files.Error
	if !errors.As(err, &e) || !e.Input && !strings.Contains(e.Message, "file system is full") {
		return err
	}
	return &Error{Message: e.Message, Hint: e.Hint, Err: err}
}

// verifyIn compares every byte and publishes.
func (r *Runner) verifyIn(ctx context.Context, x *run) error {
	manifest, err := os.ReadFile(r.listingFile(x.t.ID))
	if errors.Is(err, os.ErrNotExist) {
		return &Error{Message: x.t.URL() + ": the listing was lost, so the copy cannot be verified", Hint: "submit the job again"}
	}
	if err != nil {
		return err
	}
	pub, err := r.Files.Prepare(ctx, x.fs.Mount, x.t.Dataset, x.t.Version, x.t.ID)
	if err != nil {
		return fileError(x, err)
	}
	switch {
	case pub != nil && pub.InstanceUID == x.t.InstanceUID:
		// Killed after the publication, or published before the store was lost.
	case pub != nil:
		return &Error{Message: fmt.Sprintf("%s: file system %s holds this version, published on another instance", x.t.URL(), x.t.FS),
			Hint: "an admin removes " + files.VersionDir(x.t.Dataset, x.t.Version)}
	default:
		if pub, err = r.verifyAndPublish(ctx, x, manifest); err != nil {
			return err
		}
	}
	next := x.t
	if err := next.Enter(Done); err != nil {
		return err
	}
	now := r.Clock.Now()
	if next.VerifiedAt.IsZero() {
		next.VerifiedAt = now
	}
	next.Verified, next.ObjectsDone, next.BytesDone, next.EndedAt = next.Objects, next.Objects, next.Bytes, now
	if err := r.Store.Publish(ctx, next, *pub); err != nil {
		return err
	}
	x.change(func(t *Transfer) { *t = next })
	r.fault("done")
	r.removeListings(x.t.ID)
	if r.Changed != nil {
		r.Changed(next)
	}
	r.Log.Info("transfer done", "transfer", x.t.ID, "source", x.t.URL(), "objects", x.t.Objects, "bytes", x.t.Bytes)
	return nil
}

func (r *Runner) verifyAndPublish(ctx context.Context, x *run, manifest []byte) (*files.Published, error) {
	vctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-x.cancel:
			stop()
		case <-vctx.Done():
		}
	}()
	problems, err := r.Files.Verify(vctx, x.fs.Mount, files.PartialDir(x.t.Dataset, x.t.Version, x.t.ID), manifest, func(p files.Progress) {
		r.count(ctx, x, p.Bytes, func(t *Transfer) { t.Verified = p.Objects })
	})
	if x.cancelled() {
		return nil, errCancelled
	}
	if err != nil {
		return nil, fileError(x, err)
	}
	if len(problems) > 0 {
		msg := fmt.Sprintf("%s: copy differs: %s", x.t.URL(), problems[0])
		if more := len(problems) - 1; more > 0 {
			msg += fmt.Sprintf(" (and %d more)", more)
		}
		return nil, &Error{Message: msg, Hint: "nothing was published; submit the job again"}
	}
	r.fault("verified")
	now := r.Clock.Now()
	x.change(func(t *Transfer) { t.VerifiedAt, t.Verified = now, t.Objects })
	pub := &files.Published{
		Dataset: x.t.Dataset, Version: x.t.Version, Source: x.t.URL(), Transfer: x.t.ID, InstanceUID: x.t.InstanceUID,
		Objects: x.t.Objects, Bytes: x.t.Bytes, VerifyLevel: LevelFull, VerifiedAt: now.UTC().Format(time.RFC3339Nano),
	}
	if err := r.Files.Publish(ctx, x.fs.Mount, *pub, manifest); err != nil {
		return nil, fileError(x, err)
	}
	r.fault("published")
	return pub, nil
}
