package guest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/sluicehpc/sluice/sandbox/lustre/tools"
)

// Main is the guest binary: the command is the name it was called by, or its first argument. It returns
// the exit code.
func Main(args []string, stdout, stderr io.Writer) int {
	name := filepath.Base(args[0])
	args = args[1:]
	switch name {
	case "systemctl", "journalctl", "mount.lustre", "lfs", "lctl", "lnetctl":
	default:
		if len(args) == 0 {
			fmt.Fprintln(stderr, "usage: sluice-guest init|reap|manager|exec|as|startup-script|systemctl|journalctl|mount.lustre|lfs|lctl|lnetctl …")
			return 2
		}
		name, args = args[0], args[1:]
	}
	code, err := run(name, args, stdout, stderr)
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", name, err)
	}
	return code
}

// exitNotExecuted is what shells return for a program that cannot be run.
const exitNotExecuted = 127

func run(name string, args []string, stdout, stderr io.Writer) (int, error) {
	ctx := context.Background()
	switch name {
	case "boot":
		return 1, bootMain()
	case "init":
		return Init([]string{Binary, "manager"}, 3)
	case "reap":
		flags := flag.NewFlagSet("reap", flag.ContinueOnError)
		files := flags.Int("files", 3, "how many of the first descriptors the program gets")
		if err := flags.Parse(args); err != nil || flags.NArg() == 0 {
			return 2, errors.New("usage: reap [-files N] PROGRAM [ARGUMENT]…")
		}
		return Init(flags.Args(), *files)
	case "manager":
		return manager(ctx, stderr)
	case "exec":
		if len(args) != 1 {
			return 2, errors.New("usage: exec JSON")
		}
		return exitNotExecuted, execMain(args[0])
	case "as":
		flags := flag.NewFlagSet("as", flag.ContinueOnError)
		user := flags.String("user", "", "the user; root unless given")
		withParent := flags.Bool("with-parent", false, "end when the parent dies")
		if err := flags.Parse(args); err != nil || flags.NArg() == 0 {
			return 2, errors.New("usage: as [-user NAME] [-with-parent] PROGRAM [ARGUMENT]…")
		}
		return exitNotExecuted, As(ctx, *user, flags.Args(), *withParent)
	case "startup-script":
		return startupScript(ctx, metadataURL, stdout), nil
	case "systemctl":
		return systemctl(ControlSocket, args, stdout, stderr), nil
	case "journalctl":
		return journalctl(JournalDir, args, stdout, stderr), nil
	case "mount.lustre":
		return mountLustre(LustreSocket, args, stderr), nil
	case "lfs", "lctl", "lnetctl":
		return tools.Here().Main(ctx, name, args, stdout, stderr), nil
	}
	return 2, fmt.Errorf("unknown command %q", name)
}

// shutdownLimit bounds the stop of all units together.
const shutdownLimit = 4 * time.Second

// manager runs the service manager until TERM, and then stops the units.
func manager(ctx context.Context, console io.Writer) (int, error) {
	term, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	m := NewManager(console)
	if err := os.MkdirAll(filepath.Dir(ControlSocket), 0o755); err != nil {
		return 1, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: ControlSocket, Net: "unix"})
	if err != nil {
		return 1, err
	}
	if err := os.Chmod(ControlSocket, 0o666); err != nil {
		return 1, err
	}
	served := make(chan error, 1)
	go func() { served <- m.Serve(term, l) }()
	m.logf("booting")
	go func() {
		switch err := m.Start(term, "multi-user.target"); {
		case term.Err() != nil:
		case err != nil:
			m.logf("%v", err)
		default:
			m.logf("reached multi-user.target")
		}
	}()
	select {
	case <-term.Done():
	case err := <-served:
		if err != nil {
			return 1, fmt.Errorf("serving systemctl: %w", err)
		}
	}
	m.logf("shutting down")
	limited, cancel := context.WithTimeout(ctx, shutdownLimit)
	defer cancel()
	m.Shutdown(limited)
	if err := flushLustre(LustreSocket); err != nil {
		m.logf("writing out Lustre: %v", err)
	}
	m.logf("down")
	return 0, nil
}
