package doctor

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/internal/diag"
)

// Proof is one assumption about the real cloud: a row of docs/unverified.md.
type Proof struct {
	ID         string // lower-case words and hyphens, for --only
	Assumption string // Markdown, without a full stop
	RestsOn    string // what breaks if it is wrong; Markdown
	Command    string // what a person would type; Markdown
	// Prove tries it and returns what was seen. Its error is made by refuted or notApplicable; any other one says
	// that it could not be tried. What it makes on the way it hands to Lab.undo. nil: only Command can tell.
	Prove func(ctx context.Context, l *Lab) (evidence string, err error)
	// Limit bounds Prove; 0 is proofLimit.
	Limit time.Duration
}

// proofLimit is generous: an import of ten objects takes a minute or two, however small they are.
const proofLimit = 15 * time.Minute

// Status is how a proof ended.
type Status string

// The statuses. NotApplicable is not proved: the evidence says what it needs.
const (
	Proved        Status = "proved"
	Refuted       Status = "refuted"
	NotApplicable Status = "not applicable"
	Manual        Status = "manual" // no program can do it; the command is in Next
	NotTried      Status = "failed" // something else went wrong on the way
)

// Result is a proof's outcome.
type Result struct {
	ID         string  `json:"id"`
	Assumption string  `json:"assumption"`
	Status     Status  `json:"status"`
	Evidence   string  `json:"evidence"`
	Next       string  `json:"next,omitempty"` // what to type by hand, unless it was proved
	Seconds    float64 `json:"seconds"`
}

// verdict is an error that is an answer.
type verdict struct {
	status Status
	text   string
}

func (v *verdict) Error() string { return v.text }

// refuted says what was seen instead.
func refuted(format string, args ...any) error {
	return &verdict{Refuted, fmt.Sprintf(format, args...)}
}

// notApplicable says what is missing here for a proof.
func notApplicable(format string, args ...any) error {
	return &verdict{NotApplicable, fmt.Sprintf(format, args...)}
}

// Options of Accept.
type Options struct {
	ConfigPath string // empty: /etc/sluice/sluice.yaml
	// URL is gs://BUCKET/PREFIX/, below which the run works under a name of its own.
	URL string
	// Proofs are what is to be proved; nil: all.
	Proofs []Proof
	// ServiceAccount moves the data and has the rights on the bucket; empty: that of the first rule of policy
	// that may read and write URL, else this VM's own.
	ServiceAccount string
	FileSystem     string // of sluice.yaml; empty: the default one
	MachineType    string // of the VMs that are made and deleted; empty: that of the smallest node set
	// Begin and End are called around each proof, when not nil.
	Begin func(number, all int, p Proof)
	End   func(r Result)
}

var (
	// ErrBadURL is wrapped by Accept when the URL is no gs://BUCKET/PREFIX/.
	ErrBadURL = errors.New("want gs://BUCKET/PREFIX/")
	// ErrUnknownProof is wrapped by Select.
	ErrUnknownProof = errors.New("no such proof")
	// ErrLeftBehind is wrapped by Accept when something that the run made could not be removed.
	ErrLeftBehind = errors.New("left behind")
)

// Select returns the proofs of the ids, in the table's order.
func Select(ids []string) ([]Proof, error) {
	known, wanted := map[string]bool{}, map[string]bool{}
	var names []string
	for _, p := range Proofs {
		known[p.ID] = true
		names = append(names, p.ID)
	}
	for _, id := range ids {
		if !known[id] {
			err := fmt.Errorf("%w: %q", ErrUnknownProof, id)
			if near := diag.Nearest(id, names); near != "" {
				err = fmt.Errorf("%w; did you mean %s?", err, near)
			}
			return nil, err
		}
		wanted[id] = true
	}
	var list []Proof
	for _, p := range Proofs {
		if wanted[p.ID] {
			list = append(list, p)
		}
	}
	return list, nil
}

var bucketURL = regexp.MustCompile(`^gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/((?:[^/\x00-\x1f]+/)*)$`)

// undoLimit bounds the removal of what one proof, or the run, made: deleting a VM takes a minute.
const undoLimit = 5 * time.Minute

