package controller_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/gcp/storage"
	"github.com/sluicehpc/sluice/policy"
	"github.com/sluicehpc/sluice/slurm/scontrol"
)

// strictPolicy has a rule for an account, one for a user, and one with a group.
const strictPolicy = `policy:
  - {accounts: [research], read: ["gs://corpus/c4/"], write: ["gs://results/runs/"], service_account: ` + dataAccount + `}
  - {users: [bob], read: ["gs://corpus/bob/"], service_account: ` + dataAccount + `}
  - {accounts: [medicine], read: ["gs://trial7/"], service_account: ` + dataAccount + `, group: trial}
`

func stageIn(url string) string {
	return "#!/bin/sh\n#SLUICE stage_in source=" + url + " name=x\n"
}

func stageOut(url string) string {
	return "#!/bin/sh\n#SLUICE stage_out from=out to=" + url + "\n"
}

// Every way around policy is refused, in sbatch where all is known there and in
// setup in any case, with the same words; and the bucket is never asked.
func TestPolicyRefuses(t *testing.T) {
	for _, tt := range []struct {
		name, script, account string
		uid                   uint32
		job                   string // its name
		early                 bool   // refused in sbatch already
		want                  string // "": allowed
	}{
		{name: "allowed", script: stageIn("gs://corpus/c4/"), uid: alice, account: "research"},
		{name: "below it", script: stageIn("gs://corpus/c4/en/"), uid: alice, account: "research"},
		{name: "another account", script: stageIn("gs://corpus/c4/"), uid: alice, account: "physics", early: true,
			want: "script:2:25: refused by policy: alice (account physics) may not read gs://corpus/c4/"},
		{name: "beside it", script: stageIn("gs://corpus/c4x/"), uid: alice, account: "research", early: true,
			want: "script:2:25: refused by policy: alice (account research) may not read gs://corpus/c4x/"},
		{name: "above it", script: stageIn("gs://corpus/"), uid: alice, account: "research", early: true, want: "may not read gs://corpus/"},
		{name: "another bucket", script: stageIn("gs://secret/c4/"), uid: alice, account: "research", early: true, want: "may not read gs://secret/c4/"},
		{name: "a bucket that nobody has", script: stageIn("gs://no-such/c4/"), uid: alice, account: "research", early: true, want: "may not read gs://no-such/c4/"},
		{name: "reading where writing is allowed", script: stageIn("gs://results/runs/"), uid: alice, account: "research", early: true, want: "may not read gs://results/runs/"},
		{name: "writing where reading is allowed", script: stageOut("gs://corpus/c4/"), uid: alice, account: "research", early: true, want: "may not write gs://corpus/c4/"},
		{name: "another user", script: stageIn("gs://corpus/bob/"), uid: alice, account: "research", early: true, want: "may not read gs://corpus/bob/"},
		{name: "the user", script: stageIn("gs://corpus/bob/"), uid: bob, account: "physics"},
		{name: "in the group", script: stageIn("gs://trial7/"), uid: alice, account: "medicine"},
		{name: "not in the group", script: stageIn("gs://trial7/"), uid: bob, account: "medicine", early: true,
			want: "bob (account medicine) may read gs://trial7/ only as a member of group trial"},

		{name: "case", script: stageIn("gs://corpus/C4/"), uid: alice, account: "research", early: true, want: "may not read gs://corpus/C4/"},
		{name: "dots, escaped", script: stageIn("gs://corpus/c4/%%2e%%2e/bob/"), uid: alice, account: "research", want: "a prefix with the character %"},
		{name: "slash, escaped", script: stageIn("gs://corpus/c4/..%%2fbob/"), uid: alice, account: "research", want: "a prefix with the character %"},
		{name: "two slashes", script: stageIn("gs://corpus/c4//en/"), uid: alice, account: "research", early: true, want: "a prefix with an empty part"},
		{name: "a glob", script: stageIn("gs://corpus/c4/*/"), uid: alice, account: "research", early: true, want: "a prefix with the character *"},
		{name: "a glob over names", script: stageIn("gs://corpus/c4/{a,b}/"), uid: alice, account: "research", early: true, want: "a prefix with the character {"},
		{name: "a quote", script: stageIn(`"gs://corpus/c4/')||('/"`), uid: alice, account: "research", early: true, want: "a prefix with the character '"},
		{name: "a symbol that expands to an allowed place", script: stageOut("gs://results/%x/"), uid: alice, account: "research", job: "runs"},
		{name: "a symbol that expands to another", script: stageOut("gs://results/%x/"), uid: alice, account: "research", job: "other", want: "may not write gs://results/other/"},
		{name: "a symbol that expands to a symbol", script: stageOut("gs://results/runs/%x/"), uid: alice, account: "research", job: "%j", want: "a prefix with the character %"},
		{name: "a symbol with slashes", script: stageOut("gs://results/runs/%x/"), uid: alice, account: "research", job: "a//b", want: "a prefix with an empty part"},
		{name: "a symbol as a bucket", script: stageIn("gs://sec%x/c4/"), uid: alice, account: "research", job: "ret", want: "may not read gs://secret/c4/"},
		{name: "a symbol below no rule", script: stageOut("gs://results/x/%j/"), uid: alice, account: "research", early: true, want: "may not write gs://results/x/"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorldWith(t, strictPolicy)
			w.mu.Lock()
			w.buckets["trial7"] = []storage.Object{{Name: "a", Size: 1}}
			w.mu.Unlock()
			v := w.must(slurmUID, api.OpJobProcess, api.JobProcess{Script: tt.script, HasUID: true, UID: tt.uid, Account: tt.account}).(api.Verdict)
			if refused := len(v.Errors) > 0; refused != tt.early || refused && !strings.Contains(v.Errors[0], tt.want) {
				t.Errorf("sbatch: %+v, want refused %v: %s", v, tt.early, tt.want)
			}
			if tt.early {
				w.waitAudit(1)
			}
			call := api.JobCall{JobID: 7, UID: tt.uid, GID: 20001, Script: tt.script, Name: "job", Account: tt.account, Partition: "main"}
			if tt.job != "" {
				call.Name = tt.job
			}
			_, err := w.as(slurmUID, api.OpSetup, call)
			if tt.want == "" {
				if err != nil {
					t.Errorf("setup: %v", err)
				}
				return
			}
			if api.CodeOf(err) != api.CodeDenied || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("setup: %v, want a refusal that says %q", err, tt.want)
			}
			if tt.early && !strings.HasPrefix(v.Errors[0], api.AsError(err).Message) && !strings.Contains(tt.name, "symbol") {
				t.Errorf("sbatch and setup use different words:\n%s\n%v", v.Errors[0], err)
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.checks != 0 {
				t.Errorf("the bucket was asked %d times", w.checks)
			}
			if last := w.audit[len(w.audit)-1]; last.Decision != policy.Denied || last.Job != 7 || last.Account != tt.account {
				t.Errorf("audit: %+v", last)
			}
		})
	}
}

