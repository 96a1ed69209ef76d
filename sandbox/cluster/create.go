package cluster

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/controller/setup"
	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/compute"
	"github.com/sluicehpc/sluice/gcp/iam"
	"github.com/sluicehpc/sluice/gcp/lustre"
)

// readyDeadline bounds the wait for a VM's services; they take about three
// seconds, the first start of slurmdbd a few more.
const readyDeadline = 3 * time.Minute

// OnVM runs a command as root on a VM and returns its standard output.
type OnVM func(ctx context.Context, vm string, args ...string) ([]byte, error)

// Options of Create.
type Options struct {
	Endpoints gcp.Endpoints
	Slurm     string // its major.minor version in the VMs' image
	OnVM      OnVM
	Log       io.Writer
}

// Create makes the Lustre instance, the controller and the login VM, and returns
// when jobs can be submitted. It runs in the sandbox's network.
func Create(ctx context.Context, o Options) error {
	vms, err := compute.New(ctx, compute.Config{Project: Project, Zone: Zone, Endpoint: o.Endpoints.Compute})
	if err != nil {
		return err
	}
	defer vms.Close()
	sluiceYAML, err := config.Marshal(Config(o.Endpoints, o.Slurm))
	if err != nil {
		return err
	}
	if err := createAccounts(ctx, o); err != nil {
		return err
	}
	// sluiced waits for the instance by itself, so both can be made at a time.
	group, gctx := errgroup.WithContext(ctx)
	group.Go(func() error { return createLustre(gctx, o) })
	group.Go(func() error {
		return insert(gctx, vms, Controller, ControllerAccount, map[string]string{
			"sluice-role":         "controller",
			setup.ConfigAttribute: string(sluiceYAML),
			"startup-script":      controllerScript(),
		})
	})
	if err := group.Wait(); err != nil {
		return err
	}
	fmt.Fprintln(o.Log, "Managed Lustre instance and controller VM made; waiting for the controller's services")
	status, err := waitController(ctx, o.OnVM)
	if err != nil {
		return err
	}
	if err := insert(ctx, vms, Login, NodeAccount, map[string]string{
		"sluice-role":        "login",
		"sluice-controller":  status.Address,
		"sluice-fingerprint": status.Fingerprint,
		"startup-script":     loginScript(authOf(o.Slurm)),
	}); err != nil {
		return err
	}
	return waitLogin(ctx, o.OnVM)
}

func createLustre(ctx context.Context, o Options) error {
	client, err := lustre.NewClient(ctx, gcp.ClientOptions(o.Endpoints.Lustre)...)
	if err != nil {
		return err
	}
	op, err := client.CreateInstance(ctx, &lustre.CreateInstanceRequest{
		Parent:     "projects/" + Project + "/locations/" + Zone,
		InstanceID: Instance,
		RequestID:  uuid.NewString(),
		Instance: &lustre.Instance{
			Filesystem: FSName, CapacityGib: capacityGiB, PerUnitStorageThroughput: throughputMBs,
			Network: "projects/" + Project + "/global/networks/default",
		},
	})
	if err != nil {
		return fmt.Errorf("create the Lustre instance: %w", err)
	}
	if _, err := client.Wait(ctx, op.Name, nil); err != nil {
		return fmt.Errorf("create the Lustre instance: %w", err)
	}
	return nil
}

// insert makes a VM under one of the cluster's service accounts.
func insert(ctx context.Context, vms *compute.Client, name, account string, metadata map[string]string) error {
	op, err := vms.Insert(ctx, compute.InsertRequest{
		RequestID: uuid.NewString(), Name: name,
		Spec: compute.Spec{
			MachineType: "n2-standard-2", Image: "projects/" + Project + "/global/images/family/" + ImageFamily,
			Network: "global/networks/default", ServiceAccount: iam.AccountEmail(account, Project), Metadata: metadata, Labels: map[string]string{"sluice-cluster": Name},
		},
	})
	if err == nil {
		err = vms.WaitOperation(ctx, op)
	}
	if err != nil {
		return fmt.Errorf("make the VM %s: %w", name, err)
	}
	return nil
}
