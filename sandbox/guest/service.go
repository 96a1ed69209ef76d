package guest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// State is the state of a unit, in systemctl's words.
type State string

// The states. The moves between them are in moves.
const (
	Inactive     State = "inactive"
	Activating   State = "activating"
	Active       State = "active"
	Deactivating State = "deactivating"
	Failed       State = "failed"
)

// moves are all the moves that a unit makes.
var moves = map[State][]State{
	Inactive:     {Activating},
	Failed:       {Activating, Inactive}, // Inactive: a stop forgets the failure
	Activating:   {Active, Inactive, Failed, Deactivating},
	Active:       {Deactivating, Inactive, Failed},
	Deactivating: {Inactive, Failed},
}

// service is the running side of a unit.
type service struct {
	m    *Manager
	name string
	turn chan struct{} // has room for one: start, stop and the end of the process take turns

	mu           sync.Mutex // guards everything that follows
	state        State
	since        time.Time
	unit         *Unit // as of the last start, or nil
	identity     identity
	env          []string
	main         *process // or nil
	invocation   string   // the value of INVOCATION_ID that marks the unit's processes
	result       string   // why it failed, for people
	starts       []time.Time
	abort        context.CancelFunc // ends a start or a wait for a restart, or nil
	notify       *notifySocket      // or nil
	ready        chan struct{}      // closed at READY=1
	statusText   string             // STATUS= of the service
	restartTimer bool
}

func newService(m *Manager, name string) *service {
	return &service{m: m, name: name, turn: make(chan struct{}, 1), state: Inactive, since: time.Now()}
}

func (s *service) unitAndState() (*Unit, State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.unit, s.state
}

// move changes the state; an illegal move is an error and changes nothing.
func (s *service) move(to State) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ok := range moves[s.state] {
		if ok == to {
			s.state, s.since = to, time.Now()
			return nil
		}
	}
	return fmt.Errorf("%s cannot go from %s to %s", s.name, s.state, to)
}

func (s *service) take(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s: another start or stop is under way: %w", s.name, ctx.Err())
	}
}

func (s *service) give() { <-s.turn }

// start runs the unit up to the point where units after it may start.
func (s *service) start(ctx context.Context, u *Unit) error {
	if err := s.take(ctx); err != nil {
		return err
	}
	defer s.give()
	if _, state := s.unitAndState(); state == Active {
		return nil
	}
	if err := s.move(Activating); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if u.TimeoutStart > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, u.TimeoutStart)
		defer stop()
	}
	s.mu.Lock()
	s.unit, s.result, s.abort = u, "", cancel
	s.starts = append(s.starts, time.Now())
	s.mu.Unlock()

	met, err := u.conditions()
	if err == nil && !met {
		s.m.logf("%s: a condition is not met, not started", s.name)
		return s.move(Inactive)
	}
	if strings.HasSuffix(u.Name, ".target") {
		return s.move(Active)
	}
	s.m.logf("starting %s", s.name)
	var result State
	if err == nil {
		result, err = s.launch(ctx, u)
	}
	if err != nil {
		s.cleanUp(u)
		s.fail(err)
		s.restart(u, false)
		return fmt.Errorf("starting %s: %w", s.name, err)
	}
	if err := s.move(result); err != nil {
		return err
	}
	s.m.logf("started %s", s.name)
	if result == Inactive {
		s.cleanUp(u)
		return nil
	}
	if main := s.mainProcess(); main != nil {
		go s.watch(u, main)
	}
	return nil
}

