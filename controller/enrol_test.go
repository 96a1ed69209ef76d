package controller_test

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/remote"
	"github.com/sluicehpc/sluice/controller"
	"github.com/sluicehpc/sluice/gcp/compute"
	"github.com/sluicehpc/sluice/policy"
	"github.com/sluicehpc/sluice/trust"
	"github.com/sluicehpc/sluice/trust/idtoken"
)

// googleKey signs the identity tokens of these tests.
var googleKey = sync.OnceValue(func() *rsa.PrivateKey {
	k, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		panic(err)
	}
	return k
})

// googleKeys serves Google's key set and returns the endpoint.
func googleKeys(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"keys":[{"kty":"RSA","alg":"RS256","use":"sig","kid":"k1","n":%q,"e":"AQAB"}]}`,
			base64.RawURLEncoding.EncodeToString(googleKey().N.Bytes()))
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// node is a VM and its agent's credentials.
type node struct {
	w    *world
	vm   compute.Instance
	cred *trust.Credentials
	path string
}

// boot makes a VM of the cluster.
func (w *world) boot(name string, role api.Role, id uint64) *node {
	w.t.Helper()
	vm := compute.Instance{ID: id, Name: name, Status: "RUNNING", Zone: "us-central1-a", Created: time.Now().Add(-time.Minute).Truncate(time.Millisecond),
		Labels: map[string]string{"sluice-cluster": "c"}, Metadata: map[string]string{"sluice-role": string(role)}}
	w.mu.Lock()
	w.vms = slices.DeleteFunc(w.vms, func(v compute.Instance) bool { return v.Name == name })
	w.vms = append(w.vms, vm)
	w.mu.Unlock()
	n := &node{w: w, vm: vm, path: filepath.Join(w.t.TempDir(), "agent.pem")}
	n.newKey()
	return n
}

func (n *node) newKey() {
	n.w.t.Helper()
	os.Remove(n.path)
	var err error
	if n.cred, err = trust.LoadCredentials(n.path, strconv.FormatUint(n.vm.ID, 10)); err != nil {
		n.w.t.Fatal(err)
	}
}

func (n *node) request() (request []byte, keyHash string) {
	n.w.t.Helper()
	request, keyHash, err := n.cred.Request()
	if err != nil {
		n.w.t.Fatal(err)
	}
	return request, keyHash
}

// token is the VM's identity token for its key, after a change.
func (n *node) token(change func(claims, vm map[string]any)) string {
	n.w.t.Helper()
	_, keyHash := n.request()
	now := time.Now()
	vm := map[string]any{"instance_id": strconv.FormatUint(n.vm.ID, 10), "instance_name": n.vm.Name, "zone": "us-central1-a",
		"project_id": "pp", "project_number": 42, "instance_creation_timestamp": n.vm.Created.Unix()}
	claims := map[string]any{"iss": idtoken.Issuer, "aud": trust.Audience(n.w.Authority.Fingerprint(), keyHash),
		"iat": now.Unix(), "exp": now.Add(time.Hour).Unix(), "google": map[string]any{"compute_engine": vm}}
	if change != nil {
		change(claims, vm)
	}
	token := jwt.NewWithClaims(jwt.SigningMethodRS256, jwt.MapClaims(claims))
	token.Header["kid"] = "k1"
	text, err := token.SignedString(googleKey())
	if err != nil {
		n.w.t.Fatal(err)
	}
	return text
}

// enrolWith asks for a certificate with that token and keeps it.
func (n *node) enrolWith(token string) error {
	n.w.t.Helper()
	request, _ := n.request()
	return n.w.enrol(n.cred, token, request)
}

func (n *node) enrol() error { n.w.t.Helper(); return n.enrolWith(n.token(nil)) }

func (w *world) enrol(cred *trust.Credentials, token string, req []byte) error {
	out, err := w.Enrol(w.t.Context(), "10.0.0.9", request(api.OpAgentEnrol, api.EnrolRequest{Token: token, Request: req}))
	if err != nil {
		return err
	}
	return cred.Accept(out.(api.Certificate).Chain, w.Authority.Fingerprint())
}

// certificate is the one that the agent would show.
func (n *node) certificate() *x509.Certificate {
	n.w.t.Helper()
	data, err := os.ReadFile(n.path)
	if err != nil {
		n.w.t.Fatal(err)
	}
	for {
		var block *pem.Block
		if block, data = pem.Decode(data); block == nil {
			n.w.t.Fatal("no certificate")
		}
		if block.Type == "CERTIFICATE" {
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				n.w.t.Fatal(err)
			}
			return cert
		}
	}
}

// call is an agent's call with its certificate.
func (n *node) call(op string, in any) (any, error) {
	n.w.t.Helper()
	h, err := n.w.Admit(n.certificate())
	if err != nil {
		return nil, err
	}
	return h(n.w.t.Context(), request(op, in))
}

// last is the newest entry of the audit log.
func (w *world) lastAudit() policy.Entry {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.audit) == 0 {
		return policy.Entry{}
	}
	return w.audit[len(w.audit)-1]
}

func (w *world) show(name string) api.Node {
	w.t.Helper()
	return w.must(0, api.OpNodeShow, api.NodeName{Node: name}).(api.Node)
}

func TestVMsOfTheClusterEnrol(t *testing.T) {
	w := newWorld(t)
	for name, role := range map[string]api.Role{"n1": api.RoleCompute, "login": api.RoleLogin, "ctl": api.RoleController} {
		n := w.boot(name, role, 4711+uint64(len(name)))
		if err := n.enrol(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if last := w.lastAudit(); last.Event != "enroll" || last.Decision != policy.Allowed || last.Who != name {
			t.Errorf("%s: audit %+v", name, last)
		}
		got, ok := n.cred.Agent(w.Authority.Fingerprint(), time.Now())
		if want := (trust.Agent{Cluster: "c", Role: role, Instance: strconv.FormatUint(n.vm.ID, 10), Node: name}); !ok || got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
		if _, err := n.call(api.OpAgentReport, api.NodeReport{}); err != nil {
			t.Errorf("%s: a report: %v", name, err)
		}
		e := w.show(name).Enrolment
		if e == nil || e.Instance != got.Instance || e.EnrolledAt == "" || e.Until <= e.EnrolledAt {
			t.Errorf("%s: node show: %+v", name, e)
		}
	}
}

// The answer was lost, or the agent was killed before it had it.
func TestSameKeyEnrolsAgain(t *testing.T) {
	w := newWorld(t)
	n := w.boot("n1", api.RoleCompute, 4711)
	if err := n.enrol(); err != nil {
		t.Fatal(err)
	}
	first := n.certificate()
	if err := n.enrol(); err != nil {
		t.Fatal(err)
	}
	if first.Equal(n.certificate()) {
		t.Error("the same certificate: want a new one for the same key")
	}
	for _, cert := range []*x509.Certificate{first, n.certificate()} {
		if _, err := w.Admit(cert); err != nil {
			t.Error(err)
		}
	}
}

// Nothing but a fresh token, that Google signed for this key and this cluster
// and for a VM that Compute Engine shows as the cluster's, enrols.
func TestWhoDoesNotEnrol(t *testing.T) {
	w := newWorld(t)
	other := newWorld(t) // another cluster: another authority
	for _, tt := range []struct {
		name  string
		token func(claims, vm map[string]any)
		cloud func(vm *compute.Instance)
		forge func(token string) string
		want  string
		code  api.Code // denied, unless said
	}{
		{name: "expired", token: func(c, _ map[string]any) { c["exp"] = time.Now().Add(-time.Minute).Unix() }, want: "expired"},
		{name: "old", token: func(c, _ map[string]any) { c["iat"] = time.Now().Add(-6 * time.Minute).Unix() }, want: "last minutes"},
		{name: "forged", forge: func(s string) string { return s[:len(s)-8] + "AAAAAAAA" }, want: "signature"},
		{name: "alg none", forge: func(s string) string {
			return base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none","kid":"k1"}`)) + "." + strings.Split(s, ".")[1] + "."
		}, want: "none"},
		{name: "another cluster's audience", token: func(c, _ map[string]any) {
			c["aud"] = strings.Replace(c["aud"].(string), w.Authority.Fingerprint(), other.Authority.Fingerprint(), 1)
		}, want: "audience"},
		{name: "somebody's own audience", token: func(c, _ map[string]any) { c["aud"] = "https://example.com" }, want: "audience"},
		{name: "another project", token: func(_, vm map[string]any) { vm["project_id"] = "elsewhere" }, want: "project elsewhere"},
		{name: "another zone", token: func(_, vm map[string]any) { vm["zone"] = "us-central1-b" }, want: "us-central1-b"},
		{name: "an instance that is not there", token: func(_, vm map[string]any) { vm["instance_name"] = "n9" }, want: "there is no VM n9"},
		{name: "another instance id", token: func(_, vm map[string]any) { vm["instance_id"] = "4712" }, want: "made anew"},
		{name: "another creation time", token: func(_, vm map[string]any) { vm["instance_creation_timestamp"] = time.Now().Unix() + 5 }, want: "made anew"},
		{name: "a VM without the label", cloud: func(vm *compute.Instance) { vm.Labels = nil }, want: "no label"},
		{name: "another cluster's VM", cloud: func(vm *compute.Instance) { vm.Labels = map[string]string{"sluice-cluster": "d"} }, want: "no label sluice-cluster=c"},
		{name: "a VM without a role", cloud: func(vm *compute.Instance) { vm.Metadata = nil }, want: "sluice-role"},
		{name: "a role that is none", cloud: func(vm *compute.Instance) { vm.Metadata = map[string]string{"sluice-role": "admin"} }, want: `"admin"`},
		{name: "a node as login VM", cloud: func(vm *compute.Instance) { vm.Metadata = map[string]string{"sluice-role": "login"} }, want: "says otherwise"},
		{name: "a stopped VM", cloud: func(vm *compute.Instance) { vm.Status = "TERMINATED" }, want: "TERMINATED"},
		{name: "a VM that is not up yet", cloud: func(vm *compute.Instance) { vm.Status = "STAGING" }, want: "STAGING", code: api.CodeUnavailable},
		{name: "Compute Engine is away", cloud: func(*compute.Instance) { w.computeErr = errors.New("no route") }, want: "no route", code: api.CodeUnavailable},
		{name: "the audit log is full", cloud: func(*compute.Instance) { w.auditErr = errors.New("disk full") }, want: "disk full", code: api.CodeUnavailable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w.mu.Lock()
			w.computeErr, w.auditErr = nil, nil
			w.mu.Unlock()
			n := w.boot("n1", api.RoleCompute, 4711)
			if tt.cloud != nil {
				w.mu.Lock()
				tt.cloud(&w.vms[len(w.vms)-1])
				w.mu.Unlock()
			}
			token := n.token(tt.token)
			if tt.forge != nil {
				token = tt.forge(token)
			}
			err := n.enrolWith(token)
			want := tt.code
			if want == "" {
				want = api.CodeDenied
			}
			if api.CodeOf(err) != want || !strings.Contains(fmt.Sprint(err), tt.want) {
				t.Errorf("got %v, want %s with %q", err, want, tt.want)
			}
			if last := w.lastAudit(); want == api.CodeDenied && (last.Event != "enroll" || last.Decision != policy.Denied || !strings.Contains(last.Why, "from 10.0.0.9: ")) {
				t.Errorf("audit: %+v, want the refusal", last)
			}
			if e := w.show("n1").Enrolment; e != nil {
				t.Errorf("enrolled: %+v", e)
			}
		})
	}
}

