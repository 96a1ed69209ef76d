package staging

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/sluicehpc/sluice/internal/atomicfile"
	"github.com/sluicehpc/sluice/staging/files"
)

// makeManifest lists what is to be exported, as the job's user, once.
func (r *Runner) makeManifest(ctx context.Context, x *run) error {
	if _, err := os.Stat(r.listingFile(x.t.ID)); err == nil && x.t.Objects > 0 {
		return nil
	}
	if err := r.Bucket.Check(ctx, x.t.place()); err != nil {
		return BucketError(x.t.place(), err)
	}
	u, err := r.user(ctx, x)
	if err != nil {
		return err
	}
	entries, skipped, err := r.Files.Manifest(ctx, u, x.fs.Mount, x.t.JobDir, x.t.From, len(x.t.Prefix), nil)
	if err != nil {
		return fileError(x, err)
	}
	if err := atomicfile.Write(r.listingFile(x.t.ID), files.Lines(entries), 0o600); err != nil {
		return err
	}
	next := x.t
	next.Objects, next.Bytes = int64(len(entries)), 0
	for _, e := range entries {
		next.Bytes += e.Size
	}
	if len(skipped) > 0 {
		r.Log.Info("not exported", "transfer", x.t.ID, "number", len(skipped), "first", skipped[0].Path, "why", skipped[0].Why)
		next.Note = fmt.Sprintf("%d not exported, such as %s: %s", len(skipped), skipped[0].Path, skipped[0].Why)
	}
	if err := r.save(ctx, x, next); err != nil {
		return err
	}
	r.fault("manifest")
	if len(entries) == 0 {
		// Nothing to bring: through the states, so that the table stays the only one.
		return r.enter(ctx, x, Running, func(t *Transfer) { t.StartedAt = r.Clock.Now() })
	}
	return nil
}

// hold brings what is exported out of the user's reach. The service reads as root: in
// the job's own directory, whoever may write there could put anything in the way of a
// file that was looked at before.
func (r *Runner) hold(ctx context.Context, x *run) error {
	manifest, err := os.ReadFile(r.listingFile(x.t.ID))
	if errors.Is(err, os.ErrNotExist) {
		return errManifestLost(x)
	}
	if err != nil {
		return err
	}
	if err := r.Files.Hold(ctx, x.fs.Mount, x.t.JobDir, x.t.From, x.t.ID, manifest); err != nil {
		return fileError(x, err)
	}
	r.fault("held")
	return nil
}

func errManifestLost(x *run) error {
	return &Error{Message: x.t.URL() + ": the manifest was lost, so the export cannot be verified", Hint: "the files are still in the job's directory"}
}

func (r *Runner) user(ctx context.Context, x *run) (files.User, error) {
	u := files.User{UID: x.t.UID, GID: x.t.GID, Groups: []uint32{x.t.GID}}
	if r.Groups == nil {
		return u, nil
	}
	groups, err := r.Groups(ctx, x.t.User)
	if err != nil {
		return u, fmt.Errorf("groups of %s: %w", x.t.User, err)
	}
	u.Groups = groups
	return u, nil
}

// listBefore keeps the generations of what is under the destination already, so
// that it can be told from what the export brings.
func (r *Runner) listBefore(ctx context.Context, x *run) error {
	before := map[string]int64{}
	for o, err := range r.Bucket.ListPrefix(ctx, x.t.place()) {
		if err != nil {
			return BucketError(x.t.place(), err)
		}
		before[o.Name] = o.Generation
	}
	data, err := json.Marshal(before)
	if err != nil {
		return err
	}
	return atomicfile.Write(r.beforeFile(x.t.ID), data, 0o600)
}

// verifyOut compares the bucket's own listing with the manifest, then deletes
// the sources of a move.
func (r *Runner) verifyOut(ctx context.Context, x *run) error {
	if x.cancelled() {
		return errCancelled
	}
	data, err := os.ReadFile(r.listingFile(x.t.ID))
	if errors.Is(err, os.ErrNotExist) {
		return errManifestLost(x)
	}
	if err != nil {
		return err
	}
	entries, err := files.ParseLines(data)
	if err != nil {
		return err
	}
	if len(entries) > 0 {
		if err := r.compareBucket(ctx, x, entries); err != nil {
			return err
		}
	}
	x.release()
	now := r.Clock.Now()
	r.fault("verified")
	if x.t.Move && len(entries) > 0 {
		u, err := r.user(ctx, x)
		if err != nil {
			return err
		}
		if err := r.Files.Unlink(ctx, u, x.fs.Mount, x.t.JobDir, x.t.From, data); err != nil {
			var final *Error
			if errors.As(fileError(x, err), &final) {
				return &Error{Message: fmt.Sprintf("%s: everything was copied and verified, but not all of it could be removed here: %s", x.t.URL(), final.Message), Hint: final.Hint, Err: err}
			}
			return err
		}
		r.fault("moved")
	}
	r.removeWork(ctx, x) // its links would keep the room of what the user deletes
	err = r.enter(ctx, x, Done, func(t *Transfer) {
		t.Verified, t.ObjectsDone, t.BytesDone = t.Objects, t.Objects, t.Bytes
		t.VerifiedAt, t.EndedAt = now, r.Clock.Now()
	})
	if err != nil {
		return err
	}
	r.fault("done")
	r.removeListings(x.t.ID)
	r.Log.Info("transfer done", "transfer", x.t.ID, "destination", x.t.URL(), "objects", x.t.Objects, "bytes", x.t.Bytes)
	return nil
}

func (r *Runner) compareBucket(ctx context.Context, x *run, entries []files.Entry) error {
	var before map[string]int64
	data, err := os.ReadFile(r.beforeFile(x.t.ID))
	if err == nil {
		err = json.Unmarshal(data, &before)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	want := make(map[string]files.Entry, len(entries))
	for _, e := range entries {
		want[x.t.Prefix+e.Path] = e
	}
	var problems []string
	var verified, bytes int64
	for o, err := range r.Bucket.ListPrefix(ctx, x.t.place()) {
		if err != nil {
			return BucketError(x.t.place(), err)
		}
		e, ok := want[o.Name]
		rel := strings.TrimPrefix(o.Name, x.t.Prefix)
		switch {
		case !ok && (before[o.Name] == o.Generation || strings.HasSuffix(o.Name, "/") && o.Size == 0 || rel == ""):
			// It was there before, or stands for a directory.
		case !ok:
			problems = append(problems, rel+": was exported but not in the job's directory when the job ended; somebody changed it meanwhile")
		case o.Size != e.Size:
			problems = append(problems, fmt.Sprintf("%s: %d bytes in the bucket, %d in the job's directory", rel, o.Size, e.Size))
		case o.CRC32C != e.CRC32C:
			problems = append(problems, fmt.Sprintf("%s: CRC32C is %08x in the bucket, %08x in the job's directory", rel, o.CRC32C, e.CRC32C))
		default:
			verified++
			bytes += o.Size
		}
		delete(want, o.Name)
		r.count(ctx, x, bytes, func(t *Transfer) { t.Verified = verified })
	}
	for _, e := range entries {
		if _, missing := want[x.t.Prefix+e.Path]; missing {
			problems = append(problems, e.Path+": missing in the bucket")
		}
	}
	if len(problems) == 0 {
		return nil
	}
	msg := fmt.Sprintf("%s: copy differs: %s", x.t.URL(), problems[0])
	if more := len(problems) - 1; more > 0 {
		msg += fmt.Sprintf(" (and %d more)", more)
	}
	return &Error{Message: msg, Hint: "nothing was deleted: the files are still in the job's directory"}
}
