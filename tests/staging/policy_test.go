package staging_test

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/gcp/iam"
	"github.com/sluicehpc/sluice/policy"
)

// ask makes a call to Cloud Storage with a token and returns the status.
func (w *world) ask(token, method, path, body string) int {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), method, w.storageURL+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	resp.Body.Close()
	return resp.StatusCode
}

func list(bucket, prefix string) string {
	return "/storage/v1/b/" + bucket + "/o?prefix=" + url.QueryEscape(prefix)
}

func object(bucket, name string) string {
	return "/storage/v1/b/" + bucket + "/o/" + url.PathEscape(name) + "?alt=media"
}

// sluiced has no rights on data, and what it mints for a job is good for that
// job's prefixes alone.
func TestTokensReachOnlyTheJobsPrefixes(t *testing.T) {
	w := newWorld(t)
	w.bucket("corpus", map[string]string{"c4/a": "a", "c4x/b": "b", "secret/c": "c"})
	w.bucket("results", map[string]string{"8/other": "x"})
	w.bucket("patients", map[string]string{"trial7/x": "x"})
	w.start()
	job := callOf(7, script("stage_in source=gs://corpus/c4/ name=c4", "stage_out from=out to=gs://results/%j/ on=always"))
	if err := w.call(api.OpSetup, job, nil); err != nil {
		t.Fatal(err)
	}
	if s := w.stage(api.OpDataIn, job); s.Phase != api.StageDone {
		t.Fatalf("stage-in: %+v", s)
	}
	w.result(7, "f", "result")
	w.write("jobstate", "COMPLETED")
	if s := w.stage(api.OpDataOut, job); s.Phase != api.StageDone {
		t.Fatalf("stage-out: %+v", s)
	}
	w.mu.Lock()
	tokens := slices.Clone(w.tokens)
	w.mu.Unlock()
	if len(tokens) != 2 {
		t.Errorf("%d tokens were used, want one for each prefix", len(tokens))
	}
	reach := map[string]int{}
	for _, token := range append(tokens, w.mint(sluicedAccount).AccessToken) {
		for _, tt := range []struct{ name, method, path, body string }{
			{"list corpus/c4/", "GET", list("corpus", "c4/"), ""},
			{"list results/7/", "GET", list("results", "7/"), ""},
			{"list corpus", "GET", list("corpus", ""), ""},
			{"list corpus/c4", "GET", list("corpus", "c4"), ""},
			{"list corpus/c4x/", "GET", list("corpus", "c4x/"), ""},
			{"list corpus/secret/", "GET", list("corpus", "secret/"), ""},
			{"list results", "GET", list("results", ""), ""},
			{"list results/8/", "GET", list("results", "8/"), ""},
			{"list patients", "GET", list("patients", "trial7/"), ""},
			{"read corpus/c4/a", "GET", object("corpus", "c4/a"), ""},
			{"read corpus/c4x/b", "GET", object("corpus", "c4x/b"), ""},
			{"read corpus/secret/c", "GET", object("corpus", "secret/c"), ""},
			{"read results/7/f", "GET", object("results", "7/f"), ""},
			{"read patients", "GET", object("patients", "trial7/x"), ""},
			{"write corpus", "POST", "/upload/storage/v1/b/corpus/o?uploadType=media&name=c4/new", "x"},
			{"write results", "POST", "/upload/storage/v1/b/results/o?uploadType=media&name=7/new", "x"},
			{"delete results", "DELETE", "/storage/v1/b/results/o/" + url.PathEscape("7/f"), ""},
			{"buckets", "GET", "/storage/v1/b?project=" + project, ""},
			{"bucket", "GET", "/storage/v1/b/corpus", ""},
		} {
			switch code := w.ask(token, tt.method, tt.path, tt.body); code {
			case http.StatusOK:
				reach[tt.name]++
			case http.StatusForbidden:
			default:
				t.Errorf("%s: status %d", tt.name, code)
			}
		}
	}
	for _, name := range []string{"list corpus/c4/", "list results/7/", "read corpus/c4/a", "read results/7/f"} {
		if reach[name] != 1 {
			t.Errorf("%d tokens can %s, want one", reach[name], name)
		}
		delete(reach, name)
	}
	for name := range reach {
		t.Errorf("a token of sluiced can %s", name)
	}
}

