package rootfs

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestFind(t *testing.T) {
	for _, tc := range []struct{ prefix, want string }{
		{"", "trixie"}, {"24.11", "trixie"}, {"24", "trixie"}, {"24.11.5", "trixie"}, {"22.05", "bookworm"}, {"26", "sid"},
	} {
		if got, err := Find(tc.prefix); err != nil || got.Suite != tc.want {
			t.Errorf("Find(%q) = %q, %v, want %q", tc.prefix, got.Suite, err, tc.want)
		}
	}
	for _, bad := range []string{"2", "24.1", "99.01", "../x"} {
		if _, err := Find(bad); !errors.Is(err, ErrUnknownSlurm) {
			t.Errorf("Find(%q) = %v, want ErrUnknownSlurm", bad, err)
		}
	}
}

func TestMirrors(t *testing.T) {
	got := mirrors([]byte("http://mirror.example/debian/\nhttp://mirror.example/debian/\nfile:/srv/debian/\nhttps://other.example/apt/\n"))
	want := []string{"http://mirror.example/debian/", "https://other.example/apt/"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("mirrors (-want +got):\n%s", diff)
	}
}

func TestParseProxies(t *testing.T) {
	got := parseProxies([]byte("Acquire \nAcquire::http::Proxy http://proxy.example:3128\nAcquire::https::Proxy DIRECT\nAcquire::http::Proxy::host x\n"))
	if diff := cmp.Diff(proxies{"http": "http://proxy.example:3128"}, got); diff != "" {
		t.Errorf("proxies (-want +got):\n%s", diff)
	}
}

func TestLockWaitsAndGivesUp(t *testing.T) {
	path := t.TempDir() + "/lock"
	unlock, err := lock(context.Background(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := lock(ctx, path); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("second lock = %v, want DeadlineExceeded", err)
	}
	unlock()
	again, err := lock(context.Background(), path)
	if err != nil {
		t.Fatal(err)
	}
	again()
}

func TestDifferentRecipesHaveDifferentNames(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range Releases {
		seen[r.name()] = true
	}
	r := Releases[0]
	r.Packages = append(r.Packages[:len(r.Packages):len(r.Packages)], "one-more")
	seen[r.name()] = true
	if got, want := len(seen), len(Releases)+1; got != want {
		t.Errorf("%d names, want %d", got, want)
	}
}

// TestEnsure builds the default root once, in the real cache, and then only looks at it.
func TestEnsure(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	dir, err := Ensure(context.Background(), Options{Cache: Cache(), Log: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"usr/sbin/slurmctld-wlm", "usr/sbin/slurmdbd", "usr/sbin/slurmd-wlm", "usr/bin/srun", "usr/sbin/mariadbd", "var/lib/mysql/slurm_acct_db"} {
		if _, err := os.Stat(dir + "/" + f); err != nil {
			t.Errorf("the root lacks %s: %v", f, err)
		}
	}
}
