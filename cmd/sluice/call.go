package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"unicode"

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
			fmt.Fprint(tw, plain(cell))
		}
		fmt.Fprintln(tw)
	}
	return tw.Flush()
}

// plain makes one line of other people's text, such as a job's name or a node's
// trouble: whatever a terminal would obey becomes a question mark.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t' || r == '\r':
			return ' '
		case unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r):
			return '?'
		}
		return r
	}, s)
}

// plainLines is plain for a text that may have several lines.
func plainLines(s string) string {
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = plain(lines[i])
	}
	return strings.Join(lines, "\n")
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
