package config

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"gopkg.in/yaml.v3"

	"github.com/sluicehpc/sluice/internal/diag"
	"github.com/sluicehpc/sluice/slurm/hostlist"
)

// maxSize bounds the file in bytes: ten thousand node sets fit.
const maxSize = 4 << 20

// Parse reads and checks data; file is the name that errors show.
func Parse(file string, data []byte) (*Config, error) {
	if len(data) > maxSize {
		return nil, fmt.Errorf("%s: longer than %d bytes", file, maxSize)
	}
	p := &parser{file: file, lines: strings.Split(string(data), "\n"), nodes: map[string]*yaml.Node{}}
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return nil, p.syntaxError(err)
	}
	c := &Config{}
	if len(doc.Content) == 0 {
		p.root = &yaml.Node{Line: 1, Column: 1}
		p.list = append(p.list, diag.Diagnostic{File: file, Line: 1, Column: 1, Message: "the file is empty", Hint: "start with cluster: NAME"})
		return nil, p.list.Err()
	}
	p.root = doc.Content[0]
	p.decode("", p.root, reflect.ValueOf(c).Elem())
	if len(p.list) == 0 {
		c.setDefaults()
		p.check(c)
	}
	if len(p.list) == 0 {
		// What only the renderer knows, such as which version has which plugin.
		if _, err := c.SlurmFiles(); err != nil {
			p.fail("slurm", "", "slurm: %s", strings.ReplaceAll(err.Error(), "\n", "; "))
		}
	}
	if err := p.list.Err(); err != nil {
		return nil, err
	}
	return c, nil
}

// parser walks the YAML tree beside the struct, so that every value's place is
// known afterwards by its path ("nodesets[0].nodes").
type parser struct {
	file  string
	lines []string
	root  *yaml.Node
	nodes map[string]*yaml.Node
	list  diag.List
}

var yamlLine = regexp.MustCompile(`line (\d+): (.*)`)

func (p *parser) syntaxError(err error) error {
	d := diag.Diagnostic{File: p.file, Line: 1, Column: 1, Message: strings.TrimPrefix(err.Error(), "yaml: "), Hint: "check the indentation and the quotes"}
	if m := yamlLine.FindStringSubmatch(err.Error()); m != nil {
		d.Line, _ = strconv.Atoi(m[1])
		d.Message = m[2]
	}
	d.Text = p.line(d.Line)
	return diag.List{d}
}

func (p *parser) line(n int) string {
	if n < 1 || n > len(p.lines) {
		return ""
	}
	return strings.TrimSuffix(p.lines[n-1], "\r")
}

// errorAt reports an error at a node. yaml.v3 counts columns in characters from 1.
func (p *parser) errorAt(n *yaml.Node, hint, format string, args ...any) {
	d := diag.Diagnostic{
		File: p.file, Line: n.Line, Column: n.Column, Message: fmt.Sprintf(format, args...), Hint: hint, Text: p.line(n.Line),
	}
	if n.Kind == yaml.ScalarNode {
		width := utf8.RuneCountInString(n.Value)
		if n.Style&(yaml.DoubleQuotedStyle|yaml.SingleQuotedStyle) != 0 {
			width += 2
		}
		d.EndColumn = n.Column + max(1, width)
		if most := utf8.RuneCountInString(d.Text) + 1; d.EndColumn > most {
			d.EndColumn = most
		}
	}
	p.list = append(p.list, d)
}

// fail reports an error at the value of path, or at its nearest parent that the file has.
func (p *parser) fail(path, hint, format string, args ...any) {
	for at := path; ; {
		if n := p.nodes[at]; n != nil {
			p.errorAt(n, hint, format, args...)
			return
		}
		i := strings.LastIndexAny(at, ".[")
		if i < 0 {
			p.errorAt(p.root, hint, format, args...)
			return
		}
		at = at[:i]
	}
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func (p *parser) decode(path string, n *yaml.Node, v reflect.Value) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	p.nodes[path] = n
	_, own := v.Addr().Interface().(yaml.Unmarshaler)
	switch {
	case own:
		if n.Kind != yaml.ScalarNode {
			p.errorAt(n, "", "%s must be a single value", path)
		} else if err := v.Addr().Interface().(yaml.Unmarshaler).UnmarshalYAML(n); err != nil {
			p.errorAt(n, "", "%s: %v", path, err)
		}
	case v.Kind() == reflect.Struct:
		p.decodeStruct(path, n, v)
	case v.Kind() == reflect.Slice:
		if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
			return
		}
		if n.Kind != yaml.SequenceNode {
			p.errorAt(n, "write each element on a line of its own that begins with a hyphen", "%s must be a list", path)
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
		for i, item := range n.Content {
			p.decode(fmt.Sprintf("%s[%d]", path, i), item, v.Index(i))
		}
	case v.Kind() == reflect.Map:
		if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
			return
		}
		if n.Kind != yaml.MappingNode {
			p.errorAt(n, "", "%s must be a mapping of names to values", path)
			return
		}
		v.Set(reflect.MakeMap(v.Type()))
		p.eachKey(path, n, func(key, value *yaml.Node) {
			if value.Kind != yaml.ScalarNode {
				p.errorAt(value, "", "%s must be a single value", join(path, key.Value))
				return
			}
			p.nodes[join(path, key.Value)] = value
			v.SetMapIndex(reflect.ValueOf(key.Value), reflect.ValueOf(value.Value))
		})
	case n.Kind != yaml.ScalarNode:
		p.errorAt(n, "", "%s must be a single value", path)
	case n.Tag == "!!null":
	case v.Kind() == reflect.String:
		v.SetString(n.Value) // also where YAML would see a number: version: 24.11
	default:
		if err := n.Decode(v.Addr().Interface()); err != nil {
			p.errorAt(n, "", "%s: %q is not %s", path, n.Value, map[reflect.Kind]string{
				reflect.Int: "a whole number", reflect.Bool: "true or false", reflect.Pointer: "true or false"}[v.Kind()])
		}
	}
}

