package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/lustre"
)

// sample is a prefix's objects: some below others, odd names, an empty one.
var sample = map[string]string{
	"top.txt":            "at the top\n",
	"a/one.bin":          strings.Repeat("one", 1000),
	"a/deep/er/two.bin":  strings.Repeat("two", 30000),
	"b c/ü – 1%41&x.txt": "a name with blanks and more\n",
	"empty":              "",
}

// sizes are the sample's, with its directories, as tree shows them.
func sizes(objects map[string]string) map[string]int64 {
	all := map[string]int64{}
	for name, data := range objects {
		all[name] = int64(len(data))
		for dir := filepath.Dir(name); dir != "."; dir = filepath.Dir(dir) {
			all[dir+"/"] = 0
		}
	}
	return all
}

func total(objects map[string]string) (bytes int64) {
	for _, data := range objects {
		bytes += int64(len(data))
	}
	return bytes
}

func proveImport(ctx context.Context, l *Lab) (string, error) {
	if err := l.put(ctx, "import/", sample); err != nil {
		return "", err
	}
	dir, err := l.mkdir("import")
	if err != nil {
		return "", err
	}
	if _, err := l.importData(ctx, l.importRequest("import/", "import")); err != nil {
		return "", err
	}
	got, err := tree(dir)
	if err != nil {
		return "", err
	}
	if d := difference(sizes(sample), got); d != "" {
		return "", refuted("the directory is not what the prefix is: %s", d)
	}
	if err := sameContents(dir, sample); err != nil {
		return "", refuted("%v", err)
	}
	return fmt.Sprintf("%d objects, %d bytes arrived under their names with their contents", len(sample), total(sample)), nil
}

// proveCounters reads an operation the moment it is done, and again.
func proveCounters(ctx context.Context, l *Lab) (string, error) {
	if err := l.put(ctx, "counters/", sample); err != nil {
		return "", err
	}
	if _, err := l.mkdir("counters"); err != nil {
		return "", err
	}
	want := lustre.TransferCounters{
		FoundObjectsCount: int64(len(sample)), BytesFoundCount: total(sample),
		ObjectsCopiedCount: int64(len(sample)), BytesCopiedCount: total(sample),
	}
	in, out := l.importRequest("counters/", "counters"), l.exportRequest("counters", "counted/")
	l.removeLater("counted/")
	for _, transfer := range []struct {
		verb  string
		start func(ctx context.Context) (*lustre.Operation, error)
	}{
		{"import", func(ctx context.Context) (*lustre.Operation, error) { return l.Lustre.ImportData(ctx, in) }},
		{"export", func(ctx context.Context) (*lustre.Operation, error) { return l.Lustre.ExportData(ctx, out) }},
	} {
		op, err := l.begin(ctx, transfer.start)
		if err != nil {
			return "", err
		}
		if op, err = l.Lustre.Wait(ctx, op.Name, nil); err != nil {
			return "", err
		}
		first := transferOf(op).Counters
		if err := pause(ctx, settle); err != nil {
			return "", err
		}
		if op, err = l.Lustre.GetOperation(ctx, op.Name); err != nil {
			return "", err
		}
		if later := transferOf(op).Counters; later != first {
			return "", refuted("the counters of an %s changed after it was done: %+v, then %+v", transfer.verb, first, later)
		}
		if first != want {
			return "", refuted("the counters of an %s are %+v, want %+v", transfer.verb, first, want)
		}
	}
	return fmt.Sprintf("import and export: %d objects, %d bytes found and copied in the first answer that said done, and %s later", want.FoundObjectsCount, want.BytesFoundCount, settle), nil
}

// settle is how long something that lags behind is given to show.
const settle = 2 * time.Second

