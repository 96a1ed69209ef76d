package main

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/api"
)

func TestNodeRows(t *testing.T) {
	n := api.Node{Name: "n1", Role: api.RoleCompute, State: "not_ready", Reason: "enrolment refused: another key", ReadyAt: "R", SeenAt: "S",
		Mounts:    []api.MountState{{Dir: "/lustre", State: "hung", Detail: "no answer"}},
		Enrolment: &api.Enrolment{Instance: "4711", EnrolledAt: "E", Until: "U", KeySHA256: "K"},
		Refusal:   &api.Refusal{At: "A", From: "10.0.0.9", Why: "another key", Count: 3}}
	var out bytes.Buffer
	if err := table(&out, nodeRows(n)...); err != nil {
		t.Fatal(err)
	}
	want := `node                n1
role                compute
state               not_ready
reason              enrolment refused: another key
ready since         R
last seen           S
mount /lustre       hung no answer
instance            4711
enrolled at         E
certificate until   U
key (SHA-256)       K
enrolments refused  3
last refused        A from 10.0.0.9: another key
`
	if d := cmp.Diff(want, out.String()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// Names and reasons are other people's: they neither move the cursor of who looks nor make lines.
func TestForeignTextIsPlain(t *testing.T) {
	var out bytes.Buffer
	if err := table(&out, []string{"n\x1b[31m", "a\nb", "\u202egpj", "\u009b2J", "é 本"}); err != nil {
		t.Fatal(err)
	}
	if want := "n?[31m  a b  ?gpj  ?2J  é 本\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
	out.Reset()
	if err := printJob(&out, api.Job{JobID: 7, Name: "x\njob 8\x1b[2J", User: "alice", Phase: "done", Reason: "\x07"}); err != nil {
		t.Fatal(err)
	}
	if want := "job 7  x job 8?[2J  user alice  phase done\nreason: ?\n"; !bytes.HasPrefix(out.Bytes(), []byte(want)) {
		t.Errorf("got %q, want %q first", out.String(), want)
	}
}
