package main

import (
	"fmt"
	"runtime"

	"github.com/urfave/cli/v2"

	"github.com/sluicehpc/sluice/internal/version"
)

const bashCompletion = `_sluice() {
  local current="${COMP_WORDS[COMP_CWORD]}" words
  local -a request=("${COMP_WORDS[@]:0:COMP_CWORD}")
  if [[ "$current" == -* ]]; then
    request+=("$current")
  fi
  COMPREPLY=()
  words=$("${request[@]}" --generate-bash-completion 2>/dev/null)
  mapfile -t COMPREPLY < <(compgen -W "${words}" -- "$current")
}
complete -o bashdefault -o default -F _sluice sluice
`

const zshCompletion = `#compdef sluice
_sluice() {
  local -a words
  words=("${(@f)$("${words[@]:0:#words-1}" --generate-bash-completion 2>/dev/null)}")
  compadd -a words
}
compdef _sluice sluice
`

func completionCommand() *cli.Command {
	return &cli.Command{
		Name:         "completion",
		Usage:        "print a completion script for a shell",
		ArgsUsage:    "bash|zsh",
		Description:  "Load it with: source <(sluice completion bash)",
		BashComplete: func(c *cli.Context) { fmt.Fprintln(c.App.Writer, "bash\nzsh") },
		Action: func(c *cli.Context) error {
			shell, err := onlyArg(c, "bash or zsh")
			if err != nil {
				return err
			}
			switch shell {
			case "bash":
				_, err = fmt.Fprint(c.App.Writer, bashCompletion)
			case "zsh":
				_, err = fmt.Fprint(c.App.Writer, zshCompletion)
			default:
				return usagef("no completion for %q: bash and zsh are known", shell)
			}
			return err
		},
	}
}

func versionCommand() *cli.Command {
	return &cli.Command{
		Name:  "version",
		Usage: "print the version",
		Flags: []cli.Flag{jsonFlag()},
		Action: func(c *cli.Context) error {
			if c.Bool("json") {
				return printJSON(c.App.Writer, map[string]string{"version": version.Version, "go": runtime.Version()})
			}
			_, err := fmt.Fprintln(c.App.Writer, "sluice "+version.String())
			return err
		},
	}
}
