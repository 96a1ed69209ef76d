package cluster

import (
	"context"
	"fmt"

	"github.com/sluicehpc/sluice/gcp/iam"
)

// The service accounts of the cluster, beside DataAccount.
const (
	ControllerAccount = "sluiced"     // the controller's: no rights on data
	NodeAccount       = "sluice-node" // the compute and login VMs': no rights at all
)

// createAccounts makes the service accounts and says what they may do: what an admin's documentation lists, and no more.
func createAccounts(ctx context.Context, o Options) error {
	c, err := iam.NewClient(ctx, o.Endpoints)
	if err != nil {
		return err
	}
	number, err := c.ProjectNumber(ctx, Project)
	if err != nil {
		return err
	}
	members := map[string]string{}
	for id, name := range map[string]string{
		ControllerAccount: "Sluice's controller", NodeAccount: "compute and login VMs", DataAccount: "data of the account " + Account,
	} {
		email, err := c.CreateServiceAccount(ctx, Project, id, name)
		if err != nil {
			return err
		}
		members[id] = "serviceAccount:" + email
	}
	roles := map[string]string{}
	for id, permissions := range map[string][]iam.Permission{
		"sluiceController": iam.ControllerPermissions, "sluiceDataAccount": iam.DataAccountPermissions, "sluiceNodeAccount": iam.NodeAccountPermissions,
	} {
		if roles[id], err = c.CreateRole(ctx, Project, id, id, iam.Names(permissions)); err != nil {
			return err
		}
	}
	err = c.GrantProject(ctx, Project,
		iam.Binding{Role: roles["sluiceController"], Members: []string{members[ControllerAccount]}},
		iam.Binding{Role: iam.ObjectUser, Members: []string{members[DataAccount]}, Condition: &iam.Condition{
			Title: "buckets of " + Account, Expression: fmt.Sprintf("resource.name.startsWith(%q)", "projects/_/buckets/"+Account+"-"),
		}})
	if err != nil {
		return err
	}
	if err := c.GrantAccount(ctx, iam.AccountEmail(NodeAccount, Project),
		iam.Binding{Role: roles["sluiceNodeAccount"], Members: []string{members[ControllerAccount]}}); err != nil {
		return err
	}
	return c.GrantAccount(ctx, iam.AccountEmail(DataAccount, Project),
		iam.Binding{Role: roles["sluiceDataAccount"], Members: []string{members[ControllerAccount]}},
		iam.Binding{Role: "roles/iam.serviceAccountTokenCreator", Members: []string{"serviceAccount:" + iam.LustreAgent(number)}})
}
