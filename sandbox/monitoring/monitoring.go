// Package monitoring is the sandbox's Cloud Monitoring: timeSeries.list of version 3, for Managed Lustre's metrics.
//
// As the real service it has no points of an instance while that is idle.
package monitoring

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	api "google.golang.org/api/monitoring/v3"

	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/sandbox/lustre"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

// Lustre is what is measured.
type Lustre interface {
	Usage() []lustre.Usage
	Mounts() []lustre.Mount
	Space(instance string) (lustre.Space, bool)
}

// Sampling is how often the real service looks at an instance (documentation of the metrics).
const Sampling = time.Minute

// keep is how long points are kept. The real service keeps them for weeks.
const keep = 24 * time.Hour

// Options of New.
type Options struct {
	Project string
	Lustre  Lustre
	Clock   clock.Clock
	// Authorize decides on a call; nil lets everybody do everything. An error that can Write itself does.
	Authorize func(r *http.Request, permission, resource string) error
}

// Server is the service.
type Server struct {
	options Options

	mu      sync.Mutex
	samples map[string]*history // by instance; mu guards it
}

// history is what was measured of an instance that was not idle.
type history struct {
	instance   string // projects/P/locations/Z/instances/ID
	filesystem string
	since      time.Time         // the counters' beginning
	last       lustrefs.Counters // the last ones, also of an idle instance
	samples    []sample          // in order, at least one
	forgotten  sample            // the last one before them
}

type sample struct {
	at       time.Time
	space    lustre.Space
	clients  int
	counters lustrefs.Counters
}

// New returns a service that has measured nothing. Run measures.
func New(o Options) *Server {
	return &Server{options: o, samples: map[string]*history{}}
}

// Run measures until ctx ends.
func (s *Server) Run(ctx context.Context) {
	for {
		select {
		case <-s.options.Clock.After(Sampling):
			s.Sample()
		case <-ctx.Done():
			return
		}
	}
}

// Sample measures now.
func (s *Server) Sample() {
	now := s.options.Clock.Now()
	sums := map[string]lustrefs.Counters{}
	for _, u := range s.options.Lustre.Usage() {
		sums[u.Instance] = sums[u.Instance].Add(u.Counters)
	}
	clients := map[string]map[string]bool{}
	for _, m := range s.options.Lustre.Mounts() {
		if clients[m.Instance] == nil {
			clients[m.Instance] = map[string]bool{}
		}
		clients[m.Instance][m.VM] = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, counters := range sums {
		h := s.samples[name]
		if h != nil && h.last == counters {
			continue // idle
		}
		space, ok := s.options.Lustre.Space(name)
		if !ok {
			continue // deleted meanwhile
		}
		if h == nil {
			h = &history{instance: name, filesystem: space.Filesystem, since: now.Add(-Sampling)}
			s.samples[name] = h
		}
		h.last = counters
		h.samples = append(h.samples, sample{now, space, len(clients[name]), counters})
		for now.Sub(h.samples[0].at) > keep {
			h.forgotten, h.samples = h.samples[0], h.samples[1:]
		}
	}
}

// metric is one that the service has.
type metric struct {
	kind  string // GAUGE or CUMULATIVE
	unit  string
	value func(sample) int64
}

const prefix = "lustre.googleapis.com/instance/"

// metrics are those of a resource lustre.googleapis.com/Instance that the sandbox can measure. The documentation has their names
// and that they are sampled; that totals are CUMULATIVE, and the labels in find, were not seen on the real service.
var metrics = map[string]metric{
	"available_bytes":     {"GAUGE", "By", func(s sample) int64 { return s.space.Free }},
	"capacity_bytes":      {"GAUGE", "By", func(s sample) int64 { return s.space.Capacity }},
	"connected_clients":   {"GAUGE", "1", func(s sample) int64 { return int64(s.clients) }},
	"free_bytes":          {"GAUGE", "By", func(s sample) int64 { return s.space.Free }},
	"read_bytes_total":    {"CUMULATIVE", "By", func(s sample) int64 { return s.counters.ReadBytes }},
	"read_samples_total":  {"CUMULATIVE", "1", func(s sample) int64 { return s.counters.ReadOps }},
	"write_bytes_total":   {"CUMULATIVE", "By", func(s sample) int64 { return s.counters.WriteBytes }},
	"write_samples_total": {"CUMULATIVE", "1", func(s sample) int64 { return s.counters.WriteOps }},
}

// apiError is a refusal that is not for want of a permission.
type apiError struct {
	code            int
	status, message string
}

func (e *apiError) Error() string { return e.message }

func invalid(format string, args ...any) error {
	return &apiError{http.StatusBadRequest, "INVALID_ARGUMENT", fmt.Sprintf(format, args...)}
}

// ServeHTTP answers below /v3/.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	answer, err := s.serve(r)
	if err == nil {
		writeJSON(w, http.StatusOK, answer)
		return
	}
	if e, ok := err.(interface{ Write(http.ResponseWriter) }); ok { // IAM's
		e.Write(w)
		return
	}
	e, ok := errors.AsType[*apiError](err)
	if !ok {
		e = &apiError{http.StatusInternalServerError, "INTERNAL", err.Error()}
	}
	writeJSON(w, e.code, map[string]any{"error": map[string]any{"code": e.code, "message": e.message, "status": e.status}})
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json; charset=UTF-8")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(v) // an error means that the client is gone
}