// proveOneTransfer asks for a second import while a first one runs; objects grow until the first is slow enough.
func proveOneTransfer(ctx context.Context, l *Lab) (string, error) {
	if err := l.put(ctx, "second/", map[string]string{"object": "x"}); err != nil {
		return "", err
	}
	for i, size := range []int64{64 << 20, 256 << 20, 1 << 30, 4 << 30} {
		first, second := fmt.Sprintf("first-%d", i), fmt.Sprintf("second-%d", i)
		if _, err := l.putLarge(ctx, first+"/object", size); err != nil {
			return "", err
		}
		if _, err := l.mkdir(first); err != nil {
			return "", err
		}
		dir, err := l.mkdir(second)
		if err != nil {
			return "", err
		}
		r := l.importRequest(first+"/", first)
		a, err := l.begin(ctx, func(ctx context.Context) (*lustre.Operation, error) { return l.Lustre.ImportData(ctx, r) })
		if err != nil {
			return "", err
		}
		b, refusal := l.Lustre.ImportData(ctx, l.importRequest("second/", second))
		l.cancelLater(b, refusal)
		if refusal != nil && !gcp.IsConflict(refusal) {
			return "", refusal
		}
		if a, err = l.Lustre.Wait(ctx, a.Name, nil); err != nil {
			return "", err
		}
		if refusal != nil {
			return l.nothingQueued(ctx, dir, second, refusal)
		}
		if b, err = l.Lustre.Wait(ctx, b.Name, nil); err != nil {
			return "", err
		}
		if a.Metadata.EndTime.After(b.Metadata.CreateTime) {
			return "", refuted("a second import was taken at %s, while the first ran until %s", b.Metadata.CreateTime.Format(time.RFC3339Nano), a.Metadata.EndTime.Format(time.RFC3339Nano))
		}
	}
	return "", errors.New("every first import had ended before a second could be asked for")
}

func (l *Lab) nothingQueued(ctx context.Context, dir, name string, refusal error) (string, error) {
	if status := gcp.Status(refusal); gcp.Code(refusal) != 409 || status != "ABORTED" {
		return "", refuted("the second import was refused with %d %s: %v", gcp.Code(refusal), status, refusal)
	}
	if err := pause(ctx, settle); err != nil {
		return "", err
	}
	parent, _, _ := strings.Cut(l.FS.Instance, "/instances/")
	ops, err := l.Lustre.ListOperations(ctx, parent, fmt.Sprintf("metadata.target=%q", l.FS.Instance))
	if err != nil {
		return "", err
	}
	for _, op := range ops {
		if to := transferOf(op).DestinationLustrePath; to != nil && to.Path == l.lustrePath(name) {
			return "", refuted("the second import was refused, but there is operation %s of it", op.Name)
		}
	}
	got, err := tree(dir)
	if err != nil {
		return "", err
	}
	if len(got) > 0 {
		return "", refuted("the second import was refused, but it left %d files", len(got))
	}
	return fmt.Sprintf("refused while the first ran (%v), no operation and no file of it afterwards", refusal), nil
}

// proveRequestID repeats an import and an export, while they run and after they have ended.
func proveRequestID(ctx context.Context, l *Lab) (string, error) {
	if err := l.put(ctx, "request-id/", map[string]string{"object": "x"}); err != nil {
		return "", err
	}
	if _, err := l.mkdir("request-id"); err != nil {
		return "", err
	}
	in, out := l.importRequest("request-id/", "request-id"), l.exportRequest("request-id", "request-id-out/")
	l.removeLater("request-id-out/")
	for _, call := range []struct {
		verb string
		do   func(ctx context.Context) (*lustre.Operation, error)
	}{
		{"importData", func(ctx context.Context) (*lustre.Operation, error) { return l.Lustre.ImportData(ctx, in) }},
		{"exportData", func(ctx context.Context) (*lustre.Operation, error) { return l.Lustre.ExportData(ctx, out) }},
	} {
		first, err := l.begin(ctx, call.do)
		if err != nil {
			return "", err
		}
		for _, when := range []string{"at once", "after it had ended"} {
			again, err := call.do(ctx)
			if err != nil {
				return "", refuted("%s repeated %s with its requestId was refused: %v", call.verb, when, err)
			}
			if again.Name != first.Name {
				l.cancelLater(again, nil)
				return "", refuted("%s repeated %s with its requestId is %s, not %s", call.verb, when, again.Name, first.Name)
			}
			if _, err := l.Lustre.Wait(ctx, first.Name, nil); err != nil {
				return "", err
			}
		}
	}
	return "importData and exportData, repeated at once and after their end, gave the same operation", nil
}