// result leaves a file of the job's user in its directory out.
func (w *world) result(id uint32, name, data string) {
	w.t.Helper()
	dir := filepath.Join(w.env(id)["SLUICE_JOB_DIR"], "out")
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, name), []byte(data), 0o644),
		os.Chown(dir, alice, 20001), os.Chown(filepath.Join(dir, name), alice, 20001)); err != nil {
		w.t.Fatal(err)
	}
}

// reads reports whether a user can read a file.
func reads(uid, gid uint32, groups []uint32, path string) bool {
	cmd := exec.Command("cat", path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: gid, Groups: groups}}
	return cmd.Run() == nil
}

// A published dataset is its rule's group's: another user can neither read it,
// not even one of the same primary group, nor attach it by a directive.
func TestPublishedDatasetIsItsGroupsAlone(t *testing.T) {
	w := newWorld(t)
	w.bucket("patients", map[string]string{"trial7/record": "secret"})
	w.start()
	text := script("stage_in source=gs://patients/trial7/ name=trial7")
	job := callOf(1, text)
	job.Account = "trial"
	if err := w.call(api.OpSetup, job, nil); err != nil {
		t.Fatal(err)
	}
	if s := w.stage(api.OpDataIn, job); s.Phase != api.StageDone {
		t.Fatalf("stage-in: %+v", s)
	}
	path := filepath.Join(w.env(1)["SLUICE_DATA_TRIAL7"], "record")
	if !reads(alice, 20001, []uint32{20001, trial}, path) {
		t.Error("the job's user cannot read it")
	}
	for name, gid := range map[string]uint32{"another user": 20002, "another user of the same primary group": 20001} {
		if reads(bob, gid, []uint32{gid}, path) {
			t.Errorf("%s can read it", name)
		}
		// Nor by the version's own path, or that of a gate that is not there.
		for _, other := range []string{filepath.Join(filepath.Dir(filepath.Dir(filepath.Dir(path))), "..", filepath.Base(filepath.Dir(filepath.Dir(path))), "record"),
			filepath.Join(filepath.Dir(filepath.Dir(path)), fmt.Sprint(gid), "record")} {
			if reads(bob, gid, []uint32{gid}, other) {
				t.Errorf("%s can read it as %s", name, other)
			}
		}
	}
	for _, tt := range []struct {
		name, account string
		uid, gid      uint32
	}{
		{"not in the rule's account", "research", alice, 20001},
		{"not in the rule's group", "trial", bob, 20002},
		{"not in the group, with alice's", "trial", bob, 20001},
	} {
		other := callOf(9, text)
		other.UID, other.GID, other.Account = tt.uid, tt.gid, tt.account
		if err := w.call(api.OpSetup, other, nil); api.CodeOf(err) != api.CodeDenied || !strings.Contains(err.Error(), "refused by policy") {
			t.Errorf("%s: setup %v, want a refusal", tt.name, err)
		}
		if s := w.stage(api.OpDataIn, other); s.Phase != api.StageFailed {
			t.Errorf("%s: data_in after the refusal: %+v, want failed", tt.name, s)
		}
		if n := len(w.job(9).Transfers); n != 0 {
			t.Errorf("%s: %d transfers are attached", tt.name, n)
		}
	}
}

