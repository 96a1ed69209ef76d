package main

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"github.com/sluicehpc/sluice/sandbox"
)

func sandboxToken() *cli.Command {
	return &cli.Command{
		Name:  "token",
		Usage: "print an access token of the sandbox's admin, for calls from this host",
		Description: "The token belongs to the owner of the sandbox's project and lives for an hour:\n" +
			"  curl -H \"Authorization: Bearer $(sluice sandbox token)\" HOST_ENDPOINT/storage/v1/b?project=sluice-sandbox",
		Flags: []cli.Flag{nameFlag()},
		Action: func(c *cli.Context) error {
			if err := noArgs(c); err != nil {
				return err
			}
			client, err := sandbox.Open(c.String("name"))
			if err != nil {
				return sandboxError(c.String("name"), err)
			}
			token, err := client.Token(c.Context)
			if err != nil {
				return err
			}
			fmt.Fprintln(c.App.Writer, token.AccessToken)
			return nil
		},
	}
}
