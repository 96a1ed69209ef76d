package storage

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"unicode/utf8"

	raw "google.golang.org/api/storage/v1"
)

// objectWritable are the object's fields that update and patch may change.
var objectWritable = set("acl", "cacheControl", "contentDisposition", "contentEncoding", "contentLanguage", "contentType",
	"contexts", "customTime", "eventBasedHold", "metadata", "retention", "temporaryHold")

// objectInsertable are those that an upload, a compose or a copy takes.
var objectInsertable = func() map[string]bool {
	m := set("storageClass")
	for name := range objectWritable {
		m[name] = true
	}
	return m
}()

// The service's limits on object names and custom metadata, in bytes.
const (
	maxObjectName = 1024
	maxMetadata   = 8 << 10
)

// checkObjectName holds the rules of the vendor's page on objects. Names are never paths here, so they may look like any.
func checkObjectName(name string) error {
	if name == "" || len(name) > maxObjectName || !utf8.ValidString(name) || strings.ContainsAny(name, "\r\n") ||
		name == "." || name == ".." || strings.HasPrefix(name, ".well-known/acme-challenge/") {
		return invalid("Invalid object name: %q.", name)
	}
	return nil
}

// newAttrs reads the attributes that body gives a new object.
func newAttrs(body json.RawMessage) (*raw.Object, error) {
	attrs, err := patch(&raw.Object{}, body, objectInsertable, false)
	if err != nil {
		return nil, err
	}
	return attrs, checkAttrs(attrs)
}

func checkAttrs(attrs *raw.Object) error {
	if attrs.StorageClass != "" && !storageClasses[attrs.StorageClass] {
		return invalid("Invalid storage class %q.", attrs.StorageClass)
	}
	n := 0
	for name, value := range attrs.Metadata {
		n += len(name) + len(value)
	}
	if n > maxMetadata {
		return invalid("Custom metadata takes %d bytes, more than %d.", n, maxMetadata)
	}
	return nil
}

func (o *object) etag() string {
	return base64.StdEncoding.EncodeToString([]byte(strconv.FormatInt(o.generation, 36) + "/" + strconv.FormatInt(o.metageneration, 36)))
}

// json is the object as the JSON API shows it.
func (o *object) json(c *call) *raw.Object {
	j := o.attrs
	generation := strconv.FormatInt(o.generation, 10)
	path := "/storage/v1/b/" + o.bucket + "/o/" + url.PathEscape(o.name)
	j.Kind, j.Id, j.Etag = "storage#object", o.bucket+"/"+o.name+"/"+generation, o.etag()
	j.SelfLink = c.base() + path
	j.MediaLink = c.base() + "/download" + path + "?generation=" + generation + "&alt=media"
	j.Bucket, j.Name, j.Generation, j.Metageneration = o.bucket, o.name, o.generation, o.metageneration
	j.Size, j.Crc32c = uint64(o.size), encodeCRC(o.crc32c)
	j.TimeCreated, j.TimeFinalized, j.TimeStorageClassUpdated = timeString(o.created), timeString(o.created), timeString(o.created)
	j.Updated = timeString(o.updated)
	if o.md5 != nil {
		j.Md5Hash = base64.StdEncoding.EncodeToString(o.md5)
	} else {
		j.ComponentCount = o.components
	}
	if !o.retired.IsZero() {
		j.TimeDeleted = timeString(o.retired)
	}
	j.ForceSendFields = []string{"Size"}
	return &j
}

func (s *Server) getObject(c *call) error {
	p, err := preconditions(c.q, "")
	if err != nil {
		return err
	}
	if c.media || c.q.Get("alt") == "media" {
		return s.serveData(c, p)
	}
	generation, err := generationOf(c.q.Get("generation"))
	if err != nil {
		return err
	}
	o, err := find(c.r.Context(), s.db, c.bucket, c.object, generation)
	if err != nil {
		return err
	}
	if err := p.checkRead(o); err != nil {
		return err
	}
	return c.reply(o.json(c))
}

// change finds an object that p holds for and lets f change it, in one transaction.
func (s *Server) change(c *call, f func(*txn, *object) error) error {
	p, err := preconditions(c.q, "")
	if err != nil {
		return err
	}
	generation, err := generationOf(c.q.Get("generation"))
	if err != nil {
		return err
	}
	ctx := c.r.Context()
	return s.update(ctx, func(t *txn) error {
		o, err := find(ctx, t, c.bucket, c.object, generation)
		if err != nil {
			return err
		}
		if err := p.checkObject(o); err != nil {
			return err
		}
		return f(t, o)
	})
}

