package compute

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	api "google.golang.org/api/compute/v1"
)

// maxBulk is the most instances that one bulkInsert makes.
const maxBulk = 1000

// bulk is a checked bulkInsert.
type bulk struct {
	zone      string
	names     []string
	hostnames map[string]string
	minCount  int
	plan      *plan
}

func (s *Server) bulkInsert(r *request) (any, *apiError) {
	body := new(api.BulkInsertInstanceResource)
	if err := decode(r.body, body); err != nil {
		return nil, err
	}
	return r.change(func() (*operation, *apiError) {
		b, err := s.checkBulk(r, body)
		if err != nil {
			return nil, err
		}
		return s.beginBulk(r, b), nil
	})
}

// checkBulk validates a bulkInsert and finds its names. s.mu is held.
func (s *Server) checkBulk(r *request, body *api.BulkInsertInstanceResource) (*bulk, *apiError) {
	b := &bulk{zone: r.zone, hostnames: map[string]string{}}
	if body.Count < 1 || body.Count > maxBulk {
		return nil, invalid("resource.count", strconv.FormatInt(body.Count, 10), fmt.Sprintf("Must be between 1 and %d.", maxBulk))
	}
	if body.MinCount < 0 || body.MinCount > body.Count {
		return nil, invalid("resource.minCount", strconv.FormatInt(body.MinCount, 10), "Must not be greater than count.")
	}
	b.minCount = int(body.MinCount)
	if b.minCount == 0 {
		b.minCount = int(body.Count)
	}
	if err := s.bulkLocation(b, body); err != nil {
		return nil, err
	}
	if err := s.bulkNames(b, body); err != nil {
		return nil, err
	}

	props := body.InstanceProperties
	if body.SourceInstanceTemplate != "" {
		base, err := s.templateProperties("resource.sourceInstanceTemplate", body.SourceInstanceTemplate)
		if err != nil {
			return nil, err
		}
		if props, err = mergeProperties(base, props); err != nil {
			return nil, err
		}
	}
	if props == nil {
		return nil, required("resource.instanceProperties")
	}
	props = clone(props)
	if strings.Contains(props.MachineType, "/") {
		return nil, invalid("resource.instanceProperties.machineType", props.MachineType, "Must be the name of a machine type, not a URL.")
	}
	in := s.instanceOf(b.zone, props)
	if err := r.authorizeInstance(in, body.SourceInstanceTemplate); err != nil {
		return nil, err
	}
	p, err := s.planInstance(b.zone, "resource.instanceProperties", in)
	if err != nil {
		return nil, err
	}
	if p.requested.IsValid() && len(b.names) > 1 {
		return nil, invalid("resource.instanceProperties.networkInterfaces[0].networkIP", p.requested.String(), "Cannot be set for more than one instance.")
	}
	b.plan = p
	return b, nil
}

// bulkLocation picks the zone of a regional bulkInsert: the sandbox's own if the policy allows it.
func (s *Server) bulkLocation(b *bulk, body *api.BulkInsertInstanceResource) *apiError {
	policy := body.LocationPolicy
	if b.zone != "" {
		if policy != nil && len(policy.Locations) > 0 {
			return invalid("resource.locationPolicy", "", "Only regional requests may have a location policy.")
		}
		return nil
	}
	allowed, denied := []string{}, map[string]bool{}
	if policy != nil {
		for _, key := range slices.Sorted(maps.Keys(policy.Locations)) {
			zone, ok := strings.CutPrefix(key, "zones/")
			if !ok || !slices.Contains(s.zones, zone) {
				return invalid("resource.locationPolicy.locations", key, "Unknown zone.")
			}
			switch p := policy.Locations[key].Preference; p {
			case "ALLOW":
				allowed = append(allowed, zone)
			case "DENY":
				denied[zone] = true
			default:
				return invalid("resource.locationPolicy.locations["+key+"].preference", p, "Must be one of [ALLOW, DENY].")
			}
		}
	}
	if len(allowed) == 0 {
		allowed = append([]string{s.cfg.Zone}, s.zones...)
	}
	if slices.Contains(allowed, s.cfg.Zone) && !denied[s.cfg.Zone] {
		b.zone = s.cfg.Zone
		return nil
	}
	for _, zone := range allowed {
		if !denied[zone] {
			b.zone = zone
			return nil
		}
	}
	return invalid("resource.locationPolicy", "", "No zone is allowed.")
}

var patternRE = regexp.MustCompile(`^([^#]*)(#{1,18})([^#]*)$`)

