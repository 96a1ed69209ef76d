package local

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/api"
)

// TestMain lets the test binary be a daemon that can be stopped.
func TestMain(m *testing.M) {
	if socket := os.Getenv("LOCAL_TEST_DAEMON"); socket != "" {
		l, err := Listen(socket, 0o600)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println("ready")
		Serve(context.Background(), l, nil, func(context.Context, Peer, api.Request) (any, error) { return api.Ack{}, nil })
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// start serves h and returns the socket. The server ends with the test.
func start(t *testing.T, privileged map[uint32]bool, h Handler) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "local") // short: a socket's path has 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "s")
	l, err := Listen(socket, 0o666)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, l, privileged, h) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	return socket
}

func echo(_ context.Context, _ Peer, r api.Request) (any, error) { return r.Body, nil }

func TestCall(t *testing.T) {
	var peer Peer
	socket := start(t, nil, func(_ context.Context, p Peer, r api.Request) (any, error) {
		peer = p
		if r.Op == "refuse" {
			return nil, &api.Error{Code: api.CodeDenied, Message: "no", Hint: "ask"}
		}
		return r.Body, nil
	})
	in := api.NodeNames{Nodes: []string{"n1", "ü\n"}}
	var out api.NodeNames
	if err := Call(context.Background(), socket, "x", in, &out); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(in, out); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if want := (Peer{UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), PID: int32(os.Getpid())}); peer != want {
		t.Errorf("the server saw %+v, want %+v", peer, want)
	}
	err := Call(context.Background(), socket, "refuse", in, nil)
	var refusal *api.Error
	if !errors.As(err, &refusal) || *refusal != (api.Error{Code: api.CodeDenied, Message: "no", Hint: "ask"}) {
		t.Errorf("a refusal arrives as %#v", err)
	}
}

func TestNobodyThere(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	if err := Call(context.Background(), socket, "x", nil, nil); !errors.Is(err, ErrUnreachable) {
		t.Errorf("no socket: %v", err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	if err := Call(context.Background(), socket, "x", nil, nil); !errors.Is(err, ErrUnreachable) {
		t.Errorf("a socket without a daemon: %v", err)
	}
}

// TestDaemonGoesAway: it accepts and dies before it answers.
func TestDaemonGoesAway(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.Write([]byte(`{"v":1,`))
			conn.Close()
		}
	}()
	if err := Call(context.Background(), socket, "x", nil, nil); !errors.Is(err, ErrUnreachable) {
		t.Errorf("error %v", err)
	}
}

func TestStoppedDaemon(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	daemon := exec.Command(os.Args[0])
	daemon.Env = append(os.Environ(), "LOCAL_TEST_DAEMON="+socket)
	daemon.Stderr = os.Stderr
	out, err := daemon.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		daemon.Process.Kill()
		daemon.Wait()
	}()
	if _, err := io.ReadFull(out, make([]byte, len("ready"))); err != nil {
		t.Fatal(err)
	}
	if err := Call(context.Background(), socket, "x", nil, nil); err != nil {
		t.Fatal(err)
	}
	if err := daemon.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var status syscall.WaitStatus
	if _, err := syscall.Wait4(daemon.Process.Pid, &status, syscall.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatalf("the daemon did not stop: %v, %v", status, err)
	}
	// A small request fits into the socket's buffer, a large one blocks the writer.
	for _, size := range []int{10, 4 << 20} {
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		err := Call(ctx, socket, "x", strings.Repeat("x", size), nil)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%d bytes: error %v, want the caller's deadline", size, err)
		}
	}
	if err := daemon.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := Call(context.Background(), socket, "x", nil, nil); err != nil {
		t.Errorf("after it continued: %v", err)
	}
}

// TestFullQueue: a daemon that accepts nobody does not make callers wait.
func TestFullQueue(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: socket}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 1); err != nil {
		t.Fatal(err)
	}
	for {
		conn, err := net.Dial("unix", socket)
		if errors.Is(err, syscall.EAGAIN) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	if err := Call(context.Background(), socket, "x", nil, nil); !errors.Is(err, ErrUnreachable) {
		t.Errorf("error %v", err)
	}
}

func TestTooLong(t *testing.T) {
	socket := start(t, nil, echo)
	err := Call(context.Background(), socket, "x", strings.Repeat("x", api.MaxMessage), nil)
	if api.CodeOf(err) != api.CodeBadRequest || !strings.Contains(err.Error(), "longer than") {
		t.Errorf("a request that is too long: %v", err)
	}
	var out string
	in := strings.Repeat("x", 5<<20)
	if err := Call(context.Background(), socket, "x", in, &out); err != nil || out != in {
		t.Errorf("a long request: %d bytes back, error %v", len(out), err)
	}
}

func TestAnswerTooLong(t *testing.T) {
	socket := start(t, nil, func(context.Context, Peer, api.Request) (any, error) {
		return strings.Repeat("x", api.MaxMessage+1), nil
	})
	if err := Call(context.Background(), socket, "x", nil, nil); err == nil {
		t.Error("no error")
	}
}

// raw sends text as it is and returns the answer.
func raw(t *testing.T, socket, text string) api.Response {
	t.Helper()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	line, err := readLine(conn)
	if err != nil {
		t.Fatal(err)
	}
	var r api.Response
	if err := json.Unmarshal(line, &r); err != nil {
		t.Fatal(err)
	}
	return r
}

