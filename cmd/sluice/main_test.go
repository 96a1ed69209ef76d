package main

import (
	"errors"
	"fmt"
	"os/exec"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"sluice": main})
}

// TestScript runs the command line as people type it.
func TestScript(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata/script", Cmds: map[string]func(*testscript.TestScript, bool, []string){"exits": exits}})
}

func TestReorder(t *testing.T) {
	for _, tt := range []struct {
		name     string
		in, want []string
	}{
		{"flag after the argument", []string{"sluice", "job", "show", "7", "--json"}, []string{"sluice", "job", "show", "--json", "7"}},
		{"flag with a value after it", []string{"sluice", "sandbox", "fault", "set", "a=b", "--name", "x"}, []string{"sluice", "sandbox", "fault", "set", "--name", "x", "a=b"}},
		{"joined value", []string{"sluice", "sandbox", "fault", "set", "a=b", "--name=x"}, []string{"sluice", "sandbox", "fault", "set", "--name=x", "a=b"}},
		{"what follows -- is not ours", []string{"sluice", "sandbox", "exec", "--", "ls", "--name", "x"}, []string{"sluice", "sandbox", "exec", "--", "ls", "--name", "x"}},
		{"an unknown flag stays to be refused", []string{"sluice", "job", "show", "7", "--bogus"}, []string{"sluice", "job", "show", "--bogus", "7"}},
		{"no such command", []string{"sluice", "bogus", "--json"}, []string{"sluice", "bogus", "--json"}},
		{"nothing", []string{"sluice"}, []string{"sluice"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, reorder(newApp(), tt.in)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// exits CODE ARG… runs sluice and wants the exit code.
func exits(ts *testscript.TestScript, _ bool, args []string) {
	err := ts.Exec("sluice", args[1:]...)
	var xe *exec.ExitError
	code := 0
	if errors.As(err, &xe) {
		code = xe.ExitCode()
	} else {
		ts.Check(err)
	}
	if fmt.Sprint(code) != args[0] {
		ts.Fatalf("exit code %d, want %s", code, args[0])
	}
}
