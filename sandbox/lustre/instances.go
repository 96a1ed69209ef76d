package lustre

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"

	api "github.com/sluicehpc/sluice/gcp/lustre"
	rules "github.com/sluicehpc/sluice/lustre"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

// maxInstances is the default quota of a project (documentation, "Quotas").
const maxInstances = 20

// port is where a Lustre server listens.
const port = 988

var (
	projectID   = regexp.MustCompile(`^[a-z][-a-z0-9]{4,28}[a-z0-9]$|^[0-9]+$`)
	networkName = regexp.MustCompile(`^projects/[-a-z0-9]+/global/networks/[-a-z0-9]+$`)
	labelKey    = regexp.MustCompile(`^[a-z][-_a-z0-9]{0,62}$`)
	labelValue  = regexp.MustCompile(`^[-_a-z0-9]{0,63}$`)
	uuid        = regexp.MustCompile(`^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$`)
)

// instance is one file system. Server.mu guards its fields but dir, which does not change.
type instance struct {
	api.Instance
	project   string
	dir       string
	addr      netip.Addr
	listener  net.Listener
	transfers int                          // that run
	usage     map[string]lustrefs.Counters // of mounts that have ended, by VM
	losses    map[string]int               // of files, by VM
	gone      chan struct{}                // closed when it is removed
}

func (i *instance) stopListening() {
	if i.listener != nil {
		i.listener.Close()
		i.listener = nil
	}
}

// snapshot is a copy, as the API shows it, that outlives Server.mu.
func (s *Server) snapshot(i *instance) *api.Instance {
	c := i.Instance
	c.Labels = maps.Clone(i.Labels)
	if c.State = s.state(i); c.State != i.State {
		c.StateReason = effects[c.State].reason
	}
	return &c
}

// DataDir returns the directory of an instance's data (projects/P/locations/Z/instances/ID).
func (s *Server) DataDir(name string) (string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	inst, ok := s.instances[name]
	if !ok {
		return "", false
	}
	return inst.dir, true
}

func (s *Server) find(name string) (*instance, error) {
	inst, ok := s.instances[name]
	if !ok {
		return nil, &rpcError{codeNotFound, fmt.Sprintf("resource %q was not found", name)}
	}
	return inst, nil
}

func (s *Server) getInstance(name string) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	inst, err := s.find(name)
	if err != nil {
		return nil, err
	}
	return s.snapshot(inst), nil
}

func (s *Server) listInstances(project, zone string, q url.Values) (any, error) {
	prefix := "projects/" + project + "/locations/"
	if zone != "-" {
		prefix += zone + "/"
	}
	s.mu.Lock()
	var all []any
	for _, name := range slices.Sorted(maps.Keys(s.instances)) {
		if strings.HasPrefix(name, prefix) {
			all = append(all, s.snapshot(s.instances[name]))
		}
	}
	s.mu.Unlock()
	page, next, err := pageOf(all, q)
	if err != nil {
		return nil, err
	}
	return struct {
		Instances     []any  `json:"instances,omitempty"`
		NextPageToken string `json:"nextPageToken,omitempty"`
	}{page, next}, nil
}

// pageOf filters a list and cuts the wanted page out of it. A page token is the number of entries before the page.
func pageOf(all []any, q url.Values) (page []any, next string, err error) {
	match, err := parseFilter(q.Get("filter"))
	if err != nil {
		return nil, "", err
	}
	for _, item := range all {
		if match(item) {
			page = append(page, item)
		}
	}
	size, start := 500, 0
	if v := q.Get("pageSize"); v != "" {
		if size, err = strconv.Atoi(v); err != nil || size < 0 {
			return nil, "", invalid("page_size %q is not a number", v)
		}
		if size == 0 || size > 500 {
			size = 500
		}
	}
	if v := q.Get("pageToken"); v != "" {
		if start, err = strconv.Atoi(v); err != nil || start < 0 || start > len(page) {
			return nil, "", invalid("page_token %q was not made by this list", v)
		}
	}
	page = page[start:]
	if len(page) > size {
		page, next = page[:size], strconv.Itoa(start+size)
	}
	return page, next, nil
}

