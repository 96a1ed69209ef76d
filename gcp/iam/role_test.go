package iam_test

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/gcp/iam"
)

var update = flag.Bool("update", false, "write docs/permissions.md anew")

// What admins read is what the code asks for.
func TestPermissionsArePublished(t *testing.T) {
	const path = "../../docs/permissions.md"
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := string(page)
	var create strings.Builder
	for _, kind := range []struct {
		name, role string
		list       []iam.Permission
	}{
		{"ControllerPermissions", "sluiceController", iam.ControllerPermissions},
		{"DataAccountPermissions", "sluiceDataAccount", iam.DataAccountPermissions},
		{"NodeAccountPermissions", "sluiceNodeAccount", iam.NodeAccountPermissions},
	} {
		table := "| permission | for what |\n|---|---|\n"
		for _, p := range kind.list {
			table += fmt.Sprintf("| `%s` | %s |\n", p.Name, p.For)
		}
		want = between(t, want, kind.name, table)
		fmt.Fprintf(&create, "gcloud iam roles create %s --project $P --permissions %s\n", kind.role, strings.Join(iam.Names(kind.list), ","))
	}
	want = between(t, want, "commands", create.String())
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if d := cmp.Diff(want, string(page)); d != "" {
		t.Errorf("%s is not what gcp/iam/role.go says; run go test ./gcp/iam -run Permissions -update (-want +got):\n%s", path, d)
	}
}

// between replaces what stands between a page's marks.
func between(t *testing.T, page, name, text string) string {
	t.Helper()
	re := regexp.MustCompile(`(?s)(begin ` + name + `[^\n]*\n).*?(\n[^\n]*end ` + name + `)`)
	if !re.MatchString(page) {
		t.Fatalf("the page has no marks of %s", name)
	}
	return re.ReplaceAllStringFunc(page, func(string) string {
		m := re.FindStringSubmatch(page)
		return m[1] + strings.TrimSuffix(text, "\n") + m[2]
	})
}

// A permission is named once, and says what it is for.
func TestPermissionsAreDistinct(t *testing.T) {
	for _, list := range [][]iam.Permission{iam.ControllerPermissions, iam.DataAccountPermissions, iam.NodeAccountPermissions} {
		seen := map[string]bool{}
		for _, p := range list {
			if seen[p.Name] || p.For == "" || strings.Count(p.Name, ".") != 2 {
				t.Errorf("bad permission %+v", p)
			}
			seen[p.Name] = true
		}
	}
	if got := iam.Names(iam.NodeAccountPermissions); len(got) != 1 || got[0] != "iam.serviceAccounts.actAs" {
		t.Errorf("Names = %q", got)
	}
}
