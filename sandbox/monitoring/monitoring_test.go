package monitoring_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/api/googleapi"
	api "google.golang.org/api/monitoring/v3"
	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
	"github.com/sluicehpc/sluice/sandbox/iam"
	"github.com/sluicehpc/sluice/sandbox/lustre"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
	"github.com/sluicehpc/sluice/sandbox/monitoring"
)

const (
	project = "projects/sluice-sandbox"
	scratch = project + "/locations/us-central1-a/instances/scratch"
)

// instances are what the tests say that there is.
type instances struct {
	usage []lustre.Usage
	free  int64
}

func (i *instances) Usage() []lustre.Usage { return i.usage }

func (i *instances) Mounts() []lustre.Mount {
	return []lustre.Mount{{Instance: scratch, VM: "a"}, {Instance: scratch, VM: "a"}, {Instance: scratch, VM: "b"}}
}

func (i *instances) Space(name string) (lustre.Space, bool) {
	return lustre.Space{Filesystem: "scratch", Capacity: 1000, Free: i.free}, name == scratch
}

// fakeClock is set by the test.
type fakeClock struct {
	mu     sync.Mutex // guards now
	now    time.Time
	timers chan chan time.Time // who waits
}

func (c *fakeClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *fakeClock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

func (c *fakeClock) After(time.Duration) <-chan time.Time {
	timer := make(chan time.Time, 1)
	go func() { c.timers <- timer }()
	return timer
}

// world is a service whose clock stands at minute 0.
type world struct {
	*monitoring.Server
	t      *testing.T
	lustre *instances
	clock  *fakeClock
	start  time.Time
	url    string
	client *api.ProjectsTimeSeriesService
	iam    *iam.Server
}

func newWorld(t *testing.T) *world {
	t.Helper()
	start := time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC)
	w := &world{t: t, lustre: &instances{}, start: start, clock: &fakeClock{now: start, timers: make(chan chan time.Time)}}
	w.iam = iam.New(iam.Options{})
	w.Server = monitoring.New(monitoring.Options{Project: "sluice-sandbox", Lustre: w.lustre, Clock: w.clock, Authorize: w.iam.Authorize})
	h := httptest.NewServer(discoverytest.Server(t, w.Server, "monitoring"))
	t.Cleanup(h.Close)
	w.url = h.URL
	s, err := api.NewService(t.Context(), option.WithEndpoint(h.URL), option.WithHTTPClient(&http.Client{Transport: bearer(w.token(w.iam.Admin()))}))
	if err != nil {
		t.Fatal(err)
	}
	w.client = s.Projects.TimeSeries
	return w
}

// bearer adds a token to requests.
type bearer string

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	if b != "" {
		r.Header.Set("Authorization", "Bearer "+string(b))
	}
	return http.DefaultTransport.RoundTrip(r)
}

func (w *world) token(email string) string {
	w.t.Helper()
	token, _, err := w.iam.Mint(email, nil, time.Hour)
	if err != nil {
		w.t.Fatal(err)
	}
	return token
}

// minute lets a minute pass in which the machines have read and written so many bytes in all.
func (w *world) minute(read, write int64) {
	w.lustre.usage = []lustre.Usage{
		{Instance: scratch, VM: "a", Counters: lustrefs.Counters{ReadBytes: read, ReadOps: 1}},
		{Instance: scratch, VM: "b", Counters: lustrefs.Counters{WriteBytes: write, WriteOps: 1}},
	}
	w.clock.Advance(time.Minute)
	w.Sample()
}

func (w *world) at(minute int) string {
	return w.start.Add(time.Duration(minute) * time.Minute).Format(time.RFC3339)
}

func filter(metric string) string {
	return `metric.type = "lustre.googleapis.com/instance/` + metric + `" AND resource.type = "lustre.googleapis.com/Instance"`
}

func (w *world) list(metric string, from, to int) *api.ProjectsTimeSeriesListCall {
	return w.client.List(project).Filter(filter(metric)).IntervalStartTime(w.at(from)).IntervalEndTime(w.at(to)).View("FULL")
}

// show is a list's points as "KIND [START,END]=VALUE", minutes after the start.
func (w *world) show(call *api.ProjectsTimeSeriesListCall) []string {
	w.t.Helper()
	out, err := call.Do()
	if err != nil {
		w.t.Fatal(err)
	}
	minute := func(s string) float64 {
		at, err := time.Parse(time.RFC3339Nano, s)
		if err != nil {
			w.t.Fatal(err)
		}
		return at.Sub(w.start).Minutes()
	}
	var lines []string
	for _, s := range out.TimeSeries {
		for _, p := range s.Points {
			var value any
			if p.Value.Int64Value != nil {
				value = *p.Value.Int64Value
			} else {
				value = *p.Value.DoubleValue
			}
			lines = append(lines, fmt.Sprintf("%s [%v,%v]=%v", s.MetricKind, minute(p.Interval.StartTime), minute(p.Interval.EndTime), value))
		}
	}
	return lines
}

