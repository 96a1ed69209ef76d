// Package rootfs builds and caches the root file systems that the sandbox's VMs boot from.
package rootfs

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehpc/sluice/internal/command"
)

//go:embed build.sh
var buildScript string

// DefaultSlurm is the Slurm release of a sandbox that asks for none.
const DefaultSlurm = "24.11"

// Ids that are the same in every root: files on shared disks and in image layers carry them.
const (
	SlurmUID = 64030 // Debian's own choice for the user slurm
	MungeUID = 64031 // Debian lets the installation choose
)

// User is an ordinary user of the VMs. A group of the same name and id is the primary one.
type User struct {
	Name string
	UID  uint32
}

// Users are known to NSS only and look like those that OS Login makes: ids from 1,000,000,000 up, some above 2^31,
// names of up to 32 characters. Carol's is a guest's, cut by OS Login.
var Users = []User{
	{"alice", 1500000001},
	{"bob", 2733216754},
	{"ext_carol_mueller_physics_exampl", 4123456789},
}

// Group is a group that several users share.
const Group = "research"

const groupID = 1500001000

// Release is a Debian release and the Slurm that it packages.
type Release struct {
	Slurm    string // for example "24.11"
	Suite    string // for example "trixie"
	Rolling  bool   // Debian changes it every day: now and then it cannot be had
	Packages []string
}

var common = []string{
	"slurmctld", "slurmdbd", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin",
	"mariadb-server", "munge", "libnss-extrausers", "iproute2", "nftables", "curl", "procps", "util-linux", "mount", "ca-certificates", "lua5.4",
}

// Releases lists what can be built, the default first.
var Releases = []Release{
	{Slurm: "24.11", Suite: "trixie", Packages: append(common[:len(common):len(common)], "sackd", "slurm-wlm-jwt-plugin")},
	{Slurm: "22.05", Suite: "bookworm", Packages: common},
	{Slurm: "26.05", Suite: "sid", Rolling: true, Packages: append(common[:len(common):len(common)], "sackd", "slurm-wlm-jwt-plugin")},
}

// ErrUnknownSlurm is wrapped when no release has the Slurm that was asked for.
var ErrUnknownSlurm = errors.New("no Debian release packages this Slurm")

// Find returns the release whose Slurm version begins with prefix ("24.11", "24"); "" is the default.
func Find(prefix string) (Release, error) {
	if prefix == "" {
		prefix = DefaultSlurm
	}
	var known []string
	for _, r := range Releases {
		if r.Slurm == prefix || strings.HasPrefix(r.Slurm, prefix+".") || strings.HasPrefix(prefix, r.Slurm+".") {
			return r, nil
		}
		known = append(known, r.Slurm)
	}
	return Release{}, fmt.Errorf("%w: %q (known: %s)", ErrUnknownSlurm, prefix, strings.Join(known, ", "))
}

// ErrUnavailable is wrapped when a rolling release cannot be had today: no mirror is reached or has it, it cannot be
// installed, or its Slurm is another one by now.
var ErrUnavailable = errors.New("cannot be had today")

// exitUnavailable is the build script's exit status for what ErrUnavailable means.
const exitUnavailable = 75

// Options says which root is wanted, and where.
type Options struct {
	Cache string    // directory; roots are made in Cache/roots
	Slurm string    // prefix of the Slurm version; "" is DefaultSlurm
	Log   io.Writer // progress, one line at a time; nil discards it
}

