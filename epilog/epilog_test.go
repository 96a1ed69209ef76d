package epilog

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/prolog"
)

func hook(t *testing.T, env map[string]string) prolog.Hook {
	t.Helper()
	root, err := os.MkdirTemp("", "sluice") // a socket's path is at most 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	if err := os.MkdirAll(root+filepath.Dir(api.AgentSocket), 0o755); err != nil {
		t.Fatal(err)
	}
	h := prolog.New()
	h.Root = root
	h.Getenv = func(k string) string { return env[k] }
	return h
}

var env = map[string]string{"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "10001", "SLURMD_NODENAME": "n1"}

func TestTellsTheAgent(t *testing.T) {
	h := hook(t, env)
	l, err := local.Listen(h.Root+api.AgentSocket, 0o666)
	if err != nil {
		t.Fatal(err)
	}
	var got api.PrologCall
	go local.Serve(t.Context(), l, nil, func(_ context.Context, _ local.Peer, req api.Request) (any, error) {
		if req.Op != api.OpEpilog {
			t.Errorf("operation %q", req.Op)
		}
		return api.Ack{}, json.Unmarshal(req.Body, &got)
	})
	if code := Run(h); code != 0 {
		t.Errorf("got %d, want 0", code)
	}
	if want := (api.PrologCall{JobID: 7, UID: 10001, Node: "n1"}); got != want {
		t.Errorf("the agent got %+v, want %+v", got, want)
	}
	if files, err := prolog.Kept(h.Root + prolog.SpoolDir); err != nil || len(files) != 0 {
		t.Errorf("kept %v, %v though the agent heard", files, err)
	}
}

func TestKeepsTheMomentWithoutAnAgent(t *testing.T) {
	h := hook(t, env)
	if code := Run(h); code != 0 {
		t.Errorf("got %d, want 0", code)
	}
	files, err := prolog.Kept(h.Root + prolog.SpoolDir)
	if err != nil || len(files) != 1 {
		t.Fatalf("got %v, %v, want one", files, err)
	}
	got, err := prolog.ReadMoment(files[0])
	if err != nil {
		t.Fatal(err)
	}
	want := prolog.Moment{UID: 10001, JobEvent: api.JobEvent{JobID: 7, Node: "n1", Event: prolog.EventEpilog, At: got.At}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}

func TestNeverFails(t *testing.T) {
	h := hook(t, nil)
	if code := Run(h); code != 0 {
		t.Errorf("without a job: got %d, want 0", code)
	}
	h = hook(t, env)
	// A file where the spool should be.
	if err := os.MkdirAll(h.Root+filepath.Dir(prolog.SpoolDir), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(h.Root+prolog.SpoolDir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var said []string
	h.Say = func(s string) { said = append(said, s) }
	if code := Run(h); code != 0 || len(said) != 2 {
		t.Errorf("no spool: got %d and %q, want 0 and two lines", code, said)
	}
}
