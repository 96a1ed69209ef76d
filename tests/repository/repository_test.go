// Package repository_test checks rules that hold for the whole repository.
package repository_test

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/sluicehpc/sluice"

type pkg struct {
	ImportPath, Name, Doc              string
	Imports, TestImports, XTestImports []string
}

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Name,Doc,Imports,TestImports,XTestImports", module+"/...")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

// room is a package's first directory below the module.
func room(path string) string {
	rest, ok := strings.CutPrefix(path, module+"/")
	if !ok {
		return ""
	}
	first, _, _ := strings.Cut(rest, "/")
	return first
}

// floors lists the rooms from the top down: a room imports rooms of its own
// floor and below. Rooms that are not listed are free: cmd, sandbox, tests,
// examples and packaging stand beside the house.
var floors = [][]string{
	{"doctor"},
	{"controller", "agent"},
	{"serving"},
	{"checkpoint"},
	{"staging", "nodes", "prolog", "epilog"},
	{"provision"},
	{"images"},
	{"policy", "trust", "health"},
	{"slurm", "lustre", "gcp", "blueprints"},
	{"api"},
	{"internal"},
}

func TestImportsPointDownwards(t *testing.T) {
	floor := map[string]int{}
	for i, rooms := range floors {
		for _, r := range rooms {
			floor[r] = i
		}
	}
	for _, p := range packages(t) {
		from, ok := floor[room(p.ImportPath)]
		for _, imported := range p.Imports {
			to, known := floor[room(imported)]
			if ok && known && to < from {
				t.Errorf("%s imports %s, which is above it", p.ImportPath, imported)
			}
			if r := room(imported); ok && (r == "sandbox" || r == "cmd" || r == "tests" || r == "examples") {
				t.Errorf("%s imports %s: the product knows of no %s", p.ImportPath, imported, r)
			}
		}
	}
}

// A static binary's os/user reads /etc/passwd only; real sites' users are
// elsewhere. internal/users asks getent.
func TestNobodyImportsOSUser(t *testing.T) {
	for _, p := range packages(t) {
		if slices.Contains(p.Imports, "os/user") {
			t.Errorf("%s imports os/user: use internal/users", p.ImportPath)
		}
	}
}

func TestEveryPackageSaysWhatItIs(t *testing.T) {
	vague := []string{"util", "utils", "common", "helper", "helpers", "types", "misc"}
	for _, p := range packages(t) {
		if p.Doc == "" && len(p.Imports) > 0 {
			t.Errorf("%s has no package comment", p.ImportPath)
		}
		if slices.Contains(vague, p.Name) {
			t.Errorf("%s: a package called %s says nothing", p.ImportPath, p.Name)
		}
	}
}
