package controller

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/oauth2"

	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/iam"
)

// IAM says which permissions sluiced's own account lacks, and mints tokens for
// data; *iam.Client is it.
type IAM interface {
	DataToken(ctx context.Context, d iam.DataToken) (*oauth2.Token, error)
	TestProject(ctx context.Context, project string, permissions []string) (missing []string, err error)
	TestAccount(ctx context.Context, account string, permissions []string) (missing []string, err error)
}

// How often sluiced looks whether its account may do what it must: less often
// while all is well.
const (
	permissionsEvery   = 10 * time.Minute
	permissionsMissing = time.Minute
	permissionsTimeout = time.Minute
)

// watchPermissions names what is missing before a job finds it out.
func (c *Controller) watchPermissions(ctx context.Context) {
	said := map[string]bool{}
	for {
		lacks, err := c.testPermissions(ctx)
		if ctx.Err() != nil {
			return
		}
		wait := permissionsEvery
		if err != nil {
			c.Log.Warn("ask for sluiced's own permissions", "err", err)
			wait = permissionsMissing
		}
		if len(lacks) > 0 {
			wait = permissionsMissing
		}
		now := map[string]bool{}
		for _, l := range lacks {
			now[l] = true
			if !said[l] {
				c.Log.Error("sluiced's service account lacks a permission: see docs/permissions.md", "permission", l)
			}
		}
		if err == nil || len(lacks) > 0 {
			for l := range said {
				if !now[l] {
					c.Log.Info("sluiced's service account has the permission now", "permission", l)
				}
			}
			said = now
			c.mu.Lock()
			c.lacks = lacks
			c.mu.Unlock()
		}
		select {
		case <-ctx.Done():
			return
		case <-c.Clock.After(wait):
		}
	}
}

// testPermissions lists what sluiced's account lacks, as "PERMISSION on RESOURCE".
func (c *Controller) testPermissions(ctx context.Context) (lacks []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, permissionsTimeout)
	defer cancel()
	projects := map[string][]string{} // permissions, by where they are needed
	for _, p := range iam.Names(iam.ControllerPermissions) {
		if !strings.HasPrefix(p, "lustre.") {
			projects[c.Config.Project] = append(projects[c.Config.Project], p)
			continue
		}
		for _, fs := range c.Config.FileSystems {
			project := strings.Split(fs.Instance, "/")[1] // as config has checked
			if !slices.Contains(projects[project], p) {
				projects[project] = append(projects[project], p)
			}
		}
	}
	accounts := map[string][]string{}
	for _, a := range c.Config.Policy.ServiceAccounts() {
		accounts[a] = iam.Names(iam.DataAccountPermissions)
	}
	for _, ns := range c.Config.NodeSets {
		if strings.Contains(ns.ServiceAccount, "@") && accounts[ns.ServiceAccount] == nil {
			accounts[ns.ServiceAccount] = iam.Names(iam.NodeAccountPermissions)
		}
	}
	var errs []error
	for _, kind := range []struct {
		of   map[string][]string
		test func(context.Context, string, []string) ([]string, error)
		what string
	}{{projects, c.IAM.TestProject, "project "}, {accounts, c.IAM.TestAccount, "service account "}} {
		for _, name := range slices.Sorted(maps.Keys(kind.of)) {
			missing, err := kind.test(ctx, name, kind.of[name])
			if gcp.IsNotFound(err) { // what is not there gives no rights
				missing, err = kind.of[name], nil
			}
			errs = append(errs, err)
			for _, p := range missing {
				lacks = append(lacks, p+" on "+kind.what+name)
			}
		}
	}
	return lacks, errors.Join(errs...)
}
