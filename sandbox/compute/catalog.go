package compute

import (
	"fmt"
	"maps"
	"slices"

	api "google.golang.org/api/compute/v1"
)

// machineType is what the sandbox knows of one. All zones have all of them.
type machineType struct {
	cpus     int
	memoryMB int
	gpus     int
	gpu      string // accelerator type
	ssds     int    // bundled local SSDs of 375 GiB (3,000 GiB on the newest types)
	platform string
	arm      bool
	shared   bool
}

// machineTypes are the GPU types that the public documentation lists, and small ones to try things
// out. Memory of a3-ultragpu, a4 and a4x is not confirmed.
var machineTypes = map[string]machineType{
	"a3-highgpu-1g":        {cpus: 26, memoryMB: 234 << 10, gpus: 1, gpu: "nvidia-h100-80gb", ssds: 2, platform: "Intel Sapphire Rapids"},
	"a3-highgpu-2g":        {cpus: 52, memoryMB: 468 << 10, gpus: 2, gpu: "nvidia-h100-80gb", ssds: 4, platform: "Intel Sapphire Rapids"},
	"a3-highgpu-4g":        {cpus: 104, memoryMB: 936 << 10, gpus: 4, gpu: "nvidia-h100-80gb", ssds: 8, platform: "Intel Sapphire Rapids"},
	"a3-highgpu-8g":        {cpus: 208, memoryMB: 1872 << 10, gpus: 8, gpu: "nvidia-h100-80gb", ssds: 16, platform: "Intel Sapphire Rapids"},
	"a3-edgegpu-8g":        {cpus: 208, memoryMB: 1872 << 10, gpus: 8, gpu: "nvidia-h100-80gb", ssds: 16, platform: "Intel Sapphire Rapids"},
	"a3-megagpu-8g":        {cpus: 208, memoryMB: 1872 << 10, gpus: 8, gpu: "nvidia-h100-mega-80gb", ssds: 16, platform: "Intel Sapphire Rapids"},
	"a3-ultragpu-8g":       {cpus: 224, memoryMB: 2952 << 10, gpus: 8, gpu: "nvidia-h200-141gb", ssds: 32, platform: "Intel Emerald Rapids"},
	"a4-highgpu-8g":        {cpus: 224, memoryMB: 3968 << 10, gpus: 8, gpu: "nvidia-b200", ssds: 32, platform: "Intel Emerald Rapids"},
	"a4x-highgpu-4g":       {cpus: 140, memoryMB: 884 << 10, gpus: 4, gpu: "nvidia-gb200", ssds: 4, platform: "NVIDIA Grace", arm: true},
	"a4x-maxgpu-4g-metal":  {cpus: 144, memoryMB: 960 << 10, gpus: 4, gpu: "nvidia-gb300", ssds: 4, platform: "NVIDIA Grace", arm: true},
	"a3-highgpu-8g-nolssd": {cpus: 208, memoryMB: 1872 << 10, gpus: 8, gpu: "nvidia-h100-80gb", platform: "Intel Sapphire Rapids"},
	"a3-megagpu-8g-nolssd": {cpus: 208, memoryMB: 1872 << 10, gpus: 8, gpu: "nvidia-h100-mega-80gb", platform: "Intel Sapphire Rapids"},
	"a4-highgpu-8g-nolssd": {cpus: 224, memoryMB: 3968 << 10, gpus: 8, gpu: "nvidia-b200", platform: "Intel Emerald Rapids"},

	"e2-micro":       {cpus: 2, memoryMB: 1 << 10, platform: "Intel Broadwell", shared: true},
	"e2-small":       {cpus: 2, memoryMB: 2 << 10, platform: "Intel Broadwell", shared: true},
	"e2-medium":      {cpus: 2, memoryMB: 4 << 10, platform: "Intel Broadwell", shared: true},
	"e2-standard-2":  {cpus: 2, memoryMB: 8 << 10, platform: "Intel Broadwell"},
	"e2-standard-4":  {cpus: 4, memoryMB: 16 << 10, platform: "Intel Broadwell"},
	"e2-standard-8":  {cpus: 8, memoryMB: 32 << 10, platform: "Intel Broadwell"},
	"e2-standard-16": {cpus: 16, memoryMB: 64 << 10, platform: "Intel Broadwell"},
	"e2-standard-32": {cpus: 32, memoryMB: 128 << 10, platform: "Intel Broadwell"},
	"n2-standard-2":  {cpus: 2, memoryMB: 8 << 10, platform: "Intel Cascade Lake"},
	"n2-standard-4":  {cpus: 4, memoryMB: 16 << 10, platform: "Intel Cascade Lake"},
	"n2-standard-8":  {cpus: 8, memoryMB: 32 << 10, platform: "Intel Cascade Lake"},
	"n2-standard-16": {cpus: 16, memoryMB: 64 << 10, platform: "Intel Cascade Lake"},
	"n2-standard-32": {cpus: 32, memoryMB: 128 << 10, platform: "Intel Cascade Lake"},
	"c2-standard-4":  {cpus: 4, memoryMB: 16 << 10, platform: "Intel Cascade Lake"},
	"c2-standard-8":  {cpus: 8, memoryMB: 32 << 10, platform: "Intel Cascade Lake"},
	"c2-standard-16": {cpus: 16, memoryMB: 64 << 10, platform: "Intel Cascade Lake"},
	"c2-standard-30": {cpus: 30, memoryMB: 120 << 10, platform: "Intel Cascade Lake"},
	"c2-standard-60": {cpus: 60, memoryMB: 240 << 10, platform: "Intel Cascade Lake"},
}