// waitAudit returns the audit log once it has n entries.
func (w *world) waitAudit(n int) []policy.Entry {
	w.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		w.mu.Lock()
		got := slices.Clone(w.audit)
		w.mu.Unlock()
		if len(got) >= n {
			return got
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("%d entries in the audit log, want %d: %+v", len(got), n, got)
		}
	}
}

// A cluster without a policy serves nobody.
func TestNoPolicyDeniesEverything(t *testing.T) {
	w := newWorldWith(t, "")
	v := w.must(slurmUID, api.OpJobProcess, api.JobProcess{Script: good, HasUID: true, UID: alice, Account: "research"}).(api.Verdict)
	if len(v.Errors) != 2 || !strings.Contains(v.Errors[0], "refused by policy") {
		t.Errorf("sbatch: %+v, want two refusals", v)
	}
	if _, err := w.as(slurmUID, api.OpSetup, jobCall(7, good)); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("setup: %v, want a refusal", err)
	}
}

// Old Slurm tells sbatch's function no uid, and setup no account: setup judges
// with what Slurm's own list says.
func TestPolicyWhereSlurmTellsLittle(t *testing.T) {
	w := newWorldWith(t, strictPolicy)
	script := stageIn("gs://corpus/c4/")
	for _, in := range []api.JobProcess{{Script: script}, {Script: script, HasUID: true, UID: alice}, {Script: script, HasUID: true, UID: 4242, Account: "physics"}} {
		if v := w.must(slurmUID, api.OpJobProcess, in).(api.Verdict); len(v.Errors) != 0 || len(v.Notices) != 1 {
			t.Errorf("sbatch with %+v: %+v, want a notice", in, v)
		}
	}
	setup := func(id uint32) error {
		_, err := w.as(slurmUID, api.OpSetup, api.JobCall{JobID: id, UID: alice, GID: 20001, Script: script})
		return err
	}
	if err := setup(1); api.CodeOf(err) != api.CodeUnavailable {
		t.Errorf("a job whose account nobody tells: %v, want to be asked again", err)
	}
	w.mu.Lock()
	w.jobs[1] = scontrol.Job{ID: 1, Account: "research", Name: "x"}
	w.jobs[2] = scontrol.Job{ID: 2, Account: "physics", Name: "x"}
	w.mu.Unlock()
	if err := setup(1); err != nil {
		t.Errorf("account research: %v", err)
	}
	if err := setup(2); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("account physics: %v, want a refusal", err)
	}
}

