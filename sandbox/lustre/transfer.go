package lustre

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/mail"
	"os"
	"path"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	api "github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

const (
	workers   = 4         // objects that one transfer copies at a time
	blockSize = 256 << 10 // bytes that a worker holds
	// maxEntries is how many examples an error summary has (proto comment of ErrorSummary).
	maxEntries = 5
)

// transfer is an import or export that runs or has run.
type transfer struct {
	server *Server
	inst   *instance
	tree   *tree
	// objects is the bucket's data as the transfer's account sees it.
	objects Bucket
	bucket  string
	prefix  string // "" or ending in a slash
	meter   *lustrefs.Meter
	pace    pace

	failing atomic.Int64 // objects that a fault makes fail

	mu       sync.Mutex // guards what follows
	paths    api.TransferMetadata
	counters api.TransferCounters
	errors   []api.ErrorSummary
}

// metadata is a copy of where the transfer is.
func (t *transfer) metadata() *api.TransferMetadata {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.paths
	m.Counters = t.counters
	for _, e := range t.errors {
		e.ErrorLogEntries = append([]api.ErrorLogEntry(nil), e.ErrorLogEntries...)
		m.ErrorSummaries = append(m.ErrorSummaries, e)
	}
	return &m
}

func (t *transfer) count(f func(c *api.TransferCounters)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f(&t.counters)
}

// fail counts an object that was not copied. wrote is what had been counted as copied of it.
func (t *transfer) fail(uri string, size, wrote int64, err error) {
	code := rpcCodes[rpcOf(err).code].name
	t.mu.Lock()
	defer t.mu.Unlock()
	t.counters.BytesCopiedCount -= wrote
	t.counters.ObjectsFailedCount++
	t.counters.BytesFailedCount += size
	i := 0
	for i < len(t.errors) && t.errors[i].ErrorCode != code {
		i++
	}
	if i == len(t.errors) {
		t.errors = append(t.errors, api.ErrorSummary{ErrorCode: code})
	}
	e := &t.errors[i]
	e.ErrorCount++
	if len(e.ErrorLogEntries) < maxEntries {
		// JSON takes no other text than UTF-8, and a file's name may have any byte.
		e.ErrorLogEntries = append(e.ErrorLogEntries, api.ErrorLogEntry{URI: strings.ToValidUTF8(uri, "\uFFFD"), ErrorDetails: []string{err.Error()}})
	}
}

func (t *transfer) uri(object string) string { return "gs://" + t.bucket + "/" + object }

var (
	bucketName     = regexp.MustCompile(`^[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]$`)
	serviceAccount = regexp.MustCompile(`^projects/(-|[-a-z0-9]+)/serviceAccounts/([^/]+)$`)
)

func (s *Server) importData(r *http.Request, name string) (any, error) {
	in := new(api.ImportDataRequest)
	body, err := decode(r, in)
	if err != nil {
		return nil, err
	}
	return s.transferData(name, body, transferRequest{r, "import", in.Name, in.GcsPath, in.LustrePath, in.RequestID, in.ServiceAccount})
}

func (s *Server) exportData(r *http.Request, name string) (any, error) {
	in := new(api.ExportDataRequest)
	body, err := decode(r, in)
	if err != nil {
		return nil, err
	}
	return s.transferData(name, body, transferRequest{r, "export", in.Name, in.GcsPath, in.LustrePath, in.RequestID, in.ServiceAccount})
}

// transferRequest is an ImportDataRequest or ExportDataRequest.
type transferRequest struct {
	from           *http.Request
	verb           string // import, export
	name           string
	gcs            *api.GcsPath
	lustre         *api.LustrePath
	requestID      string
	serviceAccount string
}

