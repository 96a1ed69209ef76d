package policy

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/internal/clock"
)

// DefaultAudit is the audit log of sluiced, below $SLUICE_ROOT when that is set.
const DefaultAudit = "/var/log/sluice/audit.log"

// Decisions of an Entry.
const (
	Allowed = "allowed"
	Denied  = "denied"
)

// Entry is one line of the audit log. Values of users and agents may be hostile:
// they are bounded, and JSON escapes what a terminal would obey.
type Entry struct {
	// Event says what happened: "directive", "token", "enroll", …
	Event string `json:"event"`
	// Who asked: a user's name or a node's, with its number.
	Who string `json:"who"`
	// What it asked for: "read gs://B/P/".
	What     string `json:"what"`
	Decision string `json:"decision"` // Allowed or Denied
	Why      string `json:"why,omitempty"`

	Job            uint32 `json:"job,omitempty"`
	Account        string `json:"account,omitempty"` // Slurm's
	Rule           string `json:"rule,omitempty"`
	ServiceAccount string `json:"service_account,omitempty"`
}

// maxField bounds a text of an entry in bytes.
const maxField = 2 << 10

// Audit appends entries to a file of JSON lines that only root can read. A file
// that was moved away or removed by log rotation is made anew at the next entry;
// no signal is needed. All methods may be called at the same time.
type Audit struct {
	path  string
	clock clock.Clock

	mu   sync.Mutex // guards file
	file *os.File
}

// OpenAudit opens or makes the log at path and its directory. Close it.
func OpenAudit(path string, c clock.Clock) (*Audit, error) {
	a := &Audit{path: path, clock: c}
	return a, a.open()
}

// open (re)opens the file; a.mu is held, or a is not shared yet.
func (a *Audit) open() (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("audit log: %w", err)
		}
	}()
	if err := os.MkdirAll(filepath.Dir(a.path), 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(a.path, os.O_RDWR|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", a.path)
	}
	if err == nil {
		err = f.Chmod(0o600)
	}
	if err == nil {
		err = endLine(f, info.Size())
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	if a.file != nil {
		a.file.Close()
	}
	a.file = f
	return nil
}

// endLine ends a line that a crash or a full disk cut, so that the next entry
// stands on one of its own.
func endLine(f *os.File, size int64) error {
	if size == 0 {
		return nil
	}
	last := make([]byte, 1)
	if _, err := f.ReadAt(last, size-1); err != nil {
		return err
	}
	if last[0] == '\n' {
		return nil
	}
	_, err := f.Write([]byte{'\n'})
	return err
}

// Write appends e with the present time and returns when it is on disk. What may
// not go unnoticed must not happen when Write fails.
func (a *Audit) Write(e Entry) error {
	for _, p := range []*string{&e.Event, &e.Who, &e.What, &e.Decision, &e.Why, &e.Account, &e.Rule, &e.ServiceAccount} {
		*p = bounded(*p)
	}
	line, err := json.Marshal(struct {
		Time string `json:"time"`
		Entry
	}{api.FormatTime(a.clock.Now()), e})
	if err != nil {
		return fmt.Errorf("audit log: %w", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.file == nil {
		return fmt.Errorf("audit log: %w", fs.ErrClosed)
	}
	if a.rotated() {
		if err := a.open(); err != nil {
			return err
		}
	}
	if n, err := a.file.Write(append(line, '\n')); err != nil {
		if n > 0 { // a full disk: keep the next line apart
			a.file.Write([]byte{'\n'})
		}
		return fmt.Errorf("audit log: %w", err)
	}
	if err := a.file.Sync(); err != nil {
		return fmt.Errorf("audit log: %w", err)
	}
	return nil
}

// rotated reports that the path is not the open file's any more.
func (a *Audit) rotated() bool {
	open, err := a.file.Stat()
	if err != nil {
		return true
	}
	now, err := os.Lstat(a.path)
	return err != nil || !os.SameFile(open, now)
}

// Close closes the file; later entries are errors.
func (a *Audit) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.file == nil {
		return nil
	}
	err := a.file.Close()
	a.file = nil
	return err
}

// bounded cuts what is longer than maxField.
func bounded(s string) string {
	if len(s) <= maxField {
		return s
	}
	return strings.ToValidUTF8(s[:maxField], "") + "…"
}
