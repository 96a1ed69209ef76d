package e2e_test

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/oauth2"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/policy"
)

// tokenURL is where every process of a VM could get the VM's access token.
const tokenURL = "http://169.254.169.254/computeMetadata/v1/instance/service-accounts/default/token"

// askToken is a shell command that says whether the metadata server answered.
const askToken = "if curl --silent --max-time 10 --header Metadata-Flavor:Google " + tokenURL + " | grep -q access_token; then echo answered; else echo refused; fi"

func TestOnlyRootReachesTheMetadataServer(t *testing.T) {
	for user, want := range map[string]string{"root": "answered", "alice": "refused", "slurm": "refused", "nobody": "refused"} {
		if got := strings.TrimSpace(mustOnVM(t, "login", user, "", "sh", "-c", askToken)); got != want {
			t.Errorf("%s on the login VM: %s, want %s", user, got, want)
		}
	}
	// What everybody needs is served at the same address.
	mustOnVM(t, "login", "alice", "", "getent", "hosts", "controller")

	id := submit(t, "#!/bin/bash\n#SBATCH --nodes=1 --output=token-%j.out\n"+askToken+"\n")
	wait(t, "the job is over", func() (bool, string) {
		state, reason := squeue(t, id)
		return state == "COMPLETED" || state == "FAILED", state + " " + reason
	})
	if got := strings.TrimSpace(mustOnVM(t, "login", "alice", "", "cat", fmt.Sprintf("token-%d.out", id))); got != "refused" {
		t.Errorf("a job on a compute VM: %s, want refused", got)
	}
	// Somebody flushes the VM's rules.
	mustOnVM(t, "login", "root", "", "nft", "flush", "ruleset")
	wait(t, "users are kept away again", func() (bool, string) {
		got := strings.TrimSpace(mustOnVM(t, "login", "alice", "", "sh", "-c", askToken))
		return got == "refused", got
	})
}

// certificateOf is the key and certificate of a VM's agent, which root of that VM can read.
func certificateOf(t *testing.T, vm string) string {
	t.Helper()
	return mustOnVM(t, vm, "root", "", "cat", "/var/lib/sluice/agent.pem")
}

// asAgent calls sluiced from the login VM with an agent's key and certificate.
func asAgent(t *testing.T, pem, op string, body any) (json.RawMessage, *api.Error) {
	t.Helper()
	data, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	request, err := json.Marshal(api.Request{Version: api.Version, Op: op, Body: data})
	if err != nil {
		t.Fatal(err)
	}
	out := mustOnVM(t, "login", "root", pem, "sh", "-c", `f=$(mktemp) && trap 'rm -f $f' EXIT && sed '/^Instance: /,/^$/d' >$f &&
curl --silent --show-error --insecure --max-time 30 --cert $f --key $f --data-binary "$1" https://controller:8443/v1/call`, "sh", string(request))
	var resp api.Response
	if err := json.Unmarshal([]byte(out), &resp); err != nil {
		t.Fatalf("%s: %v\n%s", op, err, out)
	}
	return resp.Body, resp.Error
}

