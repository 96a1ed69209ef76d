package lustre

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	api "github.com/sluicehpc/sluice/gcp/lustre"
)

// typePrefix begins the @type of the API's messages.
const typePrefix = "type.googleapis.com/google.cloud.lustre.v1."

// operation is long-running work. Server.mu guards its fields but name, cancel and ended.
type operation struct {
	name     string
	meta     api.OperationMetadata
	transfer *transfer // of imports and exports; it guards itself
	done     bool
	err      *rpcError
	response any
	cancel   context.CancelFunc
	ended    chan struct{}
}

// render is the operation as the API shows it. Server.mu is held.
func (o *operation) render() map[string]any {
	meta := o.meta
	if o.transfer != nil {
		meta.Transfer = o.transfer.metadata()
	}
	out := map[string]any{"name": o.name, "metadata": meta, "done": o.done}
	switch {
	case o.err != nil:
		out["error"] = api.OperationError{Code: int(o.err.code), Message: o.err.message}
	case o.done:
		out["response"] = o.response
	}
	return out
}

// typed is a message with its @type, as it stands in an operation's response.
func typed(name string, message any) any {
	b, err := json.Marshal(message)
	fields := map[string]any{}
	if err == nil {
		err = json.Unmarshal(b, &fields)
	}
	if err != nil {
		fields["sandboxError"] = err.Error()
	}
	fields["@type"] = typePrefix + name
	return fields
}

// start runs work as an operation on target and returns at once. Server.mu is held; work runs without it. When a fault makes the
// operation fail, abandon is called in place of work, with Server.mu held.
func (s *Server) start(parent, target, verb string, work func(context.Context) (any, error), abandon func()) *operation {
	return s.startWith(parent, api.OperationMetadata{Type: api.TypeOperation, Target: target, Verb: verb}, nil, work, abandon)
}

func (s *Server) startWith(parent string, meta api.OperationMetadata, t *transfer, work func(context.Context) (any, error), abandon func()) *operation {
	meta.CreateTime = s.now()
	meta.APIVersion = "v1"
	ctx, cancel := context.WithCancel(s.ctx)
	op := &operation{
		name:     fmt.Sprintf("%s/operations/operation-%d-%s", parent, s.now().UnixMilli(), strings.ToLower(rand.Text()[:16])),
		meta:     meta,
		transfer: t,
		cancel:   cancel,
		ended:    make(chan struct{}),
	}
	s.operations[op.name] = op
	s.work.Go(func() {
		response, err := s.faulty(ctx, methodOf(meta), op.name+" on "+meta.Target, work, abandon)
		s.mu.Lock()
		defer s.mu.Unlock()
		op.done = true
		op.meta.EndTime = s.now()
		switch {
		case err == nil:
			op.response = response
		case ctx.Err() != nil:
			op.err = &rpcError{codeCancelled, "the operation was cancelled"}
		default:
			op.err = rpcOf(err)
		}
		cancel()
		close(op.ended)
	})
	return op
}

// request is a change that was accepted, kept for replays.
type request struct {
	what string
	body [sha256.Size]byte
	op   *operation
	time time.Time
}

// rememberFor is how long a request id is known. The API promises at least 60 minutes.
const rememberFor = time.Hour

// once does a change, or answers with the operation of the same change before. Server.mu is held.
// A change that is refused is not remembered.
func (s *Server) once(id, what string, body []byte, change func() (*operation, error)) (any, error) {
	if id != "" && (!uuid.MatchString(id) || strings.Trim(id, "0-") == "") {
		return nil, invalid("request_id %q must be a UUID that is not zero", id)
	}
	sum := sha256.Sum256(body)
	maps.DeleteFunc(s.requests, func(_ string, r request) bool { return s.now().Sub(r.time) > rememberFor })
	if earlier, ok := s.requests[id]; ok && id != "" {
		if earlier.what != what || earlier.body != sum {
			return nil, invalid("request_id %s was used for another request", id)
		}
		return earlier.op.render(), nil
	}
	op, err := change()
	if err != nil {
		return nil, err
	}
	if id != "" {
		s.requests[id] = request{what, sum, op, s.now()}
	}
	return op.render(), nil
}

func (s *Server) findOperation(name string) (*operation, error) {
	op, ok := s.operations[name]
	if !ok {
		return nil, &rpcError{codeNotFound, fmt.Sprintf("operation %q was not found", name)}
	}
	return op, nil
}

func (s *Server) getOperation(name string) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	op, err := s.findOperation(name)
	if err != nil {
		return nil, err
	}
	return op.render(), nil
}

func (s *Server) listOperations(parent string, q url.Values) (any, error) {
	prefix := strings.TrimSuffix(parent, "-") // all locations
	if prefix == parent {
		prefix += "/operations/"
	}
	s.mu.Lock()
	var all []any
	for _, name := range slices.Sorted(maps.Keys(s.operations)) {
		if strings.HasPrefix(name, prefix) {
			all = append(all, s.operations[name].render())
		}
	}
	s.mu.Unlock()
	page, next, err := pageOf(all, q)
	if err != nil {
		return nil, err
	}
	return struct {
		Operations    []any  `json:"operations,omitempty"`
		NextPageToken string `json:"nextPageToken,omitempty"`
	}{page, next}, nil
}

// cancelOperation ends a transfer; other operations run on, which the API allows.
func (s *Server) cancelOperation(name string) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	op, err := s.findOperation(name)
	if err != nil {
		return nil, err
	}
	if !op.done {
		op.meta.RequestedCancellation = true
		if op.transfer != nil {
			op.cancel()
		}
	}
	return struct{}{}, nil
}

func (s *Server) deleteOperation(name string) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	op, err := s.findOperation(name)
	if err != nil {
		return nil, err
	}
	if !op.done {
		return nil, &rpcError{codeFailedPrecondition, fmt.Sprintf("operation %q still runs", name)}
	}
	delete(s.operations, name)
	return struct{}{}, nil
}
