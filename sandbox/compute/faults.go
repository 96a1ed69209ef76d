package compute

import (
	"context"
	"fmt"
	"strings"

	api "google.golang.org/api/compute/v1"

	"github.com/sluicehpc/sluice/sandbox/faults"
)

// faulty is the work with the faults of operations around it. abandon, or nil, is called in its place when the operation is to fail.
func (s *Server) faulty(w work, abandon func(context.Context)) work {
	return func(ctx context.Context, op *operation) *opError {
		hang, hangs := s.cfg.Faults.Take(faults.OperationHang, "compute", op.method)
		if hangs && hang.Value == "before" {
			s.hold(ctx, op, hang)
		}
		failed := s.injected(op)
		switch {
		case failed == nil && w != nil:
			failed = w(ctx, op)
		case failed != nil && abandon != nil:
			abandon(ctx)
		}
		if hangs && hang.Value == "after" {
			s.hold(ctx, op, hang)
		}
		return failed
	}
}

func (s *Server) hold(ctx context.Context, op *operation, hang faults.Hit) {
	hang.Note(op.label, "hangs "+hang.Value+" its work")
	select {
	case <-hang.Gone:
		hang.Note(op.label, "goes on")
	case <-ctx.Done():
	}
}

// injected returns the error that a fault gives the operation, or nil.
func (s *Server) injected(op *operation) *opError {
	hit, ok := s.cfg.Faults.Take(faults.OperationError, "compute", op.method)
	if !ok {
		return nil
	}
	code, status := hit.OperationError()
	hit.Note(op.label, "failed with "+hit.Value)
	return &opError{code, "The operation failed.", status}
}

// starting is the work of bringing an instance up; one that fails disappears when discard is set, and is TERMINATED otherwise.
func (s *Server) starting(in *instance, discard bool) work {
	return s.faulty(func(ctx context.Context, _ *operation) *opError { return s.start(ctx, in, discard) },
		func(ctx context.Context) { s.abandon(ctx, in, discard) })
}

// abandon ends an instance that was never started.
func (s *Server) abandon(ctx context.Context, in *instance, discard bool) {
	if in.takeTurn(ctx) != nil {
		return
	}
	defer in.giveTurn()
	_ = s.end(ctx, in, discard, 0) // it stays STOPPING: a delete tries again
}

// stockout returns the error of a zone that has no room for the instance, or nil.
func (s *Server) stockout(in *instance) *opError {
	hit, ok := s.cfg.Faults.Take(faults.ComputeStockout, in.zone, last(in.api.MachineType))
	if !ok {
		return nil
	}
	code := "ZONE_RESOURCE_POOL_EXHAUSTED"
	if hit.Value == "details" {
		code += "_WITH_DETAILS"
	}
	hit.Note(in.name, code)
	return s.exhausted(in, code)
}

func (s *Server) exhausted(in *instance, code string) *opError {
	message := fmt.Sprintf("The zone '%s' does not have enough resources available to fulfill the request.", s.resource("zones", in.zone))
	if strings.HasSuffix(code, "_WITH_DETAILS") {
		message = fmt.Sprintf("The zone '%s' does not have enough resources available to fulfill the request. '(resource type:compute)'.", s.resource("zones", in.zone))
	}
	return &opError{code, message + " Try a different zone, or try again later.", 503}
}

// uses is how much of each quota an instance takes.
func uses(vm *api.Instance) map[string]int64 {
	mt := machineTypes[last(vm.MachineType)]
	cpus := "CPUS"
	if vm.Scheduling.ProvisioningModel == "SPOT" {
		cpus = "PREEMPTIBLE_CPUS"
	}
	return map[string]int64{"INSTANCES": 1, cpus: int64(mt.cpus), "GPUS_ALL_REGIONS": int64(mt.gpus)}
}

// overQuota returns the error of a project that may have no such instance more, or nil. s.mu is held.
func (s *Server) overQuota(vm *api.Instance) *opError {
	for _, metric := range faults.QuotaMetrics {
		want := uses(vm)[metric]
		limit, on := s.cfg.Faults.Get(faults.ComputeQuota, metric)
		if !on || want == 0 {
			continue
		}
		used := want
		for _, in := range s.instances {
			if in.api.Status != "TERMINATED" || metric == "INSTANCES" {
				used += uses(in.api)[metric]
			}
		}
		if used > s.cfg.Faults.Int(faults.ComputeQuota, metric) {
			s.cfg.Faults.Note(faults.ComputeQuota, []string{metric}, vm.Name, fmt.Sprintf("refused: %d would be used", used))
			return &opError{"QUOTA_EXCEEDED", fmt.Sprintf("Quota '%s' exceeded.  Limit: %s.0 in region %s.", metric, limit, s.region), 403}
		}
	}
	return nil
}

// partial returns how many of a bulkInsert's VMs may come up.
func (s *Server) partial(op *operation, n int) int {
	hit, ok := s.cfg.Faults.Take(faults.OperationBulkPartial)
	if !ok {
		return n
	}
	hit.Note(op.label, fmt.Sprintf("%d of %d VMs come up", min(n, hit.Int()), n))
	return hit.Int()
}

// leftover returns how many VMs a rollback leaves behind.
func (s *Server) leftover(op *operation) int {
	hit, ok := s.cfg.Faults.Take(faults.OperationBulkLeftover)
	if !ok {
		return 0
	}
	hit.Note(op.label, fmt.Sprintf("left up to %d VMs behind", hit.Int()))
	return hit.Int()
}
