package lustre

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
)

// term is one comparison: PATH=VALUE, PATH!=VALUE, with the value bare or in double quotes.
var term = regexp.MustCompile(`^([A-Za-z@][-_.A-Za-z0-9]*)\s*(=|!=)\s*(?:"((?:[^"\\]|\\.)*)"|([-_./A-Za-z0-9]+))`)

// parseFilter understands comparisons of fields with values, joined by AND: the part of AIP-160
// that clients use here. Any other filter is an error, never ignored.
func parseFilter(text string) (func(item any) bool, error) {
	type comparison struct {
		path    []string
		negated bool
		value   string
	}
	var all []comparison
	rest := strings.TrimSpace(text)
	for rest != "" {
		m := term.FindStringSubmatch(rest)
		if m == nil {
			return nil, invalid("filter: cannot read %q", rest)
		}
		value := m[4]
		if m[4] == "" {
			value = strings.NewReplacer(`\\`, `\`, `\"`, `"`).Replace(m[3])
		}
		var path []string
		for p := range strings.SplitSeq(m[1], ".") {
			path = append(path, camel(p))
		}
		if path[0] == "labels" { // keys of a map keep their form
			path = []string{"labels", strings.TrimPrefix(m[1], "labels.")}
		}
		all = append(all, comparison{path, m[2] == "!=", value})
		rest = strings.TrimSpace(rest[len(m[0]):])
		if rest == "" {
			break
		}
		after, ok := strings.CutPrefix(rest, "AND ")
		if !ok || strings.TrimSpace(after) == "" {
			return nil, invalid("filter: want AND and another comparison before %q", rest)
		}
		rest = strings.TrimSpace(after)
	}
	return func(item any) bool {
		if len(all) == 0 {
			return true
		}
		b, err := json.Marshal(item)
		if err != nil {
			return false
		}
		var tree any
		if json.Unmarshal(b, &tree) != nil {
			return false
		}
		for _, c := range all {
			if (fieldOf(tree, c.path) == c.value) == c.negated {
				return false
			}
		}
		return true
	}, nil
}

// fieldOf is the text of a field; "" when it is not there.
func fieldOf(v any, path []string) string {
	for _, p := range path {
		m, _ := v.(map[string]any)
		v = m[p]
	}
	if v == nil {
		return ""
	}
	return fmt.Sprint(v)
}
