package monitoring_test

import (
	"testing"
	"time"

	"github.com/sluicehpc/sluice/sandbox/hostile"
	"github.com/sluicehpc/sluice/sandbox/lustre"
	"github.com/sluicehpc/sluice/sandbox/monitoring"
)

func victim(testing.TB) hostile.Target {
	s := monitoring.New(monitoring.Options{Project: "sluice-sandbox", Lustre: &instances{usage: []lustre.Usage{{Instance: scratch}}}, Clock: &fakeClock{now: time.Unix(0, 0)}})
	s.Sample()
	const list = "/v3/" + project + "/timeSeries"
	return hostile.Target{Service: "monitoring", Handler: s, Paths: []string{
		list, list + "?interval.endTime=2026-01-02T03:04:05Z&view=FULL&filter=metric.type%3D%22lustre.googleapis.com%2Finstance%2Ffree_bytes%22", "/v3/" + project, "/v3/projects/",
	}}
}

func TestHostileRequests(t *testing.T) { hostile.Test(t, victim(t)) }

func FuzzHTTP(f *testing.F) { hostile.Fuzz(f, victim(f)) }
