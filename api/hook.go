package api

// Operations that Slurm's side (sluice-hook, as SlurmUser) calls on sluiced.
const (
	OpJobProcess = "bb.job_process" // JobProcess → Verdict
	OpSetup      = "bb.setup"       // JobCall → Ack
	OpDataIn     = "bb.data_in"     // StageCall → StageState
	OpPaths      = "bb.paths"       // JobCall → Environment
	OpPreRun     = "bb.pre_run"     // JobCall → Ack
	OpPostRun    = "bb.post_run"    // JobCall → Ack
	OpDataOut    = "bb.data_out"    // StageCall → StageState
	OpTeardown   = "bb.teardown"    // JobCall → Ack
	OpBBStatus   = "bb.status"      // BBStatus → Text

	OpNodeResume     = "node.resume"      // Resume → Ack
	OpNodeSuspend    = "node.suspend"     // NodeNames → Ack
	OpNodeResumeFail = "node.resume_fail" // NodeNames → Ack
)

// Ack is the empty answer.
type Ack struct{}

// JobProcess asks for a verdict on a job script while sbatch waits. UID is
// meaningless unless HasUID: Slurm 22.05 does not pass it.
type JobProcess struct {
	Script string `json:"script"`
	HasUID bool   `json:"has_uid"`
	UID    uint32 `json:"uid"`
	GID    uint32 `json:"gid"`
	// Account is the job's, "" where Slurm does not tell.
	Account string `json:"account,omitempty"`
	// File is what messages call the script; "" is "script".
	File string `json:"file,omitempty"`
}

// Verdict on a script: it is refused if Errors is not empty. Notices are for
// the user's eyes and refuse nothing.
type Verdict struct {
	Errors  []string `json:"errors,omitempty"`
	Notices []string `json:"notices,omitempty"`
}

// JobCall names a job in a burst-buffer call. Script is the job script's text
// where the call has it; Slurm passes what else it knows in the other fields,
// zero where it does not.
type JobCall struct {
	JobID     uint32   `json:"job_id"`
	UID       uint32   `json:"uid"`
	GID       uint32   `json:"gid"`
	Script    string   `json:"script,omitempty"`
	Name      string   `json:"name,omitempty"`
	Account   string   `json:"account,omitempty"`
	Partition string   `json:"partition,omitempty"`
	Nodes     []string `json:"nodes,omitempty"`
	// Hurry is set in a teardown that must not wait for stage-out.
	Hurry bool `json:"hurry,omitempty"`
}

// StageCall asks for the state of a job's stage-in or stage-out, starting it
// if it has not started; the answer may take up to WaitSeconds.
type StageCall struct {
	JobCall
	WaitSeconds float64 `json:"wait_seconds"`
}

// StagePhase is how far a job's stage-in or stage-out is.
type StagePhase string

const (
	StageBusy   StagePhase = "busy"
	StageDone   StagePhase = "done"
	StageFailed StagePhase = "failed"
)

// StageState answers a StageCall. Message is the reason that squeue shows when
// the phase is StageFailed, and progress in words while it is StageBusy.
type StageState struct {
	Phase   StagePhase `json:"phase"`
	Message string     `json:"message,omitempty"`
}

// Environment is what a job gets in addition; names match [A-Z_][A-Z0-9_]*,
// values hold no newline.
type Environment struct {
	Variables map[string]string `json:"variables"`
}

// BBStatus carries the words after `scontrol show bbstat`.
type BBStatus struct {
	Args []string `json:"args"`
}

// Text is an answer for a terminal.
type Text struct {
	Text string `json:"text"`
}

// Resume is what ResumeProgram got from Slurm: the nodes to start, and which
// job wants which.
type Resume struct {
	Nodes []string    `json:"nodes"`
	Jobs  []ResumeJob `json:"jobs,omitempty"`
	At    string      `json:"at,omitempty"` // when Slurm asked; a repeated call keeps it
}

// ResumeJob is one job of a Resume.
type ResumeJob struct {
	JobID     uint32   `json:"job_id"`
	Partition string   `json:"partition,omitempty"`
	Nodes     []string `json:"nodes"`
}

// NodeNames lists nodes of Slurm.
type NodeNames struct {
	Nodes []string `json:"nodes"`
}
