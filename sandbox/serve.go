package sandbox

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/oauth2"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/sandbox/compute"
	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/front"
	"github.com/sluicehpc/sluice/sandbox/guest"
	"github.com/sluicehpc/sluice/sandbox/iam"
	"github.com/sluicehpc/sluice/sandbox/lustre"
	"github.com/sluicehpc/sluice/sandbox/metadata"
	"github.com/sluicehpc/sluice/sandbox/monitoring"
	"github.com/sluicehpc/sluice/sandbox/storage"
	"github.com/sluicehpc/sluice/sandbox/vm"
)

// Descriptors that Up gives to the outer process.
const (
	configFD   = 3
	readyFD    = 4
	listenerFD = 5
)

// readyLine is what the outer process writes when its services answer; anything else is an error's text.
const readyLine = "ready\n"

// config is what Up tells the outer process.
type config struct {
	Name        string    `json:"name"`
	Slurm       string    `json:"slurm"`
	Paths       pathsJSON `json:"paths"`
	Root        string    `json:"root"`  // of the VMs
	Image       string    `json:"image"` // the layer over it, or ""
	ImageFamily string    `json:"image_family"`
	Kernel      string    `json:"kernel"`
	Guest       string    `json:"guest"`
	HostURL     string    `json:"host_url"`
	CheckAPIs   string    `json:"check_apis,omitempty"` // see Options
}

// pathsJSON is paths in config.
type pathsJSON paths

func (p pathsJSON) MarshalText() ([]byte, error) {
	return []byte(strings.Join([]string{p.state, p.data, p.lock}, "\x00")), nil
}

func (p *pathsJSON) UnmarshalText(text []byte) error {
	parts := strings.Split(string(text), "\x00")
	if len(parts) != 3 {
		return fmt.Errorf("%q: want three paths", text)
	}
	p.state, p.data, p.lock = parts[0], parts[1], parts[2]
	return nil
}

// Serve is the outer process, started by Up in namespaces of its own under a PID 1 that only reaps. It
// returns when TERM comes or something that it cannot do without fails.
func Serve() error {
	ready := os.NewFile(readyFD, "ready")
	unix.CloseOnExec(readyFD)
	err := serve(ready)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		_, _ = ready.WriteString(err.Error()) // after readiness nobody listens
	}
	return err
}

func serve(ready *os.File) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	cfg, hostListener, err := inherited()
	if err != nil {
		return err
	}
	if err := ownMounts(); err != nil {
		return err
	}
	if err := makeNetwork(); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	o, err := newOuter(cfg, log)
	if err != nil {
		return err
	}
	defer o.close()

	g, ctx := errgroup.WithContext(ctx)
	listen := func(network, address string, serve func(net.Listener) error) error {
		l, err := net.Listen(network, address)
		if err == nil {
			g.Go(func() error { return serve(l) })
		}
		return err
	}
	apis, err := o.checked(o.fronted(o.apis()))
	if err != nil {
		return err
	}
	metadataHandler := o.front.Handler("metadata", o.metadata)
	api, vms, workstation := o.server(ctx, apis), o.server(ctx, metadataHandler), o.server(ctx, fromGateway(metadataHandler))
	control, lustreSocket, err := o.sockets()
	if err != nil {
		return err
	}
	controlServer := o.server(ctx, o.controlHandler())
	err = errors.Join(
		listen("tcp4", net.JoinHostPort(gatewayAddress, fmt.Sprint(apiPort)), httpServe(api)),
		listen("tcp4", net.JoinHostPort(gatewayAddress, "80"), httpServe(workstation)),
		listen("tcp4", net.JoinHostPort(metadataAddress, "80"), httpServe(vms)),
		serveDNS(ctx, g, net.JoinHostPort(metadataAddress, "53"), o.compute.Addresses),
	)
	if err != nil {
		return err
	}
	g.Go(func() error { return o.cuts.watch(ctx) })
	g.Go(func() error { return httpServe(api)(hostListener) })
	g.Go(func() error { return httpServe(controlServer)(control) })
	g.Go(func() error { o.monitoring.Run(ctx); return nil })
	g.Go(func() error { return guest.ServeLustreSocket(ctx, lustreSocket, lustreMounts{o}) })
	g.Go(func() error {
		<-ctx.Done()
		return errors.Join(api.Close(), vms.Close(), workstation.Close(), controlServer.Close())
	})
	if _, err := ready.WriteString(readyLine); err != nil {
		return fmt.Errorf("whoever started the sandbox is gone: %w", err)
	}
	if err := ready.Close(); err != nil {
		return err
	}
	log.Info("ready", "api", APIURL, "host", cfg.HostURL)
	err = g.Wait()
	log.Info("ending", "error", err)
	return err
}

