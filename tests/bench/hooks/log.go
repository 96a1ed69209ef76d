package hooks

import (
	"regexp"
	"strconv"
	"time"
)

// submit is the What of a Timing of a whole batch submission.
const submit = "submit"

// timing is what slurmctld wrote of one call.
type timing struct {
	what string        // a burst-buffer function, "slurm_bb_paths", or submit
	job  uint32        // 0 when it is not about a job
	took time.Duration // in whole microseconds
}

// slurmctld's lines with the debug flag BurstBuffer and debug level verbose, as
// 24.11 writes them:
//
//	[…] burst_buffer/lua: _run_lua_script_wrapper: BURST_BUF: slurm_bb_paths for JobId=7 ran for usec=904
//	[…] burst_buffer/lua: _run_lua_script_wrapper: BURST_BUF: slurm_bb_pools ran for usec=748
//	[…] _slurm_rpc_submit_batch_job: JobId=7 InitPrio=0 usec=5862
//
// A line may hold text of a user's, a script's for one, so all of it has to match.
var (
	functionLine = regexp.MustCompile(`(?m)^\[[0-9T:.+-]+\] burst_buffer/lua: \w+: BURST_BUF: (slurm_bb_[a-z_]+)(?: for JobId=([0-9]+))? ran for usec=([0-9]+)$`)
	submitLine   = regexp.MustCompile(`(?m)^\[[0-9T:.+-]+\] _slurm_rpc_submit_batch_job: JobId=([0-9]+) InitPrio=[0-9]+ usec=([0-9]+)$`)
)

// parseLog finds the times in slurmctld's log: of the burst-buffer functions in
// the log's order, then of the submissions.
func parseLog(log string) []timing {
	var all []timing
	add := func(what, job, usec string) {
		var id uint64
		if job != "" {
			var err error
			if id, err = strconv.ParseUint(job, 10, 32); err != nil {
				return
			}
		}
		took, err := strconv.ParseInt(usec, 10, 40) // 12 days
		if err != nil {
			return
		}
		all = append(all, timing{what, uint32(id), time.Duration(took) * time.Microsecond})
	}
	for _, m := range functionLine.FindAllStringSubmatch(log, -1) {
		add(m[1], m[2], m[3])
	}
	for _, m := range submitLine.FindAllStringSubmatch(log, -1) {
		add(submit, m[1], m[2])
	}
	return all
}

// only returns the times of what; jobs, unless nil, are those that count.
func only(all []timing, what string, jobs map[uint32]bool) []time.Duration {
	var times []time.Duration
	for _, t := range all {
		if t.what == what && (jobs == nil || jobs[t.job]) {
			times = append(times, t.took)
		}
	}
	return times
}
