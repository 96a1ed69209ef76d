package monitoring

import (
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	api "google.golang.org/api/monitoring/v3"
)

const resourceType = "lustre.googleapis.com/Instance"

// query is a timeSeries.list call. What the sandbox cannot do is refused.
type query struct {
	metric     string            // type
	labels     map[string]string // by "resource.labels.X" and "metric.labels.X"
	start, end time.Time         // the points after start, up to end
	headers    bool              // without points
	period     time.Duration     // of the alignment
	aligner    string            // "" is none
	size, from int               // of the page
}

// ignored are parameters of all of Google's services that change nothing here.
var ignored = map[string]bool{"alt": true, "$alt": true, "prettyPrint": true, "key": true, "quotaUser": true, "fields": true}

func parse(values url.Values) (*query, error) {
	q := &query{size: maxPage}
	for name, given := range values {
		value := given[0]
		var err error
		switch name {
		case "filter":
			err = q.filter(value)
		case "interval.startTime":
			q.start, err = moment(name, value)
		case "interval.endTime":
			q.end, err = moment(name, value)
		case "view":
			switch value {
			case "FULL":
			case "HEADERS":
				q.headers = true
			default:
				err = invalid("Invalid value at 'view' (type.googleapis.com/google.monitoring.v3.ListTimeSeriesRequest.TimeSeriesView), %q", value)
			}
		case "pageSize":
			n, bad := strconv.Atoi(value)
			if bad != nil || n < 0 {
				err = invalid("Invalid value at 'page_size' (TYPE_INT32), %q", value)
			} else if n > 0 {
				q.size = min(n, maxPage)
			}
		case "pageToken":
			n, bad := strconv.Atoi(value)
			if bad != nil || n < 0 {
				err = invalid("The page token %q was not made by this list.", value)
			}
			q.from = n
		case "aggregation.alignmentPeriod":
			seconds, ok := strings.CutSuffix(value, "s")
			n, bad := strconv.ParseInt(seconds, 10, 32)
			if !ok || bad != nil || n < 60 {
				err = invalid("Field aggregation.alignmentPeriod had an invalid value of %q: must be at least 60s.", value)
			}
			q.period = time.Duration(n) * time.Second
		case "aggregation.perSeriesAligner":
			if value != "ALIGN_NONE" {
				q.aligner = value
			}
		case "orderBy", "aggregation.crossSeriesReducer", "aggregation.groupByFields", "secondaryAggregation.alignmentPeriod", "secondaryAggregation.perSeriesAligner",
			"secondaryAggregation.crossSeriesReducer", "secondaryAggregation.groupByFields":
			err = invalid("The sandbox does not do %s.", name)
		default:
			if !ignored[name] {
				err = invalid("Invalid JSON payload received. Unknown name \"%s\": Cannot bind query parameter.", name)
			}
		}
		if err == nil && len(given) > 1 {
			err = invalid("%s is given more than once.", name)
		}
		if err != nil {
			return nil, err
		}
	}
	switch {
	case q.metric == "":
		return nil, invalid("Field filter had an invalid value: the filter must specify a single metric type.")
	case q.end.IsZero():
		return nil, invalid("Field interval.endTime is required.")
	case q.start.After(q.end):
		return nil, invalid("Field interval.startTime had an invalid value: it is after the end time.")
	case q.aligner != "" && q.period == 0:
		return nil, invalid("Field aggregation.alignmentPeriod is required with the aligner %s.", q.aligner)
	case q.aligner != "" && aligners[metrics[strings.TrimPrefix(q.metric, prefix)].kind][q.aligner] == nil:
		return nil, invalid("The sandbox cannot align %s by %q.", q.metric, q.aligner)
	}
	if q.start.IsZero() {
		q.start = q.end
	}
	return q, nil
}

func moment(field, value string) (time.Time, error) {
	t, err := time.Parse(time.RFC3339Nano, value)
	if err != nil {
		return t, invalid("Invalid value at '%s' (type.googleapis.com/google.protobuf.Timestamp), %q", field, value)
	}
	return t, nil
}

// term is one comparison of a filter.
var term = regexp.MustCompile(`^\s*(metric\.type|resource\.type|(?:metric|resource)\.labels?\."?([a-z_]+)"?)\s*=\s*"([^"\\]*)"\s*(AND\s|$)`)

// filter reads comparisons by = joined with AND, which is what the sandbox can do of the language.
func (q *query) filter(text string) error {
	q.labels = map[string]string{}
	for rest := text; ; {
		m := term.FindStringSubmatch(rest)
		if m == nil {
			return invalid("Field filter had an invalid value of %q: the sandbox reads comparisons with = and a quoted text, joined with AND.", text)
		}
		name, value := m[1], m[3]
		if m[2] != "" {
			kind, _, _ := strings.Cut(name, ".")
			name = kind + ".labels." + m[2]
		}
		switch _, known := metrics[strings.TrimPrefix(value, prefix)]; {
		case q.labels[name] != "" || name == "metric.type" && q.metric != "":
			return invalid("Field filter had an invalid value of %q: %s is there twice.", text, name)
		case name == "metric.type" && (!known || !strings.HasPrefix(value, prefix)):
			return &apiError{404, "NOT_FOUND", "Cannot find metric(s) that match type = \"" + value + "\". If a metric was created recently, it could take up to 10 minutes to become available."}
		case name == "metric.type":
			q.metric = value
		default:
			q.labels[name] = value
		}
		rest = rest[len(m[0]):]
		if m[4] == "" {
			return nil
		}
	}
}

// takes reports whether a series matches the filter.
func (q *query) takes(s *api.TimeSeries) bool {
	for name, want := range q.labels {
		kind, label, _ := strings.Cut(name, ".labels.")
		got := s.Resource.Labels[label]
		switch {
		case name == "resource.type":
			got = s.Resource.Type
		case kind == "metric":
			got = s.Metric.Labels[label]
		}
		if got != want {
			return false
		}
	}
	return true
}

// maxPage is the most points of a page, and the default.
const maxPage = 100_000

// page cuts a page out of all series. A page token is the number of series before it.
func (q *query) page(all []*api.TimeSeries) (*api.ListTimeSeriesResponse, error) {
	if q.from > len(all) {
		return nil, invalid("The page token \"%d\" was not made by this list.", q.from)
	}
	out := &api.ListTimeSeriesResponse{}
	points := 0
	for i, s := range all[q.from:] {
		if q.headers {
			s.Points = nil
		}
		points += max(1, len(s.Points))
		if points > q.size && i > 0 { // at least one series, so that there is an end
			out.NextPageToken = strconv.Itoa(q.from + i)
			break
		}
		out.TimeSeries = append(out.TimeSeries, s)
		out.Unit = s.Unit
	}
	return out, nil
}
