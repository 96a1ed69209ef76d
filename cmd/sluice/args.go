package main

import (
	"slices"
	"strings"

	"github.com/urfave/cli/v2"
)

// reorder moves flags that stand after a command's arguments before them:
// urfave/cli stops parsing flags at the first argument and would silently
// ignore them. Everything after "--" stays as it is.
func reorder(app *cli.App, args []string) []string {
	if len(args) < 2 {
		return args
	}
	out := args[:1:1]
	commands, flags := app.Commands, app.Flags
	rest := args[1:]
	// Walk down to the command that will run.
	for len(rest) > 0 {
		if strings.HasPrefix(rest[0], "-") {
			n := flagWords(flags, rest)
			if rest[0] == "--" {
				break
			}
			out = append(out, rest[:n]...)
			rest = rest[n:]
			continue
		}
		c := find(commands, rest[0])
		if c == nil {
			break
		}
		out = append(out, rest[0])
		rest = rest[1:]
		commands, flags = c.Subcommands, c.Flags
	}
	if len(commands) > 0 {
		return append(out, rest...) // no command to run: cli says what is wrong
	}
	var moved, plain []string
	for len(rest) > 0 {
		if rest[0] == "--" {
			plain = append(plain, rest...)
			break
		}
		if strings.HasPrefix(rest[0], "-") && rest[0] != "-" {
			n := flagWords(flags, rest)
			moved = append(moved, rest[:n]...)
			rest = rest[n:]
			continue
		}
		plain = append(plain, rest[0])
		rest = rest[1:]
	}
	return append(append(out, moved...), plain...)
}

const completion = "--generate-bash-completion"

// completable gives a flag at the end of a line that is to be completed a value:
// urfave/cli panics on one that lacks it.
func completable(app *cli.App, args []string) []string {
	last := len(args) - 1
	if last < 2 || args[last] != completion || !strings.HasPrefix(args[last-1], "-") {
		return args
	}
	commands, flags := app.Commands, app.Flags
	for _, word := range args[1 : last-1] {
		if c := find(commands, word); c != nil {
			commands, flags = c.Subcommands, c.Flags
		}
	}
	if flagWords(flags, args[last-1:]) == 1 {
		return args
	}
	return append(slices.Clone(args[:last]), "0", completion)
}

// flagWords returns how many of the words the flag at their head takes: itself, and
// its value if it wants one that is not joined with =.
func flagWords(flags []cli.Flag, words []string) int {
	name := strings.TrimLeft(words[0], "-")
	if strings.Contains(name, "=") || len(words) == 1 {
		return 1
	}
	for _, f := range flags {
		for _, n := range f.Names() {
			if n != name {
				continue
			}
			if _, isBool := f.(*cli.BoolFlag); isBool {
				return 1
			}
			return 2
		}
	}
	return 1
}

func find(commands []*cli.Command, name string) *cli.Command {
	for _, c := range commands {
		if c.HasName(name) {
			return c
		}
	}
	return nil
}