// check returns the bucket, the prefix and the Lustre path.
func (r transferRequest) check(name string) (bucket, prefix, dir string, err error) {
	if r.name != "" && r.name != name {
		return "", "", "", invalid("name %q is not that of the URL, %q", r.name, name)
	}
	if r.gcs == nil {
		return "", "", "", invalid("gcs_path is required")
	}
	rest, ok := strings.CutPrefix(r.gcs.URI, "gs://")
	bucket, prefix, _ = strings.Cut(rest, "/")
	switch {
	case !ok || !bucketName.MatchString(bucket):
		return "", "", "", invalid("gcs_path.uri %q must be gs://BUCKET or gs://BUCKET/PATH/", r.gcs.URI)
	case prefix != "" && !strings.HasSuffix(prefix, "/"):
		return "", "", "", invalid("gcs_path.uri %q must end in a slash", r.gcs.URI)
	}
	dir = "/"
	if r.lustre != nil && r.lustre.Path != "" {
		dir = r.lustre.Path
	}
	if !strings.HasPrefix(dir, "/") || strings.ContainsRune(dir, 0) || path.Clean(dir) != strings.TrimSuffix(dir, "/") && dir != "/" {
		return "", "", "", invalid("lustre_path.path %q must be an absolute path without . and ..", dir)
	}
	if a := r.account(); a != "" {
		if p, err := mail.ParseAddress(a); err != nil || p.Address != a {
			return "", "", "", invalid("service_account %q must be an e-mail address or projects/PROJECT/serviceAccounts/ADDRESS", r.serviceAccount)
		}
	}
	return bucket, prefix, dir, nil
}

// account is the email of the service account given, or "".
func (r transferRequest) account() string {
	if m := serviceAccount.FindStringSubmatch(r.serviceAccount); m != nil {
		return m[2]
	}
	return r.serviceAccount
}

func (s *Server) transferData(name string, body []byte, r transferRequest) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.once(r.requestID, r.verb+" "+name, body, func() (*operation, error) {
		inst, err := s.find(name)
		if err != nil {
			return nil, err
		}
		bucket, prefix, dir, err := r.check(name)
		if err != nil {
			return nil, err
		}
		account, err := s.dataAccount(r.from, r.account())
		if err != nil {
			return nil, err
		}
		if err := s.changeable(inst); err != nil {
			return nil, err
		}
		if inst.transfers > 0 && !s.options.Faults.On(faults.LustreTransferParallel) {
			return nil, &rpcError{codeAborted, "unable to queue the operation"}
		}
		inst.transfers++
		t := &transfer{server: s, inst: inst, bucket: bucket, prefix: prefix, meter: lustrefs.NewMeter(inst.dir)}
		gcs, lustre := &api.GcsPath{URI: r.gcs.URI}, &api.LustrePath{Path: dir}
		meta := api.OperationMetadata{Target: name}
		var run func(context.Context) error
		var response string
		if r.verb == "import" {
			meta.Type, response = api.TypeImport, "ImportDataResponse"
			t.paths = api.TransferMetadata{SourceGcsPath: gcs, DestinationLustrePath: lustre, TransferType: "IMPORT"}
			run = t.importAll
		} else {
			meta.Type, meta.Verb, response = api.TypeExport, "export", "ExportDataResponse"
			t.paths = api.TransferMetadata{SourceLustrePath: lustre, DestinationGcsPath: gcs, TransferType: "EXPORT"}
			run = t.exportAll
		}
		parent, _, _ := strings.Cut(name, "/instances/")
		return s.startWith(parent, meta, t, func(ctx context.Context) (any, error) {
			defer func() {
				s.mu.Lock()
				defer s.mu.Unlock()
				inst.transfers--
			}()
			var err error
			if err := s.pass(ctx, inst); err != nil {
				return nil, err
			}
			if t.objects, err = s.bucketAs(account); err != nil {
				return nil, err
			}
			if t.tree, err = openTree(inst.dir, dir); err != nil {
				return nil, &rpcError{codeOf(err), fmt.Sprintf("Lustre path %q: %v", dir, err)}
			}
			defer t.tree.close()
			t.setFailing(name)
			if err := run(ctx); err != nil {
				return nil, err
			}
			return typed(response, struct{}{}), ctx.Err()
		}, func() { inst.transfers-- }), nil
	})
}

// nothing begins no object's name that anybody would give.
const nothing = "\U0010FFFF"

