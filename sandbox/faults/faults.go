// Package faults holds the switches that make the sandbox misbehave on purpose.
package faults

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"
)

// The keys that the sandbox knows. Describe says what each does and which values it takes.
const (
	// StorageDeny is a bucket on which every call is refused with 403.
	StorageDeny = "storage.deny"
	// ComputeInsertDelay is the time that an instance stays in PROVISIONING (a Go duration).
	ComputeInsertDelay = "compute.insert.delay"
)

// Errors that Set returns, to be compared with errors.Is.
var (
	ErrUnknownKey = errors.New("unknown fault")
	ErrBadValue   = errors.New("bad value for a fault")
)

// Key describes one fault.
type Key struct {
	Name string // for example "lustre.transfer.rate"
	Help string // one line for people: the value and what it does

	check func(value string) error
}

var keys = slices.SortedFunc(slices.Values(append([]Key{
	{ComputeInsertDelay, "DURATION: instances stay in PROVISIONING this long", checkDuration},
	{StorageDeny, "BUCKET: every call on it is refused with 403", checkBucket},
}, lustreKeys...)), func(a, b Key) int { return strings.Compare(a.Name, b.Name) })

// Keys lists the known faults, sorted by name.
func Keys() []Key { return append([]Key(nil), keys...) }

func lookup(name string) (Key, error) {
	for _, k := range keys {
		if k.Name == name {
			return k, nil
		}
	}
	return Key{}, fmt.Errorf("%w %q: did you mean %s?", ErrUnknownKey, name, nearest(name))
}

// Set is the faults that are on now. The zero value has none and is ready to use; a nil *Set
// answers like an empty one but cannot be changed. All methods may be called at the same time.
type Set struct {
	mu      sync.Mutex
	values  map[string]string // mu guards it and changed
	changed chan struct{}     // closed at the next change, or nil when nobody asked
}

// Set turns the fault on with the value, replacing an earlier one. It returns ErrUnknownKey
// (with the nearest known name) or ErrBadValue, and then changes nothing.
func (s *Set) Set(key, value string) error {
	k, err := lookup(key)
	if err != nil {
		return err
	}
	if err := k.check(value); err != nil {
		return fmt.Errorf("%w: %s=%q: %w", ErrBadValue, key, value, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.values == nil {
		s.values = map[string]string{}
	}
	s.values[key] = value
	s.tell()
	return nil
}

// Changed returns a channel that is closed at the next change of the set.
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

// tell wakes those who wait for a change; mu is held.
func (s *Set) tell() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// Get returns the value of a fault, and whether it is on.
func (s *Set) Get(key string) (value string, on bool) {
	if s == nil {
		return "", false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	value, on = s.values[key]
	return value, on
}

// Clear turns a fault off; one that is off already stays so. It returns ErrUnknownKey.
func (s *Set) Clear(key string) error {
	if _, err := lookup(key); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.values, key)
	s.tell()
	return nil
}

// All returns a copy of the faults that are on.
func (s *Set) All() map[string]string {
	all := map[string]string{}
	if s == nil {
		return all
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, v := range s.values {
		all[k] = v
	}
	return all
}

// Duration returns the value of a fault that is a duration, or 0 when it is off.
func (s *Set) Duration(key string) time.Duration {
	v, _ := s.Get(key)
	d, err := time.ParseDuration(v)
	if err != nil {
		return 0
	}
	return d
}

// Int returns the value of a fault that is a number, or 0 when it is off.
func (s *Set) Int(key string) int64 {
	v, _ := s.Get(key)
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// On reports whether a fault that is a switch is on.
func (s *Set) On(key string) bool {
	v, _ := s.Get(key)
	return v == "on"
}

func checkDuration(v string) error {
	d, err := time.ParseDuration(v)
	if err == nil && d < 0 {
		err = errors.New("must not be negative")
	}
	return err
}

func checkObject(v string) error {
	bucket, object, ok := strings.Cut(strings.TrimPrefix(v, "gs://"), "/")
	if !strings.HasPrefix(v, "gs://") || !ok || bucket == "" || object == "" {
		return errors.New("want gs://BUCKET/OBJECT")
	}
	return nil
}

func checkBucket(v string) error {
	if v == "" || strings.Contains(v, "/") {
		return errors.New("want the bucket's name alone")
	}
	return nil
}

func checkSwitch(v string) error {
	if v != "on" {
		return errors.New("want on (clear it to turn it off)")
	}
	return nil
}

func checkRate(v string) error {
	if n, err := strconv.ParseInt(v, 10, 64); err != nil || n <= 0 {
		return errors.New("want a whole number of bytes above 0")
	}
	return nil
}

// nearest returns the known key with the smallest edit distance to name.
func nearest(name string) string {
	type candidate struct {
		name     string
		distance int
	}
	var all []candidate
	for _, k := range keys {
		all = append(all, candidate{k.Name, distance(name, k.Name)})
	}
	sort.SliceStable(all, func(i, j int) bool { return all[i].distance < all[j].distance })
	return all[0].name
}

// distance is the Levenshtein distance of a and b, in bytes; of a long a only the first 100 count.
func distance(a, b string) int {
	if len(a) > 100 {
		a = a[:100]
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := diagonal
			if a[i-1] != b[j-1] {
				cost++
			}
			diagonal = row[j]
			row[j] = min(cost, row[j]+1, row[j-1]+1)
		}
	}
	return row[len(b)]
}
