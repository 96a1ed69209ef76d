package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/urfave/cli/v2"
	"golang.org/x/term"

	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/doctor"
	"github.com/sluicehpc/sluice/internal/diag"
	"github.com/sluicehpc/sluice/internal/version"
)

func doctorCommand() *cli.Command {
	return &cli.Command{
		Name:  "doctor",
		Usage: "find what is wrong with this cluster; prove what Sluice takes for granted of the cloud",
		Description: "Run it as root on the controller VM. It looks at sluice.yaml, the daemons, the file systems, Slurm's files, owners and\n" +
			"modes, agents, the clock and left-over transfers, all at the same time, and ends within 15 seconds whatever hangs.\n\n" +
			"With --acceptance it tries every assumption of docs/unverified.md for real, one after the other: it imports and\n" +
			"exports small objects, makes and deletes VMs, and runs two jobs that do nothing. All of it is below gs://B/P/ and in one\n" +
			"directory of the file system, under a random name, and is removed at the end, also after Ctrl-C.\n\n" +
			"It exits with 1 when something was found, or refuted, or could not be tried.",
		Flags: []cli.Flag{
			jsonFlag(),
			&cli.StringFlag{Name: "config", Value: config.DefaultPath, Usage: "sluice.yaml"},
			&cli.BoolFlag{Name: "acceptance", Usage: "prove the assumptions about the cloud"},
			&cli.StringFlag{Name: "bucket", Usage: "with --acceptance: work below this `gs://BUCKET/PREFIX/`"},
			&cli.StringSliceFlag{Name: "only", Usage: "with --acceptance: these proofs alone, `ID,…`"},
			&cli.BoolFlag{Name: "list", Usage: "with --acceptance: list the proofs and what to type by hand"},
			&cli.StringFlag{Name: "service-account", Usage: "with --acceptance: `EMAIL` of the account that has the rights on the bucket (default: of policy's first rule for it)"},
			&cli.StringFlag{Name: "fs", Usage: "with --acceptance: the file `SYSTEM` (default: sluice.yaml's)"},
			&cli.StringFlag{Name: "machine-type", Usage: "with --acceptance: `TYPE` of the VMs that are made and deleted (default: the smallest node set's)"},
		},
		BashComplete: completeDoctor,
		Action: func(c *cli.Context) error {
			if err := noArgs(c); err != nil {
				return err
			}
			acceptance := c.Bool("acceptance")
			for _, name := range []string{"bucket", "only", "list", "service-account", "fs", "machine-type"} {
				if c.IsSet(name) && !acceptance {
					return usagef("--%s is for --acceptance", name)
				}
			}
			switch {
			case c.Bool("list"):
				return listProofs(c)
			case os.Getuid() != 0:
				return usagef("sluice doctor asks and reads what only root may: run it as root on the controller VM")
			case acceptance:
				return accept(c)
			}
			return examine(c)
		},
	}
}

// completeDoctor offers the proofs' ids after --only.
func completeDoctor(c *cli.Context) {
	args := os.Args
	if n := len(args); n >= 2 && args[n-2] == "--only" {
		for _, p := range doctor.Proofs {
			fmt.Fprintln(c.App.Writer, p.ID)
		}
		return
	}
	cli.DefaultCompleteWithFlags(c.Command)(c)
}

var errFindings = &exitError{code: exitFailed} // all has been said

func examine(c *cli.Context) error {
	site := doctor.Site{ConfigPath: c.String("config"), Version: version.String()}
	progress := newProgress(c.App.ErrWriter)
	findings := site.Examine(c.Context, func(ended, all int, f doctor.Finding) {
		progress.say("%d of %d checks: %s", ended, all, f.Name)
	})
	progress.clear()
	if c.Context.Err() != nil {
		return c.Context.Err()
	}
	warnings, failures := doctor.Findings(findings)
	if c.Bool("json") {
		if err := printJSON(c.App.Writer, map[string]any{"findings": findings, "warnings": warnings, "failures": failures}); err != nil {
			return err
		}
	} else {
		width := 0
		for _, f := range findings {
			width = max(width, len(f.Name))
		}
		for _, f := range findings {
			indent := strings.Repeat(" ", 6+width+2)
			fmt.Fprintf(c.App.Writer, "%-4s  %-*s  %s\n", f.Verdict, width, f.Name, indented(f.Detail, indent))
			if f.Next != "" {
				fmt.Fprintf(c.App.Writer, "%snext: %s\n", indent, indented(f.Next, indent))
			}
		}
		fmt.Fprintf(c.App.Writer, "%d checks: %d ok, %d warnings, %d failures\n", len(findings), len(findings)-warnings-failures, warnings, failures)
	}
	if warnings+failures > 0 {
		return errFindings
	}
	return nil
}

