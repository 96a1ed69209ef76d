package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// Sandbox is the sandbox that benchmarks run in, used as people use it: through
// the built command line.
type Sandbox struct {
	sluice string
}

// SandboxName is always the same, so that two benchmarks cannot disturb each other.
const SandboxName = "bench"

// stopTime is what a command gets to end after Ctrl-C.
const stopTime = time.Minute

// Up starts the sandbox with its cluster. It ends with this process at the latest.
func Up(ctx context.Context, e Env) (*Sandbox, error) {
	s := &Sandbox{sluice: e.Sluice}
	if _, err := s.run(ctx, nil, "up", "--name", SandboxName, "--owner", strconv.Itoa(os.Getpid())); err != nil {
		return nil, err
	}
	return s, nil
}

// Down ends the sandbox. It does so after ctx has ended, too.
func (s *Sandbox) Down(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
	defer cancel()
	_, err := s.run(ctx, nil, "down", "--name", SandboxName)
	return err
}

// PID is the sandbox's outer process, above all of its others.
func (s *Sandbox) PID(ctx context.Context) (int, error) {
	out, err := s.run(ctx, nil, "status", "--name", SandboxName, "--json")
	if err != nil {
		return 0, err
	}
	var status struct{ Pid int }
	if err := json.Unmarshal([]byte(out), &status); err != nil {
		return 0, fmt.Errorf("sluice sandbox status: %w", err)
	}
	return status.Pid, nil
}

// On runs a command on a VM as root and returns its standard output.
func (s *Sandbox) On(ctx context.Context, vm string, args ...string) (string, error) {
	return s.As(ctx, vm, "root", nil, args...)
}

// As runs a command on a VM as that user, in his home.
func (s *Sandbox) As(ctx context.Context, vm, user string, stdin io.Reader, args ...string) (string, error) {
	return s.run(ctx, stdin, append([]string{"exec", "--name", SandboxName, "--vm", vm, "--user", user, "--"}, args...)...)
}

// Install copies a program of this machine to path on a VM.
func (s *Sandbox) Install(ctx context.Context, vm, file, path string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = s.As(ctx, vm, "root", f, "sh", "-c", `cat >"$1" && chmod 755 "$1"`, "sh", path)
	return err
}

// Put makes an object, and its bucket first, with the JSON API.
func (s *Sandbox) Put(ctx context.Context, bucket, object, content string) error {
	out, err := s.run(ctx, nil, "status", "--name", SandboxName, "--json")
	if err != nil {
		return err
	}
	var status struct {
		HostEndpoints struct {
			Storage string `json:"storage"`
		} `json:"host_endpoints"`
	}
	if err := json.Unmarshal([]byte(out), &status); err != nil {
		return fmt.Errorf("sluice sandbox status: %w", err)
	}
	token, err := s.run(ctx, nil, "token", "--name", SandboxName)
	if err != nil {
		return err
	}
	token = strings.TrimSpace(token)
	endpoint := status.HostEndpoints.Storage
	if err := post(ctx, token, endpoint+"/storage/v1/b?project=sluice-sandbox", "application/json", fmt.Sprintf(`{"name":%q}`, bucket)); err != nil {
		return err
	}
	return post(ctx, token, endpoint+"/upload/storage/v1/b/"+bucket+"/o?uploadType=media&name="+url.QueryEscape(object), "text/plain", content)
}

func post(ctx context.Context, token, url, contentType, body string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", contentType)
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("POST %s: %s", url, resp.Status)
	}
	return nil
}

// run is sluice sandbox with these arguments.
func (s *Sandbox) run(ctx context.Context, stdin io.Reader, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, s.sluice, append([]string{"sandbox"}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = stopTime
	var out, errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errOut
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		return "", fmt.Errorf("sluice sandbox %s: %w\n%s", strings.Join(args, " "), err, strings.TrimSpace(errOut.String()+"\n"+out.String()))
	}
	return out.String(), nil
}

// Wait repeats done every half second until it says so, an error, or the limit.
func Wait(ctx context.Context, what string, limit time.Duration, done func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%s: not within %v", what, limit))
	defer cancel()
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := done(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}
