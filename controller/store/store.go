// Package store is sluiced's SQLite file: jobs, their moments, transfers,
// datasets and nodes. What a method stored survives a crash after it returned.
package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/sluicehpc/sluice/staging"
	"github.com/sluicehpc/sluice/staging/files"
)

// ErrNotFound is returned for what the store does not hold.
var ErrNotFound = errors.New("not in the store")

// Store is an open file. All methods may be called at the same time.
type Store struct {
	db   *sql.DB
	lock *os.File
	mu   sync.Mutex // one writer at a time: SQLite has no more
}

// migrations bring a file from version i to i+1. Only append.
var migrations = []string{
	`CREATE TABLE jobs (
		job_id INTEGER NOT NULL, gen INTEGER NOT NULL, uid INTEGER NOT NULL,
		active INTEGER NOT NULL, created_at INTEGER NOT NULL, doc TEXT NOT NULL,
		PRIMARY KEY (job_id, gen)) WITHOUT ROWID;
	CREATE INDEX jobs_active ON jobs (active, created_at);
	CREATE INDEX jobs_uid ON jobs (uid, created_at);
	CREATE TABLE events (
		job_id INTEGER NOT NULL, gen INTEGER NOT NULL, name TEXT NOT NULL, at INTEGER NOT NULL,
		PRIMARY KEY (job_id, gen, name)) WITHOUT ROWID;
	CREATE TABLE transfers (
		id TEXT PRIMARY KEY, kind TEXT NOT NULL, state TEXT NOT NULL, ended INTEGER NOT NULL, cancel INTEGER NOT NULL DEFAULT 0,
		fs TEXT NOT NULL, dataset TEXT NOT NULL, version TEXT NOT NULL, instance_uid TEXT NOT NULL,
		uid INTEGER NOT NULL, queued_at INTEGER NOT NULL, doc TEXT NOT NULL) WITHOUT ROWID;
	CREATE INDEX transfers_ended ON transfers (ended, queued_at);
	CREATE INDEX transfers_version ON transfers (dataset, version, fs);
	CREATE TABLE attachments (
		job_id INTEGER NOT NULL, gen INTEGER NOT NULL, kind TEXT NOT NULL, idx INTEGER NOT NULL, transfer TEXT NOT NULL,
		PRIMARY KEY (job_id, gen, kind, idx)) WITHOUT ROWID;
	CREATE INDEX attachments_transfer ON attachments (transfer);
	CREATE TABLE datasets (
		fs TEXT NOT NULL, dataset TEXT NOT NULL, version TEXT NOT NULL,
		instance_uid TEXT NOT NULL, transfer TEXT NOT NULL, doc TEXT NOT NULL,
		PRIMARY KEY (fs, dataset, version)) WITHOUT ROWID;
	CREATE TABLE nodes (name TEXT PRIMARY KEY, doc TEXT NOT NULL) WITHOUT ROWID;
	CREATE TABLE batches (request_id TEXT PRIMARY KEY, doc TEXT NOT NULL) WITHOUT ROWID;`,
	`CREATE TABLE enrolments (instance TEXT PRIMARY KEY, node TEXT NOT NULL, doc TEXT NOT NULL) WITHOUT ROWID;`,
}

// Open opens or makes the file at path, whose directory must exist or can be
// made. A second process that opens it gets an error.
func Open(ctx context.Context, path string) (*Store, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		lock.Close()
		return nil, fmt.Errorf("open store %s: another sluiced has it: %w", path, err)
	}
	// The file is made here, so that it is never readable by others.
	if f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600); err == nil {
		f.Close()
	}
	q := url.Values{"_pragma": {"journal_mode(WAL)", "synchronous(FULL)", "busy_timeout(10000)", "foreign_keys(ON)", "cache_size(-2000)"}, "_txlock": {"immediate"}}
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: path}).EscapedPath()+"?"+q.Encode())
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("open store: %w", err)
	}
	db.SetMaxOpenConns(4)
	db.SetMaxIdleConns(2)
	s := &Store{db: db, lock: lock}
	if err := s.migrate(ctx); err != nil {
		s.Close()
		return nil, fmt.Errorf("open store %s: %w", path, err)
	}
	return s, nil
}

// Close closes the file.
func (s *Store) Close() error {
	err := s.db.Close()
	s.lock.Close()
	return err
}

func (s *Store) migrate(ctx context.Context) error {
	var version int
	if err := s.db.QueryRowContext(ctx, "PRAGMA user_version").Scan(&version); err != nil {
		return err
	}
	if version > len(migrations) {
		return fmt.Errorf("it is of version %d, this sluiced knows up to %d: install the newer sluiced again", version, len(migrations))
	}
	for ; version < len(migrations); version++ {
		err := s.write(ctx, func(tx *sql.Tx) error {
			if _, err := tx.Exec(migrations[version]); err != nil {
				return err
			}
			_, err := tx.Exec(fmt.Sprintf("PRAGMA user_version = %d", version+1))
			return err
		})
		if err != nil {
			return fmt.Errorf("migrate to version %d: %w", version+1, err)
		}
	}
	return nil
}