func TestBadRequests(t *testing.T) {
	socket := start(t, nil, echo)
	for _, test := range []struct{ name, text, want string }{
		{"no JSON", "hello\n", "not JSON"},
		{"too old", fmt.Sprintf(`{"v":%d,"op":"x"}`+"\n", api.Version-2), "speaks version"},
		{"too new", fmt.Sprintf(`{"v":%d,"op":"x"}`+"\n", api.Version+2), "speaks version"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := raw(t, socket, test.text)
			if r.Error == nil || r.Error.Code != api.CodeBadRequest || !strings.Contains(r.Error.Message, test.want) {
				t.Errorf("answer %+v", r)
			}
		})
	}
	for _, v := range []int{api.Version - 1, api.Version, api.Version + 1} {
		if r := raw(t, socket, fmt.Sprintf(`{"v":%d,"op":"x","body":{}}`+"\n", v)); r.Error != nil {
			t.Errorf("version %d: %v", v, r.Error)
		}
	}
}

func TestHangUp(t *testing.T) {
	entered, ended := make(chan struct{}), make(chan error)
	socket := start(t, nil, func(ctx context.Context, _ Peer, _ api.Request) (any, error) {
		close(entered)
		<-ctx.Done()
		ended <- ctx.Err()
		return nil, ctx.Err()
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- Call(ctx, socket, "x", nil, nil) }()
	<-entered
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the handler's context: %v", err)
	}
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("the call: %v", err)
	}
}

// TestSlowWriter: a caller that never ends its line is hung up on, and disturbs nobody.
func TestSlowWriter(t *testing.T) {
	t.Parallel()
	socket := start(t, nil, echo)
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(`{"v":1,`)); err != nil {
		t.Fatal(err)
	}
	if err := Call(context.Background(), socket, "x", 1, nil); err != nil {
		t.Errorf("another caller: %v", err)
	}
	conn.SetReadDeadline(time.Now().Add(10 * readTimeout))
	if n, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("read %d bytes, error %v; want the end", n, err)
	}
}

// TestSlowReader: a caller that never reads a long answer does not keep its handler.
func TestSlowReader(t *testing.T) {
	t.Parallel()
	socket := start(t, nil, func(context.Context, Peer, api.Request) (any, error) { return strings.Repeat("x", 4<<20), nil })
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(`{"v":1,"op":"x"}` + "\n")); err != nil {
		t.Fatal(err)
	}
	// start's cleanup waits for the handler.
}

// TestLimitPerUser: a user who holds connections open gets no more than a few,
// and others are served.
func TestLimitPerUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("needs root, to be another user")
	}
	const nobody = 65534
	release := make(chan struct{})
	var once bool
	socket := start(t, nil, func(_ context.Context, p Peer, _ api.Request) (any, error) {
		if p.UID == nobody {
			<-release
		}
		return p.UID, nil
	})
	defer func() {
		if !once {
			close(release)
		}
	}()
	conns := make(chan []net.Conn)
	go func() {
		// The kernel takes the credentials of the thread that connects. This
		// one stays nobody's, so it is never given back.
		runtime.LockOSThread()
		if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, nobody, nobody, nobody); e != 0 {
			conns <- nil
			return
		}
		var list []net.Conn
		for range connectionsUser + 8 {
			conn, err := net.Dial("unix", socket)
			if err != nil {
				break
			}
			conn.Write([]byte(`{"v":1,"op":"x"}` + "\n"))
			list = append(list, conn)
		}
		conns <- list
	}()
	list := <-conns
	if len(list) != connectionsUser+8 {
		t.Fatalf("%d connections were made", len(list))
	}
	var uid uint32
	if err := Call(context.Background(), socket, "x", nil, &uid); err != nil || uid != 0 {
		t.Errorf("root meanwhile: %d, %v", uid, err)
	}
	// Root was served after all of them were accepted: those above the limit
	// have been hung up on, the others answer when they may.
	close(release)
	once = true
	answered := 0
	for _, c := range list {
		c.SetReadDeadline(time.Now().Add(time.Minute))
		if line, err := readLine(c); err == nil && strings.Contains(string(line), "65534") {
			answered++
		}
		c.Close()
	}
	if answered != connectionsUser {
		t.Errorf("%d connections were answered, want %d", answered, connectionsUser)
	}
}

func TestListen(t *testing.T) {
	socket := start(t, nil, echo)
	if l, err := Listen(socket, 0o600); err == nil {
		l.Close()
		t.Error("a second daemon took the socket of a living one")
	}
	if err := Call(context.Background(), socket, "x", 1, nil); err != nil {
		t.Errorf("the first daemon: %v", err)
	}
	dead := filepath.Join(t.TempDir(), "s")
	for range 2 { // the second replaces what the first left
		l, err := Listen(dead, 0o640)
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(dead)
		if err != nil || info.Mode().Perm() != 0o640 {
			t.Errorf("mode %v, %v", info.Mode(), err)
		}
		l.SetUnlinkOnClose(false)
		l.Close()
	}
}

func FuzzReadLine(f *testing.F) {
	f.Add("{}\n{}\n")
	f.Add("no end")
	f.Fuzz(func(t *testing.T, s string) {
		line, err := readLine(strings.NewReader(s))
		want, _, ended := strings.Cut(s, "\n")
		if (err == nil) != ended || err == nil && string(line) != want+"\n" {
			t.Errorf("readLine(%q) = %q, %v", s, line, err)
		}
	})
}