// launch runs the Exec lines and returns the state that the unit reached.
func (s *service) launch(ctx context.Context, u *Unit) (State, error) {
	id, err := resolve(ctx, u.User, u.Group, u.SupplementaryGroups)
	if err != nil {
		return "", err
	}
	env, err := s.prepare(u, id)
	if err != nil {
		return "", err
	}
	s.mu.Lock()
	s.identity, s.env = id, env
	s.mu.Unlock()
	if err := s.runAll(ctx, u, u.ExecStartPre); err != nil {
		return "", fmt.Errorf("ExecStartPre: %w", err)
	}
	if u.Type == "oneshot" {
		if err := s.runAll(ctx, u, u.ExecStart); err != nil {
			return "", err
		}
		if err := s.runAll(ctx, u, u.ExecStartPost); err != nil {
			return "", fmt.Errorf("ExecStartPost: %w", err)
		}
		if u.RemainAfterExit {
			return Active, nil
		}
		return Inactive, nil
	}
	main, err := s.spawn(u, u.ExecStart[0])
	if err != nil {
		return "", err
	}
	s.setMain(main)
	switch u.Type {
	case "notify":
		s.mu.Lock()
		ready := s.ready
		s.mu.Unlock()
		select {
		case <-ready:
		case <-main.done:
			// The message may still be in the socket, or name a new main process.
			s.notify.flush()
			select {
			case <-ready:
			default:
				return "", fmt.Errorf("it ended before it was ready: %s", main.status())
			}
		case <-ctx.Done():
			return "", fmt.Errorf("waiting for READY=1: %w", ctx.Err())
		}
	case "forking":
		select {
		case <-main.done:
		case <-ctx.Done():
			return "", fmt.Errorf("waiting for it to fork: %w", ctx.Err())
		}
		if main.failed(u) {
			return "", errors.New(main.status())
		}
		daemon, err := adoptFromFile(ctx, u.PIDFile)
		if err != nil {
			return "", err
		}
		s.setMain(daemon)
	}
	if err := s.runAll(ctx, u, u.ExecStartPost); err != nil {
		return "", fmt.Errorf("ExecStartPost: %w", err)
	}
	return Active, nil
}

// prepare makes the unit's directories, its notify socket and its environment.
func (s *service) prepare(u *Unit, id identity) ([]string, error) {
	random := make([]byte, 16)
	if _, err := rand.Read(random); err != nil {
		return nil, err
	}
	invocation := hex.EncodeToString(random)
	env := []string{"PATH=" + Path, "LANG=C.UTF-8", "INVOCATION_ID=" + invocation}
	if u.User != "" {
		env = append(env, id.env()...)
	}
	directories := map[string][]string{}
	for _, d := range u.Directories {
		if err := os.MkdirAll(d.Path, 0o755); err != nil {
			return nil, err
		}
		if err := os.Chmod(d.Path, os.FileMode(d.Mode)); err != nil {
			return nil, err
		}
		if err := os.Chown(d.Path, int(id.user.UID), int(id.gid)); err != nil {
			return nil, err
		}
		directories[d.Variable] = append(directories[d.Variable], d.Path)
	}
	for name, paths := range directories {
		env = append(env, name+"="+strings.Join(paths, ":"))
	}
	env = append(env, u.Environment...)
	for _, file := range u.EnvironmentFile {
		path, optional := strings.CutPrefix(file, "-")
		data, err := os.ReadFile(path)
		if err != nil {
			if optional {
				continue
			}
			return nil, fmt.Errorf("EnvironmentFile: %w", err)
		}
		env = append(env, parseEnvironmentFile(data)...)
	}
	s.mu.Lock()
	s.invocation = invocation
	s.mu.Unlock()
	if u.Type == "notify" {
		socket, err := listenNotify(filepath.Join(s.m.RunDir, "notify"), u.Name, s.notified)
		if err != nil {
			return nil, err
		}
		s.mu.Lock()
		s.notify, s.ready, s.statusText = socket, make(chan struct{}), ""
		s.mu.Unlock()
		env = append(env, "NOTIFY_SOCKET="+socket.path)
	}
	return env, nil
}

