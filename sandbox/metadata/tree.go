package metadata

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	api "google.golang.org/api/compute/v1"

	"github.com/sluicehpc/sluice/sandbox/compute"
)

// dir is a directory of the tree. Its entries are dirs or leaves: a string, a uint64, or a list of
// strings, which is lines in text (lines) or JSON even there (tags).
type dir struct {
	entries map[string]any
	keep    bool // names are the user's: they stay as they are in JSON
	list    bool // names are 0, 1, 2 …: a list in JSON
}

type (
	lines []string
	tags  []string
)

func names(entries map[string]any) dir { return dir{entries: entries} }

// listing is what a directory shows without recursive: its names, those of directories with a slash.
func (d dir) listing() lines {
	var out lines
	for _, name := range slices.Sorted(maps.Keys(d.entries)) {
		if _, ok := d.entries[name].(dir); ok {
			name += "/"
		}
		out = append(out, name)
	}
	return out
}

// jsonOf is the JSON form: names in camelCase.
func jsonOf(v any) any {
	switch v := v.(type) {
	case dir:
		if v.list {
			out := make([]any, len(v.entries))
			for i := range out {
				out[i] = jsonOf(v.entries[strconv.Itoa(i)])
			}
			return out
		}
		out := make(map[string]any, len(v.entries))
		for name, entry := range v.entries {
			if !v.keep {
				name = camel(name)
			}
			out[name] = jsonOf(entry)
		}
		return out
	case lines:
		return append([]string{}, v...)
	case tags:
		return append([]string{}, v...)
	}
	return v
}

func camel(name string) string {
	words := strings.Split(name, "-")
	for i, w := range words[1:] {
		words[i+1] = strings.ToUpper(w[:1]) + w[1:]
	}
	return strings.Join(words, "")
}

// textOf is the text form; a directory's is a line "path value" for each leaf.
func textOf(v any) string {
	switch v := v.(type) {
	case dir:
		var b strings.Builder
		v.walk("", func(path string, leaf any) {
			fmt.Fprintf(&b, "%s %s\n", path, strings.TrimSuffix(textOf(leaf), "\n"))
		})
		return b.String()
	case lines:
		if len(v) == 0 {
			return ""
		}
		return strings.Join(v, "\n") + "\n"
	case tags:
		body, _ := json.Marshal(append([]string{}, v...)) // cannot fail: strings
		return string(body)
	}
	return fmt.Sprint(v)
}

func (d dir) walk(prefix string, visit func(path string, leaf any)) {
	for _, name := range slices.Sorted(maps.Keys(d.entries)) {
		if sub, ok := d.entries[name].(dir); ok {
			sub.walk(prefix+name+"/", visit)
		} else {
			visit(prefix+name, d.entries[name])
		}
	}
}

func instanceTree(v compute.View, c caller) dir {
	in := v.Instance
	number := strconv.FormatUint(v.Project.Id, 10)
	zone := "projects/" + number + "/zones/" + last(in.Zone)
	disks := dir{entries: map[string]any{}, list: true}
	for i, d := range in.Disks {
		disks.entries[strconv.Itoa(i)] = names(map[string]any{
			"device-name": d.DeviceName,
			"index":       uint64(i),
			"interface":   d.Interface,
			"mode":        d.Mode,
			"type":        d.Type,
		})
	}
	nics := dir{entries: map[string]any{}, list: true}
	for i, nic := range in.NetworkInterfaces {
		nics.entries[strconv.Itoa(i)] = names(map[string]any{
			"ip":         nic.NetworkIP,
			"mac":        MAC(nic.NetworkIP),
			"network":    "projects/" + number + "/networks/" + last(nic.Network),
			"subnetmask": "255.255.255.255",
			"mtu":        uint64(1460),
		})
	}
	var tagItems tags
	if in.Tags != nil {
		tagItems = in.Tags.Items
	}
	instance := map[string]any{
		"attributes":         attributes(in.Metadata),
		"cpu-platform":       in.CpuPlatform,
		"description":        in.Description,
		"disks":              disks,
		"hostname":           v.Hostname,
		"id":                 in.Id,
		"image":              v.Image,
		"machine-type":       "projects/" + number + "/machineTypes/" + last(in.MachineType),
		"maintenance-event":  v.MaintenanceEvent,
		"name":               in.Name,
		"network-interfaces": nics,
		"preempted":          upper(v.Preempted),
		"service-accounts":   accounts(c),
		"tags":               tagItems,
		"zone":               zone,
	}
	if u := v.Upcoming; u != nil {
		instance["upcoming-maintenance"] = dir{keep: true, entries: map[string]any{
			"can_reschedule":           upper(u.CanReschedule),
			"latest_window_start_time": u.LatestWindowStartTime,
			"maintenance_status":       u.MaintenanceStatus,
			"type":                     u.Type,
			"window_end_time":          u.WindowEndTime,
			"window_start_time":        u.WindowStartTime,
		}}
	}
	if sch := in.Scheduling; sch != nil {
		instance["scheduling"] = names(map[string]any{
			"automatic-restart":   upper(sch.AutomaticRestart != nil && *sch.AutomaticRestart),
			"on-host-maintenance": sch.OnHostMaintenance,
			"preemptible":         upper(sch.Preemptible),
		})
	}
	return root(v.Project, instance)
}

// workstationTree is what a machine sees that is no VM but works for the project.
func workstationTree(p compute.ProjectView, c caller) dir {
	return root(p.Project, map[string]any{
		"attributes":       attributes(nil),
		"service-accounts": accounts(c),
		"zone":             "projects/" + strconv.FormatUint(p.Project.Id, 10) + "/zones/" + p.Zone,
	})
}

func root(project *api.Project, instance map[string]any) dir {
	return names(map[string]any{
		"instance": names(instance),
		"project": names(map[string]any{
			"attributes":         attributes(project.CommonInstanceMetadata),
			"numeric-project-id": project.Id,
			"project-id":         project.Name,
		}),
		"universe": names(map[string]any{"universe-domain": "googleapis.com"}),
	})
}

func attributes(m *api.Metadata) dir {
	d := dir{entries: map[string]any{}, keep: true}
	if m != nil {
		for _, item := range m.Items {
			d.entries[item.Key] = *item.Value
		}
	}
	return d
}

func accounts(c caller) dir {
	d := dir{entries: map[string]any{}, keep: true}
	if c.account == "" {
		return d
	}
	account := names(map[string]any{
		"aliases": lines{"default"},
		"email":   c.account,
		"scopes":  lines(c.scopes),
	})
	d.entries["default"], d.entries[c.account] = account, account
	return d
}

// MAC is the hardware address that Compute Engine gives to the interface with an IPv4 address:
// 42:01 and the address. It is "" for anything else.
func MAC(ip string) string {
	a, err := netip.ParseAddr(ip)
	if err != nil || !a.Is4() {
		return ""
	}
	b := a.As4()
	return fmt.Sprintf("42:01:%02x:%02x:%02x:%02x", b[0], b[1], b[2], b[3])
}

func upper(b bool) string { return strings.ToUpper(strconv.FormatBool(b)) }

func last(link string) string { return link[strings.LastIndexByte(link, '/')+1:] }