// check validates what a user may set on an instance.
func check(inst *api.Instance) error {
	if !rules.FSName.MatchString(inst.Filesystem) {
		return invalid("filesystem %q must be 1 to 8 letters and digits", inst.Filesystem)
	}
	dynamic := inst.DynamicTierOptions != nil && inst.DynamicTierOptions.Mode == "DEFAULT_CACHE"
	if o := inst.DynamicTierOptions; o != nil && o.Mode != "DISABLED" && o.Mode != "DEFAULT_CACHE" {
		return invalid("dynamic_tier_options.mode %q must be DISABLED or DEFAULT_CACHE", o.Mode)
	}
	tier, ok := rules.TierOf(inst.PerUnitStorageThroughput)
	if !ok || dynamic != (inst.PerUnitStorageThroughput == 0) {
		return invalid("per_unit_storage_throughput %d must be 125, 250, 500 or 1000 (0 with the dynamic tier)", inst.PerUnitStorageThroughput)
	}
	if err := rules.ValidateCapacity(tier, inst.CapacityGib); err != nil {
		return invalid("capacity_gib: %v", err)
	}
	if !networkName.MatchString(inst.Network) {
		return invalid("network %q must be projects/PROJECT/global/networks/NETWORK", inst.Network)
	}
	return checkMutable(inst)
}

func checkMutable(inst *api.Instance) error {
	if len(inst.Labels) > 64 {
		return invalid("more than 64 labels")
	}
	for k, v := range inst.Labels {
		if !labelKey.MatchString(k) || !labelValue.MatchString(v) {
			return invalid("label %q=%q: lower-case letters, digits, - and _, at most 63, the key beginning with a letter", k, v)
		}
	}
	if o := inst.AccessRulesOptions; o != nil {
		switch o.DefaultSquashMode {
		case "ROOT_SQUASH":
		case "NO_SQUASH":
			if o.DefaultSquashUID != 0 || o.DefaultSquashGID != 0 {
				return invalid("default_squash_uid and default_squash_gid must be unset with NO_SQUASH")
			}
		default:
			return invalid("default_squash_mode %q must be NO_SQUASH or ROOT_SQUASH", o.DefaultSquashMode)
		}
		if err := checkRules(o); err != nil {
			return err
		}
	}
	return nil
}

var ruleName = regexp.MustCompile(`^[A-Za-z0-9_]{1,16}$`)

func checkRules(o *api.AccessRulesOptions) error {
	for _, id := range []int64{o.DefaultSquashUID, o.DefaultSquashGID} {
		if id < 0 || id > 1<<32-1 {
			return invalid("default_squash_uid and default_squash_gid: %d is not an id", id)
		}
	}
	var taken []netip.Prefix
	for _, rule := range o.AccessRules {
		if !ruleName.MatchString(rule.Name) {
			return invalid("access rule name %q must be 1 to 16 letters, digits and _", rule.Name)
		}
		if rule.SquashMode != "NO_SQUASH" {
			return invalid("access rule %s: squash_mode %q must be NO_SQUASH", rule.Name, rule.SquashMode)
		}
		for _, text := range rule.IPAddressRanges {
			prefix, err := rangeOf(text)
			if err != nil {
				return invalid("access rule %s: %v", rule.Name, err)
			}
			if i := slices.IndexFunc(taken, prefix.Overlaps); i >= 0 {
				return invalid("access rule %s: %s overlaps %s", rule.Name, prefix, taken[i])
			}
			taken = append(taken, prefix)
		}
	}
	return nil
}

// number is an int64 field whose value is not a string, which JSON of protocol buffers allows too.
var number = regexp.MustCompile(`("(?:capacityGib|perUnitStorageThroughput)"\s*:\s*)(-?[0-9]+)`)

func decodeInstance(r *http.Request) (*api.Instance, []byte, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, nil, invalid("the body cannot be read: %v", err)
	}
	r.Body = io.NopCloser(bytes.NewReader(number.ReplaceAll(body, []byte(`$1"$2"`))))
	inst := new(api.Instance)
	body, err = decode(r, inst)
	return inst, body, err
}

