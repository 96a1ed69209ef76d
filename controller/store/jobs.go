package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Key names one run of a job: a requeued job keeps its id and counts Gen up.
type Key struct {
	ID  uint32
	Gen int
}

// Phases of a job.
const (
	PhaseAccepted  = "accepted"
	PhaseStageIn   = "stage_in"
	PhaseStaged    = "staged"
	PhaseRunning   = "running"
	PhaseEnded     = "ended"
	PhaseStageOut  = "stage_out"
	PhaseDone      = "done"
	PhaseFailed    = "failed"
	PhaseCancelled = "cancelled"
	PhaseRequeued  = "requeued" // Slurm starts the job again: another run follows
)

// Job is one run of a job of Slurm.
type Job struct {
	Key
	UID       uint32 `json:"uid"`
	GID       uint32 `json:"gid"`
	User      string `json:"user"`
	Name      string `json:"name,omitempty"`
	Account   string `json:"account,omitempty"`
	Partition string `json:"partition,omitempty"`
	Script    string `json:"script"`
	ArrayJob  uint32 `json:"array_job,omitempty"`
	ArrayTask uint32 `json:"array_task,omitempty"`

	Phase  string   `json:"phase"`
	Reason string   `json:"reason,omitempty"`
	Nodes  []string `json:"nodes,omitempty"`
	Dir    string   `json:"dir,omitempty"` // relative to FS
	FS     string   `json:"fs,omitempty"`  // where Dir is

	// Active is set until the job's teardown.
	Active    bool      `json:"active"`
	CreatedAt time.Time `json:"created_at"`
	EndedAt   time.Time `json:"ended_at,omitzero"` // of the run; zero: it did not run
	// Started are the nodes whose Prolog ran.
	Started []string `json:"started,omitempty"`
	// Resumed are the nodes that were started for it.
	Resumed []string `json:"resumed,omitempty"`
	// EndState is how it ended: success, failure or requeued; "" until known.
	// EndWords say why it failed.
	EndState string `json:"end_state,omitempty"`
	EndWords string `json:"end_words,omitempty"`
	// Environment is what the job gets, set once everything is staged.
	Environment map[string]string `json:"environment,omitempty"`
	// Told are the decisions on the job's data that are in the audit log.
	Told []string `json:"told,omitempty"`
	// OutStarted is set once the stage-outs were asked for.
	OutStarted bool `json:"out_started,omitempty"`
	// OutFailed is set when a stage-out failed: the directory is kept.
	OutFailed bool `json:"out_failed,omitempty"`
	// DirRemoved is set once the directory is gone.
	DirRemoved bool `json:"dir_removed,omitempty"`
}

// Ran reports that the job's run began or is over.
func (j Job) Ran() bool { return len(j.Started) > 0 || !j.EndedAt.IsZero() }

func scanJob(r rower) (Job, error) {
	var j Job
	var doc string
	if err := r.Scan(&doc); err != nil {
		if errors.Is(err, sql.ErrNoRows) {
			err = ErrNotFound
		}
		return j, err
	}
	if err := json.Unmarshal([]byte(doc), &j); err != nil {
		return j, fmt.Errorf("store: job: %w", err)
	}
	return j, nil
}

func (s *Store) jobs(ctx context.Context, where string, args ...any) ([]Job, error) {
	rows, err := s.db.QueryContext(ctx, "SELECT doc FROM jobs "+where, args...)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	defer rows.Close()
	var list []Job
	for rows.Next() {
		j, err := scanJob(rows)
		if err != nil {
			return nil, err
		}
		list = append(list, j)
	}
	return list, rows.Err()
}

// Job returns the newest run of a job, or ErrNotFound.
func (s *Store) Job(ctx context.Context, id uint32) (Job, error) {
	return scanJob(s.db.QueryRowContext(ctx, "SELECT doc FROM jobs WHERE job_id = ? ORDER BY gen DESC LIMIT 1", id))
}

// JobRun returns one run.
func (s *Store) JobRun(ctx context.Context, k Key) (Job, error) {
	return scanJob(s.db.QueryRowContext(ctx, "SELECT doc FROM jobs WHERE job_id = ? AND gen = ?", k.ID, k.Gen))
}

