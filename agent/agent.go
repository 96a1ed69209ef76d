// Package agent is the daemon on every VM of a cluster: it mounts the file
// systems that sluiced names and watches them, answers the node's Prolog and
// Epilog, starts slurmd when the node is ready, and vouches for local users.
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
)

// Config is what the command line says. What is empty in its first part is
// asked of the metadata server.
type Config struct {
	Node        string // Slurm's name of the node; the instance's name
	Instance    string // numeric instance id
	Role        api.Role
	Controller  string // host:port of sluiced
	Fingerprint string // of sluiced's certificate

	Root      string // before the sockets, the state and the spool; $SLUICE_ROOT
	KeyFile   string // Slurm's key
	CertDir   string // where sluiced keeps its certificate, on the controller
	SlurmUser string
	UIDMin    uint32 // the first uid of a person
	Version   string // of the binary
}

// Defaults are the values of a real VM.
var Defaults = Config{
	KeyFile:   "/etc/slurm/slurm.key",
	CertDir:   remote.DefaultDir,
	SlurmUser: "slurm",
	UIDMin:    1000,
}

// stateFile keeps what an agent that starts again cannot see. /run lives as long as the boot.
const stateFile = "/run/sluice/agent-state.json"

// pace says how long the agent waits for what.
type pace struct {
	report   time.Duration // between reports when sluiced does not say
	again    time.Duration // longest pause after a report that failed
	probe    time.Duration // between probes of a mount
	spool    time.Duration // between looks for moments that hooks left
	grace    time.Duration // slurmd waits so long for sluiced to hear that the node is ready
	identify time.Duration // bounds all questions to the metadata server
	call     time.Duration // bounds a call of sluiced of our own
	user     time.Duration // bounds a call of sluiced for a user
	mount    retry.Policy
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
	user:     time.Minute,
	mount:    retry.Policy{First: time.Second, Max: 30 * time.Second},
	slurmd:   retry.Policy{First: time.Second, Max: 30 * time.Second},
}

// Metadata is the metadata server as *metadata.Client asks it.
type Metadata interface {
	GetWithContext(ctx context.Context, suffix string) (string, error)
}

// Agent is one VM's agent. Make it with New.
type Agent struct {
	config   Config
	log      *slog.Logger
	clock    clock.Clock
	pace     pace
	metadata Metadata
	mount    func(context.Context, lustre.Spec) error
	probe    func(probe.Check) probe.Result
	start    func(ctx context.Context, unit string) error // a systemd unit
	user     func(ctx context.Context, name string) (users.User, error)

	startedAt string
	bootID    string

	changed    chan struct{} // capacity 1: something is to be reported at once
	kept       chan struct{} // capacity 1: something is to be sent at once
	identified gate          // identity is known
	ready      gate          // every mount has answered
	reported   gate          // sluiced has heard that

	watchers sync.WaitGroup

	mu         sync.Mutex // guards everything that follows
	state      state
	client     *remote.Client // of sluiced, or nil before identity is known
	mounts     map[string]*mount
	generation int    // counts changes of the mounts' states
	cause      string // sluiced's judgement of the present generation
	lastError  string // of the last report, "" after one that was answered
	slurmKnown bool   // slurmUID is what getent said
	slurmUID   uint32 // 0: this VM has no SlurmUser
}

// state is kept in stateFile.
type state struct {
	BootID   string   `json:"boot_id"`
	Identity identity `json:"identity"`
	// ReadyAt is when all mounts answered for the first time in this boot.
	ReadyAt string `json:"ready_at,omitempty"`
	// SlurmdStarted keeps a restart of the agent from starting a slurmd that an admin has stopped.
	SlurmdStarted bool `json:"slurmd_started,omitempty"`
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
		start: func(ctx context.Context, unit string) error {
			_, err := command.Run(ctx, command.Spec{Path: "systemctl", Args: []string{"start", unit}})
			return err
		},
		user:       users.ByName,
		changed:    make(chan struct{}, 1),
		kept:       make(chan struct{}, 1),
		identified: newGate(),
		ready:      newGate(),
		reported:   newGate(),
		mounts:     map[string]*mount{},
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
	a.adopt()
	a.look()

	l, err := local.Listen(socket, 0o666)
	if err != nil {
		return err
	}
	var parts sync.WaitGroup
	for _, f := range []func(context.Context){a.watchKnown, a.report, a.sendKept, a.startSlurmd} {
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
