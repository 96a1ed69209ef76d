package guest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Request is one line of JSON from systemctl to the service manager.
type Request struct {
	Verb    string   `json:"verb"` // systemctl's first argument
	Units   []string `json:"units,omitempty"`
	Now     bool     `json:"now,omitempty"`      // enable and disable also start and stop
	NoBlock bool     `json:"no_block,omitempty"` // do not wait for a start, stop or restart
}

// Response is the one line of JSON that answers a Request.
type Response struct {
	Exit int    `json:"exit"` // systemctl's exit code
	Out  string `json:"out,omitempty"`
	Err  string `json:"err,omitempty"`
}

// maxRequest bounds a request's line, in bytes.
const maxRequest = 64 << 10

// systemctl's exit codes, of which LSB's init scripts are the source.
const (
	exitNotRunning = 3
	exitNoUnit     = 4
	exitNoStart    = 5
)

// Serve answers systemctl on the socket until ctx ends or the listener is closed. Anyone may ask, only
// root may change anything.
func (m *Manager) Serve(ctx context.Context, l *net.UnixListener) error {
	defer context.AfterFunc(ctx, func() { l.Close() })()
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		go m.serveConn(ctx, conn)
	}
}

func (m *Manager) serveConn(ctx context.Context, conn *net.UnixConn) {
	defer conn.Close()
	if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return
	}
	line, err := bufio.NewReader(io.LimitReader(conn, maxRequest)).ReadBytes('\n')
	if err != nil {
		return
	}
	var req Request
	var resp Response
	if err := json.Unmarshal(line, &req); err != nil {
		resp = Response{Exit: 1, Err: "bad request: " + err.Error()}
	} else if root, err := fromRoot(conn); err != nil || !root && changes[req.Verb] {
		resp = Response{Exit: 1, Err: "only root may " + req.Verb + " units"}
	} else {
		resp = m.Handle(ctx, req)
	}
	answer, err := json.Marshal(resp)
	if err != nil {
		return
	}
	_, _ = conn.Write(append(answer, '\n')) // a client that went away does not want it
}

func fromRoot(conn *net.UnixConn) (bool, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return false, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return false, err
	}
	if credErr != nil {
		return false, credErr
	}
	return cred.Uid == 0, nil
}

// changes are the verbs that only root may use.
var changes = map[string]bool{
	"start": true, "stop": true, "restart": true, "try-restart": true, "reload": true, "reload-or-restart": true, "kill": true,
	"enable": true, "disable": true, "reset-failed": true, "mask": true, "unmask": true,
}

// Handle carries out one request.
func (m *Manager) Handle(ctx context.Context, req Request) Response {
	switch req.Verb {
	case "daemon-reload", "daemon-reexec", "mask", "unmask", "preset": // units are read at each start
		return Response{}
	case "list-units":
		return m.list()
	case "is-system-running":
		return m.running()
	}
	if len(req.Units) == 0 {
		return Response{Exit: 1, Err: req.Verb + " needs a unit"}
	}
	var names []string
	for _, u := range req.Units {
		name, err := unitName(u)
		if err != nil {
			return Response{Exit: 1, Err: err.Error()}
		}
		names = append(names, name)
	}
	switch req.Verb {
	case "start", "stop", "restart", "try-restart", "reload", "reload-or-restart":
		return m.job(ctx, req.Verb, names, req.NoBlock)
	case "enable", "disable":
		for _, name := range names {
			change := m.Enable
			if req.Verb == "disable" {
				change = m.Disable
			}
			if err := change(name); err != nil {
				return failure(err)
			}
		}
		if req.Now {
			return m.job(ctx, map[string]string{"enable": "start", "disable": "stop"}[req.Verb], names, req.NoBlock)
		}
		return Response{}
	case "reset-failed":
		for _, name := range names {
			if s := m.service(name); s.State() == Failed {
				if err := s.move(Inactive); err != nil {
					return failure(err)
				}
			}
		}
		return Response{}
	case "is-active", "is-failed":
		want, answer := Active, Response{Exit: exitNotRunning}
		if req.Verb == "is-failed" {
			want, answer.Exit = Failed, 1
		}
		for _, name := range names {
			state := m.service(name).State()
			answer.Out += string(state) + "\n"
			if state == want {
				answer.Exit = 0
			}
		}
		return answer
	case "is-enabled":
		answer := Response{Exit: 1}
		for _, name := range names {
			if _, err := m.load(name); errors.Is(err, ErrNoUnit) {
				answer.Out += "not-found\n"
				continue
			}
			if m.Enabled(name) {
				answer.Out, answer.Exit = answer.Out+"enabled\n", 0
			} else {
				answer.Out += "disabled\n"
			}
		}
		return answer
	case "status":
		return m.status(names)
	case "cat":
		return m.cat(names)
	}
	return Response{Exit: 1, Err: fmt.Sprintf("unknown verb %q", req.Verb)}
}

