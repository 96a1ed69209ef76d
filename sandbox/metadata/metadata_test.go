package metadata_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	gce "cloud.google.com/go/compute/metadata"
	"github.com/google/go-cmp/cmp"
	api "google.golang.org/api/compute/v1"
	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/sandbox/compute"
	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/metadata"
)

type noVMs struct{}

func (noVMs) Start(context.Context, compute.Machine) error      { return nil }
func (noVMs) Stop(context.Context, string, time.Duration) error { return nil }
func (noVMs) Remove(context.Context, string) error              { return nil }

// registry is a Tokens that remembers.
type registry struct {
	mu     sync.Mutex
	tokens map[string]string // email by token
}

func (r *registry) Register(token, email string, _ []string, _ time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tokens[token] = email
}

func (r *registry) email(token string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.tokens[token]
}

// world is a project whose VM vm-1 has a loopback address, so that a client can speak from it.
type world struct {
	compute *compute.Server
	faults  *faults.Set
	api     *api.Service
	tokens  *registry
	url     string
}

const (
	vmAddress = "127.77.0.2"
	strangers = "127.77.0.99"
	vmEmail   = "node@sluice-sandbox.iam.gserviceaccount.com"
)

func newWorld(t *testing.T) *world {
	t.Helper()
	set := new(faults.Set)
	c, err := compute.New(compute.Config{VMs: noVMs{}, Subnet: netip.MustParsePrefix("127.77.0.0/24"), Faults: set})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{compute: c, faults: set, tokens: &registry{tokens: map[string]string{}}}
	apis := httptest.NewServer(c)
	server := httptest.NewServer(metadata.New(metadata.Config{
		Instances: c, Tokens: w.tokens, Identities: echo{}, Workstation: []netip.Addr{netip.MustParseAddr("127.0.0.1")},
	}))
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
		apis.Close()
		c.Close()
	})
	w.url = server.URL
	t.Setenv("GCE_METADATA_HOST", strings.TrimPrefix(server.URL, "http://"))
	if err := c.AddImage("debian-13", "", ""); err != nil {
		t.Fatal(err)
	}
	if w.api, err = api.NewService(t.Context(), option.WithEndpoint(apis.URL+"/compute/v1/"), option.WithHTTPClient(apis.Client())); err != nil {
		t.Fatal(err)
	}
	script := "#!/bin/sh\necho hello\n"
	op, err := w.api.Instances.Insert("sluice-sandbox", "us-central1-a", &api.Instance{
		Name:              "vm-1",
		MachineType:       "zones/us-central1-a/machineTypes/n2-standard-2",
		Disks:             []*api.AttachedDisk{{Boot: true, InitializeParams: &api.AttachedDiskInitializeParams{SourceImage: "global/images/debian-13"}}},
		NetworkInterfaces: []*api.NetworkInterface{{}},
		Tags:              &api.Tags{Items: []string{"compute", "sluice"}},
		ServiceAccounts:   []*api.ServiceAccount{{Email: vmEmail, Scopes: []string{"https://www.googleapis.com/auth/cloud-platform"}}},
		Metadata:          &api.Metadata{Items: []*api.MetadataItems{{Key: "startup-script", Value: &script}}},
	}).Do()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.api.ZoneOperations.Wait("sluice-sandbox", "us-central1-a", op.Name).Do(); err != nil {
		t.Fatal(err)
	}
	return w
}

