package storage

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"time"

	raw "google.golang.org/api/storage/v1"
	_ "modernc.org/sqlite" // the index
)

// Names are BLOBs: compared byte by byte, which is Cloud Storage's order, and free to hold any character.
// An object is live while retired is 0; there is at most one live object of a name.
const schema = `
CREATE TABLE IF NOT EXISTS buckets (
	name  TEXT PRIMARY KEY,
	attrs BLOB NOT NULL            -- the bucket's whole JSON
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS objects (
	bucket         TEXT NOT NULL,
	name           BLOB NOT NULL,
	generation     INTEGER NOT NULL,
	metageneration INTEGER NOT NULL,
	size           INTEGER NOT NULL,
	crc32c         INTEGER NOT NULL,
	md5            BLOB,           -- NULL for a composite object
	components     INTEGER NOT NULL,
	created        INTEGER NOT NULL, -- times are microseconds since 1970
	updated        INTEGER NOT NULL,
	retired        INTEGER NOT NULL, -- when it became noncurrent, 0 while live
	data           TEXT NOT NULL,    -- the data file
	attrs          BLOB NOT NULL,    -- what a client may set, as JSON
	PRIMARY KEY (bucket, name, generation)
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS live_objects ON objects (bucket, name) WHERE retired = 0;
CREATE TABLE IF NOT EXISTS uploads (  -- resumable sessions
	id         TEXT PRIMARY KEY,
	bucket     TEXT NOT NULL,
	name       BLOB NOT NULL,
	data       TEXT NOT NULL,
	created    INTEGER NOT NULL,
	generation INTEGER NOT NULL,   -- of the finished object, 0 before
	request    BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS last_generation (one INTEGER PRIMARY KEY CHECK (one = 1), value INTEGER NOT NULL);
INSERT OR IGNORE INTO last_generation VALUES (1, 0);
`

// openIndex opens the SQLite database. WAL lets readers go on while a writer commits; NORMAL gives up, for speed, only
// what a crash of the whole machine could lose.
func (s *Server) openIndex() error {
	dsn := (&url.URL{
		Scheme: "file", OmitHost: true, Path: filepath.Join(s.dir, "index.db"),
		RawQuery: "_pragma=busy_timeout(10000)&_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)&_txlock=immediate",
	}).String()
	var err error
	if s.writer, err = sql.Open("sqlite", dsn); err != nil {
		return err
	}
	s.writer.SetMaxOpenConns(1)
	if _, err := s.writer.Exec(schema); err != nil {
		return err
	}
	if s.db, err = sql.Open("sqlite", dsn); err != nil {
		return err
	}
	s.db.SetMaxOpenConns(16)
	s.db.SetMaxIdleConns(16)
	return nil
}

// object is one row of objects.
type object struct {
	bucket, name               string
	generation, metageneration int64
	size                       int64
	crc32c                     uint32
	md5                        []byte
	components                 int64
	created, updated, retired  time.Time // retired is zero while live
	data                       string
	attrs                      raw.Object // only what a client may set
}

const objectColumns = `bucket, name, generation, metageneration, size, crc32c, md5, components, created, updated, retired, data, attrs`

func scanObject(row interface{ Scan(...any) error }) (*object, error) {
	var (
		o                         object
		name, attrs               []byte
		created, updated, retired int64
	)
	if err := row.Scan(&o.bucket, &name, &o.generation, &o.metageneration, &o.size, &o.crc32c, &o.md5, &o.components,
		&created, &updated, &retired, &o.data, &attrs); err != nil {
		return nil, err
	}
	o.name = string(name)
	o.created, o.updated = time.UnixMicro(created).UTC(), time.UnixMicro(updated).UTC()
	if retired != 0 {
		o.retired = time.UnixMicro(retired).UTC()
	}
	return &o, json.Unmarshal(attrs, &o.attrs)
}

// querier is a database or a transaction.
type querier interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// lookup returns a generation of an object, or its live one when generation is 0; nil when there is none.
func lookup(ctx context.Context, q querier, bucket, name string, generation int64) (*object, error) {
	query, args := `SELECT `+objectColumns+` FROM objects WHERE bucket = ? AND name = ? AND `, []any{bucket, []byte(name)}
	if generation == 0 {
		query += `retired = 0`
	} else {
		query, args = query+`generation = ?`, append(args, generation)
	}
	o, err := scanObject(q.QueryRowContext(ctx, query, args...))
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	return o, err
}

// find is lookup with an error for what does not exist.
func find(ctx context.Context, q querier, bucket, name string, generation int64) (*object, error) {
	o, err := lookup(ctx, q, bucket, name, generation)
	if err != nil || o != nil {
		return o, err
	}
	if _, err := findBucket(ctx, q, bucket); err != nil {
		return nil, err
	}
	return nil, noObject(bucket, name)
}

