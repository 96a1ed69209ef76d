package config_test

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/internal/diag"
)

const good = `cluster: sandbox
project: sluice-sandbox
zone: us-central1-a
endpoints:
  compute: http://10.128.0.1:8080
file_systems:
  - name: fast
    instance: projects/sluice-sandbox/locations/us-central1-a/instances/fast
    mount: /lustre
    types: [fuse.lustre]
roots: [/home]
nodesets:
  - name: cpu
    nodes: node-[1-4]
    machine_type: n2-standard-2
    image_family: projects/sluice-sandbox/global/images/family/sluice
    cpus: 2
    memory_mib: 2048
partitions:
  - name: main
    nodesets: [cpu]
    default: true
slurm:
  version: 24.10
  auth: slurm
  controller_host: controller
  suspend_time: 1m30s
keep_job_dir: 7d
policy:
  - users: [alice]
    read: ["gs://research-*/"]
    write: [gs://research-results/runs/]
    service_account: research-data@p.iam.gserviceaccount.com
`

func TestParse(t *testing.T) {
	c, err := config.Parse("sluice.yaml", []byte(good))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := c.Slurm.Version, "24.10"; got != want {
		t.Errorf("version = %q, want %q (not a number)", got, want)
	}
	if got, want := c.Address, "controller:8443"; got != want {
		t.Errorf("address = %q, want %q", got, want)
	}
	if got, want := time.Duration(c.KeepJobDir), 7*24*time.Hour; got != want {
		t.Errorf("keep_job_dir = %v, want %v", got, want)
	}
	if fs, ok := c.FileSystem(""); !ok || fs.Name != "fast" {
		t.Errorf("default file system = %+v, %v, want fast", fs, ok)
	}
	text, err := config.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	again, err := config.Parse("again.yaml", text)
	if err != nil {
		t.Fatalf("what Marshal wrote is refused: %v\n%s", err, text)
	}
	if d := cmp.Diff(c, again); d != "" {
		t.Errorf("Marshal and Parse differ (-want +got):\n%s", d)
	}
}

func TestParseErrors(t *testing.T) {
	for _, tt := range []struct {
		name string
		old  string // replaced in good
		new  string
		want []string // the first lines, in the text's order
	}{
		{"unknown setting", "project:", "projekt:", []string{
			`s.yaml:1:1: project is missing`,
		}},
		{"wrong types", "cpus: 2\n    memory_mib: 2048", "cpus: two\n    memory_mib: [1]", []string{
			`s.yaml:17:11: nodesets[0].cpus: "two" is not a whole number`,
			`s.yaml:18:17: nodesets[0].memory_mib must be a single value`,
		}},
		{"all at once", "cluster: sandbox\nproject: sluice-sandbox", "cluster: Sand Box\nproject: '@'", []string{
			`s.yaml:1:10: cluster: "Sand Box" is not lower-case letters, digits and hyphens, at most 40`,
			`s.yaml:2:10: project: "@" is not a project id`,
		}},
		{"unknown nodeset", "nodesets: [cpu]", "nodesets: [cpo]", []string{
			`s.yaml:21:16: partitions[0].nodesets[0]: "cpo" is not one of cpu`,
		}},
		{"bad duration", "keep_job_dir: 7d", "keep_job_dir: 7w", []string{
			`s.yaml:28:15: keep_job_dir: "7w" is not a duration such as 7d or 1h30m`,
		}},
		{"root as SlurmUser", "auth: slurm", "user: root", []string{
			`s.yaml:25:9: slurm.user: root may not run slurmctld`,
		}},
		{"relative root", "[/home]", "[home/../etc]", []string{
			`s.yaml:11:9: roots[0]: "home/../etc" is not an absolute path of plain characters`,
		}},
		{"hostlist", "node-[1-4]", "node-[1-", []string{
			`s.yaml:14:12: nodesets[0].nodes: `,
		}},
		{"policy's patterns", `["gs://research-*/"]`, "[gs://research-x/*/, 's3://b/']", []string{
			`s.yaml:31:12: policy[0].read[0]: "gs://research-x/*/" has the character *`,
			`s.yaml:31:32: policy[0].read[1]: "s3://b/" is not a gs:// URL`,
		}},
		{"policy for nobody", "users: [alice]", "group: x", []string{
			`s.yaml:30:5: policy[0]: the rule is for nobody: accounts and users are missing`,
		}},
		{"policy's service account", "research-data@p.iam", "alice@example.com # ", []string{
			`s.yaml:33:22: policy[0].service_account: "alice@example.com" is not a service account's address`,
		}},
		{"policy, a key that is not", "write:", "wirte:", []string{
			`s.yaml:32:5: unknown setting "policy[0].wirte"`,
		}},
		{"accounts that anybody may claim", "users: [alice]", "accounts: [research, '*']", []string{
			`s.yaml:30:16: policy[0]: where Slurm enforces no associations everybody may say --account=research`,
		}},
		{"accounts that are not enforced", "users: [alice]", "accounts: [research]\n    users: ['*']", []string{
			`s.yaml:30:16: policy[0]: where Slurm enforces no associations everybody may say --account=research`,
		}},
		{"empty", good, "", []string{`s.yaml:1:1: the file is empty`}},
		{"not yaml", "cluster: sandbox", "cluster: [", []string{`s.yaml:`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := config.Parse("s.yaml", []byte(strings.Replace(good, tt.old, tt.new, 1)))
			var list diag.List
			if !errors.As(err, &list) {
				t.Fatalf("got %v, want a diag.List", err)
			}
			if tt.name == "unknown setting" {
				if got, want := list[0].Short(), `s.yaml:2:1: unknown setting "projekt"`; got != want || list[0].Hint != "did you mean project?" {
					t.Errorf("got %q hint %q, want %q", got, list[0].Hint, want)
				}
				return
			}
			if len(list) != len(tt.want) {
				t.Errorf("got %d errors, want %d:\n%v", len(list), len(tt.want), list)
			}
			for i := range min(len(list), len(tt.want)) {
				if got := list[i].Short(); !strings.HasPrefix(got, tt.want[i]) {
					t.Errorf("error %d = %q, want %q", i, got, tt.want[i])
				}
			}
		})
	}
}

// The policy that admins read is one that they can write.
func TestDocumentedPolicy(t *testing.T) {
	page, err := os.ReadFile("../../docs/admins/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, ok := strings.Cut(string(page), "```yaml\n")
	text, _, _ = strings.Cut(text, "```")
	if !ok || !strings.HasPrefix(text, "policy:\n") {
		t.Fatal("the page has no policy")
	}
	file, _, _ := strings.Cut(good, "policy:")
	c, err := config.Parse("policy.md", []byte(strings.Replace(file, "controller_host: controller", "controller_host: controller\n  accounting_host: controller", 1)+text))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Policy) != 2 {
		t.Errorf("%d rules, want 2", len(c.Policy))
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(good))
	f.Add([]byte("a: &a [*a]"))
	f.Add([]byte("cluster: {x: 1}\nslurm: []"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := config.Parse("f", data)
		if err == nil {
			if _, err := config.Marshal(c); err != nil {
				t.Errorf("accepted but not rendered: %v", err)
			}
		}
	})
}
