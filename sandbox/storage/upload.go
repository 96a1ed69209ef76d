package storage

import (
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"

	raw "google.golang.org/api/storage/v1"
)

// newObject is what an upload says about its object before the data comes.
type newObject struct {
	Bucket, Name  string
	Attrs         raw.Object
	Crc32c, MD5   string // declared; "" is not
	Preconditions Preconditions
	Size          int64 // declared, -1 is not
}

// newObject reads an upload's parameters and metadata. contentType is that of the data, if known.
func (c *call) newObject(metadata json.RawMessage, contentType string) (*newObject, error) {
	var named struct {
		Name    string `json:"name"`
		Crc32c  string `json:"crc32c"`
		Md5Hash string `json:"md5Hash"`
	}
	if len(bytes.TrimSpace(metadata)) > 0 {
		if err := json.Unmarshal(metadata, &named); err != nil {
			return nil, &apiError{http.StatusBadRequest, "parseError", "Parse Error: " + err.Error()}
		}
	}
	attrs, err := newAttrs(metadata)
	if err != nil {
		return nil, err
	}
	n := &newObject{Bucket: c.bucket, Name: c.q.Get("name"), Attrs: *attrs, Crc32c: named.Crc32c, MD5: named.Md5Hash, Size: -1}
	if n.Name == "" {
		n.Name = named.Name
	}
	if n.Name == "" {
		return nil, &apiError{http.StatusBadRequest, "required", "Required parameter: name"}
	}
	if err := checkObjectName(n.Name); err != nil {
		return nil, err
	}
	if n.Attrs.ContentType == "" {
		n.Attrs.ContentType = contentType
	}
	if encoding := c.q.Get("contentEncoding"); encoding != "" {
		n.Attrs.ContentEncoding = encoding
	}
	n.Preconditions, err = preconditions(c.q, "")
	return n, err
}

// insertObject is every kind of upload.
func (s *Server) insertObject(c *call) error {
	if id := c.q.Get("upload_id"); id != "" {
		return s.continueUpload(c, id)
	}
	if c.r.Method != http.MethodPost {
		return &apiError{http.StatusMethodNotAllowed, "methodNotAllowed", "PUT needs an upload_id."}
	}
	switch kind := c.q.Get("uploadType"); kind {
	case "media":
		n, err := c.newObject(nil, c.r.Header.Get("Content-Type"))
		if err != nil {
			return err
		}
		return s.receive(c, n, c.r.Body)
	case "multipart":
		return s.insertMultipart(c)
	case "resumable":
		return s.startUpload(c)
	default:
		return invalid("Invalid value for uploadType: %q.", kind)
	}
}

// insertMultipart reads multipart/related: a part of JSON metadata, then one of data.
func (s *Server) insertMultipart(c *call) error {
	kind, params, err := mime.ParseMediaType(c.r.Header.Get("Content-Type"))
	if err != nil || !strings.HasPrefix(kind, "multipart/") || params["boundary"] == "" {
		return invalid("A multipart upload needs the content type multipart/related with a boundary.")
	}
	parts := multipart.NewReader(c.r.Body, params["boundary"])
	first, err := parts.NextRawPart()
	if err != nil {
		return invalid("Missing metadata part: %v.", err)
	}
	metadata, err := io.ReadAll(io.LimitReader(first, maxJSONBody+1))
	if err != nil || len(metadata) > maxJSONBody {
		return invalid("The metadata part cannot be read or is too long.")
	}
	data, err := parts.NextRawPart()
	if err != nil {
		return invalid("Missing data part: %v.", err)
	}
	n, err := c.newObject(metadata, data.Header.Get("Content-Type"))
	if err != nil {
		return err
	}
	return s.receive(c, n, data)
}

// receive stores an upload that comes in one request.
func (s *Server) receive(c *call, n *newObject, data io.Reader) error {
	ctx := c.r.Context()
	if err := s.authorizeWrite(c.r, n.Bucket, n.Name, &n.Preconditions); err != nil {
		return err
	}
	if err := s.checkTarget(ctx, n); err != nil {
		return err
	}
	w, err := s.createData()
	if err != nil {
		return err
	}
	if err := w.readFrom(data); err != nil {
		s.discard(w)
		return bodyError(err)
	}
	o, err := s.complete(ctx, n, w, c.r.Header)
	if err != nil {
		s.discard(w)
		return err
	}
	return c.reply(o.json(c))
}