func findBucket(ctx context.Context, q querier, name string) (*raw.Bucket, error) {
	var attrs []byte
	err := q.QueryRowContext(ctx, `SELECT attrs FROM buckets WHERE name = ?`, name).Scan(&attrs)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, errNoBucket
	}
	if err != nil {
		return nil, err
	}
	b := new(raw.Bucket)
	return b, json.Unmarshal(attrs, b)
}

// txn is a write transaction and the data files that it leaves without an owner.
type txn struct {
	*sql.Tx
	ctx  context.Context
	now  time.Time
	dead []string
}

// update runs f in a write transaction; one runs at a time. Data files of deleted objects go after the commit, so that
// no crash can leave an object without its data.
func (s *Server) update(ctx context.Context, f func(*txn) error) error {
	tx, err := s.writer.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	t := &txn{Tx: tx, ctx: ctx, now: s.now().UTC()}
	if err := f(t); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	for _, data := range t.dead {
		// Whoever has it open reads on. A file that cannot be removed now is swept at the next start.
		os.Remove(s.dataPath(data))
	}
	return nil
}

// insert writes o as the live object of its name; the name must have none.
func (t *txn) insert(o *object) error {
	// Generations are times in microseconds, as in Cloud Storage, and never repeat, whatever the clock does.
	err := t.QueryRowContext(t.ctx, `UPDATE last_generation SET value = max(value + 1, ?) RETURNING value`, t.now.UnixMicro()).Scan(&o.generation)
	if err != nil {
		return err
	}
	o.metageneration, o.created, o.updated = 1, t.now, t.now
	attrs, err := json.Marshal(&o.attrs)
	if err != nil {
		return err
	}
	_, err = t.ExecContext(t.ctx, `INSERT INTO objects (`+objectColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?)`,
		o.bucket, []byte(o.name), o.generation, o.metageneration, o.size, o.crc32c, o.md5, o.components,
		o.created.UnixMicro(), o.updated.UnixMicro(), o.data, attrs)
	return err
}

// remove deletes one generation for good.
func (t *txn) remove(o *object) error {
	t.dead = append(t.dead, o.data)
	_, err := t.ExecContext(t.ctx, `DELETE FROM objects WHERE bucket = ? AND name = ? AND generation = ?`, o.bucket, []byte(o.name), o.generation)
	return err
}

// retire ends the live object o: it becomes noncurrent where the bucket keeps versions, else it is removed.
func (t *txn) retire(o *object, b *raw.Bucket) error {
	if b.Versioning == nil || !b.Versioning.Enabled {
		return t.remove(o)
	}
	_, err := t.ExecContext(t.ctx, `UPDATE objects SET retired = ? WHERE bucket = ? AND name = ? AND generation = ?`,
		t.now.UnixMicro(), o.bucket, []byte(o.name), o.generation)
	return err
}

// publish makes o the live object of its name in one step, if p holds. Where it fails, o's data file is still the caller's.
func (s *Server) publish(ctx context.Context, o *object, p Preconditions, also ...func(*txn) error) error {
	return s.update(ctx, func(t *txn) error {
		b, err := findBucket(ctx, t, o.bucket)
		if err != nil {
			return err
		}
		current, err := lookup(ctx, t, o.bucket, o.name, 0)
		if err != nil {
			return err
		}
		if err := p.checkObject(current); err != nil {
			return err
		}
		if current != nil {
			if err := t.retire(current, b); err != nil {
				return err
			}
		}
		if o.attrs.StorageClass == "" {
			o.attrs.StorageClass = b.StorageClass
		}
		if err := t.insert(o); err != nil {
			return err
		}
		for _, f := range also {
			if err := f(t); err != nil {
				return err
			}
		}
		return nil
	})
}

// sessionLife is how long a resumable upload may last (Cloud Storage: one week).
const sessionLife = 7 * 24 * time.Hour

// sweep removes the data files that no object and no open upload has: what a killed process was writing.
func (s *Server) sweep(ctx context.Context) error {
	if _, err := s.writer.ExecContext(ctx, `DELETE FROM uploads WHERE created < ?`, s.now().Add(-sessionLife).UnixMicro()); err != nil {
		return err
	}
	owned := map[dataID]bool{}
	rows, err := s.db.QueryContext(ctx, `SELECT data FROM objects UNION ALL SELECT data FROM uploads WHERE generation = 0`)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var data string
		if err := rows.Scan(&data); err != nil {
			return err
		}
		id, err := parseDataID(data)
		if err != nil {
			return err
		}
		owned[id] = true
	}
	if err := rows.Err(); err != nil {
		return err
	}
	for i := range 256 {
		dir := filepath.Join(s.dir, "data", fmt.Sprintf("%02x", i))
		if err := os.Mkdir(dir, 0o700); err == nil {
			continue // it was not there, so it is empty
		} else if !errors.Is(err, os.ErrExist) {
			return err
		}
		files, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, f := range files {
			if id, err := parseDataID(f.Name()); err == nil && !owned[id] {
				if err := os.Remove(filepath.Join(dir, f.Name())); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
