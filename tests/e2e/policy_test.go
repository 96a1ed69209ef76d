package e2e_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/policy"
)

// A bucket that policy denies is reached by no directive: sbatch refuses it, or
// setup does where only the replaced symbols tell; and it is written down.
func TestPolicyRefusesADirective(t *testing.T) {
	newBucket(t, "secret-data", texts("data/", 1, 10))
	newBucket(t, "research-policy", texts("data/", 1, 10))
	const refused = "refused by policy: alice (account research) may not read gs://secret-data/"
	for _, source := range []string{"gs://secret-data/data/", "gs://secret-data/%j/", "gs://secret-data/"} {
		out, err := trySubmit(t, "alice", "#!/bin/bash\n#SLUICE stage_in source="+source+" name=x\ntrue\n")
		if err == nil || !strings.Contains(out, "job.sh:2:25: "+refused) || !strings.Contains(out, "you may read gs://research-*/") {
			t.Errorf("sbatch with %s: %v\n%s", source, err, out)
		}
	}
	out, err := trySubmit(t, "alice", "#!/bin/bash\n#SLUICE stage_in source=gs://research-policy/data//../ name=x\ntrue\n")
	if err == nil {
		t.Errorf("sbatch took a prefix with tricks:\n%s", out)
	}

	id := submit(t, "#!/bin/bash\n#SBATCH --job-name=ret-data\n#SLUICE stage_in source=gs://sec%x/data/ name=x\ntrue\n")
	wait(t, "squeue shows the refusal", func() (bool, string) {
		state, reason := squeue(t, id)
		return state == "PENDING" && strings.Contains(reason, ": script:3:25: "+refused+"data/"), state + " " + reason
	})
	if job, err := showJob(t, id); err != nil || len(job.Transfers) != 0 {
		t.Errorf("the refused job: %+v, %v", job, err)
	}

	allowed := submit(t, stageJob("research-policy", copyAll))
	waitPhase(t, allowed, "done")
	count := map[string]int{}
	for _, e := range auditLog(t) {
		count[fmt.Sprint(e.Event, " ", e.Job, " ", e.Account, " ", e.What, " ", e.Decision, " ", e.ServiceAccount)]++
	}
	const account = "research-data@sluice-sandbox.iam.gserviceaccount.com"
	for _, want := range []string{
		"directive 0 research read gs://secret-data/data/ denied ",
		"directive 0 research read gs://secret-data/%j/ denied ",
		"directive 0 research read gs://secret-data/ denied ",
		fmt.Sprintf("directive %d research read gs://secret-data/data/ denied ", id),
		fmt.Sprintf("directive %d research read gs://research-policy/data/ allowed %s", allowed, account),
		fmt.Sprintf("directive %d research write gs://research-policy/result/%[1]d/ allowed %s", allowed, account),
	} {
		if count[want] != 1 {
			t.Errorf("the audit log has %d times %q, want once", count[want], want)
		}
	}
	if out, err := onVM(t, "controller", "alice", "", "cat", policy.DefaultAudit); err == nil {
		t.Errorf("alice can read the audit log:\n%s", out)
	}
}

// The documented roles are all that sluiced needs.
func TestNoPermissionIsMissing(t *testing.T) {
	var s api.Status
	if err := json.Unmarshal([]byte(mustOnVM(t, "controller", "root", "", "sluice", "status", "--json")), &s); err != nil {
		t.Fatal(err)
	}
	if len(s.Lacks) != 0 {
		t.Errorf("sluiced lacks %v", s.Lacks)
	}
}
