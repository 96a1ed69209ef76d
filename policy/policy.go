// Package policy says who may read and write which bucket prefixes, and keeps
// the audit log of what was decided.
package policy

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Verb is what is to be done with a bucket prefix.
type Verb string

// The verbs.
const (
	Read  Verb = "read"
	Write Verb = "write"
)

// Rule is one element of sluice.yaml's policy list. It is for those who are named
// by every list that it has: with accounts and users, for these users in jobs of
// these accounts.
type Rule struct {
	// Accounts are Slurm accounts, Users login names; "*" means any. At least one
	// of the two lists is there.
	Accounts []string `yaml:"accounts,omitempty"`
	Users    []string `yaml:"users,omitempty"`
	// Read and Write are gs://BUCKET/PREFIX/: the prefix itself and all below it.
	// A * in BUCKET stands for any characters but a dot.
	Read  []string `yaml:"read,omitempty"`
	Write []string `yaml:"write,omitempty"`
	// ServiceAccount is the e-mail address of the account that has the rights on
	// the buckets, and as which the data moves.
	ServiceAccount string `yaml:"service_account"`
	// Group is the POSIX group that may read what was staged, and in which a reader
	// must be; "": the primary group of the job's user.
	Group string `yaml:"group,omitempty"`
}

// Policy is the rules in their order. The zero value denies everything.
type Policy []Rule

// Ask is a question to a policy.
type Ask struct {
	User    string // login name
	Account string // Slurm account of the job, "" where Slurm has none
	// Groups are those of Policy.Groups in which the user is.
	Groups []string
	Verb   Verb
	// Bucket and Prefix are as the service takes them: symbols are replaced. Prefix
	// is "" or ends in a slash.
	Bucket, Prefix string
	// Open says that Prefix is only the beginning of one that becomes known later.
	// Such a question is answered yes where a whole prefix could be.
	Open bool
}

// Decision answers an Ask.
type Decision struct {
	Allowed bool
	// Rule, ServiceAccount and Group are those of the rule that allows it.
	Rule           string
	ServiceAccount string
	Group          string
	// Why is one line of words; Hint, of a refusal, says what to do next.
	Why  string
	Hint string
}

// Decide answers by the first rule that allows it; the default denies.
func (p Policy) Decide(a Ask) Decision {
	who := a.User
	if a.Account != "" {
		who += " (account " + a.Account + ")"
	}
	url := "gs://" + a.Bucket + "/" + a.Prefix
	if why := plain(a.Bucket, a.Prefix, a.Open); why != "" {
		return Decision{Why: fmt.Sprintf("%s may not %s a prefix with %s: %s", who, a.Verb, why, url), Hint: "policy knows plain prefixes only: choose another name"}
	}
	var others []string
	missing := ""
	for i, r := range p {
		if !names(r.Accounts, a.Account) || !names(r.Users, a.User) || len(r.Accounts)+len(r.Users) == 0 {
			continue
		}
		for _, pattern := range r.of(a.Verb) {
			if !covers(pattern, a) {
				if !slices.Contains(others, pattern) {
					others = append(others, pattern)
				}
				continue
			}
			name := fmt.Sprintf("policy[%d]", i)
			if a.Verb == Read && r.Group != "" && !slices.Contains(a.Groups, r.Group) {
				missing = r.Group
				continue
			}
			return Decision{Allowed: true, Rule: name, ServiceAccount: r.ServiceAccount, Group: r.Group,
				Why: fmt.Sprintf("%s lets %s %s %s", name, who, a.Verb, pattern)}
		}
	}
	d := Decision{Why: fmt.Sprintf("%s may not %s %s", who, a.Verb, url), Hint: "ask the site's admin for a rule in sluice.yaml's policy"}
	switch {
	case missing != "":
		d.Why = fmt.Sprintf("%s may %s %s only as a member of group %s", who, a.Verb, url, missing)
		d.Hint = "ask the site's admin to add you to the group"
	case len(others) > 0:
		d.Hint += fmt.Sprintf("; you may %s %s", a.Verb, strings.Join(others[:min(len(others), 5)], ", "))
	}
	return d
}

// Groups lists the POSIX groups that the rules name.
func (p Policy) Groups() []string {
	var all []string
	for _, r := range p {
		if r.Group != "" && !slices.Contains(all, r.Group) {
			all = append(all, r.Group)
		}
	}
	return all
}

// ServiceAccounts lists the service accounts that the rules name.
func (p Policy) ServiceAccounts() []string {
	var all []string
	for _, r := range p {
		if !slices.Contains(all, r.ServiceAccount) {
			all = append(all, r.ServiceAccount)
		}
	}
	return all
}

func (r Rule) of(v Verb) []string {
	switch v {
	case Read:
		return r.Read
	case Write:
		return r.Write
	}
	return nil
}

// names reports whether a list is absent or has the name.
func names(list []string, name string) bool {
	return len(list) == 0 || slices.Contains(list, "*") || name != "" && slices.Contains(list, name)
}