// A token that somebody else got hold of is bound to the agent's key.
func TestReplayedToken(t *testing.T) {
	w := newWorld(t)
	n, thief := w.boot("n1", api.RoleCompute, 4711), w.boot("n2", api.RoleCompute, 4712)
	token := n.token(nil)
	request, _ := thief.request()
	if err := w.enrol(thief.cred, token, request); api.CodeOf(err) != api.CodeDenied || !strings.Contains(err.Error(), "audience") {
		t.Errorf("with the thief's key: %v, want denied", err)
	}
	// With the victim's request the thief gets a certificate, but not the key for
	// it: the only other thing, Slurm's key, goes to who proves it.
	request, _ = n.request()
	if err := w.enrol(thief.cred, token, request); err == nil || api.CodeOf(err) == api.CodeDenied {
		t.Errorf("with the victim's request: %v, want a certificate that is of no use", err)
	}
	if err := n.enrol(); err != nil {
		t.Errorf("the victim afterwards: %v", err)
	}
	for name, in := range map[string]api.EnrolRequest{"no request": {Token: token}, "no PEM": {Token: token, Request: []byte("x")}} {
		body, _ := json.Marshal(in)
		if _, err := w.Enrol(t.Context(), "x", api.Request{Body: body}); api.CodeOf(err) != api.CodeBadRequest {
			t.Errorf("%s: %v, want bad request", name, err)
		}
	}
}