// from makes an HTTP client that speaks from a loopback address.
func from(t *testing.T, address string) *http.Client {
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	transport := &http.Transport{DialContext: dialer.DialContext}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func (w *world) setMetadata(t *testing.T, values map[string]string) {
	t.Helper()
	in, err := w.api.Instances.Get("sluice-sandbox", "us-central1-a", "vm-1").Do()
	if err != nil {
		t.Fatal(err)
	}
	m := &api.Metadata{Fingerprint: in.Metadata.Fingerprint}
	for k, v := range values {
		m.Items = append(m.Items, &api.MetadataItems{Key: k, Value: &v})
	}
	if _, err := w.api.Instances.SetMetadata("sluice-sandbox", "us-central1-a", "vm-1", m).Do(); err != nil {
		t.Fatal(err)
	}
}

// TestRealClient asks with Google's own client, as a VM.
func TestRealClient(t *testing.T) {
	newWorld(t)
	ctx := t.Context()
	c := gce.NewClient(from(t, vmAddress))
	if !c.OnGCEWithContext(ctx) {
		t.Error("OnGCE is false")
	}
	for _, tt := range []struct {
		name string
		ask  func() (string, error)
		want string
	}{
		{"project", func() (string, error) { return c.ProjectIDWithContext(ctx) }, "sluice-sandbox"},
		{"number", func() (string, error) { return c.NumericProjectIDWithContext(ctx) }, "100000000001"},
		{"name", func() (string, error) { return c.InstanceNameWithContext(ctx) }, "vm-1"},
		{"zone", func() (string, error) { return c.ZoneWithContext(ctx) }, "us-central1-a"},
		{"ip", func() (string, error) { return c.InternalIPWithContext(ctx) }, vmAddress},
		{"hostname", func() (string, error) { return c.HostnameWithContext(ctx) }, "vm-1.us-central1-a.c.sluice-sandbox.internal"},
		{"email", func() (string, error) { return c.EmailWithContext(ctx, "") }, vmEmail},
		{"attribute", func() (string, error) { return c.InstanceAttributeValueWithContext(ctx, "startup-script") }, "#!/bin/sh\necho hello\n"},
		{"preempted", func() (string, error) { return c.GetWithContext(ctx, "instance/preempted") }, "FALSE"},
		{"maintenance", func() (string, error) { return c.GetWithContext(ctx, "instance/maintenance-event") }, "NONE"},
		{"machine type", func() (string, error) { return c.GetWithContext(ctx, "instance/machine-type") }, "projects/100000000001/machineTypes/n2-standard-2"},
		{"image", func() (string, error) { return c.GetWithContext(ctx, "instance/image") }, "projects/sluice-sandbox/global/images/debian-13"},
		{"network", func() (string, error) { return c.GetWithContext(ctx, "instance/network-interfaces/0/network") }, "projects/100000000001/networks/default"},
		{"mac", func() (string, error) { return c.GetWithContext(ctx, "instance/network-interfaces/0/mac") }, "42:01:7f:4d:00:02"},
		{"universe", func() (string, error) { return c.GetWithContext(ctx, "universe/universe-domain") }, "googleapis.com"},
	} {
		if got, err := tt.ask(); err != nil || got != tt.want {
			t.Errorf("%s = %q, %v, want %q", tt.name, got, err, tt.want)
		}
	}
	if got, err := c.InstanceTagsWithContext(ctx); err != nil || !cmp.Equal(got, []string{"compute", "sluice"}) {
		t.Errorf("tags = %q, %v", got, err)
	}
	if got, err := c.ScopesWithContext(ctx, ""); err != nil || !cmp.Equal(got, []string{"https://www.googleapis.com/auth/cloud-platform"}) {
		t.Errorf("scopes = %q, %v", got, err)
	}
	if got, err := c.InstanceAttributesWithContext(ctx); err != nil || !cmp.Equal(got, []string{"startup-script"}) {
		t.Errorf("attributes = %q, %v", got, err)
	}
	if _, err := c.InstanceAttributeValueWithContext(ctx, "nope"); !errors.As(err, new(gce.NotDefinedError)) {
		t.Errorf("missing attribute: %v, want NotDefinedError", err)
	}
}

// TestUpcomingMaintenance: what is told of a maintenance before it begins.
func TestUpcomingMaintenance(t *testing.T) {
	w := newWorld(t)
	vm := from(t, vmAddress)
	url := w.url + "/computeMetadata/v1/instance/"
	if got := get(t, vm, url+"upcoming-maintenance/?recursive=true", flavor, "Google"); got.status != 404 {
		t.Errorf("without maintenance: %d %s", got.status, got.body)
	}
	if err := w.faults.Set("compute.instance.vm-1.maintenance", "1h"); err != nil {
		t.Fatal(err)
	}
	event := get(t, vm, url+"maintenance-event?wait_for_change=true&timeout_sec=60&last_etag=0", flavor, "Google")
	if event.body != "MIGRATE_ON_HOST_MAINTENANCE" {
		event = get(t, vm, url+"maintenance-event?wait_for_change=true&timeout_sec=60&last_etag="+event.header.Get("ETag"), flavor, "Google")
	}
	if event.body != "MIGRATE_ON_HOST_MAINTENANCE" {
		t.Errorf("maintenance-event %q", event.body)
	}
	got := get(t, vm, url+"upcoming-maintenance/?recursive=true", flavor, "Google")
	var told map[string]string
	if err := json.Unmarshal([]byte(got.body), &told); err != nil {
		t.Fatalf("%v: %s", err, got.body)
	}
	at, err := time.Parse(time.RFC3339, told["window_start_time"])
	if d := time.Until(at); err != nil || d < 59*time.Minute || d > time.Hour || told["maintenance_status"] != "PENDING" {
		t.Errorf("told %v: in %v, %v", told, d, err)
	}
}

// TestSubscribe watches a value with Google's own client while it changes.
func TestSubscribe(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	c := gce.NewClient(from(t, vmAddress))
	var seen []string
	stop := errors.New("seen enough")
	err := c.SubscribeWithContext(ctx, "instance/preempted", func(_ context.Context, v string, ok bool) error {
		seen = append(seen, v)
		if v == "TRUE" {
			return stop
		}
		// A change of something else must not wake the watcher, this one must.
		w.setMetadata(t, map[string]string{"other": "x"})
		return w.faults.Set("compute.instance.vm-1.preempt", "on")
	})
	if !errors.Is(err, stop) {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"FALSE", "TRUE"}, seen); d != "" {
		t.Errorf("seen (-want +got):\n%s", d)
	}
}

