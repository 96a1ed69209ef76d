// Package diag holds errors that point into a text a person wrote: a job
// script, a blueprint, sluice.yaml.
package diag

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Diagnostic is one error in a text. Line and Column count from 1, columns in
// characters; EndColumn is the column after the last marked character (0 when
// nothing is marked). Hint is the next step, or "".
type Diagnostic struct {
	File      string `json:"file"`
	Line      int    `json:"line"`
	Column    int    `json:"column"`
	EndColumn int    `json:"end_column"`
	Message   string `json:"message"`
	Hint      string `json:"hint,omitempty"`

	// Text is the line itself, without its end.
	Text string `json:"-"`
}

// Short is the first line alone: file:line:column: message.
func (d Diagnostic) Short() string {
	return fmt.Sprintf("%s:%d:%d: %s", d.File, d.Line, d.Column, d.Message)
}

// Error is the whole picture: message, the line, a caret, the hint.
func (d Diagnostic) Error() string {
	var b strings.Builder
	b.WriteString(d.Short())
	if d.Text != "" {
		fmt.Fprintf(&b, "\n%4d | %s\n     | ", d.Line, printable(d.Text))
		runes := []rune(d.Text)
		for i := 0; i < d.Column-1; i++ {
			if i < len(runes) && runes[i] == '\t' {
				b.WriteByte('\t')
			} else {
				b.WriteByte(' ')
			}
		}
		b.WriteString(strings.Repeat("^", max(1, d.EndColumn-d.Column)))
	}
	if d.Hint != "" {
		b.WriteString("\n  " + d.Hint)
	}
	return b.String()
}

// printable keeps what a terminal shows on one line and replaces the rest.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\t' || (r >= ' ' && r != 0x7f && r != utf8.RuneError && (r < 0x80 || r > 0x9f)) {
			return r
		}
		return '?'
	}, s)
}

// List is all errors of a text; as an error it shows each, in the text's order.
type List []Diagnostic

func (l List) Error() string {
	parts := make([]string, len(l))
	for i, d := range l {
		parts[i] = d.Error()
	}
	return strings.Join(parts, "\n")
}

// Err returns the list sorted by place, or nil when it is empty.
func (l List) Err() error {
	if len(l) == 0 {
		return nil
	}
	slices.SortStableFunc(l, func(a, b Diagnostic) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return l
}

// Nearest returns the candidate that a person most likely meant by word, or ""
// when none is close: at most a third of its letters may differ, and at least one may.
func Nearest(word string, candidates []string) string {
	best, bestDistance := "", max(1, utf8.RuneCountInString(word)/3)+1
	for _, c := range candidates {
		if d := distance(word, c); d < bestDistance {
			best, bestDistance = c, d
		}
	}
	return best
}

// distance is Damerau's: insertions, deletions, replacements and swaps of neighbours.
func distance(s, t string) int {
	a, b := []rune(s), []rune(t)
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	prev2 := make([]int, len(b)+1)
	prev := make([]int, len(b)+1)
	cur := make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			cur[j] = min(prev[j]+1, cur[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				cur[j] = min(cur[j], prev2[j-2]+1)
			}
		}
		prev2, prev, cur = prev, cur, prev2
	}
	return prev[len(b)]
}
