package compute

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	api "google.golang.org/api/compute/v1"
)

// plan is an instance that was checked but has no name yet.
type plan struct {
	properties *api.Instance
	image      string
	requested  netip.Addr // the networkIP asked for, or invalid
}

// planInstance checks what insert and bulkInsert have in common and fills in defaults. at is the
// path of the properties in the request ("resource", "resource.instanceProperties"). s.mu is held.
func (s *Server) planInstance(zone, at string, in *api.Instance) (*plan, *apiError) {
	p := &plan{properties: in}
	if in.MachineType == "" {
		return nil, required(at + ".machineType")
	}
	parts, ok := s.relative(in.MachineType)
	if !ok || len(parts) != 4 || parts[0] != "zones" || parts[2] != "machineTypes" {
		return nil, invalid(at+".machineType", in.MachineType, "The URL is malformed.")
	}
	if parts[1] != zone {
		return nil, invalid(at+".machineType", in.MachineType, "The machine type is in another zone than the instance.")
	}
	mt, ok := machineTypes[parts[3]]
	if !ok {
		return nil, invalid(at+".machineType", in.MachineType,
			fmt.Sprintf("Machine type with name '%s' does not exist in zone '%s'.", parts[3], zone))
	}
	in.MachineType = s.link("zones", zone, "machineTypes", parts[3])
	if mt.gpus > 0 {
		in.GuestAccelerators = []*api.AcceleratorConfig{{
			AcceleratorCount: int64(mt.gpus),
			AcceleratorType:  s.link("zones", zone, "acceleratorTypes", mt.gpu),
		}}
	}
	if in.Hostname != "" && (len(in.Hostname) > 253 || !hostnameRE.MatchString(in.Hostname)) {
		return nil, invalid(at+".hostname", in.Hostname, "Must be a fully qualified RFC1035 domain name.")
	}
	if err := checkLabels(at+".labels", in.Labels); err != nil {
		return nil, err
	}
	in.LabelFingerprint = fingerprint("labels", in.Labels)
	if in.Metadata == nil {
		in.Metadata = &api.Metadata{}
	}
	if err := checkMetadata(at+".metadata", in.Metadata); err != nil {
		return nil, err
	}
	in.Metadata.Kind = "compute#metadata"
	in.Metadata.Fingerprint = metadataFingerprint(in.Metadata)
	if in.Tags == nil {
		in.Tags = &api.Tags{}
	}
	for i, tag := range in.Tags.Items {
		if !nameRE.MatchString(tag) {
			return nil, invalid(fmt.Sprintf("%s.tags.items[%d]", at, i), tag, fmt.Sprintf("Must be a match of regex '(?:%s)'", nameRule))
		}
	}
	in.Tags.Fingerprint = fingerprint("tags", in.Tags.Items)
	if err := s.planAccounts(at, in); err != nil {
		return nil, err
	}
	if err := s.planDisks(zone, at, p); err != nil {
		return nil, err
	}
	if err := s.planNetwork(at, p); err != nil {
		return nil, err
	}
	if err := planScheduling(at, in); err != nil {
		return nil, err
	}
	in.Kind, in.Zone, in.CpuPlatform = "compute#instance", s.link("zones", zone), mt.platform
	return p, nil
}

func (s *Server) planAccounts(at string, in *api.Instance) *apiError {
	if len(in.ServiceAccounts) > 1 {
		return invalid(at+".serviceAccounts", strconv.Itoa(len(in.ServiceAccounts)), "At most one service account is allowed.")
	}
	for _, a := range in.ServiceAccounts {
		switch a.Email {
		case "":
			return required(at + ".serviceAccounts[0].email")
		case "default":
			a.Email = s.DefaultServiceAccount()
		}
	}
	return nil
}

