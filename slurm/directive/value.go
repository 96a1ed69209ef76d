package directive

import (
	"fmt"
	"net/netip"
	"path"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluicehpc/sluice/internal/diag"
)

// maxCount bounds every count, steps included.
const maxCount = 1_000_000_000

// maxValue bounds a value in bytes: Cloud Storage's limit on object names
// (1024) and Linux's on paths (4096) both lie below.
const maxValue = 4096

// Compiled when first needed: the hook's start is part of every sbatch.
var (
	bestRE   = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^([A-Za-z0-9][A-Za-z0-9_./-]*):(min|max)$`) })
	signalRE = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^(?:SIG)?([A-Z][A-Z0-9]*)@([0-9]{1,5})$`) })
)

func letterOrDigit(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

// isName is [A-Za-z0-9][A-Za-z0-9_-]{0,62}.
func isName(v string) bool {
	if v == "" || len(v) > 63 || !letterOrDigit(v[0]) {
		return false
	}
	for i := range len(v) {
		if !letterOrDigit(v[i]) && v[i] != '_' && v[i] != '-' {
			return false
		}
	}
	return true
}

// isBucketPart is one dot-separated part of a bucket's name.
func isBucketPart(v string) bool {
	return isName(v) && letterOrDigit(v[len(v)-1]) && strings.ToLower(v) == v
}

// signals are those that sbatch --signal and a job can use for this.
var signals = []string{"HUP", "INT", "QUIT", "USR1", "USR2", "TERM", "CONT", "URG", "XCPU"}

// check judges a value as written, before symbols are replaced; what only the
// symbols' values can spoil is found by Expand. An empty message is no error.
func (k *key) check(v string) (message, hint string) {
	if v == "" {
		return k.name + "= has an empty value", "write " + k.name + "=" + k.shape()
	}
	if len(v) > maxValue {
		return fmt.Sprintf("%s= is longer than %d bytes", k.name, maxValue), ""
	}
	if strings.Contains(v, "capacity=") {
		return k.name + "= contains \"capacity=\", which Slurm would read as a request for a burst buffer pool", "choose another name"
	}
	if bad := unknownSymbol(v); bad != "" {
		return fmt.Sprintf("unknown symbol %q in %s=", bad, k.name), "symbols: %j %A %a %u %x; write %% for a percent sign"
	}
	return k.checkExpanded(probe(v))
}

// checkExpanded judges a value without symbols.
func (k *key) checkExpanded(v string) (message, hint string) {
	problem := ""
	switch k.kind {
	case kindPrefix:
		problem, hint = checkURL(v)
	case kindName:
		if !isName(v) {
			problem, hint = "is not a name", "a name is a letter or digit, then up to 62 letters, digits, '_' and '-'"
		}
	case kindPath, kindDir:
		problem, hint = checkPath(v, k.kind == kindDir)
	case kindGlob:
		problem = checkGlob(v)
	case kindChoice:
		if !contains(k.values, v) {
			problem, hint = "is not one of "+strings.Join(k.values, ", "), ""
			if n := diag.Nearest(strings.ToLower(v), k.values); n != "" {
				hint = "did you mean " + n + "?"
			}
		}
	case kindCount:
		if _, err := parseCount(v); err != nil {
			problem, hint = fmt.Sprintf("is not a whole number from 1 to %d", maxCount), ""
		}
	case kindEvery:
		if _, err := parseEvery(v); err != nil {
			problem, hint = "is neither a number of steps nor a duration", "write 500 for steps, or 30m, 2h, 1d"
		}
	case kindBest:
		if !bestRE().MatchString(v) {
			problem, hint = "is not METRIC:min or METRIC:max", "for example loss:min"
		}
	case kindSignal:
		if _, err := parseSignal(v); err != nil {
			problem, hint = "is not SIG@SECONDS", "for example USR1@120; signals: "+strings.Join(signals, ", ")
		}
	}
	if problem == "" {
		return "", ""
	}
	return fmt.Sprintf("%s=%s %s", k.name, clip(v), problem), hint
}

// checkURL follows Cloud Storage's rules for names of buckets and objects.
// Reserved words are not looked for: the rule is about making buckets, and
// Google's own buckets may be read.
func checkURL(v string) (problem, hint string) {
	rest, ok := strings.CutPrefix(v, "gs://")
	if !ok {
		return "is not a gs:// URL", "write gs://BUCKET/PREFIX/"
	}
	bucket, prefix, slash := strings.Cut(rest, "/")
	if bucket == "" {
		return "has no bucket", "write gs://BUCKET/PREFIX/"
	}
	if p := checkBucket(bucket); p != "" {
		return p, "bucket names have 3 to 63 lower-case letters, digits, '-', '_' and '.', and begin and end with a letter or digit"
	}
	if !slash || prefix != "" && !strings.HasSuffix(prefix, "/") {
		if strings.ContainsAny(prefix, "*?[") {
			return "is a pattern, not a prefix", "name the prefix, which ends in /, and choose objects with match="
		}
		return "does not end in /", "write " + clip(v) + "/"
	}
	if len(prefix) > 1024 {
		return "has a prefix longer than 1024 bytes", ""
	}
	for part := range strings.SplitSeq(prefix, "/") {
		if part == "." || part == ".." {
			return "has a " + part + " in its prefix", "write the prefix out"
		}
	}
	if strings.ContainsAny(prefix, "\r\n\x00") {
		return "contains a control character", ""
	}
	return "", ""
}

func checkBucket(b string) string {
	if len(b) < 3 {
		return "names a bucket shorter than 3 characters"
	}
	if len(b) > 222 || !strings.Contains(b, ".") && len(b) > 63 {
		return "names a bucket longer than 63 characters"
	}
	if _, err := netip.ParseAddr(b); err == nil {
		return "names a bucket that looks like an address"
	}
	for part := range strings.SplitSeq(b, ".") {
		if !isBucketPart(part) {
			return fmt.Sprintf("names the bucket %q, which cannot exist", clip(b))
		}
	}
	return ""
}

func checkPath(v string, named bool) (problem, hint string) {
	for part := range strings.SplitSeq(v, "/") {
		if part == ".." {
			return "leads out of its directory by ..", "write the path without .."
		}
		if len(part) > 255 {
			return "has a part longer than 255 bytes", ""
		}
	}
	for _, r := range v {
		if r < ' ' || r == 0x7f {
			return "contains a control character", ""
		}
	}
	if c := path.Clean(v); c == "/" || named && c == "." {
		return "names no directory", "write a name at the end of the path"
	}
	return "", ""
}

// checkGlob knows matchGlob's brackets; all else is literal.
func checkGlob(v string) string {
	square, curly := false, 0
	for _, r := range v {
		switch {
		case r < ' ' || r == 0x7f:
			return "contains a control character"
		case square:
			square = r != ']'
		case r == '[':
			square = true
		case r == '{':
			curly++
		case r == '}':
			if curly--; curly < 0 {
				return "closes a brace that is not open"
			}
		}
	}
	if square || curly > 0 {
		return "has a bracket that is not closed"
	}
	return ""
}

func parseURL(v string) URL {
	bucket, prefix, _ := strings.Cut(strings.TrimPrefix(v, "gs://"), "/")
	return URL{Bucket: bucket, Prefix: prefix}
}

func parseCount(v string) (int, error) {
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 || n > maxCount || v[0] == '+' {
		return 0, fmt.Errorf("%q is not a whole number from 1 to %d", v, maxCount)
	}
	return n, nil
}

func parseEvery(v string) (Every, error) {
	if n, err := parseCount(v); err == nil {
		return Every{Steps: n}, nil
	}
	d, err := parseDuration(v)
	return Every{Time: d}, err
}

// parseDuration reads Go's durations and whole days, as in 1d or 1d12h. The
// result is above 0 and at most ten years.
func parseDuration(v string) (time.Duration, error) {
	const day, longest = 24 * time.Hour, 3650 * 24 * time.Hour
	bad := fmt.Errorf("%q is not a duration such as 90s, 30m, 2h or 1d", v)
	var d time.Duration
	rest := v
	if days, after, ok := strings.Cut(v, "d"); ok {
		n, err := parseCount(days)
		if err != nil || n > 3650 {
			return 0, bad
		}
		d, rest = time.Duration(n)*day, after
	}
	if rest != "" {
		more, err := time.ParseDuration(rest)
		if err != nil || more < 0 || strings.ContainsAny(rest[:1], "+-") || more > longest {
			return 0, bad
		}
		d += more
	}
	if d <= 0 || d > longest {
		return 0, bad
	}
	return d, nil
}

func parseBest(v string) Best {
	m := bestRE().FindStringSubmatch(v)
	if m == nil {
		return Best{}
	}
	return Best{Metric: m[1], Order: m[2]}
}

func parseSignal(v string) (Signal, error) {
	m := signalRE().FindStringSubmatch(v)
	if m == nil || !contains(signals, m[1]) {
		return Signal{}, fmt.Errorf("%q is not SIG@SECONDS", v)
	}
	n, err := strconv.ParseUint(m[2], 10, 16)
	if err != nil || n == 0 {
		return Signal{}, fmt.Errorf("%q is not SIG@SECONDS", v)
	}
	return Signal{Name: m[1], Seconds: int(n)}, nil
}
