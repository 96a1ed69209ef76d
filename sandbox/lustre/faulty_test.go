package lustre

import (
	"context"
	"errors"
	"testing"
	"time"

	api "github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/sandbox/faults"
)

func TestFaultyOperations(t *testing.T) {
	noted := make(chan string, 100)
	set := &faults.Set{Journal: func(e faults.Entry) { noted <- e.What }}
	s := &Server{options: Options{Faults: set}}
	fault := func(key, value string) {
		t.Helper()
		if err := set.Set(key, value); err != nil {
			t.Fatal(err)
		}
	}
	wait := func(what string) {
		t.Helper()
		for {
			select {
			case got := <-noted:
				if got == what {
					return
				}
			case <-time.After(30 * time.Second):
				t.Fatalf("never: %s", what)
			}
		}
	}
	worked, abandoned := 0, 0
	run := func(ctx context.Context, method string) error {
		_, err := s.faulty(ctx, method, "op", func(context.Context) (any, error) { worked++; return nil, nil }, func() { abandoned++ })
		return err
	}
	for value, code := range map[string]rpcCode{"UNAVAILABLE": 14, "PERMISSION_DENIED": 7, "STRANGE": 13, "/503": 14, "DATA_LOSS/500": 15} {
		fault("operation.lustre.instances.importData.error", value+",count=1")
		err := run(t.Context(), "instances.importData")
		var e *rpcError
		if !errors.As(err, &e) || e.code != code {
			t.Errorf("%s: %v, want code %d", value, err, code)
		}
	}
	if worked != 0 || abandoned != 5 {
		t.Errorf("worked %d times, abandoned %d times, want 0 and 5", worked, abandoned)
	}
	fault("operation.lustre.hang", "after")
	done := make(chan error)
	go func() { done <- run(t.Context(), "instances.delete") }()
	wait("hangs after its work")
	set.ClearAll()
	if err := <-done; err != nil || worked != 1 {
		t.Errorf("after the hang: %v, worked %d times", err, worked)
	}
	fault("operation.lustre.hang", "before")
	ctx, cancel := context.WithCancel(t.Context())
	go func() { done <- run(ctx, "instances.exportData") }()
	wait("hangs before its work")
	cancel()
	<-done // a cancelled operation does not hang
}

func TestMethodOf(t *testing.T) {
	for want, meta := range map[string]api.OperationMetadata{
		"instances.create": {Type: api.TypeOperation, Verb: "create"}, "instances.patch": {Type: api.TypeOperation, Verb: "update"},
		"instances.delete": {Type: api.TypeOperation, Verb: "delete"}, "instances.importData": {Type: api.TypeImport},
		"instances.exportData": {Type: api.TypeExport, Verb: "export"},
	} {
		if got := methodOf(meta); got != want {
			t.Errorf("methodOf(%+v) = %s, want %s", meta, got, want)
		}
	}
}

func TestObjectsThatFail(t *testing.T) {
	set := new(faults.Set)
	if err := set.Set(faults.OperationLustreFailed, "2,count=1"); err != nil {
		t.Fatal(err)
	}
	x := &transfer{server: &Server{options: Options{Faults: set}}}
	x.setFailing("import")
	failed := 0
	for range 5 {
		if x.failsNow() != nil {
			failed++
		}
	}
	if failed != 2 {
		t.Errorf("%d objects fail, want 2", failed)
	}
}