func TestSecondEnrolmentIsRefusedAndReported(t *testing.T) {
	w := newWorld(t)
	n := w.boot("n1", api.RoleCompute, 4711)
	if err := n.enrol(); err != nil {
		t.Fatal(err)
	}
	cert := n.certificate()
	n.newKey() // a process of the VM that asks the metadata server for a token of its own
	for range 3 {
		if err := n.enrol(); api.CodeOf(err) != api.CodeDenied || !strings.Contains(err.Error(), "another key") {
			t.Errorf("a second key: %v, want denied", err)
		}
	}
	if last := w.lastAudit(); last.Decision != policy.Denied || last.Who != "n1" || !strings.Contains(last.Why, "another key") {
		t.Errorf("audit: %+v", last)
	}
	denied := 0
	w.mu.Lock()
	for _, e := range w.audit {
		if e.Decision == policy.Denied {
			denied++
		}
	}
	w.mu.Unlock()
	if denied != 1 {
		t.Errorf("%d refusals in the audit log, want 1 for what repeats itself", denied)
	}
	v := w.show("n1")
	if v.Refusal == nil || v.Refusal.Count != 3 || v.Refusal.From != "10.0.0.9" || !strings.Contains(v.Reason, "enrolment refused: this VM has enrolled already") {
		t.Errorf("node show: %+v %+v", v, v.Refusal)
	}
	// The VM that has enrolled is none the worse.
	if _, err := w.Admit(cert); err != nil {
		t.Error(err)
	}

	// Root lets it enrol again; then the earlier certificate counts no more.
	if _, err := w.as(alice, api.OpNodeReenrol, api.NodeName{Node: "n1"}); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("a user: %v, want denied", err)
	}
	if _, err := w.agent("n2", api.RoleCompute, api.OpNodeReenrol, api.NodeName{Node: "n1"}); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("an agent: %v, want denied", err)
	}
	if _, err := w.as(0, api.OpNodeReenrol, api.NodeName{Node: "n2"}); api.CodeOf(err) != api.CodeNotFound {
		t.Errorf("a VM that has not enrolled: %v, want not found", err)
	}
	w.must(0, api.OpNodeReenrol, api.NodeName{Node: "n1"})
	if last := w.lastAudit(); last.Event != "revoke" || last.Who != "n1" {
		t.Errorf("audit: %+v", last)
	}
	if _, err := w.Admit(cert); api.CodeOf(err) != api.CodeUnenrolled {
		t.Errorf("the earlier certificate: %v, want unenrolled", err)
	}
	if err := n.enrol(); err != nil {
		t.Errorf("the new key: %v", err)
	}
	if _, err := w.Admit(cert); api.CodeOf(err) != api.CodeUnenrolled {
		t.Errorf("the earlier certificate beside the new one: %v, want unenrolled", err)
	}
	if v := w.show("n1"); v.Refusal != nil || v.Reason != "" {
		t.Errorf("node show afterwards: %+v", v)
	}
}