func failure(err error) Response {
	r := Response{Exit: 1, Err: err.Error()}
	if errors.Is(err, ErrNoUnit) {
		r.Exit = exitNoStart
	}
	return r
}

func (m *Manager) job(ctx context.Context, verb string, names []string, noBlock bool) Response {
	do := func() error {
		switch verb {
		case "start":
			return m.Start(ctx, names...)
		case "stop":
			return m.Stop(ctx, names...)
		case "reload":
			var errs []error
			for _, name := range names {
				errs = append(errs, m.service(name).reload(ctx))
			}
			return errors.Join(errs...)
		}
		var again []string
		var errs []error
		for _, name := range names {
			u, state := m.service(name).unitAndState()
			switch {
			case verb == "try-restart" && state != Active:
				continue
			case verb == "reload-or-restart" && state == Active && u != nil && len(u.ExecReload) > 0:
				errs = append(errs, m.service(name).reload(ctx))
				continue
			}
			again = append(again, name)
		}
		for _, name := range again {
			errs = append(errs, m.service(name).stop(ctx, 0))
		}
		if len(again) > 0 {
			errs = append(errs, m.Start(ctx, again...))
		}
		return errors.Join(errs...)
	}
	if noBlock {
		go func() {
			if err := do(); err != nil {
				m.logf("%s: %v", verb, err)
			}
		}()
		return Response{}
	}
	if err := do(); err != nil {
		return failure(err)
	}
	return Response{}
}

// State returns the state of the unit; between a failure and its restart it is activating.
func (s *service) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.restartTimer {
		return Activating
	}
	return s.state
}

func (m *Manager) list() Response {
	var b strings.Builder
	for _, s := range m.known() {
		u, _ := s.unitAndState()
		if u != nil {
			fmt.Fprintf(&b, "%-36s loaded %-12s %s\n", s.name, s.State(), u.Description)
		}
	}
	return Response{Out: b.String()}
}

func (m *Manager) running() Response {
	state := m.service("multi-user.target").State()
	if state != Active {
		return Response{Exit: 1, Out: "starting\n"}
	}
	for _, s := range m.known() {
		if s.State() == Failed {
			return Response{Exit: 1, Out: "degraded\n"}
		}
	}
	return Response{Out: "running\n"}
}

func (m *Manager) status(names []string) Response {
	var b strings.Builder
	exit := 0
	for _, name := range names {
		s := m.service(name)
		u, err := m.load(name)
		if errors.Is(err, ErrNoUnit) {
			fmt.Fprintf(&b, "Unit %s could not be found.\n", name)
			exit = exitNoUnit
			continue
		}
		description := name
		if err == nil && u.Description != "" {
			description = u.Description
		}
		state := s.State()
		s.mu.Lock()
		fmt.Fprintf(&b, "%s - %s\n", name, description)
		fmt.Fprintf(&b, "     Active: %s since %s\n", state, s.since.UTC().Format(stamp))
		if s.result != "" && state == Failed {
			fmt.Fprintf(&b, "     Result: %s\n", s.result)
		}
		if s.main != nil {
			fmt.Fprintf(&b, "   Main PID: %d\n", s.main.pid)
		}
		if s.statusText != "" {
			fmt.Fprintf(&b, "     Status: %q\n", s.statusText)
		}
		s.mu.Unlock()
		if err != nil {
			fmt.Fprintf(&b, "     Loaded: %v\n", err)
		}
		for _, line := range tail(journalPath(m.JournalDir, name), 10) {
			b.WriteString(line + "\n")
		}
		if state != Active && exit == 0 {
			exit = exitNotRunning
		}
	}
	return Response{Exit: exit, Out: b.String()}
}

func (m *Manager) cat(names []string) Response {
	var b strings.Builder
	for _, name := range names {
		found := false
		for _, dir := range m.dirs(name) {
			data, err := os.ReadFile(filepath.Join(dir, name))
			if err == nil {
				fmt.Fprintf(&b, "# %s\n%s", filepath.Join(dir, name), data)
				found = true
				break
			}
		}
		if !found {
			return Response{Exit: 1, Err: "no file for " + name}
		}
	}
	return Response{Out: b.String()}
}

