// Package doctor finds what is wrong with a cluster, and proves on a real cloud what the sandbox cannot.
package doctor

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/internal/command"
	"github.com/sluicehpc/sluice/lustre/probe"
)

// Verdict is how a check ended.
type Verdict string

// The verdicts. Warn is what a site should look at, Fail what keeps jobs from running or data from being safe.
const (
	OK   Verdict = "ok"
	Warn Verdict = "warn"
	Fail Verdict = "fail"
)

// Finding is one check's word about one thing.
type Finding struct {
	Name    string  `json:"name"` // of the check: "file system scratch: mount"
	Verdict Verdict `json:"verdict"`
	Detail  string  `json:"detail"`
	Next    string  `json:"next,omitempty"` // what to do about it; empty when OK
}

// Site is the controller VM that is looked at. Fields that are nil or empty have the defaults named beside them.
type Site struct {
	ConfigPath string // /etc/sluice/sluice.yaml
	SlurmDir   string // where Slurm's files are: /etc/slurm
	ProgramDir string // where sluice-hook and its links are: /usr/local/libexec/sluice
	Version    string // of this program, to be compared with sluiced's; empty: not compared

	Root   string                                                        // of Sluice's own files: $SLUICE_ROOT
	Run    func(context.Context, command.Spec) ([]byte, error)           // command.Run
	Call   func(ctx context.Context, op string, in, out any) error       // asks sluiced on its socket
	Probe  func(probe.Check) probe.Result                                // probe.Probe
	Lustre func(context.Context, *config.Config) (*lustre.Client, error) // a client of the configured API
	// Permissions asks IAM for what sluiced's account lacks, in words, and of how many permissions it asked.
	Permissions func(context.Context, *config.Config) (missing []string, asked int, err error)
	HTTP        *http.Client     // http.DefaultClient
	Now         func() time.Time // time.Now
	// Connect says whether a process of that uid reaches the address host:port: bash's /dev/tcp.
	Connect func(ctx context.Context, uid uint32, address string) error

	config *config.Config // what ConfigPath says, or nil
}

func (s *Site) setDefaults() {
	if s.ConfigPath == "" {
		s.ConfigPath = config.DefaultPath
	}
	if s.SlurmDir == "" {
		s.SlurmDir = "/etc/slurm"
	}
	if s.ProgramDir == "" {
		s.ProgramDir = "/usr/local/libexec/sluice"
	}
	if s.Root == "" {
		s.Root = os.Getenv("SLUICE_ROOT")
	}
	if s.Run == nil {
		s.Run = command.Run
	}
	if s.Call == nil {
		socket := s.Root + api.SluicedSocket
		s.Call = func(ctx context.Context, op string, in, out any) error { return local.Call(ctx, socket, op, in, out) }
	}
	if s.Probe == nil {
		s.Probe = probe.Probe
	}
	if s.Lustre == nil {
		s.Lustre = newLustre
	}
	if s.Permissions == nil {
		s.Permissions = testPermissions
	}
	if s.HTTP == nil {
		s.HTTP = http.DefaultClient
	}
	if s.Now == nil {
		s.Now = time.Now
	}
	if s.Connect == nil {
		s.Connect = s.connect
	}
}

// check is one question about a site. run answers before ctx ends; one that does not is left behind.
type check struct {
	name string
	run  func(ctx context.Context, s *Site) Finding
}

// The whole run ends within 15 s: a check has checkTimeout, and what it started gets a little longer to be
// killed (command.Run's 2 s).
const (
	defaultCheckTimeout = 9 * time.Second
	defaultGrace        = 3 * time.Second
)

// The limits in use; tests have shorter ones.
var checkTimeout, grace = defaultCheckTimeout, defaultGrace

// Examine runs all checks at the same time and returns their findings in a fixed order, within 15 s whatever
// hangs; nil when ctx ended before. done, when not nil, is called as each check ends, never by two goroutines at a time.
func (s *Site) Examine(ctx context.Context, done func(ended, all int, f Finding)) []Finding {
	s.setDefaults()
	checks := s.checks()
	findings := make([]Finding, len(checks))
	type answer struct {
		i int
		f Finding
	}
	answers := make(chan answer, len(checks)) // room for all: one that comes too late must not block
	cctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	for i, c := range checks {
		go func() {
			f := c.run(cctx, s)
			f.Name = c.name
			if f.Verdict == OK {
				f.Next = ""
			}
			answers <- answer{i, f}
		}()
	}
	timer := time.NewTimer(checkTimeout + grace)
	defer timer.Stop()
	for ended := 1; ended <= len(checks); ended++ {
		select {
		case a := <-answers:
			findings[a.i] = a.f
			if done != nil {
				done(ended, len(checks), a.f)
			}
			continue
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		break
	}
	for i := range findings {
		if findings[i].Name == "" {
			findings[i] = Finding{Name: checks[i].name, Verdict: Fail,
				Detail: fmt.Sprintf("no answer within %s", checkTimeout+grace), Next: "something that this check asks hangs; look at dmesg and at processes in state D"}
		}
	}
	return findings
}

// Findings counts what is not OK.
func Findings(list []Finding) (warnings, failures int) {
	for _, f := range list {
		switch f.Verdict {
		case Warn:
			warnings++
		case Fail:
			failures++
		}
	}
	return warnings, failures
}

func ok(format string, args ...any) Finding {
	return Finding{Verdict: OK, Detail: fmt.Sprintf(format, args...)}
}

func warn(next, format string, args ...any) Finding {
	return Finding{Verdict: Warn, Detail: fmt.Sprintf(format, args...), Next: next}
}

func fail(next, format string, args ...any) Finding {
	return Finding{Verdict: Fail, Detail: fmt.Sprintf(format, args...), Next: next}
}
