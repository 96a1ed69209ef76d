package iam

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"time"

	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/internal/retry"
)

// AccountEmail is the email of a project's service account.
func AccountEmail(id, project string) string { return id + "@" + project + ".iam.gserviceaccount.com" }

// LustreAgent is the account as which Managed Lustre itself acts in a project (its number).
func LustreAgent(projectNumber uint64) string {
	return fmt.Sprintf("service-%d@gcp-sa-lustre.iam.gserviceaccount.com", projectNumber)
}

// ProjectNumber returns a project's number.
func (c *Client) ProjectNumber(ctx context.Context, project string) (uint64, error) {
	doing := "look at project " + project
	if err := check(projectName, "project", project); err != nil {
		return 0, fmt.Errorf("%s: %w", doing, err)
	}
	var out struct {
		ProjectNumber uint64 `json:"projectNumber,string"`
	}
	err := c.read(ctx, "GET", c.projects()+"/v1/projects/"+project, nil, &out)
	return out.ProjectNumber, gcp.Wrap(err, doing)
}

// CreateServiceAccount makes a service account of a project and returns its email. One that exists is left as it is.
func (c *Client) CreateServiceAccount(ctx context.Context, project, id, displayName string) (email string, err error) {
	doing := "create service account " + id
	if err := check(projectName, "project", project); err != nil {
		return "", fmt.Errorf("%s: %w", doing, err)
	}
	in := map[string]any{"accountId": id, "serviceAccount": map[string]string{"displayName": displayName}}
	err = c.read(ctx, "POST", c.iam()+"/v1/projects/"+project+"/serviceAccounts", in, nil)
	if gcp.IsAlreadyExists(err) {
		err = nil
	}
	return AccountEmail(id, project), gcp.Wrap(err, doing)
}

// CreateRole makes a role of a project with the permissions and returns its name (projects/PROJECT/roles/ID). One that exists
// gets the permissions.
func (c *Client) CreateRole(ctx context.Context, project, id, title string, permissions []string) (name string, err error) {
	name = "projects/" + project + "/roles/" + id
	doing := "create role " + name
	if err := check(projectName, "project", project); err != nil {
		return "", fmt.Errorf("%s: %w", doing, err)
	}
	role := map[string]any{"title": title, "includedPermissions": permissions, "stage": "GA"}
	err = c.read(ctx, "POST", c.iam()+"/v1/projects/"+project+"/roles", map[string]any{"roleId": id, "role": role}, nil)
	if gcp.IsAlreadyExists(err) {
		err = c.read(ctx, "PATCH", c.iam()+"/v1/"+name+"?updateMask=includedPermissions", role, nil)
	}
	return name, gcp.Wrap(err, doing)
}

// Binding gives a role to members ("serviceAccount:EMAIL").
type Binding struct {
	Role      string     `json:"role"`
	Members   []string   `json:"members"`
	Condition *Condition `json:"condition,omitempty"`
}

// Policy is who may do what on a project, bucket or service account.
type Policy struct {
	Version  int       `json:"version,omitempty"`
	Bindings []Binding `json:"bindings,omitempty"`
	Etag     string    `json:"etag,omitempty"`
}

// add adds bindings, and reports whether that changed anything.
func (p *Policy) add(more []Binding) bool {
	changed := false
	for _, b := range more {
		i := slices.IndexFunc(p.Bindings, func(have Binding) bool {
			return have.Role == b.Role && (have.Condition == nil) == (b.Condition == nil) &&
				(b.Condition == nil || *have.Condition == *b.Condition)
		})
		if i < 0 {
			p.Bindings = append(p.Bindings, Binding{Role: b.Role, Condition: b.Condition})
			i = len(p.Bindings) - 1
		}
		for _, m := range b.Members {
			if !slices.Contains(p.Bindings[i].Members, m) {
				p.Bindings[i].Members = append(p.Bindings[i].Members, m)
				changed = true
			}
		}
	}
	p.Version = 3 // conditions, ours or others', stay what they are
	return changed
}

// GrantProject adds bindings to a project's policy.
func (c *Client) GrantProject(ctx context.Context, project string, bindings ...Binding) error {
	doing := "grant roles on project " + project
	if err := check(projectName, "project", project); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	path := c.projects() + "/v1/projects/" + project
	in := map[string]any{"options": map[string]int{"requestedPolicyVersion": 3}}
	return gcp.Wrap(c.grant(ctx, bindings,
		func(ctx context.Context, p *Policy) error { return c.do(ctx, "POST", path+":getIamPolicy", nil, in, p) },
		func(ctx context.Context, p *Policy) error {
			return c.do(ctx, "POST", path+":setIamPolicy", nil, map[string]any{"policy": p}, nil)
		}), doing)
}

// GrantAccount adds bindings to the policy of a service account: who may act as it.
func (c *Client) GrantAccount(ctx context.Context, account string, bindings ...Binding) error {
	doing := "grant roles on service account " + account
	if err := check(accountEmail, "service account's email", account); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	path := c.iam() + "/v1/projects/-/serviceAccounts/" + url.PathEscape(account)
	return gcp.Wrap(c.grant(ctx, bindings,
		func(ctx context.Context, p *Policy) error {
			return c.do(ctx, "POST", path+":getIamPolicy?options.requestedPolicyVersion=3", nil, nil, p)
		},
		func(ctx context.Context, p *Policy) error {
			return c.do(ctx, "POST", path+":setIamPolicy", nil, map[string]any{"policy": p}, nil)
		}), doing)
}

// GrantBucket adds bindings to a bucket's policy.
func (c *Client) GrantBucket(ctx context.Context, bucket string, bindings ...Binding) error {
	doing := "grant roles on gs://" + bucket
	if err := check(bucketName, "bucket", bucket); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	path := c.storage() + "/storage/v1/b/" + bucket + "/iam"
	return gcp.Wrap(c.grant(ctx, bindings,
		func(ctx context.Context, p *Policy) error {
			return c.do(ctx, "GET", path+"?optionsRequestedPolicyVersion=3", nil, nil, p)
		},
		func(ctx context.Context, p *Policy) error { return c.do(ctx, "PUT", path, nil, p, nil) }), doing)
}

// grantRetry is for a policy that somebody else changes at the same time.
var grantRetry = retry.Policy{First: 50 * time.Millisecond, Max: 2 * time.Second}

// grant reads, changes and writes a policy, and begins again when it changed meanwhile.
func (c *Client) grant(ctx context.Context, bindings []Binding, get, set func(context.Context, *Policy) error) error {
	again := func(err error) bool {
		return gcp.Retryable(err) || gcp.IsConflict(err) || gcp.IsPreconditionFailed(err)
	}
	return retry.Do(ctx, grantRetry, again, func(ctx context.Context) error {
		var p Policy
		if err := get(ctx, &p); err != nil {
			return err
		}
		if !p.add(bindings) {
			return nil
		}
		return set(ctx, &p)
	})
}