// inherited reads what Up handed over.
func inherited() (config, net.Listener, error) {
	var cfg config
	in := os.NewFile(configFD, "config")
	text, err := bufio.NewReader(in).ReadBytes('\n')
	if err != nil {
		return cfg, nil, fmt.Errorf("reading the configuration: %w", err)
	}
	in.Close()
	if err := json.Unmarshal(text, &cfg); err != nil {
		return cfg, nil, err
	}
	f := os.NewFile(listenerFD, "listener")
	defer f.Close()
	l, err := net.FileListener(f)
	return cfg, l, err
}

// ownMounts keeps the host's mounts from us and ours from the host, and makes /proc show our own processes.
func ownMounts() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making the mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mounting /proc: %w", err)
	}
	return nil
}

// outer is the sandbox's services.
type outer struct {
	cfg      config
	log      *slog.Logger
	faults   *faults.Set
	front    *front.Front
	cuts     *cuts
	iam      *iam.Server
	machines *machines
	storage  *storage.Server
	compute  *compute.Server
	metadata *metadata.Server
	lustre   *lustre.Server

	monitoring *monitoring.Server
}

func newOuter(cfg config, log *slog.Logger) (_ *outer, err error) {
	p := paths(cfg.Paths)
	o := &outer{cfg: cfg, log: log, faults: &faults.Set{Journal: journal(log)}}
	cloudClock := o.faults.Clock(clock.System)
	o.front = &front.Front{Faults: o.faults, Clock: cloudClock, Log: log}
	o.iam = iam.New(iam.Options{Project: Project, Clock: cloudClock})
	host := &vm.Host{Bridge: bridge, Guest: cfg.Guest, Domain: zoneDomain, DNS: netip.MustParseAddr(metadataAddress), Kernel: cfg.Kernel}
	o.machines = newMachines(host, p, cfg, log)
	if o.storage, err = storage.New(storage.Options{Dir: p.objects(), Project: Project, Now: cloudClock.Now, Faults: o.faults, IAM: o.iam}); err != nil {
		return nil, fmt.Errorf("storage: %w", err)
	}
	o.compute, err = compute.New(compute.Config{
		Project: Project, Zone: Zone, Subnet: netip.MustParsePrefix(networkPrefix), VMs: o.machines, Faults: o.faults, Clock: cloudClock,
		IAM: o.iam, Caller: o.iam.Caller, Console: o.machines.console,
	})
	if err != nil {
		return nil, errors.Join(err, o.storage.Close())
	}
	if cfg.ImageFamily != "" {
		if err := o.compute.AddImage(cfg.ImageFamily+"-v1", cfg.ImageFamily, "Debian with Slurm "+cfg.Slurm); err != nil {
			return nil, errors.Join(err, o.storage.Close())
		}
	}
	o.cuts = &cuts{faults: o.faults, addresses: o.compute.Addresses, log: log}
	o.machines.cuts = o.cuts
	o.metadata = metadata.New(metadata.Config{
		Clock: cloudClock, Instances: o.compute, Tokens: o.iam, Identities: o.iam, Workstation: []netip.Addr{netip.MustParseAddr(gatewayAddress)},
	})
	o.lustre, err = lustre.New(lustre.Options{
		Dir: p.files(), Bucket: lustre.FromStorage(o.storage), Faults: o.faults, IAM: o.iam, Now: cloudClock.Now, Addresses: netip.MustParsePrefix(lustrePrefix),
		Listen: listenOwnAddress, ServeCommand: []string{cfg.Guest, "lustrefs"}, Log: log,
	})
	if err != nil {
		return nil, errors.Join(err, o.storage.Close())
	}
	o.monitoring = monitoring.New(monitoring.Options{Project: Project, Lustre: o.lustre, Clock: cloudClock, Authorize: o.iam.Authorize})
	return o, nil
}

