package main

import (
	"fmt"

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
		}},
	}
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
			return table(c.App.Writer,
				[]string{"cluster", s.Cluster}, []string{"sluiced", s.Version}, []string{"running since", s.StartedAt},
				[]string{"jobs", fmt.Sprint(s.Jobs)}, []string{"transfers not ended", fmt.Sprint(s.Transfers)}, []string{"nodes with a VM", fmt.Sprint(s.Nodes)})
		},
	}
}
