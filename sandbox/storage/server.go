// Package storage is the sandbox's Cloud Storage: the JSON API and the XML reads, over files and an SQLite index on disk.
package storage

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/iam"
)

// projectNumber is the number of the one project that a sandbox has.
const projectNumber = 100000000001

// maxJSONBody bounds the body of every request that is not an upload.
const maxJSONBody = 1 << 20

// maxDrain is how much of a refused upload is read: one chunk of the Go client with room to spare.
const maxDrain = 32 << 20

// Options configures a Server.
type Options struct {
	// Dir holds everything: the index and the objects' data. It is made when missing
	// and belongs to one Server at a time.
	Dir string
	// Project is the project ID that owns every bucket.
	Project string
	// Now is the clock; nil means time.Now.
	Now func() time.Time
	// Faults are the faults to act on, or nil for none.
	Faults *faults.Set
	// IAM decides on every request; with nil, everybody may do everything.
	IAM *iam.Server
}

// Server is a Cloud Storage server. Its methods may be called concurrently.
//
// What it has acknowledged survives the death of its process at any moment. It does not sync to the disk, so a crash
// of the machine may lose the newest objects.
type Server struct {
	dir     string
	project string
	now     func() time.Time
	faults  *faults.Set
	iam     *iam.Server // or nil
	lock    *os.File
	db      *sql.DB // any number of readers
	writer  *sql.DB // one connection: SQLite has one writer

	mu       sync.Mutex         // guards what follows
	sessions map[string]*upload // resumable uploads seen since the start, by ID
}

