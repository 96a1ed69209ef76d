package probe

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const table = `22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:5 / /proc rw,nosuid - proc proc rw
41 22 0:44 / /lustre rw,nosuid,nodev,relatime - fuse.lustre 10.129.0.2@tcp:/scratch rw,user_id=0
42 22 0:45 /sub /mnt/with\040blank\011tab\134slash ro shared:7 master:2 - lustre 10.0.0.5@tcp:/fs ro,flock
43 41 0:46 / /lustre rw - lustre 10.0.0.6@tcp:/other rw
44 22 0:47 / /empty rw - tmpfs  rw
`

func TestParseMountinfo(t *testing.T) {
	got, err := ParseMountinfo(strings.NewReader(table))
	if err != nil {
		t.Fatal(err)
	}
	want := []Mount{
		{22, 1, "/", "/", "rw,relatime", "ext4", "/dev/root"},
		{30, 22, "/", "/proc", "rw,nosuid", "proc", "proc"},
		{41, 22, "/", "/lustre", "rw,nosuid,nodev,relatime", "fuse.lustre", "10.129.0.2@tcp:/scratch"},
		{42, 22, "/sub", "/mnt/with blank\ttab\\slash", "ro", "lustre", "10.0.0.5@tcp:/fs"},
		{43, 41, "/", "/lustre", "rw", "lustre", "10.0.0.6@tcp:/other"},
		{44, 22, "/", "/empty", "rw", "tmpfs", ""},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if m := At(got, "/lustre"); m == nil || m.ID != 43 {
		t.Errorf("At(/lustre) = %+v, want the upper mount", m)
	}
	if m := At(got, "/lustre/x"); m != nil {
		t.Errorf("At(/lustre/x) = %+v, want none", m)
	}
}

func TestParseMountinfoBad(t *testing.T) {
	for _, line := range []string{"", "1 2 0:1 / / rw", "1 2 0:1 / / rw - ext4", "x 2 0:1 / / rw - ext4 a rw", "1 y 0:1 / / rw - ext4 a rw"} {
		if _, err := ParseMountinfo(strings.NewReader(line + "\n")); err == nil {
			t.Errorf("%q was accepted", line)
		}
	}
}

func FuzzParseMountinfo(f *testing.F) {
	f.Add(table)
	f.Add(`1 2 0:1 / /\999\04 rw - a\1 b\ rw` + "\n")
	f.Fuzz(func(t *testing.T, s string) {
		mounts, err := ParseMountinfo(strings.NewReader(s))
		if err == nil && len(mounts) > strings.Count(s, "\n")+1 {
			t.Errorf("%d mounts in %d lines", len(mounts), strings.Count(s, "\n")+1)
		}
	})
}

func TestJudge(t *testing.T) {
	mounts, err := ParseMountinfo(strings.NewReader(table))
	if err != nil {
		t.Fatal(err)
	}
	const blank = "/mnt/with blank\ttab\\slash"
	for _, tt := range []struct {
		name  string
		check Check
		want  State
	}{
		{"right", Check{Dir: blank, Source: "10.0.0.5@tcp:/fs"}, OK},
		{"any source", Check{Dir: blank + "/"}, OK},
		{"nothing there", Check{Dir: "/data", Source: "10.0.0.5@tcp:/fs"}, NotMounted},
		{"below a mount", Check{Dir: "/lustre/dir"}, NotMounted},
		{"hidden by another", Check{Dir: "/lustre", Source: "10.129.0.2@tcp:/scratch", Types: []string{"lustre", "fuse.lustre"}}, WrongSource},
		{"another type", Check{Dir: "/", Source: "/dev/root"}, WrongType},
		{"type not accepted", Check{Dir: blank, Types: []string{"fuse.lustre"}}, WrongType},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got, detail := Judge(mounts, tt.check); got != tt.want || (detail == "") != (got == OK) {
				t.Errorf("got %s %q, want %s", got, detail, tt.want)
			}
		})
	}
}