func (s *Server) planDisks(zone, at string, p *plan) *apiError {
	in := p.properties
	if len(in.Disks) == 0 || !in.Disks[0].Boot {
		return invalid(at+".disks", "", "Boot disk must be the first disk attached to the instance.")
	}
	if len(in.Disks) > 128 {
		return invalid(at+".disks", strconv.Itoa(len(in.Disks)), "At most 128 disks are allowed.")
	}
	params := in.Disks[0].InitializeParams
	if params == nil || params.SourceImage == "" {
		return required(at + ".disks[0].initializeParams.sourceImage")
	}
	field := at + ".disks[0].initializeParams.sourceImage"
	image, err := s.findImage(field, params.SourceImage)
	if err != nil {
		return err
	}
	p.image = image.Name
	if params.DiskSizeGb != 0 && params.DiskSizeGb < image.DiskSizeGb {
		return invalid(at+".disks[0].initializeParams.diskSizeGb", strconv.FormatInt(params.DiskSizeGb, 10),
			fmt.Sprintf("Requested disk size cannot be smaller than the image size (%d GB)", image.DiskSizeGb))
	}
	for i, d := range in.Disks {
		if i > 0 && d.Boot {
			return invalid(fmt.Sprintf("%s.disks[%d].boot", at, i), "true", "Boot disk must be the first disk attached to the instance.")
		}
		d.Kind, d.Index = "compute#attachedDisk", int64(i)
		if d.Type == "" {
			d.Type = "PERSISTENT"
		}
		if d.Mode == "" {
			d.Mode = "READ_WRITE"
		}
		if d.Interface == "" {
			d.Interface = "SCSI"
		}
		if d.DeviceName == "" {
			d.DeviceName = fmt.Sprintf("persistent-disk-%d", i)
		}
		if d.InitializeParams != nil {
			d.DiskSizeGb = d.InitializeParams.DiskSizeGb
		}
	}
	if in.Disks[0].DiskSizeGb == 0 {
		in.Disks[0].DiskSizeGb = image.DiskSizeGb
	}
	return nil
}

func (s *Server) planNetwork(at string, p *plan) *apiError {
	in := p.properties
	if len(in.NetworkInterfaces) == 0 {
		return invalid(at+".networkInterfaces", "", "At least one network interface is required.")
	}
	if len(in.NetworkInterfaces) > 1 {
		return invalid(at+".networkInterfaces", strconv.Itoa(len(in.NetworkInterfaces)), "Networks must be distinct for NICs attached to a VM.")
	}
	nic := in.NetworkInterfaces[0]
	at += ".networkInterfaces[0]"
	for _, ref := range []struct {
		field, value string
		want         []string
	}{
		{at + ".network", nic.Network, []string{"global", "networks", "default"}},
		{at + ".subnetwork", nic.Subnetwork, []string{"regions", s.region, "subnetworks", "default"}},
	} {
		if ref.value == "" {
			continue
		}
		parts, ok := s.relative(ref.value)
		if !ok {
			return invalid(ref.field, ref.value, "The URL is malformed.")
		}
		if !slices.Equal(parts, ref.want) {
			return invalid(ref.field, ref.value, "The referenced network resource cannot be found.")
		}
	}
	nic.Network, nic.Subnetwork = s.networkLink(), s.subnetworkLink()
	nic.Kind, nic.Name = "compute#networkInterface", "nic0"
	if nic.StackType == "" {
		nic.StackType = "IPV4_ONLY"
	}
	for _, a := range nic.AccessConfigs {
		a.Kind = "compute#accessConfig"
	}
	if nic.NetworkIP != "" {
		a, err := netip.ParseAddr(nic.NetworkIP)
		if err != nil || !s.addresses.contains(a) {
			return invalid(at+".networkIP", nic.NetworkIP, fmt.Sprintf("IP address must be a usable one of the subnetwork's range %s.", s.addresses.subnet))
		}
		p.requested = a
	}
	return nil
}

// planScheduling fills in and checks what the provisioning model implies.
func planScheduling(at string, in *api.Instance) *apiError {
	if in.Scheduling == nil {
		in.Scheduling = &api.Scheduling{}
	}
	sch := in.Scheduling
	at += ".scheduling"
	if sch.ProvisioningModel == "" {
		sch.ProvisioningModel = "STANDARD"
		if sch.Preemptible {
			sch.ProvisioningModel = "SPOT"
		}
	}
	if !slices.Contains([]string{"STANDARD", "SPOT", "FLEX_START", "RESERVATION_BOUND"}, sch.ProvisioningModel) {
		return invalid(at+".provisioningModel", sch.ProvisioningModel, "Must be one of [STANDARD, SPOT, FLEX_START, RESERVATION_BOUND].")
	}
	spot := sch.ProvisioningModel == "SPOT"
	sch.Preemptible = spot
	if sch.AutomaticRestart == nil {
		restart := !spot
		sch.AutomaticRestart = &restart
	}
	if spot && *sch.AutomaticRestart {
		return invalid(at+".automaticRestart", "true", "Scheduling must have automaticRestart be false when provisioningModel is SPOT.")
	}
	switch sch.OnHostMaintenance {
	case "":
		sch.OnHostMaintenance = "MIGRATE"
		if spot || len(in.GuestAccelerators) > 0 {
			sch.OnHostMaintenance = "TERMINATE"
		}
	case "MIGRATE":
		if spot || len(in.GuestAccelerators) > 0 {
			return invalid(at+".onHostMaintenance", "MIGRATE", "Instances with guest accelerators or of the SPOT model do not support live migration.")
		}
	case "TERMINATE":
	default:
		return invalid(at+".onHostMaintenance", sch.OnHostMaintenance, "Must be one of [MIGRATE, TERMINATE].")
	}
	return nil
}