// write runs f in a transaction.
func (s *Store) write(ctx context.Context, f func(*sql.Tx) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	// A write that began is finished even if its caller hung up.
	tx, err := s.db.BeginTx(context.WithoutCancel(ctx), nil)
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	if err := f(tx); err != nil {
		tx.Rollback()
		return err
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("store: %w", err)
	}
	return nil
}

func encode(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return "{}" // the types of this package have nothing that cannot be encoded
	}
	return string(b)
}

func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

var _ staging.Store = (*Store)(nil)

// rower is a query's result, one row or many.
type rower interface{ Scan(...any) error }

func scanTransfer(r rower) (staging.Transfer, error) {
	var t staging.Transfer
	var doc string
	var cancel bool
	if err := r.Scan(&doc, &cancel); err != nil {
		if errors.Is(err, sql.ErrNoRows) {
			err = ErrNotFound
		}
		return t, err
	}
	if err := json.Unmarshal([]byte(doc), &t); err != nil {
		return t, fmt.Errorf("store: transfer: %w", err)
	}
	t.Cancel = cancel
	return t, nil
}

func (s *Store) transfers(ctx context.Context, where string, args ...any) ([]staging.Transfer, error) {
	rows, err := s.db.QueryContext(ctx, "SELECT doc, cancel FROM transfers "+where, args...)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	defer rows.Close()
	var list []staging.Transfer
	for rows.Next() {
		t, err := scanTransfer(rows)
		if err != nil {
			return nil, err
		}
		list = append(list, t)
	}
	return list, rows.Err()
}

// ActiveTransfers returns those that have not ended, oldest first.
func (s *Store) ActiveTransfers(ctx context.Context) ([]staging.Transfer, error) {
	return s.transfers(ctx, "WHERE ended = 0 ORDER BY queued_at, id")
}

// Transfers returns a user's transfers, or everybody's, newest first.
func (s *Store) Transfers(ctx context.Context, uid uint32, all bool, limit int) ([]staging.Transfer, error) {
	return s.transfers(ctx, `WHERE ?1 OR uid = ?2 OR id IN (SELECT a.transfer FROM attachments a JOIN jobs j USING (job_id, gen) WHERE j.uid = ?2)
		ORDER BY queued_at DESC, id LIMIT ?3`, all, uid, limit)
}

// Transfer returns one, or ErrNotFound.
func (s *Store) Transfer(ctx context.Context, id string) (staging.Transfer, error) {
	return scanTransfer(s.db.QueryRowContext(ctx, "SELECT doc, cancel FROM transfers WHERE id = ?", id))
}

// CountActiveTransfers counts those that have not ended.
func (s *Store) CountActiveTransfers(ctx context.Context) (n int, err error) {
	err = s.db.QueryRowContext(ctx, "SELECT count(*) FROM transfers WHERE ended = 0").Scan(&n)
	return n, err
}

const putTransfer = `INSERT INTO transfers (id, kind, state, ended, fs, dataset, version, instance_uid, uid, queued_at, doc)
	VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
	ON CONFLICT (id) DO UPDATE SET state = excluded.state, ended = excluded.ended, instance_uid = excluded.instance_uid, doc = excluded.doc`

func saveTransfer(tx *sql.Tx, t staging.Transfer) error {
	_, err := tx.Exec(putTransfer, t.ID, string(t.Kind), string(t.State), t.State.Ended(), t.FS, t.Dataset, t.Version, t.InstanceUID, t.UID, nanos(t.QueuedAt), encode(t))
	if err != nil {
		return fmt.Errorf("store transfer %s: %w", t.ID, err)
	}
	return nil
}

// SaveTransfer stores t, but for Cancel.
func (s *Store) SaveTransfer(ctx context.Context, t staging.Transfer) error {
	return s.write(ctx, func(tx *sql.Tx) error { return saveTransfer(tx, t) })
}

// SaveCounters stores t with its counters.
func (s *Store) SaveCounters(ctx context.Context, t staging.Transfer) error {
	return s.SaveTransfer(ctx, t)
}

// Publish stores t, which is DONE, and its version.
func (s *Store) Publish(ctx context.Context, t staging.Transfer, p files.Published) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		if err := saveTransfer(tx, t); err != nil {
			return err
		}
		_, err := tx.Exec(`INSERT OR REPLACE INTO datasets (fs, dataset, version, instance_uid, transfer, doc) VALUES (?, ?, ?, ?, ?, ?)`,
			t.FS, p.Dataset, p.Version, p.InstanceUID, t.ID, encode(p))
		return err
	})
}

// ForgetDataset drops a version that is not on the file system any more.
func (s *Store) ForgetDataset(ctx context.Context, fs, dataset, version string) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.Exec("DELETE FROM datasets WHERE fs = ? AND dataset = ? AND version = ?", fs, dataset, version)
		return err
	})
}

func attach(tx *sql.Tx, index int, t staging.Transfer, id string) error {
	_, err := tx.Exec("INSERT OR REPLACE INTO attachments (job_id, gen, kind, idx, transfer) VALUES (?, ?, ?, ?, ?)", t.JobID, t.Gen, string(t.Kind), index, id)
	return err
}