func (s *Server) serve(r *http.Request) (any, error) {
	project := "projects/" + s.options.Project
	if r.URL.EscapedPath() != "/v3/"+project+"/timeSeries" || r.Method != http.MethodGet {
		return nil, &apiError{http.StatusNotFound, "NOT_FOUND", "Method not found."}
	}
	if s.options.Authorize != nil {
		if err := s.options.Authorize(r, "monitoring.timeSeries.list", project); err != nil {
			return nil, err
		}
	}
	q, err := parse(r.URL.Query())
	if err != nil {
		return nil, err
	}
	return q.page(s.find(q))
}

// find returns the series that a query's filter takes, with their points in its interval.
func (s *Server) find(q *query) []*api.TimeSeries {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*api.TimeSeries
	m := metrics[strings.TrimPrefix(q.metric, prefix)]
	for _, h := range s.samples {
		part := strings.Split(h.instance, "/") // projects/P/locations/Z/instances/ID
		series := &api.TimeSeries{
			Metric: &api.Metric{Type: q.metric, Labels: map[string]string{"component": "ost", "target": h.filesystem + "-OST0000"}},
			Resource: &api.MonitoredResource{
				Type:   resourceType,
				Labels: map[string]string{"resource_container": part[1], "location": part[3], "instance_id": part[5]},
			},
			MetricKind: m.kind, ValueType: "INT64", Unit: m.unit,
		}
		if !q.takes(series) {
			continue
		}
		if q.aligner == "" {
			series.Points = h.points(m, q)
		} else {
			h.align(series, m, q)
		}
		if len(series.Points) > 0 {
			all = append(all, series)
		}
	}
	slices.SortFunc(all, func(a, b *api.TimeSeries) int {
		return cmp.Or(cmp.Compare(a.Resource.Labels["location"], b.Resource.Labels["location"]),
			cmp.Compare(a.Resource.Labels["instance_id"], b.Resource.Labels["instance_id"]))
	})
	return all
}

// points are the samples in the query's interval, the newest first.
func (h *history) points(m metric, q *query) []*api.Point {
	var points []*api.Point
	for _, p := range slices.Backward(h.samples) {
		if p.at.After(q.end) || !p.at.After(q.start) && !p.at.Equal(q.end) {
			continue
		}
		start := p.at
		if m.kind == "CUMULATIVE" {
			start = h.since
		}
		value := m.value(p)
		points = append(points, &api.Point{Interval: interval(start, p.at), Value: &api.TypedValue{Int64Value: &value}})
	}
	return points
}

// window is the part of a metric in one period of an alignment.
type window struct {
	values []int64 // in order, at least one
	before int64   // the last value of earlier
	length time.Duration
}

func (w window) delta() int64 { return w.values[len(w.values)-1] - w.before }

// aligners are those that the sandbox has for each kind of metric; they return an int64 or a float64.
var aligners = map[string]map[string]func(window) any{
	"GAUGE": {
		"ALIGN_MAX": func(w window) any { return slices.Max(w.values) },
		"ALIGN_MIN": func(w window) any { return slices.Min(w.values) },
		"ALIGN_MEAN": func(w window) any {
			sum := 0.0
			for _, v := range w.values {
				sum += float64(v)
			}
			return sum / float64(len(w.values))
		},
	},
	"CUMULATIVE": {
		"ALIGN_DELTA": func(w window) any { return w.delta() },
		"ALIGN_RATE":  func(w window) any { return float64(w.delta()) / w.length.Seconds() },
	},
}

// align fills a series with one point a period, the last of which ends at the query's end. A period without samples has none.
func (h *history) align(series *api.TimeSeries, m metric, q *query) {
	series.MetricKind = "GAUGE"
	if q.aligner == "ALIGN_DELTA" {
		series.MetricKind = "DELTA"
	}
	oldest, newest := h.samples[0].at, h.samples[len(h.samples)-1].at
	end := q.end
	for end.Sub(newest) >= q.period { // more than once where the difference is more than a Duration holds
		end = end.Add(-(end.Sub(newest) / q.period) * q.period)
	}
	for ; end.After(q.start) && !end.Before(oldest); end = end.Add(-q.period) {
		begin := end.Add(-q.period)
		w := window{before: m.value(h.forgotten), length: q.period}
		for _, p := range h.samples {
			switch {
			case !p.at.After(begin):
				w.before = m.value(p)
			case !p.at.After(end):
				w.values = append(w.values, m.value(p))
			}
		}
		if len(w.values) == 0 {
			continue
		}
		p := &api.Point{Interval: interval(end, end), Value: &api.TypedValue{}}
		if series.MetricKind == "DELTA" {
			p.Interval = interval(begin, end)
		}
		switch v := aligners[m.kind][q.aligner](w).(type) {
		case int64:
			p.Value.Int64Value = &v
		case float64:
			series.ValueType, p.Value.DoubleValue = "DOUBLE", &v
		}
		series.Points = append(series.Points, p)
	}
}

func interval(start, end time.Time) *api.TimeInterval {
	return &api.TimeInterval{StartTime: start.UTC().Format(time.RFC3339Nano), EndTime: end.UTC().Format(time.RFC3339Nano)}
}
