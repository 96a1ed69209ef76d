package prolog

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/sluicehpc/sluice/api"
)

// Moment is a job's prolog, epilog or failed prolog (verdict) on this node that sluiced has not heard of
// yet. Hooks keep one when the agent is away; the agent keeps one until sluiced
// has accepted it.
type Moment struct {
	api.JobEvent
	UID uint32 `json:"uid"`
}

// The events of a Moment.
const (
	EventProlog  = "prolog"
	EventEpilog  = "epilog"
	EventVerdict = "verdict"
)

// MaxMoments bounds the spool: with sluiced away for long, the oldest stay.
const MaxMoments = 10000

var errSpoolFull = errors.New("the spool is full")

// Keep writes m into the spool directory, one file each, whose names sort by
// time. It does not wait for the disk: a job is waiting, and a node that loses
// its power has lost the job too.
func Keep(dir string, m Moment) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	kept, err := Kept(dir)
	if err != nil {
		return err
	}
	if len(kept) >= MaxMoments {
		return errSpoolFull
	}
	// The name is made of our own words: at, event and a number.
	name := fmt.Sprintf("%s-%s-%d%s", m.At, m.Event, m.JobID, suffix)
	tmp := filepath.Join(dir, "."+name)
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, name))
}

const suffix = ".json"

// Kept returns the spool's files, oldest first. No directory is an empty spool.
func Kept(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir) // sorted by name
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var files []string
	for _, e := range entries {
		if n := e.Name(); strings.HasSuffix(n, suffix) && !strings.HasPrefix(n, ".") {
			files = append(files, filepath.Join(dir, n))
		}
	}
	return files, nil
}

// ReadMoment reads one file of the spool.
func ReadMoment(path string) (Moment, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Moment{}, err
	}
	var m Moment
	if err := json.Unmarshal(data, &m); err != nil {
		return Moment{}, fmt.Errorf("read %s: %w", path, err)
	}
	return m, nil
}
