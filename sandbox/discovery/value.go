package discovery

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// values checks the JSON of one exchange's request or reply.
type values struct {
	api    *API
	method *method // or nil
	// request says which rules hold: a request must have what is required and must not set what is
	// output; a reply has every kind right.
	request bool
	partial bool // the caller asked for some fields only
	add     func(where, what string)
	any     map[string]*schema // messages that may stand where a type is named by @type
}

var (
	duration = regexp.MustCompile(`^-?[0-9]+(\.[0-9]{1,9})?s$`)
	patterns sync.Map // of *regexp.Regexp by their text
)

func (v *values) addf(where, format string, args ...any) { v.add(where, fmt.Sprintf(format, args...)) }

// value checks raw, which json.Decoder made with UseNumber.
func (v *values) value(s *schema, raw any, where string) {
	if s = v.api.resolve(s); s == nil {
		v.addf(where, "the description does not say what this is")
		return
	}
	if raw == nil {
		if !v.request {
			v.addf(where, "is null")
		}
		return
	}
	if s.Type == "any" || s.Type == "" && s.Properties == nil {
		return
	}
	switch raw := raw.(type) {
	case map[string]any:
		if s.Type != "object" {
			v.addf(where, "is an object, want %s", s.Type)
			return
		}
		v.object(s, raw, where)
	case []any:
		if s.Type != "array" {
			v.addf(where, "is an array, want %s", s.Type)
			return
		}
		for i, item := range raw {
			v.value(s.Items, item, fmt.Sprintf("%s[%d]", where, i))
		}
	case bool:
		if s.Type != "boolean" {
			v.addf(where, "is a boolean, want %s", s.Type)
		}
	case json.Number:
		v.number(s, raw, where)
	case string:
		number := s.Type == "integer" || s.Type == "number"
		switch {
		case number && v.request: // a service reads both forms, and writes one
			v.number(s, json.Number(raw), where)
		case s.Type != "string":
			v.addf(where, "is a string, want %s", s.Type)
		default:
			v.text(s, raw, where)
		}
	}
}

func (v *values) number(s *schema, n json.Number, where string) {
	var err error
	switch {
	case s.Type == "integer" && s.Format == "uint32":
		_, err = strconv.ParseUint(n.String(), 10, 32)
	case s.Type == "integer":
		_, err = strconv.ParseInt(n.String(), 10, 32)
	case s.Type == "number":
		_, err = strconv.ParseFloat(n.String(), 64)
	case s.Type == "string" && (s.Format == "int64" || s.Format == "uint64"):
		if v.request {
			v.text(s, n.String(), where)
		} else {
			v.addf(where, "is a number: %s must be a string", s.Format)
		}
		return
	default:
		v.addf(where, "is a number, want %s", s.Type)
		return
	}
	if err != nil {
		v.addf(where, "%q is no %s %s", n, s.Type, s.Format)
	}
}

// text checks a value that is or may be written as a string, parameters included.
func (v *values) text(s *schema, text, where string) {
	if why := badText(s, text); why != "" {
		v.add(where, why)
	}
}

func badText(s *schema, text string) string {
	var err error
	switch s.Format {
	case "int64":
		_, err = strconv.ParseInt(text, 10, 64)
	case "uint64":
		_, err = strconv.ParseUint(text, 10, 64)
	case "byte":
		clean := strings.NewReplacer("-", "+", "_", "/").Replace(strings.TrimRight(text, "="))
		_, err = base64.RawStdEncoding.DecodeString(clean)
	case "google-datetime", "date-time":
		_, err = time.Parse(time.RFC3339Nano, text)
	case "date":
		_, err = time.Parse(time.DateOnly, text)
	case "google-duration":
		if !duration.MatchString(text) {
			err = fmt.Errorf("want seconds with an s")
		}
	}
	if err != nil {
		return fmt.Sprintf("%q is no %s", text, s.Format)
	}
	if len(s.Enum) > 0 && !slices.Contains(s.Enum, text) {
		return fmt.Sprintf("%q is none of its values", text)
	}
	if s.Pattern != "" && !compiled(s.Pattern).MatchString(text) {
		return fmt.Sprintf("%q does not match %s", text, s.Pattern)
	}
	return ""
}

func compiled(pattern string) *regexp.Regexp {
	if re, ok := patterns.Load(pattern); ok {
		return re.(*regexp.Regexp)
	}
	re, err := regexp.Compile(`^(?:` + pattern + `)$`)
	if err != nil { // RE2 lacks some of what the documents use; such a pattern is not checked
		re = regexp.MustCompile("")
	}
	patterns.Store(pattern, re)
	return re
}

