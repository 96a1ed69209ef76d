package lustre

import (
	"io"
	"time"

	"github.com/sluicehpc/sluice/sandbox/storage"
)

// Bucket is the object storage that transfers use. Errors are fs.ErrNotExist for a bucket or
// object that does not exist, and fs.ErrPermission.
type Bucket interface {
	// List returns the objects whose names begin with prefix, ordered by name.
	List(bucket, prefix string) ([]Object, error)
	// Stat describes one object.
	Stat(bucket, name string) (Object, error)
	// Open reads an object's data.
	Open(bucket, name string) (io.ReadCloser, error)
	// Create replaces an object. Nothing of it is seen before Commit; without Commit, Abort drops it.
	Create(bucket, name string) (ObjectWriter, error)
}

// Object is what a transfer needs to know of an object.
type Object struct {
	Name    string
	Size    int64 // bytes
	Updated time.Time
	// Metadata is what users have said of it; nil is nothing.
	Metadata map[string]string
}

// ObjectWriter writes a new object. Abort after Commit does nothing.
type ObjectWriter interface {
	io.Writer
	Commit() error
	Abort()
}

// FromStorage is the sandbox's own object storage.
func FromStorage(s *storage.Server) Bucket { return bucket{s} }

type bucket struct{ s *storage.Server }

func objectOf(o storage.ObjectInfo) Object {
	return Object{Name: o.Name, Size: o.Size, Updated: o.Updated, Metadata: o.Metadata}
}

func (b bucket) List(name, prefix string) ([]Object, error) {
	infos, err := b.s.List(name, prefix)
	objects := make([]Object, len(infos))
	for i, o := range infos {
		objects[i] = objectOf(o)
	}
	return objects, err
}

func (b bucket) Stat(name, object string) (Object, error) {
	o, err := b.s.Stat(name, object, 0)
	return objectOf(o), err
}

func (b bucket) Open(name, object string) (io.ReadCloser, error) {
	r, _, err := b.s.Open(name, object, 0)
	if err != nil {
		return nil, err
	}
	return r, nil
}

func (b bucket) Create(name, object string) (ObjectWriter, error) {
	w, err := b.s.Create(name, object, storage.CreateOptions{})
	if err != nil {
		return nil, err
	}
	return writer{w}, nil
}

type writer struct{ *storage.Writer }

func (w writer) Commit() error {
	_, err := w.Writer.Commit()
	return err
}
