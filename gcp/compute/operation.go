package compute

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"cloud.google.com/go/compute/apiv1/computepb"

	"github.com/sluicehpc/sluice/gcp"
)

// Failure is one of the reasons why an operation failed.
type Failure struct {
	Code    string // for example "ZONE_RESOURCE_POOL_EXHAUSTED"
	Message string // the service's words
}

// OperationError is an operation that ended with errors.
type OperationError struct {
	Operation  string // name
	Type       string // "bulkInsert", "insert", "delete" …
	Target     string // last element of what it worked on
	HTTPStatus int    // or 0 when the service says none
	Failures   []Failure
}

// Has reports whether one of the failures has the code.
func (e *OperationError) Has(code string) bool {
	return slices.ContainsFunc(e.Failures, func(f Failure) bool { return f.Code == code })
}

func (e *OperationError) Error() string {
	var texts []string
	for _, f := range e.Failures {
		text := f.Code + ": " + strings.TrimSuffix(f.Message, ".")
		if !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
	}
	if len(texts) == 0 {
		texts = []string{fmt.Sprintf("HTTP %d", e.HTTPStatus)}
	}
	return fmt.Sprintf("%s %s: %s", e.Type, e.Target, strings.Join(texts, "; "))
}

const (
	// longestPoll ends a call of operations.wait, which the service answers within 2 minutes, so
	// that a lost connection is noticed.
	longestPoll = 150 * time.Second
	// pause is between calls of operations.wait that came back early.
	pause = 500 * time.Millisecond
)

// WaitOperation waits for the end of an operation of the zone. It returns an *OperationError when
// the operation failed, whatever its HTTP status says, and ctx's error when that ends first: the
// operation then goes on, and WaitOperation may be called again. The name "" is no operation: done.
func (c *Client) WaitOperation(ctx context.Context, name string) error {
	if name == "" {
		return nil
	}
	request := &computepb.WaitZoneOperationRequest{Project: c.project, Zone: c.zone, Operation: name}
	for {
		op, err := c.poll(ctx, request)
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("wait for operation %s: %w", name, ctx.Err())
		case errors.Is(err, context.DeadlineExceeded):
			continue
		case err != nil:
			return gcp.Wrap(err, "wait for operation "+name)
		case op.GetStatus() == computepb.Operation_DONE:
			return failure(op)
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

func (c *Client) poll(ctx context.Context, request *computepb.WaitZoneOperationRequest) (*computepb.Operation, error) {
	ctx, cancel := context.WithTimeout(ctx, longestPoll)
	defer cancel()
	return c.operations.Wait(ctx, request, gcp.CallOption())
}

// failure judges an ended operation by its errors and its HTTP status: the service may set either.
func failure(op *computepb.Operation) error {
	errs := op.GetError().GetErrors()
	status := int(op.GetHttpErrorStatusCode())
	if len(errs) == 0 && status < 400 {
		return nil
	}
	e := &OperationError{
		Operation:  op.GetName(),
		Type:       op.GetOperationType(),
		Target:     path.Base(op.GetTargetLink()),
		HTTPStatus: status,
	}
	for _, f := range errs {
		e.Failures = append(e.Failures, Failure{Code: f.GetCode(), Message: f.GetMessage()})
	}
	if len(e.Failures) == 0 && op.GetHttpErrorMessage() != "" {
		e.Failures = []Failure{{Code: fmt.Sprintf("HTTP_%d", status), Message: op.GetHttpErrorMessage()}}
	}
	return e
}
