package faults

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestSetAndClear(t *testing.T) {
	var s Set
	for key, value := range map[string]string{
		LustreImportCorrupt:    "gs://corpus/a b/c.txt",
		LustreTransferRate:     "1048576",
		LustreTransferParallel: "on",
		ComputeInsertDelay:     "1.5s",
	} {
		if err := s.Set(key, value); err != nil {
			t.Fatalf("Set(%q, %q): %v", key, value, err)
		}
	}
	if got, want := s.Int(LustreTransferRate), int64(1048576); got != want {
		t.Errorf("Int = %d, want %d", got, want)
	}
	if got, want := s.Duration(ComputeInsertDelay), 1500*time.Millisecond; got != want {
		t.Errorf("Duration = %v, want %v", got, want)
	}
	if !s.On(LustreTransferParallel) {
		t.Error("On = false, want true")
	}
	if err := s.Clear(LustreTransferParallel); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		LustreImportCorrupt: "gs://corpus/a b/c.txt",
		LustreTransferRate:  "1048576",
		ComputeInsertDelay:  "1.5s",
	}
	if diff := cmp.Diff(want, s.All()); diff != "" {
		t.Errorf("All (-want +got):\n%s", diff)
	}
}

func TestNilSetIsEmpty(t *testing.T) {
	var s *Set
	if _, on := s.Get(LustreTransferRate); on {
		t.Error("a nil set has a fault on")
	}
	if got := s.Int(LustreTransferRate); got != 0 {
		t.Errorf("Int = %d, want 0", got)
	}
}

func TestRefusals(t *testing.T) {
	for _, tc := range []struct {
		name, key, value string
		want             error
		text             string
	}{
		{"unknown key names the nearest", "lustre.import.corupt", "gs://b/o", ErrUnknownKey, "did you mean lustre.import.corrupt?"},
		{"empty key", "", "1", ErrUnknownKey, "did you mean"},
		{"very long key", strings.Repeat("x", 1<<20), "1", ErrUnknownKey, "did you mean"},
		{"not a gs URL", LustreImportCorrupt, "/b/o", ErrBadValue, "want gs://BUCKET/OBJECT"},
		{"a bucket only", LustreImportCorrupt, "gs://b/", ErrBadValue, "want gs://BUCKET/OBJECT"},
		{"rate zero", LustreTransferRate, "0", ErrBadValue, "above 0"},
		{"switch off", LustreTransferParallel, "off", ErrBadValue, "want on"},
		{"negative delay", ComputeInsertDelay, "-1s", ErrBadValue, "negative"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var s Set
			err := s.Set(tc.key, tc.value)
			if !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("Set = %v, want %v with %q", err, tc.want, tc.text)
			}
			if len(s.All()) != 0 {
				t.Error("a refused fault was set")
			}
		})
	}
}
