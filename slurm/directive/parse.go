package directive

import (
	"bytes"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/sluicehpc/sluice/internal/diag"
)

// parser collects the directives and the errors of one script.
type parser struct {
	script Script
	errs   diag.List
	count  int // directives seen
}

// Parse reads the directives of a job script. The error, if any, is a
// diag.List of all errors in the script's order (of the first 100), each
// pointing into file, which is a name for people. Slurm reads directives only
// above the script's first command: one that stands below is an error, since
// it would be ignored without a word.
func Parse(file string, script []byte) (Script, error) {
	p := &parser{script: Script{File: file, lines: map[int]string{}}}
	if len(script) > MaxScript {
		p.errorf(Pos{1, 1, 1}, "", "script is longer than %d MiB", MaxScript>>20)
		return Script{}, p.errs.Err()
	}
	script = bytes.TrimPrefix(script, []byte("\ufeff"))
	lines := strings.Split(string(script), "\n")
	command := 0 // the line of the first command, 0 while there is none
	for i := 0; i < len(lines) && len(p.errs) < maxErrors; i++ {
		line := strings.TrimSuffix(lines[i], "\r")
		if command == 0 && line != "" && line[0] != '#' {
			command = i + 1
		}
		rest, ours := cutPrefix(line)
		if !ours {
			p.glued(i+1, line, command)
			continue
		}
		if command > 0 {
			p.note(i+1, line)
			p.errorf(Pos{i + 1, 1, len(Prefix) + 1}, fmt.Sprintf("move it above line %d", command),
				"directive below the script's first command (line %d), where Slurm ignores it", command)
			continue
		}
		if p.count++; p.count > MaxDirectives {
			p.note(i+1, line)
			p.errorf(Pos{i + 1, 1, len(Prefix) + 1}, "", "more than %d directives", MaxDirectives)
			break
		}
		i = p.directive(lines, i, rest)
	}
	if len(p.errs) >= maxErrors {
		p.errs = p.errs[:maxErrors]
	}
	p.build()
	if err := p.errs.Err(); err != nil {
		return Script{}, err
	}
	return p.script, nil
}

