package policy

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const dataAccount = "research-data@p.iam.gserviceaccount.com"

// example is a site's policy with every kind of rule.
var example = Policy{
	{Accounts: []string{"research"}, Read: []string{"gs://research-*/"}, Write: []string{"gs://research-*/runs/"}, ServiceAccount: dataAccount},
	{Accounts: []string{"genomics"}, Users: []string{"alice"}, Read: []string{"gs://patients/trial 7/"}, ServiceAccount: "genomics@p.iam.gserviceaccount.com", Group: "trial7"},
	{Users: []string{"carol"}, Write: []string{"gs://exports/carol/"}, ServiceAccount: "exports@p.iam.gserviceaccount.com"},
	{Accounts: []string{"*"}, Read: []string{"gs://open-data/"}, ServiceAccount: dataAccount},
}

func TestDecide(t *testing.T) {
	research := Ask{User: "alice", Account: "research", Verb: Read}
	genomics := Ask{User: "alice", Account: "genomics", Verb: Read, Groups: []string{"trial7"}}
	at := func(a Ask, bucket, prefix string) Ask { a.Bucket, a.Prefix = bucket, prefix; return a }
	as := func(a Ask, edit func(*Ask)) Ask { edit(&a); return a }
	write := func(a *Ask) { a.Verb = Write }
	open := func(a *Ask) { a.Open = true }
	for _, tt := range []struct {
		name string
		ask  Ask
		rule string // "": denied
	}{
		{"whole bucket", at(research, "research-x", ""), "policy[0]"},
		{"below it", at(research, "research-x", "a/b/"), "policy[0]"},
		{"another account", at(as(research, func(a *Ask) { a.Account = "physics" }), "research-x", ""), ""},
		{"an account that begins so", at(as(research, func(a *Ask) { a.Account = "research2" }), "research-x", ""), ""},
		{"an account in capitals", at(as(research, func(a *Ask) { a.Account = "Research" }), "research-x", ""), ""},
		{"no account", at(as(research, func(a *Ask) { a.Account = "" }), "research-x", ""), ""},
		{"another bucket", at(research, "patients", "trial 7/"), ""},
		{"a bucket that ends so", at(research, "my-research-x", ""), ""},
		{"a bucket of a domain", at(research, "research-x.example.com", ""), ""},
		{"nobody's bucket", at(research, "secret", ""), ""},
		{"write where only reading is allowed", at(as(research, write), "research-x", "a/"), ""},
		{"write", at(as(research, write), "research-x", "runs/7/"), "policy[0]"},
		{"write beside it", at(as(research, write), "research-x", "runs2/"), ""},
		{"write above it", at(as(research, write), "research-x", ""), ""},
		{"case of a prefix", at(as(research, write), "research-x", "Runs/7/"), ""},
		{"unknown verb", at(as(research, func(a *Ask) { a.Verb = "delete" }), "research-x", ""), ""},

		{"both lists", at(genomics, "patients", "trial 7/"), "policy[1]"},
		{"both lists, another user", at(as(genomics, func(a *Ask) { a.User = "bob" }), "patients", "trial 7/"), ""},
		{"both lists, another account", at(as(genomics, func(a *Ask) { a.Account = "research" }), "patients", "trial 7/"), ""},
		{"not in the group", at(as(genomics, func(a *Ask) { a.Groups = []string{"trial77"} }), "patients", "trial 7/"), ""},
		{"user alone", as(Ask{User: "carol", Bucket: "exports", Prefix: "carol/1/"}, write), "policy[2]"},
		{"another user", as(Ask{User: "caro", Bucket: "exports", Prefix: "carol/1/"}, write), ""},
		{"everybody", Ask{User: "bob", Verb: Read, Bucket: "open-data", Prefix: "x/"}, "policy[3]"},

		// Tricks with the path, below what is allowed.
		{"dots", at(research, "research-x", "a/../../secret/"), ""},
		{"one dot", at(research, "research-x", "a/./"), ""},
		{"dots, escaped", at(research, "research-x", "a/%2e%2e/"), ""},
		{"dots, escaped twice", at(research, "research-x", "a/%252e%252e/"), ""},
		{"slash, escaped", at(research, "research-x", "a%2fb/"), ""},
		{"two slashes", at(research, "research-x", "a//b/"), ""},
		{"a slash first", at(research, "research-x", "/a/"), ""},
		{"a star", at(research, "research-x", "*/"), ""},
		{"a question mark", at(research, "research-x", "a?b/"), ""},
		{"brackets", at(research, "research-x", "[a-z]/"), ""},
		{"braces", at(research, "research-x", "{a,b}/"), ""},
		{"a fragment", at(research, "research-x", "a#b/"), ""},
		{"a backslash", at(research, "research-x", `a\..\b/`), ""},
		{"a quote that ends a condition", at(research, "research-x", "a') || true || ('/"), ""},
		{"a line break", at(research, "research-x", "a\n/"), ""},
		{"a NUL", at(research, "research-x", "a\x00/"), ""},
		{"a bad byte", at(research, "research-x", "a\xff/"), ""},
		{"no final slash", at(research, "research-x", "a"), ""},
		{"a glob as the bucket", at(research, "research-*", ""), ""},
		{"a bucket with a slash", at(research, "research-x/../secret", ""), ""},
		{"a bucket in capitals", at(research, "Research-x", ""), ""},
		{"no bucket", at(research, "", ""), ""},

		// What is not known yet is refused only when it cannot be allowed.
		{"open, above a rule", as(at(research, "research-x", ""), func(a *Ask) { open(a); write(a) }), "policy[0]"},
		{"open, in a rule's middle", as(at(research, "research-x", "ru"), func(a *Ask) { open(a); write(a) }), "policy[0]"},
		{"open, below a rule", as(at(research, "research-x", "runs/job-"), func(a *Ask) { open(a); write(a) }), "policy[0]"},
		{"open, beside a rule", as(at(research, "research-x", "rums"), func(a *Ask) { open(a); write(a) }), ""},
		{"open, another bucket", as(at(research, "secret", "runs/"), func(a *Ask) { open(a); write(a) }), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := example.Decide(tt.ask)
			if got.Rule != tt.rule || got.Allowed != (tt.rule != "") {
				t.Errorf("got %+v, want the rule %q", got, tt.rule)
			}
			if got.Why == "" || got.Allowed == (got.Hint != "") || got.Allowed == (got.ServiceAccount == "") {
				t.Errorf("an incomplete decision: %+v", got)
			}
		})
	}
}

