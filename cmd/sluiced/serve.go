package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/oauth2"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/api/remote"
	"github.com/sluicehpc/sluice/controller"
	"github.com/sluicehpc/sluice/controller/config"
	"github.com/sluicehpc/sluice/controller/store"
	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/compute"
	"github.com/sluicehpc/sluice/gcp/iam"
	"github.com/sluicehpc/sluice/gcp/lustre"
	"github.com/sluicehpc/sluice/gcp/storage"
	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/internal/sdnotify"
	"github.com/sluicehpc/sluice/internal/users"
	"github.com/sluicehpc/sluice/internal/version"
	"github.com/sluicehpc/sluice/lustre/probe"
	"github.com/sluicehpc/sluice/policy"
	"github.com/sluicehpc/sluice/slurm/scontrol"
	"github.com/sluicehpc/sluice/staging/files"
	"github.com/sluicehpc/sluice/trust"
	"github.com/sluicehpc/sluice/trust/idtoken"
)

// The garbage collector runs at a third of the usual growth, and harder near 80
// MB: the daemon shares its VM with slurmctld and a database, and is to stay
// below 100 MB at rest. Listings of millions of objects may pass the limit.
const (
	gcPercent   = 33
	memoryLimit = 80 << 20
)

// stopTimeout bounds the clean stop: what is at work goes on after the next start.
const stopTimeout = 5 * time.Second

// serve runs the daemon until ctx ends.
func serve(ctx context.Context, configPath string) error {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(memoryLimit)
	}
	cfg, err := config.Load(configPath)
	if err != nil {
		return err
	}
	logger := slog.New(slog.NewTextHandler(os.Stderr, nil))
	root := os.Getenv("SLUICE_ROOT")

	host, _, err := net.SplitHostPort(cfg.Address)
	if err != nil {
		return fmt.Errorf("address of sluiced: %w", err)
	}
	authority, err := trust.OpenCA(root+trust.DefaultDir, cfg.Cluster, clock.System)
	if err != nil {
		return err
	}
	slurmUser, err := users.ByName(ctx, cfg.Slurm.User)
	if err != nil {
		return fmt.Errorf("SlurmUser: %w", err)
	}

	audit, err := policy.OpenAudit(root+policy.DefaultAudit, clock.System)
	if err != nil {
		return err
	}
	defer audit.Close()
	db, err := store.Open(ctx, cfg.StorePath())
	if err != nil {
		return err
	}
	defer db.Close()
	credentials, err := iam.NewClient(ctx, cfg.Endpoints.GCP())
	if err != nil {
		return err
	}
	bucket, err := storage.NewClient(cfg.Endpoints.Storage, func(p storage.Place) oauth2.TokenSource {
		return credentials.DataSource(ctx, iam.DataToken{Account: p.Account, Bucket: p.Bucket, Prefix: p.Prefix})
	})
	if err != nil {
		return err
	}
	defer bucket.Close()
	lc, err := lustre.NewClient(ctx, gcp.ClientOptions(cfg.Endpoints.Lustre)...)
	if err != nil {
		return err
	}
	cc, err := compute.New(ctx, compute.Config{Project: cfg.Project, Zone: cfg.Zone, Endpoint: cfg.Endpoints.Compute})
	if err != nil {
		return err
	}
	defer cc.Close()

	c, err := controller.New(controller.Parts{
		Config: cfg, Store: db, Bucket: bucket, Lustre: lc, Compute: cc,
		Files: &files.Client{Check: checkMount(cfg)},
		Slurm: scontrol.Client{}, Users: controller.System{}, SlurmUser: slurmUser,
		EnvDir:     root + config.EnvironmentDir,
		ListingDir: filepath.Join(filepath.Dir(cfg.StorePath()), "listings"),
		Authority:  authority, Identity: idtoken.New(cfg.Endpoints.IAM, clock.System), Audit: audit, IAM: credentials, Version: version.String(), Clock: clock.System, Log: logger,
	})
	if err != nil {
		return err
	}

	socket := root + api.SluicedSocket
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		return err
	}
	// Everybody may connect: the kernel says who it is.
	people, err := local.Listen(socket, 0o666)
	if err != nil {
		return err
	}
	agents, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		people.Close()
		return fmt.Errorf("listen for agents: %w", err)
	}

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := c.Start(ctx); err != nil {
		people.Close()
		agents.Close()
		return err
	}
	errs := make(chan error, 2)
	var listeners sync.WaitGroup
	listeners.Go(func() {
		errs <- local.Serve(ctx, people, map[uint32]bool{slurmUser.UID: true}, c.HandleLocal)
	})
	listeners.Go(func() {
		s := remote.Server{TLS: authority.ServerTLS([]string{host, "localhost"}), Admit: c.Admit, Enrol: c.Enrol, Log: log.New(os.Stderr, "agents: ", 0)}
		errs <- s.Serve(ctx, agents)
	})
	logger.Info("sluiced runs", "version", version.String(), "cluster", cfg.Cluster, "listen", cfg.Listen, "fingerprint", authority.Fingerprint())
	if err := sdnotify.Send("READY=1"); err != nil {
		logger.Warn("tell systemd", "err", err)
	}

	var failure error
	select {
	case failure = <-errs:
	case <-ctx.Done():
	}
	if err := sdnotify.Send("STOPPING=1"); err != nil {
		logger.Warn("tell systemd", "err", err)
	}
	cancel()
	stopped := make(chan struct{})
	go func() {
		listeners.Wait() // calls may start work, so they end first
		c.Wait()
		close(stopped)
	}()
	select {
	case <-stopped:
	case <-time.After(stopTimeout):
		logger.Warn("work did not stop in time; the next start takes it up")
	}
	return failure
}

// checkMount answers whether a file system is mounted as sluice.yaml says and
// answers: before every operation, so that none writes below an empty mount
// point or piles up on a mount that hangs.
func checkMount(cfg *config.Config) func(string) error {
	var prober probe.Prober
	return func(mount string) error {
		for _, fs := range cfg.FileSystems {
			if fs.Mount != mount {
				continue
			}
			if r := prober.Probe(probe.Check{Dir: fs.Mount, Types: fs.Types}); r.State != probe.OK {
				return fmt.Errorf("file system %s: %s", fs.Name, r.Detail)
			}
			return nil
		}
		return errors.New("no file system is mounted at " + mount)
	}
}
