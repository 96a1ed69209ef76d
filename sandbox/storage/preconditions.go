package storage

import (
	"net/http"
	"net/url"
	"strconv"
)

// Preconditions must all hold for a call to be carried out; nil ones always do. GenerationMatch 0 means that no live
// object has the name.
type Preconditions struct {
	GenerationMatch        *int64 `json:",omitempty"`
	GenerationNotMatch     *int64 `json:",omitempty"`
	MetagenerationMatch    *int64 `json:",omitempty"`
	MetagenerationNotMatch *int64 `json:",omitempty"`
	// occupied refuses an object of the name, if there is one: the caller may not delete it. nil is no matter.
	occupied error
}

// check judges the preconditions on the object that a call found; zeros stand for none.
func (p Preconditions) check(generation, metageneration int64) error {
	switch {
	case p.GenerationMatch != nil && *p.GenerationMatch != generation,
		p.GenerationNotMatch != nil && *p.GenerationNotMatch == generation,
		p.MetagenerationMatch != nil && *p.MetagenerationMatch != metageneration,
		p.MetagenerationNotMatch != nil && *p.MetagenerationNotMatch == metageneration:
		return errPrecondition
	}
	return nil
}

// checkObject is check on o, which may be nil.
func (p Preconditions) checkObject(o *object) error {
	if o == nil {
		return p.check(0, 0)
	}
	if err := p.check(o.generation, o.metageneration); err != nil {
		return err
	}
	return p.occupied
}

// checkRead is checkObject for a read, where a NotMatch that matches means "not modified".
func (p Preconditions) checkRead(o *object) error {
	if err := (Preconditions{GenerationMatch: p.GenerationMatch, MetagenerationMatch: p.MetagenerationMatch}).checkObject(o); err != nil {
		return err
	}
	if p.checkObject(o) != nil {
		return errNotModified
	}
	return nil
}

// preconditions reads the JSON API's ifGenerationMatch and its kin, or with which = "Source" ifSourceGenerationMatch and its kin.
func preconditions(q url.Values, which string) (p Preconditions, err error) {
	for suffix, to := range map[string]**int64{
		"GenerationMatch": &p.GenerationMatch, "GenerationNotMatch": &p.GenerationNotMatch,
		"MetagenerationMatch": &p.MetagenerationMatch, "MetagenerationNotMatch": &p.MetagenerationNotMatch,
	} {
		if *to, err = optionalInt(q.Get("if"+which+suffix), "if"+which+suffix); err != nil {
			return p, err
		}
	}
	return p, nil
}

// headerPreconditions reads the XML API's form.
func headerPreconditions(h http.Header) (p Preconditions, err error) {
	for name, to := range map[string]**int64{
		"x-goog-if-generation-match": &p.GenerationMatch, "x-goog-if-generation-not-match": &p.GenerationNotMatch,
		"x-goog-if-metageneration-match": &p.MetagenerationMatch, "x-goog-if-metageneration-not-match": &p.MetagenerationNotMatch,
	} {
		if *to, err = optionalInt(h.Get(name), name); err != nil {
			return p, err
		}
	}
	return p, nil
}

func optionalInt(value, name string) (*int64, error) {
	if value == "" {
		return nil, nil
	}
	n, err := strconv.ParseInt(value, 10, 64)
	if err != nil {
		return nil, invalid("Invalid value for %s: %q.", name, value)
	}
	return &n, nil
}

// generationOf reads a generation parameter; 0 means the live object.
func generationOf(value string) (int64, error) {
	n, err := optionalInt(value, "generation")
	if err != nil || n == nil {
		return 0, err
	}
	if *n <= 0 {
		return 0, invalid("Invalid value for generation: %q.", value)
	}
	return *n, nil
}