func TestCertificateEndsWithItsVM(t *testing.T) {
	w := newWorld(t)
	n1, n2, login := w.boot("n1", api.RoleCompute, 4711), w.boot("n2", api.RoleCompute, 4712), w.boot("login", api.RoleLogin, 4713)
	for _, n := range []*node{n1, n2, login} {
		if err := n.enrol(); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(what string, n *node) {
		t.Helper()
		if _, err := n.call(api.OpAgentReport, api.NodeReport{}); api.CodeOf(err) != api.CodeUnenrolled {
			t.Errorf("%s: %v, want unenrolled", what, err)
		}
	}
	// Deleted.
	w.mu.Lock()
	w.vms = slices.DeleteFunc(w.vms, func(v compute.Instance) bool { return v.Name == "n1" })
	w.mu.Unlock()
	if err := w.ForgetGone(); err != nil {
		t.Fatal(err)
	}
	refused("the certificate of a deleted VM", n1)
	if err := n1.enrol(); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("the deleted VM enrols again: %v, want denied", err)
	}
	if last := w.lastAudit(); last.Decision != policy.Denied {
		t.Errorf("audit: %+v", last)
	}
	// Made anew, under the same name: the new one replaces the old one at once.
	again := w.boot("n2", api.RoleCompute, 4799)
	if err := again.enrol(); err != nil {
		t.Fatal(err)
	}
	refused("the certificate of the VM that had the name before", n2)
	if err := n2.enrol(); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("the VM that had the name before enrols again: %v, want denied", err)
	}
	for _, n := range []*node{again, login} {
		if _, err := n.call(api.OpAgentReport, api.NodeReport{}); err != nil {
			t.Errorf("%s: %v", n.vm.Name, err)
		}
	}
	// A VM that is missing in one list only, by whatever mistake, comes back by itself.
	w.mu.Lock()
	vms := w.vms
	w.vms = nil
	w.mu.Unlock()
	if err := w.ForgetGone(); err != nil {
		t.Fatal(err)
	}
	refused("a VM that the list lacks", login)
	w.mu.Lock()
	w.vms = vms
	w.mu.Unlock()
	if err := login.enrol(); err != nil {
		t.Error(err)
	}
}

