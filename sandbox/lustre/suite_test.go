package lustre_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/api/option"

	api "github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/lustre"
	"github.com/sluicehpc/sluice/sandbox/lustre/fusetest"
	"github.com/sluicehpc/sluice/sandbox/storage"
)

func TestMain(m *testing.M) { os.Exit(fusetest.Main(m)) }

const (
	project  = "sluice-sandbox"
	parent   = "projects/sluice-sandbox/locations/us-central1-a"
	scratch  = parent + "/instances/scratch"
	network  = "projects/sluice-sandbox/global/networks/default"
	bucketID = "corpus"
)

// world is the service over TCP with its real client and the sandbox's object storage behind it.
type world struct {
	*api.Client
	t       *testing.T
	server  *lustre.Server
	url     string
	storage *storage.Server
	faults  *faults.Set
	dir     string
	clock   *fakeNow
}

type fakeNow struct {
	mu    sync.Mutex
	shift time.Duration
}

func (f *fakeNow) now() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return time.Now().Add(f.shift)
}

func (f *fakeNow) advance(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.shift += d
}

func newWorld(t *testing.T, change ...func(*lustre.Options)) *world {
	t.Helper()
	dir := t.TempDir()
	st, err := storage.New(storage.Options{Dir: filepath.Join(dir, "storage"), Project: project})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	if err := st.CreateBucket(bucketID); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, storage: st, faults: new(faults.Set), dir: filepath.Join(dir, "lustre"), clock: new(fakeNow)}
	o := lustre.Options{
		Dir: w.dir, Bucket: lustre.FromStorage(st), Faults: w.faults, Now: w.clock.now,
		ServeCommand: fusetest.ServeCommand(t),
		Log:          slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
	for _, c := range change {
		c(&o)
	}
	if w.server, err = lustre.New(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.server.Close)
	hs := httptest.NewServer(discoverytest.Server(t, w.server, "lustre"))
	t.Cleanup(hs.Close)
	w.url = hs.URL
	w.Client, err = api.NewClient(t.Context(), option.WithEndpoint(hs.URL), option.WithoutAuthentication())
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func spec() *api.Instance {
	return &api.Instance{Filesystem: "scratch", CapacityGib: 18000, PerUnitStorageThroughput: 1000, Network: network}
}

// create makes the instance "scratch" and returns it once it is ACTIVE.
func (w *world) create() *api.Instance {
	w.t.Helper()
	op, err := w.CreateInstance(w.t.Context(), &api.CreateInstanceRequest{Parent: parent, InstanceID: "scratch", Instance: spec()})
	if err != nil {
		w.t.Fatal(err)
	}
	w.wait(op)
	inst, err := w.GetInstance(w.t.Context(), scratch)
	if err != nil {
		w.t.Fatal(err)
	}
	return inst
}

func (w *world) wait(op *api.Operation) *api.Operation {
	w.t.Helper()
	done, err := w.Wait(w.ctx(), op.Name, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	return done
}

func (w *world) ctx() context.Context {
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute)
	w.t.Cleanup(cancel)
	return ctx
}

func (w *world) importFrom(uri, path string) *api.Operation {
	w.t.Helper()
	op, err := w.ImportData(w.t.Context(), importOf(uri, path))
	if err != nil {
		w.t.Fatal(err)
	}
	return op
}

func (w *world) exportTo(path, uri string) *api.Operation {
	w.t.Helper()
	op, err := w.ExportData(w.t.Context(), &api.ExportDataRequest{Name: scratch, LustrePath: &api.LustrePath{Path: path}, GcsPath: &api.GcsPath{URI: uri}})
	if err != nil {
		w.t.Fatal(err)
	}
	return op
}

func importOf(uri, path string) *api.ImportDataRequest {
	r := &api.ImportDataRequest{Name: scratch, GcsPath: &api.GcsPath{URI: uri}}
	if path != "" {
		r.LustrePath = &api.LustrePath{Path: path}
	}
	return r
}

func (w *world) put(name, data string) {
	w.t.Helper()
	o, err := w.storage.Create(bucketID, name, storage.CreateOptions{})
	if err == nil {
		defer o.Abort()
		if _, err = io.WriteString(o, data); err == nil {
			_, err = o.Commit()
		}
	}
	if err != nil {
		w.t.Fatalf("put %q: %v", name, err)
	}
}

// objects are the names and the data of all objects below a prefix.
func (w *world) objects(prefix string) map[string]string {
	w.t.Helper()
	infos, err := w.storage.List(bucketID, prefix)
	if err != nil {
		w.t.Fatal(err)
	}
	all := map[string]string{}
	for _, o := range infos {
		r, _, err := w.storage.Open(bucketID, o.Name, 0)
		if err != nil {
			w.t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		r.Close()
		if err != nil {
			w.t.Fatal(err)
		}
		all[o.Name] = string(b)
	}
	return all
}

// data is the instance's directory on the host.
func (w *world) data() string {
	w.t.Helper()
	dir, ok := w.server.DataDir(scratch)
	if !ok {
		w.t.Fatal("no such instance")
	}
	return dir
}

// files are the paths and contents below a directory; links and special files by their kind.
func files(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		if !info.Mode().IsRegular() {
			all[rel] = info.Mode().Type().String()
			return nil
		}
		b, err := os.ReadFile(path)
		all[rel] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func (w *world) set(key, value string) {
	w.t.Helper()
	if err := w.faults.Set(key, value); err != nil {
		w.t.Fatal(err)
	}
}

// call makes a bare HTTP call and returns the status and the JSON answer.
func (w *world) call(method, path, body string) (int, map[string]any) {
	w.t.Helper()
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(w.t.Context(), method, w.url+path, r)
	if err != nil {
		w.t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	answer := map[string]any{}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		w.t.Fatalf("%s %s: %v", method, path, err)
	}
	return resp.StatusCode, answer
}

// loopback stands for the sandbox's bridge: instance addresses become ports of 127.0.0.1.
func loopback(record *sync.Map) func(netip.AddrPort) (net.Listener, error) {
	return func(a netip.AddrPort) (net.Listener, error) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err == nil {
			record.Store(a.String(), l.Addr().String())
		}
		return l, err
	}
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(fmt.Errorf("waited in vain for %s", what))
		}
	}
}
