package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// metadataURL is where every VM of Compute Engine finds its metadata.
const metadataURL = "http://169.254.169.254/computeMetadata/v1/"

// metadataWait is how long a VM waits for a metadata server that does not answer.
const metadataWait = 30 * time.Second

// maxMetadata bounds a value, in bytes; Compute Engine's own limit is 256 KB.
const maxMetadata = 1 << 20

var errNoMetadata = errors.New("no such metadata")

// metadata fetches one value, and retries until the server answers or metadataWait is over.
func metadata(ctx context.Context, base, key string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, metadataWait)
	defer cancel()
	transport := &http.Transport{DialContext: (&net.Dialer{Timeout: time.Second}).DialContext}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: 5 * time.Second}
	wait := time.NewTicker(100 * time.Millisecond)
	defer wait.Stop()
	for {
		value, err := metadataOnce(ctx, client, base+key)
		if err == nil || errors.Is(err, errNoMetadata) {
			return value, err
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("metadata %s: %w", key, err)
		case <-wait.C:
		}
	}
}

func metadataOnce(ctx context.Context, client *http.Client, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	req.Header.Set("Metadata-Flavor", "Google")
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound:
		return "", errNoMetadata
	default:
		return "", errors.New(resp.Status)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxMetadata+1))
	if err != nil {
		return "", err
	}
	if len(body) > maxMetadata {
		return "", fmt.Errorf("longer than %d bytes", maxMetadata)
	}
	return string(body), nil
}

// startupScript does what the guest agent of Compute Engine does at boot: it sets the hostname and runs
// the attribute startup-script. It returns the script's exit code.
func startupScript(ctx context.Context, base string, out io.Writer) int {
	switch name, err := metadata(ctx, base, "instance/hostname"); {
	case err == nil:
		short, _, _ := strings.Cut(name, ".")
		if err := unix.Sethostname([]byte(short)); err != nil {
			fmt.Fprintf(out, "startup-script: setting the hostname: %v\n", err)
		}
	case !errors.Is(err, errNoMetadata):
		fmt.Fprintf(out, "startup-script: %v\n", err)
		return 1
	}
	script, err := metadata(ctx, base, "instance/attributes/startup-script")
	if errors.Is(err, errNoMetadata) {
		fmt.Fprintln(out, "startup-script: none")
		return 0
	}
	if err != nil {
		fmt.Fprintf(out, "startup-script: %v\n", err)
		return 1
	}
	file, err := os.CreateTemp("", "startup-script-")
	if err != nil {
		fmt.Fprintf(out, "startup-script: %v\n", err)
		return 1
	}
	defer os.Remove(file.Name())
	_, err = file.WriteString(script)
	err = errors.Join(err, file.Chmod(0o700), file.Close())
	if err != nil {
		fmt.Fprintf(out, "startup-script: %v\n", err)
		return 1
	}
	// Through a shell, which also runs a script without a #! line.
	cmd := exec.CommandContext(ctx, "/bin/bash", "-c", file.Name())
	cmd.Env = append(os.Environ(), "HOME=/root")
	lines := &prefixed{out: out, prefix: "startup-script: "}
	cmd.Stdout, cmd.Stderr = lines, lines
	err = cmd.Run()
	lines.flush()
	var exit *exec.ExitError
	switch {
	case err == nil:
		fmt.Fprintln(out, "startup-script exit status 0")
		return 0
	case errors.As(err, &exit):
		fmt.Fprintf(out, "startup-script %s\n", exit)
		return max(1, exit.ExitCode())
	default:
		fmt.Fprintf(out, "startup-script: %v\n", err)
		return 1
	}
}

// prefixed writes whole lines with a prefix.
type prefixed struct {
	out    io.Writer
	prefix string
	part   []byte
}

func (p *prefixed) Write(b []byte) (int, error) {
	p.part = append(p.part, b...)
	for {
		i := strings.IndexByte(string(p.part), '\n')
		if i < 0 {
			break
		}
		if _, err := fmt.Fprintf(p.out, "%s%s\n", p.prefix, p.part[:i]); err != nil {
			return 0, err
		}
		p.part = p.part[i+1:]
	}
	return len(b), nil
}

func (p *prefixed) flush() {
	if len(p.part) > 0 {
		fmt.Fprintf(p.out, "%s%s\n", p.prefix, p.part)
		p.part = nil
	}
}