type reply struct {
	status int
	body   string
	header http.Header
}

func get(t *testing.T, c *http.Client, url string, header ...string) reply {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), "GET", url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	answer, err := c.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return reply{answer.StatusCode, string(body), answer.Header}
}

const flavor = "Metadata-Flavor"

func TestPaths(t *testing.T) {
	w := newWorld(t)
	vm := from(t, vmAddress)
	for _, tt := range []struct {
		path   string
		status int
		body   string // a part of it
	}{
		{"/", 200, "computeMetadata/\n"},
		{"/computeMetadata/", 200, "v1/\n"},
		{"/computeMetadata/v1/", 200, "instance/\nproject/\nuniverse/\n"},
		{"/computeMetadata/v1", 200, "instance/\nproject/\nuniverse/\n"}, // through a redirect
		{"/computeMetadata/v1/instance/network-interfaces/", 200, "0/\n"},
		{"/computeMetadata/v1/instance/service-accounts/", 200, "default/\n" + vmEmail + "/\n"},
		{"/computeMetadata/v1/instance/service-accounts/default/aliases", 200, "default"},
		{"/computeMetadata/v1/instance/scheduling/preemptible", 200, "FALSE"},
		{"/computeMetadata/v1/instance/name?alt=json", 200, `"vm-1"`},
		{"/computeMetadata/v1/instance/attributes/?recursive=true", 200, `{"startup-script":"#!/bin/sh\necho hello\n"}`},
		{"/computeMetadata/v1/instance/?recursive=true", 200, `"machineType":"projects/100000000001/machineTypes/n2-standard-2"`},
		{"/computeMetadata/v1/instance/?recursive=true", 200, `"networkInterfaces":[{"ip":"127.77.0.2"`},
		{"/computeMetadata/v1/project/?recursive=true", 200, `{"attributes":{},"numericProjectId":100000000001,"projectId":"sluice-sandbox"}`},
		{"/computeMetadata/v1/project/?recursive=true&alt=text", 200, "numeric-project-id 100000000001\nproject-id sluice-sandbox\n"},
		{"/computeMetadata/v1/instance/nope", 404, ""},
		{"/computeMetadata/v1/instance/name/", 404, ""},
		{"/computeMetadata/v1/instance/name/x", 404, ""},
		{"/computeMetadata/v1//instance/name", 404, ""},
		{"/computeMetadata/v2/", 404, ""},
		{"/computeMetadataX/v1/", 404, ""},
		{"/etc/passwd", 404, ""},
		{"/computeMetadata/v1/instance/service-accounts/other@x/token", 404, ""},
		{"/computeMetadata/v1/instance/name?alt=xml", 400, ""},
		{"/computeMetadata/v1/instance/name?wait_for_change=true&timeout_sec=x", 400, ""},
	} {
		got := get(t, vm, w.url+tt.path, flavor, "Google")
		if got.status != tt.status || !strings.Contains(got.body, tt.body) {
			t.Errorf("%s: %d %q, want %d %q", tt.path, got.status, got.body, tt.status, tt.body)
		}
		if got.header.Get(flavor) != "Google" {
			t.Errorf("%s: answer without Metadata-Flavor", tt.path)
		}
	}
	const name = "/computeMetadata/v1/instance/name"
	for _, tt := range []struct {
		what   string
		client *http.Client
		header []string
		want   int
	}{
		{"no header", vm, nil, 403},
		{"wrong header", vm, []string{flavor, "Other"}, 403},
		{"forwarded", vm, []string{flavor, "Google", "X-Forwarded-For", "1.2.3.4"}, 403},
		{"stranger", from(t, strangers), []string{flavor, "Google"}, 403},
		{"workstation has no name", from(t, "127.0.0.1"), []string{flavor, "Google"}, 404},
	} {
		if got := get(t, tt.client, w.url+name, tt.header...); got.status != tt.want {
			t.Errorf("%s: %d, want %d", tt.what, got.status, tt.want)
		}
	}
	post, err := vm.Post(w.url+name, "text/plain", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	post.Body.Close()
	if post.StatusCode != 405 {
		t.Errorf("POST: %d, want 405", post.StatusCode)
	}
	probe := get(t, from(t, strangers), w.url+"/")
	if probe.status != 200 || probe.header.Get(flavor) != "Google" {
		t.Errorf("probe: %+v", probe)
	}
}

func TestWaitForChange(t *testing.T) {
	w := newWorld(t)
	vm := from(t, vmAddress)
	const attribute = "/computeMetadata/v1/instance/attributes/?recursive=true"
	first := get(t, vm, w.url+attribute, flavor, "Google")
	tag := first.header.Get("ETag")
	if tag == "" {
		t.Fatal("no ETag")
	}
	// An etag of the past is answered at once, and so is the end of the timeout.
	if got := get(t, vm, w.url+attribute+"&wait_for_change=true&last_etag=0", flavor, "Google"); got.body != first.body {
		t.Errorf("with an old etag: %q", got.body)
	}
	if got := get(t, vm, w.url+attribute+"&wait_for_change=true&timeout_sec=0&last_etag="+tag, flavor, "Google"); got.body != first.body || got.header.Get("ETag") != tag {
		t.Errorf("after the timeout: %q", got.body)
	}
	// Many wait, one change wakes all.
	var all sync.WaitGroup
	answers := make(chan string, 10)
	for range cap(answers) {
		all.Go(func() {
			r, _ := http.NewRequest("GET", w.url+attribute+"&wait_for_change=true&last_etag="+tag, nil)
			r.Header.Set(flavor, "Google")
			answer, err := vm.Do(r)
			if err != nil {
				t.Error(err)
				return
			}
			defer answer.Body.Close()
			body, _ := io.ReadAll(answer.Body)
			answers <- string(body)
		})
	}
	w.setMetadata(t, map[string]string{"k": "v"})
	all.Wait()
	close(answers)
	for got := range answers {
		if got != `{"k":"v"}` {
			t.Errorf("woken with %q", got)
		}
	}
	// The end of the VM ends the wait.
	ended := make(chan int, 1)
	go func() {
		r, _ := http.NewRequest("GET", w.url+attribute+"&wait_for_change=true", nil)
		r.Header.Set(flavor, "Google")
		answer, err := vm.Do(r)
		if err != nil {
			ended <- 0
			return
		}
		answer.Body.Close()
		ended <- answer.StatusCode
	}()
	if _, err := w.api.Instances.Delete("sluice-sandbox", "us-central1-a", "vm-1").Do(); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-ended:
		if got != 403 {
			t.Errorf("at the end of the VM: %d, want 403", got)
		}
	case <-time.After(30 * time.Second):
		t.Error("still waiting after the end of the VM")
	}
}