func (s *Server) createInstance(r *http.Request, project, zone, parent string) (any, error) {
	in, body, err := decodeInstance(r)
	if err != nil {
		return nil, err
	}
	q := r.URL.Query()
	id := q.Get("instanceId")
	name := parent + "/instances/" + id
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.once(q.Get("requestId"), "create "+name, body, func() (*operation, error) {
		if !rules.InstanceID.MatchString(id) {
			return nil, invalid("instance_id %q must be lower-case letters, digits and -, at most 63, beginning with a letter", id)
		}
		if err := check(in); err != nil {
			return nil, err
		}
		if _, exists := s.instances[name]; exists {
			return nil, &rpcError{codeAlreadyExists, fmt.Sprintf("resource %q already exists", name)}
		}
		count := 0
		for _, inst := range s.instances {
			if inst.project == project {
				count++
			}
		}
		if count >= maxInstances {
			return nil, &rpcError{codeResourceExhausted, fmt.Sprintf("quota of %d instances of project %s is used up", maxInstances, project)}
		}
		addr, err := s.nextAddress()
		if err != nil {
			return nil, err
		}
		inst := &instance{
			Instance: *in, project: project, dir: filepath.Join(s.options.Dir, project, zone, id), addr: addr,
			usage: map[string]lustrefs.Counters{}, losses: map[string]int{}, gone: make(chan struct{}),
		}
		inst.Name, inst.State, inst.StateReason, inst.MountPoint = name, api.StateCreating, "", ""
		inst.UID = newUUID()
		inst.CreateTime = s.now()
		inst.UpdateTime = inst.CreateTime
		s.instances[name] = inst
		return s.start(parent, name, "create", func(context.Context) (any, error) { return s.makeInstance(inst) },
			func() { delete(s.instances, name) }), nil
	})
}

// makeInstance is the work of a create operation.
func (s *Server) makeInstance(inst *instance) (any, error) {
	fail := func(err error) (any, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.instances, inst.Name)
		return nil, &rpcError{codeInternal, fmt.Sprintf("make %s: %v", inst.Name, err)}
	}
	// A new file system is empty, whatever a sandbox that was killed left here.
	if err := os.RemoveAll(inst.dir); err != nil {
		return fail(err)
	}
	if err := os.MkdirAll(inst.dir, 0o755); err != nil {
		return fail(err)
	}
	if err := os.Chmod(inst.dir, 0o755); err != nil { // whatever the umask
		return fail(err)
	}
	if s.options.Listen != nil {
		if err := s.openAddress(inst); err != nil {
			return fail(err)
		}
		defer s.work.Go(func() { s.listen(inst) })
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	inst.State = api.StateActive
	inst.MountPoint = fmt.Sprintf("%s@tcp:/%s", inst.addr, inst.Filesystem)
	inst.UpdateTime = s.now()
	return typed("Instance", s.snapshot(inst)), nil
}

// openAddress makes the instance's address answer.
func (s *Server) openAddress(inst *instance) error {
	listener, err := s.options.Listen(netip.AddrPortFrom(inst.addr, port))
	if err != nil {
		return err
	}
	s.work.Go(func() { answer(listener) })
	s.mu.Lock()
	defer s.mu.Unlock()
	inst.listener = listener
	return nil
}

// answer accepts connections and ends them: that the port is open is all that a check needs.
func answer(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		c.Close()
	}
}

// nextAddress goes through the addresses in turn, so that an instance that is made again gets
// another one, as on the real service.
func (s *Server) nextAddress() (netip.Addr, error) {
	used := map[netip.Addr]bool{}
	for _, inst := range s.instances {
		used[inst.addr] = true
	}
	first := s.options.Addresses.Masked().Addr().Next().Next()
	a := s.lastAddr
	for range maxInstances * 100 {
		a = a.Next()
		if !s.options.Addresses.Contains(a.Next()) { // the last one is for broadcast
			a = first
		}
		if !used[a] {
			s.lastAddr = a
			return a, nil
		}
	}
	return netip.Addr{}, &rpcError{codeResourceExhausted, "no address is left in " + s.options.Addresses.String()}
}

// mutable are the fields that an update may name.
var mutable = map[string]func(to, from *api.Instance){
	"capacityGib":        func(to, from *api.Instance) { to.CapacityGib = from.CapacityGib },
	"description":        func(to, from *api.Instance) { to.Description = from.Description },
	"labels":             func(to, from *api.Instance) { to.Labels = from.Labels },
	"accessRulesOptions": func(to, from *api.Instance) { to.AccessRulesOptions = from.AccessRulesOptions },
	"maintenancePolicy":  func(to, from *api.Instance) { to.MaintenancePolicy = from.MaintenancePolicy },
}