func TestCertificateEnds(t *testing.T) {
	w := newWorld(t)
	n := w.boot("n1", api.RoleCompute, 4711)
	if err := n.enrol(); err != nil {
		t.Fatal(err)
	}
	cert := n.certificate()
	w.mu.Lock()
	w.shift = time.Until(cert.NotAfter) - time.Hour
	w.mu.Unlock()
	out, err := n.call(api.OpAgentRenew, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.cred.Accept(out.(api.Certificate).Chain, w.Authority.Fingerprint()); err != nil {
		t.Fatalf("renewed: %v, want a certificate for the same key", err)
	}
	w.mu.Lock()
	w.shift += 2 * time.Hour
	w.mu.Unlock()
	// A connection may be older than that.
	if _, err := w.Admit(cert); api.CodeOf(err) != api.CodeUnenrolled {
		t.Errorf("an expired certificate: %v, want unenrolled", err)
	}
	if _, err := n.call(api.OpAgentReport, api.NodeReport{}); err != nil {
		t.Errorf("the renewed one: %v", err)
	}
}

// What sluiced knows survives its restart; a store that was lost costs an enrolment.
func TestEnrolmentsSurviveARestart(t *testing.T) {
	w := newWorld(t)
	n := w.boot("n1", api.RoleCompute, 4711)
	if err := n.enrol(); err != nil {
		t.Fatal(err)
	}
	start := func(p controller.Parts) *controller.Controller {
		c, err := controller.New(p)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		t.Cleanup(func() { cancel(); c.Wait() })
		if err := c.Start(ctx); err != nil {
			t.Fatal(err)
		}
		return c
	}
	second := &world{Controller: start(w.Parts), cloud: w.cloud, t: t, dir: w.dir}
	if _, err := second.Admit(n.certificate()); err != nil {
		t.Errorf("after a restart: %v", err)
	}
	n.w = second
	cred, path := n.cred, n.path
	n.path = filepath.Join(t.TempDir(), "other.pem")
	n.newKey()
	if err := n.enrol(); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("a second key after a restart: %v, want denied", err)
	}
	n.cred, n.path = cred, path
	if err := w.Store.DropEnrolments(t.Context(), "4711"); err != nil {
		t.Fatal(err)
	}
	n.w = &world{Controller: start(w.Parts), cloud: w.cloud, t: t, dir: w.dir}
	if _, err := n.call(api.OpAgentReport, api.NodeReport{}); api.CodeOf(err) != api.CodeUnenrolled {
		t.Errorf("with a lost store: %v, want unenrolled", err)
	}
	if err := n.enrol(); err != nil {
		t.Error(err)
	}
}