// Ensure returns the directory of the root, and builds it first when the cache does not have it (a
// minute or two; it needs root, debootstrap and the host's Debian mirror). A root is never changed
// after it was published: use it as the lower layer of an overlay. Two builders at a time are
// safe, the second waits for the first; what an interrupted build left is removed by the next one.
func Ensure(ctx context.Context, o Options) (string, error) {
	release, err := Find(o.Slurm)
	if err != nil {
		return "", err
	}
	roots := filepath.Join(o.Cache, "roots")
	dir := filepath.Join(roots, release.name())
	if exists(dir) {
		return dir, nil
	}
	if os.Geteuid() != 0 {
		return "", errors.New("building the VMs' root needs root")
	}
	if _, err := exec.LookPath("debootstrap"); err != nil {
		return "", errors.New("debootstrap is not installed: run `make deps`")
	}
	if err := os.MkdirAll(roots, 0o755); err != nil {
		return "", fmt.Errorf("making the cache of roots: %w", err)
	}
	unlock, err := lock(ctx, filepath.Join(roots, ".lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	if exists(dir) { // the other builder made it
		return dir, nil
	}
	// With the lock held, every temporary directory is one that a dead build left.
	left, err := filepath.Glob(filepath.Join(roots, ".building-*"))
	if err != nil {
		return "", err
	}
	for _, d := range left {
		if err := os.RemoveAll(d); err != nil {
			return "", fmt.Errorf("removing what an interrupted build left: %w", err)
		}
	}
	work, err := os.MkdirTemp(roots, ".building-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	if err := build(ctx, release, filepath.Join(work, "root"), o.Log); err != nil {
		err = fmt.Errorf("building the VMs' root (Slurm %s on %s): %w", release.Slurm, release.Suite, err)
		var exit *exec.ExitError
		var none noMirrorError
		if release.Rolling && (errors.As(err, &none) || errors.As(err, &exit) && exit.ExitCode() == exitUnavailable) {
			err = fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		return "", err
	}
	if err := os.Rename(filepath.Join(work, "root"), dir); err != nil {
		return "", fmt.Errorf("publishing the VMs' root: %w", err)
	}
	return dir, nil
}

func exists(dir string) bool {
	_, err := os.Stat(dir)
	return err == nil
}

// name is different for each recipe, so a changed recipe never meets an old root.
func (r Release) name() string {
	sum := sha256.Sum256([]byte(strings.Join(append([]string{buildScript, r.Suite, strings.Join(identities(), "\n"), runtime.GOARCH}, r.Packages...), "\n")))
	return r.Suite + "-slurm" + r.Slurm + "-" + hex.EncodeToString(sum[:6])
}

// identities are the users, groups and fixed ids, as the build script's environment has them.
func identities() []string {
	var users, names []string
	for _, u := range Users {
		users = append(users, fmt.Sprintf("%s:%d", u.Name, u.UID))
		names = append(names, u.Name)
	}
	return []string{
		"USERS=" + strings.Join(users, " "), fmt.Sprintf("USER_GROUPS=%s:%d:%s", Group, groupID, strings.Join(names, ",")),
		fmt.Sprintf("SLURM_UID=%d", SlurmUID), fmt.Sprintf("MUNGE_UID=%d", MungeUID),
	}
}

func build(ctx context.Context, r Release, root string, log io.Writer) error {
	m, err := findMirror(ctx, r.Suite)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", buildScript)
	cmd.Env = append(identities(),
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR=/tmp",
		"ROOT="+root, "MIRROR="+m.url, "PROXY="+m.proxy, "SUITE="+r.Suite,
		"SLURM="+r.Slurm, "PACKAGES="+strings.Join(r.Packages, " "),
	)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS,
		Setsid:     true, // a Ctrl-C reaches the build through ctx, once
		Pdeathsig:  syscall.SIGKILL,
	}
	runtime.LockOSThread() // Pdeathsig follows the thread
	defer runtime.UnlockOSThread()
	w := &progress{log: log}
	cmd.Stdout, cmd.Stderr = w, w
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("%w; the last lines were:\n%s", err, strings.Join(w.last, "\n"))
	}
	return nil
}

// progress passes the script's own lines on and keeps the last ones of all.
type progress struct {
	log  io.Writer // or nil
	part []byte
	last []string
}

func (p *progress) Write(b []byte) (int, error) {
	p.part = append(p.part, b...)
	for {
		i := bytes.IndexByte(p.part, '\n')
		if i < 0 {
			return len(b), nil
		}
		line := string(p.part[:i])
		p.part = p.part[i+1:]
		p.last = append(p.last, line)
		if len(p.last) > 20 {
			p.last = p.last[1:]
		}
		if p.log != nil && strings.HasPrefix(line, "rootfs: ") {
			fmt.Fprintln(p.log, line)
		}
	}
}

type mirror struct{ url, proxy string }

