// Package faults is the table of what can go wrong in the sandbox on purpose, what is set of it now, and a journal of what was done.
package faults

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluicehpc/sluice/internal/clock"
)

// Errors that Set returns, to be compared with errors.Is.
var (
	ErrUnknownKey = errors.New("unknown fault")
	ErrBadValue   = errors.New("bad value for a fault")
)

// Set is the faults that are set now. The zero value has none and is ready to use; a nil *Set
// answers like an empty one but cannot be changed. All methods may be called at the same time.
type Set struct {
	// Journal, if not nil, is called with each entry of the journal, in order. Set it before the first use.
	Journal func(Entry)

	mu      sync.Mutex // guards everything that follows
	faults  map[string]*fault
	seed    uint64
	seeded  bool
	changed chan struct{} // closed and replaced when a fault is set, cleared or over
	journal journal
}

// fault is one that is set.
type fault struct {
	key   string
	row   *Key
	names []string // for the row's words in capitals
	value string   // as it was set
	head  string   // the value without its modifiers

	since time.Time
	until time.Time // zero: no end
	left  int       // times that are left; negative: no limit
	skip  int
	p     float64
	rng   *rand.Rand

	hits  int
	gone  chan struct{} // closed when it is cleared, replaced or over
	timer *time.Timer   // ends it, or nil
}

// Fault is a fault as List shows it.
type Fault struct {
	Key   string    `json:"key"`
	Value string    `json:"value"`
	Since time.Time `json:"since"`
	Until time.Time `json:"until,omitzero"`
	Hits  int       `json:"hits"`  // how often it did something
	Spent bool      `json:"spent"` // its count is used up
}

// List is all that is set.
type List struct {
	Seed   uint64  `json:"seed"`
	Faults []Fault `json:"faults"` // by key
}

// Check returns the error of Set, if any.
func Check(key, value string) error {
	var s Set
	defer s.ClearAll()
	return s.Set(key, value)
}

// CheckKey returns ErrUnknownKey for a key that Set would refuse.
func CheckKey(key string) error {
	_, _, err := lookup(key)
	return err
}

// parse reads a value with its modifiers.
func (f *fault) parse(value string, now time.Time) error {
	f.value, f.head, f.left, f.p = value, value, -1, 1
	if len(f.row.Modifiers) > 0 {
		parts := strings.Split(value, ",")
		n := len(parts)
		for n > 1 && strings.Contains(parts[n-1], "=") {
			n--
		}
		f.head = strings.Join(parts[:n], ",") // some values are lists
		for _, m := range parts[n:] {
			if err := f.modify(m, now); err != nil {
				return err
			}
		}
	}
	if f.left < 0 && slices.Equal(f.row.Modifiers, events) {
		f.left = 1
	}
	return f.row.check(f.head)
}

func (f *fault) modify(text string, now time.Time) error {
	name, value, _ := strings.Cut(text, "=")
	if !slices.Contains(f.row.Modifiers, name) {
		return fmt.Errorf("%q: what may follow the value is %s", text, words(f.row.Modifiers))
	}
	var err error
	switch name {
	case "count":
		f.left, err = strconv.Atoi(value)
		if err != nil || f.left < 1 {
			return fmt.Errorf("count=%q: want a whole number above 0", value)
		}
	case "skip":
		f.skip, err = strconv.Atoi(value)
		if err != nil || f.skip < 0 {
			return fmt.Errorf("skip=%q: want a whole number from 0 up", value)
		}
	case "p":
		f.p, err = strconv.ParseFloat(value, 64)
		if err != nil || !(f.p > 0 && f.p <= 1) {
			return fmt.Errorf("p=%q: want a number above 0 and up to 1", value)
		}
	case "for":
		d, err := time.ParseDuration(value)
		if err != nil || d <= 0 {
			return fmt.Errorf("for=%q: want a duration such as 20s", value)
		}
		f.until = now.Add(d)
	}
	return nil
}

// Set sets the fault, in place of an earlier one of the same key. It returns ErrUnknownKey
// (with the nearest known key) or ErrBadValue, and then changes nothing.
func (s *Set) Set(key, value string) error {
	row, names, err := lookup(key)
	if err != nil {
		return err
	}
	f := &fault{key: key, row: row, names: names, since: time.Now(), gone: make(chan struct{})}
	if err := f.parse(value, f.since); err != nil {
		return fmt.Errorf("%w: %s=%q: %w", ErrBadValue, key, value, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if row.Name == Seed {
		s.seed, _ = strconv.ParseUint(f.head, 10, 64) // it was checked
		s.seeded = true
		for _, f := range s.faults {
			f.rng = s.generator(f.key)
		}
		s.note(f, "", "set")
		return nil
	}
	if old := s.faults[key]; old != nil {
		s.end(old, "replaced")
	}
	if s.faults == nil {
		s.faults = map[string]*fault{}
	}
	f.rng = s.generator(key)
	s.faults[key] = f
	if !f.until.IsZero() {
		f.timer = time.AfterFunc(time.Until(f.until), func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.faults[key] == f {
				s.end(f, "over")
				s.announce()
			}
		})
	}
	s.note(f, "", "set")
	s.announce()
	return nil
}

// end takes a fault out. s.mu is held.
func (s *Set) end(f *fault, why string) {
	delete(s.faults, f.key)
	close(f.gone)
	if f.timer != nil {
		f.timer.Stop()
	}
	s.note(f, "", why)
}

// announce wakes who waits for Changed. s.mu is held.
func (s *Set) announce() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// generator returns the random numbers of a key. s.mu is held.
func (s *Set) generator(key string) *rand.Rand {
	if !s.seeded {
		s.seed, s.seeded = rand.Uint64()>>32, true // short enough to type
	}
	h := fnv.New64a()
	h.Write([]byte(key))
	return rand.New(rand.NewPCG(s.seed, h.Sum64()))
}

// Clear takes a fault out; one that is not set stays so. It returns ErrUnknownKey.
func (s *Set) Clear(key string) error {
	if _, _, err := lookup(key); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.faults[key]; f != nil {
		s.end(f, "cleared")
		s.announce()
	}
	return nil
}

// ClearAll takes all faults out. The seed stays.
func (s *Set) ClearAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.faults {
		s.end(f, "cleared")
	}
	s.announce()
}

