package hostlist

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestExpand(t *testing.T) {
	for _, test := range []struct {
		name, list string
		want       []string
	}{
		{"empty", "", nil},
		{"one name", "login", []string{"login"}},
		{"several names", "a,b,c", []string{"a", "b", "c"}},
		{"range", "n[1-4]", []string{"n1", "n2", "n3", "n4"}},
		{"range and single", "n[1-3,7]", []string{"n1", "n2", "n3", "n7"}},
		{"digits only grow", "n[9-11]", []string{"n9", "n10", "n11"}},
		{"zero padding", "n[08-10]", []string{"n08", "n09", "n10"}},
		{"padding of each range", "n[1,01,001-002]", []string{"n1", "n01", "n001", "n002"}},
		{"two brackets, the last counts fastest", "r[1-2]n[1-2]", []string{"r1n1", "r1n2", "r2n1", "r2n2"}},
		{"suffix", "n[1-2]-ib", []string{"n1-ib", "n2-ib"}},
		{"brackets side by side", "n[1-2][0,5]", []string{"n10", "n15", "n20", "n25"}},
		{"mixture", "login,n[1-2],m7.example", []string{"login", "n1", "n2", "m7.example"}},
		{"duplicates stay", "a,a", []string{"a", "a"}},
		{"order stays", "n[7,1-2]", []string{"n7", "n1", "n2"}},
		{"numbers first", "[1-2]x", []string{"1x", "2x"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Expand(test.list)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("Expand(%q) (-want +got):\n%s", test.list, diff)
			}
		})
	}
}

func TestExpandErrors(t *testing.T) {
	for _, test := range []struct{ name, list, want string }{
		{"bracket not closed", "n[1-2", "not closed"},
		{"bracket not opened", "n1]", "without an opening"},
		{"bracket in bracket", "n[1-[2]]", "inside a bracket"},
		{"empty bracket", "n[]", "not a number"},
		{"half a range", "n[1-]", "not a number"},
		{"letters in a range", "n[a-c]", "not a number"},
		{"backwards", "n[4-1]", "runs backwards"},
		{"empty element", "a,,b", "empty name"},
		{"trailing comma", "a,", "empty name"},
		{"blank", "a b", "contains"},
		{"null", "(null)", "contains"},
		{"shell", "a;reboot", "contains"},
		{"option", "--help", "begins with '-'"},
		{"too many", "n[1-65537]", "more hosts"},
		{"too many by product", "n[1-1000][1-1000]", "more hosts"},
		{"too many by sum", "n[1-40000],m[1-40000]", "more than 65536"},
		{"huge number", "n[1-99999999999999999999]", "digits"},
		{"bomb of brackets", "n" + strings.Repeat("[0-9]", 500), "more hosts"},
		{"long name", strings.Repeat("n", 254), "longer than"},
		{"bomb of a long suffix", "n[1-65536]" + strings.Repeat("x", 1<<20), "longer than"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Expand(test.list)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("Expand(%.40q) = %d hosts, error %v; want an error with %q", test.list, len(got), err, test.want)
			}
		})
	}
	if got, err := Expand("n[1-65536]"); err != nil || len(got) != MaxHosts {
		t.Errorf("a list of exactly MaxHosts: %d hosts, error %v", len(got), err)
	}
	if got, err := ExpandMax("n[1-100000]", 100000); err != nil || len(got) != 100000 {
		t.Errorf("ExpandMax: %d hosts, error %v", len(got), err)
	}
}

func TestCompress(t *testing.T) {
	for _, test := range []struct {
		name  string
		hosts string // separated by blanks
		want  string
	}{
		{"none", "", ""},
		{"one", "n7", "n7"},
		{"range", "n1 n2 n3 n4", "n[1-4]"},
		{"gap", "n1 n2 n4", "n[1-2,4]"},
		{"growing width", "n9 n10 n11", "n[9-11]"},
		{"padded", "n08 n09 n10", "n[08-10]"},
		{"padding changes", "n1 n02", "n[1,02]"},
		{"other prefix", "a1 a2 b1", "a[1-2],b1"},
		{"no number", "login n1 n2", "login,n[1-2]"},
		{"order kept", "n3 n1 n2", "n[3,1-2]"},
		{"suffix", "n1-ib n2-ib", "n1-ib,n2-ib"},
	} {
		t.Run(test.name, func(t *testing.T) {
			hosts := strings.Fields(test.hosts)
			got := Compress(hosts)
			if got != test.want {
				t.Errorf("Compress(%v) = %q, want %q", hosts, got, test.want)
			}
			back, err := Expand(got)
			if err != nil || !slices.Equal(back, hosts) {
				t.Errorf("Expand(%q) = %v, %v; want %v", got, back, err, hosts)
			}
		})
	}
}

func FuzzRoundTrip(f *testing.F) {
	for _, s := range []string{"n[1-4,7],login", "n[08-10]", "r[1-2]n[1-2]", "a,a", "n[999999999999999998-999999999999999999]",
		"n[1-2]-ib", "x0001000000000000000000", "n[", "]", "n[1-65537]"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, list string) {
		hosts, err := ExpandMax(list, 5000)
		if err != nil {
			return
		}
		if len(hosts) > 5000 {
			t.Fatalf("%d hosts", len(hosts))
		}
		again, err := ExpandMax(Compress(hosts), 5000)
		if err != nil || !slices.Equal(again, hosts) {
			t.Errorf("%q expands to %q, compressed %q, and again to %q (%v)", list, hosts, Compress(hosts), again, err)
		}
	})
}