// checkTarget refuses early what complete would refuse after the data: no bucket, or preconditions that do not hold.
func (s *Server) checkTarget(ctx context.Context, n *newObject) error {
	if _, err := findBucket(ctx, s.db, n.Bucket); err != nil {
		return err
	}
	o, err := lookup(ctx, s.db, n.Bucket, n.Name, 0)
	if err != nil {
		return err
	}
	return n.Preconditions.checkObject(o)
}

// complete publishes what w received, if the declared checksums and the preconditions hold. Where it fails, w is still the caller's.
func (s *Server) complete(ctx context.Context, n *newObject, w *dataWriter, h http.Header, also ...func(*txn) error) (*object, error) {
	var declared checksums
	if err := declared.declare(n.Crc32c, n.MD5); err != nil {
		return nil, err
	}
	if err := declared.declareHeader(h.Values("X-Goog-Hash")); err != nil {
		return nil, err
	}
	o := &object{bucket: n.Bucket, name: n.Name, components: 1, attrs: n.Attrs}
	if err := w.finish(o); err != nil {
		return nil, err
	}
	if err := declared.verify(o); err != nil {
		return nil, err
	}
	return o, s.publish(ctx, o, n.Preconditions, also...)
}

// bodyError tells a broken request from a broken disk.
func bodyError(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, errCut) {
		return invalid("The request's body ended early.")
	}
	return err
}

var errCut = errors.New("body ended early")

// cutReader tells a body that was cut short from one that came to its end: io.ReadFull says io.ErrUnexpectedEOF for both.
type cutReader struct{ r io.Reader }

func (c cutReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if err == io.ErrUnexpectedEOF {
		err = errCut
	}
	return n, err
}

// block is the unit in which an unfinished resumable upload keeps data (Cloud Storage: 256 KiB).
const block = 256 << 10

// upload is a resumable upload. Everything but the running checksums is also in the index, so that it outlives the
// process: its size is then that of the file, down to a whole block. The file is open only while a chunk comes in, so
// that uploads that nobody goes on with hold none.
type upload struct {
	mu         sync.Mutex // one request at a time; guards what follows
	id         string
	object     *newObject
	w          *dataWriter // nil once finished
	generation int64       // of the finished object, 0 before
	gone       bool        // cancelled or failed
}

func (s *Server) startUpload(c *call) error {
	var metadata json.RawMessage
	if err := c.body(&metadata); err != nil {
		return err
	}
	n, err := c.newObject(metadata, c.r.Header.Get("X-Upload-Content-Type"))
	if err != nil {
		return err
	}
	if v := c.r.Header.Get("X-Upload-Content-Length"); v != "" {
		var ok bool
		if n.Size, ok = digits(v); !ok {
			return invalid("Invalid value for X-Upload-Content-Length: %q.", v)
		}
	}
	if err := (&checksums{}).declare(n.Crc32c, n.MD5); err != nil {
		return err
	}
	ctx := c.r.Context()
	if err := s.authorizeWrite(c.r, n.Bucket, n.Name, &n.Preconditions); err != nil {
		return err
	}
	if err := s.checkTarget(ctx, n); err != nil {
		return err
	}
	w, err := s.createData()
	if err != nil {
		return err
	}
	var id [24]byte
	rand.Read(id[:])
	u := &upload{id: hex.EncodeToString(id[:]), object: n, w: w}
	err = s.update(ctx, func(t *txn) error {
		if _, err := findBucket(ctx, t, n.Bucket); err != nil {
			return err
		}
		request, err := json.Marshal(n)
		if err != nil {
			return err
		}
		_, err = t.ExecContext(ctx, `INSERT INTO uploads VALUES (?, ?, ?, ?, ?, 0, ?)`, u.id, n.Bucket, []byte(n.Name), w.id, t.now.UnixMicro(), request)
		return err
	})
	if err != nil {
		s.discard(w)
		return err
	}
	w.f.Close()
	s.mu.Lock()
	s.sessions[u.id] = u
	s.mu.Unlock()
	location := url.Values{"uploadType": {"resumable"}, "name": {n.Name}, "upload_id": {u.id}}
	c.w.Header().Set("Location", c.base()+"/upload/storage/v1/b/"+url.PathEscape(n.Bucket)+"/o?"+location.Encode())
	c.w.Header().Set("X-GUploader-UploadID", u.id)
	c.w.WriteHeader(http.StatusOK)
	return nil
}