func TestNothingIsAllowedByDefault(t *testing.T) {
	for name, p := range map[string]Policy{"no rule": nil, "a rule for nobody": {{Read: []string{"gs://corpus/"}}}, "a rule without prefixes": {{Users: []string{"alice"}}}} {
		if d := p.Decide(Ask{User: "alice", Account: "research", Verb: Read, Bucket: "corpus"}); d.Allowed {
			t.Errorf("%s: allowed: %s", name, d.Why)
		}
	}
}

func TestWordsOfARefusal(t *testing.T) {
	for _, tt := range []struct {
		name      string
		ask       Ask
		why, hint string
	}{
		{"elsewhere", Ask{User: "alice", Account: "research", Verb: Read, Bucket: "secret", Prefix: "x/"},
			"alice (account research) may not read gs://secret/x/", "ask the site's admin for a rule in sluice.yaml's policy; you may read gs://research-*/, gs://open-data/"},
		{"nowhere", Ask{User: "bob", Verb: Write, Bucket: "secret"},
			"bob may not write gs://secret/", "ask the site's admin for a rule in sluice.yaml's policy"},
		{"group", Ask{User: "alice", Account: "genomics", Verb: Read, Bucket: "patients", Prefix: "trial 7/"},
			"alice (account genomics) may read gs://patients/trial 7/ only as a member of group trial7", "ask the site's admin to add you to the group"},
		{"trick", Ask{User: "alice", Account: "research", Verb: Read, Bucket: "research-x", Prefix: "%2e/"},
			"alice (account research) may not read a prefix with the character %: gs://research-x/%2e/", "policy knows plain prefixes only: choose another name"},
	} {
		d := example.Decide(tt.ask)
		if d.Why != tt.why || d.Hint != tt.hint {
			t.Errorf("%s: got %q, %q, want %q, %q", tt.name, d.Why, d.Hint, tt.why, tt.hint)
		}
	}
}