// Jobs returns a user's runs, or everybody's, newest first.
func (s *Store) Jobs(ctx context.Context, uid uint32, all bool, limit int) ([]Job, error) {
	if all {
		return s.jobs(ctx, "ORDER BY created_at DESC LIMIT ?", limit)
	}
	return s.jobs(ctx, "WHERE uid = ? ORDER BY created_at DESC LIMIT ?", uid, limit)
}

// ActiveJobs returns the runs before their teardown, oldest first.
func (s *Store) ActiveJobs(ctx context.Context) ([]Job, error) {
	return s.jobs(ctx, "WHERE active = 1 ORDER BY created_at")
}

// ExpiredJobs returns the runs without teardown left to do whose directory is
// there and that ended before t.
func (s *Store) ExpiredJobs(ctx context.Context, t time.Time) ([]Job, error) {
	list, err := s.jobs(ctx, "WHERE active = 0 AND created_at < ? ORDER BY created_at", nanos(t))
	var expired []Job
	for _, j := range list {
		if !j.DirRemoved && j.Dir != "" && j.EndedAt.Before(t) {
			expired = append(expired, j)
		}
	}
	return expired, err
}

// RequeuedJobs returns the newest runs that wait for Slurm to start them again.
func (s *Store) RequeuedJobs(ctx context.Context) ([]Job, error) {
	return s.jobs(ctx, "AS j WHERE active = 0 AND json_extract(doc, '$.phase') = ? AND gen = (SELECT max(gen) FROM jobs WHERE job_id = j.job_id)", PhaseRequeued)
}

// CountActiveJobs counts the runs before their teardown.
func (s *Store) CountActiveJobs(ctx context.Context) (n int, err error) {
	err = s.db.QueryRowContext(ctx, "SELECT count(*) FROM jobs WHERE active = 1").Scan(&n)
	return n, err
}

// PutJob stores a run whole.
func (s *Store) PutJob(ctx context.Context, j Job) error {
	return s.write(ctx, func(tx *sql.Tx) error { return putJob(tx, j) })
}

func putJob(tx *sql.Tx, j Job) error {
	_, err := tx.Exec("INSERT OR REPLACE INTO jobs (job_id, gen, uid, active, created_at, doc) VALUES (?, ?, ?, ?, ?, ?)",
		j.ID, j.Gen, j.UID, j.Active, nanos(j.CreatedAt), encode(j))
	if err != nil {
		return fmt.Errorf("store job %d: %w", j.ID, err)
	}
	return nil
}

// UpdateJob changes a run in one transaction and returns it. An error of edit
// leaves it as it was.
func (s *Store) UpdateJob(ctx context.Context, k Key, edit func(*Job) error) (j Job, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		j, err = scanJob(tx.QueryRow("SELECT doc FROM jobs WHERE job_id = ? AND gen = ?", k.ID, k.Gen))
		if err != nil {
			return err
		}
		if err := edit(&j); err != nil {
			return err
		}
		return putJob(tx, j)
	})
	return j, err
}

// Event is a moment of a run.
type Event struct {
	Name string
	At   time.Time
}

// AddEvent stores a moment unless the run has it. With latest, a later one
// takes its place.
func (s *Store) AddEvent(ctx context.Context, k Key, name string, at time.Time, latest bool) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		q := "INSERT INTO events (job_id, gen, name, at) VALUES (?, ?, ?, ?) ON CONFLICT DO "
		if latest {
			q += "UPDATE SET at = max(at, excluded.at)"
		} else {
			q += "NOTHING"
		}
		_, err := tx.Exec(q, k.ID, k.Gen, name, nanos(at))
		return err
	})
}

// Events returns a run's moments in the order of their times.
func (s *Store) Events(ctx context.Context, k Key) ([]Event, error) {
	rows, err := s.db.QueryContext(ctx, "SELECT name, at FROM events WHERE job_id = ? AND gen = ? ORDER BY at, name", k.ID, k.Gen)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	defer rows.Close()
	var list []Event
	for rows.Next() {
		var e Event
		var at int64
		if err := rows.Scan(&e.Name, &at); err != nil {
			return nil, err
		}
		e.At = time.Unix(0, at).UTC()
		list = append(list, e)
	}
	return list, rows.Err()
}
