package compute_test

import (
	"testing"

	"github.com/sluicehpc/sluice/sandbox/compute"
	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/hostile"
)

func victim(t testing.TB) hostile.Target {
	s, err := compute.New(compute.Config{VMs: &machines{running: map[string]compute.Machine{}}, Faults: new(faults.Set)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	if err := s.AddImage("debian-13", "debian", "the VMs' root"); err != nil {
		t.Fatal(err)
	}
	const p = "/compute/v1/projects/" + project
	const vm = `{"name":"n-1","machineType":"zones/us-central1-a/machineTypes/n2-standard-2","disks":[{"boot":true,"initializeParams":{"sourceImage":"global/images/debian-13"}}],"networkInterfaces":[{"network":"global/networks/default"}]}`
	const properties = `"instanceProperties":{"machineType":"n2-standard-2","disks":[{"boot":true,"initializeParams":{"sourceImage":"global/images/debian-13"}}],"networkInterfaces":[{}]}`
	return hostile.Target{
		Service: "compute", Handler: s,
		Paths: []string{
			p, p + "/setCommonInstanceMetadata", p + "/zones", p + "/zones/" + zone, p + "/zones/" + zone + "/instances", p + "/zones/" + zone + "/instances/n-1",
			p + "/zones/" + zone + "/instances/bulkInsert", p + "/zones/" + zone + "/instances/n-1/setMetadata", p + "/zones/" + zone + "/instances/n-1/setLabels",
			p + "/zones/" + zone + "/instances/n-1/serialPort", p + "/zones/" + zone + "/operations/operation-1/wait", p + "/aggregated/instances",
			p + "/regions/us-central1/instances/bulkInsert", p + "/global/instanceTemplates", p + "/global/images", "/compute/v1/",
		},
		Bodies: []string{
			vm, `{"count":"2","namePattern":"m-##",` + properties + `}`, `{"count":2,"perInstanceProperties":{"a-1":{},"a-2":{"name":"a-2"}},` + properties + `}`,
			`{"fingerprint":"x","items":[{"key":"a","value":"b"}]}`, `{"labelFingerprint":"x","labels":{"a":"b"}}`, `{"name":"t-1","properties":{"machineType":"n2-standard-2"}}`,
			`{"name":"i-1","family":"f","sourceDisk":"x"}`,
		},
	}
}

func TestHostileRequests(t *testing.T) { hostile.Test(t, victim(t)) }

func FuzzHTTP(f *testing.F) { hostile.Fuzz(f, victim(f)) }
