package api

import "encoding/json"

// Operations between agents and their node's hooks (agent.sock), and between
// agents and sluiced (HTTPS). Which VM an agent speaks for, its certificate says.
const (
	OpProlog = "agent.prolog" // agent.sock: PrologCall → Readiness
	OpEpilog = "agent.epilog" // agent.sock: PrologCall → Ack

	OpAgentEnrol  = "agent.enroll" // sluiced, without a certificate: EnrolRequest → Certificate
	OpAgentRenew  = "agent.renew"  // sluiced: Ack → Certificate, for the same key
	OpAgentKeys   = "agent.keys"   // sluiced: Ack → Keys
	OpAgentReport = "agent.report" // sluiced: NodeReport → ReportAnswer
	OpAgentJob    = "agent.job"    // sluiced: JobEvent → Ack
	OpAgentUser   = "agent.user"   // sluiced: UserCall → the inner operation's answer
	OpAgentToken  = "agent.token"  // sluiced: TransferID → Token, for the nodes that move a transfer's bytes
)

// EnrolRequest asks for a VM's first certificate, or another one for the same key.
type EnrolRequest struct {
	// Token is the VM's identity token (format=full), made out to this key and cluster.
	Token   string `json:"token"`
	Request []byte `json:"request"` // certificate request, PEM
}

// Certificate is an agent's, with its authority's behind it.
type Certificate struct {
	Chain []byte `json:"chain"` // PEM
}

// Keys are what a VM needs to be part of the Slurm cluster.
type Keys struct {
	Files []KeyFile `json:"files"`
	// Services are the units that need the keys, in the order of their start;
	// slurmd, which also waits for the mounts, is not among them.
	Services []string `json:"services"`
}

// KeyFile is a secret and where it belongs on the VM.
type KeyFile struct {
	Path  string `json:"path"`  // absolute
	Owner string `json:"owner"` // user, for whom alone it is
	Data  []byte `json:"data"`
}

// Token is a short-lived access token that is good for a transfer's bucket prefix alone.
type Token struct {
	AccessToken string `json:"access_token"`
	ExpiresAt   string `json:"expires_at"`
}

// Role is what a VM is for.
type Role string

const (
	RoleController Role = "controller"
	RoleLogin      Role = "login"
	RoleCompute    Role = "compute"
)

// Valid tells whether r is one of the roles.
func (r Role) Valid() bool { return r == RoleController || r == RoleLogin || r == RoleCompute }

// MountState is one file system as a node's agent sees it.
type MountState struct {
	Name   string `json:"name"`   // fs NAME of sluice.yaml
	Source string `json:"source"` // IP@tcp:/FS
	Dir    string `json:"dir"`
	State  string `json:"state"` // lustre/probe's states: ok, not_mounted, hung, …
	Detail string `json:"detail,omitempty"`
}

// NodeReport is an agent's periodic word to sluiced, and its word at once when
// something changes. Times are RFC 3339 with nanoseconds, UTC.
type NodeReport struct {
	BootID    string       `json:"boot_id"`
	Version   string       `json:"version"` // of the binary
	StartedAt string       `json:"started_at"`
	ReadyAt   string       `json:"ready_at,omitempty"` // "" until every mount answers
	Mounts    []MountState `json:"mounts"`
	Trouble   string       `json:"trouble,omitempty"` // what else keeps the node from being ready
}

// ReportAnswer tells an agent what should be mounted on its node and how soon
// to report again.
type ReportAnswer struct {
	FileSystems []FileSystem `json:"file_systems"`
	NextSeconds float64      `json:"next_seconds"`
	// Cause is sluiced's judgement of trouble in the report: "" (none), "node",
	// "filesystem" or "unknown" (package health).
	Cause string `json:"cause,omitempty"`
	// OpenMetadata lets users reach the metadata server; normally only root may.
	OpenMetadata bool `json:"open_metadata,omitempty"`
}

// FileSystem is a Managed Lustre instance as nodes mount it.
type FileSystem struct {
	Name    string `json:"name"`
	Source  string `json:"source"` // IP@tcp:/FS; "" while the instance has none
	Dir     string `json:"dir"`
	Default bool   `json:"default,omitempty"`
	// Types are the mount types that count as this file system, normally ["lustre"].
	Types []string `json:"types"`
}

// PrologCall is a node hook's question about a job.
type PrologCall struct {
	JobID uint32 `json:"job_id"`
	UID   uint32 `json:"uid"`
	Node  string `json:"node"`
}

// Readiness answers a Prolog.
type Readiness struct {
	Ready  bool   `json:"ready"`
	Reason string `json:"reason,omitempty"`
	// Cause is whose fault it is when not ready: "node" only when sluiced
	// confirmed it, else "filesystem" or "unknown". Only "node" fails a Prolog.
	Cause string `json:"cause,omitempty"`
}

// JobEvent is a moment in a job's life on a node.
type JobEvent struct {
	JobID uint32 `json:"job_id"`
	Node  string `json:"node"`
	Event string `json:"event"` // prolog, epilog, verdict
	At    string `json:"at"`
	// Reason of a verdict: why the node itself made the job's Prolog fail.
	Reason string `json:"reason,omitempty"`
}

// UserCall is a local user's request that a VM's agent vouches for.
type UserCall struct {
	UID  uint32          `json:"uid"`
	Op   string          `json:"op"`
	Body json.RawMessage `json:"body,omitempty"`
}
