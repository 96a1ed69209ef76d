package doctor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/policy"
)

func TestStatusOfAProof(t *testing.T) {
	other := errors.New("HTTP 503")
	for _, tt := range []struct {
		name  string
		prove func(ctx context.Context, l *Lab) (string, error)
		want  Status
		text  string
	}{
		{"proved", func(context.Context, *Lab) (string, error) { return "seen\n", nil }, Proved, "seen"},
		{"refuted", func(context.Context, *Lab) (string, error) { return "", refuted("%d instead", 7) }, Refuted, "7 instead"},
		{"not applicable", func(context.Context, *Lab) (string, error) { return "", notApplicable("no GPU") }, NotApplicable, "no GPU"},
		{"another error is no refutation", func(context.Context, *Lab) (string, error) { return "", other }, NotTried, "HTTP 503"},
		{"no program can do it", nil, Manual, "only a person can do this"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := new(Lab).prove(t.Context(), Proof{ID: "x", Command: "type this", Prove: tt.prove})
			if r.Status != tt.want || r.Evidence != tt.text {
				t.Errorf("got %s %q, want %s %q", r.Status, r.Evidence, tt.want, tt.text)
			}
			if (r.Next == "type this") != (tt.want != Proved) {
				t.Errorf("%s with the command %q", r.Status, r.Next)
			}
		})
	}
}

// A proof that is stuck on a mount that hangs cannot stop the others.
func TestStuckProofIsLeftBehind(t *testing.T) {
	abandonAfter = 10 * time.Millisecond
	t.Cleanup(func() { abandonAfter = defaultAbandonAfter })
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	r := new(Lab).prove(t.Context(), Proof{ID: "x", Limit: time.Millisecond, Prove: func(context.Context, *Lab) (string, error) {
		<-release
		return "late", nil
	}})
	if r.Status != NotTried || !strings.Contains(r.Evidence, "no answer within") {
		t.Errorf("got %+v, want failed", r)
	}
}

// What was made is removed in the opposite order, after an interrupt too, and a step that fails stops none.
func TestUndo(t *testing.T) {
	var u undo
	var done []string
	step := func(name string, err error) {
		u.push("remove "+name, func(ctx context.Context) error {
			if ctx.Err() != nil {
				t.Errorf("%s: the context has ended: %v", name, ctx.Err())
			}
			done = append(done, name)
			return err
		})
	}
	step("directory", nil)
	step("VM", errors.New("HTTP 500"))
	step("operation", nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := u.unwind(ctx)
	if want := []string{"operation", "VM", "directory"}; !slices.Equal(done, want) {
		t.Errorf("done %q, want %q", done, want)
	}
	if err == nil || !strings.Contains(err.Error(), "remove VM: HTTP 500") {
		t.Errorf("the error is %v, want one that names the VM", err)
	}
	if err := u.unwind(ctx); err != nil || len(done) != 3 {
		t.Errorf("a second time: %v, %q", err, done)
	}
}

func TestSelect(t *testing.T) {
	got, err := Select([]string{"boot-time", "import-prefix"})
	if err != nil || len(got) != 2 || got[0].ID != "import-prefix" {
		t.Errorf("got %+v, %v, want the two in the table's order", got, err)
	}
	if _, err := Select([]string{"boot-tine"}); !errors.Is(err, ErrUnknownProof) || !strings.Contains(err.Error(), "did you mean boot-time?") {
		t.Errorf("got %v, want a hint", err)
	}
}

func TestBucketURL(t *testing.T) {
	for url, good := range map[string]bool{
		"gs://research-x/": true, "gs://research-x/a/b/": true,
		"gs://research-x": false, "gs://research-x/a": false, "research-x/": false, "gs://a/": false, "gs://research-x//": false, "gs://Research/": false, "": false,
	} {
		if got := bucketURL.MatchString(url); got != good {
			t.Errorf("%q is taken: %v, want %v", url, got, good)
		}
	}
}

func TestAccountFor(t *testing.T) {
	rules := policy.Policy{
		{Accounts: []string{"a"}, Read: []string{"gs://data-*/"}, ServiceAccount: "reader@p.iam.gserviceaccount.com"},
		{Users: []string{"bob"}, Read: []string{"gs://data-*/"}, Write: []string{"gs://data-*/scratch/"}, ServiceAccount: "both@p.iam.gserviceaccount.com"},
	}
	for prefix, want := range map[string]string{"scratch/x/": "both@p.iam.gserviceaccount.com", "other/": "", "": ""} {
		if got := accountFor(rules, "data-1", prefix); got != want {
			t.Errorf("of %q: %q, want %q", prefix, got, want)
		}
	}
}

func TestSlurmSettings(t *testing.T) {
	const text = `Configuration data as of 2027-01-02T03:04:05
AuthType                = auth/slurm
MpiDefault              = (null)
PrologFlags             = DeferBatch,Alloc
ResumeRate              = 0 nodes/min
ResumeTimeout           = 120 sec
SlurmUser               = slurm(64030)
SlurmctldHost[0]        = controller
SlurmctldHost[1]        = backup
TaskPlugin              = (null)
`
	have := shown(text)
	for _, tt := range []struct {
		key, value string
		want       bool
	}{
		{"AuthType", "auth/slurm", true}, {"AuthType", "auth/munge", false}, {"MpiDefault", "none", true}, {"PrologFlags", "Alloc,DeferBatch", true},
		{"PrologFlags", "Alloc", false}, {"ResumeRate", "0", true}, {"ResumeTimeout", "120", true}, {"ResumeTimeout", "12", false},
		{"SlurmUser", "slurm", true}, {"SlurmctldHost", "controller", true}, {"TaskPlugin", "task/none", true}, {"TaskPlugin", "task/cgroup", false},
	} {
		if got := sameSetting(tt.value, have[tt.key]); got != tt.want {
			t.Errorf("%s=%s is the same as %q: %v, want %v", tt.key, tt.value, have[tt.key], got, tt.want)
		}
	}
	got := settings([]byte("# comment\nAuthType=auth/slurm\n\nNodeName=n1 State=CLOUD\nPrivateData=cloud\n"))
	if d := cmp.Diff(map[string]string{"AuthType": "auth/slurm"}, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestLogErrors(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	for _, tt := range []struct{ name, log, want string }{
		{"none", "[1] slurmctld version 24.11.5 started on cluster x\n[2] error: a node is away\n", ""},
		{"one", "[1] slurmctld version 24.11.5 started on cluster x\n[2] error: _parse_next_key: Parsing error at unrecognized key: Bogus\n", "[2] error: _parse_next_key: Parsing error at unrecognized key: Bogus"},
		{"one before the last start", "[1] error: _parse_next_key: Bogus\n[2] slurmctld version 24.11.5 started on cluster x\n", ""},
	} {
		must(t, os.WriteFile(path, []byte(tt.log), 0o600))
		if got, err := logErrors(path); got != tt.want || err != nil {
			t.Errorf("%s: %q, %v, want %q", tt.name, got, err, tt.want)
		}
	}
}

func TestDifference(t *testing.T) {
	got := difference(map[string]int64{"a": 1, "b": 2, "c": 3}, map[string]int64{"a": 1, "b": 7, "d": 4})
	if want := `"b" has 7 bytes instead of 2, "c" is missing, "d" is too many`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