func indented(text, indent string) string {
	return strings.ReplaceAll(plainLines(text), "\n", "\n"+indent)
}

// proofs are those of --only, or all.
func proofs(c *cli.Context) ([]doctor.Proof, error) {
	if !c.IsSet("only") {
		return doctor.Proofs, nil
	}
	list, err := doctor.Select(c.StringSlice("only"))
	if err != nil {
		return nil, usagef("%w\n  see sluice doctor --acceptance --list", err)
	}
	return list, nil
}

func listProofs(c *cli.Context) error {
	list, err := proofs(c)
	if err != nil {
		return err
	}
	if c.Bool("json") {
		type row struct {
			ID         string `json:"id"`
			Assumption string `json:"assumption"`
			RestsOn    string `json:"rests_on"`
			Command    string `json:"command"`
			Manual     bool   `json:"manual"`
		}
		rows := []row{}
		for _, p := range list {
			rows = append(rows, row{p.ID, p.Assumption, p.RestsOn, p.Command, p.Prove == nil})
		}
		return printJSON(c.App.Writer, rows)
	}
	for _, p := range list {
		fmt.Fprintf(c.App.Writer, "%s\n  %s\n  rests on it: %s\n  by hand: %s\n", p.ID, p.Assumption, p.RestsOn, p.Command)
	}
	return nil
}

func accept(c *cli.Context) error {
	list, err := proofs(c)
	if err != nil {
		return err
	}
	if !c.IsSet("bucket") {
		return usagef("--acceptance needs --bucket gs://BUCKET/PREFIX/, below which it may write")
	}
	asJSON := c.Bool("json")
	progress := newProgress(c.App.ErrWriter)
	results, err := doctor.Accept(c.Context, doctor.Options{
		ConfigPath: c.String("config"), URL: c.String("bucket"), Proofs: list,
		ServiceAccount: c.String("service-account"), FileSystem: c.String("fs"), MachineType: c.String("machine-type"),
		Begin: func(number, all int, p doctor.Proof) { progress.say("%d of %d: %s", number, all, p.ID) },
		End: func(r doctor.Result) {
			progress.clear()
			if asJSON {
				fmt.Fprintf(c.App.ErrWriter, "%s: %s\n", r.ID, r.Status)
				return
			}
			fmt.Fprintf(c.App.Writer, "%-14s  %-18s  %s (%.1f s)\n", r.Status, r.ID, indented(r.Evidence, strings.Repeat(" ", 36)), r.Seconds)
			if r.Status != doctor.Proved {
				fmt.Fprintf(c.App.Writer, "%36sassumed: %s\n%36sby hand: %s\n", "", r.Assumption, "", r.Next)
			}
		},
	})
	progress.clear()
	if errors.Is(err, doctor.ErrLeftBehind) && c.Context.Err() != nil {
		fmt.Fprintf(c.App.ErrWriter, "sluice: %v\n", err) // an interrupt alone would be said otherwise
	}
	if results == nil && err != nil {
		var list diag.List
		if errors.Is(err, doctor.ErrBadURL) || errors.As(err, &list) {
			return usageError(err)
		}
		return err
	}
	count := map[doctor.Status]int{}
	for _, r := range results {
		count[r.Status]++
	}
	if asJSON {
		err = errors.Join(err, json.NewEncoder(c.App.Writer).Encode(map[string]any{
			"results": results, "proved": count[doctor.Proved], "refuted": count[doctor.Refuted], "failed": count[doctor.NotTried],
			"not_applicable": count[doctor.NotApplicable], "manual": count[doctor.Manual],
		}))
	} else {
		var parts []string
		for _, s := range []doctor.Status{doctor.Proved, doctor.Refuted, doctor.NotTried, doctor.NotApplicable, doctor.Manual} {
			if count[s] > 0 {
				parts = append(parts, fmt.Sprintf("%d %s", count[s], s))
			}
		}
		fmt.Fprintf(c.App.Writer, "%d of %d proofs: %s\n", len(results), len(list), strings.Join(parts, ", "))
	}
	switch {
	case err != nil:
		return err
	case count[doctor.Refuted]+count[doctor.NotTried] > 0:
		return errFindings
	}
	return nil
}

// progress is one line that is written over, on a terminal only.
type progress struct{ w io.Writer }

func newProgress(w io.Writer) progress {
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return progress{w}
	}
	return progress{}
}

func (p progress) say(format string, args ...any) {
	if p.w != nil {
		fmt.Fprintf(p.w, "\r\033[K"+format, args...)
	}
}

func (p progress) clear() { p.say("") }
