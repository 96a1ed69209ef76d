// Package safetensors reads and writes the safetensors file format.
//
// A file is a header length (8 bytes, little endian), a JSON header that names each tensor's type, shape and place, and
// the tensors' bytes. The rules are those of https://github.com/huggingface/safetensors (README, "Format"): the header
// begins with "{", may end in blanks, has no duplicate keys, and the tensors cover the rest of the file without holes.
package safetensors

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"sort"
	"strconv"
	"syscall"
	"unicode/utf8"
)

const (
	// MaxHeader is the largest header accepted, in bytes: the format's own limit.
	MaxHeader = 100_000_000

	lengthSize  = 8
	metadataKey = "__metadata__"
	alignment   = 8 // the data begins at a multiple of this many bytes
)

// F32 is the type of little-endian IEEE 754 single-precision values, the only one that is written.
const F32 = "F32"

// typeSize holds the bytes per value of every type that is read.
var typeSize = map[string]int64{
	"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
	"U16": 2, "I16": 2, "F16": 2, "BF16": 2,
	"U32": 4, "I32": 4, F32: 4,
	"U64": 8, "I64": 8, "F64": 8,
}

// ErrFormat is what every error about the content of a file wraps.
var ErrFormat = errors.New("not a valid safetensors file")

// Tensor is a named array of float32 in row-major order. Shape's product is len(Data).
type Tensor struct {
	Name  string
	Shape []int64
	Data  []float32
}

// Entry says what one tensor in a file is and where it lies.
type Entry struct {
	DType      string
	Shape      []int64
	Begin, End int64 // bytes from the beginning of the data
}

// Header is the checked header of a file.
type Header struct {
	Metadata map[string]string // free text, or nil
	Entries  map[string]Entry
	Data     int64 // where the data begins, in bytes from the beginning of the file
}

// Write writes the tensors in the order given. Names must differ, and none may be "__metadata__" or empty.
func Write(w io.Writer, tensors []Tensor, metadata map[string]string) error {
	header, err := encodeHeader(tensors, metadata)
	if err != nil {
		return err
	}
	if _, err := w.Write(header); err != nil {
		return fmt.Errorf("write safetensors header: %w", err)
	}
	buf := make([]byte, 0, 64<<10)
	for _, t := range tensors {
		for data := t.Data; len(data) > 0; {
			n := min(len(data), cap(buf)/4)
			buf = buf[:0]
			for _, v := range data[:n] {
				buf = binary.LittleEndian.AppendUint32(buf, math.Float32bits(v))
			}
			if _, err := w.Write(buf); err != nil {
				return fmt.Errorf("write tensor %q: %w", t.Name, err)
			}
			data = data[n:]
		}
	}
	return nil
}

func encodeHeader(tensors []Tensor, metadata map[string]string) ([]byte, error) {
	type entry struct {
		DType   string   `json:"dtype"`
		Shape   []int64  `json:"shape"`
		Offsets [2]int64 `json:"data_offsets"`
	}
	var body bytes.Buffer
	body.WriteByte('{')
	add := func(key string, value any) error {
		if !utf8.ValidString(key) {
			return fmt.Errorf("tensor name %q is not UTF-8", key)
		}
		k, err := json.Marshal(key)
		if err != nil {
			return err
		}
		v, err := json.Marshal(value)
		if err != nil {
			return err
		}
		if body.Len() > 1 {
			body.WriteByte(',')
		}
		body.Write(k)
		body.WriteByte(':')
		body.Write(v)
		return nil
	}
	if len(metadata) > 0 {
		if err := add(metadataKey, metadata); err != nil {
			return nil, err
		}
	}
	seen := map[string]bool{"": true, metadataKey: true}
	var at int64
	for _, t := range tensors {
		if seen[t.Name] {
			return nil, fmt.Errorf("tensor name %q is used twice or not allowed", t.Name)
		}
		seen[t.Name] = true
		n, err := product(t.Shape)
		if err != nil || n != int64(len(t.Data)) {
			return nil, fmt.Errorf("tensor %q has shape %v and %d values", t.Name, t.Shape, len(t.Data))
		}
		shape := t.Shape
		if shape == nil {
			shape = []int64{}
		}
		if err := add(t.Name, entry{F32, shape, [2]int64{at, at + 4*n}}); err != nil {
			return nil, err
		}
		at += 4 * n
	}
	body.WriteByte('}')
	for (lengthSize+body.Len())%alignment != 0 {
		body.WriteByte(' ')
	}
	if body.Len() > MaxHeader {
		return nil, fmt.Errorf("safetensors header of %d bytes is over the format's limit of %d", body.Len(), MaxHeader)
	}
	return append(binary.LittleEndian.AppendUint64(nil, uint64(body.Len())), body.Bytes()...), nil
}