// proveOwner changes what an import left, as publishing does.
func proveOwner(ctx context.Context, l *Lab) (string, error) {
	if err := l.put(ctx, "owner/", map[string]string{"sub/object": "x"}); err != nil {
		return "", err
	}
	dir, err := l.mkdir("owner")
	if err != nil {
		return "", err
	}
	partial := filepath.Join(dir, "partial")
	if err := os.Mkdir(partial, 0o700); err != nil {
		return "", err
	}
	if _, err := l.importData(ctx, l.importRequest("owner/", "owner/partial")); err != nil {
		return "", err
	}
	file := filepath.Join(partial, "sub/object")
	came, err := os.Lstat(file)
	if err != nil {
		return "", err
	}
	const uid, mode = 12345, 0o440
	if err := errors.Join(os.Chown(file, uid, uid), os.Chmod(file, mode)); err != nil {
		return "", refuted("root may not change what was imported: %v", err)
	}
	moved := filepath.Join(dir, "published")
	if err := os.Rename(partial, moved); err != nil {
		return "", refuted("root may not rename the directory: %v", err)
	}
	now, err := os.Lstat(filepath.Join(moved, "sub/object"))
	if err != nil {
		return "", err
	}
	if uidOf(now) != uid || now.Mode().Perm() != mode {
		return "", refuted("after chown %d and chmod %04o the file has uid %d and mode %s", uid, mode, uidOf(now), now.Mode())
	}
	return fmt.Sprintf("an imported file came with uid %d and mode %s; root changed both and renamed its directory", uidOf(came), came.Mode()), nil
}

// proveExportLinks exports a tree with links to what lies outside it.
func proveExportLinks(ctx context.Context, l *Lab) (string, error) {
	dir, err := l.mkdir("links")
	if err != nil {
		return "", err
	}
	inside := filepath.Join(dir, "inside")
	err = errors.Join(
		os.Mkdir(inside, 0o755), os.Mkdir(filepath.Join(dir, "outside"), 0o755),
		os.WriteFile(filepath.Join(inside, "file"), []byte("inside\n"), 0o644),
		os.WriteFile(filepath.Join(dir, "outside/secret"), []byte("outside\n"), 0o600),
		os.Symlink("../outside/secret", filepath.Join(inside, "relative")),
		os.Symlink("/etc/hostname", filepath.Join(inside, "absolute")),
		os.Symlink("../outside", filepath.Join(inside, "directory")),
	)
	if err != nil {
		return "", err
	}
	if _, err := l.exportData(ctx, l.exportRequest("links/inside", "links/")); err != nil {
		return "", err
	}
	got, err := l.list(ctx, "links/")
	if err != nil {
		return "", err
	}
	if d := difference(map[string]int64{"links/file": 7}, got); d != "" {
		return "", refuted("the objects are not the tree's files: %s", d)
	}
	return "of a file and links to a file, to a directory and to /etc/hostname, the file alone became an object", nil
}

func proveExportHardLinks(ctx context.Context, l *Lab) (string, error) {
	dir, err := l.mkdir("hard-links")
	if err != nil {
		return "", err
	}
	err = errors.Join(
		os.Mkdir(filepath.Join(dir, "own"), 0o755), os.Mkdir(filepath.Join(dir, "held"), 0o700),
		os.WriteFile(filepath.Join(dir, "own/file"), []byte("linked\n"), 0o644),
	)
	if err == nil {
		err = os.Link(filepath.Join(dir, "own/file"), filepath.Join(dir, "held/file"))
	}
	if err != nil {
		return "", err
	}
	if _, err := l.exportData(ctx, l.exportRequest("hard-links/held", "hard-links/")); err != nil {
		return "", err
	}
	got, err := l.list(ctx, "hard-links/")
	if err != nil {
		return "", err
	}
	if d := difference(map[string]int64{"hard-links/file": 7}, got); d != "" {
		return "", refuted("the objects are not the tree's files: %s", d)
	}
	return "a file with two names became an object of its size", nil
}

