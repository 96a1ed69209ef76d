package storage

import (
	"context"
	"crypto/md5"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strings"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// dataID names a data file. It is random: no part of a bucket's or an object's name ever becomes part of a path.
type dataID [16]byte

func newDataID() string {
	var id dataID
	rand.Read(id[:])
	return hex.EncodeToString(id[:])
}

func parseDataID(s string) (id dataID, err error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(id) {
		return id, fmt.Errorf("bad data file name %q", s)
	}
	return dataID(b), nil
}

func (s *Server) dataPath(id string) string {
	return filepath.Join(s.dir, "data", id[:2], id)
}

// dataWriter writes one data file from its start and sums it up on the way.
type dataWriter struct {
	f    *os.File
	id   string
	size int64
	crc  hash.Hash32
	md5  hash.Hash
}

func (s *Server) createData() (*dataWriter, error) {
	id := newDataID()
	f, err := os.OpenFile(s.dataPath(id), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	return &dataWriter{f: f, id: id, crc: crc32.New(castagnoli), md5: md5.New()}, nil
}

// reopenData goes on with the data file id, of which size bytes are good.
func (s *Server) reopenData(id string, size int64) (*dataWriter, error) {
	f, err := os.OpenFile(s.dataPath(id), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	w := &dataWriter{f: f, id: id, crc: crc32.New(castagnoli), md5: md5.New()}
	if w.size, err = io.Copy(io.MultiWriter(w.crc, w.md5), io.LimitReader(f, size)); err != nil {
		f.Close()
		return nil, err
	}
	return w, nil
}

// Write appends p. After an error nothing of p counts.
func (w *dataWriter) Write(p []byte) (int, error) {
	if _, err := w.f.WriteAt(p, w.size); err != nil {
		return 0, err
	}
	w.crc.Write(p)
	w.md5.Write(p)
	w.size += int64(len(p))
	return len(p), nil
}

// readFrom appends all of r through a buffer of fixed size.
func (w *dataWriter) readFrom(r io.Reader) error {
	_, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, make([]byte, 128<<10))
	return err
}

// finish closes the file and fills in what is known of o's data.
func (w *dataWriter) finish(o *object) error {
	o.data, o.size, o.crc32c, o.md5 = w.id, w.size, w.crc.Sum32(), w.md5.Sum(nil)
	return errors.Join(w.f.Truncate(w.size), w.f.Close())
}

// discard closes the file and removes it.
func (s *Server) discard(w *dataWriter) {
	w.f.Close()
	os.Remove(s.dataPath(w.id))
}

// withData finds an object and lets use open or link its data file. The object may be replaced between the two, so it looks
// again when the file is gone.
func (s *Server) withData(ctx context.Context, bucket, name string, generation int64, use func(*object) error) (*object, error) {
	var last int64
	for {
		o, err := find(ctx, s.db, bucket, name, generation)
		if err != nil {
			return nil, err
		}
		err = use(o)
		if err == nil {
			return o, nil
		}
		if !errors.Is(err, os.ErrNotExist) || o.generation == last {
			return nil, fmt.Errorf("data of %s/%s generation %d: %v", bucket, name, o.generation, err)
		}
		last = o.generation
	}
}

// openData opens an object's data.
func (s *Server) openData(ctx context.Context, bucket, name string, generation int64) (f *os.File, o *object, err error) {
	o, err = s.withData(ctx, bucket, name, generation, func(o *object) error {
		f, err = os.Open(s.dataPath(o.data))
		return err
	})
	return f, o, err
}

// linkData gives an object's data a second file.
func (s *Server) linkData(ctx context.Context, bucket, name string, generation int64) (id string, o *object, err error) {
	id = newDataID()
	o, err = s.withData(ctx, bucket, name, generation, func(o *object) error {
		return os.Link(s.dataPath(o.data), s.dataPath(id))
	})
	return id, o, err
}

// checksums are those that a client declared; nil ones were not.
type checksums struct {
	crc32c *uint32
	md5    []byte
}

// declare adds a declaration in base64 (CRC32C big-endian), as in object metadata and in x-goog-hash.
func (c *checksums) declare(crc32c, md5Hash string) error {
	if crc32c != "" {
		b, err := base64.StdEncoding.DecodeString(crc32c)
		if err != nil || len(b) != 4 {
			return invalid("Invalid value for CRC32C: %q.", crc32c)
		}
		v := binary.BigEndian.Uint32(b)
		if c.crc32c != nil && *c.crc32c != v {
			return invalid("Two different CRC32C values were provided.")
		}
		c.crc32c = &v
	}
	if md5Hash != "" {
		b, err := base64.StdEncoding.DecodeString(md5Hash)
		if err != nil || len(b) != md5.Size {
			return invalid("Invalid value for MD5: %q.", md5Hash)
		}
		if c.md5 != nil && string(c.md5) != string(b) {
			return invalid("Two different MD5 values were provided.")
		}
		c.md5 = b
	}
	return nil
}

// declareHeader adds x-goog-hash headers: crc32c=…,md5=…
func (c *checksums) declareHeader(values []string) error {
	for _, value := range values {
		for item := range strings.SplitSeq(value, ",") {
			kind, sum, _ := strings.Cut(strings.TrimSpace(item), "=")
			var err error
			switch kind {
			case "crc32c":
				err = c.declare(sum, "")
			case "md5":
				err = c.declare("", sum)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// verify compares what was declared with what came.
func (c *checksums) verify(o *object) error {
	if c.crc32c != nil && *c.crc32c != o.crc32c {
		return invalid("Provided CRC32C %q doesn't match calculated CRC32C %q.", encodeCRC(*c.crc32c), encodeCRC(o.crc32c))
	}
	if c.md5 != nil && o.md5 != nil && string(c.md5) != string(o.md5) {
		return invalid("Provided MD5 hash %q doesn't match calculated MD5 hash %q.",
			base64.StdEncoding.EncodeToString(c.md5), base64.StdEncoding.EncodeToString(o.md5))
	}
	return nil
}

func encodeCRC(crc uint32) string {
	return base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, crc))
}