func (p *parser) eachKey(path string, n *yaml.Node, f func(key, value *yaml.Node)) {
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if seen[key.Value] {
			p.errorAt(key, "", "%s appears twice", join(path, key.Value))
			continue
		}
		seen[key.Value] = true
		f(key, value)
	}
}

func (p *parser) decodeStruct(path string, n *yaml.Node, v reflect.Value) {
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return
	}
	if n.Kind != yaml.MappingNode {
		what := path
		if what == "" {
			what = "the file"
		}
		p.errorAt(n, "", "%s must be a mapping of names to values", what)
		return
	}
	fields := map[string]int{}
	var names []string
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("yaml"), ",")
		fields[name] = i
		names = append(names, name)
	}
	p.eachKey(path, n, func(key, value *yaml.Node) {
		i, ok := fields[key.Value]
		if !ok {
			hint := "known here: " + strings.Join(names, ", ")
			if near := diag.Nearest(key.Value, names); near != "" {
				hint = "did you mean " + near + "?"
			}
			p.errorAt(key, hint, "unknown setting %q", join(path, key.Value))
			return
		}
		p.decode(join(path, key.Value), value, v.Field(i))
	})
}

var (
	clusterName  = regexp.MustCompile(`^[a-z][a-z0-9-]{0,39}$`)
	name         = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$`)
	instanceName = regexp.MustCompile(`^projects/[a-z0-9:.-]+/locations/[a-z0-9-]+/instances/[a-z]([-a-z0-9]{0,61}[a-z0-9])?$`)
	projectID    = regexp.MustCompile(`^[a-z0-9:.-]{2,63}$`)
	zoneName     = regexp.MustCompile(`^[a-z]+-[a-z0-9]+-[a-z]$`)
	hostName     = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?$`)
	word         = regexp.MustCompile(`^[A-Za-z0-9_./-]+$`)
	labelKey     = regexp.MustCompile(`^[a-z][a-z0-9_-]{0,62}$`)
	labelValue   = regexp.MustCompile(`^[a-z0-9_-]{0,63}$`)
	slurmVersion = regexp.MustCompile(`^[0-9]{2}\.[0-9]{2}(\.[0-9]+)?$`)
	parameterKey = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9]*$`)
)

func (p *parser) match(path, value string, re *regexp.Regexp, what string) bool {
	switch {
	case value == "":
		p.fail(path, "", "%s is missing", path)
	case !re.MatchString(value):
		p.fail(path, "", "%s: %q is not %s", path, value, what)
	default:
		return true
	}
	return false
}

func (p *parser) unique(path, value string, seen map[string]bool) {
	if value != "" && seen[value] {
		p.fail(path, "", "%s: %q appears twice", path, value)
	}
	seen[value] = true
}

func (p *parser) oneOf(path, value string, allowed ...string) {
	if slices.Contains(allowed, value) {
		return
	}
	hint := ""
	if near := diag.Nearest(value, allowed); near != "" {
		hint = "did you mean " + near + "?"
	}
	p.fail(path, hint, "%s: %q is not one of %s", path, value, strings.Join(allowed, ", "))
}

// absolute says whether value is a clean absolute path that can stand in Slurm's files and a shell.
func (p *parser) absolute(path, value string) bool {
	if value == "" {
		p.fail(path, "", "%s is missing", path)
		return false
	}
	if !filepath.IsAbs(value) || filepath.Clean(value) != value || !word.MatchString(value) {
		p.fail(path, "", "%s: %q is not an absolute path of plain characters", path, value)
		return false
	}
	return true
}

func (p *parser) check(c *Config) {
	p.match("cluster", c.Cluster, clusterName, "lower-case letters, digits and hyphens, at most 40")
	p.match("project", c.Project, projectID, "a project id")
	p.match("zone", c.Zone, zoneName, "a zone such as us-central1-a")
	for path, v := range map[string]string{
		"endpoints.compute": c.Endpoints.Compute, "endpoints.lustre": c.Endpoints.Lustre, "endpoints.storage": c.Endpoints.Storage, "endpoints.iam": c.Endpoints.IAM,
	} {
		if v == "" {
			continue
		}
		u, err := url.Parse(v)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || strings.Trim(u.Path, "/") != "" {
			p.fail(path, "write scheme and host only, such as http://10.0.0.2:8080", "%s: %q is not a URL without a path", path, v)
		}
	}
	if err := hostPort(c.Listen, true); err != nil {
		p.fail("listen", "", "listen: %v", err)
	}
	if c.Slurm.ControllerHost != "" {
		if err := hostPort(c.Address, false); err != nil {
			p.fail("address", "", "address: %v", err)
		}
	}
	p.checkFileSystems(c)
	for i, r := range c.Roots {
		p.absolute(fmt.Sprintf("roots[%d]", i), r)
	}
	p.checkNodes(c)
	p.checkSlurm(c)
	p.checkPolicy(c)
	p.absolute("store", c.Store)
}

func (p *parser) checkPolicy(c *Config) {
	for i, r := range c.Policy {
		at := fmt.Sprintf("policy[%d]", i)
		for _, problem := range r.Check() {
			field := at
			if problem.Field != "" {
				field += "." + problem.Field
			}
			p.fail(field, problem.Hint, "%s: %s", field, problem.Message)
		}
		if c.AccountsEnforced() || len(r.Users) > 0 && !slices.Contains(r.Users, "*") {
			continue
		}
		for j, account := range r.Accounts {
			if account != "*" {
				p.fail(fmt.Sprintf("%s.accounts[%d]", at, j), "name users, or set slurm.accounting_host",
					"%s: where Slurm enforces no associations everybody may say --account=%s", at, account)
			}
		}
	}
}

func hostPort(s string, emptyHost bool) error {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return fmt.Errorf("%q is not host:port", s)
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return fmt.Errorf("%q has no port between 1 and 65535", s)
	}
	if host == "" && !emptyHost || host != "" && net.ParseIP(host) == nil && !hostName.MatchString(host) {
		return errors.New("the host is missing or not a name")
	}
	return nil
}

func (p *parser) checkFileSystems(c *Config) {
	if len(c.FileSystems) == 0 {
		p.fail("file_systems", "name at least one: jobs need a place for their data", "file_systems is missing")
	}
	names, mounts, defaults := map[string]bool{}, map[string]bool{}, 0
	for i, fs := range c.FileSystems {
		at := fmt.Sprintf("file_systems[%d]", i)
		p.match(at+".name", fs.Name, name, "a name of letters, digits, _ and -")
		// SLUICE_FS_<NAME> must not be the same for two.
		p.unique(at+".name", variable(fs.Name), names)
		p.match(at+".instance", fs.Instance, instanceName, "projects/P/locations/ZONE/instances/I")
		if p.absolute(at+".mount", fs.Mount) {
			if fs.Mount == "/" {
				p.fail(at+".mount", "", "%s.mount: the root directory is taken", at)
			}
			p.unique(at+".mount", fs.Mount, mounts)
		}
		for j, t := range fs.Types {
			p.match(fmt.Sprintf("%s.types[%d]", at, j), t, word, "a mount type")
		}
		if fs.Default {
			defaults++
		}
	}
	if len(c.FileSystems) > 1 && defaults != 1 {
		p.fail("file_systems", "set default: true at the one that jobs mean without fs=", "file_systems: %d of %d are the default, want 1", defaults, len(c.FileSystems))
	}
}

// variable is a name as environment variables spell it.
func variable(name string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return r - 'a' + 'A'
		case r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
			return r
		}
		return '_'
	}, name)
}

func (p *parser) checkNodes(c *Config) {
	if len(c.NodeSets) == 0 {
		p.fail("nodesets", "", "nodesets is missing")
	}
	names, hosts := map[string]bool{}, map[string]bool{}
	var list []string
	for i, ns := range c.NodeSets {
		at := fmt.Sprintf("nodesets[%d]", i)
		p.match(at+".name", ns.Name, name, "a name of letters, digits, _ and -")
		p.unique(at+".name", ns.Name, names)
		list = append(list, ns.Name)
		p.checkNodeNames(at+".nodes", ns.Nodes, hosts)
		p.match(at+".machine_type", ns.MachineType, word, "a machine type")
		if (ns.Image == "") == (ns.ImageFamily == "") {
			p.fail(at, "", "%s needs image or image_family, and not both", at)
		}
		for field, v := range map[string]string{"image": ns.Image, "image_family": ns.ImageFamily, "network": ns.Network, "subnetwork": ns.Subnetwork} {
			if v != "" {
				p.match(at+"."+field, v, word, "a resource name")
			}
		}
		for k, v := range ns.Labels {
			if !labelKey.MatchString(k) || !labelValue.MatchString(v) {
				p.fail(at+".labels."+k, "", "%s.labels: %s=%s is not a label of lower-case letters, digits, _ and -", at, k, v)
			}
			if strings.HasPrefix(k, "sluice-") {
				p.fail(at+".labels."+k, "", "%s.labels: names that begin with sluice- are taken", at)
			}
		}
		for k := range ns.Metadata {
			if k == "" || strings.HasPrefix(k, "sluice-") {
				p.fail(at+".metadata."+k, "", "%s.metadata: names that begin with sluice- are taken", at)
			}
		}
		if ns.CPUs < 1 {
			p.fail(at+".cpus", "", "%s.cpus must be at least 1", at)
		}
		if ns.MemoryMiB < 1 {
			p.fail(at+".memory_mib", "", "%s.memory_mib must be at least 1", at)
		}
		for j, f := range ns.Features {
			p.match(fmt.Sprintf("%s.features[%d]", at, j), f, name, "a name")
		}
	}
	if len(c.Partitions) == 0 {
		p.fail("partitions", "", "partitions is missing")
	}
	seen, defaults := map[string]bool{}, 0
	for i, pt := range c.Partitions {
		at := fmt.Sprintf("partitions[%d]", i)
		p.match(at+".name", pt.Name, name, "a name of letters, digits, _ and -")
		p.unique(at+".name", pt.Name, seen)
		if len(pt.NodeSets) == 0 {
			p.fail(at+".nodesets", "", "%s.nodesets is missing", at)
		}
		for j, ns := range pt.NodeSets {
			if !names[ns] {
				p.oneOf(fmt.Sprintf("%s.nodesets[%d]", at, j), ns, list...)
			}
		}
		if pt.Default {
			defaults++
		}
	}
	if defaults > 1 {
		p.fail("partitions", "", "partitions: %d are the default, want at most 1", defaults)
	}
}

// vmName is what Compute Engine takes for an instance's name.
var vmName = regexp.MustCompile(`^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$`)

// checkNodeNames checks a hostlist; seen holds the nodes of all sets.
func (p *parser) checkNodeNames(path, list string, seen map[string]bool) {
	nodes, err := hostlist.Expand(list)
	if err != nil {
		p.fail(path, "write a hostlist such as node-[1-8]", "%s: %v", path, err)
		return
	}
	if len(nodes) == 0 {
		p.fail(path, "write a hostlist such as node-[1-8]", "%s is missing", path)
	}
	for _, n := range nodes {
		if !vmName.MatchString(n) {
			p.fail(path, "lower-case letters, digits and hyphens, at most 63, a letter first", "%s: %q cannot be a VM's name", path, n)
			return
		}
		if seen[n] {
			p.fail(path, "", "%s: node %s appears twice", path, n)
			return
		}
		seen[n] = true
	}
}

func (p *parser) checkSlurm(c *Config) {
	s := c.Slurm
	p.match("slurm.user", s.User, name, "a user's name")
	if s.User == "root" {
		p.fail("slurm.user", "SlurmUser is an account of its own, usually slurm", "slurm.user: root may not run slurmctld")
	}
	p.match("slurm.version", s.Version, slurmVersion, "a version such as 24.11")
	p.oneOf("slurm.auth", s.Auth, AuthSlurm, AuthMunge)
	p.absolute("slurm.key_file", s.KeyFile)
	p.oneOf("slurm.cgroup_plugin", s.CgroupPlugin, "autodetect", "cgroup/v1", "cgroup/v2", "disabled")
	p.oneOf("slurm.proctrack", s.Proctrack, "cgroup", "linuxproc")
	p.match("slurm.controller_host", s.ControllerHost, hostName, "a host name")
	if s.AccountingHost != "" {
		p.match("slurm.accounting_host", s.AccountingHost, hostName, "a host name")
	}
	for k, v := range s.Parameters {
		if !parameterKey.MatchString(k) || strings.ContainsAny(v, "\n\r#") {
			p.fail("slurm.parameters."+k, "", "slurm.parameters: %s=%s cannot stand in slurm.conf", k, v)
		}
	}
}
