package collective

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// patience is how long a test waits for what it expects to happen at once.
const patience = 30 * time.Second

func config(t *testing.T, rank, size int, file string) Config {
	return Config{
		Rank: rank, Size: size, Node: fmt.Sprintf("n%d", rank), File: file,
		Hosts: []string{"127.0.0.1"}, Timeout: patience,
	}
}

// join makes a whole group in this process.
func join(t *testing.T, size int) []*Group {
	t.Helper()
	file := filepath.Join(t.TempDir(), "rendezvous")
	groups := make([]*Group, size)
	all(t, size, func(rank int) (err error) {
		groups[rank], err = Join(t.Context(), config(t, rank, size, file))
		return err
	})
	if t.Failed() {
		t.FailNow()
	}
	t.Cleanup(func() {
		for _, g := range groups {
			g.Close(nil)
		}
	})
	if _, err := os.Lstat(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the rendezvous file is left: %v", err)
	}
	return groups
}

// all runs f for every rank at once.
func all(t *testing.T, size int, f func(rank int) error) {
	t.Helper()
	for rank, err := range errs(size, f) {
		if err != nil {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
}

func errs(size int, f func(rank int) error) []error {
	list := make([]error, size)
	var wg sync.WaitGroup
	for rank := range size {
		wg.Go(func() { list[rank] = f(rank) })
	}
	wg.Wait()
	return list
}

func TestSum(t *testing.T) {
	for _, size := range []int{1, 2, 5} {
		groups := join(t, size)
		for round := range 3 {
			results := make([][]float32, size)
			all(t, size, func(rank int) error {
				// 1e8 and small values: float32 sums in another order would differ.
				values := []float32{float32(rank + round), 1e8 * float32(rank%2), 3.3333333, -float32(rank) / 7}
				results[rank] = values
				return groups[rank].Sum(t.Context(), values)
			})
			want := make([]float32, 4)
			for rank := range size {
				for i, v := range []float32{float32(rank + round), 1e8 * float32(rank%2), 3.3333333, -float32(rank) / 7} {
					want[i] += v
				}
			}
			for rank, got := range results {
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("%d ranks, round %d, rank %d (-want +got):\n%s", size, round, rank, diff)
				}
			}
		}
		all(t, size, func(rank int) error { return groups[rank].Barrier(t.Context()) })
		all(t, size, func(rank int) error { return groups[rank].Sum(t.Context(), nil) })
	}
}

func TestLargeSum(t *testing.T) { // more than the sockets' buffers hold
	groups := join(t, 3)
	all(t, 3, func(rank int) error {
		values := make([]float32, 5_000_000)
		values[len(values)-1] = float32(rank)
		err := groups[rank].Sum(t.Context(), values)
		if got := values[len(values)-1]; err == nil && got != 3 {
			return fmt.Errorf("got %g, want 3", got)
		}
		return err
	})
}

func TestAgree(t *testing.T) {
	groups := join(t, 3)
	all(t, 3, func(rank int) error { return groups[rank].Agree(t.Context(), "the seed", "7") })
	for rank, err := range errs(3, func(rank int) error {
		err := groups[rank].Agree(t.Context(), "the seed", fmt.Sprint(7+rank/2))
		groups[rank].Close(err)
		return err
	}) {
		if want := "the seed of rank 2 on n2 is 8, of rank 0 7"; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("rank %d: got %v, want %q", rank, err, want)
		}
	}
}

func TestSumsOfOtherLengths(t *testing.T) {
	groups := join(t, 2)
	for rank, err := range errs(2, func(rank int) error {
		err := groups[rank].Sum(t.Context(), make([]float32, 5-rank))
		groups[rank].Close(err)
		return err
	}) {
		if want := "rank 1 gave 4 values to a sum of 5"; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("rank %d: got %v, want %q", rank, err, want)
		}
	}
}