// notified takes one message of the service.
func (s *service) notified(fields map[string]string) {
	if pid, err := strconv.Atoi(fields["MAINPID"]); err == nil {
		s.mu.Lock()
		u, old := s.unit, s.main
		s.mu.Unlock()
		if old == nil || old.pid != pid {
			p, err := adopt(pid)
			if err != nil {
				s.m.logf("%s: its new main process %d: %v", s.name, pid, err)
			} else {
				s.setMain(p)
				if _, state := s.unitAndState(); state == Active {
					go s.watch(u, p)
				}
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if text, ok := fields["STATUS"]; ok {
		s.statusText = text
	}
	if fields["READY"] == "1" && s.ready != nil {
		select {
		case <-s.ready:
		default:
			close(s.ready)
		}
	}
}

func (s *service) mainProcess() *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.main
}

func (s *service) setMain(p *process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.main = p
}

// watch waits for the end of the main process, which nobody asked for unless a stop is under way.
func (s *service) watch(u *Unit, p *process) {
	<-p.done
	s.mu.Lock()
	socket := s.notify
	s.mu.Unlock()
	if socket != nil {
		socket.flush()
	}
	if s.mainProcess() != p {
		return // it handed over to another one, which has its own watch
	}
	if err := s.take(context.Background()); err != nil {
		return
	}
	defer s.give()
	if _, state := s.unitAndState(); state != Active || s.mainProcess() != p {
		return // stopped, or started again
	}
	s.setMain(nil)
	failed := p.failed(u)
	s.m.logf("%s ended: %s", s.name, p.status())
	if !failed && u.RemainAfterExit {
		return
	}
	s.cleanUp(u)
	if failed {
		s.fail(errors.New(p.status()))
	} else if err := s.move(Inactive); err != nil {
		s.m.logf("%v", err)
	}
	s.restart(u, p.clean(u))
}

// fail records why, and shows the unit's last words on the console.
func (s *service) fail(why error) {
	if err := s.move(Failed); err != nil {
		s.m.logf("%v", err)
	}
	s.mu.Lock()
	s.result = why.Error()
	s.mu.Unlock()
	s.m.logf("%s failed: %v", s.name, why)
	for _, line := range tail(journalPath(s.m.JournalDir, s.name), 10) {
		fmt.Fprintf(s.m.Console, "  %s: %s\n", s.name, line)
	}
}

// restart starts the unit again after RestartSec when Restart= says so. Called with the turn held.
func (s *service) restart(u *Unit, clean bool) {
	s.mu.Lock()
	aborted := s.abort == nil // a stop
	recent := 0
	for _, t := range s.starts {
		if time.Since(t) < u.StartLimitInterval {
			recent++
		}
	}
	if len(s.starts) > 100 {
		s.starts = s.starts[50:]
	}
	s.mu.Unlock()
	wanted := false
	switch u.Restart {
	case "always":
		wanted = true
	case "on-success":
		wanted = clean
	case "on-failure", "on-abnormal", "on-abort":
		// A namespace's processes have no core dumps to tell the last two apart.
		wanted = !clean
	}
	if !wanted || aborted {
		return
	}
	if u.StartLimitBurst > 0 && recent >= u.StartLimitBurst {
		s.m.logf("%s: started %d times within %s, not again", s.name, recent, u.StartLimitInterval)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.mu.Lock()
	s.abort, s.restartTimer = cancel, true
	s.mu.Unlock()
	go func() {
		defer cancel()
		select {
		case <-time.After(u.RestartDelay):
		case <-ctx.Done():
			return
		}
		s.mu.Lock()
		s.restartTimer = false
		s.mu.Unlock()
		if err := s.m.Start(ctx, s.name); err != nil {
			s.m.logf("%v", err)
		}
	}()
}

// stop ends the unit. limit bounds the time it gets, 0 leaves it to TimeoutStopSec.
func (s *service) stop(ctx context.Context, limit time.Duration) error {
	s.mu.Lock()
	if s.abort != nil {
		s.abort()
		s.abort = nil
	}
	s.restartTimer = false
	s.mu.Unlock()
	if err := s.take(ctx); err != nil {
		return err
	}
	defer s.give()
	u, state := s.unitAndState()
	switch state {
	case Inactive:
		return nil
	case Failed:
		return s.move(Inactive)
	}
	if err := s.move(Deactivating); err != nil {
		return err
	}
	if strings.HasSuffix(s.name, ".target") {
		return s.move(Inactive)
	}
	s.m.logf("stopping %s", s.name)
	if limit == 0 || u.TimeoutStop > 0 && u.TimeoutStop < limit {
		limit = u.TimeoutStop
	}
	if limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	err := s.runAll(ctx, u, u.ExecStop)
	if err != nil {
		err = fmt.Errorf("ExecStop: %w", err)
	}
	if main := s.mainProcess(); main != nil && u.KillMode != "none" {
		err = errors.Join(err, s.terminate(ctx, u, main))
	}
	s.setMain(nil)
	s.cleanUp(u)
	if moveErr := s.move(Inactive); moveErr != nil {
		return errors.Join(err, moveErr)
	}
	s.m.logf("stopped %s", s.name)
	return err
}

func (s *service) terminate(ctx context.Context, u *Unit, main *process) error {
	if err := main.signal(signalByName(u.KillSignal)); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	if u.KillMode == "control-group" {
		s.signalAll(signalByName(u.KillSignal), main.pid)
	}
	select {
	case <-main.done:
		return nil
	case <-ctx.Done():
	}
	s.m.logf("%s did not stop in time: killed", s.name)
	if err := main.signal(syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-main.done:
		return nil
	case <-time.After(5 * time.Second):
		return fmt.Errorf("process %d survives SIGKILL", main.pid)
	}
}

// cleanUp ends what the unit's processes left and removes what lives only as long as they do.
func (s *service) cleanUp(u *Unit) {
	main := s.mainProcess()
	if main != nil {
		if err := main.signal(syscall.SIGKILL); err == nil {
			<-main.done
		}
		s.setMain(nil)
	}
	if u.KillMode == "control-group" || u.KillMode == "mixed" {
		s.signalAll(syscall.SIGKILL, 0)
	}
	if len(u.ExecStopPost) > 0 {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		if err := s.runAll(ctx, u, u.ExecStopPost); err != nil {
			s.m.logf("%s: ExecStopPost: %v", s.name, err)
		}
		cancel()
	}
	s.mu.Lock()
	socket := s.notify
	s.notify = nil
	s.mu.Unlock()
	if socket != nil {
		socket.close()
	}
	for _, d := range u.Directories {
		if d.Remove {
			if err := os.RemoveAll(d.Path); err != nil {
				s.m.logf("%s: %v", s.name, err)
			}
		}
	}
}

// signalAll sends sig to all processes of the unit but one. Without control groups its processes are
// known by the INVOCATION_ID in their environment.
func (s *service) signalAll(sig syscall.Signal, but int) {
	s.mu.Lock()
	mark := "INVOCATION_ID=" + s.invocation
	empty := s.invocation == ""
	s.mu.Unlock()
	if empty {
		return
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		s.m.logf("%s: %v", s.name, err)
		return
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == but || pid == 1 || pid == os.Getpid() {
			continue
		}
		env, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if err != nil || !strings.Contains("\x00"+string(env), "\x00"+mark+"\x00") {
			continue
		}
		_ = syscall.Kill(pid, sig) // it may have ended meanwhile
	}
}

// reload runs ExecReload.
func (s *service) reload(ctx context.Context) error {
	if err := s.take(ctx); err != nil {
		return err
	}
	defer s.give()
	u, state := s.unitAndState()
	if state != Active {
		return fmt.Errorf("%s is not active, cannot reload", s.name)
	}
	if len(u.ExecReload) == 0 {
		return fmt.Errorf("%s has no ExecReload=", s.name)
	}
	return s.runAll(ctx, u, u.ExecReload)
}

// runAll runs commands one after the other and waits for each.
func (s *service) runAll(ctx context.Context, u *Unit, commands []Command) error {
	for _, c := range commands {
		p, err := s.spawn(u, c)
		if err != nil {
			if c.IgnoreFailure {
				continue
			}
			return err
		}
		select {
		case <-p.done:
		case <-ctx.Done():
			_ = p.signal(syscall.SIGTERM)
			select {
			case <-p.done:
			case <-time.After(time.Second):
				_ = p.signal(syscall.SIGKILL)
				<-p.done
			}
			return fmt.Errorf("%s: %w", c.Argv[0], ctx.Err())
		}
		if p.failed(u) && !c.IgnoreFailure {
			return fmt.Errorf("%s: %s", c.Argv[0], p.status())
		}
	}
	return nil
}

// spawn starts a command of the unit in a session of its own.
func (s *service) spawn(u *Unit, c Command) (*process, error) {
	s.mu.Lock()
	id, env := s.identity, append([]string(nil), s.env...)
	if s.main != nil {
		env = append(env, "MAINPID="+strconv.Itoa(s.main.pid))
	}
	s.mu.Unlock()
	spec := execSpec{
		Argv: c.Argv, Env: env, Dir: "/", UID: id.user.UID, GID: id.gid, Groups: id.groups, UMask: u.UMask, Limits: u.Limits,
	}
	if c.FullRights || c.OwnUser {
		spec.UID, spec.GID, spec.Groups = 0, 0, nil
	}
	if !c.FullRights {
		spec.Hardening = u.Hardening
		for _, d := range u.Directories { // made for it to write to
			if spec.Hardening.ProtectSystem == "strict" {
				spec.Hardening.ReadWritePaths = append(spec.Hardening.ReadWritePaths[:len(spec.Hardening.ReadWritePaths):len(spec.Hardening.ReadWritePaths)], d.Path)
			}
		}
	}
	if !c.NoExpand {
		values := map[string]string{}
		for _, e := range env {
			name, value, _ := strings.Cut(e, "=")
			values[name] = value
		}
		spec.Argv = expand(c.Argv, values)
	}
	if dir := u.WorkingDirectory; dir != "" {
		dir, spec.DirMay = strings.CutPrefix(dir, "-")
		if dir == "~" {
			dir = id.user.Home
		}
		spec.Dir = dir
	}
	text, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	var also io.Writer
	if u.Name == "google-startup-scripts.service" {
		also = s.m.Console // Compute Engine shows it on the serial port
	}
	out, err := journal(s.m.JournalDir, s.name, also)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := exec.Command(s.m.Binary, "exec", string(text))
	cmd.Env = env
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{pid: cmd.Process.Pid, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		var exit *exec.ExitError
		if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
			p.err = err
			return
		}
		p.wait = cmd.ProcessState.Sys().(syscall.WaitStatus)
	}()
	return p, nil
}

// process is a process of a unit. A child's end has a status; an adopted process just ends.
type process struct {
	pid   int
	done  chan struct{} // closed after the fields below are set
	wait  syscall.WaitStatus
	err   error
	alien bool
	mu    sync.Mutex // guards pidfd
	pidfd int        // of an alien, until it ends
}

// adopt watches a process that is not a child.
func adopt(pid int) (*process, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, err
	}
	p := &process{pid: pid, done: make(chan struct{}), alien: true, pidfd: fd}
	go func() {
		for {
			_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
			if !errors.Is(err, unix.EINTR) {
				break
			}
		}
		close(p.done)
		p.mu.Lock()
		defer p.mu.Unlock()
		unix.Close(fd)
	}()
	return p, nil
}

// adoptFromFile adopts the process whose pid a daemon wrote into its PID file.
func adoptFromFile(ctx context.Context, path string) (*process, error) {
	if path == "" {
		return nil, errors.New("a service of Type=forking needs PIDFile= here")
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		data, err := os.ReadFile(path)
		if err == nil {
			if pid, err := strconv.Atoi(strings.TrimSpace(string(data))); err == nil && pid > 1 {
				return adopt(pid)
			}
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for %s: %w", path, ctx.Err())
		case <-tick.C:
		}
	}
}

func (p *process) signal(sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.done:
		return os.ErrProcessDone
	default:
	}
	var err error
	if p.alien {
		err = unix.PidfdSendSignal(p.pidfd, sig, nil, 0)
	} else {
		err = syscall.Kill(p.pid, sig)
	}
	if errors.Is(err, syscall.ESRCH) {
		return os.ErrProcessDone
	}
	return err
}

