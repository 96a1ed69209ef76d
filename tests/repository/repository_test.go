// Package repository_test checks rules that hold for the whole repository.
package repository_test

import (
	"debug/elf"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/sluicehpc/sluice"

type pkg struct {
	ImportPath, Name, Doc, Dir         string
	GoFiles                            []string
	Imports, TestImports, XTestImports []string
}

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Name,Doc,Dir,GoFiles,Imports,TestImports,XTestImports", module+"/...")
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
// elsewhere. internal/users asks getent, and nobody else does.
func TestUsersComeThroughOnePackage(t *testing.T) {
	for _, p := range packages(t) {
		for _, imports := range [][]string{p.Imports, p.TestImports, p.XTestImports} {
			if slices.Contains(imports, "os/user") {
				t.Errorf("%s imports os/user: use internal/users", p.ImportPath)
			}
		}
		if p.ImportPath == module+"/internal/users" {
			continue
		}
		for _, name := range p.GoFiles {
			path := filepath.Join(p.Dir, name)
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(text), `"getent"`) {
				t.Errorf("%s runs getent: use internal/users", path)
			}
		}
	}
}

// TestBinariesAreStatic: they run on every distribution, whatever C library it has.
func TestBinariesAreStatic(t *testing.T) {
	commands, err := os.ReadDir("../../cmd")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range commands {
		path := filepath.Join("../../bin", c.Name())
		f, err := elf.Open(path)
		if err != nil {
			t.Errorf("%v (make build)", err)
			continue
		}
		for _, p := range f.Progs {
			if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
				t.Errorf("%s needs a dynamic loader: it was built with cgo", path)
			}
		}
		if err := f.Close(); err != nil {
			t.Error(err)
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
