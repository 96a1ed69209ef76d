package compute

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// maxFilter is the longest filter, in bytes.
const maxFilter = 4096

// parseFilter compiles a list filter on values of type *t:
//
//	filter     = sequence { "AND" sequence }
//	sequence   = factor { factor }                juxtaposed: AND
//	factor     = term { "OR" term }               OR binds tighter than AND, as in AIP-160
//	term       = [ "NOT" | "-" ] ( "(" filter ")" | comparison )
//	comparison = field ( "=" | "!=" | "<" | "<=" | ">" | ">=" | ":" ) value
//	           | field ( "eq" | "ne" ) value      the whole field against a regular expression (RE2)
//
// An unknown field is an error, as in the real service. The empty filter keeps everything.
func parseFilter(text string, t reflect.Type) (func(any) bool, error) {
	if strings.TrimSpace(text) == "" {
		return func(any) bool { return true }, nil
	}
	if len(text) > maxFilter {
		return nil, fmt.Errorf("longer than %d bytes", maxFilter)
	}
	if !utf8.ValidString(text) {
		return nil, errors.New("not UTF-8")
	}
	tokens, err := filterTokens(text)
	if err != nil {
		return nil, err
	}
	p := &filterParser{tokens: tokens, t: t}
	match, err := p.filter()
	if err != nil {
		return nil, err
	}
	if !p.end() {
		return nil, fmt.Errorf("unexpected %q", p.peek().text)
	}
	return func(v any) bool {
		body, err := json.Marshal(v)
		if err != nil {
			return false
		}
		var fields map[string]any
		d := json.NewDecoder(strings.NewReader(string(body)))
		d.UseNumber()
		return d.Decode(&fields) == nil && match(fields)
	}, nil
}

type token struct {
	text   string
	symbol bool // an operator or parenthesis, not a word
	quoted bool
}

// operator reports whether a value follows.
func (t token) operator() bool {
	if t.symbol {
		return t.text != "(" && t.text != ")"
	}
	return !t.quoted && (t.text == "eq" || t.text == "ne")
}

func filterTokens(text string) ([]token, error) {
	var tokens []token
	for text != "" {
		r, size := utf8.DecodeRuneInString(text)
		switch {
		case unicode.IsSpace(r):
			text = text[size:]
		case strings.ContainsRune("()", r):
			tokens = append(tokens, token{text: text[:1], symbol: true})
			text = text[1:]
		case strings.ContainsRune("=:<>!", r):
			n := 1
			if len(text) > 1 && text[1] == '=' && r != ':' && r != '=' {
				n = 2
			}
			if text[:n] == "!" {
				return nil, errors.New("unexpected \"!\"")
			}
			tokens = append(tokens, token{text: text[:n], symbol: true})
			text = text[n:]
		case r == '"' || r == '\'':
			var b strings.Builder
			i := 1
			for ; i < len(text) && text[i] != byte(r); i++ {
				if text[i] == '\\' && i+1 < len(text) && (text[i+1] == byte(r) || text[i+1] == '\\') {
					i++
				}
				b.WriteByte(text[i])
			}
			if i == len(text) {
				return nil, fmt.Errorf("unclosed quote %c", r)
			}
			tokens = append(tokens, token{text: b.String(), quoted: true})
			text = text[i+1:]
		default:
			stop := "()=:<>!\"'"
			if n := len(tokens); n > 0 && tokens[n-1].operator() {
				stop = "()" // a value: times and URLs need no quotes
			}
			i := strings.IndexFunc(text, func(r rune) bool { return unicode.IsSpace(r) || strings.ContainsRune(stop, r) })
			if i < 0 {
				i = len(text)
			}
			tokens = append(tokens, token{text: text[:i]})
			text = text[i:]
		}
	}
	return tokens, nil
}

type filterParser struct {
	tokens []token
	t      reflect.Type
}

type matcher func(map[string]any) bool

func (p *filterParser) end() bool { return len(p.tokens) == 0 }

func (p *filterParser) peek() token {
	if p.end() {
		return token{}
	}
	return p.tokens[0]
}

func (p *filterParser) next() token {
	t := p.peek()
	if !p.end() {
		p.tokens = p.tokens[1:]
	}
	return t
}

// word consumes an unquoted word of that text.
func (p *filterParser) word(text string) bool {
	t := p.peek()
	if t.symbol || t.quoted || t.text != text || p.end() {
		return false
	}
	p.next()
	return true
}

func (p *filterParser) symbol(text string) bool {
	if t := p.peek(); !t.symbol || t.text != text {
		return false
	}
	p.next()
	return true
}

func (p *filterParser) filter() (matcher, error) {
	var all []matcher
	for {
		m, err := p.factor()
		if err != nil {
			return nil, err
		}
		all = append(all, m)
		if p.word("AND") {
			continue
		}
		if p.end() || p.peek().symbol && p.peek().text == ")" {
			break
		}
	}
	return func(v map[string]any) bool {
		for _, m := range all {
			if !m(v) {
				return false
			}
		}
		return true
	}, nil
}

func (p *filterParser) factor() (matcher, error) {
	var some []matcher
	for {
		m, err := p.term()
		if err != nil {
			return nil, err
		}
		some = append(some, m)
		if !p.word("OR") {
			break
		}
	}
	return func(v map[string]any) bool {
		for _, m := range some {
			if m(v) {
				return true
			}
		}
		return false
	}, nil
}