// create adds an instance in PROVISIONING. s.mu is held.
func (s *Server) create(zone, name string, p *plan) (*instance, *opError) {
	if other := s.instances[name]; other != nil {
		return nil, opAlreadyExists(resource(other.link))
	}
	if failed := s.overQuota(p.properties); failed != nil {
		return nil, failed
	}
	address := p.requested
	if address.IsValid() {
		if _, used := s.addresses.used[address]; used {
			return nil, &opError{"IP_IN_USE_BY_ANOTHER_RESOURCE", fmt.Sprintf("IP '%s' is already being used by another resource.", address), 400}
		}
		s.addresses.used[address] = name
	} else {
		a, err := s.addresses.take(name)
		if errors.Is(err, errExhausted) {
			return nil, &opError{"IP_SPACE_EXHAUSTED", fmt.Sprintf("IP space of '%s' is exhausted.", s.resource("regions", s.region, "subnetworks", "default")), 400}
		}
		address = a
	}
	vm := clone(p.properties)
	vm.Name, vm.Id = name, newID()
	vm.SelfLink = s.link("zones", zone, "instances", name)
	vm.CreationTimestamp = timestamp(s.now())
	vm.NetworkInterfaces[0].NetworkIP = address.String()
	vm.NetworkInterfaces[0].Fingerprint = fingerprint("nic", vm.Id, address)
	for i, d := range vm.Disks {
		d.InitializeParams = nil
		disk := name
		if i > 0 {
			disk = fmt.Sprintf("%s-%d", name, i)
		}
		if d.Source == "" && d.Type == "PERSISTENT" {
			d.Source = s.link("zones", zone, "disks", disk)
		}
	}
	vm.Fingerprint = fingerprint("instance", vm.Id)
	in := &instance{
		api: vm, name: name, zone: zone, link: vm.SelfLink, image: p.image, address: address, maintenance: "NONE",
		changed: make(chan struct{}), turn: make(chan struct{}, 1),
	}
	in.giveTurn()
	vm.Status = ""
	if err := in.move("PROVISIONING"); err != nil {
		return nil, opInternal(err)
	}
	s.instances[name] = in
	return in, nil
}

// clone copies a value of the API deeply.
func clone[T any](v *T) *T {
	body, _ := json.Marshal(v) // cannot fail, nor the way back: a plain struct of the API
	out := new(T)
	_ = json.Unmarshal(body, out)
	return out
}

func (s *Server) insertInstance(r *request) (any, *apiError) {
	in := new(api.Instance)
	if err := decode(r.body, in); err != nil {
		return nil, err
	}
	if err := checkName("resource.name", in.Name); err != nil {
		return nil, err
	}
	return r.change(func() (*operation, *apiError) {
		if template := r.URL.Query().Get("sourceInstanceTemplate"); template != "" {
			props, err := s.templateProperties("sourceInstanceTemplate", template)
			if err != nil {
				return nil, err
			}
			if in, err = overlay(s.instanceOf(r.zone, props), r.body); err != nil {
				return nil, err
			}
		}
		if err := r.authorizeInstance(in, r.URL.Query().Get("sourceInstanceTemplate")); err != nil {
			return nil, err
		}
		p, err := s.planInstance(r.zone, "resource", in)
		if err != nil {
			return nil, err
		}
		name, target := in.Name, s.link("zones", r.zone, "instances", in.Name)
		if other := s.instances[name]; other != nil {
			return nil, alreadyExists(resource(other.link))
		}
		vm, failed := s.create(r.zone, name, p)
		if failed != nil {
			return s.begin(r.user(), r.scope, "compute.instances.insert", target, newID(), func(context.Context, *operation) *opError { return failed }), nil
		}
		op := s.newOperation(r.user(), r.scope, "compute.instances.insert", target, vm.api.Id)
		s.run(op, s.starting(vm, true))
		return op, nil
	})
}

