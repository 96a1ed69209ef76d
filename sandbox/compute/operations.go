package compute

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	api "google.golang.org/api/compute/v1"
)

// operation is a long-running change.
type operation struct {
	scope     string
	method    string // as faults name it: "instances.insert"
	label     string // for their journal
	started   time.Time
	requestID string
	hash      [sha256.Size]byte
	api       *api.Operation // replaced, never changed, under the server's lock
	done      chan struct{}  // closed when it is DONE
}

const (
	// keepOperations is how long an ended operation, and so its request id, is kept. The real
	// service promises 60 minutes for request ids and 14 days for operations.
	keepOperations = 24 * time.Hour
	// longestWait is how long operations.wait blocks.
	longestWait = 2 * time.Minute
)

// work is what an operation does, without holding the lock.
type work func(context.Context, *operation) *opError

// begin starts an operation on the target; no work means that it is done already. s.mu is held.
func (s *Server) begin(user, scope, kind, target string, targetID uint64, w work) *operation {
	op := s.newOperation(user, scope, kind, target, targetID)
	s.run(op, s.faulty(w, nil))
	return op
}

// newOperation adds a PENDING operation. s.mu is held.
func (s *Server) newOperation(user, scope, kind, target string, targetID uint64) *operation {
	now := s.now()
	s.forgetOperations(now)
	id := newID()
	name := fmt.Sprintf("operation-%d-%013x-%08x-%08x", now.UnixMilli(), id&(1<<52-1), uint32(id>>32), uint32(id))
	method := strings.TrimPrefix(kind, "compute.")
	op := &operation{scope: scope, method: method, label: name + " " + method + " " + last(target), started: now, done: make(chan struct{})}
	op.api = &api.Operation{
		Kind:          "compute#operation",
		Id:            id,
		Name:          name,
		OperationType: last(strings.ReplaceAll(kind, ".", "/")),
		TargetLink:    target,
		TargetId:      targetID,
		Status:        "PENDING",
		User:          user,
		InsertTime:    timestamp(now),
		SelfLink:      s.link(scope, "operations", name),
	}
	if zone, ok := strings.CutPrefix(scope, "zones/"); ok {
		op.api.Zone = s.link("zones", zone)
	}
	if region, ok := strings.CutPrefix(scope, "regions/"); ok {
		op.api.Region = s.link("regions", region)
	}
	s.operations[scope+"/"+name] = op
	s.oldest = append(s.oldest, op)
	return op
}

// run does the operation's work in a goroutine. s.mu is held.
func (s *Server) run(op *operation, w work) {
	s.running.Go(func() {
		s.changeOperation(op, func(o *api.Operation) {
			o.Status, o.StartTime = "RUNNING", timestamp(s.now())
		})
		s.finish(op, w(s.ctx, op))
	})
}

func (s *Server) finish(op *operation, failed *opError) {
	s.changeOperation(op, func(o *api.Operation) {
		o.Status, o.Progress, o.EndTime = "DONE", 100, timestamp(s.now())
		if failed == nil {
			return
		}
		if o.Error == nil && failed.code != "" {
			o.Error = &api.OperationError{Errors: []*api.OperationErrorErrors{failed.api()}}
		}
		o.HttpErrorStatusCode, o.HttpErrorMessage = failed.httpStatus, strings.ToUpper(statusText(failed.httpStatus))
	})
	close(op.done)
}

func statusText(code int64) string {
	switch code {
	case 0:
		return ""
	case 400:
		return "Bad Request"
	case 403:
		return "Forbidden"
	case 404:
		return "Not Found"
	case 409:
		return "Conflict"
	case 429:
		return "Too Many Requests"
	case 503:
		return "Service Unavailable"
	}
	return "Internal Server Error"
}

func (s *Server) changeOperation(op *operation, f func(*api.Operation)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := *op.api
	f(&next)
	op.api = &next
}

// forgetOperations drops what ended long ago. s.mu is held.
func (s *Server) forgetOperations(now time.Time) {
	n := 0
	for _, op := range s.oldest {
		if op.api.Status != "DONE" || now.Sub(op.started) < keepOperations {
			break
		}
		delete(s.operations, op.scope+"/"+op.api.Name)
		delete(s.requests, op.requestID)
		n++
	}
	s.oldest = slices.Delete(s.oldest, 0, n)
}

func (s *Server) findOperation(r *request) (*operation, *apiError) {
	name := r.PathValue("name")
	s.mu.Lock()
	defer s.mu.Unlock()
	op := s.operations[r.scope+"/"+name]
	if op == nil {
		return nil, notFound(s.resource(r.scope, "operations", name))
	}
	return op, nil
}

func (s *Server) getOperation(r *request) (any, *apiError) {
	op, err := s.findOperation(r)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return op.api, nil
}

func (s *Server) waitOperation(r *request) (any, *apiError) {
	op, err := s.findOperation(r)
	if err != nil {
		return nil, err
	}
	select {
	case <-op.done:
	case <-s.cfg.Clock.After(longestWait):
	case <-r.Context().Done():
	case <-s.ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return op.api, nil
}

func (s *Server) deleteOperation(r *request) (any, *apiError) {
	op, err := s.findOperation(r)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if op.api.Status != "DONE" {
		return nil, notReady(s.resource(r.scope, "operations", op.api.Name))
	}
	delete(s.operations, r.scope+"/"+op.api.Name)
	return nil, nil
}

// operationItems returns the operations of a scope, or of all. s.mu is held.
func (s *Server) operationItems(scope string) []item {
	var items []item
	for _, key := range slices.Sorted(maps.Keys(s.operations)) {
		op := s.operations[key]
		if scope == "" || op.scope == scope {
			items = append(items, item{op.scope, op.api.Name, op.api.InsertTime, op.api})
		}
	}
	return items
}

func (s *Server) listOperations(r *request) (any, *apiError) {
	s.mu.Lock()
	items := s.operationItems(r.scope)
	s.mu.Unlock()
	return list[api.Operation](r, "compute#operationList", items)
}

func (s *Server) aggregatedOperations(r *request) (any, *apiError) {
	s.mu.Lock()
	items := s.operationItems("")
	s.mu.Unlock()
	return aggregate[api.Operation](r, "compute#operationAggregatedList", "operations", items, append(s.zoneScopes(), "regions/"+s.region, "global"))
}

func newGroupID() string { return uuid.NewString() }
