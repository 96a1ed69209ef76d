// Package compute makes, finds and deletes Compute Engine VMs of one zone.
package compute

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path"
	"slices"
	"time"

	compute "cloud.google.com/go/compute/apiv1"
	"cloud.google.com/go/compute/apiv1/computepb"
	"google.golang.org/api/iterator"
	"google.golang.org/protobuf/proto"

	"github.com/sluicehpc/sluice/gcp"
)

// Config says where the VMs are.
type Config struct {
	Project  string
	Zone     string // for example "us-central1-a"
	Endpoint string // URL without a path; empty: Google's own
}

// Client talks to Compute Engine as the machine's service account. Its methods may be called at the
// same time, wait at most as long as their context allows, and repeat calls that may succeed later
// (gcp.Retryable). Errors of the service keep their meaning for gcp.IsNotFound and the like.
type Client struct {
	project, zone string
	instances     *compute.InstancesClient
	operations    *compute.ZoneOperationsClient
}

// New connects a client. Close it after use.
func New(ctx context.Context, cfg Config) (*Client, error) {
	if cfg.Project == "" || cfg.Zone == "" {
		return nil, fmt.Errorf("compute: project %q or zone %q is missing", cfg.Project, cfg.Zone)
	}
	options := gcp.ClientOptions(cfg.Endpoint)
	instances, err := compute.NewInstancesRESTClient(ctx, options...)
	if err != nil {
		return nil, fmt.Errorf("compute: %w", err)
	}
	operations, err := compute.NewZoneOperationsRESTClient(ctx, options...)
	if err != nil {
		instances.Close()
		return nil, fmt.Errorf("compute: %w", err)
	}
	return &Client{project: cfg.Project, zone: cfg.Zone, instances: instances, operations: operations}, nil
}

// Close frees the client's connections.
func (c *Client) Close() error { return errors.Join(c.instances.Close(), c.operations.Close()) }

// Spec is what a VM is made of.
type Spec struct {
	MachineType       string            // name, for example "a3-highgpu-8g"
	Image             string            // "projects/P/global/images/NAME" or "…/images/family/FAMILY"
	DiskSizeGB        int64             // boot disk; 0: the image's size
	Network           string            // "global/networks/NAME"; empty with a Subnetwork
	Subnetwork        string            // "regions/R/subnetworks/NAME", or empty
	ServiceAccount    string            // email, or "" for none
	Tags              []string          // network tags
	Labels            map[string]string // or nil
	Metadata          map[string]string // or nil
	ProvisioningModel string            // STANDARD (default), SPOT, FLEX_START, RESERVATION_BOUND
}

// BulkInsertRequest asks for VMs of the given names, all of one Spec.
type BulkInsertRequest struct {
	// RequestID is a UUID that stands for this intent. The same one with the same request starts
	// nothing twice, for at least 60 minutes.
	RequestID string
	Names     []string // 1 to 1,000
	// MinCount is how many must come up; if fewer do, those that did are deleted again. 0: all.
	MinCount int
	Spec
}

// InsertRequest asks for one VM.
type InsertRequest struct {
	RequestID string // as in BulkInsertRequest
	Name      string
	Address   netip.Addr // in the subnetwork; the zero value leaves the choice to the service
	Spec
}

// Instance is a VM as the service shows it.
type Instance struct {
	ID          uint64
	Name        string
	Status      string // PROVISIONING, STAGING, RUNNING, STOPPING, TERMINATED …
	Address     netip.Addr
	MachineType string // name
	Zone        string // name
	Labels      map[string]string
	Metadata    map[string]string
	Created     time.Time
}

var (
	errNoRequestID = errors.New("a change needs a request id")
	errNoNames     = errors.New("no names given")
)

// scopes give a VM's service account all that its roles allow: IAM decides, not the scope.
var scopes = []string{"https://www.googleapis.com/auth/cloud-platform"}

// BulkInsert begins to make VMs and returns the operation's name for WaitOperation. Of names that
// exist already only those are missing in the result: compare with List afterwards.
func (c *Client) BulkInsert(ctx context.Context, r BulkInsertRequest) (operation string, err error) {
	switch {
	case r.RequestID == "":
		return "", fmt.Errorf("create instances: %w", errNoRequestID)
	case len(r.Names) == 0:
		return "", fmt.Errorf("create instances: %w", errNoNames)
	}
	body := &computepb.BulkInsertInstanceResource{
		Count:                 proto.Int64(int64(len(r.Names))),
		PerInstanceProperties: map[string]*computepb.BulkInsertInstanceResourcePerInstanceProperties{},
		InstanceProperties:    r.properties(),
	}
	if r.MinCount > 0 {
		body.MinCount = proto.Int64(int64(r.MinCount))
	}
	for _, name := range r.Names {
		body.PerInstanceProperties[name] = &computepb.BulkInsertInstanceResourcePerInstanceProperties{}
	}
	op, err := c.instances.BulkInsert(ctx, &computepb.BulkInsertInstanceRequest{
		Project:                            c.project,
		Zone:                               c.zone,
		RequestId:                          proto.String(r.RequestID),
		BulkInsertInstanceResourceResource: body,
	}, gcp.CallOption())
	if err != nil {
		return "", gcp.Wrap(err, fmt.Sprintf("create %d instances from %s on", len(r.Names), r.Names[0]))
	}
	return op.Name(), nil
}

