package lustre_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/lustre"
)

const (
	parent = "projects/p/locations/us-central1-a"
	name   = parent + "/instances/i1"
	opName = parent + "/operations/op1"
)

// service answers each call with the next of the answers, and keeps what was asked.
type service struct {
	mu      sync.Mutex
	answers []string // "503" is a status, anything else a body
	asked   []string
}

func (s *service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, strings.TrimSpace(r.Method+" "+r.URL.RequestURI()+" "+string(body)))
	answer := s.answers[0]
	if len(s.answers) > 1 {
		s.answers = s.answers[1:]
	}
	code := 0
	if n, err := fmt.Sscanf(answer, "%d", &code); n == 1 && err == nil {
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"error":{"code":%d,"message":"the service says no","status":"X"}}`, code)
		return
	}
	io.WriteString(w, answer)
}

func client(t *testing.T, answers ...string) (*lustre.Client, *service) {
	t.Helper()
	s := &service{answers: answers}
	hs := httptest.NewServer(s)
	t.Cleanup(hs.Close)
	c, err := lustre.NewClient(t.Context(), option.WithEndpoint(hs.URL), option.WithoutAuthentication())
	if err != nil {
		t.Fatal(err)
	}
	return c, s
}

// TestWire has the calls as the official client makes them (facts, section 1.2).
func TestWire(t *testing.T) {
	const op = `{"name":"` + opName + `"}`
	inst := &lustre.Instance{Filesystem: "lfs1", CapacityGib: 18000, PerUnitStorageThroughput: 1000, Network: "projects/p/global/networks/n"}
	for _, tt := range []struct {
		name string
		call func(*lustre.Client) error
		want string
	}{
		{"create", func(c *lustre.Client) error {
			_, err := c.CreateInstance(t.Context(), &lustre.CreateInstanceRequest{Parent: parent, InstanceID: "i1", Instance: inst, RequestID: "r"})
			return err
		}, `POST /v1/projects/p/locations/us-central1-a/instances?instanceId=i1&requestId=r {"filesystem":"lfs1","capacityGib":"18000","perUnitStorageThroughput":"1000","network":"projects/p/global/networks/n"}`},
		{"get", func(c *lustre.Client) error { _, err := c.GetInstance(t.Context(), name); return err },
			`GET /v1/projects/p/locations/us-central1-a/instances/i1`},
		{"update", func(c *lustre.Client) error {
			_, err := c.UpdateInstance(t.Context(), &lustre.UpdateInstanceRequest{Instance: &lustre.Instance{Name: name, CapacityGib: 27000}, UpdateMask: []string{"capacityGib", "labels"}})
			return err
		}, `PATCH /v1/projects/p/locations/us-central1-a/instances/i1?updateMask=capacityGib%2Clabels {"name":"projects/p/locations/us-central1-a/instances/i1","capacityGib":"27000"}`},
		{"delete", func(c *lustre.Client) error {
			_, err := c.DeleteInstance(t.Context(), &lustre.DeleteInstanceRequest{Name: name, RequestID: "r"})
			return err
		}, `DELETE /v1/projects/p/locations/us-central1-a/instances/i1?requestId=r`},
		{"import", func(c *lustre.Client) error {
			_, err := c.ImportData(t.Context(), &lustre.ImportDataRequest{Name: name, GcsPath: &lustre.GcsPath{URI: "gs://b/x/"}, LustrePath: &lustre.LustrePath{Path: "/data"}, RequestID: "r"})
			return err
		}, `POST /v1/projects/p/locations/us-central1-a/instances/i1:importData {"name":"projects/p/locations/us-central1-a/instances/i1","gcsPath":{"uri":"gs://b/x/"},"lustrePath":{"path":"/data"},"requestId":"r"}`},
		{"cancel", func(c *lustre.Client) error { return c.CancelOperation(t.Context(), opName) },
			`POST /v1/projects/p/locations/us-central1-a/operations/op1:cancel {}`},
		{"operations", func(c *lustre.Client) error {
			_, err := c.ListOperations(t.Context(), parent, `done=false`)
			return err
		}, `GET /v1/projects/p/locations/us-central1-a/operations?filter=metadata.apiVersion%3D%22v1%22+AND+done%3Dfalse&pageSize=500`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, s := client(t, op)
			if err := tt.call(c); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff([]string{tt.want}, s.asked); d != "" {
				t.Errorf("asked (-want +got):\n%s", d)
			}
		})
	}
}

func TestRetries(t *testing.T) {
	const op = `{"name":"` + opName + `"}`
	create := func(c *lustre.Client, id string) error {
		_, err := c.CreateInstance(t.Context(), &lustre.CreateInstanceRequest{Parent: parent, InstanceID: "i1", Instance: new(lustre.Instance), RequestID: id})
		return err
	}
	for _, tt := range []struct {
		name    string
		call    func(*lustre.Client) error
		answers []string
		code    int // 0 is success
		calls   int
	}{
		{"read", func(c *lustre.Client) error { _, err := c.GetInstance(t.Context(), name); return err }, []string{"503", "429", "{}"}, 0, 3},
		{"read of nothing", func(c *lustre.Client) error { _, err := c.GetInstance(t.Context(), name); return err }, []string{"404"}, 404, 1},
		{"change with a request id", func(c *lustre.Client) error { return create(c, "r") }, []string{"503", op}, 0, 2},
		{"change without one", func(c *lustre.Client) error { return create(c, "") }, []string{"503"}, 503, 1},
		{"busy", func(c *lustre.Client) error {
			_, err := c.ExportData(t.Context(), &lustre.ExportDataRequest{Name: name, RequestID: "r"})
			return err
		}, []string{"409"}, 409, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, s := client(t, tt.answers...)
			err := tt.call(c)
			if gcp.Code(err) != tt.code || (err == nil) != (tt.code == 0) || len(s.asked) != tt.calls {
				t.Errorf("got %v after %d calls, want code %d after %d", err, len(s.asked), tt.code, tt.calls)
			}
		})
	}
}

func TestPages(t *testing.T) {
	c, s := client(t, `{"instances":[{"name":"a"}],"nextPageToken":"t/1"}`, `{"instances":[{"name":"b"}]}`)
	got, err := c.ListInstances(t.Context(), parent, "")
	if err != nil || len(got) != 2 || got[1].Name != "b" || !strings.Contains(s.asked[1], "pageToken=t%2F1") {
		t.Errorf("got %v, %v; asked %q", got, err, s.asked)
	}
	c, _ = client(t, `{"nextPageToken":"same"}`)
	if _, err := c.ListInstances(t.Context(), parent, ""); err == nil || !strings.Contains(err.Error(), "repeats") {
		t.Errorf("a list without an end: %v", err)
	}
	c, _ = client(t, `{"unreachable":["projects/p/locations/us-central1-b"]}`)
	if _, err := c.ListInstances(t.Context(), "projects/p/locations/-", ""); err == nil || !strings.Contains(err.Error(), "us-central1-b") {
		t.Errorf("a list that is short: %v", err)
	}
}

func TestWait(t *testing.T) {
	c, s := client(t, `{"name":"`+opName+`"}`, `503`, `{"name":"`+opName+`","done":true,"response":{}}`)
	seen := 0
	op, err := c.Wait(t.Context(), opName, func(*lustre.Operation) { seen++ })
	if err != nil || !op.Done || seen != 2 || len(s.asked) != 3 {
		t.Errorf("got %v, %v; seen %d, asked %d", op, err, seen, len(s.asked))
	}
	c, _ = client(t, `{"name":"`+opName+`","done":true,"error":{"code":1,"message":"cancelled","details":[{"@type":"x"}]}}`)
	var oe *lustre.OperationError
	if _, err := c.Wait(t.Context(), opName, nil); !errors.As(err, &oe) || oe.Code != lustre.Cancelled {
		t.Errorf("a failed operation: %v", err)
	}
	c, _ = client(t, `{"name":"`+opName+`"}`)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := c.Wait(ctx, opName, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("an operation that does not end: %v", err)
	}
}

func TestBadNames(t *testing.T) {
	c, s := client(t, "{}")
	for _, bad := range []string{"", "i1", "projects/p/locations/z/instances/", "projects/p/locations/z/instances/..", "projects/../locations/z/instances/i", "projects/p/locations/z/instances/i?x=y", "projects/p/locations/z/instances/i:importData"} {
		if _, err := c.GetInstance(t.Context(), bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
	if len(s.asked) != 0 {
		t.Errorf("asked %q", s.asked)
	}
	c, _ = client(t, "<html>")
	if _, err := c.GetInstance(t.Context(), name); err == nil {
		t.Error("an answer that is not JSON was accepted")
	}
}

// FuzzOperation reads what a server may send.
func FuzzOperation(f *testing.F) {
	f.Add(`{"name":"n","metadata":{"@type":"t","operationMetadata":{"counters":{"bytesFoundCount":"1"},"errorSummaries":[{"errorCode":"X","errorLogEntries":[{}]}]}},"done":true,"error":{"code":5}}`)
	f.Fuzz(func(t *testing.T, s string) {
		var op lustre.Operation
		if json.Unmarshal([]byte(s), &op) == nil {
			_ = op.Err()
		}
	})
}