// proveExportSwap replaces the exported directory by a link while the export runs.
func proveExportSwap(ctx context.Context, l *Lab) (string, error) {
	const files, size = 64, 256 << 10
	dir, err := l.mkdir("swap")
	if err != nil {
		return "", err
	}
	src, away := filepath.Join(dir, "tree"), filepath.Join(dir, "away")
	if err := os.Mkdir(src, 0o755); err != nil {
		return "", err
	}
	data := []byte(strings.Repeat("0123456789abcdef", size/16))
	for i := range files {
		if err := os.WriteFile(filepath.Join(src, fmt.Sprintf("file-%03d", i)), data, 0o644); err != nil {
			return "", err
		}
	}
	before, err := tree(src)
	if err != nil {
		return "", err
	}
	l.removeLater("swap/")
	r := l.exportRequest("swap/tree", "swap/")
	op, err := l.begin(ctx, func(ctx context.Context) (*lustre.Operation, error) { return l.Lustre.ExportData(ctx, r) })
	if err != nil {
		return "", err
	}
	if err := errors.Join(os.Rename(src, away), os.Symlink("/etc", src)); err != nil {
		return "", err
	}
	op, err = l.Lustre.Wait(ctx, op.Name, nil)
	if err != nil && !errors.As(err, new(*lustre.OperationError)) {
		return "", err
	}
	after, err := tree(away)
	if err != nil {
		return "", err
	}
	if d := difference(before, after); d != "" {
		return "", refuted("the export changed the tree: %s", d)
	}
	got, err := l.list(ctx, "swap/")
	if err != nil {
		return "", err
	}
	for name, n := range got {
		if want, known := before[strings.TrimPrefix(name, "swap/")]; !known || n != want {
			return "", refuted("%s (%d bytes) is none of the tree's files", l.url(name), n)
		}
	}
	return fmt.Sprintf("the tree is as before, and the %d objects are of its %d files; the operation ended with %q", len(got), files, fmt.Sprint(op.Err())), nil
}

// smallEnough is how much free space a proof may fill, in bytes.
const smallEnough = 1 << 30

// proveFull imports more than is free, where that is little.
func proveFull(ctx context.Context, l *Lab) (string, error) {
	dir, err := l.mkdir("full")
	if err != nil {
		return "", err
	}
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return "", err
	}
	free := int64(st.Bavail) * st.Bsize
	if free > smallEnough {
		return "", notApplicable("%s are free, and filling them would stop everybody: prove it on an instance with less than %s", bytesText(free), bytesText(smallEnough))
	}
	if _, err := l.putLarge(ctx, "full/object", free+64<<20); err != nil {
		return "", err
	}
	r := l.importRequest("full/", "full")
	op, err := l.begin(ctx, func(ctx context.Context) (*lustre.Operation, error) { return l.Lustre.ImportData(ctx, r) })
	if err != nil {
		return "", err
	}
	if op, err = l.Lustre.Wait(ctx, op.Name, nil); err != nil {
		return "", refuted("the operation itself failed: %v", err)
	}
	t := transferOf(op)
	text := failures(t)
	if t.Counters.ObjectsFailedCount == 0 {
		return "", refuted("the import says that nothing failed")
	}
	for _, word := range []string{"RESOURCE_EXHAUSTED", "ENOSPC", "no space left"} {
		if strings.Contains(strings.ToLower(text), strings.ToLower(word)) {
			return text, nil
		}
	}
	return "", refuted("the failed objects are described otherwise: %s", text)
}

// notFound is google.rpc.Code's NOT_FOUND.
const notFound = 5

func proveMissing(ctx context.Context, l *Lab) (string, error) {
	if err := l.put(ctx, "missing/", map[string]string{"object": "x"}); err != nil {
		return "", err
	}
	if _, err := l.mkdir("missing"); err != nil {
		return "", err
	}
	noBucket := &lustre.GcsPath{URI: "gs://" + l.Name + "/none/"} // a random name
	importFrom, importTo := l.importRequest("missing/", "missing"), l.importRequest("missing/", "missing/none")
	importFrom.GcsPath = noBucket
	exportTo, exportFrom := l.exportRequest("missing", "missing/"), l.exportRequest("missing/none", "missing/")
	exportTo.GcsPath = noBucket
	for _, call := range []struct {
		what string
		do   func(ctx context.Context) (*lustre.Operation, error)
	}{
		{"import from a bucket that is not there", func(ctx context.Context) (*lustre.Operation, error) { return l.Lustre.ImportData(ctx, importFrom) }},
		{"import into a directory that is not there", func(ctx context.Context) (*lustre.Operation, error) { return l.Lustre.ImportData(ctx, importTo) }},
		{"export to a bucket that is not there", func(ctx context.Context) (*lustre.Operation, error) { return l.Lustre.ExportData(ctx, exportTo) }},
		{"export of a directory that is not there", func(ctx context.Context) (*lustre.Operation, error) { return l.Lustre.ExportData(ctx, exportFrom) }},
	} {
		op, err := l.begin(ctx, call.do)
		if err != nil {
			return "", refuted("%s: the call itself failed: %v", call.what, err)
		}
		op, err = l.Lustre.Wait(ctx, op.Name, nil)
		switch {
		case err == nil:
			return "", refuted("%s: the operation succeeded", call.what)
		case op == nil || op.Error == nil:
			return "", err
		case op.Error.Code != notFound:
			return "", refuted("%s: the operation failed with code %d, want %d: %s", call.what, op.Error.Code, notFound, op.Error.Message)
		}
	}
	return "four operations, of a bucket and of a directory that are not there, failed with code 5", nil
}

