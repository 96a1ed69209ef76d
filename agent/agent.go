// Package agent is the daemon on every VM of a cluster: it enrols the VM with
// sluiced, mounts the file systems that sluiced names and watches them, answers
// the node's Prolog and Epilog, starts slurmd when the node is ready, vouches
// for local users, and keeps them from the metadata server.
//
// It lives without sluiced and without the metadata server for as long as it
// must, and may be killed at any moment: what it knows is in /run or can be
// seen again.
package agent

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"cloud.google.com/go/compute/metadata"

	"github.com/sluicehpc/sluice/agent/guard"
	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/api/remote"
	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/internal/command"
	"github.com/sluicehpc/sluice/internal/retry"
	"github.com/sluicehpc/sluice/internal/sdnotify"
	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/lustre"
	"github.com/sluicehpc/sluice/lustre/probe"
	"github.com/sluicehpc/sluice/prolog"
	"github.com/sluicehpc/sluice/trust"
)

// Config is what the command line says. What is empty in its first part is
// asked of the metadata server.
type Config struct {
	Controller  string // host:port of sluiced
	Fingerprint string // of sluiced's certificate authority

	Root      string // before the sockets, the state and the spool; $SLUICE_ROOT
	TLSDir    string // where sluiced keeps its authority, on the controller
	SlurmUser string
	UIDMin    uint32 // the first uid of a person
	Version   string // of the binary
}

// Defaults are the values of a real VM.
var Defaults = Config{
	TLSDir:    trust.DefaultDir,
	SlurmUser: "slurm",
	UIDMin:    1000,
}

const (
	// stateFile keeps what an agent that starts again cannot see. /run lives as long as the boot.
	stateFile = "/run/sluice/agent-state.json"
	// credentialsFile holds this VM's key and certificate, which live as long as the VM.
	credentialsFile = "/var/lib/sluice/agent.pem"
)

// pace says how long the agent waits for what.
type pace struct {
	report   time.Duration // between reports when sluiced does not say
	again    time.Duration // longest pause after a report that failed
	probe    time.Duration // between probes of a mount
	spool    time.Duration // between looks for moments that hooks left
	grace    time.Duration // slurmd waits so long for sluiced to hear that the node is ready
	identify time.Duration // bounds all questions to the metadata server
	call     time.Duration // bounds a call of sluiced of our own
	enrol    time.Duration // bounds an enrolment, for which sluiced asks others
	renew    time.Duration // between attempts to renew the certificate
	user     time.Duration // bounds a call of sluiced for a user
	guard    time.Duration // between looks at the metadata server's guard
	mount    retry.Policy
	keys     retry.Policy
	slurmd   retry.Policy
}

var normalPace = pace{
	report:   10 * time.Second,
	again:    10 * time.Second,
	probe:    5 * time.Second,
	spool:    30 * time.Second,
	grace:    30 * time.Second,
	identify: 10 * time.Second,
	call:     10 * time.Second,
	enrol:    30 * time.Second,
	renew:    time.Minute,
	user:     time.Minute,
	guard:    5 * time.Second,
	mount:    retry.Policy{First: time.Second, Max: 30 * time.Second},
	keys:     retry.Policy{First: time.Second, Max: 10 * time.Second},
	slurmd:   retry.Policy{First: time.Second, Max: 30 * time.Second},
}

// Metadata is the metadata server as *metadata.Client asks it.
type Metadata interface {
	GetWithContext(ctx context.Context, suffix string) (string, error)
}

// Agent is one VM's agent. Make it with New.
type Agent struct {
	config    Config
	log       *slog.Logger
	clock     clock.Clock
	pace      pace
	metadata  Metadata
	mount     func(context.Context, lustre.Spec) error
	probe     func(probe.Check) probe.Result
	systemctl func(ctx context.Context, verb, unit string) error
	user      func(ctx context.Context, name string) (users.User, error)
	guard     Guard

	startedAt string
	bootID    string

	changed    chan struct{} // capacity 1: something is to be reported at once
	kept       chan struct{} // capacity 1: something is to be sent at once
	identified gate          // identity is known
	ready      gate          // nothing keeps the node from running jobs
	reported   gate          // sluiced has heard that

	watchers   sync.WaitGroup
	renewAfter time.Time // of the loop that reports

	guarding sync.Mutex // guards guarded; taken before mu
	guarded  bool       // the metadata server, as far as this process knows

	mu         sync.Mutex // guards everything that follows
	state      state
	client     *remote.Client    // of sluiced, or nil before this VM has enrolled
	obstacles  map[string]string // by what it is about: what keeps the node from being ready
	mounts     map[string]*mount
	generation int    // counts changes of the mounts' states
	cause      string // sluiced's judgement of the present generation
	lastError  string // of the last report, "" after one that was answered
	slurmKnown bool   // slurmUID is what getent said
	slurmUID   uint32 // 0: this VM has no SlurmUser
	// credentials are nil like client, and used by the loop that reports alone.
	credentials *trust.Credentials
	unenrolled  bool // sluiced said that the certificate does not count
}