// Changed returns a channel that is closed when a fault is set, cleared or over; nil for a nil *Set.
func (s *Set) Changed() <-chan struct{} {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.changed
}

// List returns all that is set.
func (s *Set) List() List {
	l := List{Faults: []Fault{}}
	if s == nil {
		return l
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.generator("") // makes the seed
	l.Seed = s.seed
	for _, f := range s.faults {
		l.Faults = append(l.Faults, Fault{f.key, f.value, f.since.UTC(), utc(f.until), f.hits, f.left == 0})
	}
	slices.SortFunc(l.Faults, func(a, b Fault) int { return cmp.Compare(a.Key, b.Key) })
	return l
}

func utc(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return t.UTC()
}

// find returns the faults of a row that hold for the names, the one that says most first. s.mu is held.
func (s *Set) find(row string, names []string) []*fault {
	var found []*fault
	for _, f := range s.faults {
		if f.row.Name == row && slices.EqualFunc(f.names, names, match) {
			found = append(found, f)
		}
	}
	slices.SortFunc(found, func(a, b *fault) int {
		return cmp.Or(cmp.Compare(b.precision(), a.precision()), cmp.Compare(a.key, b.key))
	})
	return found
}

// precision counts the characters of a key that are no *.
func (f *fault) precision() int { return len(f.key) - strings.Count(f.key, "*") }

// Get returns the value of a fault of the table's row, with names for its words in capitals, and whether it is set. It is for
// states, and counts nothing.
func (s *Set) Get(row string, names ...string) (value string, on bool) {
	if s == nil {
		return "", false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	found := s.find(row, names)
	if len(found) == 0 {
		return "", false
	}
	return found[0].head, true
}

// Duration returns the value of a fault that is a duration, or 0 when it is not set.
func (s *Set) Duration(row string, names ...string) time.Duration {
	v, _ := s.Get(row, names...)
	d, err := time.ParseDuration(v)
	if err != nil {
		return 0
	}
	return d
}

// Int returns the value of a fault that is a number, or 0 when it is not set.
func (s *Set) Int(row string, names ...string) int64 {
	v, _ := s.Get(row, names...)
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// On reports whether a fault that is a switch is on.
func (s *Set) On(row string, names ...string) bool {
	v, _ := s.Get(row, names...)
	return v == "on"
}

// Hit is a fault that is to be done now.
type Hit struct {
	Value string
	Roll  float64         // of the fault's generator, from 0 to 1
	Gone  <-chan struct{} // closed when the fault is cleared, replaced or over

	set   *Set
	fault *fault
}

// Take asks, at an occasion, for a fault of the table's row with names for its words in capitals: ok says that one is to be done,
// and it is counted. Its Note writes what was done into the journal.
func (s *Set) Take(row string, names ...string) (h Hit, ok bool) {
	if s == nil {
		return h, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.find(row, names) {
		if f.left == 0 {
			continue
		}
		if f.skip > 0 {
			f.skip--
			continue
		}
		roll := f.rng.Float64()
		if f.p < 1 && roll >= f.p {
			continue
		}
		f.hits++
		if f.left > 0 {
			f.left--
		}
		return Hit{f.head, f.rng.Float64(), f.gone, s, f}, true
	}
	return h, false
}

// Note writes into the journal what was done: at which request (method and path, or an operation; "" for none) and what.
func (h Hit) Note(request, what string) {
	h.set.mu.Lock()
	defer h.set.mu.Unlock()
	h.set.note(h.fault, request, what)
}

// Latency is the value of APILatency at this hit.
func (h Hit) Latency() time.Duration {
	shortest, longest, err := latency(h.Value)
	if err != nil {
		return 0
	}
	return shortest + time.Duration(h.Roll*float64(longest-shortest))
}

// Duration is the value as a duration, or other when it is none ("on").
func (h Hit) Duration(other time.Duration) time.Duration {
	if d, err := time.ParseDuration(h.Value); err == nil {
		return d
	}
	return other
}

// Int is the value as a number, or 0.
func (h Hit) Int() int {
	n, err := strconv.Atoi(h.Value)
	if err != nil {
		return 0
	}
	return n
}

// OperationError is the value of a hit of OperationError: the code, or "", and the HTTP status, or 0.
func (h Hit) OperationError() (code string, status int64) {
	code, text, _ := strings.Cut(h.Value, "/")
	status, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return code, 0
	}
	return code, status
}

// Note writes into the journal what a fault that Get returned did: see Hit.Note.
func (s *Set) Note(row string, names []string, request, what string) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if found := s.find(row, names); len(found) > 0 {
		found[0].hits++
		s.note(found[0], request, what)
	}
}

// Clock is base, shifted by ClockSkew as it is at the moment.
func (s *Set) Clock(base clock.Clock) clock.Clock { return skewed{s, base} }

type skewed struct {
	set *Set
	clock.Clock
}

func (c skewed) Now() time.Time { return c.Clock.Now().Add(c.set.Duration(ClockSkew)) }
