package main

import (
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/sluicehpc/sluice/api"
)

func nodeCommand() *cli.Command {
	return &cli.Command{
		Name:  "node",
		Usage: "see the cluster's VMs",
		Subcommands: []*cli.Command{{
			Name:  "list",
			Usage: "list the VMs, where they are and why they wait",
			Flags: []cli.Flag{jsonFlag()},
			Action: func(c *cli.Context) error {
				if err := noArgs(c); err != nil {
					return err
				}
				var nodes api.Nodes
				if err := call(c.Context, api.OpNodeList, api.Ack{}, &nodes); err != nil {
					return err
				}
				if c.Bool("json") {
					return printJSON(c.App.Writer, nodes)
				}
				rows := [][]string{{"NODE", "ROLE", "STATE", "READY SINCE", "LAST SEEN", "REASON"}}
				for _, n := range nodes.Nodes {
					rows = append(rows, []string{n.Name, string(n.Role), n.State, n.ReadyAt, n.SeenAt, n.Reason})
				}
				return table(c.App.Writer, rows...)
			},
		}, {
			Name:      "show",
			Usage:     "show a VM, its certificate and what was refused to it",
			ArgsUsage: "NODE",
			Flags:     []cli.Flag{jsonFlag()},
			Action: func(c *cli.Context) error {
				name, err := onlyArg(c, "a node")
				if err != nil {
					return err
				}
				var n api.Node
				if err := call(c.Context, api.OpNodeShow, api.NodeName{Node: name}, &n); err != nil {
					return err
				}
				if c.Bool("json") {
					return printJSON(c.App.Writer, n)
				}
				return table(c.App.Writer, nodeRows(n)...)
			},
		}, {
			Name:      "reenroll",
			Usage:     "let a VM enrol with a new key; the certificate that it has counts no more (root on the controller)",
			ArgsUsage: "NODE",
			Action: func(c *cli.Context) error {
				name, err := onlyArg(c, "a node")
				if err != nil {
					return err
				}
				if err := call(c.Context, api.OpNodeReenrol, api.NodeName{Node: name}, nil); err != nil {
					return err
				}
				fmt.Fprintf(c.App.Writer, "%s may enrol again; its certificate counts no more\n", name)
				return nil
			},
		}},
	}
}

func nodeRows(n api.Node) [][]string {
	rows := [][]string{{"node", n.Name}, {"role", string(n.Role)}, {"state", n.State}, {"reason", n.Reason},
		{"ready since", n.ReadyAt}, {"last seen", n.SeenAt}}
	for _, m := range n.Mounts {
		rows = append(rows, []string{"mount " + m.Dir, strings.TrimSpace(m.State + " " + m.Detail)})
	}
	if e := n.Enrolment; e != nil {
		rows = append(rows, []string{"instance", e.Instance}, []string{"enrolled at", e.EnrolledAt},
			[]string{"certificate until", e.Until}, []string{"key (SHA-256)", e.KeySHA256})
	} else {
		rows = append(rows, []string{"enrolled at", ""})
	}
	if r := n.Refusal; r != nil {
		rows = append(rows, []string{"enrolments refused", fmt.Sprint(r.Count)},
			[]string{"last refused", fmt.Sprintf("%s from %s: %s", r.At, r.From, r.Why)})
	}
	return rows
}

func statusCommand() *cli.Command {
	return &cli.Command{
		Name:  "status",
		Usage: "say how the controller is",
		Flags: []cli.Flag{jsonFlag()},
		Action: func(c *cli.Context) error {
			if err := noArgs(c); err != nil {
				return err
			}
			var s api.Status
			if err := call(c.Context, api.OpStatus, api.Ack{}, &s); err != nil {
				return err
			}
			if c.Bool("json") {
				return printJSON(c.App.Writer, s)
			}
			rows := [][]string{{"cluster", s.Cluster}, {"sluiced", s.Version}, {"running since", s.StartedAt},
				{"jobs", fmt.Sprint(s.Jobs)}, {"transfers not ended", fmt.Sprint(s.Transfers)}, {"nodes with a VM", fmt.Sprint(s.Nodes)}}
			for _, l := range s.Lacks {
				rows = append(rows, []string{"missing permission", l})
			}
			return table(c.App.Writer, rows...)
		},
	}
}
