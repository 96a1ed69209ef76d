package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"

	"github.com/urfave/cli/v2"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/controller/config"
)

func jsonFlag() cli.Flag {
	return &cli.BoolFlag{Name: "json", Usage: "print JSON"}
}

// call asks sluiced: directly on the controller, else through the VM's agent,
// which vouches for the caller.
func call(ctx context.Context, op string, in, out any) error {
	socket := api.SluicedSocket
	hint := "sluiced does not answer: see systemctl status sluiced"
	if _, err := os.Stat(config.DefaultPath); err != nil { // only the controller has it
		socket = api.AgentSocket
		hint = "on a VM of the cluster see systemctl status sluice-agent; in the sandbox run this on its login VM:\n" +
			"  sluice sandbox exec --vm login --user alice -- sluice job list"
	}
	err := local.Call(ctx, socket, op, in, out)
	if errors.Is(err, local.ErrUnreachable) {
		return fmt.Errorf("%w\n  %s", err, hint)
	}
	return err
}

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// table writes rows in aligned columns.
func table(w io.Writer, rows ...[]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		for i, cell := range row {
			if i > 0 {
				fmt.Fprint(tw, "\t")
			}
			if cell == "" {
				cell = "-"
			}
			fmt.Fprint(tw, cell)
		}
		fmt.Fprintln(tw)
	}
	return tw.Flush()
}

// onlyArg returns the command's single argument.
func onlyArg(c *cli.Context, what string) (string, error) {
	if c.Args().Len() != 1 {
		return "", usagef("%s takes one argument: %s", c.Command.HelpName, what)
	}
	return c.Args().First(), nil
}

func noArgs(c *cli.Context) error {
	if c.Args().Present() {
		return usagef("%s takes no argument: %q", c.Command.HelpName, c.Args().First())
	}
	return nil
}
