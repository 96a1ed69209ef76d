package hooks

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const someLog = `[2026-11-30T21:09:24.948] burst_buffer/lua: bb_p_job_validate: BURST_BUF: burst_buffer:
#SLUICE stage_in source=gs://data/one/ name=data
[2026-11-30T21:09:24.953] burst_buffer/lua: _print_lua_rc_msg: BURST_BUF: slurm_bb_job_process for JobId=199 returned, status=0, response=(null)
[2026-11-30T21:09:24.954] burst_buffer/lua: _run_lua_script_wrapper: BURST_BUF: slurm_bb_job_process for JobId=199 ran for usec=5090
[2026-11-30T21:09:24.954] _slurm_rpc_submit_batch_job: JobId=199 InitPrio=0 usec=5862
[2026-11-30T21:09:24.955] debug2: _slurm_rpc_node_registration complete for n1 usec=36
[2026-11-30T21:09:25.001] burst_buffer/lua: _run_lua_script_wrapper: BURST_BUF: slurm_bb_pools ran for usec=748
[2026-11-30T21:09:25.962+01:00] _slurm_rpc_submit_batch_job: JobId=200 InitPrio=4294 usec=440
`

func TestParseLog(t *testing.T) {
	want := []timing{
		{"slurm_bb_job_process", 199, 5090 * time.Microsecond},
		{"slurm_bb_pools", 0, 748 * time.Microsecond},
		{submit, 199, 5862 * time.Microsecond},
		{submit, 200, 440 * time.Microsecond},
	}
	got := parseLog(someLog)
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(timing{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]time.Duration{440 * time.Microsecond}, only(got, submit, map[uint32]bool{200: true, 7: true})); diff != "" {
		t.Errorf("submissions of some jobs (-want +got):\n%s", diff)
	}
	if got := only(got, "slurm_bb_pools", nil); len(got) != 1 {
		t.Errorf("pools: got %v, want one time", got)
	}
}

func TestParseLogLeavesOut(t *testing.T) {
	for name, line := range map[string]string{
		"a user's text":        `[2026-11-30T21:09:24.948] debug: comment: BURST_BUF: slurm_bb_pools ran for usec=1`,
		"text below a time":    `slurm_bb_paths for JobId=1 ran for usec=1`,
		"text after the time":  `[2026-11-30T21:09:25] burst_buffer/lua: f: BURST_BUF: slurm_bb_pools ran for usec=748 and more`,
		"a half line":          `[2026-11-30T21:09:25] burst_buffer/lua: f: BURST_BUF: slurm_bb_pools ran for usec=`,
		"a negative time":      `[2026-11-30T21:09:25] burst_buffer/lua: f: BURST_BUF: slurm_bb_pools ran for usec=-5`,
		"an impossible time":   `[2026-11-30T21:09:25] burst_buffer/lua: f: BURST_BUF: slurm_bb_pools ran for usec=99999999999999999999`,
		"an impossible job":    `[2026-11-30T21:09:25] burst_buffer/lua: f: BURST_BUF: slurm_bb_paths for JobId=99999999999 ran for usec=5`,
		"a refused submission": `[2026-11-30T21:09:25] _slurm_rpc_submit_batch_job: Burst Buffer request invalid`,
	} {
		if got := parseLog(line + "\n"); len(got) != 0 {
			t.Errorf("%s: got %v, want nothing", name, got)
		}
	}
}

func FuzzParseLog(f *testing.F) {
	f.Add(someLog)
	f.Fuzz(func(t *testing.T, log string) {
		for _, got := range parseLog(log) {
			if got.took < 0 || got.what == "" {
				t.Errorf("got %+v", got)
			}
		}
	})
}
