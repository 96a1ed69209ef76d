package iam

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// attributes are what a condition can look at.
type attributes struct {
	name, service, kind string // resource.name, .service, .type
	listPrefix          string // of a listing; "" otherwise
}

// condition is the part of the Common Expression Language that the sandbox knows: comparisons of resource.name, .type, .service and
// api.getAttribute with literals by ==, !=, startsWith and endsWith, joined by !, && and ||.
type condition func(attributes) bool

type text func(attributes) string

// listPrefixAttribute is the only attribute that Cloud Storage has.
const listPrefixAttribute = "storage.googleapis.com/objectListPrefix"

// maxDepth bounds a condition's parentheses and negations.
const maxDepth = 32

var errEnd = errors.New("the expression ends too early")

// parseCondition reads an expression.
func parseCondition(expression string) (condition, error) {
	p := &parser{rest: expression}
	c, err := p.or(0)
	if err != nil {
		return nil, err
	}
	if p.skip(); p.rest != "" {
		return nil, fmt.Errorf("unexpected %q", p.rest)
	}
	return c, nil
}

type parser struct{ rest string }

func (p *parser) skip() { p.rest = strings.TrimLeft(p.rest, " \t\r\n") }

// take moves over a symbol if it comes next.
func (p *parser) take(symbol string) bool {
	p.skip()
	rest, ok := strings.CutPrefix(p.rest, symbol)
	if ok {
		p.rest = rest
	}
	return ok
}

func (p *parser) want(symbol string) error {
	if !p.take(symbol) {
		if p.rest == "" {
			return errEnd
		}
		return fmt.Errorf("want %q before %q", symbol, p.rest)
	}
	return nil
}

// word moves over an identifier.
func (p *parser) word() string {
	p.skip()
	n := 0
	for n < len(p.rest) && (p.rest[n] == '_' || p.rest[n]|0x20 >= 'a' && p.rest[n]|0x20 <= 'z' || n > 0 && p.rest[n] >= '0' && p.rest[n] <= '9') {
		n++
	}
	w := p.rest[:n]
	p.rest = p.rest[n:]
	return w
}

func (p *parser) or(depth int) (condition, error) {
	return p.chain(depth, "||", (*parser).and, func(a, b condition) condition {
		return func(at attributes) bool { return a(at) || b(at) }
	})
}

func (p *parser) and(depth int) (condition, error) {
	return p.chain(depth, "&&", (*parser).not, func(a, b condition) condition {
		return func(at attributes) bool { return a(at) && b(at) }
	})
}

func (p *parser) chain(depth int, symbol string, next func(*parser, int) (condition, error), join func(a, b condition) condition) (condition, error) {
	c, err := next(p, depth)
	for err == nil && p.take(symbol) {
		var more condition
		if more, err = next(p, depth); err == nil {
			c = join(c, more)
		}
	}
	return c, err
}

func (p *parser) not(depth int) (condition, error) {
	if depth > maxDepth {
		return nil, errors.New("the expression is nested too deep")
	}
	switch {
	case p.take("!"):
		c, err := p.not(depth + 1)
		if err != nil {
			return nil, err
		}
		return func(at attributes) bool { return !c(at) }, nil
	case p.take("("):
		c, err := p.or(depth + 1)
		if err != nil {
			return nil, err
		}
		return c, p.want(")")
	}
	return p.comparison()
}

func (p *parser) comparison() (condition, error) {
	a, err := p.text()
	if err != nil {
		return nil, err
	}
	switch {
	case p.take("=="):
		b, err := p.text()
		return func(at attributes) bool { return a(at) == b(at) }, err
	case p.take("!="):
		b, err := p.text()
		return func(at attributes) bool { return a(at) != b(at) }, err
	}
	if err := p.want("."); err != nil {
		return nil, err
	}
	compare := map[string]func(s, part string) bool{"startsWith": strings.HasPrefix, "endsWith": strings.HasSuffix}[p.word()]
	if compare == nil {
		return nil, fmt.Errorf("unknown function before %q", p.rest)
	}
	if err := p.want("("); err != nil {
		return nil, err
	}
	b, err := p.text()
	if err != nil {
		return nil, err
	}
	return func(at attributes) bool { return compare(a(at), b(at)) }, p.want(")")
}

