package safetensors

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// file makes a file from a header and a number of zero bytes of data.
func file(header string, data int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	b = append(b, header...)
	return append(b, make([]byte, data)...)
}

func TestRoundTrip(t *testing.T) {
	big := make([]float32, 40_000) // more than one buffer
	for i := range big {
		big[i] = float32(i) / 3
	}
	tensors := []Tensor{
		{"weight", []int64{2, 3}, []float32{1, -2, 3.5, float32(math.Inf(1)), 0, 6}},
		{"empty", []int64{0, 4}, nil},
		{"scalar", nil, []float32{7}},
		{"naïve \"name\"\n", []int64{200, 200}, big},
	}
	meta := map[string]string{"format": "pt", "step": "12"}
	path := filepath.Join(t.TempDir(), "model.safetensors")
	var buf bytes.Buffer
	if err := Write(&buf, tensors, meta); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, buf.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if diff := cmp.Diff(meta, f.Metadata); diff != "" {
		t.Errorf("metadata (-want +got):\n%s", diff)
	}
	if f.Data%alignment != 0 {
		t.Errorf("data begins at %d, not a multiple of %d", f.Data, alignment)
	}
	if got, want := len(f.Entries), len(tensors); got != want {
		t.Errorf("got %d tensors, want %d", got, want)
	}
	for _, want := range tensors {
		got := make([]float32, len(want.Data))
		if err := f.Read(want.Name, got); err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(append([]float32{}, want.Data...), got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", want.Name, diff)
		}
	}
	if err := f.Read("weight", make([]float32, 5)); err == nil {
		t.Error("reading 6 values into 5: got no error")
	}
	if err := f.Read("absent", nil); err == nil {
		t.Error("reading an absent tensor: got no error")
	}
	for cut := range 64 { // every shorter file is refused
		if _, err := ReadHeader(bytes.NewReader(buf.Bytes()[:buf.Len()-1-cut*7]), int64(buf.Len()-1-cut*7)); !errors.Is(err, ErrFormat) {
			t.Fatalf("cut by %d bytes: got %v, want ErrFormat", 1+cut*7, err)
		}
	}
}

func TestWriteRefuses(t *testing.T) {
	for name, tensors := range map[string][]Tensor{
		"a name twice":        {{"a", nil, []float32{1}}, {"a", nil, []float32{1}}},
		"no name":             {{"", nil, []float32{1}}},
		"the metadata's name": {{metadataKey, nil, []float32{1}}},
		"a name not in UTF-8": {{"\xff", nil, []float32{1}}},
		"a shape too large":   {{"a", []int64{2}, []float32{1}}},
		"a negative shape":    {{"a", []int64{-1, -1}, []float32{1}}},
	} {
		if err := Write(&bytes.Buffer{}, tensors, nil); err == nil {
			t.Errorf("%s: got no error", name)
		}
	}
}

func TestReadHeader(t *testing.T) {
	const a = `"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}`
	const b = `"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}`
	for _, test := range []struct {
		name, header string
		data         int
		want         string // part of the error, or "" for a good file
	}{
		{"no tensor", `{}`, 0, ""},
		{"blanks at the end", `{` + a + `}   `, 4, ""},
		{"two, in any order", `{` + b + `,` + a + `}`, 8, ""},
		{"an unknown member is skipped", `{"a":{"note":[{}],"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`, 4, ""},
		{"an empty tensor between two", `{` + a + `,` + b + `,"c":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}}`, 8, ""},
		{"nothing", ``, 0, "begin with {"},
		{"a blank first", ` {}`, 0, "begin with {"},
		{"a line feed last", "{}\n", 0, "end in }"},
		{"two values", `{}{}`, 0, "more than one"},
		{"not JSON", `{"a"}`, 0, "invalid"},
		{"not UTF-8", "{\"\xff\":1}", 0, "UTF-8"},
		{"a name twice", `{` + a + `,` + a + `}`, 4, "comes twice"},
		{"a name twice by escapes", `{` + a + `,"\u0061":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}`, 8, "comes twice"},
		{"a member twice", `{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}`, 4, "comes twice"},
		{"metadata not text", `{"__metadata__":{"a":1}}`, 0, "not a string"},
		{"a member missing", `{"a":{"dtype":"F32","data_offsets":[0,4]}}`, 4, "no shape"},
		{"a member in capitals", `{"a":{"dtype":"F32","Shape":[1],"data_offsets":[0,4]}}`, 4, "no shape"},
		{"unknown type", `{"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}`, 4, "unknown dtype"},
		{"negative shape", `{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}`, 4, "whole number"},
		{"fractional shape", `{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}`, 4, "whole number"},
		{"shape overflows", `{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}`, 0, "too large"},
		{"three offsets", `{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}`, 4, "begin and an end"},
		{"offsets backwards", `{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}`, 4, "begin and an end"},
		{"shape and offsets differ", `{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}`, 4, "needs 8 bytes"},
		{"a hole", `{` + a + `,"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}`, 12, "begins at 8"},
		{"an overlap", `{` + a + `,"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}`, 6, "begins at 2"},
		{"cut short", `{` + a + `}`, 3, "end at byte 4 of 3"},
		{"grown", `{` + a + `}`, 5, "end at byte 4 of 5"},
	} {
		t.Run(test.name, func(t *testing.T) {
			raw := file(test.header, test.data)
			_, err := ReadHeader(bytes.NewReader(raw), int64(len(raw)))
			if test.want == "" {
				if err != nil {
					t.Errorf("got %v, want no error", err)
				}
				return
			}
			if !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want ErrFormat with %q", err, test.want)
			}
		})
	}
}

func TestHeaderLength(t *testing.T) {
	for _, n := range []uint64{3, MaxHeader + 1, 1 << 63, math.MaxUint64} {
		raw := append(binary.LittleEndian.AppendUint64(nil, n), "{}"...)
		if _, err := ReadHeader(bytes.NewReader(raw), int64(len(raw))); !errors.Is(err, ErrFormat) {
			t.Errorf("header length %d: got %v, want ErrFormat", n, err)
		}
	}
	if _, err := ReadHeader(bytes.NewReader(nil), 0); !errors.Is(err, ErrFormat) {
		t.Errorf("empty file: got %v, want ErrFormat", err)
	}
}

func FuzzReadHeader(f *testing.F) {
	var buf bytes.Buffer
	if err := Write(&buf, []Tensor{{"a", []int64{2}, []float32{1, 2}}, {"b", nil, []float32{3}}}, map[string]string{"k": "v"}); err != nil {
		f.Fatal(err)
	}
	f.Add(buf.Bytes())
	f.Add(file(`{}`, 0))
	f.Add(file(`{"a":{"dtype":"F64","shape":[1,0],"data_offsets":[0,0]}} `, 0))
	f.Fuzz(func(t *testing.T, raw []byte) {
		h, err := ReadHeader(bytes.NewReader(raw), int64(len(raw)))
		if err != nil {
			return
		}
		var total int64 // what is accepted covers the file exactly
		for name, e := range h.Entries {
			if e.Begin < 0 || e.End < e.Begin || h.Data+e.End > int64(len(raw)) {
				t.Errorf("%q lies at %d to %d of %d bytes", name, e.Begin, e.End, len(raw))
			}
			total += e.End - e.Begin
		}
		if h.Data+total != int64(len(raw)) {
			t.Errorf("tensors hold %d bytes, the file %d after its header", total, int64(len(raw))-h.Data)
		}
	})
}