// always is the creation time of what was there before the project.
const always = "1969-12-31T16:00:00.000-08:00"

func (s *Server) zoneScopes() []string {
	var scopes []string
	for _, z := range s.zones {
		scopes = append(scopes, "zones/"+z)
	}
	return scopes
}

func (s *Server) apiMachineType(zone, name string) *api.MachineType {
	mt := machineTypes[name]
	self := s.link("zones", zone, "machineTypes", name)
	out := &api.MachineType{
		Kind:                         "compute#machineType",
		Id:                           stableID(self),
		Name:                         name,
		SelfLink:                     self,
		Zone:                         zone,
		CreationTimestamp:            always,
		Description:                  fmt.Sprintf("%d vCPUs, %d GB RAM", mt.cpus, mt.memoryMB>>10),
		GuestCpus:                    int64(mt.cpus),
		MemoryMb:                     int64(mt.memoryMB),
		IsSharedCpu:                  mt.shared,
		MaximumPersistentDisks:       128,
		MaximumPersistentDisksSizeGb: 263168,
		Architecture:                 "X86_64",
	}
	if mt.arm {
		out.Architecture = "ARM64"
	}
	if mt.gpus > 0 {
		out.Description += fmt.Sprintf(", %d %s", mt.gpus, mt.gpu)
		out.Accelerators = []*api.MachineTypeAccelerators{{GuestAcceleratorType: mt.gpu, GuestAcceleratorCount: int64(mt.gpus)}}
	}
	if mt.ssds > 0 {
		out.BundledLocalSsds = &api.BundledLocalSsds{DefaultInterface: "NVME", PartitionCount: int64(mt.ssds)}
	}
	return out
}

func (s *Server) machineTypeItems(zones ...string) []item {
	var items []item
	for _, zone := range zones {
		for name := range machineTypes {
			items = append(items, item{"zones/" + zone, name, always, s.apiMachineType(zone, name)})
		}
	}
	return items
}

func (s *Server) getMachineType(r *request) (any, *apiError) {
	name := r.PathValue("name")
	if _, ok := machineTypes[name]; !ok {
		return nil, notFound(s.resource(r.scope, "machineTypes", name))
	}
	return s.apiMachineType(r.zone, name), nil
}

func (s *Server) listMachineTypes(r *request) (any, *apiError) {
	return list[api.MachineType](r, "compute#machineTypeList", s.machineTypeItems(r.zone))
}

func (s *Server) aggregatedMachineTypes(r *request) (any, *apiError) {
	return aggregate[api.MachineType](r, "compute#machineTypeAggregatedList", "machineTypes", s.machineTypeItems(s.zones...), s.zoneScopes())
}

func (s *Server) apiZone(name string) *api.Zone {
	self := s.link("zones", name)
	return &api.Zone{
		Kind:                  "compute#zone",
		Id:                    stableID(self),
		Name:                  name,
		Description:           name,
		SelfLink:              self,
		CreationTimestamp:     always,
		Region:                s.link("regions", s.region),
		Status:                "UP",
		AvailableCpuPlatforms: s.platforms(),
	}
}

