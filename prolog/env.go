package prolog

import (
	"strconv"

	"github.com/sluicehpc/sluice/api"
)

// Call reads what Slurm says of the job in the hook's environment. Slurm's
// versions differ in which names they set, and write an unset value as "(null)".
// A uid that is not there is NoUID. ok is false without a job id.
func Call(getenv func(string) string) (call api.PrologCall, ok bool) {
	job, err := strconv.ParseUint(first(getenv, "SLURM_JOB_ID", "SLURM_JOBID"), 10, 32)
	if err != nil || job == 0 {
		return api.PrologCall{}, false
	}
	call = api.PrologCall{JobID: uint32(job), UID: NoUID, Node: first(getenv, "SLURMD_NODENAME")}
	if uid, err := strconv.ParseUint(first(getenv, "SLURM_JOB_UID", "SLURM_UID"), 10, 32); err == nil {
		call.UID = uint32(uid)
	}
	return call, true
}

// NoUID stands for a user that is not known; the kernel gives it to nobody.
const NoUID = ^uint32(0)

// first returns the first of the variables that says something.
func first(getenv func(string) string, names ...string) string {
	for _, n := range names {
		if v := getenv(n); v != "" && v != "(null)" {
			return v
		}
	}
	return ""
}