// close ends the VMs first: they use everything else.
func (o *outer) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	o.compute.Close()
	if err := o.machines.stopAll(ctx); err != nil {
		o.log.Error("stopping the VMs", "error", err)
	}
	o.lustre.Close()
	if err := o.storage.Close(); err != nil {
		o.log.Error("closing the storage", "error", err)
	}
}

// apis routes by path. There is no mux: names of objects may look like anything, "//" and ".." included.
func (o *outer) apis() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch serviceOf(r.URL.EscapedPath()) {
		case "compute":
			o.compute.ServeHTTP(w, r)
		case "iam":
			o.iam.ServeHTTP(w, r)
		case "lustre":
			o.lustre.ServeHTTP(w, r)
		case "monitoring":
			o.monitoring.ServeHTTP(w, r)
		default:
			o.storage.ServeHTTP(w, r)
		}
	})
}

func (o *outer) server(ctx context.Context, h http.Handler) *http.Server {
	s := o.front.Server(h)
	s.BaseContext = func(net.Listener) context.Context { return ctx }
	s.ErrorLog = slog.NewLogLogger(o.log.Handler(), slog.LevelWarn)
	return s
}

// fromGateway refuses all but the workstation: on Compute Engine VMs reach the metadata
// server at one address only, which is what a guard on a VM can close.
func fromGateway(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if host, _, err := net.SplitHostPort(r.RemoteAddr); err != nil || host != gatewayAddress {
			http.Error(w, "for the workstation alone", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// httpServe serves until the server is closed.
func httpServe(s *http.Server) func(net.Listener) error {
	return func(l net.Listener) error {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	}
}

// sockets opens the control socket, for root alone, and the one that all VMs have.
func (o *outer) sockets() (control, lustre *net.UnixListener, err error) {
	p := paths(o.cfg.Paths)
	if control, err = listenUnix(p.control()); err != nil {
		return nil, nil, err
	}
	if lustre, err = listenUnix(p.lustre()); err != nil {
		return nil, nil, err
	}
	return control, lustre, errors.Join(os.Chmod(p.control(), 0o600), os.Chmod(p.lustre(), 0o600))
}

// status describes the sandbox, but for the pid, which only the host knows.
func (o *outer) status() Status {
	s := Status{
		Name: o.cfg.Name, Slurm: o.cfg.Slurm, VMs: []VM{}, Endpoints: endpointsAt(APIURL), HostEndpoints: endpointsAt(o.cfg.HostURL),
	}
	for _, i := range o.compute.Instances() {
		v := VM{Name: i.Name, State: i.Status}
		if len(i.NetworkInterfaces) > 0 {
			v.Address = i.NetworkInterfaces[0].NetworkIP
		}
		s.VMs = append(s.VMs, v)
	}
	return s
}

// controlHandler answers Client.
func (o *outer) controlHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, o.status()) })
	mux.HandleFunc("GET /violations", o.serveViolations)
	mux.HandleFunc("GET /pids", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, o.machines.pids()) })
	mux.HandleFunc("GET /vms/{name}/console", func(w http.ResponseWriter, r *http.Request) {
		text, err := o.machines.console(r.PathValue("name"), -maxConsole)
		if err != nil {
			http.Error(w, err.Error(), http.StatusNotFound)
			return
		}
		writeJSON(w, string(text))
	})
	mux.HandleFunc("POST /token", func(w http.ResponseWriter, _ *http.Request) {
		token, expires, err := o.iam.Mint(o.iam.Admin(), nil, time.Hour)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		writeJSON(w, oauth2.Token{AccessToken: token, TokenType: "Bearer", Expiry: expires})
	})
	o.faultRoutes(mux)
	return mux
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the client may be gone
}

// guestHome is where the VMs' homes are.
const guestHome = "/home"

func binds(p paths) []vm.Bind {
	return []vm.Bind{
		{Source: p.lustre(), Target: guest.LustreSocket},
		{Source: p.home(), Target: guestHome},
	}
}

// layers returns the directories of an image's root, the top one first.
func (c config) layers(image string) ([]string, error) {
	switch {
	case c.ImageFamily != "" && strings.HasPrefix(image, c.ImageFamily+"-") && c.Image != "":
		return []string{c.Image, c.Root}, nil
	case c.ImageFamily != "" && strings.HasPrefix(image, c.ImageFamily+"-"), strings.HasPrefix(filepath.Base(image), "debian-"):
		return []string{c.Root}, nil
	}
	return nil, fmt.Errorf("the sandbox has no root for image %q", image)
}
