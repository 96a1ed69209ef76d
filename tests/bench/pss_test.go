package bench_test

import (
	"bytes"
	"os"
	"os/exec"
	"testing"

	"github.com/sluicehpc/sluice/tests/bench"
)

// A grandchild that touches 64 MiB counts.
func TestTreePSS(t *testing.T) {
	// bash reads its input into a variable, says so, and waits.
	cmd := exec.Command("bash", "-c", `bash -c 'x=$(head -c 67108864 /dev/zero | tr "\0" x); echo read; read -r _; echo ${#x}'; true`)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer in.Close()
	word := make([]byte, 5)
	if _, err := out.Read(word); err != nil || !bytes.Equal(bytes.TrimSpace(word), []byte("read")) {
		t.Fatalf("the child said %q, %v", word, err)
	}
	got, err := bench.TreePSS(os.Getpid())
	if err != nil || got < 64<<20 {
		t.Errorf("TreePSS = %.0f, %v, want at least 64 MiB", got, err)
	}
	alone, err := bench.TreePSS(cmd.Process.Pid)
	if err != nil || alone < 64<<20 || alone >= got {
		t.Errorf("TreePSS of the child = %.0f, %v, want 64 MiB and less than ours", alone, err)
	}
	if _, err := bench.TreePSS(1 << 30); err == nil {
		t.Error("TreePSS of no process is no error")
	}
}