// Who an agent is comes from its certificate alone. It speaks for people, on a
// compute node only for those with a job there, and for nobody elsewhere.
func TestAgentsVouch(t *testing.T) {
	w := newWorld(t)
	w.staged(7)
	w.must(slurmUID, api.OpNodeResume, api.Resume{Nodes: []string{"n1"}, Jobs: []api.ResumeJob{{JobID: 7, Nodes: []string{"n1"}}}})
	vms := map[string]*node{}
	for i, v := range []struct {
		name string
		role api.Role
	}{{"n1", api.RoleCompute}, {"n2", api.RoleCompute}, {"login", api.RoleLogin}, {"ctl", api.RoleController}} {
		vms[v.name] = w.boot(v.name, v.role, uint64(4711+i))
		if err := vms[v.name].enrol(); err != nil {
			t.Fatal(err)
		}
	}
	show, _ := json.Marshal(api.JobID{JobID: 7})
	for _, tt := range []struct {
		name string
		uid  uint32
		node string
		op   string
		want api.Code
	}{
		{"the owner on the job's node", alice, "n1", api.OpJobShow, ""},
		{"the owner on another node", alice, "n2", api.OpJobShow, api.CodeDenied},
		{"another user on the job's node", bob, "n1", api.OpJobShow, api.CodeDenied},
		{"the owner on the login VM", alice, "login", api.OpJobShow, ""},
		{"another user there", bob, "login", api.OpJobShow, api.CodeNotFound},
		{"the owner on the controller VM", alice, "ctl", api.OpJobShow, api.CodeDenied},
		{"root on the login VM", 0, "login", api.OpJobShow, api.CodeDenied},
		{"root on the job's node", 0, "n1", api.OpJobShow, api.CodeDenied},
		{"a daemon's uid on the login VM", 999, "login", api.OpJobShow, api.CodeDenied},
		{"SlurmUser on the login VM", slurmUID, "login", api.OpSetup, api.CodeDenied},
		{"SlurmUser on the job's node", slurmUID, "n1", api.OpJobShow, api.CodeDenied},
		{"a person plays Slurm", alice, "login", api.OpTeardown, api.CodeDenied},
		{"a person plays an agent", alice, "login", api.OpAgentUser, api.CodeDenied},
		{"a person asks for Slurm's key", alice, "login", api.OpAgentKeys, api.CodeDenied},
		{"a person lets a VM enrol", alice, "login", api.OpNodeReenrol, api.CodeDenied},
	} {
		// Whatever node an older agent names beside it.
		body, _ := json.Marshal(map[string]any{"uid": tt.uid, "node": "n1", "op": tt.op, "body": json.RawMessage(show)})
		_, err := vms[tt.node].call(api.OpAgentUser, json.RawMessage(body))
		if tt.want == "" && err != nil || tt.want != "" && api.CodeOf(err) != tt.want {
			t.Errorf("%s: got %v, want code %q", tt.name, err, tt.want)
		}
	}
	if _, err := vms["n1"].call(api.OpJobShow, api.JobID{JobID: 7}); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("an agent asks for itself: %v", err)
	}
	for _, from := range []string{"n2", "login", "ctl"} {
		_, err := vms[from].call(api.OpAgentJob, api.JobEvent{JobID: 7, Node: "n1", Event: "epilog", At: api.FormatTime(time.Now())})
		if api.CodeOf(err) != api.CodeDenied {
			t.Errorf("%s ends a job on n1: %v, want denied", from, err)
		}
	}
	if _, err := w.agent("zz", api.RoleCompute, api.OpAgentReport, api.NodeReport{}); api.CodeOf(err) != api.CodeDenied {
		t.Errorf("a node that is not in sluice.yaml any more: %v", err)
	}
}