// crew runs copy for each job that find sends, on a few workers. It returns find's error.
func crew[J any](ctx context.Context, find func(send func(J) error) error, copy func(J)) error {
	jobs := make(chan J, 2*workers)
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for j := range jobs {
				if ctx.Err() == nil {
					copy(j)
				}
			}
		})
	}
	err := find(func(j J) error {
		select {
		case jobs <- j:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	close(jobs)
	wg.Wait()
	return err
}

func (t *transfer) importAll(ctx context.Context) error {
	objects, err := t.objects.List(t.bucket, t.prefix)
	if err != nil {
		return &rpcError{codeOf(err), fmt.Sprintf("list gs://%s/%s: %v", t.bucket, t.prefix, err)}
	}
	return crew(ctx, func(send func(Object) error) error {
		for _, o := range objects {
			rel := strings.TrimPrefix(o.Name, t.prefix)
			if rel == "" {
				continue // the placeholder of the prefix itself
			}
			if err := checkName(rel); err != nil {
				t.found(o.Size)
				t.fail(t.uri(o.Name), o.Size, 0, &rpcError{codeInvalidArgument, err.Error()})
				continue
			}
			if info, err := t.tree.stat(rel); err == nil && info.Mode().IsRegular() && info.Size() == o.Size && !info.ModTime().Before(o.Updated) {
				t.skipped(o.Size)
				continue
			}
			t.found(o.Size)
			if err := send(o); err != nil {
				return err
			}
		}
		return nil
	}, func(o Object) {
		if wrote, err := t.importOne(ctx, o); err != nil {
			t.fail(t.uri(o.Name), o.Size, wrote, err)
		} else {
			t.copied()
		}
	})
}

func (t *transfer) importOne(ctx context.Context, o Object) (wrote int64, err error) {
	if err := t.failsNow(); err != nil {
		return 0, err
	}
	r, err := t.objects.Open(t.bucket, o.Name)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	if err := t.room(ctx); err != nil {
		return 0, err
	}
	owner, _ := t.server.options.Faults.Get(faults.LustreImportOwner)
	f, err := t.tree.create(strings.TrimPrefix(o.Name, t.prefix), ownerOf(owner, o))
	if err != nil {
		return 0, err
	}
	// What a transfer leaves of a file that it could not finish is not documented: it stays here.
	wrote, err = t.copy(ctx, f, r, t.uri(o.Name), o.Size, faults.LustreImportCorrupt, func(n int) error {
		if err := t.room(ctx); err != nil {
			return err
		}
		return t.meter.Take(t.server.options.Faults.Int(faults.LustreCapacity), int64(n))
	})
	if err == nil {
		// The file system's own clock is a few milliseconds behind, and must not make the copy older than the object.
		now := time.Now()
		err = os.Chtimes(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), now, now)
	}
	return wrote, errors.Join(err, f.Close())
}

// room waits until the instance answers, and says whether anything may be added to it.
func (t *transfer) room(ctx context.Context) error {
	if err := t.server.pass(ctx, t.inst); err != nil {
		return err
	}
	if t.server.options.Faults.Hits(faults.LustreENOSPC, t.inst.id(), "") {
		return syscall.ENOSPC
	}
	return nil
}

// file is a regular file that is to be exported.
type file struct {
	rel  string
	size int64
}

func (t *transfer) exportAll(ctx context.Context) error {
	// A bucket that does not exist, or may not be read, ends the operation before the first file.
	if _, err := t.objects.List(t.bucket, t.prefix+nothing); err != nil {
		return &rpcError{codeOf(err), fmt.Sprintf("gs://%s: %v", t.bucket, err)}
	}
	return crew(ctx, func(send func(file) error) error {
		return t.tree.walk(func(rel string, mode os.FileMode, err error) error {
			if err != nil {
				t.found(0)
				t.fail(t.uri(t.prefix+rel), 0, 0, err)
				return ctx.Err()
			}
			if !mode.IsRegular() { // a symbolic link, a fifo: nothing that an object could be
				t.skipped(0)
				return ctx.Err()
			}
			info, err := t.tree.stat(rel)
			if errors.Is(err, fs.ErrNotExist) {
				return ctx.Err()
			}
			if err != nil {
				t.found(0)
				t.fail(t.uri(t.prefix+rel), 0, 0, err)
				return ctx.Err()
			}
			name := t.prefix + rel
			if !utf8.ValidString(name) || strings.ContainsAny(name, "\r\n") || len(name) > 1024 {
				t.found(info.Size())
				t.fail(t.uri(name), info.Size(), 0, &rpcError{codeInvalidArgument, "an object's name is at most 1024 bytes of UTF-8 without line ends"})
				return ctx.Err()
			}
			if o, err := t.objects.Stat(t.bucket, name); err == nil && o.Size == info.Size() && !o.Updated.Before(info.ModTime()) {
				t.skipped(o.Size)
				return ctx.Err()
			}
			t.found(info.Size())
			return send(file{rel, info.Size()})
		})
	}, func(f file) {
		if wrote, err := t.exportOne(ctx, f); err != nil {
			t.fail(t.uri(t.prefix+f.rel), f.size, wrote, err)
		} else {
			t.copied()
		}
	})
}

func (t *transfer) exportOne(ctx context.Context, f file) (wrote int64, err error) {
	if err := t.failsNow(); err != nil {
		return 0, err
	}
	if err := t.server.pass(ctx, t.inst); err != nil {
		return 0, err
	}
	r, info, err := t.tree.read(f.rel)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	name := t.prefix + f.rel
	w, err := t.objects.Create(t.bucket, name)
	if err != nil {
		return 0, err
	}
	defer w.Abort()
	wrote, err = t.copy(ctx, w, r, t.uri(name), info.Size(), faults.LustreExportCorrupt, func(int) error { return t.server.pass(ctx, t.inst) })
	if err != nil {
		return wrote, err
	}
	return wrote, w.Commit()
}

func (t *transfer) found(size int64) {
	t.count(func(c *api.TransferCounters) { c.FoundObjectsCount++; c.BytesFoundCount += size })
}

func (t *transfer) skipped(size int64) {
	t.count(func(c *api.TransferCounters) { c.ObjectsSkippedCount++; c.BytesSkippedCount += size })
}

func (t *transfer) copied() { t.count(func(c *api.TransferCounters) { c.ObjectsCopiedCount++ }) }

// copy streams one object's data and counts the bytes as they pass. The fault of that name flips
// the byte in the middle.
func (t *transfer) copy(ctx context.Context, w io.Writer, r io.Reader, uri string, size int64, fault string, reserve func(int) error) (wrote int64, err error) {
	corrupt := int64(-1)
	if v, on := t.server.options.Faults.Get(fault); on && v == uri {
		corrupt = size / 2
	}
	block := make([]byte, blockSize)
	for {
		n, err := io.ReadFull(r, block)
		if n > 0 {
			if i := corrupt - wrote; i >= 0 && i < int64(n) {
				block[i] ^= 0xff
				t.server.options.Faults.Note(fault, nil, uri, fmt.Sprintf("flipped byte %d", corrupt))
			}
			if err := t.pace.wait(ctx, n, t.server.options.Faults.Int(faults.LustreTransferRate)); err != nil {
				return wrote, err
			}
			if err := reserve(n); err != nil {
				return wrote, err
			}
			if _, err := w.Write(block[:n]); err != nil {
				return wrote, err
			}
			wrote += int64(n)
			t.count(func(c *api.TransferCounters) { c.BytesCopiedCount += int64(n) })
		}
		switch {
		case err == io.EOF || err == io.ErrUnexpectedEOF:
			return wrote, nil
		case err != nil:
			return wrote, err
		}
	}
}

// pace holds all workers of a transfer together to a rate. The zero value is ready.
type pace struct {
	mu   sync.Mutex
	next time.Time // when the next block may pass; mu guards it
}

// wait returns when n bytes may pass, at rate bytes a second; 0 is no limit.
func (p *pace) wait(ctx context.Context, n int, rate int64) error {
	if rate <= 0 {
		return ctx.Err()
	}
	cost := time.Duration(float64(n) / float64(rate) * float64(time.Second))
	p.mu.Lock()
	now := time.Now()
	if p.next.Before(now) {
		p.next = now
	}
	p.next = p.next.Add(cost)
	d := p.next.Sub(now)
	p.mu.Unlock()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// codeOf is how the service names an error of the file system or the bucket.
func codeOf(err error) rpcCode {
	switch {
	case errors.Is(err, context.Canceled):
		return codeCancelled
	case errors.Is(err, fs.ErrNotExist):
		return codeNotFound
	case errors.Is(err, fs.ErrPermission):
		return codePermissionDenied
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return codeResourceExhausted
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.ELOOP), errors.Is(err, syscall.ENXIO), errors.Is(err, syscall.EXDEV):
		return codeFailedPrecondition
	case errors.Is(err, syscall.ENAMETOOLONG):
		return codeInvalidArgument
	case errors.Is(err, syscall.EIO):
		return codeInternal
	}
	return codeUnknown
}
