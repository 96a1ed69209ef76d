package faults

import "time"

// Entry is a line of the journal.
type Entry struct {
	Seq     int64  `json:"seq"` // counts from 1
	At      string `json:"at"`  // UTC, TimeFormat; the machine's clock, never a skewed one
	Fault   string `json:"fault"`
	Value   string `json:"value"`
	Request string `json:"request,omitempty"`
	What    string `json:"what"` // "set", "cleared", "replaced", "over", or what was done
}

// TimeFormat is that of an Entry: it sorts as text.
const TimeFormat = "2006-01-02T15:04:05.000000000Z"

// Log is the journal.
type Log struct {
	Seed    uint64  `json:"seed"`
	Entries []Entry `json:"entries"` // oldest first
}

// keepEntries is how many entries are kept; Seq shows what is missing.
const keepEntries = 10000

type journal struct {
	seq     int64
	entries []Entry
}

// note adds an entry. s.mu is held.
func (s *Set) note(f *fault, request, what string) {
	j := &s.journal
	j.seq++
	e := Entry{j.seq, time.Now().UTC().Format(TimeFormat), f.key, f.value, request, what}
	if len(j.entries) == 2*keepEntries {
		j.entries = append(j.entries[:0], j.entries[keepEntries:]...)
	}
	j.entries = append(j.entries, e)
	if s.Journal != nil {
		s.Journal(e)
	}
}

// Log returns the last entries of the journal.
func (s *Set) Log() Log {
	l := Log{Entries: []Entry{}}
	if s == nil {
		return l
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.generator("") // makes the seed
	l.Seed = s.seed
	all := s.journal.entries
	l.Entries = append(l.Entries, all[max(0, len(all)-keepEntries):]...)
	return l
}
