package lustre_test

import (
	"testing"

	"github.com/sluicehpc/sluice/sandbox/hostile"
	"github.com/sluicehpc/sluice/sandbox/lustre"
	"github.com/sluicehpc/sluice/sandbox/storage"
)

func victim(t testing.TB) hostile.Target {
	bucket, err := storage.New(storage.Options{Dir: t.TempDir(), Project: "p"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { bucket.Close() })
	s, err := lustre.New(lustre.Options{Dir: t.TempDir(), Bucket: lustre.FromStorage(bucket)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	const p = "/v1/projects/p-1/locations"
	const z = p + "/us-central1-a"
	return hostile.Target{
		Service: "lustre", Handler: s,
		Paths: []string{
			p, z, z + "/instances", z + "/instances?instanceId=i", z + "/instances/i", z + "/instances/i?updateMask=description", z + "/instances/i:importData", z + "/instances/i:exportData",
			z + "/operations", z + "/operations/o", z + "/operations/o:cancel", p + "/-/instances", "/v1/projects/",
		},
		Bodies: []string{
			`{"filesystem":"scratch","capacityGib":"9000","perUnitStorageThroughput":"1000","network":"projects/p-1/global/networks/default"}`,
			`{"gcsPath":{"uri":"gs://corpus/../x/"},"lustrePath":{"path":"/../../etc"}}`, `{"gcsPath":{"uri":"gs://corpus/c4/"},"lustrePath":{"path":"/d\u0000"},"requestId":"x","serviceAccount":"\"<>@"}`,
			`{"description":"x","labels":{"A B":"c"},"accessRulesOptions":{"accessRules":[null]}}`,
		},
	}
}

func TestHostileRequests(t *testing.T) { hostile.Test(t, victim(t)) }

func FuzzHTTP(f *testing.F) { hostile.Fuzz(f, victim(f)) }
