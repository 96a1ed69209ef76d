package guest

import (
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// slurmctldUnit has what distributions' units have.
const slurmctldUnit = `[Unit]
Description=Slurm controller daemon
After=network-online.target remote-fs.target munge.service
Wants=network-online.target
ConditionPathExists=/etc/slurm/slurm.conf
Documentation=man:slurmctld(8)

[Service]
Type=notify
EnvironmentFile=-/etc/default/slurmctld
User=slurm
Group=slurm
RuntimeDirectory=slurmctld
RuntimeDirectoryMode=0750
ExecStart=/usr/sbin/slurmctld --systemd $SLURMCTLD_OPTIONS
ExecReload=/bin/kill -HUP $MAINPID
LimitNOFILE=65536
LimitMEMLOCK=infinity
TasksMax=infinity
ProtectClock=yes

[Install]
WantedBy=multi-user.target
`

func parse(t *testing.T, name string, files ...string) *Unit {
	t.Helper()
	u, err := parseStrings(name, files...)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func parseStrings(name string, files ...string) (*Unit, error) {
	var readers []io.Reader
	for _, f := range files {
		readers = append(readers, strings.NewReader(f))
	}
	return ParseUnit(name, readers...)
}

func TestParseUnit(t *testing.T) {
	u := parse(t, "slurmctld.service", slurmctldUnit)
	want := newUnit("slurmctld.service")
	want.Description = "Slurm controller daemon"
	want.After = []string{"network-online.target", "remote-fs.target", "munge.service"}
	want.Wants = []string{"network-online.target"}
	want.WantedBy = []string{"multi-user.target"}
	want.Conditions = []Condition{{Kind: "PathExists", Path: "/etc/slurm/slurm.conf"}}
	want.Type = "notify"
	want.EnvironmentFile = []string{"-/etc/default/slurmctld"}
	want.User, want.Group = "slurm", "slurm"
	want.Directories = []Directory{{Path: "/run/slurmctld", Mode: 0o750, Variable: "RUNTIME_DIRECTORY", Remove: true}}
	want.ExecStart = []Command{{Argv: []string{"/usr/sbin/slurmctld", "--systemd", "$SLURMCTLD_OPTIONS"}}}
	want.ExecReload = []Command{{Argv: []string{"/bin/kill", "-HUP", "$MAINPID"}}}
	want.Limits = map[string]Limit{"NOFILE": {65536, 65536}, "MEMLOCK": {Infinity, Infinity}}
	want.Hardening.DropCaps = caps(unix.CAP_SYS_TIME, unix.CAP_WAKE_ALARM)
	if diff := cmp.Diff(want, u); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestDropInsAddAndClear(t *testing.T) {
	u := parse(t, "slurmctld.service", slurmctldUnit, "[Unit]\nAfter=slurmdbd.service\n[Service]\nExecStart=\nExecStart=-+/bin/other a\\\n  # between\n  b\nEnvironment=A=1 \"B=two words\" 'C=%n'\n")
	if got, want := u.After[len(u.After)-1], "slurmdbd.service"; got != want || len(u.After) != 4 {
		t.Errorf("After = %q", u.After)
	}
	if diff := cmp.Diff([]Command{{Argv: []string{"/bin/other", "a", "b"}, IgnoreFailure: true, FullRights: true}}, u.ExecStart); diff != "" {
		t.Errorf("ExecStart (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"A=1", "B=two words", "C=slurmctld.service"}, u.Environment); diff != "" {
		t.Errorf("Environment (-want +got):\n%s", diff)
	}
}

func TestTemplateSpecifiers(t *testing.T) {
	u := parse(t, "worker@gpu.service", "[Service]\nExecStart=/bin/worker %i %p %N 100%% %z\nStateDirectory=worker/%i\n")
	if diff := cmp.Diff([]string{"/bin/worker", "gpu", "worker", "worker@gpu", "100%", "%z"}, u.ExecStart[0].Argv); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got, want := u.Directories[0].Path, "/var/lib/worker/gpu"; got != want {
		t.Errorf("StateDirectory = %q, want %q", got, want)
	}
}

func TestParseUnitErrors(t *testing.T) {
	for _, tc := range []struct{ name, text, want string }{
		{"no program", "[Service]\nType=simple\n", "no ExecStart="},
		{"two programs", "[Service]\nExecStart=/a\nExecStart=/b\n", "more than one ExecStart="},
		{"no equals sign", "[Service]\nExecStart=/a\nnonsense\n", "line 3: no = in"},
		{"unknown type", "[Service]\nType=dbus\nExecStart=/a\n", "line 2: Type=: type \"dbus\" is not supported"},
		{"open quote", "[Service]\nExecStart=/bin/sh -c \"oops\n", "a \" without its partner"},
		{"directory that leads out", "[Service]\nExecStart=/a\nStateDirectory=../etc\n", "not a plain relative path"},
		{"absolute directory", "[Service]\nExecStart=/a\nRuntimeDirectory=/etc\n", "not a plain relative path"},
		{"whole base directory", "[Service]\nExecStart=/a\nRuntimeDirectory=.\n", "not a plain relative path"},
		{"unknown signal", "[Service]\nExecStart=/a\nKillSignal=SIGNOPE\n", "unknown signal"},
		{"time span", "[Service]\nExecStart=/a\nRestartSec=soon\n", "not a time span"},
		{"mode", "[Service]\nExecStart=/a\nUMask=999\n", "invalid syntax"},
		{"limit", "[Service]\nExecStart=/a\nLimitNOFILE=many\n", "invalid syntax"},
		{"program from a variable", "[Service]\nExecStart=$PROGRAM\n", "may not be a variable"},
		{"unknown directive", "[Service]\nExecStart=/a\nWatchdogSec=10\n", "line 3: WatchdogSec=: unknown in [Service]"},
		{"directive in another section", "[Unit]\nExecStart=/a\n", "line 2: ExecStart=: unknown in [Unit]"},
		{"unknown section", "[Socket]\nListenStream=1\n", "unknown section [Socket]"},
		{"no section", "ExecStart=/a\n", "unknown section []"},
		{"unknown capability", "[Service]\nExecStart=/a\nCapabilityBoundingSet=CAP_FLY\n", "unknown capability"},
		{"unknown family", "[Service]\nExecStart=/a\nRestrictAddressFamilies=AF_FAX\n", "unknown address family"},
		{"relative path", "[Service]\nExecStart=/a\nReadWritePaths=etc\n", "not a clean absolute path"},
		{"path that leads out", "[Service]\nExecStart=/a\nReadWritePaths=/a/../etc\n", "not a clean absolute path"},
		{"degree", "[Service]\nExecStart=/a\nProtectSystem=very\n", "neither yes, no nor one of full, strict"},
		{"architecture", "[Service]\nExecStart=/a\nSystemCallArchitectures=x86\n", "only native"},
		{"binary", "[Service]\nExecStart=/a\x00b\n", "not a text file"},
		{"too large", strings.Repeat("#", maxUnitSize+1), "larger than"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, err := parseStrings("x.service", tc.text); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
		})
	}
}

func TestParseSpan(t *testing.T) {
	for in, want := range map[string]time.Duration{
		"90": 90 * time.Second, "1min 30s": 90 * time.Second, "500ms": 500 * time.Millisecond, "0.5": 500 * time.Millisecond,
		"infinity": 0, "2h": 2 * time.Hour, "1 min": time.Minute,
	} {
		var got time.Duration
		if err := parseSpan(in, &got); err != nil || got != want {
			t.Errorf("parseSpan(%q) = %v, %v, want %v", in, got, err, want)
		}
	}
	for _, bad := range []string{"", "-1", "1 fortnight", "1e400", "s", "99999999999999d", "."} {
		var got time.Duration
		if err := parseSpan(bad, &got); err == nil {
			t.Errorf("parseSpan(%q) = %v, want an error", bad, got)
		}
	}
}

func TestParseLimit(t *testing.T) {
	for in, want := range map[string]Limit{"10": {10, 10}, "4K:1M": {4096, 1 << 20}, "infinity": {Infinity, Infinity}, "1:infinity": {1, Infinity}} {
		if got, err := parseLimit(in); err != nil || got != want {
			t.Errorf("parseLimit(%q) = %v, %v, want %v", in, got, err, want)
		}
	}
	for _, bad := range []string{"", "-1", "99999999999999999999", "99999999999T", "1:"} {
		if got, err := parseLimit(bad); err == nil {
			t.Errorf("parseLimit(%q) = %v, want an error", bad, got)
		}
	}
}

func TestExpand(t *testing.T) {
	env := map[string]string{"A": "one two", "B": "", "MAINPID": "42"}
	got := expand([]string{"/bin/x", "$A", "${A}", "pre-$A-post", "$B", "${B}", "$UNSET", "$$A", "$", "a$", "${unclosed", "$MAINPID"}, env)
	want := []string{"/bin/x", "one", "two", "one two", "pre-one two-post", "", "$A", "$", "a$", "${unclosed", "42"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestParseEnvironmentFile(t *testing.T) {
	got := parseEnvironmentFile([]byte("# comment\n; too\nA=1\n B = two words \nC=\"quoted # value\"\n1BAD=x\nnonsense\nD='it''s'\nE=\n"))
	if diff := cmp.Diff([]string{"A=1", "B=two words", "C=quoted # value", "D=its", "E="}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestUnitName(t *testing.T) {
	for in, want := range map[string]string{"slurmd": "slurmd.service", "a.target": "a.target", "worker@1": "worker@1.service", "a.b": "a.b.service"} {
		if got, err := unitName(in); err != nil || got != want {
			t.Errorf("unitName(%q) = %q, %v, want %q", in, got, err, want)
		}
	}
	for _, bad := range []string{"", "../x", "a/b", ".hidden", "a\nb"} {
		if got, err := unitName(bad); err == nil {
			t.Errorf("unitName(%q) = %q, want an error", bad, got)
		}
	}
}

func FuzzParseUnit(f *testing.F) {
	f.Add("slurmctld.service", slurmctldUnit)
	f.Add("x@1.service", "[Service]\nExecStart=-/bin/sh -c 'a \\x41 \"b\"' $A ${B} %i \\\n more\nRestartSec=1min 5s\nRuntimeDirectory=a b/c\n")
	f.Add("x.target", "")
	f.Fuzz(func(t *testing.T, name, text string) {
		u, err := parseStrings(name, text)
		if err != nil {
			return
		}
		for _, list := range [][]Command{u.ExecStart, u.ExecStartPre, u.ExecStop} {
			for _, c := range list {
				if len(c.Argv) == 0 {
					t.Errorf("a command without a program in %q", text)
				}
				expand(c.Argv, map[string]string{"A": "x y"})
			}
		}
		for _, d := range u.Directories {
			if d.Path != filepath.Clean(d.Path) || !under(d.Path, "/run", "/var/lib", "/var/cache", "/var/log", "/etc") {
				t.Errorf("the directory %q leads out", d.Path)
			}
		}
		if u.RestartDelay < 0 || u.TimeoutStart < 0 || u.TimeoutStop < 0 {
			t.Errorf("a negative time span from %q", text)
		}
	})
}

func under(path string, bases ...string) bool {
	for _, b := range bases {
		if strings.HasPrefix(path, b+"/") {
			return true
		}
	}
	return false
}