// auditLines reads a file of the audit log.
func auditLines(t *testing.T, path string) []policy.Entry {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var all []policy.Entry
	for line := range strings.Lines(string(data)) {
		var e struct {
			Time string
			policy.Entry
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil || e.Time == "" {
			t.Fatalf("audit line %q: %v", line, err)
		}
		all = append(all, e.Entry)
	}
	return all
}

// Every decision is in the audit log, once, over kills of the daemon and the
// log's rotation; users cannot read it.
func TestAuditLogOfRealJobs(t *testing.T) {
	w := newWorld(t)
	w.bucket("corpus", map[string]string{"c4/a": "a"})
	w.bucket("results", nil)
	w.start()
	log := filepath.Join(w.dir, "log", "audit.log")
	run := func(id uint32) {
		t.Helper()
		job := callOf(id, script("stage_in source=gs://corpus/c4/ name=c4", "stage_out from=out to=gs://results/%j/ on=always"))
		for range 2 {
			if err := w.call(api.OpSetup, job, nil); err != nil {
				t.Fatal(err)
			}
		}
		if s := w.stage(api.OpDataIn, job); s.Phase != api.StageDone {
			t.Fatalf("stage-in: %+v", s)
		}
		w.kill()
		w.result(id, "f", "result")
		w.write("jobstate", "COMPLETED")
		if s := w.stage(api.OpDataOut, job); s.Phase != api.StageDone {
			t.Fatalf("stage-out: %+v", s)
		}
	}
	run(1)
	if err := w.call(api.OpSetup, callOf(2, script("stage_in source=gs://patients/trial7/ name=x")), nil); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("setup: %v, want a refusal", err)
	}
	if err := os.Rename(log, log+".1"); err != nil {
		t.Fatal(err)
	}
	run(3)
	words := func(path string) string {
		var b strings.Builder
		for _, e := range auditLines(t, path) {
			fmt.Fprintln(&b, e.Job, e.Who, e.Account, e.What, e.Decision, e.Rule, e.ServiceAccount)
		}
		return b.String()
	}
	want := fmt.Sprintf("1 alice (uid 10001) research read gs://corpus/c4/ allowed policy[0] %s\n"+
		"1 alice (uid 10001) research write gs://results/1/ allowed policy[0] %s\n"+
		"2 alice (uid 10001) research read gs://patients/trial7/ denied  \n", dataAccount, dataAccount)
	if got := words(log + ".1"); got != want {
		t.Errorf("before the rotation:\n%swant:\n%s", got, want)
	}
	want = fmt.Sprintf("3 alice (uid 10001) research read gs://corpus/c4/ allowed policy[0] %s\n"+
		"3 alice (uid 10001) research write gs://results/3/ allowed policy[0] %s\n", dataAccount, dataAccount)
	if got := words(log); got != want {
		t.Errorf("after the rotation:\n%swant:\n%s", got, want)
	}
	for _, path := range []string{log, log + ".1"} {
		if reads(alice, 20001, []uint32{20001}, path) {
			t.Errorf("a user can read %s", path)
		}
	}
}