func (s *Server) platforms() []string {
	set := map[string]bool{}
	for _, mt := range machineTypes {
		set[mt.platform] = true
	}
	return slices.Sorted(maps.Keys(set))
}

func (s *Server) getZone(r *request) (any, *apiError) { return s.apiZone(r.zone), nil }

func (s *Server) listZones(r *request) (any, *apiError) {
	var items []item
	for _, z := range s.zones {
		items = append(items, item{"global", z, always, s.apiZone(z)})
	}
	return list[api.Zone](r, "compute#zoneList", items)
}

func (s *Server) apiRegion() *api.Region {
	self := s.link("regions", s.region)
	region := &api.Region{
		Kind:              "compute#region",
		Id:                stableID(self),
		Name:              s.region,
		Description:       s.region,
		SelfLink:          self,
		CreationTimestamp: always,
		Status:            "UP",
	}
	for _, z := range s.zones {
		region.Zones = append(region.Zones, s.link("zones", z))
	}
	return region
}

func (s *Server) getRegion(r *request) (any, *apiError) { return s.apiRegion(), nil }

func (s *Server) listRegions(r *request) (any, *apiError) {
	return list[api.Region](r, "compute#regionList", []item{{"global", s.region, always, s.apiRegion()}})
}

func (s *Server) networkLink() string { return s.link("global", "networks", "default") }

func (s *Server) subnetworkLink() string {
	return s.link("regions", s.region, "subnetworks", "default")
}

func (s *Server) apiNetwork() *api.Network {
	self := s.networkLink()
	return &api.Network{
		Kind:                  "compute#network",
		Id:                    stableID(self),
		Name:                  "default",
		Description:           "Default network for the project",
		SelfLink:              self,
		CreationTimestamp:     s.project.CreationTimestamp,
		AutoCreateSubnetworks: true,
		Mtu:                   1460,
		RoutingConfig:         &api.NetworkRoutingConfig{RoutingMode: "REGIONAL"},
		Subnetworks:           []string{s.subnetworkLink()},
	}
}

func (s *Server) apiSubnetwork() *api.Subnetwork {
	self := s.subnetworkLink()
	return &api.Subnetwork{
		Kind:                  "compute#subnetwork",
		Id:                    stableID(self),
		Name:                  "default",
		SelfLink:              self,
		CreationTimestamp:     s.project.CreationTimestamp,
		Network:               s.networkLink(),
		Region:                s.link("regions", s.region),
		IpCidrRange:           s.addresses.subnet.String(),
		GatewayAddress:        s.addresses.gateway().String(),
		PrivateIpGoogleAccess: true,
		Purpose:               "PRIVATE",
		StackType:             "IPV4_ONLY",
		Fingerprint:           fingerprint(self),
	}
}

func (s *Server) getNetwork(r *request) (any, *apiError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if name := r.PathValue("name"); name != "default" {
		return nil, notFound(s.resource(r.scope, "networks", name))
	}
	return s.apiNetwork(), nil
}

func (s *Server) listNetworks(r *request) (any, *apiError) {
	s.mu.Lock()
	n := s.apiNetwork()
	s.mu.Unlock()
	return list[api.Network](r, "compute#networkList", []item{{"global", n.Name, n.CreationTimestamp, n}})
}

func (s *Server) getSubnetwork(r *request) (any, *apiError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if name := r.PathValue("name"); name != "default" {
		return nil, notFound(s.resource(r.scope, "subnetworks", name))
	}
	return s.apiSubnetwork(), nil
}

func (s *Server) subnetworkItems() []item {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.apiSubnetwork()
	return []item{{"regions/" + s.region, n.Name, n.CreationTimestamp, n}}
}

func (s *Server) listSubnetworks(r *request) (any, *apiError) {
	return list[api.Subnetwork](r, "compute#subnetworkList", s.subnetworkItems())
}

func (s *Server) aggregatedSubnetworks(r *request) (any, *apiError) {
	return aggregate[api.Subnetwork](r, "compute#subnetworkAggregatedList", "subnetworks", s.subnetworkItems(), []string{"regions/" + s.region})
}