// Each decision is in the audit log once for a run, however often Slurm asks.
func TestDecisionsAreWrittenDownOnce(t *testing.T) {
	w := newWorld(t)
	for range 3 {
		w.staged(7)
	}
	var got []string
	for _, e := range w.waitAudit(2) {
		got = append(got, fmt.Sprint(e.Event, " ", e.Who, " ", e.Account, " ", e.Job, " ", e.What, " ", e.Decision, " ", e.Rule, " ", e.ServiceAccount))
	}
	want := []string{
		"directive alice (uid 10001) research 7 read gs://corpus/c4/ allowed policy[0] " + dataAccount,
		"directive alice (uid 10001) research 7 write gs://results/7/ allowed policy[0] " + dataAccount,
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

var errAudit = errors.New("audit log: no space left on device")

// What cannot be written down does not happen.
func TestNothingIsGrantedWithoutTheAuditLog(t *testing.T) {
	w := newWorld(t)
	w.mu.Lock()
	w.auditErr = errAudit
	w.mu.Unlock()
	_, err := w.as(slurmUID, api.OpSetup, jobCall(7, good))
	if api.CodeOf(err) != api.CodeUnavailable || !strings.Contains(err.Error(), "audit log") {
		t.Errorf("setup: %v, want to be asked again for the audit log's sake", err)
	}
	w.mu.Lock()
	w.auditErr = nil
	checks := w.checks
	w.mu.Unlock()
	if checks != 0 {
		t.Errorf("the buckets were asked %d times", checks)
	}
	w.staged(7)
	w.waitAudit(2)
}

// Policy that is narrower when the job ends holds for its results.
func TestStageOutIsJudgedAgain(t *testing.T) {
	w := newWorld(t)
	w.staged(7)
	w.Config.Policy[0].Write = nil
	w.mu.Lock()
	w.jobs[7] = scontrol.Job{ID: 7, State: "STAGE_OUT"}
	w.mu.Unlock()
	w.must(slurmUID, api.OpPostRun, jobCall(7, ""))
	s := w.must(slurmUID, api.OpDataOut, api.StageCall{JobCall: jobCall(7, ""), WaitSeconds: 30}).(api.StageState)
	if s.Phase != api.StageFailed || !strings.Contains(s.Message, "refused by policy") {
		t.Errorf("stage-out: %+v, want refused", s)
	}
	if got := w.waitAudit(3)[2]; got.Decision != policy.Denied || got.What != "write gs://results/7/" {
		t.Errorf("audit: %+v", got)
	}
}

// The gate is the rule's group's, else the job's.
func TestGateIsOfTheRulesGroup(t *testing.T) {
	for _, tt := range []struct {
		name, lines string
		want        uint32
	}{
		{"the job's group", openPolicy, 20001},
		{"the rule's group", strings.Replace(openPolicy, "users:", "group: trial, users:", 1), trial},
	} {
		w := newWorldWith(t, tt.lines)
		w.staged(7)
		w.mu.Lock()
		if d := cmp.Diff([]uint32{tt.want}, w.gates); d != "" {
			t.Errorf("%s: gates (-want +got):\n%s", tt.name, d)
		}
		w.mu.Unlock()
	}
}

// An account that scontrol update changed counts from the next setup on.
func TestChangedAccountIsJudged(t *testing.T) {
	w := newWorldWith(t, strictPolicy)
	call := jobCall(7, stageIn("gs://corpus/c4/"))
	w.must(slurmUID, api.OpSetup, call)
	call.Account = "physics"
	if _, err := w.as(slurmUID, api.OpSetup, call); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("setup under another account: %v, want a refusal", err)
	}
}
