package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/sluicehpc/sluice/sandbox"
	"github.com/sluicehpc/sluice/sandbox/faults"
)

func sandboxFault() *cli.Command {
	return &cli.Command{
		Name:  "fault",
		Usage: "make the cloud misbehave",
		Subcommands: []*cli.Command{
			{
				Name:   "list",
				Usage:  "show the faults that are set, and how often each did something",
				Flags:  []cli.Flag{nameFlag(), jsonFlag()},
				Action: faultList,
			},
			{
				Name:         "set",
				Usage:        "set faults",
				ArgsUsage:    "KEY=VALUE[,MODIFIER…]…",
				Description:  faultHelp(),
				Flags:        []cli.Flag{nameFlag()},
				BashComplete: func(c *cli.Context) { fmt.Fprintln(c.App.Writer, strings.Join(faults.Complete(), "\n")) },
				Action:       faultSet,
			},
			{
				Name:         "clear",
				Usage:        "take faults out, all of them without a KEY",
				ArgsUsage:    "[KEY…]",
				Flags:        []cli.Flag{nameFlag()},
				BashComplete: completeFaults,
				Action:       faultClear,
			},
			{
				Name:   "log",
				Usage:  "show what was done, when and to which request",
				Flags:  []cli.Flag{nameFlag(), jsonFlag()},
				Action: faultLog,
			},
		},
	}
}

// faultHelp is the table of all faults, for a terminal.
func faultHelp() string {
	var b strings.Builder
	b.WriteString("Words in capitals in a KEY stand for a name, of which * may be a part or all; what stands in brackets may be left out.\n\nKeys:\n")
	for _, k := range faults.Keys() {
		fmt.Fprintf(&b, "  %s=%s\n      %s\n      for example %s\n", k.Name, k.Value, k.Effect, k.Example)
	}
	b.WriteString("\nModifiers, after the value and a comma; which of them a key knows, its errors say:\n")
	for _, m := range faults.Modifiers() {
		fmt.Fprintf(&b, "  %-14s %s\n", m[0], m[1])
	}
	b.WriteString("\nMethods:\n")
	for _, s := range faults.Services() {
		fmt.Fprintf(&b, "  %s: %s\n", s, strings.Join(faults.Methods(s), ", "))
	}
	return strings.TrimSuffix(b.String(), "\n")
}

func openSandbox(c *cli.Context) (*sandbox.Client, error) {
	client, err := sandbox.Open(c.String("name"))
	if err != nil {
		return nil, sandboxError(c.String("name"), err)
	}
	return client, nil
}

func completeFaults(c *cli.Context) {
	client, err := openSandbox(c)
	if err != nil {
		return
	}
	all, err := client.Faults(c.Context)
	if err != nil {
		return
	}
	for _, f := range all.Faults {
		fmt.Fprintln(c.App.Writer, f.Key)
	}
}

func faultList(c *cli.Context) error {
	if err := noArgs(c); err != nil {
		return err
	}
	client, err := openSandbox(c)
	if err != nil {
		return err
	}
	all, err := client.Faults(c.Context)
	if err != nil {
		return err
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, all)
	}
	rows := [][]string{{"FAULT", "VALUE", "DONE", "STATE"}}
	for _, f := range all.Faults {
		state := "set"
		switch {
		case f.Spent:
			state = "spent"
		case !f.Until.IsZero():
			state = "for " + time.Until(f.Until).Round(time.Second).String()
		}
		rows = append(rows, []string{f.Key, f.Value, fmt.Sprint(f.Hits), state})
	}
	if err := table(c.App.Writer, rows...); err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.App.Writer, "\nseed %d\n", all.Seed)
	return err
}

func faultSet(c *cli.Context) error {
	if !c.Args().Present() {
		return usagef("a fault is missing: KEY=VALUE; see sluice sandbox fault set --help")
	}
	// All are judged before one is set.
	var pairs [][2]string
	var errs []error
	for _, arg := range c.Args().Slice() {
		key, value, ok := strings.Cut(arg, "=")
		if !ok {
			errs = append(errs, fmt.Errorf("%q is not KEY=VALUE; see sluice sandbox fault set --help", arg))
			continue
		}
		errs = append(errs, faults.Check(key, value))
		pairs = append(pairs, [2]string{key, value})
	}
	if err := errors.Join(errs...); err != nil {
		return usageError(err)
	}
	client, err := openSandbox(c)
	if err != nil {
		return err
	}
	for _, p := range pairs {
		if err := client.SetFault(c.Context, p[0], p[1]); err != nil {
			return err
		}
	}
	return nil
}

func faultClear(c *cli.Context) error {
	for _, key := range c.Args().Slice() {
		if err := faults.CheckKey(key); err != nil {
			return usageError(err)
		}
	}
	client, err := openSandbox(c)
	if err != nil {
		return err
	}
	if !c.Args().Present() {
		return client.ClearFaults(c.Context)
	}
	for _, key := range c.Args().Slice() {
		if err := client.ClearFault(c.Context, key); err != nil {
			return err
		}
	}
	return nil
}

func faultLog(c *cli.Context) error {
	if err := noArgs(c); err != nil {
		return err
	}
	client, err := openSandbox(c)
	if err != nil {
		return err
	}
	log, err := client.FaultLog(c.Context)
	if err != nil {
		return err
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, log)
	}
	rows := [][]string{{"TIME", "FAULT", "REQUEST", "WHAT"}}
	for _, e := range log.Entries {
		rows = append(rows, []string{e.At, e.Fault + "=" + e.Value, e.Request, e.What})
	}
	if err := table(c.App.Writer, rows...); err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.App.Writer, "\nseed %d\n", log.Seed)
	return err
}
