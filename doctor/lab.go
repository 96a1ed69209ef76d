package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"cloud.google.com/go/storage"
	"github.com/google/uuid"
	"google.golang.org/api/iterator"
	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/compute"
	"github.com/sluicehpc/sluice/gcp/iam"
	"github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/lustre/probe"
	"github.com/sluicehpc/sluice/policy"
	"github.com/sluicehpc/sluice/staging/files"
)

// Lab is where proofs work: the real services, a bucket prefix and a directory of its own.
type Lab struct {
	Config  *config.Config
	FS      config.FileSystem
	Name    string // of this run; begins the name of everything that it makes
	Bucket  string
	Prefix  string // of this run's objects; ends in a slash
	Account string // service account of the data, or "" for this VM's own
	Lustre  *lustre.Client
	Compute *compute.Client
	IAM     *iam.Client

	machineType string
	objects     *storage.Client
	proof, run  undo
	made        bool // the directory and the prefix
}

// open connects to the services. Nothing is made yet.
func (l *Lab) open(ctx context.Context, o Options) (err error) {
	var known bool
	if l.FS, known = l.Config.FileSystem(o.FileSystem); !known {
		return fmt.Errorf("sluice.yaml has no file system %q", o.FileSystem)
	}
	if l.Account = o.ServiceAccount; l.Account == "" {
		l.Account = accountFor(l.Config.Policy, l.Bucket, l.Prefix)
	}
	endpoints := l.Config.Endpoints.GCP()
	if l.Lustre, err = lustre.NewClient(ctx, gcp.ClientOptions(endpoints.Lustre)...); err != nil {
		return err
	}
	if l.IAM, err = iam.NewClient(ctx, endpoints); err != nil {
		return err
	}
	if l.Compute, err = compute.New(ctx, compute.Config{Project: l.Config.Project, Zone: l.Config.Zone, Endpoint: endpoints.Compute}); err != nil {
		return err
	}
	opts := []option.ClientOption{storage.WithJSONReads()}
	if endpoints.Storage != "" {
		opts = append(opts, option.WithEndpoint(endpoints.Storage+"/storage/v1/"))
	}
	if l.Account != "" {
		// The source outlives ctx: what was made is removed after an interrupt too.
		opts = append(opts, option.WithTokenSource(l.IAM.DataSource(context.WithoutCancel(ctx), l.dataToken())))
	}
	if l.objects, err = storage.NewClient(ctx, opts...); err != nil {
		l.Compute.Close()
		return fmt.Errorf("storage client: %w", err)
	}
	l.objects.SetRetry(storage.WithMaxAttempts(8), storage.WithPolicy(storage.RetryAlways))
	return nil
}

// accountFor is the service account of the first rule that may read and write the prefix, whoever it is for, or "".
func accountFor(rules policy.Policy, bucket, prefix string) string {
	for _, r := range rules {
		one := policy.Policy{{Users: []string{"*"}, Read: r.Read, Write: r.Write, ServiceAccount: r.ServiceAccount}}
		may := func(v policy.Verb) bool {
			return one.Decide(policy.Ask{User: "root", Verb: v, Bucket: bucket, Prefix: prefix}).Allowed
		}
		if may(policy.Read) && may(policy.Write) {
			return r.ServiceAccount
		}
	}
	return ""
}

// dataToken is what moves this run's objects.
func (l *Lab) dataToken() iam.DataToken {
	return iam.DataToken{Account: l.Account, Bucket: l.Bucket, Prefix: l.Prefix, Write: true}
}

func (l *Lab) close() { errors.Join(l.Compute.Close(), l.objects.Close()) }

// undo remembers how something that a proof made is removed, when the proof has ended.
func (l *Lab) undo(what string, do func(ctx context.Context) error) { l.proof.push(what, do) }

// base is the run's directory on the mount.
func (l *Lab) base() string { return filepath.Join(l.FS.Mount, files.Base, l.Name) }

// lustrePath is a directory of mkdir as the service names it.
func (l *Lab) lustrePath(name string) string { return path.Join("/", files.Base, l.Name, name) }

// url is the gs:// URL of a prefix below the run's own.
func (l *Lab) url(prefix string) string { return "gs://" + l.Bucket + "/" + l.Prefix + prefix }