// Slurm's key goes to nodes that prove their certificate's key, never to the rest.
func TestKeysGoToWhoMayHaveThem(t *testing.T) {
	key := filepath.Join(t.TempDir(), "a.key")
	if err := os.WriteFile(key, []byte("the secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		auth, owner string
		role        api.Role
		services    []string
	}{
		{"slurm", "slurm", api.RoleCompute, []string{}},
		{"slurm", "slurm", api.RoleLogin, []string{"sackd"}},
		{"munge", "munge", api.RoleCompute, []string{"munge"}},
		{"munge", "munge", api.RoleLogin, []string{"munge"}},
	} {
		w := newWorld(t)
		w.Config.Slurm.Auth, w.Config.Slurm.KeyFile = tt.auth, key
		name := map[api.Role]string{api.RoleCompute: "n1", api.RoleLogin: "login"}[tt.role]
		out, err := w.agent(name, tt.role, api.OpAgentKeys, nil)
		want := api.Keys{Files: []api.KeyFile{{Path: key, Owner: tt.owner, Data: []byte("the secret")}}, Services: tt.services}
		if err != nil || cmp.Diff(want, out) != "" {
			t.Errorf("%s, %s: %v\n%s", tt.auth, tt.role, err, cmp.Diff(want, out))
		}
	}
	w := newWorld(t)
	w.Config.Slurm.KeyFile = key
	if out, err := w.agent("ctl", api.RoleController, api.OpAgentKeys, nil); err != nil || len(out.(api.Keys).Files) != 0 {
		t.Errorf("the controller: %v, %v, want nothing: it has the key", out, err)
	}
	for _, uid := range []uint32{0, slurmUID, alice} {
		if _, err := w.as(uid, api.OpAgentKeys, nil); api.CodeOf(err) != api.CodeDenied {
			t.Errorf("uid %d on sluiced's socket: %v, want denied", uid, err)
		}
	}
	w.Config.Slurm.KeyFile = key + ".missing"
	if _, err := w.agent("n1", api.RoleCompute, api.OpAgentKeys, nil); api.CodeOf(err) != api.CodeUnavailable {
		t.Errorf("a key that is missing: %v, want unavailable", err)
	}
}

// All of it over real TLS: agents of one version older and newer are understood.
func TestEnrolmentOverTLS(t *testing.T) {
	w := newWorld(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- remote.Server{TLS: w.Authority.ServerTLS([]string{"127.0.0.1"}), Admit: w.Admit, Enrol: w.Enrol}.Serve(ctx, l)
	}()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	client := func(c *trust.Credentials) *remote.Client {
		config, err := trust.ClientTLS(w.Authority.Fingerprint(), c)
		if err != nil {
			t.Fatal(err)
		}
		client, err := remote.NewClient(l.Addr().String(), config)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(client.Close)
		return client
	}
	n, stranger := w.boot("n1", api.RoleCompute, 4711), w.boot("n2", api.RoleCompute, 4712)
	request, _ := n.request()
	var cert api.Certificate
	if err := client(nil).Call(t.Context(), api.OpAgentEnrol, api.EnrolRequest{Token: n.token(nil), Request: request}, &cert); err != nil {
		t.Fatal(err)
	}
	if err := n.cred.Accept(cert.Chain, w.Authority.Fingerprint()); err != nil {
		t.Fatal(err)
	}
	var answer api.ReportAnswer
	if err := client(n.cred).Call(t.Context(), api.OpAgentReport, api.NodeReport{}, &answer); err != nil || answer.OpenMetadata {
		t.Errorf("a report: %+v, %v", answer, err)
	}
	// A certificate without its key is of no use: TLS asks for both.
	if err := stranger.cred.Accept(cert.Chain, w.Authority.Fingerprint()); err == nil {
		t.Error("a certificate with another key is accepted")
	}
	if err := client(nil).Call(t.Context(), api.OpAgentKeys, api.Ack{}, nil); api.CodeOf(err) != api.CodeUnenrolled {
		t.Errorf("keys without a certificate: %v, want unenrolled", err)
	}
	transport := &http.Transport{TLSClientConfig: mustTLS(t, w.Authority.Fingerprint(), n.cred)}
	defer transport.CloseIdleConnections()
	for v, ok := range map[int]bool{api.Version - 1: true, api.Version: true, api.Version + 1: true, api.Version + 2: false} {
		body := fmt.Sprintf(`{"v":%d,"op":"agent.report","body":{"node":"n2","role":"login","instance":"1","something_new":[1]}}`, v)
		resp, err := (&http.Client{Transport: transport}).Post("https://"+l.Addr().String()+remote.Path, "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if (resp.StatusCode == 200) != ok {
			t.Errorf("version %d: %s", v, resp.Status)
		}
	}
	if v := w.show("n2"); v.SeenAt != "" {
		t.Errorf("n1's agent reported for n2: %+v", v)
	}
}

func mustTLS(t *testing.T, fingerprint string, c *trust.Credentials) *tls.Config {
	t.Helper()
	config, err := trust.ClientTLS(fingerprint, c)
	if err != nil {
		t.Fatal(err)
	}
	return config
}