// patchObject is PATCH and, with all writable fields replaced, PUT.
func (s *Server) patchObject(c *call) error {
	var body json.RawMessage
	if err := c.body(&body); err != nil {
		return err
	}
	var changed *object
	err := s.change(c, func(t *txn, o *object) error {
		attrs, err := patch(&o.attrs, body, objectWritable, c.r.Method == http.MethodPut)
		if err != nil {
			return err
		}
		if err := checkAttrs(attrs); err != nil {
			return err
		}
		o.attrs, o.updated = *attrs, t.now
		o.metageneration++
		data, err := json.Marshal(attrs)
		if err != nil {
			return err
		}
		changed = o
		_, err = t.ExecContext(t.ctx, `UPDATE objects SET metageneration = ?, updated = ?, attrs = ? WHERE bucket = ? AND name = ? AND generation = ?`,
			o.metageneration, o.updated.UnixMicro(), data, o.bucket, []byte(o.name), o.generation)
		return err
	})
	if err != nil {
		return err
	}
	return c.reply(changed.json(c))
}

// deleteObject ends the live object, or removes one generation for good.
func (s *Server) deleteObject(c *call) error {
	err := s.change(c, func(t *txn, o *object) error {
		if c.q.Get("generation") != "" {
			return t.remove(o)
		}
		b, err := findBucket(t.ctx, t, c.bucket)
		if err != nil {
			return err
		}
		return t.retire(o, b)
	})
	if err != nil {
		return err
	}
	c.w.WriteHeader(http.StatusNoContent)
	return nil
}

// maxSources is how many objects one compose call takes.
const maxSources = 32