// proveIncremental repeats an import after each kind of change.
func proveIncremental(ctx context.Context, l *Lab) (string, error) {
	objects := map[string]string{"changed": "before", "deleted": "x", "kept": "x"}
	if err := l.put(ctx, "again/", objects); err != nil {
		return "", err
	}
	dir, err := l.mkdir("again")
	if err != nil {
		return "", err
	}
	// An object that is newer than its copy must be so by more than a clock's tick.
	changes := []struct {
		what            string
		change          func() error
		copied, skipped int64
	}{
		{"into an empty directory", func() error { return nil }, 3, 0},
		{"without a change", func() error { return nil }, 0, 3},
		{"after an object was written anew with the same size", func() error {
			return errors.Join(pause(ctx, settle), l.put(ctx, "again/", map[string]string{"changed": "after!"}))
		}, 1, 2},
		{"after a file was removed", func() error { return os.Remove(filepath.Join(dir, "deleted")) }, 1, 2},
		{"after a file was made longer", func() error { return os.WriteFile(filepath.Join(dir, "kept"), []byte("longer"), 0o644) }, 1, 2},
	}
	for _, c := range changes {
		if err := c.change(); err != nil {
			return "", err
		}
		got, err := l.importData(ctx, l.importRequest("again/", "again"))
		if err != nil {
			return "", err
		}
		if got.ObjectsCopiedCount != c.copied || got.ObjectsSkippedCount != c.skipped {
			return "", refuted("an import %s copied %d and skipped %d, want %d and %d", c.what, got.ObjectsCopiedCount, got.ObjectsSkippedCount, c.copied, c.skipped)
		}
	}
	return "of three files exactly those were copied again that were missing, of another size, or older than the object", nil
}

func provePlaceholder(ctx context.Context, l *Lab) (string, error) {
	if err := l.put(ctx, "placeholder/", map[string]string{"": "", "dir/": "", "file": "x"}); err != nil {
		return "", err
	}
	dir, err := l.mkdir("placeholder")
	if err != nil {
		return "", err
	}
	r := l.importRequest("placeholder/", "placeholder")
	op, err := l.begin(ctx, func(ctx context.Context) (*lustre.Operation, error) { return l.Lustre.ImportData(ctx, r) })
	if err != nil {
		return "", err
	}
	if op, err = l.Lustre.Wait(ctx, op.Name, nil); err != nil {
		return "", refuted("an object whose name ends in a slash fails the whole import: %v", err)
	}
	got, err := tree(dir)
	if err != nil {
		return "", err
	}
	t := transferOf(op)
	withDir := map[string]int64{"dir/": 0, "file": 1}
	without := map[string]int64{"file": 1}
	failed := t.Counters.ObjectsFailedCount
	if !(maps.Equal(got, withDir) && failed == 0) && !(maps.Equal(got, without) && failed == 1) {
		return "", refuted("of the objects \"\", \"dir/\" and \"file\" came %q, with %d failures", slices.Sorted(maps.Keys(got)), failed)
	}
	return fmt.Sprintf("the prefix's own placeholder was not copied; \"dir/\" gave %q, %d failures", slices.Sorted(maps.Keys(got)), failed), nil
}

// proveServiceAccount moves data as policy's account, both ways.
func proveServiceAccount(ctx context.Context, l *Lab) (string, error) {
	if l.Account == "" {
		return "", notApplicable("no service account is given: name one with --service-account, or a rule of policy for the bucket")
	}
	if err := l.put(ctx, "account/", map[string]string{"object": "x"}); err != nil {
		return "", err
	}
	dir, err := l.mkdir("account")
	if err != nil {
		return "", err
	}
	if _, err := l.importData(ctx, l.importRequest("account/", "account")); err != nil {
		return "", refuted("import as %s: %v", l.Account, err)
	}
	if err := sameContents(dir, map[string]string{"object": "x"}); err != nil {
		return "", refuted("%v", err)
	}
	if _, err := l.exportData(ctx, l.exportRequest("account", "account-out/")); err != nil {
		return "", refuted("export as %s: %v", l.Account, err)
	}
	return "an import and an export ran as " + l.Account, nil
}
