package metadata_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/sandbox/compute"
	"github.com/sluicehpc/sluice/sandbox/hostile"
	"github.com/sluicehpc/sluice/sandbox/metadata"
)

func victim(t testing.TB) hostile.Target {
	c, err := compute.New(compute.Config{VMs: noVMs{}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	const v1 = "/computeMetadata/v1/"
	return hostile.Target{
		Service: "metadata", Patience: 50 * time.Millisecond, Address: "192.0.2.7:1", Header: map[string]string{"Metadata-Flavor": "Google"},
		Handler: metadata.New(metadata.Config{Instances: c, Workstation: []netip.Addr{netip.MustParseAddr("192.0.2.7")}}),
		Paths: []string{
			"/", v1, v1 + "instance/?recursive=true", v1 + "project/project-id", v1 + "instance/service-accounts/default/token",
			v1 + "instance/service-accounts/default/identity?audience=a&format=full", v1 + "project/attributes/?recursive=true&alt=text&wait_for_change=true",
		},
	}
}

func TestHostileRequests(t *testing.T) { hostile.Test(t, victim(t)) }

func FuzzHTTP(f *testing.F) { hostile.Fuzz(f, victim(f)) }
