package discovery

import (
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

// form is how a method's data travels.
type form int

const (
	plain    form = iota // JSON both ways
	upload               // the request has an object's data
	download             // the reply is an object's data
)

// route is a method at one of its paths.
type route struct {
	*method
	form form
}

// node is a segment of the paths that are known.
type node struct {
	literal map[string]*node
	any     *node              // {x}
	verbs   map[string]*node   // {x}:verb, by verb
	routes  map[string][]route // of the path that ends here, by HTTP method; several APIs may have the same path
}

func (n *node) add(path string, r route) {
	for s := range strings.SplitSeq(path, "/") {
		name, verb, hasVerb := strings.Cut(s, "}:")
		switch {
		case strings.HasPrefix(name, "{") && hasVerb:
			n = child(&n.verbs, verb)
		case strings.HasPrefix(s, "{"):
			if n.any == nil {
				n.any = new(node)
			}
			n = n.any
		default:
			n = child(&n.literal, s)
		}
	}
	if n.routes == nil {
		n.routes = map[string][]route{}
	}
	n.routes[r.HTTPMethod] = append(n.routes[r.HTTPMethod], r)
}

func child(m *map[string]*node, key string) *node {
	if *m == nil {
		*m = map[string]*node{}
	}
	if (*m)[key] == nil {
		(*m)[key] = new(node)
	}
	return (*m)[key]
}

// find returns the methods of a path, which comes in unescaped segments; literal segments win over variable ones.
func (n *node) find(segments []string) map[string][]route {
	if len(segments) == 0 {
		return n.routes
	}
	s, rest := segments[0], segments[1:]
	if next := n.literal[s]; next != nil {
		if found := next.find(rest); found != nil {
			return found
		}
	}
	if s == "" {
		return nil
	}
	if i := strings.LastIndexByte(s, ':'); i > 0 {
		if next := n.verbs[s[i+1:]]; next != nil {
			if found := next.find(rest); found != nil {
				return found
			}
		}
	}
	if n.any != nil {
		return n.any.find(rest)
	}
	return nil
}

// Router finds the described methods.
type Router struct {
	root node
}

// NewRouter returns a router over the methods of all apis.
func NewRouter(apis ...*API) *Router {
	rt := new(Router)
	for _, api := range apis {
		api.each(func(m *method) {
			path := m.FlatPath
			if path == "" {
				path = m.Path
			}
			rt.root.add(api.ServicePath+path, route{m, plain})
			if m.MediaUpload != nil {
				for _, p := range m.MediaUpload.Protocols {
					rt.root.add(strings.TrimPrefix(p.Path, "/"), route{m, upload})
				}
			}
			if m.Download {
				rt.root.add("download/"+api.ServicePath+path, route{m, download})
			}
		})
	}
	return rt
}

// pathRegexp turns a template with {x} and {+x} into an expression with a group for each.
func pathRegexp(template string) *regexp.Regexp {
	var b strings.Builder
	b.WriteString("^")
	for template != "" {
		before, after, ok := strings.Cut(template, "{")
		b.WriteString(regexp.QuoteMeta(before))
		if !ok {
			break
		}
		name, rest, _ := strings.Cut(after, "}")
		group := "([^/]+)"
		if strings.HasPrefix(name, "+") {
			group = "(.+)"
		}
		b.WriteString(group)
		template = rest
	}
	return regexp.MustCompile(b.String() + "$") // made of quoted text and groups
}

// split cuts an escaped path into unescaped segments.
func split(escaped string) ([]string, error) {
	segments := strings.Split(strings.TrimPrefix(escaped, "/"), "/")
	for i, s := range segments {
		var err error
		if segments[i], err = url.PathUnescape(s); err != nil {
			return nil, fmt.Errorf("the path: %w", err)
		}
	}
	return segments, nil
}

// Methods returns the ids of the methods at a path template or path ("/compute/v1/projects/{project}"), sorted.
// It is empty where HTTP method and path are not described.
func (rt *Router) Methods(httpMethod, path string) []string {
	segments, err := split(path)
	if err != nil {
		return nil
	}
	ids := map[string]bool{}
	for _, r := range rt.root.find(segments)[httpMethod] {
		ids[r.ID] = true
	}
	return slices.Sorted(maps.Keys(ids))
}

// pathParams returns the values of the path's parameters.
func (r route) pathParams(segments []string) map[string]string {
	values := map[string]string{}
	names := func(path string) []string {
		var out []string
		for s := range strings.SplitSeq(path, "{") {
			if name, _, ok := strings.Cut(s, "}"); ok {
				out = append(out, strings.TrimPrefix(name, "+"))
			}
		}
		return out
	}
	if r.path != nil { // such APIs have no service path
		found := r.path.FindStringSubmatch(strings.Join(segments, "/"))
		for i, name := range names(r.Path) {
			if i+1 < len(found) {
				values[name] = found[i+1]
			}
		}
		return values
	}
	// The template's end is the path's end, whatever stands before them.
	template := strings.Split(r.Path, "/")
	for i, s := range template {
		at := len(segments) - len(template) + i
		if name := names(s); len(name) == 1 && at >= 0 {
			value := segments[at]
			if _, verb, ok := strings.Cut(s, "}"); ok {
				value = strings.TrimSuffix(value, verb)
			}
			values[name[0]] = value
		}
	}
	return values
}