func (v *values) object(s *schema, fields map[string]any, where string) {
	properties := s.Properties
	typeName, typed := fields["@type"].(string)
	if typed {
		_, name, _ := strings.Cut(typeName, "/")
		known := v.any[name]
		if known == nil {
			short := name[strings.LastIndexByte(name, '.')+1:]
			known = v.api.Schemas[short]
		}
		if known == nil {
			v.addf(where+".@type", "%q is no message of this API", typeName)
			return
		}
		s, properties = known, known.Properties
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if typed && name == "@type" {
			continue
		}
		at := where + "." + name
		p := properties[name]
		if p == nil && s.Additional != nil {
			v.value(s.Additional, fields[name], at)
			continue
		}
		if p == nil && v.request && strings.Contains(name, "_") { // the services read the protocol buffers' names, too
			p = properties[camel(name)]
		}
		if p == nil {
			v.addf(at, "no such field")
			continue
		}
		if v.request && p.ReadOnly {
			v.addf(at, "is output only")
		}
		v.value(p, fields[name], at)
	}
	if v.request {
		for _, name := range slices.Sorted(maps.Keys(properties)) {
			if p := properties[name]; v.required(p) && fields[name] == nil && fields[snake(name)] == nil {
				v.addf(where+"."+name, "is required")
			}
		}
		return
	}
	if kind := properties["kind"]; kind != nil && kind.Default != "" {
		if got, ok := fields["kind"]; ok && got != kind.Default {
			v.addf(where+".kind", "is %q, want %q", got, kind.Default)
		}
	}
}

func (v *values) required(p *schema) bool {
	if v.method == nil || v.method.HTTPMethod == "PATCH" {
		return false
	}
	return slices.Contains(p.Annotations.Required, v.method.ID) || bool(p.Description) && !p.ReadOnly
}

// camel turns capacity_gib into capacityGib.
func camel(name string) string {
	var b strings.Builder
	for i, word := range strings.Split(name, "_") {
		if i > 0 && word != "" {
			word = strings.ToUpper(word[:1]) + word[1:]
		}
		b.WriteString(word)
	}
	return b.String()
}

// snake turns capacityGib into capacity_gib.
func snake(name string) string {
	var b strings.Builder
	for _, r := range name {
		if r >= 'A' && r <= 'Z' {
			b.WriteByte('_')
			r += 'a' - 'A'
		}
		b.WriteRune(r)
	}
	return b.String()
}

// mask checks a field mask (a,b.c) over s.
func (v *values) mask(s *schema, mask, where string) {
	for path := range strings.SplitSeq(mask, ",") {
		if path == "*" {
			continue
		}
		at := s
		for name := range strings.SplitSeq(path, ".") {
			at = v.api.resolve(at)
			if at.Properties == nil && at.Additional != nil {
				at = at.Additional
				continue
			}
			p := at.Properties[name]
			if p == nil {
				p = at.Properties[camel(name)]
			}
			if p == nil {
				v.addf(where, "%q: no such field", path)
				break
			}
			if p.ReadOnly || p.Immutable {
				v.addf(where, "%q cannot be changed", path)
			}
			at = p
		}
	}
}

// selection checks the parameter fields (a,b/c,d(e,f)) over s.
func (v *values) selection(s *schema, text string) {
	rest, ok := v.selected(s, text)
	if !ok || rest != "" {
		v.addf("query fields", "%q is not a selection of fields", text)
	}
}

func (v *values) selected(s *schema, text string) (rest string, ok bool) {
	for {
		at := s
		for {
			end := strings.IndexAny(text, ",/()")
			if end < 0 {
				end = len(text)
			}
			name := text[:end]
			text = text[end:]
			for at = v.api.resolve(at); at != nil && at.Type == "array"; {
				at = v.api.resolve(at.Items)
			}
			switch {
			case name == "":
				return text, false
			case name == "*" || at == nil || at.Type == "any":
				at = nil
			case at.Properties[name] != nil:
				at = at.Properties[name]
			case at.Additional != nil:
				at = at.Additional
			default:
				v.addf("query fields", "%q: no such field", name)
				at = nil
			}
			if !strings.HasPrefix(text, "/") {
				break
			}
			text = text[1:]
		}
		if strings.HasPrefix(text, "(") {
			if text, ok = v.selected(at, text[1:]); !ok || !strings.HasPrefix(text, ")") {
				return text, false
			}
			text = text[1:]
		}
		if !strings.HasPrefix(text, ",") {
			return text, true
		}
		text = text[1:]
	}
}
