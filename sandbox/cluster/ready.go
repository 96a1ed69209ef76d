package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/internal/retry"
)

// waitController returns when sluiced and slurmctld answer, the account's users
// are known and Lustre is mounted.
func waitController(ctx context.Context, onVM OnVM) (api.Status, error) {
	var status api.Status
	err := until(ctx, "controller", func(ctx context.Context) error {
		out, err := onVM(ctx, Controller, "sluice", "status", "--json")
		if err != nil {
			return err
		}
		if err := json.Unmarshal(out, &status); err != nil {
			return fmt.Errorf("sluice status: %w", err)
		}
		return nil
	}, func(ctx context.Context) error {
		out, err := onVM(ctx, Controller, "scontrol", "ping")
		if err == nil && !strings.Contains(string(out), " is UP") {
			err = fmt.Errorf("scontrol ping: %s", out)
		}
		return err
	}, func(ctx context.Context) error {
		out, err := onVM(ctx, Controller, "sacctmgr", "--noheader", "--parsable2", "list", "associations", "format=user")
		for _, user := range Users {
			if err == nil && !strings.Contains("\n"+string(out), "\n"+user+"\n") {
				err = fmt.Errorf("user %s has no account yet", user)
			}
		}
		return err
	}, func(ctx context.Context) error { return nodeReady(ctx, onVM, Controller) })
	return status, err
}

// waitLogin returns when users can submit from the login VM and its agent answers.
func waitLogin(ctx context.Context, onVM OnVM) error {
	return until(ctx, "login VM",
		func(ctx context.Context) error { _, err := onVM(ctx, Login, "sinfo", "--noheader"); return err },
		func(ctx context.Context) error { return nodeReady(ctx, onVM, Login) })
}

func nodeReady(ctx context.Context, onVM OnVM, name string) error {
	out, err := onVM(ctx, Controller, "sluice", "node", "list", "--json")
	if err != nil {
		return err
	}
	var nodes api.Nodes
	if err := json.Unmarshal(out, &nodes); err != nil {
		return fmt.Errorf("sluice node list: %w", err)
	}
	for _, n := range nodes.Nodes {
		if n.Name == name {
			if n.State == "ready" {
				return nil
			}
			return fmt.Errorf("%s is %s: %s", name, n.State, n.Reason)
		}
	}
	return fmt.Errorf("the agent of %s has not reported yet", name)
}

// until repeats each check until it passes, one after the other.
func until(ctx context.Context, what string, checks ...func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, readyDeadline)
	defer cancel()
	for _, check := range checks {
		err := retry.Do(ctx, retry.Policy{First: 50 * time.Millisecond, Max: 300 * time.Millisecond}, func(error) bool { return true }, check)
		if err != nil {
			return fmt.Errorf("the %s did not become ready: %w\n  see sluice sandbox exec --vm controller -- journalctl", what, err)
		}
	}
	return nil
}