var errNoUpload = &apiError{http.StatusNotFound, "notFound", "No such upload session."}

// session finds an upload, and after a restart takes it up again from the index. It is locked; the caller unlocks it.
func (s *Server) session(ctx context.Context, bucket, id string) (*upload, error) {
	s.mu.Lock()
	u := s.sessions[id]
	if u == nil {
		u = &upload{id: id}
		s.sessions[id] = u
	}
	s.mu.Unlock()
	u.mu.Lock()
	err := s.load(ctx, u)
	if err == nil && (u.gone || u.object.Bucket != bucket) {
		err = errNoUpload
	}
	if err != nil {
		u.mu.Unlock()
		if u.object == nil {
			s.forget(u)
		}
		return nil, err
	}
	return u, nil
}

func (s *Server) forget(u *upload) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions[u.id] == u {
		delete(s.sessions, u.id)
	}
}

func (s *Server) load(ctx context.Context, u *upload) error {
	if u.object != nil || u.gone {
		return nil
	}
	var data string
	var request []byte
	err := s.db.QueryRowContext(ctx, `SELECT data, generation, request FROM uploads WHERE id = ?`, u.id).Scan(&data, &u.generation, &request)
	if errors.Is(err, sql.ErrNoRows) {
		return errNoUpload
	}
	if err != nil {
		return err
	}
	n := new(newObject)
	if err := json.Unmarshal(request, n); err != nil {
		return err
	}
	if u.generation == 0 {
		info, err := os.Stat(s.dataPath(data))
		if err != nil {
			return err
		}
		if u.w, err = s.reopenData(data, info.Size()/block*block); err != nil {
			return err
		}
		u.w.f.Close()
	}
	u.object = n
	return nil
}

// drop ends an upload without an object. u is locked.
func (s *Server) drop(ctx context.Context, u *upload) error {
	u.gone = true
	if u.w != nil {
		s.discard(u.w)
		u.w = nil
	}
	s.forget(u)
	return s.update(ctx, func(t *txn) error {
		_, err := t.ExecContext(ctx, `DELETE FROM uploads WHERE id = ?`, u.id)
		return err
	})
}

func (s *Server) cancelUpload(c *call) error {
	ctx := c.r.Context()
	u, err := s.session(ctx, c.bucket, c.q.Get("upload_id"))
	if err != nil {
		return err
	}
	defer u.mu.Unlock()
	if err := s.authorize(c.r, "storage.objects.create", u.object.Bucket, u.object.Name); err != nil {
		return err
	}
	if u.generation != 0 {
		return errNoUpload
	}
	if err := s.drop(ctx, u); err != nil {
		return err
	}
	c.w.WriteHeader(499) // what Cloud Storage answers to a cancelled upload
	return nil
}