// findMirror returns the first mirror that the host's apt uses and that has the suite.
func findMirror(ctx context.Context, suite string) (mirror, error) {
	proxies, err := aptProxies(ctx)
	if err != nil {
		return mirror{}, err
	}
	out, err := command.Run(ctx, command.Spec{Path: "apt-get", Args: []string{"indextargets", "--format", "$(REPO_URI)"}})
	if err != nil {
		return mirror{}, fmt.Errorf("ask apt for its mirrors: %w", err)
	}
	var tried []error
	for _, u := range mirrors(out) {
		m := mirror{url: u, proxy: proxies.of(u)}
		if err := m.has(ctx, suite); err != nil {
			tried = append(tried, err)
			continue
		}
		return m, nil
	}
	if len(tried) == 0 {
		return mirror{}, errors.New("apt names no mirror of Debian: add one to /etc/apt/sources.list")
	}
	return mirror{}, noMirrorError{suite, errors.Join(tried...)}
}

// noMirrorError is that no mirror has a suite.
type noMirrorError struct {
	suite string
	tried error
}

func (e noMirrorError) Error() string {
	return fmt.Sprintf("no mirror has Debian %s: %v", e.suite, e.tried)
}
func (e noMirrorError) Unwrap() error { return e.tried }

// mirrors returns apt's repositories in order, each once.
func mirrors(indextargets []byte) []string {
	var all []string
	seen := map[string]bool{}
	for _, u := range strings.Fields(string(indextargets)) {
		parsed, err := url.Parse(u)
		if err != nil || (parsed.Scheme != "http" && parsed.Scheme != "https") || seen[u] {
			continue
		}
		seen[u] = true
		all = append(all, u)
	}
	return all
}

// has asks for the suite's Release file, and that it is Debian's.
func (m mirror) has(ctx context.Context, suite string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment}
	if m.proxy != "" {
		p, err := url.Parse(m.proxy)
		if err != nil {
			return fmt.Errorf("apt's proxy: %w", err)
		}
		transport.Proxy = http.ProxyURL(p)
	}
	defer transport.CloseIdleConnections()
	at := strings.TrimSuffix(m.url, "/") + "/dists/" + suite + "/InRelease"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", at, resp.Status)
	}
	head, err := io.ReadAll(io.LimitReader(resp.Body, 4096))
	if err != nil {
		return fmt.Errorf("%s: %w", at, err)
	}
	if !bytes.Contains(head, []byte("\nLabel: Debian\n")) {
		return fmt.Errorf("%s is not Debian's", at)
	}
	return nil
}

// proxies are apt's proxies by URL scheme.
type proxies map[string]string

func (p proxies) of(mirror string) string {
	scheme, _, _ := strings.Cut(mirror, ":")
	return p[scheme]
}

func aptProxies(ctx context.Context) (proxies, error) {
	out, err := command.Run(ctx, command.Spec{Path: "apt-config", Args: []string{"dump", "--format", "%f %v%n"}})
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, nil // no apt, no proxies
	}
	return parseProxies(out), nil
}

// parseProxies reads lines "Acquire::http::Proxy URL"; apt's word DIRECT means none.
func parseProxies(dump []byte) proxies {
	p := proxies{}
	lines := bufio.NewScanner(bytes.NewReader(dump))
	for lines.Scan() {
		key, value, _ := strings.Cut(lines.Text(), " ")
		for _, scheme := range []string{"http", "https"} {
			if strings.EqualFold(key, "Acquire::"+scheme+"::Proxy") && value != "" && value != "DIRECT" {
				p[scheme] = value
			}
		}
	}
	return p
}

// lock takes the lock file, waiting for another builder until ctx ends.
func lock(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o644)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			f.Close()
			return nil, fmt.Errorf("locking %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("waiting for another build of the VMs' root: %w", ctx.Err())
		case <-tick.C:
		}
	}
}

// Cache returns the directory that all sandboxes of the machine share: /var/cache/sluice, below
// $SLUICE_ROOT when that is set.
func Cache() string {
	return filepath.Join("/", os.Getenv("SLUICE_ROOT"), "/var/cache/sluice")
}
