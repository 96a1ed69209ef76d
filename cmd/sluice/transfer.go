package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/sluicehpc/sluice/api"
)

func transferCommand() *cli.Command {
	return &cli.Command{
		Name:  "transfer",
		Usage: "see transfers between buckets and Lustre",
		Subcommands: []*cli.Command{
			{
				Name:  "list",
				Usage: "list your transfers, newest first",
				Flags: []cli.Flag{
					jsonFlag(),
					&cli.BoolFlag{Name: "all", Usage: "everybody's transfers (root only)"},
					&cli.IntFlag{Name: "limit", Value: 100, Usage: "at most `N` transfers"},
				},
				Action: func(c *cli.Context) error {
					if err := noArgs(c); err != nil {
						return err
					}
					var list api.Transfers
					if err := call(c.Context, api.OpTransferList, listRequest(c), &list); err != nil {
						return err
					}
					if c.Bool("json") {
						return printJSON(c.App.Writer, list)
					}
					return printTransfers(c.App.Writer, list.Transfers)
				},
			},
			{
				Name:      "show",
				Usage:     "show one transfer",
				ArgsUsage: "ID",
				Flags:     []cli.Flag{jsonFlag()},
				Action: func(c *cli.Context) error {
					id, err := onlyArg(c, "ID")
					if err != nil {
						return err
					}
					t, err := askTransfer(c.Context, id)
					if err != nil {
						return err
					}
					if c.Bool("json") {
						return printJSON(c.App.Writer, t)
					}
					return printTransfer(c.App.Writer, t)
				},
			},
			{
				Name:      "watch",
				Usage:     "follow a transfer until it has ended",
				ArgsUsage: "ID",
				Action: func(c *cli.Context) error {
					id, err := onlyArg(c, "ID")
					if err != nil {
						return err
					}
					return watchTransfer(c.Context, c.App.Writer, id)
				},
			},
		},
	}
}

func askTransfer(ctx context.Context, id string) (api.Transfer, error) {
	var t api.Transfer
	return t, call(ctx, api.OpTransferShow, api.TransferID{ID: id}, &t)
}

func printTransfers(w io.Writer, list []api.Transfer) error {
	rows := [][]string{{"ID", "JOB", "KIND", "STATE", "OBJECTS", "SIZE", "VERIFIED", "BUCKET"}}
	for _, t := range list {
		objects, size := fmt.Sprint(t.Objects), byteSize(t.Bytes)
		if t.State != "DONE" {
			objects, size = fmt.Sprintf("%d of %d", t.ObjectsDone, t.Objects), byteSize(t.BytesDone)+" of "+size
		}
		rows = append(rows, []string{t.ID, fmt.Sprint(t.JobID), t.Kind, t.State, objects, size, fmt.Sprint(t.Verified), bucketSide(t)})
	}
	return table(w, rows...)
}

// bucketSide is the end of a transfer that is in Cloud Storage.
func bucketSide(t api.Transfer) string {
	if t.Kind == "stage_out" {
		return t.Destination
	}
	return t.Source
}

func printTransfer(w io.Writer, t api.Transfer) error {
	rows := [][]string{
		{"id", t.ID}, {"kind", t.Kind}, {"state", t.State}, {"job", fmt.Sprint(t.JobID)}, {"engine", t.Engine},
		{"source", t.Source}, {"destination", t.Destination},
		{"objects", fmt.Sprintf("%d of %d copied, %d verified (%s)", t.ObjectsDone, t.Objects, t.Verified, t.VerifyLevel)},
		{"bytes", fmt.Sprintf("%s of %s", byteSize(t.BytesDone), byteSize(t.Bytes))},
		{"queued", t.QueuedAt}, {"started", t.StartedAt}, {"ended", t.EndedAt},
		{"operation", t.Operation}, {"request id", t.RequestID},
	}
	if t.Error != "" {
		rows = append(rows, []string{"error", t.Error}, []string{"next step", t.Hint})
	}
	return table(w, rows...)
}

func watchTransfer(ctx context.Context, w io.Writer, id string) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	last := ""
	for {
		t, err := askTransfer(ctx, id)
		if err != nil {
			return err
		}
		line := fmt.Sprintf("%s  %d of %d objects, %s of %s, %s/s%s", t.State, t.ObjectsDone, t.Objects,
			byteSize(t.BytesDone), byteSize(t.Bytes), byteSize(int64(t.BytesPerSec)), eta(t.ETASeconds))
		if line != last {
			fmt.Fprintln(w, line)
			last = line
		}
		switch t.State {
		case "DONE":
			return nil
		case "FAILED", "CANCELLED":
			return fmt.Errorf("transfer %s %s: %s\n  %s", t.ID, t.State, t.Error, t.Hint)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}
