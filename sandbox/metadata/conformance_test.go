package metadata_test

import (
	"regexp"
	"strings"
	"testing"
)

// documented are the keys of the metadata server that Google documents ("View and query VM metadata", "Predefined metadata keys"),
// of those that the sandbox can have; * is a name that a user gives, N a number.
var documented = `
instance/attributes/*
instance/cpu-platform
instance/description
instance/disks/N/device-name
instance/disks/N/index
instance/disks/N/interface
instance/disks/N/mode
instance/disks/N/type
instance/gce-workload-certificates
instance/guest-attributes
instance/hostname
instance/id
instance/image
instance/licenses/N/id
instance/machine-type
instance/maintenance-event
instance/name
instance/network-interfaces/N/access-configs/N/external-ip
instance/network-interfaces/N/access-configs/N/type
instance/network-interfaces/N/dns-servers
instance/network-interfaces/N/forwarded-ips
instance/network-interfaces/N/gateway
instance/network-interfaces/N/ip
instance/network-interfaces/N/ip-aliases
instance/network-interfaces/N/mac
instance/network-interfaces/N/mtu
instance/network-interfaces/N/network
instance/network-interfaces/N/nic-type
instance/network-interfaces/N/subnetmask
instance/partner-attributes
instance/preempted
instance/remaining-cpu-time
instance/scheduling/automatic-restart
instance/scheduling/on-host-maintenance
instance/scheduling/preemptible
instance/service-accounts/*/aliases
instance/service-accounts/*/email
instance/service-accounts/*/identity
instance/service-accounts/*/scopes
instance/service-accounts/*/token
instance/tags
instance/upcoming-maintenance/can_reschedule
instance/upcoming-maintenance/latest_window_start_time
instance/upcoming-maintenance/maintenance_status
instance/upcoming-maintenance/type
instance/upcoming-maintenance/window_end_time
instance/upcoming-maintenance/window_start_time
instance/virtual-clock/drift-token
instance/zone
project/attributes/*
project/numeric-project-id
project/project-id
universe/universe-domain
`

var (
	numbers = regexp.MustCompile(`/[0-9]+(/|$)`)
	given   = regexp.MustCompile(`/(attributes|service-accounts)/[^/]+`)
)

// TestConformance has every key that a VM sees.
func TestConformance(t *testing.T) {
	w := newWorld(t)
	known := map[string]bool{}
	for _, key := range strings.Fields(documented) {
		known[key] = true
	}
	if err := w.faults.Set("compute.instance.vm-1.maintenance", "60m"); err != nil {
		t.Fatal(err)
	}
	vm := from(t, vmAddress)
	event := get(t, vm, w.url+"/computeMetadata/v1/instance/maintenance-event", flavor, "Google")
	for event.status == 200 && event.body == "NONE" {
		event = get(t, vm, w.url+"/computeMetadata/v1/instance/maintenance-event?wait_for_change=true&timeout_sec=60&last_etag="+event.header.Get("ETag"), flavor, "Google")
	}
	got := get(t, vm, w.url+"/computeMetadata/v1/?recursive=true&alt=text", flavor, "Google")
	if got.status != 200 {
		t.Fatalf("got %d %s", got.status, got.body)
	}
	n := 0
	for _, line := range strings.Split(strings.TrimSpace(got.body), "\n") {
		key, _, ok := strings.Cut(line, " ")
		if !ok || !strings.Contains(key, "/") {
			continue // the next line of a value
		}
		n++
		key = given.ReplaceAllString(numbers.ReplaceAllString(key, "/N$1"), "/$1/*")
		if !known[key] {
			t.Errorf("the metadata server of Google has no %s", key)
		}
	}
	if n < 25 || !strings.Contains(got.body, "upcoming-maintenance") {
		t.Errorf("found %d keys in\n%s", n, got.body)
	}
}