// camel is the JSON form of a field's name.
func camel(field string) string {
	words := strings.Split(field, "_")
	for i := 1; i < len(words); i++ {
		if w := words[i]; w != "" {
			words[i] = strings.ToUpper(w[:1]) + w[1:]
		}
	}
	return strings.Join(words, "")
}

func (s *Server) updateInstance(r *http.Request, name string) (any, error) {
	in, body, err := decodeInstance(r)
	if err != nil {
		return nil, err
	}
	q := r.URL.Query()
	var fields []string
	if mask := q.Get("updateMask"); mask != "" && mask != "*" {
		for f := range strings.SplitSeq(mask, ",") {
			fields = append(fields, camel(f))
		}
	} else { // all that are set
		set := map[string]json.RawMessage{}
		if err := json.Unmarshal(body, &set); err != nil {
			return nil, invalid("%v", err)
		}
		delete(set, "name")
		for f := range set {
			fields = append(fields, f)
		}
		sort.Strings(fields)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.once(q.Get("requestId"), "update "+name+" "+q.Get("updateMask"), body, func() (*operation, error) {
		inst, err := s.find(name)
		if err != nil {
			return nil, err
		}
		changed := s.snapshot(inst)
		for _, f := range fields {
			set, ok := mutable[f]
			if !ok {
				return nil, invalid("field %q cannot be updated", f)
			}
			set(changed, in)
		}
		if tier, ok := rules.TierOf(inst.PerUnitStorageThroughput); ok {
			if err := rules.ValidateGrowth(tier, inst.CapacityGib, changed.CapacityGib); err != nil {
				return nil, invalid("capacity_gib: %v", err)
			}
		}
		if err := checkMutable(changed); err != nil {
			return nil, err
		}
		if err := s.changeable(inst); err != nil {
			return nil, err
		}
		parent, _, _ := strings.Cut(name, "/instances/")
		return s.start(parent, name, "update", func(ctx context.Context) (any, error) {
			answer, err := s.change(name, fields, changed)
			if err == nil {
				err = s.Settle(ctx) // access rules hold when the operation is done
			}
			return answer, err
		}, func() {}), nil
	})
}

// change is the work of an update operation.
func (s *Server) change(name string, fields []string, changed *api.Instance) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	inst, err := s.find(name)
	if err != nil {
		return nil, err
	}
	for _, f := range fields {
		mutable[f](&inst.Instance, changed)
	}
	inst.UpdateTime = s.now()
	return typed("Instance", s.snapshot(inst)), nil
}

func (s *Server) deleteInstance(r *http.Request, name string) (any, error) {
	q := r.URL.Query()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.once(q.Get("requestId"), "delete "+name, nil, func() (*operation, error) {
		inst, err := s.find(name)
		if err != nil {
			return nil, err
		}
		if state := s.state(inst); state == api.StateDeleting || state == api.StateCreating {
			return nil, &rpcError{codeFailedPrecondition, fmt.Sprintf("%s is %s", name, state)}
		}
		inst.State = api.StateDeleting
		parent, _, _ := strings.Cut(name, "/instances/")
		return s.start(parent, name, "delete", func(context.Context) (any, error) { return s.removeInstance(inst) },
			func() { inst.State = api.StateActive }), nil
	})
}

// removeInstance is the work of a delete operation. Transfers end as if cancelled, and mounts break.
func (s *Server) removeInstance(inst *instance) (any, error) {
	s.mu.Lock()
	var wait []<-chan struct{}
	for _, op := range s.operations {
		if op.meta.Target == inst.Name && op.transfer != nil && !op.done {
			op.cancel()
			wait = append(wait, op.ended)
		}
	}
	for m := range s.mounts {
		if m.inst == inst {
			m.process.Kill()
			wait = append(wait, m.ended)
		}
	}
	inst.stopListening()
	s.mu.Unlock()
	for _, ended := range wait {
		<-ended
	}
	err := os.RemoveAll(inst.dir)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		inst.State, inst.StateReason = api.StateStopped, err.Error()
		return nil, &rpcError{codeInternal, err.Error()}
	}
	delete(s.instances, inst.Name)
	close(inst.gone)
	return map[string]string{"@type": "type.googleapis.com/google.protobuf.Empty"}, nil
}

func newUUID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