func (p *filterParser) term() (matcher, error) {
	if p.word("NOT") || p.word("-") {
		m, err := p.term()
		if err != nil {
			return nil, err
		}
		return func(v map[string]any) bool { return !m(v) }, nil
	}
	if t := p.peek(); !t.symbol && !t.quoted && len(t.text) > 1 && t.text[0] == '-' {
		p.tokens[0].text = t.text[1:]
		m, err := p.term()
		if err != nil {
			return nil, err
		}
		return func(v map[string]any) bool { return !m(v) }, nil
	}
	if p.symbol("(") {
		m, err := p.filter()
		if err != nil {
			return nil, err
		}
		if !p.symbol(")") {
			return nil, errors.New("missing \")\"")
		}
		return m, nil
	}
	return p.comparison()
}

func (p *filterParser) comparison() (matcher, error) {
	name := p.next()
	if name.symbol || name.text == "" {
		return nil, errors.New("a field name is missing")
	}
	path := strings.Split(name.text, ".")
	kind, ok := kindAt(p.t, path)
	if !ok {
		return nil, fmt.Errorf("unknown field %q", name.text)
	}
	op := p.next()
	if !op.operator() {
		return nil, fmt.Errorf("an operator is missing behind %q", name.text)
	}
	value := p.next()
	if value.symbol || value.text == "" && !value.quoted {
		return nil, fmt.Errorf("a value is missing behind %q", name.text+op.text)
	}
	test, err := comparer(op.text, value)
	if err != nil {
		return nil, err
	}
	negated := op.text == "!=" || op.text == "ne"
	zero := zeroOf(kind)
	return func(v map[string]any) bool {
		values := valuesAt(nil, v, path)
		if len(values) == 0 && zero != nil && op.text != ":" {
			values = []any{zero}
		}
		return slices.ContainsFunc(values, test) != negated
	}, nil
}

// comparer returns the test of one value; for != and ne it is that of = and eq.
func comparer(op string, value token) (func(any) bool, error) {
	switch op {
	case "eq", "ne":
		re, err := regexp.Compile(`^(?:` + value.text + `)$`)
		if err != nil {
			return nil, fmt.Errorf("bad regular expression %q", value.text)
		}
		return func(v any) bool { s, ok := scalar(v); return ok && re.MatchString(s) }, nil
	case ":":
		if value.text == "*" && !value.quoted {
			return func(v any) bool { return true }, nil
		}
		equal := equaler(value)
		return func(v any) bool {
			if m, ok := v.(map[string]any); ok {
				_, ok := m[value.text]
				return ok
			}
			s, ok := scalar(v)
			return ok && equal(s)
		}, nil
	case "=", "!=":
		equal := equaler(value)
		return func(v any) bool { s, ok := scalar(v); return ok && equal(s) }, nil
	}
	return func(v any) bool {
		s, ok := scalar(v)
		if !ok {
			return false
		}
		c := strings.Compare(s, value.text)
		if a, err := strconv.ParseFloat(s, 64); err == nil {
			if b, err := strconv.ParseFloat(value.text, 64); err == nil {
				switch {
				case a < b:
					c = -1
				case a > b:
					c = 1
				default:
					c = 0
				}
			}
		}
		switch op {
		case "<":
			return c < 0
		case "<=":
			return c <= 0
		case ">":
			return c > 0
		}
		return c >= 0
	}, nil
}

// equaler compares with a value in which * stands for any characters.
func equaler(value token) func(string) bool {
	if !strings.Contains(value.text, "*") {
		return func(s string) bool { return s == value.text }
	}
	re := regexp.MustCompile(`(?s)^` + strings.ReplaceAll(regexp.QuoteMeta(value.text), `\*`, `.*`) + `$`)
	return re.MatchString
}

func scalar(v any) (string, bool) {
	switch v := v.(type) {
	case string:
		return v, true
	case json.Number:
		return v.String(), true
	case bool:
		return strconv.FormatBool(v), true
	}
	return "", false
}

// valuesAt appends the values at path, of each element of a list.
func valuesAt(values []any, v any, path []string) []any {
	if elements, ok := v.([]any); ok {
		for _, e := range elements {
			values = valuesAt(values, e, path)
		}
		return values
	}
	if len(path) == 0 {
		return append(values, v)
	}
	if m, ok := v.(map[string]any); ok {
		if next, ok := m[path[0]]; ok {
			return valuesAt(values, next, path[1:])
		}
	}
	return values
}

// kindAt returns the kind of t's field at path, and whether there is one.
func kindAt(t reflect.Type, path []string) (reflect.Kind, bool) {
	for _, name := range path {
		for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
			t = t.Elem()
		}
		switch t.Kind() {
		case reflect.Struct:
			f, _, ok := field(t, name)
			if !ok {
				return 0, false
			}
			t = f
		case reflect.Map:
			t = t.Elem()
		default:
			return 0, false
		}
	}
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return t.Kind(), true
}

// zeroOf is the value that a field has when the JSON leaves it out, or nil.
func zeroOf(kind reflect.Kind) any {
	switch kind {
	case reflect.Bool:
		return false
	case reflect.Int64, reflect.Uint64, reflect.Float64:
		return json.Number("0")
	}
	return nil
}