// instanceOf turns a template's properties into an instance's.
func (s *Server) instanceOf(zone string, props *api.InstanceProperties) *api.Instance {
	body, _ := json.Marshal(props) // cannot fail: a struct of the API
	in := new(api.Instance)
	_ = json.Unmarshal(body, in) // the fields of the same name have the same type
	if in.MachineType != "" {
		in.MachineType = "zones/" + zone + "/machineTypes/" + in.MachineType
	}
	return in
}

// overlay returns base with the fields of the JSON object body in place of its own.
func overlay(base *api.Instance, body []byte) (*api.Instance, *apiError) {
	fields := map[string]json.RawMessage{}
	old, _ := json.Marshal(base) // cannot fail: a struct of the API
	for _, b := range [][]byte{old, body} {
		if err := json.Unmarshal(b, &fields); err != nil {
			return nil, &apiError{400, "badRequest", "Invalid JSON payload received. " + err.Error()}
		}
	}
	merged, _ := json.Marshal(fields) // cannot fail: made of valid JSON
	in := new(api.Instance)
	if err := decode(merged, in); err != nil {
		return nil, err
	}
	return in, nil
}

// instance finds the named one of the request's zone. s.mu is held.
func (r *request) instance() (*instance, *apiError) {
	name := r.PathValue("name")
	in := r.s.instances[name]
	if in == nil || in.zone != r.zone {
		return nil, notFound(r.s.resource("zones", r.zone, "instances", name))
	}
	return in, nil
}

func (s *Server) getInstance(r *request) (any, *apiError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	in, err := r.instance()
	if err != nil {
		return nil, err
	}
	return in.api, nil
}

// instanceItems returns the instances of a zone, or of all. s.mu is held.
func (s *Server) instanceItems(zone string) []item {
	var items []item
	for _, in := range s.instances {
		if zone == "" || in.zone == zone {
			items = append(items, item{"zones/" + in.zone, in.api.Name, in.api.CreationTimestamp, in.api})
		}
	}
	return items
}

func (s *Server) listInstances(r *request) (any, *apiError) {
	s.mu.Lock()
	items := s.instanceItems(r.zone)
	s.mu.Unlock()
	return list[api.Instance](r, "compute#instanceList", items)
}

func (s *Server) aggregatedInstances(r *request) (any, *apiError) {
	s.mu.Lock()
	items := s.instanceItems("")
	s.mu.Unlock()
	return aggregate[api.Instance](r, "compute#instanceAggregatedList", "instances", items, s.zoneScopes())
}

func (s *Server) deleteInstance(r *request) (any, *apiError) {
	return r.change(func() (*operation, *apiError) {
		in, err := r.instance()
		if err != nil {
			return nil, err
		}
		if in.api.DeletionProtection {
			return nil, invalid("resource.deletionProtection", "true", "Resource cannot be deleted if it's protected against deletion.")
		}
		if err := s.markDeleting(in); err != nil {
			return nil, &apiError{500, "backendError", err.Error()}
		}
		return s.begin(r.user(), r.scope, "compute.instances.delete", in.link, in.api.Id, func(ctx context.Context, _ *operation) *opError {
			return s.remove(ctx, in)
		}), nil
	})
}

func (s *Server) stopInstance(r *request) (any, *apiError) {
	return r.change(func() (*operation, *apiError) {
		in, err := r.instance()
		if err != nil {
			return nil, err
		}
		if in.deleting || in.api.Status != "RUNNING" && in.api.Status != "TERMINATED" {
			return nil, notReady(resource(in.link))
		}
		return s.begin(r.user(), r.scope, "compute.instances.stop", in.link, in.api.Id, func(ctx context.Context, _ *operation) *opError {
			if err := in.takeTurn(ctx); err != nil {
				return opInternal(err)
			}
			defer in.giveTurn()
			if s.status(in) != "RUNNING" { // somebody else was quicker
				return nil
			}
			if err := s.end(ctx, in, false, stopGrace); err != nil {
				return opInternal(err)
			}
			return nil
		}), nil
	})
}