// TestPoints has an instance that is idle in the third minute.
func TestPoints(t *testing.T) {
	w := newWorld(t)
	w.lustre.free = 900
	w.minute(0, 100)
	w.lustre.free = 700
	w.minute(50, 300)
	w.minute(50, 300)
	w.minute(80, 300)
	for _, tt := range []struct {
		name string
		call *api.ProjectsTimeSeriesListCall
		want []string
	}{
		{"counter", w.list("write_bytes_total", 0, 9), []string{"CUMULATIVE [0,4]=300", "CUMULATIVE [0,2]=300", "CUMULATIVE [0,1]=100"}},
		{"gauge", w.list("free_bytes", 0, 9), []string{"GAUGE [4,4]=700", "GAUGE [2,2]=700", "GAUGE [1,1]=900"}},
		{"clients", w.list("connected_clients", 3, 4), []string{"GAUGE [4,4]=2"}},
		{"the beginning is not in an interval", w.list("read_bytes_total", 1, 2), []string{"CUMULATIVE [0,2]=50"}},
		{"idle", w.list("capacity_bytes", 2, 3), nil},
		{"delta", w.list("read_bytes_total", 0, 4).AggregationAlignmentPeriod("120s").AggregationPerSeriesAligner("ALIGN_DELTA"),
			[]string{"DELTA [2,4]=30", "DELTA [0,2]=50"}},
		{"delta of a part", w.list("write_bytes_total", 1, 2).AggregationAlignmentPeriod("60s").AggregationPerSeriesAligner("ALIGN_DELTA"), []string{"DELTA [1,2]=200"}},
		{"rate", w.list("read_bytes_total", 0, 2).AggregationAlignmentPeriod("60s").AggregationPerSeriesAligner("ALIGN_RATE"),
			[]string{fmt.Sprintf("GAUGE [2,2]=%v", 50./60), "GAUGE [1,1]=0"}},
		{"mean", w.list("free_bytes", 0, 2).AggregationAlignmentPeriod("120s").AggregationPerSeriesAligner("ALIGN_MEAN"), []string{"GAUGE [2,2]=800"}},
		{"least", w.list("free_bytes", 0, 2).AggregationAlignmentPeriod("120s").AggregationPerSeriesAligner("ALIGN_MIN"), []string{"GAUGE [2,2]=700"}},
		{"headers", w.list("free_bytes", 0, 9).View("HEADERS"), nil},
		{"another instance", w.client.List(project).View("FULL").IntervalStartTime(w.at(0)).IntervalEndTime(w.at(9)).
			Filter(`metric.type="lustre.googleapis.com/instance/free_bytes" AND resource.labels.instance_id="other"`), nil},
		{"this instance", w.client.List(project).View("FULL").IntervalStartTime(w.at(3)).IntervalEndTime(w.at(9)).
			Filter(`resource.label."instance_id"="scratch" AND metric.type="lustre.googleapis.com/instance/free_bytes" AND metric.labels.component="ost"`), []string{"GAUGE [4,4]=700"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if d := cmp.Diff(tt.want, w.show(tt.call)); d != "" {
				t.Errorf("(-want +got)\n%s", d)
			}
		})
	}
	out, err := w.list("free_bytes", 0, 9).Do()
	if err != nil {
		t.Fatal(err)
	}
	s := out.TimeSeries[0]
	want := map[string]string{"resource_container": "sluice-sandbox", "location": "us-central1-a", "instance_id": "scratch"}
	if d := cmp.Diff(want, s.Resource.Labels); d != "" || s.Metric.Labels["component"] != "ost" || s.Unit != "By" {
		t.Errorf("got %v %v %s %s", s.Resource.Labels, s.Metric.Labels, s.Unit, d)
	}
}

