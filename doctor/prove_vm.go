package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"cloud.google.com/go/compute/metadata"
	"github.com/google/uuid"

	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/compute"
)

// runLabel marks the VMs of a run. They do not carry the cluster's label: nobody takes them for nodes.
const runLabel = "sluice-acceptance"

// smallest is the node set with the fewest CPUs, whose image and network the VMs of proofs have.
func (l *Lab) smallest() config.NodeSet {
	return slices.MinFunc(l.Config.NodeSets, func(a, b config.NodeSet) int { return a.CPUs - b.CPUs })
}

// spec is what the VMs of proofs are made of: no account, no metadata.
func (l *Lab) spec() compute.Spec {
	ns := l.smallest()
	s := compute.Spec{
		MachineType: ns.MachineType, Image: ns.ImagePath(l.Config.Project), Network: ns.NetworkPath(), Subnetwork: ns.SubnetworkPath(l.Config.Zone),
		Labels: map[string]string{runLabel: l.Name},
	}
	if l.machineType != "" {
		s.MachineType = l.machineType
	}
	return s
}

// bulkInsert makes VMs to be deleted at the end of the proof, and waits for the operation.
func (l *Lab) bulkInsert(ctx context.Context, minCount int, names ...string) error {
	for _, name := range names {
		l.undo("delete VM "+name, func(ctx context.Context) error { return l.deleteVM(ctx, name) })
	}
	op, err := l.Compute.BulkInsert(ctx, compute.BulkInsertRequest{RequestID: uuid.NewString(), Names: names, MinCount: minCount, Spec: l.spec()})
	if err != nil {
		return err
	}
	return l.Compute.WaitOperation(ctx, op)
}

// deleteVM deletes a VM of this run, if it is there.
func (l *Lab) deleteVM(ctx context.Context, name string) error {
	vm, err := l.Compute.Get(ctx, name)
	if gcp.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if vm.Labels[runLabel] != l.Name {
		return fmt.Errorf("VM %s is not of this run", name)
	}
	op, err := l.Compute.Delete(ctx, uuid.NewString(), name)
	if err != nil {
		return err
	}
	return l.Compute.WaitOperation(ctx, op)
}

// vms are the names of this run's VMs.
func (l *Lab) vms(ctx context.Context) ([]string, error) {
	list, err := l.Compute.List(ctx, "labels."+runLabel+"="+l.Name)
	var names []string
	for _, vm := range list {
		names = append(names, vm.Name)
	}
	return names, err
}

func proveBulkNames(ctx context.Context, l *Lab) (string, error) {
	// Not one pattern: as two node sets' names are.
	want := []string{l.Name + "-a7", l.Name + "-b-12"}
	if err := l.bulkInsert(ctx, 0, want...); err != nil {
		return "", fmt.Errorf("with the machine type %s: %w; another one is chosen by --machine-type", l.spec().MachineType, err)
	}
	got, err := l.vms(ctx)
	if err != nil {
		return "", err
	}
	if !slices.Equal(got, want) {
		return "", refuted("asked for %q, got %q", want, got)
	}
	return fmt.Sprintf("one bulkInsert of %s made %s", l.spec().MachineType, strings.Join(got, " and ")), nil
}

// proveBulkMinimum asks for two VMs of which one cannot be made: its name is taken.
func proveBulkMinimum(ctx context.Context, l *Lab) (string, error) {
	taken, free := l.Name+"-1", l.Name+"-2"
	if err := l.bulkInsert(ctx, 0, taken); err != nil {
		return "", err
	}
	if err := l.bulkInsert(ctx, 1, taken, free); err != nil {
		return "", refuted("of two VMs one could be made, at least one was wanted, and the answer is: %v", err)
	}
	got, err := l.vms(ctx)
	if err != nil {
		return "", err
	}
	if want := []string{taken, free}; !slices.Equal(got, want) {
		return "", refuted("there are %q, want %q", got, want)
	}
	return "of two names one was taken; the other VM was made, and the operation ended without an error", nil
}

// proveOperationError makes an operation fail: the address that is asked for is a node's of the cluster.
func proveOperationError(ctx context.Context, l *Lab) (string, error) {
	name, err := metadata.InstanceNameWithContext(ctx)
	if err != nil {
		return "", err
	}
	self, err := l.Compute.Get(ctx, name)
	if err != nil {
		return "", err
	}
	vm := l.Name + "-x"
	l.undo("delete VM "+vm, func(ctx context.Context) error { return l.deleteVM(ctx, vm) })
	op, err := l.Compute.Insert(ctx, compute.InsertRequest{RequestID: uuid.NewString(), Name: vm, Address: self.Address, Spec: l.spec()})
	if err != nil {
		return "", fmt.Errorf("the call itself was refused, so that no operation could fail: %w", err)
	}
	err = l.Compute.WaitOperation(ctx, op)
	failed, isFailure := errors.AsType[*compute.OperationError](err)
	switch {
	case err == nil:
		return "", fmt.Errorf("a VM was made with the address %s, which this VM has", self.Address)
	case !isFailure:
		return "", err
	case len(failed.Failures) == 0 || failed.Failures[0].Code == "" || strings.HasPrefix(failed.Failures[0].Code, "HTTP_"):
		return "", refuted("a failed operation has no code in error.errors: %v", failed)
	}
	return fmt.Sprintf("an insert with an address in use failed with the code %s, httpErrorStatusCode %d", failed.Failures[0].Code, failed.HTTPStatus), nil
}

// missingWithin is how soon "not there" must come; a server that waits would take minutes.
const missingWithin = 5 * time.Second

func proveWaitForChange(ctx context.Context, l *Lab) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*missingWithin)
	defer cancel()
	begun := time.Now()
	_, err := metadata.GetWithContext(ctx, "instance/attributes/"+l.Name+"?wait_for_change=true")
	took := time.Since(begun)
	var missing metadata.NotDefinedError
	switch {
	case errors.As(err, &missing) && took < missingWithin:
		return fmt.Sprintf("404 after %s", took.Round(time.Millisecond)), nil
	case ctx.Err() != nil || errors.As(err, &missing):
		return "", refuted("the server waits for a key that is not there: no answer within %s", took.Round(time.Second))
	case err == nil:
		return "", refuted("a key that is not there has a value")
	}
	return "", err
}
