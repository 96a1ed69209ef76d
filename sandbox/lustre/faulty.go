package lustre

import (
	"context"
	"fmt"
	"slices"

	api "github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/sandbox/faults"
)

// methodOf names an operation's method as faults do.
func methodOf(meta api.OperationMetadata) string {
	switch {
	case meta.Type == api.TypeImport:
		return "instances.importData"
	case meta.Type == api.TypeExport:
		return "instances.exportData"
	case meta.Verb == "update":
		return "instances.patch"
	}
	return "instances." + meta.Verb
}

// faulty is an operation's work with the faults of operations around it; label names it in their journal.
func (s *Server) faulty(ctx context.Context, method, label string, work func(context.Context) (any, error), abandon func()) (any, error) {
	hang, hangs := s.options.Faults.Take(faults.OperationHang, "lustre", method)
	hold := func(when string) {
		if !hangs || hang.Value != when {
			return
		}
		hang.Note(label, "hangs "+when+" its work")
		select {
		case <-hang.Gone:
			hang.Note(label, "goes on")
		case <-ctx.Done():
		}
	}
	hold("before")
	if hit, ok := s.options.Faults.Take(faults.OperationError, "lustre", method); ok {
		hit.Note(label, "failed with "+hit.Value)
		s.mu.Lock()
		abandon()
		s.mu.Unlock()
		hold("after")
		return nil, injected(hit)
	}
	response, err := work(ctx)
	hold("after")
	return response, err
}

// injected is the error of a hit of OperationError. Operations of this service have a code, and no HTTP status.
func injected(hit faults.Hit) *rpcError {
	name, status := hit.OperationError()
	e := &rpcError{code: codeInternal, message: "The operation failed."}
	if i := slices.Index(codeNames, name); i >= 0 {
		e.code = rpcCode(i)
	} else if name != "" {
		e.message = name + ": " + e.message
	}
	if status == 503 && name == "" {
		e.code = rpcCode(slices.Index(codeNames, "UNAVAILABLE"))
	}
	return e
}

// codeNames are the names of google.rpc.Code, by number.
var codeNames = []string{
	"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED",
	"RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
}

// setFailing arms OperationLustreFailed for a transfer.
func (t *transfer) setFailing(label string) {
	if hit, ok := t.server.options.Faults.Take(faults.OperationLustreFailed); ok {
		hit.Note(label, fmt.Sprintf("%d objects are not copied", hit.Int()))
		t.failing.Store(int64(hit.Int()))
	}
}

// failsNow is the error of an object that a fault makes fail, or nil.
func (t *transfer) failsNow() error {
	if t.failing.Add(-1) < 0 {
		return nil
	}
	return &rpcError{code: codeInternal, message: "injected by operation.lustre.transfer.failed"}
}