func (s *Server) composeObject(c *call) error {
	var body struct {
		Destination   json.RawMessage `json:"destination"`
		SourceObjects []struct {
			Name                string `json:"name"`
			Generation          int64  `json:"generation,string"`
			ObjectPreconditions struct {
				IfGenerationMatch *int64 `json:"ifGenerationMatch,string"`
			} `json:"objectPreconditions"`
		} `json:"sourceObjects"`
		DeleteSourceObjects bool `json:"deleteSourceObjects"`
	}
	if err := c.body(&body); err != nil {
		return err
	}
	if len(body.SourceObjects) == 0 || len(body.SourceObjects) > maxSources {
		return invalid("The number of source components provided (%d) must be between 1 and %d.", len(body.SourceObjects), maxSources)
	}
	if err := checkObjectName(c.object); err != nil {
		return err
	}
	p, err := preconditions(c.q, "")
	if err != nil {
		return err
	}
	attrs, err := newAttrs(body.Destination)
	if err != nil {
		return err
	}
	var declared checksums
	if err := declared.declareJSON(body.Destination); err != nil {
		return err
	}
	if err := s.authorizeWrite(c.r, c.bucket, c.object, &p); err != nil {
		return err
	}
	ctx := c.r.Context()
	w, err := s.createData()
	if err != nil {
		return err
	}
	published := false
	defer func() {
		if !published {
			s.discard(w)
		}
	}()
	o := &object{bucket: c.bucket, name: c.object, attrs: *attrs}
	var sources []*object
	for _, src := range body.SourceObjects {
		if err := s.authorize(c.r, "storage.objects.get", c.bucket, src.Name); err != nil {
			return err
		}
		if body.DeleteSourceObjects {
			if err := s.authorize(c.r, "storage.objects.delete", c.bucket, src.Name); err != nil {
				return err
			}
		}
		f, so, err := s.openData(ctx, c.bucket, src.Name, src.Generation)
		if err != nil {
			return err
		}
		if err = (Preconditions{GenerationMatch: src.ObjectPreconditions.IfGenerationMatch}).checkObject(so); err == nil {
			err = w.readFrom(contextReader{ctx, f})
		}
		f.Close()
		if err != nil {
			return err
		}
		sources = append(sources, so)
		o.components += so.components
	}
	if err := w.finish(o); err != nil {
		return err
	}
	o.md5 = nil
	if err := declared.verify(o); err != nil {
		return err
	}
	err = s.publish(ctx, o, p, func(t *txn) error {
		if !body.DeleteSourceObjects {
			return nil
		}
		b, err := findBucket(ctx, t, c.bucket)
		if err != nil {
			return err
		}
		for _, so := range sources {
			now, err := lookup(ctx, t, so.bucket, so.name, so.generation)
			if err != nil {
				return err
			}
			// It may be gone: given twice, or replaced meanwhile, by this very call where it is the destination.
			if now != nil && now.retired.IsZero() {
				if err := t.retire(now, b); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	published = true
	return c.reply(o.json(c))
}

// duplicate makes to from the source object that c names: another name of the same data, so its size costs nothing.
// body replaces the source's attributes where it has any. also runs in the transaction that publishes to.
func (s *Server) duplicate(c *call, bucket, name string, body json.RawMessage, also ...func(*txn, *object) error) (*object, error) {
	if err := checkObjectName(name); err != nil {
		return nil, err
	}
	p, err := preconditions(c.q, "")
	if err != nil {
		return nil, err
	}
	if err := s.authorizeWrite(c.r, bucket, name, &p); err != nil {
		return nil, err
	}
	source, err := preconditions(c.q, "Source")
	if err != nil {
		return nil, err
	}
	generation, err := generationOf(c.q.Get("sourceGeneration"))
	if err != nil {
		return nil, err
	}
	attrs, err := newAttrs(body)
	if err != nil {
		return nil, err
	}
	ctx := c.r.Context()
	id, from, err := s.linkData(ctx, c.bucket, c.object, generation)
	if err != nil {
		return nil, err
	}
	o := &object{bucket: bucket, name: name, size: from.size, crc32c: from.crc32c, md5: from.md5, components: from.components, data: id, attrs: *attrs}
	if data, err := json.Marshal(attrs); err != nil {
		return nil, err
	} else if string(data) == "{}" {
		o.attrs = from.attrs
		o.attrs.StorageClass = "" // the destination bucket's
	}
	if err = source.checkObject(from); err == nil {
		err = s.publish(ctx, o, p, func(t *txn) error {
			for _, f := range also {
				if err := f(t, from); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err != nil {
		os.Remove(s.dataPath(id))
		return nil, err
	}
	return o, nil
}

func (s *Server) rewriteObject(c *call) error {
	var body json.RawMessage
	if err := c.body(&body); err != nil {
		return err
	}
	o, err := s.duplicate(c, c.bucket2, c.object2, body)
	if err != nil {
		return err
	}
	return c.reply(&raw.RewriteResponse{
		Kind: "storage#rewriteResponse", Done: true, ObjectSize: o.size, TotalBytesRewritten: o.size, Resource: o.json(c),
		ForceSendFields: []string{"ObjectSize", "TotalBytesRewritten"},
	})
}

func (s *Server) copyObject(c *call) error {
	var body json.RawMessage
	if err := c.body(&body); err != nil {
		return err
	}
	o, err := s.duplicate(c, c.bucket2, c.object2, body)
	if err != nil {
		return err
	}
	return c.reply(o.json(c))
}

// moveObject renames within a bucket.
func (s *Server) moveObject(c *call) error {
	if c.object == c.object2 {
		return invalid("The source and destination object names must differ.")
	}
	o, err := s.duplicate(c, c.bucket, c.object2, nil, func(t *txn, from *object) error {
		now, err := lookup(t.ctx, t, from.bucket, from.name, 0)
		if err != nil {
			return err
		}
		if now == nil || now.generation != from.generation || now.metageneration != from.metageneration {
			return conflict("The source object changed while it was moved.")
		}
		b, err := findBucket(t.ctx, t, from.bucket)
		if err != nil {
			return err
		}
		return t.retire(from, b)
	})
	if err != nil {
		return err
	}
	return c.reply(o.json(c))
}

// declareJSON adds the checksums of an object's metadata.
func (c *checksums) declareJSON(body json.RawMessage) error {
	var declared struct {
		Crc32c  string `json:"crc32c"`
		Md5Hash string `json:"md5Hash"`
	}
	if len(body) == 0 {
		return nil
	}
	if err := json.Unmarshal(body, &declared); err != nil {
		return invalid("Invalid value: %v.", err)
	}
	return c.declare(declared.Crc32c, declared.Md5Hash)
}

// contextReader ends a long copy when its request ends.
type contextReader struct {
	ctx context.Context
	f   *os.File
}

func (r contextReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.f.Read(p)
}