func TestProjectAttributes(t *testing.T) {
	w := newWorld(t)
	value := "on"
	p := w.compute.Project()
	if _, err := w.api.Projects.SetCommonInstanceMetadata("sluice-sandbox", &api.Metadata{
		Fingerprint: p.Project.CommonInstanceMetadata.Fingerprint, Items: []*api.MetadataItems{{Key: "enable-oslogin", Value: &value}},
	}).Do(); err != nil {
		t.Fatal(err)
	}
	for _, address := range []string{vmAddress, "127.0.0.1"} {
		c := gce.NewClient(from(t, address))
		if got, err := c.ProjectAttributeValueWithContext(t.Context(), "enable-oslogin"); err != nil || got != value {
			t.Errorf("from %s: %q, %v", address, got, err)
		}
	}
}

func TestTokens(t *testing.T) {
	w := newWorld(t)
	ask := func(address, account string) string {
		t.Helper()
		got := get(t, from(t, address), w.url+"/computeMetadata/v1/instance/service-accounts/"+account+"/token?scopes=x", flavor, "Google")
		var token struct {
			AccessToken string `json:"access_token"`
			ExpiresIn   int    `json:"expires_in"`
			TokenType   string `json:"token_type"`
		}
		if err := json.Unmarshal([]byte(got.body), &token); err != nil {
			t.Fatal(fmt.Errorf("%d %s: %w", got.status, got.body, err))
		}
		if token.TokenType != "Bearer" || token.ExpiresIn < 3500 || token.ExpiresIn > 3600 {
			t.Errorf("token: %+v", token)
		}
		return token.AccessToken
	}
	vm := ask(vmAddress, "default")
	if got := w.tokens.email(vm); got != vmEmail {
		t.Errorf("the VM's token belongs to %q, want %q", got, vmEmail)
	}
	if again := ask(vmAddress, vmEmail); again != vm {
		t.Error("a fresh token took the place of a good one")
	}
	admin := ask("127.0.0.1", "default")
	if got, want := w.tokens.email(admin), "admin@sluice-sandbox.iam.gserviceaccount.com"; got != want {
		t.Errorf("the workstation's token belongs to %q, want %q", got, want)
	}
}