// cutPrefix reports whether line is a directive, and what follows the prefix.
// A longer word, such as #SLUICEFOO, is another program's.
func cutPrefix(line string) (rest string, ours bool) {
	rest, ok := strings.CutPrefix(line, Prefix)
	return rest, ok && (rest == "" || rest == `\` || rest[0] == ' ' || rest[0] == '\t')
}

// glued catches a forgotten blank, as in #SLUICEstage_in.
func (p *parser) glued(n int, line string, command int) {
	rest, ok := strings.CutPrefix(line, Prefix)
	if !ok || command > 0 {
		return
	}
	word, _, _ := strings.Cut(rest, " ")
	if verbNamed(word) != nil {
		p.note(n, line)
		p.errorf(Pos{n, 1, len(Prefix) + len(word) + 1}, fmt.Sprintf("write %s %s", Prefix, word), "no blank after %s", Prefix)
	}
}

func (p *parser) note(n int, line string) {
	p.script.lines[n] = line[:min(len(line), maxLine)]
}

func (p *parser) errorf(at Pos, hint, format string, args ...any) {
	p.errs = append(p.errs, p.script.Diagnostic(at, fmt.Sprintf(format, args...), hint))
}

// directive reads the directive that begins at lines[i] and returns the index
// of its last line.
func (p *parser) directive(lines []string, i int, rest string) int {
	var words []word
	whole := true
	start := Pos{i + 1, 1, len(Prefix) + 1}
	for {
		line := strings.TrimSuffix(lines[i], "\r")
		p.note(i+1, line)
		body, more := strings.CutSuffix(rest, `\`)
		if got, ok := p.words(i+1, line, utf8.RuneCountInString(line)-utf8.RuneCountInString(rest)+1, body); ok {
			words = append(words, got...)
		} else {
			whole = false
			words = append(words, got...)
		}
		if !more {
			break
		}
		ours := false
		if i+1 < len(lines) {
			rest, ours = cutPrefix(strings.TrimSuffix(lines[i+1], "\r"))
		}
		if !ours {
			end := utf8.RuneCountInString(line)
			p.errorf(Pos{i + 1, end, end + 1}, "begin the next line with "+Prefix+", or remove the backslash",
				"directive is continued, but the next line does not begin with %s", Prefix)
			whole = false
			break
		}
		i++
	}
	p.understand(start, words, whole)
	return i
}

// word is one blank-separated word: a verb, or key=value.
type word struct {
	text       string // of a word without '='
	key, value string
	pair       bool
	broken     bool // the value could not be read; the error is reported
	at         Pos
	keyAt, val Pos
}

// words splits body, which begins at column of line n. It reports whether the
// line could be read.
func (p *parser) words(n int, line string, column int, body string) (words []word, ok bool) {
	if len(line) > maxLine {
		p.errorf(Pos{n, 1, len(Prefix) + 1}, "continue it on the next line with a final backslash", "directive's line is longer than %d bytes", maxLine)
		return nil, false
	}
	rs := []rune(body)
	for i, off := 0, 0; off < len(body); i++ {
		r, size := utf8.DecodeRuneInString(body[off:])
		at := Pos{n, column + i, column + i + 1}
		if r == utf8.RuneError && size == 1 {
			p.errorf(at, "", "directive is not UTF-8 text")
			return nil, false
		}
		if r != '\t' && (unicode.IsControl(r) || r == '\u2028' || r == '\u2029' || r == '\ufeff') {
			p.errorf(at, "", "directive contains the control character %q", r)
			return nil, false
		}
		off += size
	}
	ok = true
	at := func(from, to int) Pos { return Pos{n, column + from, column + to} }
	blank := func(i int) bool { return i >= len(rs) || rs[i] == ' ' || rs[i] == '\t' }
	skip := func(i int) int {
		for !blank(i) {
			i++
		}
		return i
	}
	for i := 0; ; {
		for i < len(rs) && blank(i) {
			i++
		}
		if i >= len(rs) || rs[i] == '#' {
			return words, ok
		}
		start := i
		for !blank(i) && rs[i] != '=' && rs[i] != '"' && rs[i] != '\'' && rs[i] != '\\' {
			i++
		}
		switch {
		case blank(i):
			words = append(words, word{text: string(rs[start:i]), at: at(start, i)})
			continue
		case rs[i] == '\\':
			p.errorf(at(i, i+1), "a line is continued by a backslash at its very end", "stray backslash")
			ok, i = false, skip(i)
			continue
		case rs[i] != '=':
			p.errorf(at(i, i+1), "quotes go around a whole value: key=\"value\"", "stray quote")
			ok, i = false, skip(i)
			continue
		}
		w := word{key: string(rs[start:i]), pair: true, keyAt: at(start, i)}
		i++
		first := i
		if !blank(i) && rs[i] == '"' {
			i, w.value, w.broken = p.quoted(rs, i, at)
		} else {
			for !blank(i) {
				if rs[i] == '"' || rs[i] == '\'' {
					p.errorf(at(i, i+1), "put a value with blanks or quotes whole in double quotes; inside them write \\\" for a quote", "stray quote")
					w.broken = true
					i = skip(i)
					break
				}
				i++
			}
			w.value = string(rs[first:i])
		}
		w.val, w.at = at(first, max(i, first+1)), at(start, i)
		words = append(words, w)
	}
}

// quoted reads the value whose opening quote is rs[i].
func (p *parser) quoted(rs []rune, i int, at func(from, to int) Pos) (end int, value string, broken bool) {
	open := i
	var b strings.Builder
	for i++; i < len(rs); i++ {
		switch rs[i] {
		case '"':
			i++
			if i < len(rs) && rs[i] != ' ' && rs[i] != '\t' {
				p.errorf(at(i-1, i), "a blank follows the closing quote; inside quotes write \\\" for a quote", "stray quote")
				for i < len(rs) && rs[i] != ' ' && rs[i] != '\t' {
					i++
				}
				return i, "", true
			}
			return i, b.String(), broken
		case '\\':
			if i+1 >= len(rs) || rs[i+1] != '"' && rs[i+1] != '\\' {
				p.errorf(at(i, min(i+2, len(rs))), `inside quotes write \\ for a backslash and \" for a quote`, "backslash before neither a quote nor a backslash")
				broken = true
				continue
			}
			i++
		}
		b.WriteRune(rs[i])
	}
	p.errorf(at(open, open+1), "end the value with a double quote on the same line", "stray quote: it is never closed")
	return len(rs), "", true
}