// Root of a compute VM has its agent's certificate. It speaks for whom the VM
// has a job of, and ends with the VM.
func TestAgentSpeaksForItsOwnVM(t *testing.T) {
	newBucket(t, "research-agents", texts("data/", 1, 10))
	id := submit(t, stageJob("research-agents", "while [ ! -e go ]; do sleep 0.2; done; mkdir \"$SLUICE_JOB_DIR/result\""))
	t.Cleanup(func() { onVM(t, "login", "alice", "", "rm", "-f", "go") })
	node := waitPhase(t, id, "running").Nodes[0]
	pem, login := certificateOf(t, node), certificateOf(t, "login")
	uid := func(name string) uint32 {
		t.Helper()
		var n uint32
		if _, err := fmt.Sscan(mustOnVM(t, "controller", "root", "", "id", "-u", name), &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	show, err := json.Marshal(api.JobID{JobID: id})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, pem, user string
		op              string
		want            api.Code
	}{
		{"the job's owner on its node", pem, "alice", api.OpJobShow, ""},
		{"a user without a job there", pem, "bob", api.OpJobShow, api.CodeDenied},
		{"root", pem, "root", api.OpJobShow, api.CodeDenied},
		{"SlurmUser", pem, "slurm", api.OpTeardown, api.CodeDenied},
		{"a user of the login VM", login, "alice", api.OpJobShow, ""},
		{"root of the login VM", login, "root", api.OpNodeReenrol, api.CodeDenied},
		{"SlurmUser of the login VM", login, "slurm", api.OpTeardown, api.CodeDenied},
	} {
		call := map[string]any{"uid": uid(tt.user), "node": "login", "op": tt.op, "body": json.RawMessage(show)}
		if _, refused := asAgent(t, tt.pem, api.OpAgentUser, call); tt.want == "" && refused != nil || tt.want != "" && (refused == nil || refused.Code != tt.want) {
			t.Errorf("%s: %v, want code %q", tt.name, refused, tt.want)
		}
	}
	if _, refused := asAgent(t, login, api.OpAgentJob, api.JobEvent{JobID: id, Node: node, Event: "epilog", At: api.FormatTime(time.Now())}); refused == nil || refused.Code != api.CodeDenied {
		t.Errorf("the login VM's agent ends a job: %v, want denied", refused)
	}

	// The VM is deleted; Slurm makes another one of that name when it needs it.
	mustOnVM(t, "login", "alice", "", "touch", "go")
	waitPhase(t, id, "done")
	mustOnVM(t, "controller", "root", "", "scontrol", "update", "nodename="+node, "state=power_down_force")
	wait(t, "the certificate counts no more", func() (bool, string) {
		_, refused := asAgent(t, pem, api.OpAgentReport, api.NodeReport{})
		return refused != nil && refused.Code == api.CodeUnenrolled, fmt.Sprint(refused)
	})
	wait(t, "Slurm has taken the node down", func() (bool, string) {
		out := mustOnVM(t, "controller", "root", "", "scontrol", "show", "node", node)
		return strings.Contains(out, "POWERED_DOWN"), out
	})
}

// auditLog returns the audit log's entries.
func auditLog(t *testing.T) []policy.Entry {
	t.Helper()
	var list []policy.Entry
	for line := range strings.Lines(mustOnVM(t, "controller", "root", "", "cat", policy.DefaultAudit)) {
		var e policy.Entry
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("audit log: %v: %s", err, line)
		}
		list = append(list, e)
	}
	return list
}

func showNode(t *testing.T, name string) api.Node {
	t.Helper()
	var n api.Node
	out := mustOnVM(t, "controller", "root", "", "sluice", "node", "show", "--json", name)
	if err := json.Unmarshal([]byte(out), &n); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return n
}

// A VM gets one certificate. Another key, though it comes with a genuine token of
// the VM, is refused and shown until root lets it enrol.
func TestSecondEnrolmentIsRefused(t *testing.T) {
	first := certificateOf(t, "login")
	if _, refused := asAgent(t, first, api.OpAgentReport, api.NodeReport{}); refused != nil {
		t.Fatalf("the VM's certificate: %v", refused)
	}
	mustOnVM(t, "login", "root", "", "sh", "-c", "rm /var/lib/sluice/agent.pem && systemctl restart sluice-agent")
	wait(t, "the refusal", func() (bool, string) {
		n := showNode(t, "login")
		return n.Refusal != nil && strings.Contains(n.Reason, "this VM has enrolled already, with another key"), fmt.Sprintf("%+v", n)
	})
	if !slices.ContainsFunc(auditLog(t), func(e policy.Entry) bool {
		return e.Event == "enroll" && e.Who == "login" && e.Decision == policy.Denied && strings.Contains(e.Why, "another key")
	}) {
		t.Error("the refusal is not in the audit log")
	}
	if _, refused := asAgent(t, first, api.OpAgentReport, api.NodeReport{}); refused != nil {
		t.Errorf("the VM's certificate after somebody else's attempt: %v", refused)
	}
	if out, err := onVM(t, "login", "alice", "", "sluice", "node", "reenroll", "login"); err == nil {
		t.Errorf("a user lets a VM enrol: %s", out)
	}
	mustOnVM(t, "controller", "root", "", "sluice", "node", "reenroll", "login")
	wait(t, "the VM has enrolled", func() (bool, string) {
		n := showNode(t, "login")
		return n.State == "ready" && n.Refusal == nil && n.Enrolment != nil, fmt.Sprintf("%+v", n)
	})
	if _, refused := asAgent(t, first, api.OpAgentReport, api.NodeReport{}); refused == nil || refused.Code != api.CodeUnenrolled {
		t.Errorf("the certificate from before: %v, want unenrolled", refused)
	}
	mustOnVM(t, "login", "alice", "", "sinfo", "--noheader")
}