// With any one permission of the documented roles missing, `sluice status` names
// it, and what needs it fails with its name; all else goes its way.
func TestEveryPermissionIsNamedWhenItIsMissing(t *testing.T) {
	const deadline = time.Minute // for each step of the path
	// Where the main path stumbles over it; "" where it does not: then the status
	// alone tells.
	where := map[string]string{
		"compute.instances.create":            "nodes",
		"compute.instances.list":              "nodes",
		"compute.instances.setLabels":         "nodes",
		"compute.instances.setMetadata":       "nodes",
		"compute.instances.setServiceAccount": "nodes",
		"compute.disks.create":                "nodes",
		"compute.images.useReadOnly":          "nodes",
		"compute.subnetworks.use":             "nodes",
		"compute.zoneOperations.get":          "nodes",
		"compute.instances.delete":            "delete",
		"compute.instances.get":               "", // asked when an agent enrols
		"lustre.instances.get":                "stage-in",
		"lustre.instances.importData":         "stage-in",
		"lustre.operations.get":               "stage-in",
		"lustre.instances.exportData":         "stage-out",
		"lustre.operations.list":              "", // asked after a crash
		"lustre.operations.cancel":            "", // asked when a job is cancelled
		// Of accounts.
		"data iam.serviceAccounts.getAccessToken": "setup",
		"data iam.serviceAccounts.actAs":          "stage-in",
		"nodes iam.serviceAccounts.actAs":         "nodes",
	}
	type missing struct {
		role        string
		permissions []iam.Permission
		name        string
		place       string // where
	}
	var all []missing
	for _, p := range iam.ControllerPermissions {
		all = append(all, missing{"controller", iam.ControllerPermissions, p.Name, p.Name})
	}
	for _, p := range iam.DataAccountPermissions {
		all = append(all, missing{"data", iam.DataAccountPermissions, p.Name, "data " + p.Name})
	}
	for _, p := range iam.NodeAccountPermissions {
		all = append(all, missing{"nodes", iam.NodeAccountPermissions, p.Name, "nodes " + p.Name})
	}
	all = append(all, missing{})
	for _, m := range all {
		t.Run(cmp.Or(strings.TrimSpace(m.role+" "+m.name), "nothing missing"), func(t *testing.T) {
			t.Parallel() // it waits more than it works
			w := newWorld(t)
			w.bucket("corpus", map[string]string{"c4/a": "a"})
			w.bucket("results", nil)
			if m.role != "" {
				w.role(m.role, m.permissions, m.name)
			}
			w.start()
			// step runs a part of the path; what it says when it fails, must name the permission
			// if the part is where it is needed.
			failed := ""
			step := func(name string, run func() string) {
				t.Helper()
				if failed != "" && name != "nodes" && name != "delete" {
					return
				}
				began := time.Now()
				message := run()
				if took := time.Since(began); took > deadline {
					t.Errorf("%s took %v", name, took)
				}
				switch {
				case where[m.place] == name:
					if !strings.Contains(message, m.name) {
						t.Errorf("%s says %q, want the name of %s", name, message, m.name)
					}
					failed = name
				case message != "":
					t.Errorf("%s: %s", name, message)
				}
			}
			if _, ok := where[m.place]; !ok && m.role != "" {
				t.Errorf("this test does not know where %s is needed", m.place)
			}
			status := func() api.Status {
				var s api.Status
				if err := w.call(api.OpStatus, nil, &s); err != nil {
					t.Fatal(err)
				}
				return s
			}
			if m.role != "" {
				w.until("the status names the permission", func() string {
					s := status()
					for _, l := range s.Lacks {
						if !strings.HasPrefix(l, m.name+" on ") {
							t.Fatalf("the status names %q", l)
						}
					}
					if len(s.Lacks) > 0 {
						return ""
					}
					return "nothing is said to be missing"
				})
			}
			job := callOf(7, script("stage_in source=gs://corpus/c4/ name=c4", "stage_out from=out to=gs://results/%j/ on=always"))
			step("setup", func() string {
				if err := w.call(api.OpSetup, job, nil); err != nil {
					return err.Error()
				}
				return ""
			})
			step("stage-in", func() string {
				if s := w.stage(api.OpDataIn, job); s.Phase != api.StageDone {
					return s.Message
				}
				return ""
			})
			step("nodes", func() string {
				if err := w.call(api.OpNodeResume, api.Resume{Nodes: []string{"n1"}}, nil); err != nil {
					return err.Error()
				}
				reason := ""
				w.until("the node is made, or it is said why not", func() string {
					n := w.node("n1")
					if reason = n.Reason; n.State == "booting" || reason != "" && n.State == "requested" {
						return ""
					}
					return n.State + " " + n.Reason
				})
				return reason
			})
			step("stage-out", func() string {
				w.result(7, "f", "result")
				w.write("jobstate", "COMPLETED")
				if s := w.stage(api.OpDataOut, job); s.Phase != api.StageDone {
					return s.Message
				}
				return ""
			})
			step("delete", func() string {
				if where[m.place] == "nodes" {
					return "" // there is none
				}
				if err := w.call(api.OpNodeSuspend, api.NodeNames{Nodes: []string{"n1"}}, nil); err != nil {
					return err.Error()
				}
				reason := ""
				w.until("the node is gone, or it is said why not", func() string {
					n := w.node("n1")
					if reason = n.Reason; n.State == "absent" || reason != "" {
						return ""
					}
					return n.State
				})
				return reason
			})
			if failed != where[m.place] {
				t.Errorf("the path went on over %q", where[m.place])
			}
			if m.role == "" {
				if s := status(); len(s.Lacks) != 0 {
					t.Errorf("with the whole role the status says that %v is missing", s.Lacks)
				}
			}
		})
	}
}

