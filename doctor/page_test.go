package doctor

import (
	"flag"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write docs/unverified.md anew")

func TestPageIsTheTable(t *testing.T) {
	const path = "../docs/unverified.md"
	if *update {
		if err := os.WriteFile(path, []byte(Page()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(Page(), string(got)); d != "" {
		t.Errorf("%s is not what the table says; run go test ./doctor -update (-table +file):\n%s", path, d)
	}
}

func TestTable(t *testing.T) {
	id := regexp.MustCompile(`^[a-z][a-z0-9]*(-[a-z0-9]+)*$`)
	seen := map[string]bool{}
	for _, p := range Proofs {
		if !id.MatchString(p.ID) || len(p.ID) > 18 || seen[p.ID] {
			t.Errorf("%q is no id of its own of at most 18 letters, digits and hyphens", p.ID)
		}
		seen[p.ID] = true
		if p.Assumption == "" || p.RestsOn == "" || p.Command == "" {
			t.Errorf("%s: assumption, what rests on it or the command is missing", p.ID)
		}
		if p.Limit < 0 || p.Limit > 2*time.Hour {
			t.Errorf("%s: a limit of %s", p.ID, p.Limit)
		}
	}
}
