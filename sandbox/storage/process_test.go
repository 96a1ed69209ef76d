package storage

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	gcs "cloud.google.com/go/storage"
	"google.golang.org/api/option"
)

// childDir makes this test binary a server of that directory instead of running tests.
const childDir = "SLUICE_STORAGE_TEST_CHILD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		fmt.Fprintln(os.Stderr, serveChild(dir))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func serveChild(dir string) error {
	s, err := New(Options{Dir: dir, Project: testProject})
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println("http://" + l.Addr().String())
	go func() {
		io.Copy(io.Discard, os.Stdin) // the parent's end closes when it dies
		os.Exit(0)
	}()
	return http.Serve(l, s)
}

// child is a server in a process of its own.
type child struct {
	cmd *exec.Cmd
	url string
}

func startChild(t *testing.T, dir string) *child {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childDir+"="+dir)
	cmd.Stderr = os.Stderr
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &child{cmd: cmd}
	t.Cleanup(c.kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("server did not start: %v", err)
	}
	c.url = strings.TrimSpace(line)
	return c
}

func (c *child) kill() {
	c.cmd.Process.Signal(syscall.SIGKILL)
	c.cmd.Wait()
}

// peakMemory is the most physical memory the process ever had, in bytes.
func (c *child) peakMemory(t *testing.T) int64 {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return kb << 10
		}
	}
	t.Fatal("no VmHWM")
	return 0
}

// pattern is an endless stream that differs from block to block but costs next to nothing to make.
type pattern struct {
	n   int64
	buf []byte
}

func (p *pattern) Read(b []byte) (int, error) {
	if p.buf == nil {
		p.buf = []byte(randomData(1 << 20))
	}
	n := copy(b, p.buf[p.n%int64(len(p.buf)):])
	if p.n%(64<<20) == 0 {
		b[0] ^= byte(p.n>>26) + 1
	}
	p.n += int64(n)
	return n, nil
}