// managerWait is how long systemctl waits for a service manager that is not up yet, as in a VM that boots.
const managerWait = 10 * time.Second

func dialManager(socket string, wait time.Duration) (net.Conn, error) {
	for deadline := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) {
		conn, err := net.Dial("unix", socket)
		if err == nil {
			return conn, nil
		}
		notYet := errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED)
		if !notYet || time.Now().After(deadline) {
			return nil, fmt.Errorf("asking the service manager: %w", err)
		}
	}
}

// call sends one request to the service manager.
func call(socket string, req Request) (Response, error) {
	conn, err := dialManager(socket, managerWait)
	if err != nil {
		return Response{}, err
	}
	defer conn.Close()
	line, err := json.Marshal(req)
	if err != nil {
		return Response{}, err
	}
	if _, err := conn.Write(append(line, '\n')); err != nil {
		return Response{}, fmt.Errorf("asking the service manager: %w", err)
	}
	var resp Response
	if err := json.NewDecoder(conn).Decode(&resp); err != nil {
		return Response{}, fmt.Errorf("the service manager's answer: %w", err)
	}
	return resp, nil
}

// parseSystemctl turns systemctl's arguments into a request. Flags that change nothing here are ignored.
func parseSystemctl(args []string) (req Request, quiet bool) {
	for _, a := range args {
		switch {
		case a == "--now":
			req.Now = true
		case a == "--no-block":
			req.NoBlock = true
		case a == "-q" || a == "--quiet":
			quiet = true
		case strings.HasPrefix(a, "-"):
		case req.Verb == "":
			req.Verb = a
		default:
			req.Units = append(req.Units, a)
		}
	}
	if req.Verb == "" {
		req.Verb = "list-units"
	}
	return req, quiet
}

// systemctl is the command of that name.
func systemctl(socket string, args []string, stdout, stderr io.Writer) int {
	req, quiet := parseSystemctl(args)
	resp, err := call(socket, req)
	if err != nil {
		fmt.Fprintf(stderr, "systemctl: %v\n", err)
		return 1
	}
	if !quiet || req.Verb == "status" {
		fmt.Fprint(stdout, resp.Out)
	}
	if resp.Err != "" {
		fmt.Fprintf(stderr, "systemctl: %s\n", resp.Err)
	}
	return resp.Exit
}

// journalctl prints the journals of the units named with -u (all without), -n N lines of each.
func journalctl(dir string, args []string, stdout, stderr io.Writer) int {
	var units []string
	lines := 0
	for i := 0; i < len(args); i++ {
		value := func(short, long string) (string, bool) {
			if (args[i] == short || args[i] == long) && i+1 < len(args) {
				i++
				return args[i], true
			}
			if v, ok := strings.CutPrefix(args[i], long+"="); ok {
				return v, true
			}
			if v, ok := strings.CutPrefix(args[i], short); ok && v != "" && !strings.HasPrefix(args[i], "--") {
				return v, true
			}
			return "", false
		}
		if v, ok := value("-u", "--unit"); ok {
			name, err := unitName(v)
			if err != nil {
				fmt.Fprintf(stderr, "journalctl: %v\n", err)
				return 1
			}
			units = append(units, name)
		} else if v, ok := value("-n", "--lines"); ok {
			if err := parseInt(v, &lines); err != nil {
				fmt.Fprintf(stderr, "journalctl: -n %s: not a number\n", v)
				return 1
			}
		}
	}
	if len(units) == 0 {
		entries, err := os.ReadDir(dir)
		if err != nil {
			fmt.Fprintf(stderr, "journalctl: %v\n", err)
			return 1
		}
		for _, e := range entries {
			units = append(units, strings.TrimSuffix(e.Name(), ".log"))
		}
	}
	for _, u := range units {
		if lines > 0 {
			for _, l := range tail(journalPath(dir, u), lines) {
				fmt.Fprintln(stdout, l)
			}
			continue
		}
		f, err := os.Open(journalPath(dir, u))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err == nil {
			_, err = io.Copy(stdout, f)
			f.Close()
		}
		if err != nil {
			fmt.Fprintf(stderr, "journalctl: %v\n", err)
			return 1
		}
	}
	return 0
}
