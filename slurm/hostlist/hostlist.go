// Package hostlist reads and writes Slurm's compact lists of host names, such
// as n[1-4,7],login.
package hostlist

import (
	"fmt"
	"strconv"
	"strings"
)

// MaxHosts is how many hosts Expand yields at most: Slurm's own limit on the
// nodes of a cluster (MAX_SLURM_NODES).
const MaxHosts = 65536

// maxName bounds one host name in bytes (RFC 1035).
const maxName = 253

// Expand returns the hosts of a list in its order, duplicates included. The
// empty list has none. Names consist of letters, digits, '.', '_' and '-' and
// do not begin with '-', so that they are safe as arguments of programs. A list
// of more than MaxHosts is an error.
func Expand(list string) ([]string, error) { return ExpandMax(list, MaxHosts) }

// ExpandMax is Expand with another limit on the number of hosts.
func ExpandMax(list string, limit int) ([]string, error) {
	if list == "" {
		return nil, nil
	}
	var hosts []string
	for rest, more := list, true; more; {
		var word string
		var err error
		word, rest, more, err = cutWord(rest)
		if err == nil {
			hosts, err = expandWord(hosts, word, limit)
		}
		if err != nil {
			return nil, fmt.Errorf("host list %q: %w", shorten(list), err)
		}
	}
	return hosts, nil
}

// cutWord splits at the first comma outside brackets.
func cutWord(s string) (word, rest string, more bool, err error) {
	open := false
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '[':
			if open {
				return "", "", false, fmt.Errorf("bracket inside a bracket")
			}
			open = true
		case ']':
			if !open {
				return "", "", false, fmt.Errorf("closing bracket without an opening one")
			}
			open = false
		case ',':
			if !open {
				return s[:i], s[i+1:], true, nil
			}
		}
	}
	if open {
		return "", "", false, fmt.Errorf("bracket is not closed")
	}
	return s, "", false, nil
}

// expandWord appends the hosts of one comma-free word; of several brackets the
// last one counts fastest.
func expandWord(hosts []string, word string, limit int) ([]string, error) {
	names := []string{""}
	for word != "" {
		text, rest, bracket := strings.Cut(word, "[")
		if len(names[0])+len(text) > maxName {
			return nil, fmt.Errorf("name is longer than %d characters", maxName)
		}
		for i := range names {
			names[i] += text
		}
		if !bracket {
			break
		}
		inside, after, _ := strings.Cut(rest, "]")
		numbers, err := expandRanges(inside, limit/len(names))
		if err != nil {
			return nil, err
		}
		product := make([]string, 0, len(names)*len(numbers))
		for _, n := range names {
			for _, d := range numbers {
				product = append(product, n+d)
			}
		}
		names, word = product, after
	}
	if len(hosts)+len(names) > limit {
		return nil, fmt.Errorf("more than %d hosts", limit)
	}
	for _, n := range names {
		if err := checkName(n); err != nil {
			return nil, err
		}
	}
	return append(hosts, names...), nil
}

// expandRanges returns the numbers of "1-4,007" as digits; a number has at
// least as many digits as the range's first.
func expandRanges(s string, limit int) ([]string, error) {
	var out []string
	for r := range strings.SplitSeq(s, ",") {
		first, last, isRange := strings.Cut(r, "-")
		if !isRange {
			last = first
		}
		lo, err := number(first)
		if err != nil {
			return nil, err
		}
		hi, err := number(last)
		if err != nil {
			return nil, err
		}
		if hi < lo {
			return nil, fmt.Errorf("range %q runs backwards", r)
		}
		if hi-lo >= uint64(limit) || len(out) >= limit-int(hi-lo) {
			return nil, fmt.Errorf("more hosts than allowed in [%s]", shorten(s))
		}
		for v := lo; v <= hi; v++ {
			out = append(out, pad(v, len(first)))
		}
	}
	return out, nil
}

// maxDigits keeps numbers within uint64 and far from overflow.
const maxDigits = 18

func number(s string) (uint64, error) {
	if s == "" || len(s) > maxDigits || strings.Trim(s, "0123456789") != "" {
		return 0, fmt.Errorf("%q is not a number of 1 to %d digits", shorten(s), maxDigits)
	}
	return strconv.ParseUint(s, 10, 64)
}

func pad(v uint64, width int) string {
	d := strconv.FormatUint(v, 10)
	if len(d) < width {
		d = strings.Repeat("0", width-len(d)) + d
	}
	return d
}

func checkName(n string) error {
	switch {
	case n == "":
		return fmt.Errorf("empty name")
	case len(n) > maxName:
		return fmt.Errorf("name is longer than %d characters", maxName)
	case n[0] == '-':
		return fmt.Errorf("name %q begins with '-'", n)
	}
	for i := 0; i < len(n); i++ {
		c := n[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.') {
			return fmt.Errorf("name %q contains %q", shorten(n), rune(c))
		}
	}
	return nil
}

func shorten(s string) string {
	if len(s) > 80 {
		return s[:77] + "..."
	}
	return s
}

// Compress writes hosts as a list that Expand turns into the same hosts in the
// same order. Neighbours that differ only in their last number share a
// bracket, so a sorted list is written shortest. The hosts must be names that
// Expand accepts.
func Compress(hosts []string) string {
	var b strings.Builder
	for i := 0; i < len(hosts); {
		prefix, digits := splitName(hosts[i])
		group := i + 1
		if digits != "" {
			for group < len(hosts) {
				p, d := splitName(hosts[group])
				if p != prefix || d == "" {
					break
				}
				group++
			}
		}
		if i > 0 {
			b.WriteByte(',')
		}
		if group-i == 1 {
			b.WriteString(hosts[i])
		} else {
			b.WriteString(prefix)
			b.WriteByte('[')
			writeRanges(&b, hosts[i:group], len(prefix))
			b.WriteByte(']')
		}
		i = group
	}
	return b.String()
}

// writeRanges writes the numbers that follow the first skip bytes of each host.
func writeRanges(b *strings.Builder, hosts []string, skip int) {
	for i := 0; i < len(hosts); {
		first := hosts[i][skip:]
		v, _ := strconv.ParseUint(first, 10, 64)
		end := i + 1
		for end < len(hosts) && hosts[end][skip:] == pad(v+uint64(end-i), len(first)) {
			end++
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(first)
		if end-i > 1 {
			b.WriteByte('-')
			b.WriteString(hosts[end-1][skip:])
		}
		i = end
	}
}

// splitName splits off the digits at the end that a range can count.
func splitName(n string) (prefix, digits string) {
	i := len(n)
	for i > 0 && n[i-1] >= '0' && n[i-1] <= '9' && len(n)-i < maxDigits {
		i--
	}
	return n[:i], n[i:]
}