// TestMemoryIsBounded uploads and downloads a large object, in every way, through a server in a process of its own.
func TestMemoryIsBounded(t *testing.T) {
	size := int64(512 << 20)
	if os.Getenv("SLUICE_CAMPAIGN") == "1" {
		size = 5 << 30
	} else if testing.Short() {
		size = 64 << 20
	}
	c := startChild(t, t.TempDir())
	client := newClient(t, endpoint(c.url)...)
	ctx := t.Context()
	b := client.Bucket("big-bucket")
	if err := b.Create(ctx, testProject, nil); err != nil {
		t.Fatal(err)
	}
	roundTrip := func(name string, size int64, chunk int) {
		t.Helper()
		w := b.Object(name).NewWriter(ctx)
		w.ChunkSize = chunk
		sum := crc32.New(castagnoli)
		if _, err := io.Copy(w, io.TeeReader(io.LimitReader(&pattern{}, size), sum)); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if a := w.Attrs(); a.Size != size || a.CRC32C != sum.Sum32() {
			t.Fatalf("uploaded %d bytes with CRC32C %x, got %d and %x", size, sum.Sum32(), a.Size, a.CRC32C)
		}
		r, err := b.Object(name).NewReader(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		// The reader compares the checksum itself.
		if n, err := io.Copy(io.Discard, r); err != nil || n != size {
			t.Fatalf("downloaded %d bytes, %v, want %d", n, err, size)
		}
	}
	const small = 5 << 20
	roundTrip("small", small, 16<<20)
	roundTrip("small", small, 0)
	before := c.peakMemory(t)
	roundTrip("big", size, 16<<20)
	roundTrip("big-single", size/2, 0)
	if _, err := b.Object("sum").ComposerFrom(b.Object("big"), b.Object("big-single")).Run(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Object("copy").CopierFrom(b.Object("big")).Run(ctx); err != nil {
		t.Fatal(err)
	}
	after := c.peakMemory(t)
	t.Logf("peak memory: %d MiB with 5 MiB objects, %d MiB with %d MiB", before>>20, after>>20, size>>20)
	if grown := after - before; grown > 32<<20 {
		t.Errorf("peak memory grew by %d MiB with a %d MiB object, want at most 32", grown>>20, size>>20)
	}
}

// TestKill kills the server in the middle of uploads, again and again. What was acknowledged must be there, whole; nothing
// else may be seen, nor stay on the disk.
func TestKill(t *testing.T) {
	rounds := 4
	if os.Getenv("SLUICE_CAMPAIGN") == "1" {
		rounds = 100
	}
	dir := t.TempDir()
	rng := rand.New(rand.NewPCG(1, 2))
	acknowledged := map[string]uint32{}
	for round := range rounds {
		c := startChild(t, dir)
		client := newClient(t, endpoint(c.url)...)
		client.SetRetry(gcs.WithPolicy(gcs.RetryNever))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		b := client.Bucket("kill-bucket")
		if round == 0 {
			if err := b.Create(ctx, testProject, nil); err != nil {
				t.Fatal(err)
			}
		}
		var (
			wg    sync.WaitGroup
			mu    sync.Mutex
			count int
		)
		enough := make(chan struct{})
		target := 10 + rng.IntN(40)
		for worker := range 6 {
			wg.Go(func() {
				for i := 0; ; i++ {
					name := fmt.Sprintf("r%d/w%d/%d", round, worker, i)
					data := randomData(1000 + (worker*7+i)%5*300_000)
					w := b.Object(name).NewWriter(ctx)
					w.ChunkSize = []int{0, 1 << 18, 16 << 20}[worker%3]
					w.ChunkRetryDeadline = time.Millisecond
					_, err := io.WriteString(w, data)
					if err = errors.Join(err, w.Close()); err != nil {
						return // killed
					}
					mu.Lock()
					acknowledged[name] = crc32.Checksum([]byte(data), castagnoli)
					if count++; count == target {
						close(enough)
					}
					mu.Unlock()
				}
			})
		}
		<-enough
		c.kill()
		wg.Wait()
		cancel()

		s, err := New(Options{Dir: dir, Project: testProject})
		if err != nil {
			t.Fatalf("round %d: reopen: %v", round, err)
		}
		checkKilled(t, s, acknowledged)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if t.Failed() {
			t.Fatalf("round %d of %d", round, rounds)
		}
	}
	t.Logf("%d objects survived %d kills", len(acknowledged), rounds)
}

func checkKilled(t *testing.T, s *Server, acknowledged map[string]uint32) {
	t.Helper()
	infos, err := s.List("kill-bucket", "")
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for _, o := range infos {
		listed[o.Name] = true
		r, _, err := s.Open(o.Bucket, o.Name, o.Generation)
		if err != nil {
			t.Errorf("%s is listed: %v", o.Name, err)
			continue
		}
		sum := crc32.New(castagnoli)
		n, err := io.Copy(sum, r)
		r.Close()
		if err != nil || n != o.Size || sum.Sum32() != o.CRC32C {
			t.Errorf("%s has %d bytes with CRC32C %x (%v), want %d with %x", o.Name, n, sum.Sum32(), err, o.Size, o.CRC32C)
		}
		if want, ok := acknowledged[o.Name]; ok && want != o.CRC32C {
			t.Errorf("%s has CRC32C %x, acknowledged was %x", o.Name, o.CRC32C, want)
		}
	}
	for name := range acknowledged {
		if !listed[name] {
			t.Errorf("%s was acknowledged and is gone", name)
		}
	}
	var open int
	if err := s.db.QueryRow(`SELECT count(*) FROM uploads WHERE generation = 0`).Scan(&open); err != nil {
		t.Fatal(err)
	}
	if files := dataFiles(t, s.dir); files != len(infos)+open {
		t.Errorf("%d data files, want %d objects and %d open uploads", files, len(infos), open)
	}
}

func dataFiles(t *testing.T, dir string) int {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "data", "*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return len(files)
}

// TestUploadSurvivesKill goes on with a resumable upload after its server was killed.
func TestUploadSurvivesKill(t *testing.T) {
	dir := t.TempDir()
	c := startChild(t, dir)
	client := newClient(t, endpoint(c.url)...)
	if err := client.Bucket("b-resume").Create(t.Context(), testProject, nil); err != nil {
		t.Fatal(err)
	}
	e := &env{target: target{client, c.url}, ctx: t.Context(), name: "b-resume", b: client.Bucket("b-resume")}
	url, err := e.startResumable("x")
	if err != nil {
		t.Fatal(err)
	}
	data := randomData(3 << 18)
	if err := e.chunk(url, "bytes 0-524287/*", data[:2<<18], 308, "bytes=0-524287"); err != nil {
		t.Fatal(err)
	}
	c.kill()

	again := startChild(t, dir)
	url = again.url + strings.TrimPrefix(url, c.url)
	e.b = newClient(t, option.WithEndpoint(again.url+"/storage/v1/"), option.WithoutAuthentication()).Bucket("b-resume")
	err = all(
		func() error { return e.missing("x") },
		func() error { return e.chunk(url, "bytes */*", "", 308, "bytes=0-524287") },
		func() error { return e.chunk(url, "bytes 524288-786431/786432", data[2<<18:], 200, "") },
		func() error { return e.has(e.b.Object("x"), data) },
	)
	if err != nil {
		t.Fatal(err)
	}
	again.kill()
	third := startChild(t, dir)
	if err := e.chunk(third.url+strings.TrimPrefix(url, again.url), "bytes */786432", "", 200, ""); err != nil {
		t.Errorf("state of a finished upload after a restart: %v", err)
	}
}