// AttachStageIn implements staging.Store.
func (s *Store) AttachStageIn(ctx context.Context, index int, t staging.Transfer, create bool) (got staging.Transfer, found bool, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		got, err = scanTransfer(tx.QueryRow(`SELECT t.doc, t.cancel FROM datasets d JOIN transfers t ON t.id = d.transfer
			WHERE d.fs = ? AND d.dataset = ? AND d.version = ? AND d.instance_uid = ? AND t.state = 'DONE'`, t.FS, t.Dataset, t.Version, t.InstanceUID))
		if errors.Is(err, ErrNotFound) {
			got, err = scanTransfer(tx.QueryRow(`SELECT doc, cancel FROM transfers
				WHERE kind = 'stage_in' AND fs = ? AND dataset = ? AND version = ? AND ended = 0 AND cancel = 0 ORDER BY queued_at LIMIT 1`, t.FS, t.Dataset, t.Version))
		}
		if errors.Is(err, ErrNotFound) {
			if !create {
				return nil
			}
			got, err = t, saveTransfer(tx, t)
		}
		if err != nil {
			return err
		}
		found = true
		return attach(tx, index, t, got.ID)
	})
	return got, found, err
}

// AttachStageOut implements staging.Store. A stage-out that failed is not
// repeated by asking again: its files are kept.
func (s *Store) AttachStageOut(ctx context.Context, index int, t staging.Transfer) (got staging.Transfer, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		got, err = scanTransfer(tx.QueryRow(`SELECT t.doc, t.cancel FROM attachments a JOIN transfers t ON t.id = a.transfer
			WHERE a.job_id = ? AND a.gen = ? AND a.kind = 'stage_out' AND a.idx = ?`, t.JobID, t.Gen, index))
		if !errors.Is(err, ErrNotFound) {
			return err
		}
		got = t
		if err := saveTransfer(tx, t); err != nil {
			return err
		}
		return attach(tx, index, t, t.ID)
	})
	return got, err
}

// CancelIfUnwanted marks a transfer when no active job is attached to it, and
// says whether it is marked.
func (s *Store) CancelIfUnwanted(ctx context.Context, id string) (marked bool, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		res, err := tx.Exec(`UPDATE transfers SET cancel = 1 WHERE id = ?1 AND ended = 0 AND NOT EXISTS (
			SELECT 1 FROM attachments a JOIN jobs j USING (job_id, gen) WHERE a.transfer = ?1 AND j.active = 1)`, id)
		if err != nil {
			return err
		}
		n, err := res.RowsAffected()
		marked = n > 0
		return err
	})
	return marked, err
}

// Attached is a transfer of a job and which directive it serves.
type Attached struct {
	staging.Transfer
	Index int
	Jobs  int // attached in all
}

// JobTransfers returns a job's transfers, stage-ins first, in the script's order.
func (s *Store) JobTransfers(ctx context.Context, jobID uint32, gen int) ([]Attached, error) {
	rows, err := s.db.QueryContext(ctx, `SELECT t.doc, t.cancel, a.idx, (SELECT count(*) FROM attachments b WHERE b.transfer = t.id)
		FROM attachments a JOIN transfers t ON t.id = a.transfer WHERE a.job_id = ? AND a.gen = ? ORDER BY a.kind, a.idx`, jobID, gen)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	defer rows.Close()
	var list []Attached
	for rows.Next() {
		var a Attached
		var doc string
		if err := rows.Scan(&doc, &a.Cancel, &a.Index, &a.Jobs); err != nil {
			return nil, fmt.Errorf("store: %w", err)
		}
		cancel := a.Cancel
		if err := json.Unmarshal([]byte(doc), &a.Transfer); err != nil {
			return nil, fmt.Errorf("store: %w", err)
		}
		a.Cancel = cancel
		list = append(list, a)
	}
	return list, rows.Err()
}

// JobsOf returns the keys of the active jobs that are attached to a transfer.
func (s *Store) JobsOf(ctx context.Context, transfer string) ([]Key, error) {
	rows, err := s.db.QueryContext(ctx, `SELECT DISTINCT job_id, gen FROM attachments a JOIN jobs j USING (job_id, gen) WHERE a.transfer = ? AND j.active = 1`, transfer)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	defer rows.Close()
	var keys []Key
	for rows.Next() {
		var k Key
		if err := rows.Scan(&k.ID, &k.Gen); err != nil {
			return nil, err
		}
		keys = append(keys, k)
	}
	return keys, rows.Err()
}

// OwnersOf returns the uids of all jobs that are or were attached to a transfer,
// one for each job.
func (s *Store) OwnersOf(ctx context.Context, transfer string) ([]uint32, error) {
	rows, err := s.db.QueryContext(ctx, `SELECT j.uid FROM attachments a JOIN jobs j USING (job_id, gen) WHERE a.transfer = ?`, transfer)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	defer rows.Close()
	var uids []uint32
	for rows.Next() {
		var uid uint32
		if err := rows.Scan(&uid); err != nil {
			return nil, err
		}
		uids = append(uids, uid)
	}
	return uids, rows.Err()
}