// TestRankFails shows that all others learn the reason of the first failure, whoever it is.
func TestRankFails(t *testing.T) {
	for failing := range 3 {
		groups := join(t, 3)
		for rank, err := range errs(3, func(rank int) error {
			if rank == failing {
				groups[rank].Close(errors.New("disk full"))
				return nil
			}
			err := groups[rank].Sum(t.Context(), make([]float32, 1_000_000))
			groups[rank].Close(err)
			return err
		}) {
			if rank == failing {
				continue
			}
			var abort *AbortError
			if want := fmt.Sprintf("rank %d on n%d: disk full", failing, failing); !errors.As(err, &abort) || abort.Reason != want {
				t.Errorf("rank %d fails, rank %d: got %v, want %q", failing, rank, err, want)
			}
		}
	}
}

// TestRankDies cuts a connection, as the kernel does for a process that was killed.
func TestRankDies(t *testing.T) {
	for dying := range 2 {
		groups := join(t, 2)
		groups[dying].peers[0].conn.(*net.TCPConn).SetLinger(0)
		groups[dying].peers[0].conn.Close()
		other := 1 - dying
		err := groups[other].Sum(t.Context(), make([]float32, 10))
		if want := fmt.Sprintf("rank %d on n%d is gone", dying, dying); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

func TestSilentRank(t *testing.T) {
	groups := join(t, 3)
	groups[0].Timeout = 50 * time.Millisecond // of the others nobody calls
	err := groups[0].Sum(t.Context(), make([]float32, 10))
	if err == nil || !strings.Contains(err.Error(), "did not answer in time") {
		t.Errorf("got %v, want that a rank did not answer in time", err)
	}
}

func TestContextEnds(t *testing.T) {
	groups := join(t, 2)
	cause := errors.New("stopped")
	for rank := range 2 {
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(20*time.Millisecond, func() { cancel(cause) })
		if err := groups[rank].Barrier(ctx); !errors.Is(err, cause) {
			t.Errorf("rank %d: got %v, want the context's cause", rank, err)
		}
	}
}

func TestJoinMissing(t *testing.T) {
	file := filepath.Join(t.TempDir(), "rendezvous")
	for rank, want := range []string{"rank 1, 2 of 3 did not come within", "rank 0 was not found within"} {
		c := config(t, rank, 3, file)
		c.Timeout = 100 * time.Millisecond
		if _, err := Join(t.Context(), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("rank %d: got %v, want %q", rank, err, want)
		}
		if _, err := os.Lstat(file); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("rank %d: the rendezvous file is left: %v", rank, err)
		}
	}
}

// TestJoinAborted shows that who came already learns that another one never did.
func TestJoinAborted(t *testing.T) {
	file := filepath.Join(t.TempDir(), "rendezvous")
	list := errs(2, func(rank int) error {
		c := config(t, rank, 3, file)
		if rank == 0 {
			c.Timeout = 2 * time.Second
		}
		_, err := Join(t.Context(), c)
		return err
	})
	if list[0] == nil || !strings.Contains(list[0].Error(), "did not come") {
		t.Errorf("rank 0: got %v", list[0])
	}
	if list[1] == nil || !strings.Contains(list[1].Error(), "rank 0 on n0: rank 2 of 3 did not come") {
		t.Errorf("rank 1: got %v", list[1])
	}
}

func TestJoinRefusesNumbers(t *testing.T) {
	for _, c := range []Config{{Rank: 0, Size: 0}, {Rank: -1, Size: 2}, {Rank: 2, Size: 2}} {
		if _, err := Join(t.Context(), c); err == nil {
			t.Errorf("rank %d of %d: got no error", c.Rank, c.Size)
		}
	}
}

// leader starts rank 0 of 2 and returns what it published.
func leader(t *testing.T, file string) (*rendezvous, chan error) {
	t.Helper()
	result := make(chan error, 1)
	go func() {
		g, err := Join(t.Context(), config(t, 0, 2, file))
		if err == nil {
			defer g.Close(nil)
			err = g.Barrier(t.Context())
		}
		result <- err
	}()
	deadline := time.Now().Add(patience)
	for {
		rv, err := readRendezvous(file)
		if err == nil {
			return rv, result
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
}

// TestStrangers connects with everything but the secret, then lets the real rank join.
func TestStrangers(t *testing.T) {
	file := filepath.Join(t.TempDir(), "rendezvous")
	rv, result := leader(t, file)
	dial := func() net.Conn {
		conn, err := net.DialTimeout("tcp", rv.Addresses[0], patience)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	dial() // says nothing
	for _, text := range []string{"GET / HTTP/1.1\r\n\r\n" + strings.Repeat("x", 100), magic + "\xff\xff\xff\xff" + strings.Repeat("n", 100)} {
		conn := dial()
		io.WriteString(conn, text)
		conn.SetDeadline(time.Now().Add(patience))
		if got, _ := io.ReadAll(conn); len(got) > 0 {
			t.Errorf("a stranger who said %.20q got an answer of %d bytes", text, len(got))
		}
	}
	stranger := &Group{Config: config(t, 1, 2, file)}
	if err := stranger.introduce(newPeer(0, dial()), make([]byte, 32)); err == nil {
		t.Error("with another secret, rank 0's proof was accepted")
	}
	// A stranger that answers with a wrong proof is dropped.
	conn := dial()
	io.WriteString(conn, magic+"\x01\x00\x00\x00"+strings.Repeat("n", nonceSize)+strings.Repeat("p", 32))
	conn.SetDeadline(time.Now().Add(patience))
	if got, _ := io.ReadAll(conn); len(got) > nonceSize+32 {
		t.Errorf("with a wrong proof: got %d bytes", len(got))
	}
	g, err := Join(t.Context(), config(t, 1, 2, file))
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close(nil)
	if err := g.Barrier(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-result; err != nil {
		t.Error(err)
	}
}

// TestStaleFile lets a rank come first and find the file of an earlier run, whose port another program has now.
func TestStaleFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "rendezvous")
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	met := make(chan struct{})
	go func() {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		io.WriteString(conn, strings.Repeat("z", 64))
		conn.Close()
		ln.Close()
		close(met)
	}()
	text, err := json.Marshal(rendezvous{Addresses: []string{"127.0.0.1:1", ln.Addr().String()}, Secret: make([]byte, 32)})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	all(t, 2, func(rank int) error {
		if rank == 0 {
			select {
			case <-met:
			case <-time.After(patience):
				return errors.New("rank 1 never tried the stale address")
			}
		}
		g, err := Join(t.Context(), config(t, rank, 2, file))
		if err == nil {
			defer g.Close(nil)
			err = g.Barrier(t.Context())
		}
		return err
	})
}

func TestReadRendezvousRefuses(t *testing.T) {
	dir := t.TempDir()
	good, err := json.Marshal(rendezvous{Addresses: []string{"127.0.0.1:1"}, Secret: make([]byte, 32)})
	if err != nil {
		t.Fatal(err)
	}
	path := func(name string, text []byte, mode os.FileMode) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, text, mode); err != nil {
			t.Fatal(err)
		}
		return p
	}
	ok := path("good", good, 0o600)
	if _, err := readRendezvous(ok); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(ok, link); err != nil {
		t.Fatal(err)
	}
	for name, p := range map[string]string{
		"readable by all": path("open", good, 0o644),
		"a symbolic link": link,
		"a directory":     dir,
		"no secret":       path("bare", []byte(`{"addresses":[]}`), 0o600),
		"not JSON":        path("text", []byte("x"), 0o600),
	} {
		if _, err := readRendezvous(p); err == nil {
			t.Errorf("%s: got no error", name)
		}
	}
}

// TestHostilePeer sends frames that do not belong.
func TestHostilePeer(t *testing.T) {
	for name, frame := range map[string]string{
		"another kind":  "q\x04\x00\x00\x00abcd",
		"too long":      "s\xff\xff\xff\xff",
		"no frame":      "s",
		"a false abort": "x\xff\xff\xff\xff" + strings.Repeat("\x1b", maxText),
	} {
		groups := join(t, 2)
		conn := groups[1].peers[0].conn.(*net.TCPConn)
		io.WriteString(conn, frame)
		conn.CloseWrite()
		err := groups[0].Sum(t.Context(), make([]float32, 1))
		if err == nil || strings.Contains(err.Error(), "\x1b") {
			t.Errorf("%s: got %q", name, err)
		}
	}
}