func TestRefusals(t *testing.T) {
	w := newWorld(t)
	w.minute(1, 1)
	for _, tt := range []struct {
		name string
		call *api.ProjectsTimeSeriesListCall
		code int
		want string
	}{
		{"no filter", w.client.List(project).IntervalEndTime(w.at(1)), 400, "metric type"},
		{"two metrics", w.list("free_bytes", 0, 1).Filter(filter("free_bytes") + " AND " + filter("capacity_bytes")), 400, "twice"},
		{"a function", w.list("free_bytes", 0, 1).Filter(`metric.type = starts_with("lustre")`), 400, "reads comparisons"},
		{"or", w.list("free_bytes", 0, 1).Filter(filter("free_bytes") + ` OR resource.type = "x"`), 400, "reads comparisons"},
		{"unknown metric", w.list("joy_total", 0, 1), 404, "Cannot find metric"},
		{"another service's", w.list("x", 0, 1).Filter(`metric.type = "free_bytes"`), 404, "Cannot find metric"},
		{"no end", w.client.List(project).Filter(filter("free_bytes")), 400, "endTime"},
		{"backwards", w.list("free_bytes", 2, 1), 400, "after the end"},
		{"bad time", w.list("free_bytes", 0, 1).IntervalEndTime("now"), 400, "Timestamp"},
		{"bad view", w.list("free_bytes", 0, 1).View("SOME"), 400, "view"},
		{"reducer", w.list("free_bytes", 0, 1).AggregationCrossSeriesReducer("REDUCE_SUM"), 400, "does not do"},
		{"order", w.list("free_bytes", 0, 1).OrderBy("x"), 400, "does not do"},
		{"aligner without a period", w.list("free_bytes", 0, 1).AggregationPerSeriesAligner("ALIGN_MEAN"), 400, "alignmentPeriod"},
		{"short period", w.list("free_bytes", 0, 1).AggregationPerSeriesAligner("ALIGN_MEAN").AggregationAlignmentPeriod("1s"), 400, "60s"},
		{"rate of a gauge", w.list("free_bytes", 0, 1).AggregationPerSeriesAligner("ALIGN_RATE").AggregationAlignmentPeriod("60s"), 400, "cannot align"},
		{"page token", w.list("free_bytes", 0, 1).PageToken("x"), 400, "page token"},
		{"page token too far", w.list("free_bytes", 0, 1).PageToken("7"), 400, "page token"},
		{"another project", w.client.List("projects/other").Filter(filter("free_bytes")), 404, "not found"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := tt.call.Do()
			e, ok := errors.AsType[*googleapi.Error](err)
			if !ok || e.Code != tt.code || !strings.Contains(e.Message, tt.want) {
				t.Errorf("got %v, want %d with %q", err, tt.code, tt.want)
			}
		})
	}
	get := func(token, query string) (int, string) {
		t.Helper()
		c := http.Client{Transport: bearer(token)}
		resp, err := c.Get(w.url + "/v3/" + project + "/timeSeries?" + query)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(body)
	}
	if code, body := get(w.token(w.iam.Admin()), "colour=red"); code != 400 || !strings.Contains(body, "Cannot bind query parameter") {
		t.Errorf("unknown parameter: %d %s", code, body)
	}
	ok := url.Values{"filter": {filter("free_bytes")}, "interval.endTime": {w.at(1)}, "view": {"FULL"}}.Encode()
	if code, body := get("", ok); code != 401 {
		t.Errorf("no token: %d %s", code, body)
	}
	if code, body := get(w.token("100000000001-compute@developer.gserviceaccount.com"), ok); code != 403 || !strings.Contains(body, "monitoring.timeSeries.list") {
		t.Errorf("an account without the permission: %d %s", code, body)
	}
}

func TestPages(t *testing.T) {
	w := newWorld(t)
	w.minute(1, 1)
	w.minute(2, 2)
	out, err := w.list("free_bytes", 0, 9).PageSize(1).Do()
	if err != nil || len(out.TimeSeries) != 1 || out.NextPageToken != "" {
		t.Errorf("one series is one page: %v, %v", out, err)
	}
}

// TestRun measures by the clock, and forgets.
func TestRun(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); w.Run(ctx) }()
	w.lustre.usage = []lustre.Usage{{Instance: scratch, Counters: lustrefs.Counters{ReadBytes: 5}}, {Instance: "gone", Counters: lustrefs.Counters{ReadBytes: 5}}}
	timer := <-w.clock.timers
	w.clock.Advance(monitoring.Sampling)
	timer <- w.clock.Now()
	<-w.clock.timers // it waits again
	if got := w.show(w.list("read_bytes_total", 0, 9)); len(got) != 1 {
		t.Errorf("got %q", got)
	}
	cancel()
	<-ended
	for range 2 {
		w.clock.Advance(25 * time.Hour)
		w.lustre.usage[0].ReadBytes++
		w.Sample()
	}
	got := w.show(w.list("read_bytes_total", 0, 60*60).AggregationAlignmentPeriod("3600s").AggregationPerSeriesAligner("ALIGN_DELTA"))
	if d := cmp.Diff([]string{"DELTA [3000,3060]=1"}, got); d != "" {
		t.Errorf("after two days (-want +got)\n%s", d)
	}
}

func FuzzQuery(f *testing.F) {
	w := monitoring.New(monitoring.Options{Project: "sluice-sandbox", Lustre: &instances{usage: []lustre.Usage{{Instance: scratch}}}, Clock: &fakeClock{}})
	w.Sample()
	f.Add(`metric.type = "lustre.googleapis.com/instance/free_bytes" AND resource.labels."instance_id" = "x"`, "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "60s", "ALIGN_MEAN", "1", "0")
	f.Add("", "", "2026-01-02T03:04:05.6+07:00", "1e9s", "", "-1", "99999999999")
	f.Fuzz(func(t *testing.T, filter, start, end, period, aligner, size, token string) {
		q := url.Values{"filter": {filter}, "interval.startTime": {start}, "interval.endTime": {end}, "aggregation.alignmentPeriod": {period},
			"aggregation.perSeriesAligner": {aligner}, "pageSize": {size}, "pageToken": {token}}
		out := httptest.NewRecorder()
		w.ServeHTTP(out, httptest.NewRequest("GET", "/v3/"+project+"/timeSeries?"+q.Encode(), nil))
		if !json.Valid(out.Body.Bytes()) || out.Code >= 500 {
			t.Errorf("%d %s", out.Code, out.Body)
		}
	})
}