// Restarts of the daemons, and of a VM, cost nobody an enrolment.
func TestCertificatesSurviveRestarts(t *testing.T) {
	key := showNode(t, "login").Enrolment.KeySHA256
	seen := func() string { return showNode(t, "login").SeenAt }
	again := func(what string, do func()) {
		t.Helper()
		before := seen()
		do()
		wait(t, what, func() (bool, string) {
			n := showNode(t, "login")
			return n.State == "ready" && n.SeenAt > before, fmt.Sprintf("%+v", n)
		})
		if now := showNode(t, "login").Enrolment; now == nil || now.KeySHA256 != key {
			t.Errorf("%s: enrolled with %+v, want the key %s", what, now, key)
		}
	}
	again("the agent's restart", func() { mustOnVM(t, "login", "root", "", "systemctl", "restart", "sluice-agent") })
	again("sluiced's restart", func() {
		mustOnVM(t, "controller", "root", "", "systemctl", "restart", "sluiced")
		wait(t, "sluiced answers", func() (bool, string) {
			out, err := onVM(t, "controller", "root", "", "sluice", "node", "show", "--json", "login")
			return err == nil, out
		})
	})
	again("the VM's reboot", func() {
		moveVM(t, "login", "stop", "TERMINATED")
		moveVM(t, "login", "start", "RUNNING")
		wait(t, "the VM is up", func() (bool, string) {
			out, err := onVM(t, "login", "root", "", "systemctl", "is-active", "sackd")
			return err == nil && strings.TrimSpace(out) == "active", out
		})
	})
	mustOnVM(t, "login", "alice", "", "sinfo", "--noheader")
}

// moveVM asks Compute Engine to stop or start a VM and waits until it has the status.
func moveVM(t *testing.T, name, verb, status string) {
	t.Helper()
	url := sandboxStatus(t).HostEndpoints["compute"] + "/compute/v1/projects/sluice-sandbox/zones/us-central1-a/instances/" + name
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/"+verb, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := oauth2.NewClient(t.Context(), admin(t)).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusOK {
		t.Fatalf("%s %s: %s\n%s", verb, name, resp.Status, body)
	}
	wait(t, name+" is "+status, func() (bool, string) {
		out := get(t, url)
		return strings.Contains(out, `"status": "`+status+`"`) || strings.Contains(out, `"status":"`+status+`"`), out
	})
}

