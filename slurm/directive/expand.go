package directive

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
)

// Symbols are the values of %j %A %a %u %x.
type Symbols struct {
	JobID uint32 // %j
	// ArrayJobID and ArrayTaskID are %A and %a of an array's task. For other
	// jobs ArrayJobID is 0, and the symbols mean what they mean to sbatch: the
	// job's id and 4294967294.
	ArrayJobID, ArrayTaskID uint32
	User                    string // %u
	JobName                 string // %x
}

// noTask is what sbatch prints for %a of a job that is no array's task (NO_VAL).
const noTask = 4294967294

// A number between '%' and the letter pads with zeros, as sbatch does.
var symbolRE = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`%(?:%|([0-9]{0,2})([jAaux]))|%`) })

func replaceSymbols(v string, value func(letter byte, width int) string) string {
	if !strings.Contains(v, "%") {
		return v
	}
	return symbolRE().ReplaceAllStringFunc(v, func(m string) string {
		switch m {
		case "%%":
			return "%"
		case "%":
			return m
		}
		width, _ := strconv.Atoi(m[1 : len(m)-1])
		return value(m[len(m)-1], width)
	})
}

// unknownSymbol returns the first % and what follows it that is no symbol, or "".
func unknownSymbol(v string) string {
	if !strings.Contains(v, "%") {
		return ""
	}
	for _, at := range symbolRE().FindAllStringIndex(v, -1) {
		if at[1]-at[0] == 1 {
			return string([]rune(v[at[0]:])[:min(2, len([]rune(v[at[0]:])))])
		}
	}
	return ""
}

// probe replaces symbols by values that fit everywhere.
func probe(v string) string {
	return replaceSymbols(v, func(byte, int) string { return "0" })
}

func (s Symbols) value(letter byte, width int) string {
	number := func(n uint32) string { return fmt.Sprintf("%0*d", min(width, 10), n) }
	switch letter {
	case 'j':
		return number(s.JobID)
	case 'A':
		if s.ArrayJobID == 0 {
			return number(s.JobID)
		}
		return number(s.ArrayJobID)
	case 'a':
		if s.ArrayJobID == 0 {
			return number(noTask)
		}
		return number(s.ArrayTaskID)
	case 'u':
		return s.User
	}
	return s.JobName
}

// Expand replaces the symbols in all values. The result's values are checked
// again, since a job's name may be anything; the error is a diag.List.
func (s Script) Expand(sym Symbols) (Script, error) {
	p := &parser{script: Script{File: s.File, lines: s.lines}}
	for _, r := range s.raw {
		out := raw{verb: r.verb, at: r.at}
		for _, pr := range r.pairs {
			pr.value = replaceSymbols(pr.value, sym.value)
			message, hint := "", ""
			if len(pr.value) > maxValue {
				message = fmt.Sprintf("%s= is longer than %d bytes", pr.key.name, maxValue)
			} else {
				message, hint = pr.key.checkExpanded(pr.value)
			}
			if message != "" {
				p.errorf(pr.val, hint, "%s", message)
				continue
			}
			out.pairs = append(out.pairs, pr)
		}
		p.script.raw = append(p.script.raw, out)
	}
	p.build()
	if err := p.errs.Err(); err != nil {
		return Script{}, err
	}
	return p.script, nil
}
