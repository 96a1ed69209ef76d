package command

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestOutputLimit(t *testing.T) {
	out, err := Run(context.Background(), Spec{Path: "sh", Args: []string{"-c", "yes | head -c 1000000; echo done >&2"}, MaxOutput: 100})
	var ce *Error
	if !errors.As(err, &ce) || !strings.Contains(err.Error(), "longer than 100 bytes") || len(out) != 100 {
		t.Errorf("%d bytes, error %v", len(out), err)
	}
	// A long standard error is cut, and is no error.
	if out, err := Run(context.Background(), Spec{Path: "sh", Args: []string{"-c", "yes | head -c 1000000 >&2; echo fine"}, MaxOutput: 100}); err != nil || string(out) != "fine\n" {
		t.Errorf("got %q, %v", out, err)
	}
}

func TestEnvironment(t *testing.T) {
	t.Setenv("SECRET", "x")
	out, err := Run(context.Background(), Spec{Path: "env"})
	if err != nil || strings.Contains(string(out), "SECRET") || !strings.Contains(string(out), DefaultPath) {
		t.Errorf("by default the program's environment is %q, %v", out, err)
	}
	out, err = Run(context.Background(), Spec{Path: "env", Env: []string{"A=b"}})
	if err != nil || string(out) != "A=b\n" {
		t.Errorf("the environment is %q, %v", out, err)
	}
}

func TestNoSuchProgram(t *testing.T) {
	_, err := Run(context.Background(), Spec{Path: "/does/not/exist"})
	var ce *Error
	if !errors.As(err, &ce) || ce.Exit != -1 || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %#v", err)
	}
}

// TestWholeGroupIsKilled: what the program started ends with it.
func TestWholeGroupIsKilled(t *testing.T) {
	pidFile := filepath.Join(t.TempDir(), "pid")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := Run(ctx, Spec{Path: "sh", Args: []string{"-c", `sleep 600 & echo $! > "$0.new"; mv "$0.new" "$0"; wait`, pidFile}})
		done <- err
	}()
	pid := 0
	wait(t, "the grandchild", func() bool {
		text, err := os.ReadFile(pidFile)
		if err != nil {
			return false
		}
		pid, err = strconv.Atoi(strings.TrimSpace(string(text)))
		return err == nil
	})
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	wait(t, "the grandchild's end", func() bool {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		return err != nil || strings.Contains(string(stat), ") Z ")
	})
}

func wait(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited a minute in vain for %s", what)
		}
	}
}

func TestCredential(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("needs root")
	}
	out, err := Run(context.Background(), Spec{Path: "id", Args: []string{"-u"}, Credential: &syscall.Credential{Uid: 65534, Gid: 65534}})
	if err != nil || string(out) != "65534\n" {
		t.Errorf("got %q, %v", out, err)
	}
}