// understand checks the words of one directive. Whole is false when some of
// its text could not be read, so that keys may be missing for that reason.
func (p *parser) understand(start Pos, words []word, whole bool) {
	if len(words) == 0 {
		if whole {
			p.errorf(start, "verbs: "+strings.Join(verbNames(), ", "), "directive without a verb")
		}
		return
	}
	first := words[0]
	if first.pair {
		p.errorf(first.keyAt, fmt.Sprintf("write a verb after %s: %s", Prefix, strings.Join(verbNames(), ", ")),
			"directive begins with the key %q, not with a verb", clip(first.key))
		return
	}
	v := verbNamed(first.text)
	if v == nil {
		p.errorf(first.at, didYouMean(first.text, verbNames(), "verbs"), "unknown verb %q", clip(first.text))
		return
	}
	r := raw{verb: v, at: first.at}
	seen := map[string]Pos{}
	for _, w := range words[1:] {
		if !w.pair {
			hint := didYouMean(w.text, v.keyNames(), "keys of "+v.name)
			p.errorf(w.at, hint, "%q is not key=value", clip(w.text))
			whole = false
			continue
		}
		k := v.key(w.key)
		if k == nil {
			p.errorf(w.keyAt, didYouMean(w.key, v.keyNames(), "keys of "+v.name), "unknown key %q of %s", clip(w.key), v.name)
			whole = false
			continue
		}
		if before, twice := seen[k.name]; twice && !k.repeat {
			p.errorf(w.keyAt, "", "duplicate key %q, first given in line %d, column %d", k.name, before.Line, before.Column)
			continue
		}
		seen[k.name] = w.keyAt
		if w.broken {
			whole = false
			continue
		}
		pr := pair{key: k, value: w.value, keyAt: w.keyAt, val: w.val}
		if message, hint := k.check(w.value); message != "" {
			p.errorf(w.val, hint, "%s", message)
			whole = false
			continue
		}
		r.pairs = append(r.pairs, pr)
	}
	given := 0
	for _, name := range v.either {
		at, ok := seen[name]
		if !ok {
			continue
		}
		if given++; given > 1 {
			p.errorf(at, "remove one of them", "%s= exclude each other", strings.Join(v.either, "= and "))
		}
	}
	if whole {
		for _, k := range v.keys {
			if _, ok := seen[k.name]; k.required && !ok {
				p.errorf(first.at, fmt.Sprintf("add %s=%s", k.name, k.shape()), "missing key: %s needs %s=", v.name, k.name)
			}
		}
		if len(v.either) > 0 && given == 0 {
			k := v.key(v.either[0])
			p.errorf(first.at, fmt.Sprintf("add %s=%s", k.name, k.shape()), "missing key: %s needs %s=", v.name, strings.Join(v.either, "= or "))
		}
	}
	p.script.raw = append(p.script.raw, r)
}

// didYouMean is a hint that names the nearest candidate, or all of them.
func didYouMean(word string, candidates []string, what string) string {
	if n := diag.Nearest(strings.ToLower(word), candidates); n != "" {
		return "did you mean " + n + "?"
	}
	return what + ": " + strings.Join(candidates, ", ")
}