// bulkNames makes the names: those of perInstanceProperties first, the rest of the pattern,
// counting from behind the highest number in use. s.mu is held.
func (s *Server) bulkNames(b *bulk, body *api.BulkInsertInstanceResource) *apiError {
	count := int(body.Count)
	for _, name := range slices.Sorted(maps.Keys(body.PerInstanceProperties)) {
		per := body.PerInstanceProperties[name]
		field := fmt.Sprintf("resource.perInstanceProperties[%s]", name)
		if err := checkName(field, name); err != nil {
			return err
		}
		if per.Name != "" && per.Name != name {
			return invalid(field+".name", per.Name, "Must be the key that it stands under.")
		}
		if per.Hostname != "" {
			if len(per.Hostname) > 253 || !hostnameRE.MatchString(per.Hostname) {
				return invalid(field+".hostname", per.Hostname, "Must be a fully qualified RFC1035 domain name.")
			}
			b.hostnames[name] = per.Hostname
		}
		b.names = append(b.names, name)
	}
	if len(b.names) > count {
		return invalid("resource.perInstanceProperties", strconv.Itoa(len(b.names)), "Must not have more entries than count.")
	}
	if len(b.names) == count {
		return nil
	}
	if body.NamePattern == "" {
		if len(b.names) > 0 {
			return invalid("resource.perInstanceProperties", strconv.Itoa(len(b.names)), "Must have count entries when there is no namePattern.")
		}
		return required("resource.namePattern")
	}
	m := patternRE.FindStringSubmatch(body.NamePattern)
	if m == nil {
		return invalid("resource.namePattern", body.NamePattern, "Must contain one sequence of 1 to 18 '#'.")
	}
	prefix, digits, suffix := m[1], len(m[2]), m[3]
	if err := checkName("resource.namePattern", prefix+strings.Repeat("0", digits)+suffix); err != nil {
		return err
	}
	highest := uint64(0)
	for name := range s.instances {
		rest, ok := strings.CutPrefix(name, prefix)
		rest, ok2 := strings.CutSuffix(rest, suffix)
		if n, err := strconv.ParseUint(rest, 10, 64); ok && ok2 && len(rest) == digits && err == nil {
			highest = max(highest, n)
		}
	}
	for len(b.names) < count {
		highest++
		name := fmt.Sprintf("%s%0*d%s", prefix, digits, highest, suffix)
		if len(name) != len(body.NamePattern) {
			return invalid("resource.namePattern", body.NamePattern, "The pattern has not enough '#' for the requested count.")
		}
		if !slices.Contains(b.names, name) {
			b.names = append(b.names, name)
		}
	}
	return nil
}

// mergeProperties overrides a template's properties as RFC 7396 (JSON Merge Patch) says.
func mergeProperties(base, patch *api.InstanceProperties) (*api.InstanceProperties, *apiError) {
	if patch == nil {
		return base, nil
	}
	var target, changes any
	for _, v := range []struct {
		from *api.InstanceProperties
		to   *any
	}{{base, &target}, {patch, &changes}} {
		body, _ := json.Marshal(v.from) // cannot fail: a struct of the API
		if err := json.Unmarshal(body, v.to); err != nil {
			return nil, &apiError{500, "backendError", err.Error()}
		}
	}
	merged, _ := json.Marshal(mergePatch(target, changes)) // cannot fail: made of JSON
	out := new(api.InstanceProperties)
	return out, decode(merged, out)
}

func mergePatch(target, patch any) any {
	changes, ok := patch.(map[string]any)
	if !ok {
		return patch
	}
	object, ok := target.(map[string]any)
	if !ok {
		object = map[string]any{}
	}
	for k, v := range changes {
		if v == nil {
			delete(object, k)
		} else {
			object[k] = mergePatch(object[k], v)
		}
	}
	return object
}

