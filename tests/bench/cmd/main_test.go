package main

import (
	"bytes"
	"strings"
	"testing"
)

func TestRunRefuses(t *testing.T) {
	for args, want := range map[string]string{
		"hoks":           "no benchmark \"hoks\"; there are hooks, start",
		"--runs 3 hooks": "--runs 3, want at least 20",
		"--rums 30":      "usage",
	} {
		var out, errOut bytes.Buffer
		err := run(t.Context(), strings.Fields(args), &out, &errOut)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", args, err, want)
		}
	}
}

func TestList(t *testing.T) {
	var out, errOut bytes.Buffer
	if err := run(t.Context(), []string{"--list"}, &out, &errOut); err != nil {
		t.Fatal(err)
	}
	for _, b := range benchmarks {
		if !strings.Contains(out.String(), b.Name+" ") {
			t.Errorf("--list does not show %s:\n%s", b.Name, out.String())
		}
	}
}
