package health

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var now = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

// node has been in state for since, and was last heard of seen ago.
func node(name, state string, since, seen time.Duration) NodeTrouble {
	return NodeTrouble{Node: name, State: state, Since: now.Add(-since), SeenAt: now.Add(-seen)}
}

func many(n int, state string) []NodeTrouble {
	var all []NodeTrouble
	for i := range n {
		all = append(all, node(fmt.Sprintf("%s%02d", state, i), state, time.Minute, time.Second))
	}
	return all
}

func TestJudge(t *testing.T) {
	const m = time.Minute
	s := time.Second
	for _, tt := range []struct {
		name     string
		reports  []NodeTrouble
		instance string
		want     Cause
		nodes    []string
	}{
		{"nothing known", nil, "", None, nil},
		{"no nodes, instance active", nil, Active, None, nil},
		{"all fine", many(4, "ok"), Active, None, nil},
		{"all fine, instance unknown", many(4, "ok"), "", None, nil},
		{"instance being created", many(4, "ok"), "CREATING", FileSystem, nil},
		{"instance stopped, one node in trouble", []NodeTrouble{node("a", "hung", m, s), node("b", "ok", m, s)}, "STOPPED", FileSystem, nil},
		{"one of four", append(many(3, "ok"), node("a", "hung", m, s)), Active, Node, []string{"a"}},
		{"one of two", []NodeTrouble{node("a", "hung", m, s), node("b", "ok", m, s)}, Active, Node, []string{"a"}},
		{"the only node", []NodeTrouble{node("a", "hung", m, s)}, Active, Unknown, nil},
		{"both of two", many(2, "hung"), Active, FileSystem, nil},
		{"both of two, instance unknown", many(2, "hung"), "", FileSystem, nil},
		{"two of eight: not more than the share", append(many(6, "ok"), many(2, "hung")...), Active, Node, []string{"hung00", "hung01"}},
		{"two of seven: more", append(many(5, "ok"), many(2, "hung")...), Active, FileSystem, nil},
		{"different kinds of trouble add up", append(many(1, "hung"), many(1, "error")...), Active, FileSystem, nil},
		{"instance unknown, one in trouble", append(many(3, "ok"), node("a", "hung", m, s)), "", Unknown, nil},
		{"trouble just began", append(many(3, "ok"), node("a", "hung", 5*s, s)), Active, Unknown, nil},
		{"all just began, as at boot", []NodeTrouble{node("a", "not_mounted", s, s), node("b", "not_mounted", s, s)}, Active, Unknown, nil},
		{"others not heard of since it began", []NodeTrouble{node("a", "hung", 20*s, s), node("b", "ok", m, 10*s)}, Active, Unknown, nil},
		{"others silent for long", []NodeTrouble{node("a", "hung", m, s), node("b", "ok", 9*m, 2*m)}, Active, Unknown, nil},
		{"the troubled one is silent for long", []NodeTrouble{node("a", "hung", 9*m, 2*m), node("b", "ok", m, s)}, Active, None, nil},
		{"one settled, one just began", append(many(8, "ok"), node("a", "hung", m, s), node("b", "hung", 2*s, s)), Active, Node, []string{"a"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := Judge(tt.reports, tt.instance, now)
			if got.Cause != tt.want || cmp.Diff(tt.nodes, got.Nodes) != "" {
				t.Errorf("got %q %v (%s), want %q %v", got.Cause, got.Nodes, got.Reason, tt.want, tt.nodes)
			}
			if (got.Cause == None) != (got.Reason == "") {
				t.Errorf("cause %q with reason %q", got.Cause, got.Reason)
			}
		})
	}
}

func TestVerdictForOneNode(t *testing.T) {
	v := Judge([]NodeTrouble{
		node("a", "hung", time.Minute, time.Second), node("b", "hung", time.Second, time.Second),
		node("c", "ok", time.Hour, time.Second), node("d", "ok", time.Hour, time.Second),
	}, Active, now)
	for n, want := range map[string]Cause{"a": Node, "b": Unknown} {
		if got := v.For(n); got != want {
			t.Errorf("%s: got %q, want %q", n, got, want)
		}
	}
	if got := (Verdict{Cause: FileSystem}).For("a"); got != FileSystem {
		t.Errorf("got %q, want filesystem", got)
	}
}
