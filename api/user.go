package api

import "time"

// TimeFormat is how times are written: UTC, nanoseconds always nine digits, so
// that they sort as text.
const TimeFormat = "2006-01-02T15:04:05.000000000Z"

// FormatTime writes t in TimeFormat; the zero time is "".
func FormatTime(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(TimeFormat)
}

// Operations for people, on sluiced.sock (root: all jobs) and, vouched for by
// the VM's agent, on agent.sock (own jobs).
const (
	OpJobShow      = "job.show"      // JobID → Job
	OpJobList      = "job.list"      // JobList → Jobs
	OpTransferShow = "transfer.show" // TransferID → Transfer
	OpTransferList = "transfer.list" // JobList → Transfers
	OpNodeList     = "node.list"     // Ack → Nodes
	OpNodeShow     = "node.show"     // NodeName → Node
	OpNodeReenrol  = "node.reenroll" // root: NodeName → Ack
	OpStatus       = "status"        // Ack → Status
)

// JobID names a job of Slurm.
type JobID struct {
	JobID uint32 `json:"job_id"`
}

// JobList asks for the caller's jobs or transfers, newest first; All asks for
// everybody's (root only). Limit 0 means 100.
type JobList struct {
	All   bool `json:"all,omitempty"`
	Limit int  `json:"limit,omitempty"`
}

// TransferID names a transfer.
type TransferID struct {
	ID string `json:"id"`
}

// Moments in a job's life, in their order.
const (
	EventSubmitted       = "submitted" // sluiced first heard of the job
	EventStageInStarted  = "stage_in_started"
	EventStageInDone     = "stage_in_done" // the copy is verified
	EventResumeRequested = "resume_requested"
	EventNodesReady      = "nodes_ready" // the last of the job's nodes is ready
	EventJobStarted      = "job_started"
	EventJobEnded        = "job_ended"
	EventStageOutStarted = "stage_out_started"
	EventStageOutDone    = "stage_out_done"
)

// Job is what Sluice knows of a job.
type Job struct {
	JobID     uint32     `json:"job_id"`
	Cluster   string     `json:"cluster"`
	Name      string     `json:"name,omitempty"`
	User      string     `json:"user"`
	UID       uint32     `json:"uid"`
	Account   string     `json:"account,omitempty"`
	Partition string     `json:"partition,omitempty"`
	Phase     string     `json:"phase"` // accepted, stage_in, staged, running, ended, stage_out, done, failed, cancelled, requeued
	Reason    string     `json:"reason,omitempty"`
	EndState  string     `json:"end_state,omitempty"` // success, failure, requeued; "" while it runs
	Nodes     []string   `json:"nodes"`
	Dir       string     `json:"dir"`
	Events    []Event    `json:"events"`
	Transfers []Transfer `json:"transfers"`
}

// Event is a moment with its time in TimeFormat.
type Event struct {
	Name string `json:"name"`
	At   string `json:"at"`
}

// Jobs is a list of jobs.
type Jobs struct {
	Jobs []Job `json:"jobs"`
}

// Transfer moves one prefix one way. Bytes and Objects are totals of the
// source's listing; the Done counts are what the engine has copied so far.
type Transfer struct {
	ID           string  `json:"id"`
	Kind         string  `json:"kind"` // stage_in, stage_out
	JobID        uint32  `json:"job_id"`
	UID          uint32  `json:"uid"`
	Engine       string  `json:"engine"`
	FS           string  `json:"fs"`
	Source       string  `json:"source"`
	Destination  string  `json:"destination"`
	State        string  `json:"state"` // QUEUED, RUNNING, VERIFYING, DONE, FAILED, CANCELLED
	Objects      int64   `json:"objects"`
	Bytes        int64   `json:"bytes"`
	ObjectsDone  int64   `json:"objects_done"`
	BytesDone    int64   `json:"bytes_done"`
	Verified     int64   `json:"verified"`      // objects whose copy was compared and is equal
	VerifyLevel  string  `json:"verify_level"`  // full: CRC32C of every byte
	BytesPerSec  float64 `json:"bytes_per_sec"` // over the last seconds; 0 when idle
	ETASeconds   float64 `json:"eta_seconds"`   // -1 when unknown
	QueuedAt     string  `json:"queued_at"`
	StartedAt    string  `json:"started_at"`
	EndedAt      string  `json:"ended_at"`
	Error        string  `json:"error,omitempty"`
	Hint         string  `json:"hint,omitempty"`
	Operation    string  `json:"operation,omitempty"` // the service's operation name
	RequestID    string  `json:"request_id,omitempty"`
	AttachedJobs int     `json:"attached_jobs,omitempty"`
}

// Transfers is a list of transfers.
type Transfers struct {
	Transfers []Transfer `json:"transfers"`
}

// Node is a VM as sluiced sees it.
type Node struct {
	Name        string       `json:"name"`
	Role        Role         `json:"role"`
	State       string       `json:"state"` // absent, requested, booting, ready, not_ready, deleting
	Reason      string       `json:"reason,omitempty"`
	RequestedAt string       `json:"requested_at,omitempty"`
	ReadyAt     string       `json:"ready_at,omitempty"`
	SeenAt      string       `json:"seen_at,omitempty"`
	Mounts      []MountState `json:"mounts,omitempty"`
	Enrolment   *Enrolment   `json:"enrolment,omitempty"` // nil: its VM has not enrolled
	Refusal     *Refusal     `json:"refusal,omitempty"`   // the last one, since sluiced started
}

// Enrolment is what is known of a VM that has enrolled.
type Enrolment struct {
	Instance   string `json:"instance"` // numeric id
	EnrolledAt string `json:"enrolled_at"`
	Until      string `json:"until"`      // the end of its newest certificate
	KeySHA256  string `json:"key_sha256"` // of its public key
}

// Refusal is an enrolment of a VM that sluiced refused.
type Refusal struct {
	At    string `json:"at"`
	From  string `json:"from"` // address
	Why   string `json:"why"`
	Count int    `json:"count"` // since the VM enrolled last
}

// NodeName names a node.
type NodeName struct {
	Node string `json:"node"`
}

// Nodes is a list of nodes.
type Nodes struct {
	Nodes []Node `json:"nodes"`
}

// Status is sluiced's word about itself.
type Status struct {
	Version   string `json:"version"`
	Cluster   string `json:"cluster"`
	StartedAt string `json:"started_at"`
	Jobs      int    `json:"jobs"`
	Transfers int    `json:"transfers"` // not ended
	Nodes     int    `json:"nodes"`     // with a VM
	Address   string `json:"address"`   // of the HTTPS listener
	// Fingerprint is the SHA-256 of sluiced's certificate authority in hex, by which agents know it.
	Fingerprint string `json:"fingerprint"`
	// Lacks are the permissions that sluiced's service account needs and has not:
	// "PERMISSION on RESOURCE".
	Lacks []string `json:"lacks,omitempty"`
}