// Insert begins to make a VM and returns the operation's name for WaitOperation. An error for which
// gcp.IsAlreadyExists holds says that the name is taken.
func (c *Client) Insert(ctx context.Context, r InsertRequest) (operation string, err error) {
	if r.RequestID == "" {
		return "", fmt.Errorf("create instance %s: %w", r.Name, errNoRequestID)
	}
	p := r.properties()
	if r.Address.IsValid() {
		p.NetworkInterfaces[0].NetworkIP = proto.String(r.Address.String())
	}
	op, err := c.instances.Insert(ctx, &computepb.InsertInstanceRequest{
		Project:   c.project,
		Zone:      c.zone,
		RequestId: proto.String(r.RequestID),
		InstanceResource: &computepb.Instance{
			Name:              proto.String(r.Name),
			MachineType:       proto.String("zones/" + c.zone + "/machineTypes/" + r.MachineType),
			Disks:             p.Disks,
			NetworkInterfaces: p.NetworkInterfaces,
			ServiceAccounts:   p.ServiceAccounts,
			Labels:            p.Labels,
			Metadata:          p.Metadata,
			Tags:              p.Tags,
			Scheduling:        p.Scheduling,
		},
	}, gcp.CallOption())
	if err != nil {
		return "", gcp.Wrap(err, "create instance "+r.Name)
	}
	return op.Name(), nil
}

// properties says it in the API's words. The same Spec gives the same message, so that a repeated
// request is the same one for the service.
func (s *Spec) properties() *computepb.InstanceProperties {
	disk := &computepb.AttachedDiskInitializeParams{SourceImage: proto.String(s.Image)}
	if s.DiskSizeGB > 0 {
		disk.DiskSizeGb = proto.Int64(s.DiskSizeGB)
	}
	nic := &computepb.NetworkInterface{}
	if s.Network != "" {
		nic.Network = proto.String(s.Network)
	}
	if s.Subnetwork != "" {
		nic.Subnetwork = proto.String(s.Subnetwork)
	}
	p := &computepb.InstanceProperties{
		MachineType: proto.String(s.MachineType),
		Disks: []*computepb.AttachedDisk{{
			Boot: proto.Bool(true), AutoDelete: proto.Bool(true), InitializeParams: disk,
		}},
		NetworkInterfaces: []*computepb.NetworkInterface{nic},
		Labels:            s.Labels,
	}
	if s.ServiceAccount != "" {
		p.ServiceAccounts = []*computepb.ServiceAccount{{Email: proto.String(s.ServiceAccount), Scopes: scopes}}
	}
	if len(s.Tags) > 0 {
		p.Tags = &computepb.Tags{Items: s.Tags}
	}
	if len(s.Metadata) > 0 {
		p.Metadata = &computepb.Metadata{}
		for _, key := range slices.Sorted(maps.Keys(s.Metadata)) {
			p.Metadata.Items = append(p.Metadata.Items, &computepb.Items{Key: proto.String(key), Value: proto.String(s.Metadata[key])})
		}
	}
	if s.ProvisioningModel != "" {
		p.Scheduling = &computepb.Scheduling{ProvisioningModel: proto.String(s.ProvisioningModel)}
	}
	return p
}

// Get returns a VM, or an error for which gcp.IsNotFound holds.
func (c *Client) Get(ctx context.Context, name string) (Instance, error) {
	in, err := c.instances.Get(ctx, &computepb.GetInstanceRequest{Project: c.project, Zone: c.zone, Instance: name}, gcp.CallOption())
	if err != nil {
		return Instance{}, gcp.Wrap(err, "look at instance "+name)
	}
	return instance(in), nil
}

// List returns the zone's VMs that match a filter of the API ("labels.sluice-deployment=x"; empty:
// all), sorted by name.
func (c *Client) List(ctx context.Context, filter string) ([]Instance, error) {
	request := &computepb.ListInstancesRequest{Project: c.project, Zone: c.zone}
	if filter != "" {
		request.Filter = proto.String(filter)
	}
	var all []Instance
	it := c.instances.List(ctx, request, gcp.CallOption())
	for {
		in, err := it.Next()
		if errors.Is(err, iterator.Done) {
			return all, nil
		}
		if err != nil {
			return nil, gcp.Wrap(err, "list instances")
		}
		all = append(all, instance(in))
	}
}

// Delete begins to delete a VM and returns the operation's name for WaitOperation, or "" when
// there is no such VM.
func (c *Client) Delete(ctx context.Context, requestID, name string) (operation string, err error) {
	if requestID == "" {
		return "", fmt.Errorf("delete instance %s: %w", name, errNoRequestID)
	}
	op, err := c.instances.Delete(ctx, &computepb.DeleteInstanceRequest{
		Project: c.project, Zone: c.zone, Instance: name, RequestId: proto.String(requestID),
	}, gcp.CallOption())
	if gcp.IsNotFound(err) {
		return "", nil
	}
	if err != nil {
		return "", gcp.Wrap(err, "delete instance "+name)
	}
	return op.Name(), nil
}

func instance(in *computepb.Instance) Instance {
	out := Instance{
		ID:          in.GetId(),
		Name:        in.GetName(),
		Status:      in.GetStatus(),
		MachineType: path.Base(in.GetMachineType()),
		Zone:        path.Base(in.GetZone()),
		Labels:      in.GetLabels(),
	}
	if nics := in.GetNetworkInterfaces(); len(nics) > 0 {
		out.Address, _ = netip.ParseAddr(nics[0].GetNetworkIP()) // none yet while it is PROVISIONING
	}
	for _, item := range in.GetMetadata().GetItems() {
		if out.Metadata == nil {
			out.Metadata = map[string]string{}
		}
		out.Metadata[item.GetKey()] = item.GetValue()
	}
	out.Created, _ = time.Parse(time.RFC3339, in.GetCreationTimestamp()) // zero when the service sends none
	return out
}
