// Package staging brings bucket prefixes onto a file system and results back:
// datasets, their versions, and the transfers that move them.
package staging

import (
	"fmt"
	"slices"
	"time"

	"github.com/sluicehpc/sluice/gcp/storage"
)

// State is how far a transfer is.
type State string

// The states of a transfer.
const (
	Queued    State = "QUEUED"
	Running   State = "RUNNING"   // the service copies
	Verifying State = "VERIFYING" // every byte is compared
	Done      State = "DONE"      // verified; a stage-in is published
	Failed    State = "FAILED"
	Cancelled State = "CANCELLED"
)

// moves are the legal ones; any other is a bug.
var moves = map[State][]State{
	Queued:    {Running, Failed, Cancelled},
	Running:   {Verifying, Queued, Failed, Cancelled}, // back to the queue: the instance was busy
	Verifying: {Done, Failed, Cancelled},
	Done:      nil,
	Failed:    nil,
	Cancelled: nil,
}

// Ended reports that nothing happens any more.
func (s State) Ended() bool { return len(moves[s]) == 0 }

// Kind is a transfer's direction.
type Kind string

const (
	StageIn  Kind = "stage_in"  // bucket to file system
	StageOut Kind = "stage_out" // file system to bucket
)

// EngineManaged is Managed Lustre's importData and exportData.
const EngineManaged = "managed"

// LevelFull is verification of every byte's checksum.
const LevelFull = "full"

// Transfer moves one prefix one way. It is stored whole at every change that a
// crash must not lose; counters are stored now and then.
type Transfer struct {
	ID     string `json:"id"`
	Kind   Kind   `json:"kind"`
	State  State  `json:"state"`
	FS     string `json:"fs"`
	Bucket string `json:"bucket"`
	Prefix string `json:"prefix"` // ends in a slash, or ""
	// Account is the service account as which the data moves.
	Account string `json:"account,omitempty"`
	// Movers are the nodes whose agents move the bytes; none where the service does.
	Movers []string `json:"movers,omitempty"`

	// Who asked first. Others may have attached.
	JobID uint32 `json:"job_id"`
	Gen   int    `json:"gen"`
	UID   uint32 `json:"uid"`
	GID   uint32 `json:"gid"`
	User  string `json:"user"`

	// Of a stage-in.
	Dataset     string `json:"dataset,omitempty"`
	Version     string `json:"version,omitempty"`
	InstanceUID string `json:"instance_uid,omitempty"`

	// Of a stage-out.
	JobDir string `json:"job_dir,omitempty"` // relative to the file system
	From   string `json:"from,omitempty"`    // relative to JobDir
	Move   bool   `json:"move,omitempty"`

	// RequestID is stored before the service is called, Operation after it.
	RequestID string    `json:"request_id,omitempty"`
	Operation string    `json:"operation,omitempty"`
	CalledAt  time.Time `json:"called_at,omitzero"` // when RequestID was made

	Attempt   int       `json:"attempt,omitempty"`   // starts that found the instance busy
	NotBefore time.Time `json:"not_before,omitzero"` // of the next start
	// Cancel is set when nobody wants the transfer any more. The store keeps it
	// apart, so that it is changed together with the attached jobs.
	Cancel bool `json:"-"`

	Objects     int64 `json:"objects"`
	Bytes       int64 `json:"bytes"`
	ObjectsDone int64 `json:"objects_done"`
	BytesDone   int64 `json:"bytes_done"`
	Verified    int64 `json:"verified"`

	QueuedAt  time.Time `json:"queued_at,omitzero"`
	StartedAt time.Time `json:"started_at,omitzero"`
	// VerifiedAt is when the copy was known to be equal.
	VerifiedAt time.Time `json:"verified_at,omitzero"`
	EndedAt    time.Time `json:"ended_at,omitzero"`

	Error string `json:"error,omitempty"`
	Hint  string `json:"hint,omitempty"`
	Note  string `json:"note,omitempty"` // what was not exported
}

// Enter changes the state, or says that the move is illegal.
func (t *Transfer) Enter(to State) error {
	if !slices.Contains(moves[t.State], to) {
		return fmt.Errorf("transfer %s: illegal move from %s to %s", t.ID, t.State, to)
	}
	t.State = to
	return nil
}

// URL is the bucket's side.
func (t *Transfer) URL() string { return t.place().String() }

func (t *Transfer) place() storage.Place {
	return storage.Place{Account: t.Account, Bucket: t.Bucket, Prefix: t.Prefix}
}