// beginBulk starts the operation and one insert operation for each instance, all of one group.
// s.mu is held.
func (s *Server) beginBulk(r *request, b *bulk) *operation {
	user, location := r.user(), "zones/"+b.zone
	group := newGroupID()
	parent := s.newOperation(user, r.scope, "compute.instances.bulkInsert", s.link(r.scope), 0)
	parent.api.OperationGroupId = group
	setCounts(parent.api, location, api.BulkInsertOperationStatus{Status: "CREATING", TargetVmCount: int64(len(b.names))})

	children := make([]child, len(b.names))
	for i, name := range b.names {
		c := &children[i]
		p := *b.plan
		if host := b.hostnames[name]; host != "" {
			p.properties = clone(p.properties)
			p.properties.Hostname = host
		}
		c.vm, c.failed = s.create(b.zone, name, &p)
		var id uint64
		if c.vm != nil {
			id = c.vm.api.Id
		}
		c.op = s.newOperation(user, location, "compute.instances.insert", s.link(location, "instances", name), id)
		c.op.api.OperationGroupId = group
	}
	w := func(ctx context.Context, op *operation) *opError {
		partial := s.partial(op, len(children))
		var (
			mu    sync.Mutex // guards count, order
			count = api.BulkInsertOperationStatus{Status: "CREATING", TargetVmCount: int64(len(b.names))}
			all   sync.WaitGroup
		)
		s.mu.Lock()
		for i := range children {
			c := &children[i]
			all.Add(1)
			s.run(c.op, func(ctx context.Context, op *operation) *opError {
				defer all.Done()
				switch {
				case c.failed != nil:
				case i >= partial:
					c.failed = s.exhausted(c.vm, "ZONE_RESOURCE_POOL_EXHAUSTED")
					s.abandon(ctx, c.vm, true)
				default:
					c.failed = s.starting(c.vm, true)(ctx, op)
				}
				mu.Lock()
				defer mu.Unlock()
				if c.failed == nil {
					count.CreatedVmCount++
				} else {
					count.FailedToCreateVmCount++
				}
				s.changeOperation(op, func(o *api.Operation) {
					o.Progress = 100 * (count.CreatedVmCount + count.FailedToCreateVmCount) / count.TargetVmCount
					setCounts(o, location, count)
				})
				return c.failed
			})
		}
		s.mu.Unlock()
		all.Wait()
		for i := range children {
			<-children[i].op.done
		}
		if count.CreatedVmCount >= int64(b.minCount) {
			count.Status = "DONE"
			s.changeOperation(op, func(o *api.Operation) { setCounts(o, location, count) })
			return nil
		}
		count.Status = "ROLLING_BACK"
		s.changeOperation(op, func(o *api.Operation) { setCounts(o, location, count) })
		leftover := s.leftover(op)
		deleted := s.removeAll(ctx, func(yield func(*instance) bool) {
			for _, c := range children {
				if c.failed != nil {
					continue
				}
				if leftover--; leftover < 0 && !yield(c.vm) {
					return
				}
			}
		})
		count.Status, count.DeletedVmCount = "DONE", deleted
		var first *opError
		s.changeOperation(op, func(o *api.Operation) {
			setCounts(o, location, count)
			o.Error = &api.OperationError{}
			for _, c := range children {
				if c.failed != nil {
					o.Error.Errors = append(o.Error.Errors, c.failed.api())
					if first == nil {
						first = c.failed
					}
				}
			}
		})
		return first
	}
	s.run(parent, s.faulty(w, func(ctx context.Context) { s.abandonAll(ctx, children) }))
	return parent
}

// child is one VM of a bulkInsert.
type child struct {
	op     *operation
	vm     *instance // or nil
	failed *opError
}

// abandonAll ends the operations of a bulkInsert that failed as a whole.
func (s *Server) abandonAll(ctx context.Context, children []child) {
	s.mu.Lock()
	for i := range children {
		c := &children[i]
		s.run(c.op, func(ctx context.Context, _ *operation) *opError {
			if c.failed != nil {
				return c.failed
			}
			s.abandon(ctx, c.vm, true)
			return opCancelled(resource(c.vm.link))
		})
	}
	s.mu.Unlock()
	for i := range children {
		select {
		case <-children[i].op.done:
		case <-ctx.Done():
		}
	}
}

// removeAll deletes instances at the same time and returns how many went.
func (s *Server) removeAll(ctx context.Context, vms func(func(*instance) bool)) int64 {
	var (
		mu   sync.Mutex // guards gone
		gone int64
		all  sync.WaitGroup
	)
	for vm := range vms {
		s.mu.Lock()
		err := s.markDeleting(vm)
		s.mu.Unlock()
		if err != nil {
			continue
		}
		all.Go(func() {
			if s.remove(ctx, vm) == nil {
				mu.Lock()
				gone++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return gone
}

func setCounts(o *api.Operation, location string, c api.BulkInsertOperationStatus) {
	o.InstancesBulkInsertOperationMetadata = &api.InstancesBulkInsertOperationMetadata{
		PerLocationStatus: map[string]api.BulkInsertOperationStatus{location: c},
	}
}