// No secret is where somebody but root could read it: not in the VMs' metadata,
// not in a file, a log or a command line.
func TestSecretsAreNowhere(t *testing.T) {
	raw, err := base64.StdEncoding.DecodeString(mustOnVM(t, "controller", "root", "", "base64", "-w0", "/etc/slurm/slurm.key"))
	if err != nil || len(raw) < 64 {
		t.Fatalf("slurm.key of %d bytes: %v", len(raw), err)
	}
	var patterns []string
	add := func(p string) { patterns = append(patterns, p) }
	// Pieces, in every form in which it might lie around; a pattern holds no line break.
	for i := 0; i+12 <= len(raw) && len(patterns) < 8; i += 12 {
		if piece := string(raw[i : i+12]); !strings.ContainsAny(piece, "\n\x00") {
			add(piece)
		}
		add(base64.StdEncoding.EncodeToString(raw[i : i+12])) // 12 bytes: as in the whole
		add(hex.EncodeToString(raw[i : i+12]))
	}
	private := func(pem string) {
		t.Helper()
		_, rest, ok := strings.Cut(pem, "PRIVATE KEY-----")
		if !ok {
			t.Fatalf("no key in %q", pem)
		}
		for line := range strings.Lines(rest) {
			if line = strings.TrimSpace(line); len(line) == 64 && !strings.Contains(line, "-") {
				add(line)
				return
			}
		}
		t.Fatalf("no key in %q", pem)
	}
	vms := []string{"controller", "login"}
	private(mustOnVM(t, "controller", "root", "", "cat", "/var/lib/sluice/tls/ca.pem"))
	for _, vm := range vms {
		private(certificateOf(t, vm))
	}
	known := []string{"/etc/slurm/slurm.key", "/var/lib/sluice/agent.pem", "/var/lib/sluice/tls/ca.pem"}
	for _, vm := range vms {
		out, err := onVM(t, vm, "root", strings.Join(patterns, "\n")+"\n", "sh", "-c",
			`LC_ALL=C grep -rlaF -D skip --exclude-dir=proc --exclude-dir=sys --exclude-dir=dev --exclude-dir=lustre -f /dev/stdin / 2>/dev/null; [ $? -le 2 ]`)
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		files := strings.Fields(out)
		for _, f := range files {
			if !slices.Contains(known, f) {
				t.Errorf("%s: a secret is in %s", vm, f)
			}
			if mode := strings.TrimSpace(mustOnVM(t, vm, "root", "", "stat", "--format=%a", f)); mode != "600" {
				t.Errorf("%s: %s has mode %s, want 600", vm, f, mode)
			}
		}
		if !slices.Contains(files, "/etc/slurm/slurm.key") || !slices.Contains(files, "/var/lib/sluice/agent.pem") {
			t.Errorf("%s: found secrets in %q only: the search does not work", vm, files)
		}
		// What a user sees of others' processes, and what the daemons log. A token is a
		// word that anybody can use: those of Google's begin so.
		seen := mustOnVM(t, vm, "alice", "", "sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '") + mustOnVM(t, vm, "root", "", "journalctl")
		for _, p := range append(slices.Clone(patterns), "ya29.", "eyJhbGciOi") {
			if strings.Contains(seen, p) {
				t.Errorf("%s: a secret (%.12q…) is in a command line or the journal", vm, p)
			}
		}
		tokens, _ := onVM(t, vm, "alice", "", "sh", "-c",
			`grep -rlaE -D skip --exclude-dir=proc --exclude-dir=sys --exclude-dir=dev --exclude-dir=lustre --exclude-dir=bin --exclude-dir=libexec 'ya29\.[A-Za-z0-9._-]{20}|eyJhbGciOi[A-Za-z0-9_-]{20}' /etc /var /run /tmp /home /root /opt /usr/local 2>/dev/null`)
		if tokens = strings.TrimSpace(tokens); tokens != "" {
			t.Errorf("%s: a user reads tokens in %s", vm, tokens)
		}
	}
	metadata := get(t, sandboxStatus(t).HostEndpoints["compute"]+"/compute/v1/projects/sluice-sandbox/zones/us-central1-a/instances")
	if !strings.Contains(metadata, "sluice-fingerprint") {
		t.Fatalf("no metadata in %s", metadata)
	}
	for _, p := range append(patterns, "PRIVATE KEY", "ya29.") {
		if strings.Contains(metadata, p) {
			t.Errorf("a secret (%.12q…) is in a VM's metadata", p)
		}
	}
}