func (s *Server) startInstance(r *request) (any, *apiError) {
	return r.change(func() (*operation, *apiError) {
		in, err := r.instance()
		if err != nil {
			return nil, err
		}
		if in.deleting || in.api.Status != "RUNNING" && in.api.Status != "TERMINATED" {
			return nil, notReady(resource(in.link))
		}
		w := s.faulty(nil, nil)
		if in.api.Status == "TERMINATED" {
			if err := in.move("PROVISIONING"); err != nil {
				return nil, &apiError{500, "backendError", err.Error()}
			}
			w = s.starting(in, false)
		}
		op := s.newOperation(r.user(), r.scope, "compute.instances.start", in.link, in.api.Id)
		s.run(op, w)
		return op, nil
	})
}

func (s *Server) status(in *instance) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return in.api.Status
}

func (s *Server) setMetadata(r *request) (any, *apiError) {
	meta := new(api.Metadata)
	if err := decode(r.body, meta); err != nil {
		return nil, err
	}
	if err := checkMetadata("resource", meta); err != nil {
		return nil, err
	}
	return r.changeInstance("compute.instances.setMetadata", func(vm *api.Instance) *apiError {
		if err := r.authorizeAccounts(vm); err != nil {
			return err
		}
		if meta.Fingerprint != vm.Metadata.Fingerprint {
			return conditionNotMet("Supplied fingerprint does not match current metadata fingerprint.")
		}
		meta.Kind, meta.Fingerprint = "compute#metadata", metadataFingerprint(meta)
		vm.Metadata = meta
		return nil
	})
}

func (s *Server) setLabels(r *request) (any, *apiError) {
	body := new(api.InstancesSetLabelsRequest)
	if err := decode(r.body, body); err != nil {
		return nil, err
	}
	if err := checkLabels("resource.labels", body.Labels); err != nil {
		return nil, err
	}
	return r.changeInstance("compute.instances.setLabels", func(vm *api.Instance) *apiError {
		if body.LabelFingerprint != vm.LabelFingerprint {
			return conditionNotMet("Labels fingerprint either invalid or resource labels have changed")
		}
		vm.Labels, vm.LabelFingerprint = body.Labels, fingerprint("labels", body.Labels)
		return nil
	})
}

// changeInstance runs a quick change of the request's instance.
func (r *request) changeInstance(kind string, f func(*api.Instance) *apiError) (any, *apiError) {
	s := r.s
	return r.change(func() (*operation, *apiError) {
		in, err := r.instance()
		if err != nil {
			return nil, err
		}
		if in.deleting {
			return nil, notReady(resource(in.link))
		}
		next := *in.api
		if err := f(&next); err != nil {
			return nil, err
		}
		next.Fingerprint = fingerprint("instance", next.Id, next.Metadata, next.Labels)
		in.api = &next
		in.notify()
		return s.begin(r.user(), r.scope, kind, next.SelfLink, next.Id, nil), nil
	})
}

// longestSerial is how much of a console one answer carries, in bytes.
const longestSerial = 1 << 20

func (s *Server) serialPort(r *request) (any, *apiError) {
	s.mu.Lock()
	in, err := r.instance()
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	q := r.URL.Query()
	var from int64
	if start := q.Get("start"); start != "" {
		n, err := strconv.ParseInt(start, 10, 64)
		if err != nil {
			return nil, invalid("start", start, "Must be a number.")
		}
		from = max(n, 0)
	}
	if port := q.Get("port"); port != "" && port != "1" {
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 4 {
			return nil, invalid("port", port, "Must be between 1 and 4.")
		}
	}
	out := &api.SerialPortOutput{Kind: "compute#serialPortOutput", Start: from, SelfLink: in.link + "/serialPort"}
	if s.cfg.Console != nil {
		contents, err := s.cfg.Console(in.name, from)
		if err != nil {
			return nil, &apiError{500, "backendError", err.Error()}
		}
		out.Contents = string(contents[:min(len(contents), longestSerial)])
	}
	out.Next = from + int64(len(out.Contents))
	out.ForceSendFields = []string{"Contents", "Start", "Next"}
	return out, nil
}
