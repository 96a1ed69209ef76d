package sandbox

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	api "google.golang.org/api/compute/v1"
)

func setFault(t *testing.T, name, key, value string) {
	t.Helper()
	c, err := Open(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetFault(t.Context(), key, value); err != nil {
		t.Fatal(err)
	}
}

// ended waits for an operation.
func ended(t *testing.T, c *api.Service, op *api.Operation, err error) {
	t.Helper()
	for err == nil && op.Status != "DONE" {
		op, err = c.ZoneOperations.Wait(Project, Zone, op.Name).Do()
	}
	if err != nil || op.Error != nil {
		t.Fatalf("operation %+v: %v", op, err)
	}
}

// waitStatus waits until an instance has a status.
func waitStatus(t *testing.T, c *api.Service, name, status string) {
	t.Helper()
	become(t, "the status of "+name, status, func() any {
		in, err := c.Instances.Get(Project, Zone, name).Do()
		if err != nil {
			return err.Error()
		}
		return in.Status
	})
}

// A unit that notes on its disk that it was asked to end.
const notesTERM = `#!/bin/sh
cat >/etc/systemd/system/notes.service <<'EOF'
[Service]
ExecStart=/bin/sh -c 'trap "echo asked >>/var/lib/notes; exit 0" TERM; echo started >>/var/lib/notes; while :; do sleep 0.05; done'
EOF
systemctl daemon-reload
systemctl start notes
`

func TestVMsLoseTheirHost(t *testing.T) {
	const name = "test-host"
	c := cloud(t, testUp(t, name))
	insert(t, c, "a", notesTERM)
	notes := func(want string) {
		t.Helper()
		become(t, "notes", want, func() any {
			out, _, _ := run(t, name, "a", "", "cat", "/var/lib/notes")
			return out
		})
	}
	notes("started\n")
	run(t, name, "a", "", "sync")

	t.Run("host error", func(t *testing.T) {
		setFault(t, name, "compute.instance.a.host-error", "on")
		// Killed: nothing was asked to end; the disk is the same.
		notes("started\nstarted\n")
		waitStatus(t, c, "a", "RUNNING")
	})
	t.Run("preemption", func(t *testing.T) {
		began := time.Now()
		setFault(t, name, "compute.instance.a.preempt", "on")
		waitStatus(t, c, "a", "TERMINATED")
		if d := time.Since(began); d > 25*time.Second {
			t.Errorf("a guest that shuts down was waited for %v", d)
		}
		op, err := c.Instances.Start(Project, Zone, "a").Do()
		ended(t, c, op, err)
		notes("started\nstarted\nasked\nstarted\n")
	})
	t.Run("preemption of a guest that does not shut down", func(t *testing.T) {
		// A unit that ignores TERM: systemd waits for it longer than the host does.
		if _, errs, code := run(t, name, "a", "", "sh", "-c", `systemctl stop notes
printf '[Service]\nExecStart=/bin/sh -c "trap : TERM; while :; do sleep 0.05; done"\nTimeoutStopSec=1000\n' >/etc/systemd/system/stubborn.service
systemctl daemon-reload; systemctl start stubborn`); code != 0 {
			t.Fatal(errs)
		}
		setFault(t, name, "compute.instance.a.preempt", "2s")
		waitStatus(t, c, "a", "TERMINATED")
	})
	t.Run("a new VM of the name has a new disk", func(t *testing.T) {
		op, err := c.Instances.Delete(Project, Zone, "a").Do()
		ended(t, c, op, err)
		insert(t, c, "a", "")
		if out, _, code := run(t, name, "a", "", "cat", "/var/lib/notes"); code == 0 {
			t.Errorf("the notes of the old one: %q", out)
		}
	})
	t.Run("operations", func(t *testing.T) {
		list, err := c.ZoneOperations.List(Project, Zone).Filter("user=system").Do()
		if err != nil {
			t.Fatal(err)
		}
		count := map[string]int{}
		for _, op := range list.Items {
			count[op.OperationType]++
		}
		want := map[string]int{"compute.instances.hostError": 1, "compute.instances.automaticRestart": 1, "compute.instances.preempted": 2}
		if diff := cmp.Diff(want, count); diff != "" {
			t.Errorf("operations (-want +got):\n%s", diff)
		}
	})
}

// reachable is bash that says whether a TCP port answers, be it with a refusal.
func reachable(address, port string) string {
	return `out=$(timeout 1 bash -c 'exec 3<>/dev/tcp/` + address + `/` + port + `' 2>&1); case "$?$out" in 0*|*refused*) echo yes;; *) echo no;; esac`
}

func TestNetworkCuts(t *testing.T) {
	const name = "test-cut"
	s := testUp(t, name)
	c := cloud(t, s)
	for _, vm := range []string{"a", "b", "c"} {
		insert(t, c, vm, "")
	}
	check := func(want map[string]string) {
		t.Helper()
		got := map[string]string{}
		for _, pair := range [][2]string{{"a", "b"}, {"b", "a"}, {"a", "c"}, {"a", gatewayAddress}, {"c", gatewayAddress}, {"c", metadataAddress}} {
			port := "22"
			if strings.Contains(pair[1], ".") {
				port = "80"
			}
			out, errs, _ := run(t, name, pair[0], "", "bash", "-c", reachable(pair[1], port))
			if strings.Contains(errs, "resolve") {
				t.Fatal(errs)
			}
			if strings.TrimSpace(out) != "yes" {
				got[pair[0]+" to "+pair[1]] = "cut"
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("cuts (-want +got):\n%s", diff)
		}
	}
	check(map[string]string{})
	setFault(t, name, "network.cut.a.b", "on")
	check(map[string]string{"a to b": "cut", "b to a": "cut"})

	// The cut holds for a new VM of the name.
	op, err := c.Instances.Delete(Project, Zone, "b").Do()
	ended(t, c, op, err)
	insert(t, c, "b", "")
	check(map[string]string{"a to b": "cut", "b to a": "cut"})

	client, err := Open(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := client.ClearFault(t.Context(), "network.cut.a.b"); err != nil {
		t.Fatal(err)
	}
	setFault(t, name, "network.cut.c.apis", "on")
	check(map[string]string{"c to " + gatewayAddress: "cut", "c to " + metadataAddress: "cut"})
	setFault(t, name, "network.cut.c.apis", "on,for=10ms")
	become(t, "the cut", "yes", func() any {
		out, _, _ := run(t, name, "c", "", "bash", "-c", reachable(gatewayAddress, "80"))
		return strings.TrimSpace(out)
	})
	check(map[string]string{})
}

func TestTheFrontStandsBeforeAllServices(t *testing.T) {
	const name = "test-front"
	s := testUp(t, name)
	setFault(t, name, "api.*.status", "503")
	setFault(t, name, "clock.skew", "-48h")
	for service, path := range map[string]string{
		"compute": "/compute/v1/projects/p/zones", "lustre": "/v1/projects/p/locations", "iam": "/v1/projects/p/serviceAccounts", "storage": "/storage/v1/b",
	} {
		resp, err := http.Get(s.HostEndpoints.Compute + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		at, err := http.ParseTime(resp.Header.Get("Date"))
		if resp.StatusCode != 503 || err != nil || time.Since(at) < 47*time.Hour {
			t.Errorf("%s: %s, Date %s", service, resp.Status, resp.Header.Get("Date"))
		}
	}
	client, err := Open(name)
	if err != nil {
		t.Fatal(err)
	}
	log, err := client.FaultLog(context.Background())
	if err != nil || len(log.Entries) != 2+4 {
		t.Errorf("journal: %+v, %v", log, err)
	}
}
