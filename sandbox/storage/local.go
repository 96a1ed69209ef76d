package storage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	raw "google.golang.org/api/storage/v1"
)

// This file is the store as the rest of the sandbox sees it, in the same process and past authorize: the caller must
// have judged the access. Errors are fs.ErrNotExist for what does not exist and ErrPrecondition.

// ObjectInfo describes one generation of an object.
type ObjectInfo struct {
	Bucket, Name               string
	Generation, Metageneration int64
	Size                       int64
	CRC32C                     uint32 // Castagnoli
	MD5                        []byte // nil for a composite object
	Updated                    time.Time
	ContentType                string
	Metadata                   map[string]string
}

func (o *object) info() ObjectInfo {
	return ObjectInfo{
		Bucket: o.bucket, Name: o.name, Generation: o.generation, Metageneration: o.metageneration, Size: o.size,
		CRC32C: o.crc32c, MD5: o.md5, Updated: o.updated, ContentType: o.attrs.ContentType, Metadata: o.attrs.Metadata,
	}
}

// CreateBucket makes a bucket with the service's defaults.
func (s *Server) CreateBucket(name string) error {
	return s.createBucket(context.Background(), &raw.Bucket{Name: name})
}

// List returns the live objects whose names begin with prefix, ordered by name, byte by byte.
func (s *Server) List(bucket, prefix string) ([]ObjectInfo, error) {
	q := query{bucket: bucket, prefix: prefix, limit: 1 << 62}
	p, err := s.list(context.Background(), q)
	if err != nil {
		return nil, err
	}
	infos := make([]ObjectInfo, len(p.items))
	for i, o := range p.items {
		infos[i] = o.info()
	}
	return infos, nil
}

// Stat describes a generation of an object, or its live one when generation is 0.
func (s *Server) Stat(bucket, name string, generation int64) (ObjectInfo, error) {
	o, err := find(context.Background(), s.db, bucket, name, generation)
	if err != nil {
		return ObjectInfo{}, err
	}
	return o.info(), nil
}

// Open opens a generation of an object, or its live one when generation is 0. What was opened can be read to its end even
// when the object is deleted or replaced meanwhile.
func (s *Server) Open(bucket, name string, generation int64) (io.ReadSeekCloser, ObjectInfo, error) {
	f, o, err := s.openData(context.Background(), bucket, name, generation)
	if err != nil {
		return nil, ObjectInfo{}, err
	}
	return f, o.info(), nil
}

// CreateOptions is what a new object has beside its data.
type CreateOptions struct {
	Preconditions
	ContentType string
	Metadata    map[string]string
	CRC32C      *uint32 // what the data must have; nil is not checked
}

// Writer writes a new object. Nothing of it is seen before Commit.
type Writer struct {
	s    *Server
	w    *dataWriter // nil after Commit or Abort
	o    object
	opts CreateOptions
}

// Create begins an object. The caller ends it with Commit or Abort.
func (s *Server) Create(bucket, name string, opts CreateOptions) (*Writer, error) {
	if err := checkObjectName(name); err != nil {
		return nil, err
	}
	if err := s.checkTarget(context.Background(), &newObject{Bucket: bucket, Name: name, Preconditions: opts.Preconditions}); err != nil {
		return nil, err
	}
	attrs := raw.Object{ContentType: opts.ContentType, Metadata: opts.Metadata}
	if err := checkAttrs(&attrs); err != nil {
		return nil, err
	}
	w, err := s.createData()
	if err != nil {
		return nil, err
	}
	return &Writer{s: s, w: w, o: object{bucket: bucket, name: name, components: 1, attrs: attrs}, opts: opts}, nil
}

// Write appends to the object's data.
func (w *Writer) Write(p []byte) (int, error) {
	if w.w == nil {
		return 0, errors.New("storage: write to a writer that has ended")
	}
	return w.w.Write(p)
}

// Commit publishes the object, if the preconditions still hold and the data has the CRC32C that was asked for. Where it fails, nothing is left.
func (w *Writer) Commit() (ObjectInfo, error) {
	if w.w == nil {
		return ObjectInfo{}, errors.New("storage: commit of a writer that has ended")
	}
	data := w.w
	w.w = nil
	err := data.finish(&w.o)
	if err == nil {
		err = (&checksums{crc32c: w.opts.CRC32C}).verify(&w.o)
	}
	if err == nil {
		err = w.s.publish(context.Background(), &w.o, w.opts.Preconditions)
	}
	if err != nil {
		w.s.discard(data)
		return ObjectInfo{}, err
	}
	return w.o.info(), nil
}

// Abort drops the object. After Commit it does nothing, so it can be deferred.
func (w *Writer) Abort() {
	if w.w != nil {
		w.s.discard(w.w)
		w.w = nil
	}
}

// Corrupt is a fault: it flips the bits of one byte of the live object's data and leaves its checksums as they were. Copies of
// the object keep their data.
func (s *Server) Corrupt(bucket, name string, offset int64) error {
	f, o, err := s.openData(context.Background(), bucket, name, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if offset < 0 || offset >= o.size {
		return fmt.Errorf("storage: corrupt %s/%s: offset %d is not in its %d bytes", bucket, name, offset, o.size)
	}
	// Copies are hard links, so the damage goes into a file of its own.
	w, err := s.createData()
	if err != nil {
		return err
	}
	if err := w.readFrom(f); err != nil {
		s.discard(w)
		return err
	}
	var b [1]byte
	if _, err = w.f.ReadAt(b[:], offset); err == nil {
		b[0] = ^b[0]
		_, err = w.f.WriteAt(b[:], offset)
	}
	if err = errors.Join(err, w.f.Close()); err == nil {
		err = os.Rename(s.dataPath(w.id), s.dataPath(o.data))
	}
	if err != nil {
		s.discard(w)
	}
	return err
}
