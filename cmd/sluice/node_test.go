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
