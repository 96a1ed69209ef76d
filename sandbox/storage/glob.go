package storage

import (
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"
)

// glob is a compiled matchGlob pattern:
//
//   - any characters but /          [a-z]   one character of a set, [!a-z] or [^a-z] one outside it; never /
//     **      any characters                {a,b}   either pattern
//     ?       one character but /           \x      x itself
//
// It becomes a regular expression of RE2's kind, so that no pattern takes more than linear time.
type glob struct {
	re     *regexp.Regexp
	prefix string // every match begins with it
}

// maxGlob is the longest pattern, in bytes.
const maxGlob = 1024

func compileGlob(pattern string) (*glob, error) {
	if len(pattern) > maxGlob || !utf8.ValidString(pattern) {
		return nil, invalid("Invalid glob pattern.")
	}
	expr, err := globExpr(pattern)
	if err != nil {
		return nil, invalid("Invalid glob pattern %q: %v.", pattern, err)
	}
	re, err := regexp.Compile(expr)
	if err != nil { // too deeply nested
		return nil, invalid("Invalid glob pattern %q.", pattern)
	}
	g := &glob{re: re, prefix: pattern}
	if i := strings.IndexAny(pattern, `*?[{\`); i >= 0 {
		g.prefix = pattern[:i]
	}
	return g, nil
}

func (g *glob) match(name string) bool { return g.re.MatchString(name) }

func globExpr(pattern string) (string, error) {
	var b strings.Builder
	b.WriteString(`(?s)\A(?:`)
	depth := 0
	for i := 0; i < len(pattern); {
		r, size := utf8.DecodeRuneInString(pattern[i:])
		i += size
		switch {
		case r == '*' && strings.HasPrefix(pattern[i:], "*"):
			b.WriteString(`.*`)
			i++
		case r == '*':
			b.WriteString(`[^/]*`)
		case r == '?':
			b.WriteString(`[^/]`)
		case r == '[':
			class, n, err := globClass(pattern[i:])
			if err != nil {
				return "", err
			}
			b.WriteString(class)
			i += n
		case r == '{':
			depth++
			b.WriteString(`(?:`)
		case r == '}' && depth > 0:
			depth--
			b.WriteString(`)`)
		case r == ',' && depth > 0:
			b.WriteString(`|`)
		case r == '\\':
			if i == len(pattern) {
				return "", fmt.Errorf("it ends in a backslash")
			}
			r, size = utf8.DecodeRuneInString(pattern[i:])
			i += size
			fallthrough
		default:
			b.WriteString(regexp.QuoteMeta(string(r)))
		}
	}
	if depth > 0 {
		return "", fmt.Errorf("a { is not closed")
	}
	b.WriteString(`)\z`)
	return b.String(), nil
}

// globClass translates what follows a [, and says how many bytes it took. A ] that comes first is a member.
func globClass(s string) (string, int, error) {
	i := 0
	negated := strings.HasPrefix(s, "!") || strings.HasPrefix(s, "^")
	if negated {
		i++
	}
	next := func() (rune, bool) {
		if i < len(s) && s[i] == '\\' {
			i++
		}
		if i >= len(s) {
			return 0, false
		}
		r, size := utf8.DecodeRuneInString(s[i:])
		i += size
		return r, true
	}
	var members strings.Builder
	for first := true; ; first = false {
		if i < len(s) && s[i] == ']' && !first {
			i++
			break
		}
		lo, ok := next()
		if !ok {
			return "", 0, fmt.Errorf("a [ is not closed")
		}
		hi := lo
		if i+1 < len(s) && s[i] == '-' && s[i+1] != ']' {
			i++
			if hi, ok = next(); !ok {
				return "", 0, fmt.Errorf("a [ is not closed")
			}
		}
		if lo > hi {
			return "", 0, fmt.Errorf("the range %c-%c is empty", lo, hi)
		}
		// A slash inside a range is cut out, so that a class never crosses a directory.
		for _, part := range [][2]rune{{lo, min(hi, '/'-1)}, {max(lo, '/'+1), hi}} {
			if part[0] <= part[1] {
				fmt.Fprintf(&members, `\x{%x}-\x{%x}`, part[0], part[1])
			}
		}
	}
	switch {
	case negated:
		return `[^/` + members.String() + `]`, i, nil
	case members.Len() == 0: // only a slash: matches nothing
		return `[^\x{0}-\x{10FFFF}]`, i, nil
	default:
		return `[` + members.String() + `]`, i, nil
	}
}