// Accept runs proofs one after the other and removes what they made, also after ctx has ended. Its error says that
// it could not begin, that it was interrupted, or what is left behind; the results so far come with it.
func Accept(ctx context.Context, o Options) ([]Result, error) {
	if o.Proofs == nil {
		o.Proofs = Proofs
	}
	path := o.ConfigPath
	if path == "" {
		path = config.DefaultPath
	}
	c, err := config.Load(path)
	if err != nil {
		return nil, err
	}
	m := bucketURL.FindStringSubmatch(o.URL)
	if m == nil {
		return nil, fmt.Errorf("bucket %q: %w", o.URL, ErrBadURL)
	}
	name, err := runName()
	if err != nil {
		return nil, err
	}
	l := &Lab{Config: c, Name: name, Bucket: m[1], Prefix: m[2] + name + "/", machineType: o.MachineType}
	if err := l.open(ctx, o); err != nil {
		return nil, err
	}
	defer l.close()

	var results []Result
	var left []error
	for i, p := range o.Proofs {
		if ctx.Err() != nil {
			break
		}
		if o.Begin != nil {
			o.Begin(i+1, len(o.Proofs), p)
		}
		r := l.prove(ctx, p)
		left = append(left, l.proof.unwind(ctx))
		if ctx.Err() != nil {
			break // an interrupted proof says nothing
		}
		results = append(results, r)
		if o.End != nil {
			o.End(r)
		}
	}
	left = append(left, l.run.unwind(ctx))
	if err := errors.Join(left...); err != nil {
		return results, fmt.Errorf("%w: %w", ErrLeftBehind, err)
	}
	return results, ctx.Err()
}

func runName() (string, error) {
	random := make([]byte, 4)
	if _, err := rand.Read(random); err != nil {
		return "", err
	}
	return namePrefix + hex.EncodeToString(random), nil
}

// namePrefix begins the name of everything that a run makes: directories, objects, VMs, jobs.
const namePrefix = "sluice-acceptance-"

// prove runs one proof. One that does not end, on a mount that hangs, is left behind.
func (l *Lab) prove(ctx context.Context, p Proof) Result {
	r := Result{ID: p.ID, Assumption: p.Assumption}
	if p.Prove == nil {
		r.Status, r.Evidence, r.Next = Manual, "only a person can do this", p.Command
		return r
	}
	limit := p.Limit
	if limit == 0 {
		limit = proofLimit
	}
	begun := time.Now()
	pctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	type answer struct {
		evidence string
		err      error
	}
	answers := make(chan answer, 1)
	go func() {
		evidence, err := p.Prove(pctx, l)
		answers <- answer{evidence, err}
	}()
	var a answer
	select {
	case a = <-answers:
	case <-pctx.Done():
		select {
		case a = <-answers:
		case <-time.After(abandonAfter):
			a.err = fmt.Errorf("no answer within %s", limit)
		}
	}
	r.Seconds = time.Since(begun).Seconds()
	r.Status, r.Evidence = Proved, a.evidence
	var v *verdict
	switch {
	case errors.As(a.err, &v):
		r.Status, r.Evidence, r.Next = v.status, a.err.Error(), p.Command
	case a.err != nil:
		r.Status, r.Evidence, r.Next = NotTried, a.err.Error(), p.Command
	}
	r.Evidence = strings.TrimSpace(r.Evidence)
	return r
}

const defaultAbandonAfter = 5 * time.Second

// abandonAfter is what a proof gets to notice that its time is over; tests have a shorter one.
var abandonAfter = defaultAbandonAfter

// undo is a stack of what is to be done at the end.
type undo struct {
	mu    sync.Mutex // guards steps
	steps []undoStep
}

type undoStep struct {
	what string // "remove directory /lustre/x"
	do   func(ctx context.Context) error
}

func (u *undo) push(what string, do func(ctx context.Context) error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.steps = append(u.steps, undoStep{what, do})
}

func (u *undo) pop() (undoStep, bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.steps) == 0 {
		return undoStep{}, false
	}
	s := u.steps[len(u.steps)-1]
	u.steps = u.steps[:len(u.steps)-1]
	return s, true
}

// unwind does the steps, the last one first, whether ctx has ended or not.
func (u *undo) unwind(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoLimit)
	defer cancel()
	var failures []error
	for {
		s, more := u.pop()
		if !more {
			return errors.Join(failures...)
		}
		done := make(chan error, 1)
		go func() { done <- s.do(ctx) }()
		var err error
		select {
		case err = <-done:
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err != nil {
			failures = append(failures, fmt.Errorf("%s: %w", s.what, err))
		}
	}
}
