package faults

import (
	"errors"
	"testing"
)

func TestTargets(t *testing.T) {
	var s Set
	for _, tc := range []struct {
		value, instance, vm string
		want                bool
	}{
		{"scratch", "scratch", "n1", true},
		{"scratch", "scratch", "", true},
		{"scratch", "other", "n1", false},
		{"scratch/n1", "scratch", "n1", true},
		{"scratch/n1", "scratch", "n2", false},
		{"scratch/n1", "scratch", "", false},
		{"other,scratch/n1", "scratch", "n1", true},
		{"*", "scratch", "", true},
		{"*/n1", "scratch", "n1", true},
		{"*/n1", "scratch", "n2", false},
	} {
		if err := s.Set(LustreHang, tc.value); err != nil {
			t.Fatal(err)
		}
		if got := s.Hits(LustreHang, tc.instance, tc.vm); got != tc.want {
			t.Errorf("%s hits %s/%s: %v, want %v", tc.value, tc.instance, tc.vm, got, tc.want)
		}
	}
	if s.Hits(LustreEIO, "scratch", "n1") || (*Set)(nil).Hits(LustreHang, "scratch", "n1") {
		t.Error("a fault that is off hits")
	}
	for _, bad := range []string{"", ",", "scratch/", "/n1", "scratch/n1/x", "scratch,", "a b", "scratch/*"} {
		if err := s.Set(LustreHang, bad); !errors.Is(err, ErrBadValue) {
			t.Errorf("targets %q: %v, want ErrBadValue", bad, err)
		}
	}
}

func TestStates(t *testing.T) {
	var s Set
	if got := s.State("scratch"); got != "" {
		t.Errorf("state without the fault: %q", got)
	}
	if err := s.Set(LustreState, "other:STOPPED,scratch:UPGRADING"); err != nil {
		t.Fatal(err)
	}
	if got := s.State("scratch"); got != "UPGRADING" {
		t.Errorf("state %q, want UPGRADING", got)
	}
	for _, bad := range []string{"", "scratch", "scratch:ACTIVE", "scratch:upgrading", "scratch/n1:STOPPED", "scratch:STOPPED,"} {
		if err := s.Set(LustreState, bad); !errors.Is(err, ErrBadValue) {
			t.Errorf("states %q: %v, want ErrBadValue", bad, err)
		}
	}
}

func TestChanged(t *testing.T) {
	var s Set
	for _, change := range []func() error{
		func() error { return s.Set(LustreEIO, "*") },
		func() error { return s.Clear(LustreEIO) },
	} {
		c := s.Changed()
		if err := change(); err != nil {
			t.Fatal(err)
		}
		select {
		case <-c:
		default:
			t.Error("a change went unnoticed")
		}
	}
	select {
	case <-s.Changed():
		t.Error("a change was noticed that was none")
	default:
	}
}
