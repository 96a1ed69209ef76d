package lustrefs

// Order is a line of JSON that tells a running Main something. Main answers each one with an Event.
type Order struct {
	// Behave replaces the behaviour; the answer is Applied.
	Behave *Behaviour `json:"behave,omitempty"`
	// Flush, a number that is not 0, makes all that was written count as synced, as a machine does that shuts down in
	// order; the answer is the same number. A mount that hangs answers when it does not hang any more.
	Flush int64 `json:"flush,omitempty"`
}

// Event is a line of JSON that Main prints.
type Event struct {
	Ready    bool       `json:"ready,omitempty"`   // requests are about to be answered: the first event
	Applied  *Behaviour `json:"applied,omitempty"` // in effect for every request from now on
	Flushed  int64      `json:"flushed,omitempty"`
	Counters *Counters  `json:"counters,omitempty"` // since the mount, at most once a second and at the end
	Lost     *Loss      `json:"lost,omitempty"`     // one file of a machine that died
}

// Behaviour is how a mount misbehaves, and what it may do. The zero value is a healthy file system without limits.
type Behaviour struct {
	Hang   bool `json:"hang,omitempty"`   // nothing is answered
	EIO    bool `json:"eio,omitempty"`    // everything fails
	ENOSPC bool `json:"enospc,omitempty"` // there is no room for anything more
	EXDEV  bool `json:"exdev,omitempty"`  // every directory is a project of its own
	// Capacity is how many bytes the directory may hold; 0 is no limit.
	Capacity int64 `json:"capacity,omitempty"`
	// SquashUID and SquashGID are as whom this machine's root is treated; 0 changes nothing.
	SquashUID uint32 `json:"squash_uid,omitempty"`
	SquashGID uint32 `json:"squash_gid,omitempty"`
	// LoseUnsynced makes what is not synced be lost in part when the machine dies. Seed decides which part.
	LoseUnsynced bool   `json:"lose_unsynced,omitempty"`
	Seed         uint64 `json:"seed,omitempty"`
	// Watched says that a mount of the directory loses unsynced data, this one or another: reading a file then makes
	// the others write out what they hold of it, as Lustre's locks do.
	Watched bool `json:"watched,omitempty"`
}

// Counters count what a mount did. Reads and writes of passthrough mounts are not seen.
type Counters struct {
	ReadBytes   int64 `json:"read_bytes"`
	ReadOps     int64 `json:"read_ops"`
	WriteBytes  int64 `json:"write_bytes"`
	WriteOps    int64 `json:"write_ops"`
	MetadataOps int64 `json:"metadata_ops"` // everything else
}

// Add returns the sums.
func (c Counters) Add(d Counters) Counters {
	return Counters{
		c.ReadBytes + d.ReadBytes, c.ReadOps + d.ReadOps, c.WriteBytes + d.WriteBytes, c.WriteOps + d.WriteOps,
		c.MetadataOps + d.MetadataOps,
	}
}

// Loss is what a file lost when its machine died.
type Loss struct {
	Path   string `json:"path"`   // relative to the file system, of the time of the loss
	Before int64  `json:"before"` // its size in bytes, and after the loss
	After  int64  `json:"after"`
	Bytes  int64  `json:"bytes"`  // that were written, not synced, and are lost
	Zeroed bool   `json:"zeroed"` // the lost end has become zeros; else the file is shorter
	Seed   uint64 `json:"seed"`
	Error  string `json:"error,omitempty"` // why it could not be lost as meant
}