// text reads a literal, an attribute of the resource, or api.getAttribute.
func (p *parser) text() (text, error) {
	p.skip()
	if p.rest == "" {
		return nil, errEnd
	}
	if raw := strings.HasPrefix(p.rest, `r"`) || strings.HasPrefix(p.rest, "r'"); raw || p.rest[0] == '"' || p.rest[0] == '\'' {
		s, err := p.literal(raw)
		return func(attributes) string { return s }, err
	}
	object := p.word()
	if object != "resource" && object != "api" {
		return nil, fmt.Errorf("unknown name %q before %q", object, p.rest)
	}
	if err := p.want("."); err != nil {
		return nil, err
	}
	switch field := p.word(); object + "." + field {
	case "resource.name":
		return func(at attributes) string { return at.name }, nil
	case "resource.type":
		return func(at attributes) string { return at.kind }, nil
	case "resource.service":
		return func(at attributes) string { return at.service }, nil
	case "api.getAttribute":
		return p.getAttribute()
	default:
		return nil, fmt.Errorf("unknown name %s.%s", object, field)
	}
}

func (p *parser) getAttribute() (text, error) {
	if err := p.want("("); err != nil {
		return nil, err
	}
	name, err := p.text()
	if err != nil {
		return nil, err
	}
	if err := p.want(","); err != nil {
		return nil, err
	}
	otherwise, err := p.text()
	if err != nil {
		return nil, err
	}
	return func(at attributes) string {
		if at.listPrefix != "" && name(at) == listPrefixAttribute {
			return at.listPrefix
		}
		return otherwise(at)
	}, p.want(")")
}

var escapes = map[byte]string{
	'\\': "\\", '"': `"`, '\'': "'", '`': "`", '?': "?", 'a': "\a", 'b': "\b", 'f': "\f", 'n': "\n", 'r': "\r", 't': "\t", 'v': "\v",
}

// escapeDigits is how many digits follow, and their base.
var escapeDigits = map[byte]struct{ n, base int }{'x': {2, 16}, 'X': {2, 16}, 'u': {4, 16}, 'U': {8, 16}}

// literal reads a string, which begins here.
func (p *parser) literal(raw bool) (string, error) {
	if raw {
		p.rest = p.rest[1:]
	}
	quote := p.rest[0]
	p.rest = p.rest[1:]
	var b strings.Builder
	for p.rest != "" {
		c := p.rest[0]
		p.rest = p.rest[1:]
		switch {
		case c == quote:
			if !utf8.ValidString(b.String()) {
				return "", errors.New("a literal is not UTF-8")
			}
			return b.String(), nil
		case c == '\n' || c == '\r':
			return "", errors.New("a literal has a line end")
		case c != '\\' || raw:
			b.WriteByte(c)
		default:
			if err := p.escape(&b); err != nil {
				return "", err
			}
		}
	}
	return "", errEnd
}

func (p *parser) escape(b *strings.Builder) error {
	if p.rest == "" {
		return errEnd
	}
	c := p.rest[0]
	if s, ok := escapes[c]; ok {
		b.WriteString(s)
		p.rest = p.rest[1:]
		return nil
	}
	d := escapeDigits[c]
	skip := 1
	if c >= '0' && c <= '3' {
		d.n, d.base, skip = 3, 8, 0
	}
	if d.n == 0 || len(p.rest) < skip+d.n {
		return fmt.Errorf(`bad escape \%c`, c)
	}
	n, err := strconv.ParseUint(p.rest[skip:skip+d.n], d.base, 32)
	if err != nil || n > utf8.MaxRune || !utf8.ValidRune(rune(n)) {
		return fmt.Errorf(`bad escape \%s`, p.rest[:skip+d.n])
	}
	b.WriteRune(rune(n))
	p.rest = p.rest[skip+d.n:]
	return nil
}