// covers reports whether the pattern's bucket is a's and its prefix begins a's.
func covers(pattern string, a Ask) bool {
	bucket, prefix, ok := strings.Cut(strings.TrimPrefix(pattern, "gs://"), "/")
	if !ok || prefix != "" && !strings.HasSuffix(prefix, "/") || !glob(bucket, a.Bucket) {
		return false
	}
	return strings.HasPrefix(a.Prefix, prefix) || a.Open && strings.HasPrefix(prefix, a.Prefix)
}

// glob matches a whole bucket name; a * is any characters but a dot, so that
// "data-*" is not "data-x.example.com".
func glob(pattern, name string) bool {
	first, rest, star := strings.Cut(pattern, "*")
	if !star {
		return pattern == name
	}
	name, ok := strings.CutPrefix(name, first)
	if !ok {
		return false
	}
	for i := 0; ; i++ {
		if glob(rest, name[i:]) {
			return true
		}
		if i == len(name) || name[i] == '.' {
			return false
		}
	}
}

// bucketName is what Cloud Storage takes for a bucket.
var bucketName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$`)

// odd are the characters of a prefix that some program between here and the
// bucket could read as more than a character: escapes, globs, quotes, and the
// parts of a URL.
const odd = "%*?[]{}\\#'\"`"

// plain says what a bucket or prefix has that could mean another place to
// somebody else, or "".
func plain(bucket, prefix string, open bool) string {
	if !bucketName.MatchString(bucket) {
		return "a bucket that cannot exist"
	}
	if !utf8.ValidString(prefix) {
		return "bytes that are not UTF-8"
	}
	for _, r := range prefix {
		if unicode.IsControl(r) {
			return "a control character"
		}
		if strings.ContainsRune(odd, r) {
			return "the character " + string(r)
		}
	}
	parts := strings.Split(prefix, "/")
	last := parts[len(parts)-1]
	if last != "" && !open {
		return "no slash at its end"
	}
	for _, part := range parts[:len(parts)-1] {
		switch part {
		case "":
			return "an empty part (two slashes, or one at its start)"
		case ".", "..":
			return "the part " + part
		}
	}
	return ""
}

// Problem is what is wrong with a rule: its field ("read[0]"), words and a hint.
type Problem struct {
	Field, Message, Hint string
}

var (
	accountEmail = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,61}@[a-z0-9.-]+\.gserviceaccount\.com$`)
	subjectName  = regexp.MustCompile(`^[^\s,"'*/\x00-\x1f]{1,256}$`)
	groupName    = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.@\\-]{0,254}$`)
	bucketGlob   = regexp.MustCompile(`^[a-z0-9*][a-z0-9*._-]{0,220}[a-z0-9*]$`)
)

// Check lists everything that is wrong with the rule.
func (r Rule) Check() []Problem {
	var list []Problem
	add := func(field, hint, format string, args ...any) {
		list = append(list, Problem{field, fmt.Sprintf(format, args...), hint})
	}
	if len(r.Accounts)+len(r.Users) == 0 {
		add("", `name Slurm accounts or users; ["*"] means everybody`, "the rule is for nobody: accounts and users are missing")
	}
	for field, names := range map[string][]string{"accounts": r.Accounts, "users": r.Users} {
		for i, n := range names {
			if n != "*" && !subjectName.MatchString(n) {
				add(fmt.Sprintf("%s[%d]", field, i), "a name in full, or *", "%q is not a name", n)
			}
		}
	}
	if len(r.Read)+len(r.Write) == 0 {
		add("", "add read: or write: with gs://BUCKET/PREFIX/", "the rule allows nothing: read and write are missing")
	}
	for field, patterns := range map[string][]string{"read": r.Read, "write": r.Write} {
		for i, p := range patterns {
			if why, hint := checkPattern(p); why != "" {
				add(fmt.Sprintf("%s[%d]", field, i), hint, "%q %s", p, why)
			}
		}
	}
	switch {
	case r.ServiceAccount == "":
		add("service_account", "the account that has the rights on these buckets", "service_account is missing")
	case !accountEmail.MatchString(r.ServiceAccount):
		add("service_account", "NAME@PROJECT.iam.gserviceaccount.com", "%q is not a service account's address", r.ServiceAccount)
	}
	if r.Group != "" && !groupName.MatchString(r.Group) {
		add("group", "the name of a POSIX group", "%q is not a group's name", r.Group)
	}
	return list
}

// checkPattern judges one element of read or write.
func checkPattern(p string) (why, hint string) {
	const shape = "write gs://BUCKET/PREFIX/, or gs://BUCKET/ for the whole bucket"
	rest, ok := strings.CutPrefix(p, "gs://")
	if !ok {
		return "is not a gs:// URL", shape
	}
	bucket, prefix, slash := strings.Cut(rest, "/")
	switch {
	case !bucketGlob.MatchString(bucket):
		return "has no bucket of lower-case letters, digits, '-', '_', '.' and *", shape
	case strings.Trim(bucket, "*._-") == "":
		return "names every bucket of the world", "write at least the beginning of the bucket's name"
	case !slash:
		return "does not end in a slash", shape
	}
	if why := plain("any", prefix, false); why != "" {
		return "has " + why, "only the bucket's name may have a *; a prefix covers all below it"
	}
	return "", ""
}