// hand is a clock that stands still until it is set.
type hand struct{ now time.Time }

func (h *hand) Now() time.Time                       { return h.now }
func (h *hand) After(time.Duration) <-chan time.Time { return nil }

func TestTokenIsRenewedBeforeItEnds(t *testing.T) {
	w := newWorld(t)
	clock := &hand{now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	s := metadata.New(metadata.Config{Instances: w.compute, Tokens: w.tokens, Clock: clock})
	ask := func() string {
		r := httptest.NewRequest("GET", "/computeMetadata/v1/instance/service-accounts/default/token", nil)
		r.Header.Set(flavor, "Google")
		r.RemoteAddr = vmAddress + ":1"
		answer := httptest.NewRecorder()
		s.ServeHTTP(answer, r)
		var token struct {
			AccessToken string `json:"access_token"`
		}
		if err := json.Unmarshal(answer.Body.Bytes(), &token); err != nil {
			t.Fatal(err)
		}
		return token.AccessToken
	}
	first := ask()
	clock.now = clock.now.Add(55 * time.Minute)
	if ask() != first {
		t.Error("renewed although it is good for 5 minutes more")
	}
	clock.now = clock.now.Add(time.Second)
	if second := ask(); second == first || w.tokens.email(second) != vmEmail {
		t.Error("not renewed in its last 5 minutes")
	}
}