// Guard keeps users from the metadata server; package guard is it.
type Guard struct {
	Ensure func() (put bool, err error)
	Remove func() error
}

// state is kept in stateFile.
type state struct {
	BootID   string   `json:"boot_id"`
	Identity identity `json:"identity"`
	// ReadyAt is when all mounts answered for the first time in this boot.
	ReadyAt string `json:"ready_at,omitempty"`
	// Keyed is set once Slurm's key is there and the services that need it run.
	Keyed bool `json:"keyed,omitempty"`
	// SlurmdStarted keeps a restart of the agent from starting a slurmd that an admin has stopped.
	SlurmdStarted bool `json:"slurmd_started,omitempty"`
	// OpenMetadata is sluiced's word that users may reach the metadata server.
	OpenMetadata bool `json:"open_metadata,omitempty"`
	// Known is set once sluiced has said what is to be mounted.
	Known       bool              `json:"known,omitempty"`
	FileSystems []api.FileSystem  `json:"file_systems,omitempty"`
	Jobs        map[uint32]uint32 `json:"jobs,omitempty"` // jobs between prolog and epilog: id → uid
}

// New makes an agent on the real VM.
func New(c Config, log *slog.Logger) *Agent {
	return &Agent{
		config:   c,
		log:      log,
		clock:    clock.System,
		pace:     normalPace,
		metadata: metadata.NewWithOptions(nil),
		mount:    lustre.Mounter{}.Mount,
		probe:    new(probe.Prober).Probe,
		systemctl: func(ctx context.Context, verb, unit string) error {
			_, err := command.Run(ctx, command.Spec{Path: "systemctl", Args: []string{verb, unit}})
			return err
		},
		user:       users.ByName,
		guard:      Guard{guard.Ensure, guard.Remove},
		changed:    make(chan struct{}, 1),
		kept:       make(chan struct{}, 1),
		identified: newGate(),
		ready:      newGate(),
		reported:   newGate(),
		mounts:     map[string]*mount{},
		obstacles:  map[string]string{aboutKeys: "Slurm's key has not come yet"},
		state:      state{Jobs: map[uint32]uint32{}},
	}
}

// Run serves until ctx ends. It returns an error only when the socket cannot be served.
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	a.startedAt = api.FormatTime(a.clock.Now())
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return fmt.Errorf("read the boot's id: %w", err)
	}
	a.bootID = strings.TrimSpace(string(boot))
	socket := a.config.Root + api.AgentSocket
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		return err
	}
	a.load()
	a.checkGuard() // before anything else: users may be there already
	a.adopt()
	a.look()

	l, err := local.Listen(socket, 0o666)
	if err != nil {
		return err
	}
	var parts sync.WaitGroup
	for _, f := range []func(context.Context){a.watchKnown, a.report, a.sendKept, a.watchGuard, a.getKeys, a.startSlurmd} {
		parts.Go(func() { f(ctx) })
	}
	if err := sdnotify.Send("READY=1"); err != nil {
		a.log.Warn("tell systemd", "error", err)
	}
	err = local.Serve(ctx, l, nil, a.handle)
	cancel()
	parts.Wait()
	a.watchers.Wait()
	return err
}

// poke wakes the loop that waits on c, which has capacity 1.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// gate is open for ever once it was opened.
type gate struct {
	once *sync.Once
	c    chan struct{}
}

func newGate() gate { return gate{new(sync.Once), make(chan struct{})} }

func (g gate) open() { g.once.Do(func() { close(g.c) }) }

// wait returns false when ctx ended first.
func (g gate) wait(ctx context.Context) bool {
	select {
	case <-g.c:
		return true
	case <-ctx.Done():
		return false
	}
}

// pause waits for d, or less when c or ctx says so; it returns false when ctx ended.
func (a *Agent) pause(ctx context.Context, d time.Duration, c <-chan struct{}) bool {
	select {
	case <-ctx.Done():
		return false
	case <-c:
	case <-a.clock.After(d):
	}
	return true
}

// spoolDir is where moments wait for sluiced.
func (a *Agent) spoolDir() string { return a.config.Root + prolog.SpoolDir }