// mkdir makes a new directory of the run and returns its absolute path. A mount that hangs is noticed before it is touched.
func (l *Lab) mkdir(name string) (string, error) {
	if r := probe.Probe(probe.Check{Dir: l.FS.Mount, Types: l.FS.Types}); r.State != probe.OK {
		return "", fmt.Errorf("file system %s: %s", l.FS.Name, r.Detail)
	}
	if !l.made {
		// As sluiced makes it, where it has not done so yet.
		above := filepath.Join(l.FS.Mount, files.Base)
		switch err := os.Mkdir(above, 0o711); {
		case err == nil:
			l.run.push("remove directory "+above, func(context.Context) error {
				os.Remove(above) // sluiced may use it by now
				return nil
			})
		case !errors.Is(err, fs.ErrExist):
			return "", err
		}
		l.run.push("remove directory "+l.base(), func(context.Context) error { return os.RemoveAll(l.base()) })
		if err := os.Mkdir(l.base(), 0o700); err != nil {
			return "", err
		}
		l.made = true
	}
	dir := filepath.Join(l.base(), name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", err
	}
	l.undo("remove directory "+dir, func(context.Context) error { return os.RemoveAll(dir) })
	return dir, nil
}

// put makes objects below prefix, which ends in a slash and is of one proof.
func (l *Lab) put(ctx context.Context, prefix string, objects map[string]string) error {
	l.removeLater(prefix)
	for name, data := range objects {
		w := l.object(prefix + name).NewWriter(ctx)
		w.ChunkSize = 0 // one request
		_, err := w.Write([]byte(data))
		if err := errors.Join(err, w.Close()); err != nil {
			return gcp.Wrap(err, "make "+l.url(prefix+name))
		}
	}
	return nil
}

// putLarge makes one object of about size bytes out of copies of a small one, which costs no upload.
func (l *Lab) putLarge(ctx context.Context, name string, size int64) (int64, error) {
	const block, most = 4 << 20, 32 // compose takes 32 objects
	prefix := "parts/" + name + "/" // not among what is imported with the object
	if err := l.put(ctx, prefix, map[string]string{"0": strings.Repeat("0123456789abcdef", block/16)}); err != nil {
		return 0, err
	}
	l.removeLater(name)
	part, have := l.object(prefix+"0"), int64(block)
	for level := 1; have < size; level++ {
		n := min(most, (size+have-1)/have)
		sources := make([]*storage.ObjectHandle, n)
		for i := range sources {
			sources[i] = part
		}
		part = l.object(fmt.Sprintf("%s%d", prefix, level))
		if _, err := part.ComposerFrom(sources...).Run(ctx); err != nil {
			return 0, gcp.Wrap(err, "compose "+l.url(name))
		}
		have *= n
	}
	if _, err := l.object(name).CopierFrom(part).Run(ctx); err != nil {
		return 0, gcp.Wrap(err, "copy to "+l.url(name))
	}
	return have, nil
}

func (l *Lab) object(name string) *storage.ObjectHandle {
	return l.objects.Bucket(l.Bucket).Object(l.Prefix + name)
}

func (l *Lab) removeLater(prefix string) {
	l.undo("remove "+l.url(prefix), func(ctx context.Context) error { return l.remove(ctx, prefix) })
}

// remove deletes all objects whose names begin with prefix, below the run's own.
func (l *Lab) remove(ctx context.Context, prefix string) error {
	list, err := l.list(ctx, prefix)
	if err != nil {
		return err
	}
	for name := range list {
		if err := l.object(name).Delete(ctx); err != nil && !errors.Is(err, storage.ErrObjectNotExist) {
			return err
		}
	}
	return nil
}

// list returns the sizes of the objects whose names begin with prefix; names are below the run's prefix.
func (l *Lab) list(ctx context.Context, prefix string) (map[string]int64, error) {
	all := map[string]int64{}
	it := l.objects.Bucket(l.Bucket).Objects(ctx, &storage.Query{Prefix: l.Prefix + prefix, Projection: storage.ProjectionNoACL})
	for {
		a, err := it.Next()
		if errors.Is(err, iterator.Done) {
			return all, nil
		}
		if err != nil {
			return nil, gcp.Wrap(err, "list "+l.url(prefix))
		}
		all[strings.TrimPrefix(a.Name, l.Prefix)] = a.Size
	}
}

// begin starts a transfer, when the instance is free for it, and cancels it at the end of the proof if it still runs.
func (l *Lab) begin(ctx context.Context, start func(ctx context.Context) (*lustre.Operation, error)) (*lustre.Operation, error) {
	for {
		op, err := start(ctx)
		if !gcp.IsConflict(err) {
			l.cancelLater(op, err)
			return op, err
		}
		// Somebody else's transfer: sluiced's queue, or another admin.
		if perr := pause(ctx, 2*time.Second); perr != nil {
			return nil, fmt.Errorf("%w (%w)", err, perr)
		}
	}
}