// clean reports an end that Restart=on-failure does not mind. It holds after done.
func (p *process) clean(u *Unit) bool {
	if p.err != nil {
		return false
	}
	if p.wait.Signaled() {
		switch p.wait.Signal() {
		case syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM, syscall.SIGPIPE:
			return u.Type != "oneshot"
		}
		return false
	}
	code := p.wait.ExitStatus()
	for _, ok := range u.SuccessExitStatus {
		if code == ok {
			return true
		}
	}
	return code == 0
}

func (p *process) failed(u *Unit) bool { return !p.clean(u) }

func (p *process) status() string {
	switch {
	case p.err != nil:
		return p.err.Error()
	case p.alien:
		return "ended"
	case p.wait.Signaled():
		return "ended by " + unix.SignalName(p.wait.Signal())
	default:
		return fmt.Sprintf("exit status %d", p.wait.ExitStatus())
	}
}

// conditions reports whether the unit's conditions hold; an unmet assertion is an error.
func (u *Unit) conditions() (bool, error) {
	met := true
	for _, c := range u.Conditions {
		ok := false
		info, err := os.Stat(c.Path)
		switch c.Kind {
		case "PathExists":
			ok = err == nil
		case "PathIsDirectory":
			ok = err == nil && info.IsDir()
		case "FileNotEmpty":
			ok = err == nil && info.Mode().IsRegular() && info.Size() > 0
		case "DirectoryNotEmpty":
			entries, err := os.ReadDir(c.Path)
			ok = err == nil && len(entries) > 0
		}
		if ok != c.Negate {
			continue
		}
		if c.Assert {
			return false, fmt.Errorf("assertion %s=%s is not met", c.Kind, c.Path)
		}
		met = false
	}
	return met, nil
}