// New opens the server kept in o.Dir. It fails when another process has it open.
func New(o Options) (*Server, error) {
	if o.Dir == "" || o.Project == "" {
		return nil, errors.New("storage: Dir and Project must be set")
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	s := &Server{dir: o.Dir, project: o.Project, now: o.Now, faults: o.Faults, iam: o.IAM, sessions: map[string]*upload{}}
	if err := os.MkdirAll(filepath.Join(o.Dir, "data"), 0o700); err != nil {
		return nil, fmt.Errorf("storage: %w", err)
	}
	var err error
	if s.lock, err = os.OpenFile(filepath.Join(o.Dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		return nil, fmt.Errorf("storage: %w", err)
	}
	if err := unix.Flock(int(s.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		s.lock.Close()
		return nil, fmt.Errorf("storage: %s is in use by another process: %w", o.Dir, err)
	}
	if err := s.openIndex(); err != nil {
		s.Close()
		return nil, fmt.Errorf("storage: open index in %s: %w", o.Dir, err)
	}
	if err := s.sweep(context.Background()); err != nil {
		s.Close()
		return nil, fmt.Errorf("storage: remove left-over files in %s: %w", o.Dir, err)
	}
	return s, nil
}

// Close releases the directory. Requests must have ended.
func (s *Server) Close() error {
	var errs []error
	for _, db := range []*sql.DB{s.db, s.writer} {
		if db != nil {
			errs = append(errs, db.Close())
		}
	}
	errs = append(errs, s.lock.Close())
	return errors.Join(errs...)
}

// call is one request on its way through a handler.
type call struct {
	w http.ResponseWriter
	r *http.Request
	q url.Values
	// bucket and object are what the path names; bucket2 and object2 the destination of a copy or move.
	project, bucket, object, bucket2, object2 string
	// media says that the path began with /download, so the answer is the data.
	media bool
}

// route is one method of the JSON API. permission is the IAM permission that it needs on the path's bucket or object.
type route struct {
	method, path, permission string
	handle                   func(*Server, *call) error
	// late says that only the handler knows the object, and asks for the permission itself; admit only sees to it that somebody calls.
	late bool
}

// everyAccount is the permission of a route that needs none.
const everyAccount = "(every account)"

var jsonRoutes = []route{
	{"GET", "projects/{project}/serviceAccount", "resourcemanager.projects.get", (*Server).getServiceAccount, false},

	{"POST", "b", "storage.buckets.create", (*Server).insertBucket, false},
	{"GET", "b", "storage.buckets.list", (*Server).listBuckets, false},
	{"GET", "b/{bucket}", "storage.buckets.get", (*Server).getBucket, false},
	{"PATCH", "b/{bucket}", "storage.buckets.update", (*Server).patchBucket, false},
	{"PUT", "b/{bucket}", "storage.buckets.update", (*Server).patchBucket, false},
	{"DELETE", "b/{bucket}", "storage.buckets.delete", (*Server).deleteBucket, false},
	{"GET", "b/{bucket}/iam", "storage.buckets.getIamPolicy", (*Server).getPolicy, false},
	{"PUT", "b/{bucket}/iam", "storage.buckets.setIamPolicy", (*Server).setPolicy, false},
	{"GET", "b/{bucket}/iam/testPermissions", everyAccount, (*Server).testPermissions, false},

	{"GET", "b/{bucket}/o", "storage.objects.list", (*Server).listObjects, false},
	{"GET", "b/{bucket}/o/{object}", "storage.objects.get", (*Server).getObject, false},
	{"HEAD", "b/{bucket}/o/{object}", "storage.objects.get", (*Server).getObject, false},
	{"PATCH", "b/{bucket}/o/{object}", "storage.objects.update", (*Server).patchObject, false},
	{"PUT", "b/{bucket}/o/{object}", "storage.objects.update", (*Server).patchObject, false},
	{"DELETE", "b/{bucket}/o/{object}", "storage.objects.delete", (*Server).deleteObject, false},
	{"POST", "b/{bucket}/o/{object}/compose", "storage.objects.create", (*Server).composeObject, false},
	{"POST", "b/{bucket}/o/{object}/rewriteTo/b/{bucket2}/o/{object2}", "storage.objects.get", (*Server).rewriteObject, false},
	{"POST", "b/{bucket}/o/{object}/copyTo/b/{bucket2}/o/{object2}", "storage.objects.get", (*Server).copyObject, false},
	{"POST", "b/{bucket}/o/{object}/moveTo/o/{object2}", "storage.objects.move", (*Server).moveObject, false},
}

var uploadRoutes = []route{
	{"POST", "b/{bucket}/o", "storage.objects.create", (*Server).insertObject, true},
	{"PUT", "b/{bucket}/o", "storage.objects.create", (*Server).insertObject, true},
	{"DELETE", "b/{bucket}/o", "storage.objects.create", (*Server).cancelUpload, true},
}

// prefixes are the roots of the JSON API. A path below none of them is an XML read.
var prefixes = []struct {
	path   string
	routes []route
	media  bool
}{
	{"/storage/v1/", jsonRoutes, false},
	{"/download/storage/v1/", jsonRoutes, true},
	{"/upload/storage/v1/", uploadRoutes, false},
	{"/resumable/upload/storage/v1/", uploadRoutes, false},
}

// ServeHTTP serves one request. The path must arrive as the client sent it: a mux that cleans paths breaks names such as "a//b".
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := r.URL.EscapedPath()
	c := &call{w: w, r: r, q: r.URL.Query()}
	for _, p := range prefixes {
		if rest, ok := strings.CutPrefix(path, p.path); ok {
			c.media = p.media
			if err := s.serveJSON(c, p.routes, rest); err != nil {
				// A client that is still sending would see a broken connection instead of the reason.
				io.CopyN(io.Discard, r.Body, maxDrain)
				writeJSONError(w, err)
			}
			return
		}
	}
	if err := s.serveXML(c, path); err != nil {
		writeXMLError(w, err)
	}
}

func (s *Server) serveJSON(c *call, routes []route, path string) error {
	segments := strings.Split(path, "/")
	for i := range segments {
		var err error
		if segments[i], err = url.PathUnescape(segments[i]); err != nil {
			return invalid("bad path: %v", err)
		}
	}
	for name, values := range c.q {
		if len(values) > 1 && name != "permissions" { // the only parameter that may be repeated
			return invalid("the query parameter %s is given more than once", name)
		}
	}
	known := false
	for _, rt := range routes {
		if !c.match(strings.Split(rt.path, "/"), segments) {
			continue
		}
		known = true
		if rt.method != c.r.Method {
			continue
		}
		if err := s.admit(c, rt); err != nil {
			return err
		}
		return s.hide(c, rt.handle(s, c))
	}
	if known {
		return &apiError{http.StatusMethodNotAllowed, "methodNotAllowed", c.r.Method + " is not allowed on this resource."}
	}
	return &apiError{http.StatusNotImplemented, "notImplemented", "The sandbox does not implement " + c.r.Method + " " + path + "."}
}

// match compares a route's path with a request's and fills the names in.
func (c *call) match(pattern, segments []string) bool {
	if len(pattern) != len(segments) {
		return false
	}
	for i, p := range pattern {
		switch p {
		case "{project}":
			c.project = segments[i]
		case "{bucket}":
			c.bucket = segments[i]
		case "{object}":
			c.object = segments[i]
		case "{bucket2}":
			c.bucket2 = segments[i]
		case "{object2}":
			c.object2 = segments[i]
		default:
			if p != segments[i] {
				return false
			}
		}
	}
	return true
}

// body decodes the request's JSON body, which may be empty, into v.
func (c *call) body(v any) error {
	data, err := io.ReadAll(http.MaxBytesReader(c.w, c.r.Body, maxJSONBody))
	if err != nil {
		return invalid("read body: %v", err)
	}
	if len(data) == 0 {
		return nil
	}
	if err := json.Unmarshal(data, v); err != nil {
		return &apiError{http.StatusBadRequest, "parseError", "Parse Error: " + err.Error()}
	}
	return nil
}

// reply sends v as JSON.
func (c *call) reply(v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	c.w.Header().Set("Content-Type", "application/json; charset=UTF-8")
	c.w.Header().Set("Content-Length", fmt.Sprint(len(data)))
	c.w.WriteHeader(http.StatusOK)
	c.w.Write(data)
	return nil
}

// base is the URL under which the client reached the server, without a final slash.
func (c *call) base() string {
	if c.r.TLS != nil {
		return "https://" + c.r.Host
	}
	return "http://" + c.r.Host
}

func (s *Server) getServiceAccount(c *call) error {
	if c.project != s.project {
		return notFound("The requested project was not found.")
	}
	return c.reply(map[string]string{
		"kind":          "storage#serviceAccount",
		"email_address": fmt.Sprintf("service-%d@gs-project-accounts.iam.gserviceaccount.com", projectNumber),
	})
}