func TestCheck(t *testing.T) {
	good := func() Rule {
		return Rule{Accounts: []string{"a"}, Read: []string{"gs://b-1/p/"}, ServiceAccount: dataAccount}
	}
	for _, tt := range []struct {
		name string
		edit func(*Rule)
		want []string
	}{
		{"good", func(*Rule) {}, nil},
		{"everything", func(r *Rule) {
			r.Users, r.Write, r.Group = []string{"*"}, []string{"gs://*-x/", "gs://a.b/c d/"}, "corpus"
		}, nil},
		{"for nobody", func(r *Rule) { r.Accounts = nil }, []string{": the rule is for nobody: accounts and users are missing"}},
		{"for nothing", func(r *Rule) { r.Read = nil }, []string{": the rule allows nothing: read and write are missing"}},
		{"no account", func(r *Rule) { r.ServiceAccount = "" }, []string{"service_account: service_account is missing"}},
		{"a person's account", func(r *Rule) { r.ServiceAccount = "alice@example.com" }, []string{`service_account: "alice@example.com" is not a service account's address`}},
		{"glob of names", func(r *Rule) { r.Users = []string{"al*"} }, []string{`users[0]: "al*" is not a name`}},
		{"group", func(r *Rule) { r.Group = "a b" }, []string{`group: "a b" is not a group's name`}},
		{"scheme", func(r *Rule) { r.Read = []string{"s3://b/"} }, []string{`read[0]: "s3://b/" is not a gs:// URL`}},
		{"every bucket", func(r *Rule) { r.Read = []string{"gs://***/"} }, []string{`read[0]: "gs://***/" names every bucket of the world`}},
		{"no slash", func(r *Rule) { r.Read = []string{"gs://bucket"} }, []string{`read[0]: "gs://bucket" does not end in a slash`}},
		{"prefix without a slash", func(r *Rule) { r.Read = []string{"gs://bucket/p"} }, []string{`read[0]: "gs://bucket/p" has no slash at its end`}},
		{"glob in the prefix", func(r *Rule) { r.Read = []string{"gs://bucket/p*/"} }, []string{`read[0]: "gs://bucket/p*/" has the character *`}},
		{"dots", func(r *Rule) { r.Read = []string{"gs://bucket/../"} }, []string{`read[0]: "gs://bucket/../" has the part ..`}},
		{"bucket in capitals", func(r *Rule) { r.Write = []string{"gs://Bucket/"} }, []string{`write[0]: "gs://Bucket/" has no bucket of lower-case letters, digits, '-', '_', '.' and *`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := good()
			tt.edit(&r)
			var got []string
			for _, p := range r.Check() {
				got = append(got, p.Field+": "+p.Message)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

// Whatever a user writes, an allowed prefix begins with that of a rule, byte for byte.
func FuzzDecide(f *testing.F) {
	f.Add("research-x", "runs/7/", true)
	f.Add("research-x", "runs/../", false)
	f.Add("research-*", "%2e%2e/", false)
	f.Add("open-data", "'||'/", false)
	f.Fuzz(func(t *testing.T, bucket, prefix string, open bool) {
		a := Ask{User: "alice", Account: "research", Verb: Write, Bucket: bucket, Prefix: prefix, Open: open}
		d := example.Decide(a)
		if !d.Allowed {
			return
		}
		if !strings.HasPrefix(bucket, "research-") || strings.ContainsAny(bucket, "/.*") {
			t.Errorf("bucket %q was allowed", bucket)
		}
		if !open && (!strings.HasPrefix(prefix, "runs/") || strings.Contains("/"+prefix, "/../") || strings.ContainsAny(prefix, odd)) {
			t.Errorf("prefix %q was allowed", prefix)
		}
	})
}
