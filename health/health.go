// Package health judges whose fault trouble with a file system is: a node's own
// or the file system's.
package health

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Cause is whose fault trouble is. Only Node may fail a Prolog.
type Cause string

const (
	None       Cause = ""
	Node       Cause = "node"
	FileSystem Cause = "filesystem"
	Unknown    Cause = "unknown" // too little is known yet
)

// Limits of the judgement. They are ours: a wrong "filesystem" only holds
// starts for a while, a wrong "node" drains a good node.
const (
	// Window is how old a node's last report may be to count; three reports.
	Window = 30 * time.Second
	// Settle is how long trouble must last, and others must have been fine
	// since it began, before it is judged: a probe (5 s) and a report (10 s).
	Settle = 15 * time.Second
	// Share of the nodes above which trouble on two or more is the file system's.
	Share = 0.25
)

// Active is the state of a Managed Lustre instance that serves; every other one
// is the file system's cause.
const Active = "ACTIVE"

// NodeTrouble is what one node's last report says of one file system. Nodes
// without trouble are needed too: they are what acquits the file system.
type NodeTrouble struct {
	Node   string
	State  string    // lustre/probe's state
	Since  time.Time // when the node's reports began to say State
	SeenAt time.Time // of the last report
}

func (n NodeTrouble) fine() bool { return n.State == "ok" }

// Verdict is the judgement of one file system at one moment.
type Verdict struct {
	Cause  Cause
	Reason string   // for people; "" when Cause is None
	Nodes  []string // whose own fault it is, sorted; empty unless Cause is Node
}

// For returns the cause of trouble on one node that has some.
func (v Verdict) For(node string) Cause {
	if v.Cause == Node && !slices.Contains(v.Nodes, node) {
		return Unknown
	}
	return v.Cause
}

// Judge judges one file system from the last reports of the nodes that mount
// it and its instance's state in the cloud ("" when that is not known).
func Judge(reports []NodeTrouble, instance string, now time.Time) Verdict {
	var fresh, troubled, settled []NodeTrouble
	for _, r := range reports {
		if now.Sub(r.SeenAt) > Window {
			continue
		}
		fresh = append(fresh, r)
		if r.fine() {
			continue
		}
		troubled = append(troubled, r)
		if now.Sub(r.Since) >= Settle {
			settled = append(settled, r)
		}
	}
	switch {
	case instance != Active && instance != "":
		return Verdict{Cause: FileSystem, Reason: "the instance is " + instance}
	case len(troubled) == 0:
		return Verdict{}
	case len(settled) >= 2 && float64(len(settled)) > Share*float64(len(fresh)):
		return Verdict{Cause: FileSystem, Reason: fmt.Sprintf("trouble on %d of %d nodes: %s", len(settled), len(fresh), names(settled))}
	case instance == "":
		return Verdict{Cause: Unknown, Reason: "the instance's state is not known; trouble on " + names(troubled)}
	}
	var guilty []NodeTrouble
	for _, t := range settled {
		for _, r := range fresh {
			if r.fine() && r.SeenAt.Sub(t.Since) >= Settle {
				guilty = append(guilty, t)
				break
			}
		}
	}
	if len(guilty) == 0 {
		return Verdict{Cause: Unknown, Reason: "not yet clear whose fault it is; trouble on " + names(troubled)}
	}
	v := Verdict{Cause: Node, Reason: fmt.Sprintf("other nodes are fine; trouble on %s", names(guilty))}
	for _, g := range guilty {
		v.Nodes = append(v.Nodes, g.Node)
	}
	slices.Sort(v.Nodes)
	return v
}

// names lists a few nodes with their states.
func names(nodes []NodeTrouble) string {
	const most = 3
	var parts []string
	for i, n := range nodes {
		if i == most {
			parts = append(parts, fmt.Sprintf("and %d more", len(nodes)-most))
			break
		}
		parts = append(parts, fmt.Sprintf("%s (%s)", n.Node, n.State))
	}
	return strings.Join(parts, ", ")
}