func (l *Lab) cancelLater(op *lustre.Operation, err error) {
	if err != nil {
		return
	}
	l.undo("end operation "+op.Name, func(ctx context.Context) error {
		now, err := l.Lustre.GetOperation(ctx, op.Name)
		if err != nil || now.Done {
			return err
		}
		if err := l.Lustre.CancelOperation(ctx, op.Name); err != nil {
			return err
		}
		_, err = l.Lustre.Wait(ctx, op.Name, nil)
		if errors.As(err, new(*lustre.OperationError)) {
			err = nil // cancelled: as it should be
		}
		return err
	})
}

// importRequest and exportRequest are between a prefix below the run's own and a directory of mkdir.
func (l *Lab) importRequest(prefix, dir string) *lustre.ImportDataRequest {
	return &lustre.ImportDataRequest{
		Name: l.FS.Instance, GcsPath: &lustre.GcsPath{URI: l.url(prefix)}, LustrePath: &lustre.LustrePath{Path: l.lustrePath(dir)},
		RequestID: uuid.NewString(), ServiceAccount: l.Account,
	}
}

func (l *Lab) exportRequest(dir, prefix string) *lustre.ExportDataRequest {
	return &lustre.ExportDataRequest{
		Name: l.FS.Instance, LustrePath: &lustre.LustrePath{Path: l.lustrePath(dir)}, GcsPath: &lustre.GcsPath{URI: l.url(prefix)},
		RequestID: uuid.NewString(), ServiceAccount: l.Account,
	}
}

// importData runs an import to its end. A transfer that failed is an error, as are failed objects.
func (l *Lab) importData(ctx context.Context, r *lustre.ImportDataRequest) (lustre.TransferCounters, error) {
	op, err := l.begin(ctx, func(ctx context.Context) (*lustre.Operation, error) { return l.Lustre.ImportData(ctx, r) })
	return l.finish(ctx, op, err)
}

func (l *Lab) exportData(ctx context.Context, r *lustre.ExportDataRequest) (lustre.TransferCounters, error) {
	l.removeLater(strings.TrimPrefix(r.GcsPath.URI, l.url("")))
	op, err := l.begin(ctx, func(ctx context.Context) (*lustre.Operation, error) { return l.Lustre.ExportData(ctx, r) })
	return l.finish(ctx, op, err)
}

func (l *Lab) finish(ctx context.Context, op *lustre.Operation, err error) (lustre.TransferCounters, error) {
	if err == nil {
		op, err = l.Lustre.Wait(ctx, op.Name, nil)
	}
	if err != nil {
		return lustre.TransferCounters{}, err
	}
	t := transferOf(op)
	if t.Counters.ObjectsFailedCount > 0 {
		return t.Counters, fmt.Errorf("operation %s: %d objects failed: %s", op.Name, t.Counters.ObjectsFailedCount, failures(t))
	}
	return t.Counters, nil
}

// transferOf is the transfer's part of an operation's metadata.
func transferOf(op *lustre.Operation) lustre.TransferMetadata {
	if op == nil || op.Metadata == nil || op.Metadata.Transfer == nil {
		return lustre.TransferMetadata{}
	}
	return *op.Metadata.Transfer
}

func failures(t lustre.TransferMetadata) string {
	var texts []string
	for _, e := range t.ErrorSummaries {
		text := fmt.Sprintf("%s (%d)", e.ErrorCode, e.ErrorCount)
		for _, entry := range e.ErrorLogEntries {
			text += fmt.Sprintf(" %s: %s", entry.URI, strings.Join(entry.ErrorDetails, ", "))
			break
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, "; ")
}

// tree lists what is below dir: relative paths with sizes; directories end in a slash and have size 0.
func tree(dir string) (map[string]int64, error) {
	all := map[string]int64{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		rel := strings.TrimPrefix(p, dir+"/")
		if d.IsDir() {
			all[rel+"/"] = 0
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		all[rel] = info.Size()
		return nil
	})
	return all, err
}

// difference says how two trees differ, or "".
func difference(want, got map[string]int64) string {
	var texts []string
	for _, name := range slices.Sorted(maps.Keys(want)) {
		switch size, there := got[name]; {
		case !there:
			texts = append(texts, fmt.Sprintf("%q is missing", name))
		case size != want[name]:
			texts = append(texts, fmt.Sprintf("%q has %d bytes instead of %d", name, size, want[name]))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if _, wanted := want[name]; !wanted {
			texts = append(texts, fmt.Sprintf("%q is too many", name))
		}
	}
	return strings.Join(texts, ", ")
}

// sameContents compares files below dir with what the objects are made of.
func sameContents(dir string, objects map[string]string) error {
	for name, data := range objects {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		if !bytes.Equal(got, []byte(data)) {
			return fmt.Errorf("%s has %d bytes that differ from the object's %d", name, len(got), len(data))
		}
	}
	return nil
}

// pause waits, or returns ctx's error.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