// continueUpload takes a chunk, or tells the state of an upload.
func (s *Server) continueUpload(c *call, id string) error {
	r := contentRange{start: 0, end: -1, total: c.r.ContentLength} // without a header the body is the whole object
	if header := c.r.Header.Get("Content-Range"); header != "" {
		var err error
		if r, err = parseContentRange(header); err != nil {
			return err
		}
		if n := c.r.ContentLength; r.start >= 0 && n >= 0 && n != r.end-r.start+1 {
			return invalid("Content-Length %d does not agree with Content-Range %q.", n, header)
		}
	} else if r.total >= 0 {
		r.end = r.total - 1
	}
	ctx := c.r.Context()
	u, err := s.session(ctx, c.bucket, id)
	if err != nil {
		return err
	}
	defer u.mu.Unlock()
	// In the service whoever knows the upload's URL may go on with it; here it takes what it took to begin.
	if err := s.authorizeWrite(c.r, u.object.Bucket, u.object.Name, &u.object.Preconditions); err != nil {
		return err
	}
	if u.generation != 0 {
		return s.replyFinished(c, u)
	}
	if r.total >= 0 && u.object.Size >= 0 && r.total != u.object.Size {
		return invalid("The total size %d does not agree with the upload's declared %d.", r.total, u.object.Size)
	}
	if r.start > u.w.size {
		return invalid("According to the Content-Range header, the upload offset is %d byte(s), which exceeds already uploaded size of %d byte(s).", r.start, u.w.size)
	}
	if r.total >= 0 && r.total < u.w.size {
		return invalid("The total size %d is less than the %d bytes that were uploaded.", r.total, u.w.size)
	}
	if u.w.f, err = os.OpenFile(s.dataPath(u.w.id), os.O_RDWR, 0); errors.Is(err, os.ErrNotExist) {
		return errors.Join(errNoUpload, s.drop(ctx, u)) // it went with its bucket
	} else if err != nil {
		return err
	}
	defer u.w.f.Close() // finish may have closed it before
	if r.start >= 0 {
		ended, err := u.take(c.r.Body, r)
		if err != nil {
			return err
		}
		if ended { // a body of unknown length came to its end
			r.total = u.w.size
		}
	}
	if r.total < 0 || u.w.size < r.total {
		u.incomplete(c)
		return nil
	}
	o, err := s.complete(ctx, u.object, u.w, c.r.Header, func(t *txn) error {
		_, err := t.ExecContext(ctx, `UPDATE uploads SET generation = last_generation.value FROM last_generation WHERE id = ?`, u.id)
		return err
	})
	if err != nil {
		if asAPIError(err).code < http.StatusInternalServerError {
			return errors.Join(err, s.drop(ctx, u))
		}
		// The fault is the server's: the client may try again.
		return err
	}
	u.w, u.generation = nil, o.generation
	s.forget(u)
	return c.reply(o.json(c))
}

// take appends the part of a chunk that is new. Data that does not complete the object is kept in whole blocks; the client
// sends the rest again. ended says that a body whose length nobody gave came to its end.
func (u *upload) take(body io.Reader, r contentRange) (ended bool, err error) {
	body = cutReader{body}
	if _, err := io.CopyN(io.Discard, body, u.w.size-r.start); err == io.EOF {
		return false, nil // nothing new
	} else if err != nil {
		return false, bodyError(err)
	}
	if r.end >= 0 {
		body = io.LimitReader(body, r.end+1-u.w.size)
	}
	buf := make([]byte, block)
	for {
		n, err := io.ReadFull(body, buf)
		unknown := r.total < 0 && r.end < 0
		if err == nil || n > 0 && errors.Is(err, io.ErrUnexpectedEOF) && (unknown || u.w.size+int64(n) == r.total) {
			if _, err := u.w.Write(buf[:n]); err != nil {
				return false, err
			}
		}
		switch {
		case err == nil:
		case err == io.EOF || err == io.ErrUnexpectedEOF:
			return unknown, nil
		default:
			return false, bodyError(err)
		}
	}
}

// incomplete says how far the upload is. The Go client asks for another code, since HTTP has given 308 another meaning.
func (u *upload) incomplete(c *call) {
	if u.w.size > 0 {
		c.w.Header().Set("Range", fmt.Sprintf("bytes=0-%d", u.w.size-1))
	}
	c.w.Header().Set("X-GUploader-UploadID", u.id)
	c.w.Header().Set("Content-Length", "0")
	if c.r.Header.Get("X-GUploader-No-308") == "yes" {
		c.w.Header().Set("X-Http-Status-Code-Override", strconv.Itoa(http.StatusPermanentRedirect))
		c.w.WriteHeader(http.StatusOK)
		return
	}
	c.w.WriteHeader(http.StatusPermanentRedirect)
}

// replyFinished repeats the answer to an upload's last chunk, for a client that did not hear it.
func (s *Server) replyFinished(c *call, u *upload) error {
	o, err := find(c.r.Context(), s.db, u.object.Bucket, u.object.Name, u.generation)
	if err != nil {
		return err
	}
	return c.reply(o.json(c))
}