// What the data's account or Managed Lustre's own lack is named, too.
func TestRightsOnDataThatAreMissingAreNamed(t *testing.T) {
	const onProject = "projects/" + project
	onAccount := onProject + "/serviceAccounts/" + dataAccount
	for _, tt := range []struct {
		name           string
		resource       string // whose policy changes
		role, instead  string // "": none
		setup, in, out []string
	}{
		{name: "the data's account may not list", resource: onProject, role: iam.ObjectUser,
			setup: []string{"script:2:25: gs://corpus/c4/: the bucket may not be read as " + dataAccount, "storage.objects.list"}},
		{name: "Managed Lustre may not act as it", resource: onAccount, role: "roles/iam.serviceAccountTokenCreator",
			in: []string{"gs://corpus/c4/: the import failed", "iam.serviceAccounts.getAccessToken"}},
		{name: "it may only read", resource: onProject, role: iam.ObjectUser, instead: iam.ObjectViewer,
			out: []string{"gs://results/7/: ", "not exported", "storage.objects.create"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.bucket("corpus", map[string]string{"c4/a": "a"})
			w.bucket("results", nil)
			p, err := w.iam.GetPolicy(tt.resource, 3)
			if err != nil {
				t.Fatal(err)
			}
			for i := range p.Bindings {
				if p.Bindings[i].Role == tt.role {
					p.Bindings[i].Role = cmp.Or(tt.instead, p.Bindings[i].Role)
					if tt.instead == "" {
						p.Bindings[i].Members = nil
					}
				}
			}
			if _, err := w.iam.SetPolicy(tt.resource, p); err != nil {
				t.Fatal(err)
			}
			w.start()
			says := func(step, got string, want []string) (failed bool) {
				t.Helper()
				for _, words := range want {
					if !strings.Contains(got, words) {
						t.Errorf("%s says %q, want %q", step, got, words)
					}
				}
				if len(want) == 0 && got != "" {
					t.Errorf("%s: %s", step, got)
				}
				return got != ""
			}
			job := callOf(7, script("stage_in source=gs://corpus/c4/ name=c4", "stage_out from=out to=gs://results/%j/ on=always"))
			message := ""
			if err := w.call(api.OpSetup, job, nil); err != nil {
				message = err.Error()
			}
			if says("setup", message, tt.setup) {
				return
			}
			if says("stage-in", w.stage(api.OpDataIn, job).Message, tt.in) {
				return
			}
			w.result(7, "f", "result")
			w.write("jobstate", "COMPLETED")
			says("stage-out", w.stage(api.OpDataOut, job).Message, tt.out)
		})
	}
}

// until repeats a look until it says "".
func (w *world) until(what string, look func() string) {
	w.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		got := look()
		if got == "" {
			return
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("waited a minute for: %s; it is: %s", what, got)
		}
	}
}

func (w *world) node(name string) api.Node {
	w.t.Helper()
	var list api.Nodes
	if err := w.call(api.OpNodeList, nil, &list); err != nil {
		w.t.Fatal(err)
	}
	for _, n := range list.Nodes {
		if n.Name == name {
			return n
		}
	}
	w.t.Fatalf("no node %s in %+v", name, list)
	return api.Node{}
}