// ReadHeader reads and checks the header of a file of the given size in bytes. Every rule of the format is checked, and that the
// file ends where the last tensor does: a file cut short or grown is refused. Errors about the content wrap ErrFormat.
func ReadHeader(r io.ReaderAt, size int64) (*Header, error) {
	var length [lengthSize]byte
	if size < lengthSize {
		return nil, fmt.Errorf("%w: %d bytes hold no header length", ErrFormat, size)
	}
	if _, err := r.ReadAt(length[:], 0); err != nil {
		return nil, fmt.Errorf("read header length: %w", err)
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > MaxHeader || int64(n) > size-lengthSize {
		return nil, fmt.Errorf("%w: a header of %d bytes does not fit a file of %d", ErrFormat, n, size)
	}
	raw := make([]byte, n)
	if _, err := io.ReadFull(io.NewSectionReader(r, lengthSize, int64(n)), raw); err != nil {
		return nil, fmt.Errorf("read header: %w", err)
	}
	h, err := parseHeader(raw)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	h.Data = lengthSize + int64(n)
	if err := h.checkLayout(size - h.Data); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	return h, nil
}

// parseHeader reads the header token by token, since encoding/json's decoding into structs hides duplicate keys and takes
// "Shape" for "shape".
func parseHeader(raw []byte) (*Header, error) {
	if len(raw) == 0 || raw[0] != '{' {
		return nil, errors.New("the header does not begin with {")
	}
	if !utf8.Valid(raw) {
		return nil, errors.New("the header is not UTF-8")
	}
	trimmed := bytes.TrimRight(raw, " ")
	if trimmed[len(trimmed)-1] != '}' {
		return nil, errors.New("the header does not end in } and blanks")
	}
	dec := json.NewDecoder(bytes.NewReader(trimmed))
	dec.UseNumber()
	h := &Header{Entries: map[string]Entry{}}
	err := object(dec, func(key string) error {
		if key == metadataKey {
			h.Metadata = map[string]string{}
			return object(dec, func(k string) error {
				tok, err := dec.Token()
				if err != nil {
					return err
				}
				v, ok := tok.(string)
				if !ok {
					return fmt.Errorf("metadata %q is not a string", k)
				}
				h.Metadata[k] = v
				return nil
			})
		}
		e, err := parseEntry(dec)
		if err != nil {
			return fmt.Errorf("tensor %q: %w", key, err)
		}
		h.Entries[key] = e
		return nil
	})
	if err != nil {
		return nil, err
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, errors.New("the header has more than one JSON value")
	}
	return h, nil
}

// object reads one JSON object, calling member after each key; a key that comes twice is an error.
func object(dec *json.Decoder, member func(key string) error) error {
	tok, err := dec.Token()
	if err != nil {
		return err
	}
	if tok != json.Delim('{') {
		return fmt.Errorf("found %v where an object should be", tok)
	}
	seen := map[string]bool{}
	for dec.More() {
		tok, err := dec.Token()
		if err != nil {
			return err
		}
		key, ok := tok.(string)
		if !ok {
			return fmt.Errorf("found %v where a key should be", tok)
		}
		if seen[key] {
			return fmt.Errorf("key %q comes twice", key)
		}
		seen[key] = true
		if err := member(key); err != nil {
			return err
		}
	}
	_, err = dec.Token()
	return err
}

func parseEntry(dec *json.Decoder) (Entry, error) {
	var e Entry
	var offsets []int64
	found := map[string]bool{}
	err := object(dec, func(key string) (err error) {
		found[key] = true
		switch key {
		case "dtype":
			tok, err := dec.Token()
			if err != nil {
				return err
			}
			name, ok := tok.(string)
			if !ok || typeSize[name] == 0 {
				return fmt.Errorf("unknown dtype %v", tok)
			}
			e.DType = name
		case "shape":
			e.Shape, err = integers(dec)
		case "data_offsets":
			offsets, err = integers(dec)
		default:
			var skipped json.RawMessage
			err = dec.Decode(&skipped)
		}
		return err
	})
	if err != nil {
		return e, err
	}
	for _, key := range []string{"dtype", "shape", "data_offsets"} {
		if !found[key] {
			return e, fmt.Errorf("no %s", key)
		}
	}
	if len(offsets) != 2 || offsets[0] > offsets[1] {
		return e, fmt.Errorf("data_offsets %v are not a begin and an end", offsets)
	}
	e.Begin, e.End = offsets[0], offsets[1]
	n, err := product(append([]int64{typeSize[e.DType]}, e.Shape...))
	if err != nil {
		return e, err
	}
	if n != e.End-e.Begin {
		return e, fmt.Errorf("%s%v needs %d bytes, data_offsets give %d", e.DType, e.Shape, n, e.End-e.Begin)
	}
	return e, nil
}

// integers reads an array of whole numbers that are not negative.
func integers(dec *json.Decoder) ([]int64, error) {
	tok, err := dec.Token()
	if err != nil {
		return nil, err
	}
	if tok != json.Delim('[') {
		return nil, fmt.Errorf("found %v where an array should be", tok)
	}
	list := []int64{}
	for dec.More() {
		tok, err := dec.Token()
		if err != nil {
			return nil, err
		}
		num, ok := tok.(json.Number)
		if !ok {
			return nil, fmt.Errorf("found %v where a number should be", tok)
		}
		v, err := strconv.ParseUint(num.String(), 10, 63)
		if err != nil {
			return nil, fmt.Errorf("%s is not a whole number from 0 to 2^63-1", num)
		}
		list = append(list, int64(v))
	}
	_, err = dec.Token()
	return list, err
}

// product multiplies and refuses what does not fit an int64.
func product(shape []int64) (int64, error) {
	n := int64(1)
	for _, d := range shape {
		if d < 0 || d > 0 && n > math.MaxInt64/d {
			return 0, fmt.Errorf("shape %v is too large", shape)
		}
		n *= d
	}
	return n, nil
}

// checkLayout proves that the entries cover the data's size bytes exactly once.
func (h *Header) checkLayout(size int64) error {
	names := make([]string, 0, len(h.Entries))
	for name := range h.Entries {
		names = append(names, name)
	}
	sort.Slice(names, func(i, j int) bool {
		a, b := h.Entries[names[i]], h.Entries[names[j]]
		if a.Begin != b.Begin {
			return a.Begin < b.Begin
		}
		if a.End != b.End {
			return a.End < b.End
		}
		return names[i] < names[j]
	})
	var at int64
	for _, name := range names {
		e := h.Entries[name]
		if e.Begin != at {
			return fmt.Errorf("tensor %q begins at %d, where %d is free", name, e.Begin, at)
		}
		at = e.End
	}
	if at != size {
		return fmt.Errorf("the tensors end at byte %d of %d bytes of data", at, size)
	}
	return nil
}

// File is an open file whose header has been checked.
type File struct {
	*Header
	f *os.File
}

// Open opens a regular file and checks its header. The caller closes it.
func Open(path string) (*File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // opening a pipe must not wait for its writer
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("not a regular file")
	}
	var h *Header
	if err == nil {
		h, err = ReadHeader(f, info.Size())
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	return &File{h, f}, nil
}

// Close closes the file.
func (f *File) Close() error { return f.f.Close() }

// Read fills dst with the tensor of that name, which must be of type F32 and hold exactly len(dst) values.
func (f *File) Read(name string, dst []float32) error {
	e, ok := f.Entries[name]
	if !ok {
		return fmt.Errorf("%s: no tensor %q", f.f.Name(), name)
	}
	if e.DType != F32 || e.End-e.Begin != 4*int64(len(dst)) {
		return fmt.Errorf("%s: tensor %q is %s%v, wanted %s of %d values", f.f.Name(), name, e.DType, e.Shape, F32, len(dst))
	}
	buf := make([]byte, min(64<<10, 4*len(dst)))
	for at := f.Data + e.Begin; len(dst) > 0; {
		n := min(len(dst), len(buf)/4)
		if _, err := f.f.ReadAt(buf[:4*n], at); err != nil {
			return fmt.Errorf("%s: read tensor %q: %w", f.f.Name(), name, err)
		}
		for i := range n {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(buf[4*i:]))
		}
		dst = dst[n:]
		at += int64(4 * n)
	}
	return nil
}
