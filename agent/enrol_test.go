package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/internal/users"
)

// keys returns the keys that got certificates, and how often one was renewed.
func (s *sluiced) enrolments() (keys []string, renewed int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.enrolled), s.renewed
}

func lastError(a *Agent) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lastError
}

// A VM enrols once in its life: not at a restart of its agent, and not at a reboot.
func TestEnrolsOnce(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	a, stop := v.boot(nil)
	a.reported.wait(t.Context())
	st, err := os.Stat(v.root + credentialsFile)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v, want mode 0600", st, err)
	}
	stop()
	a, stop = v.boot(nil)
	a.reported.wait(t.Context())
	stop()
	if err := os.RemoveAll(v.root + "/run"); err != nil { // a reboot
		t.Fatal(err)
	}
	a, _ = v.boot(nil)
	a.reported.wait(t.Context())
	if keys, _ := s.enrolments(); len(keys) != 1 {
		t.Errorf("enrolled %d times, want once", len(keys))
	}
}

// The answer to an enrolment is lost, and the agent is killed before it asks again.
func TestLostAnswer(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	lost := func(_ context.Context, op string) error {
		if op == api.OpAgentReport {
			return api.Errorf(api.CodeUnavailable, "not now")
		}
		return nil
	}
	s.hook = lost
	_, stop := v.boot(nil)
	eventually(t, "the enrolment", func() bool { k, _ := s.enrolments(); return len(k) > 0 })
	stop()
	// What came of the answer is forgotten, but not the key.
	data, err := os.ReadFile(v.root + credentialsFile)
	if err != nil {
		t.Fatal(err)
	}
	key, _, _ := strings.Cut(string(data), "-----BEGIN CERTIFICATE")
	if err := os.WriteFile(v.root+credentialsFile, []byte(key), 0o600); err != nil {
		t.Fatal(err)
	}
	s.set(func(s *sluiced) { s.hook = nil })
	a, _ := v.boot(nil)
	a.reported.wait(t.Context())
	if keys, _ := s.enrolments(); len(keys) != 2 || keys[0] != keys[1] {
		t.Errorf("enrolled with %v, want twice with one key", keys)
	}
}

// sluiced has lost its store: agents enrol again, with the keys that they have.
func TestEnrolsAgainWhenSluicedForgot(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	a, _ := v.boot(nil)
	a.reported.wait(t.Context())
	s.set(func(s *sluiced) { s.revoked = true })
	eventually(t, "another enrolment", func() bool { k, _ := s.enrolments(); return len(k) == 2 && k[0] == k[1] })
	_, n := s.last()
	eventually(t, "reports", func() bool { _, m := s.last(); return m > n })
}

func TestEnrolmentIsRefused(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	s.hook = func(_ context.Context, op string) error {
		if op == api.OpAgentEnrol {
			return api.Errorf(api.CodeDenied, "enrolment refused: this VM has enrolled already, with another key")
		}
		return nil
	}
	v := newVM(t, s)
	a, _ := v.boot(nil)
	eventually(t, "the reason in the Prolog's answer", func() bool {
		r := v.prolog(1, aliceUID)
		return !r.Ready && r.Cause == "unknown" && strings.Contains(r.Reason, "with another key")
	})
	if u := v.units(); len(u) != 0 {
		t.Errorf("started %v", u)
	}
	s.set(func(s *sluiced) { s.hook = nil })
	a.reported.wait(t.Context())
}

func TestNoServiceAccount(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	v.metadata.noAccount = true
	a, _ := v.boot(nil)
	eventually(t, "the reason", func() bool { return strings.Contains(lastError(a), "runs under no service account") })
	v.metadata.set(func(m *attributes) { m.noAccount = false })
	a.reported.wait(t.Context())
}

// later is a clock that is ahead.
type later struct {
	clock.Clock
	by time.Duration
}

func (c later) Now() time.Time { return time.Now().Add(c.by) }

func TestCertificateIsRenewed(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	a, stop := v.boot(nil)
	a.reported.wait(t.Context())
	if _, renewed := s.enrolments(); renewed != 0 {
		t.Error("a new certificate was renewed")
	}
	before, err := os.ReadFile(v.root + credentialsFile)
	if err != nil {
		t.Fatal(err)
	}
	stop()
	// 20 of 30 days later.
	v.boot(func(a *Agent) { a.clock = later{clock.System, 20 * 24 * time.Hour} })
	eventually(t, "a new certificate", func() bool {
		after, err := os.ReadFile(v.root + credentialsFile)
		return err == nil && string(after) != string(before)
	})
	if keys, renewed := s.enrolments(); len(keys) != 1 || renewed == 0 {
		t.Errorf("enrolled %d times, renewed %d, want one enrolment and a renewal", len(keys), renewed)
	}
}

// The VM was off for longer than its certificate lives.
func TestCertificateHasEnded(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	a, stop := v.boot(nil)
	a.reported.wait(t.Context())
	stop()
	v.boot(func(a *Agent) { a.clock = later{clock.System, 40 * 24 * time.Hour} })
	eventually(t, "another enrolment with the same key", func() bool { k, _ := s.enrolments(); return len(k) >= 2 && k[0] == k[1] })
}

func TestKeyComesBeforeWhatNeedsIt(t *testing.T) {
	for _, tt := range []struct {
		role     api.Role
		services []string
		want     []string
	}{
		{api.RoleCompute, nil, []string{"start slurmd"}},
		{api.RoleCompute, []string{"munge"}, []string{"restart munge", "start slurmd"}},
		{api.RoleLogin, []string{"sackd"}, []string{"restart sackd"}},
	} {
		s := newSluiced(t, tt.role)
		s.keys.Services = tt.services
		s.hook = func(_ context.Context, op string) error {
			if op == api.OpAgentKeys {
				return api.Errorf(api.CodeUnavailable, "the controller cannot read its key")
			}
			return nil
		}
		v := newVM(t, s)
		path := v.root + "/etc/slurm/slurm.key"
		change := func(a *Agent) {
			a.pace.grace = time.Millisecond
			systemctl := a.systemctl
			a.systemctl = func(ctx context.Context, verb, unit string) error {
				if st, err := os.Stat(path); err != nil || st.Mode() != 0o600 || st.Sys().(*syscall.Stat_t).Uid != slurmUID {
					t.Errorf("%s %s: the key: %v, %v, want SlurmUser's alone", verb, unit, st, err)
				}
				return systemctl(ctx, verb, verb+" "+unit)
			}
		}
		a, stop := v.boot(change)
		eventually(t, "the trouble in a report", func() bool {
			r, _ := s.last()
			return r.ReadyAt == "" && strings.Contains(r.Trouble, "cannot read its key") && len(r.Mounts) == 1 && r.Mounts[0].State == "ok"
		})
		if u := v.units(); len(u) != 0 {
			t.Errorf("%s: started %v before the key was there", tt.role, u)
		}
		s.set(func(s *sluiced) { s.hook = nil })
		a.reported.wait(t.Context())
		eventually(t, "the services", func() bool { return slices.Equal(v.units(), tt.want) })
		if data, err := os.ReadFile(path); err != nil || string(data) != string(slurmKey) {
			t.Errorf("the key: %q, %v", data, err)
		}
		if r, _ := s.last(); r.Trouble != "" {
			t.Errorf("trouble %q", r.Trouble)
		}
		// A restart of the agent starts nothing that an admin has stopped.
		stop()
		a, stop = v.boot(change)
		a.reported.wait(t.Context())
		_, n := s.last()
		eventually(t, "reports", func() bool { _, m := s.last(); return m > n+2 })
		if u := v.units(); !slices.Equal(u, tt.want) {
			t.Errorf("%s: after a restart: %v, want %v", tt.role, u, tt.want)
		}
		// The next start finds another key on the controller.
		stop()
		s.set(func(s *sluiced) { s.keys.Files[0].Data = []byte("another") })
		v.boot(change)
		eventually(t, "the new key", func() bool { data, _ := os.ReadFile(path); return string(data) == "another" })
		want := append(slices.Clone(tt.want), slices.DeleteFunc(slices.Clone(tt.want), func(u string) bool { return u == "start slurmd" })...)
		eventually(t, "the services that read it", func() bool { return slices.Equal(v.units(), want) })
	}
}

// sluiced is slow to send the key: nothing that needs it starts meanwhile.
func TestKeyIsWaitedFor(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	sent := make(chan struct{})
	s.hook = func(ctx context.Context, op string) error {
		if op == api.OpAgentKeys {
			select {
			case <-sent:
			case <-ctx.Done():
			}
		}
		return nil
	}
	v := newVM(t, s)
	v.boot(func(a *Agent) { a.pace.grace = time.Millisecond })
	eventually(t, "a mount and no key in several reports", func() bool {
		r, n := s.last()
		return n > 5 && len(r.Mounts) == 1 && r.Mounts[0].State == "ok" && strings.Contains(r.Trouble, "has not come yet")
	})
	if r, u := v.prolog(1, aliceUID), v.units(); r.Ready || len(u) != 0 {
		t.Errorf("without the key: Prolog %+v, started %v", r, u)
	}
	close(sent)
	eventually(t, "slurmd", func() bool { return slices.Equal(v.units(), []string{"slurmd"}) })
}

// The key's directory may belong to a user: nothing but a plain file is touched.
func TestKeyFileIsNoTrap(t *testing.T) {
	v := newVM(t, newSluiced(t, api.RoleCompute))
	a := New(Defaults, nil)
	a.config.Root = v.root
	a.user = func(context.Context, string) (users.User, error) {
		return users.User{UID: slurmUID, GID: slurmUID}, nil
	}
	dir := filepath.Join(v.root, "etc/slurm")
	victim := filepath.Join(v.root, "victim")
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(victim, []byte("a secret"), 0o640)); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "slurm.key")
	f := api.KeyFile{Path: "/etc/slurm/slurm.key", Owner: "slurm", Data: []byte("a secret")}
	for name, make := range map[string]func() error{
		"a symlink":   func() error { return os.Symlink(victim, path) },
		"a hard link": func() error { return os.Link(victim, path) },
		"a directory": func() error { return os.Mkdir(path, 0o755) },
		"a pipe":      func() error { return syscall.Mkfifo(path, 0o600) },
	} {
		if err := make(); err != nil {
			t.Fatal(err)
		}
		if _, err := a.place(t.Context(), f); err == nil {
			t.Errorf("%s: no error", name)
		}
		if st, err := os.Stat(victim); err != nil || st.Sys().(*syscall.Stat_t).Uid != 0 || st.Mode() != 0o640 {
			t.Errorf("%s: the victim: %v, %v", name, st, err)
		}
		os.Remove(path)
	}
	for _, bad := range []string{"", "slurm.key", "/etc/../slurm.key", "/etc/slurm/"} {
		f := f
		f.Path = bad
		if _, err := a.place(t.Context(), f); err == nil {
			t.Errorf("path %q: no error", bad)
		}
	}
}

func (v *vm) isGuarded() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.guarded
}

func TestMetadataIsGuardedBeforeSlurmd(t *testing.T) {
	s := newSluiced(t, api.RoleCompute)
	v := newVM(t, s)
	v.guardErr = errors.New("no nf_tables in this kernel")
	a, _ := v.boot(func(a *Agent) {
		systemctl := a.systemctl
		a.systemctl = func(ctx context.Context, verb, unit string) error {
			if !v.isGuarded() {
				t.Errorf("%s %s while users reach the metadata server", verb, unit)
			}
			return systemctl(ctx, verb, unit)
		}
	})
	eventually(t, "the trouble in a report", func() bool {
		r, _ := s.last()
		return strings.Contains(r.Trouble, "users can reach the metadata server: no nf_tables") && r.ReadyAt == ""
	})
	if r := v.prolog(1, aliceUID); r.Ready || r.Cause != "unknown" {
		t.Errorf("a Prolog: %+v, want not ready and nobody's fault yet", r)
	}
	if u := v.units(); len(u) != 0 {
		t.Errorf("started %v", u)
	}
	v.mu.Lock()
	v.guardErr = nil
	v.mu.Unlock()
	a.reported.wait(t.Context())
	eventually(t, "slurmd", func() bool { return len(v.units()) == 1 })
	// Somebody flushes the rules.
	v.mu.Lock()
	v.guarded = false
	v.mu.Unlock()
	eventually(t, "the guard again", v.isGuarded)
	// sluice.yaml opens it, also for the next start.
	s.set(func(s *sluiced) { s.answer.OpenMetadata = true })
	eventually(t, "an open metadata server", func() bool { return !v.isGuarded() })
	s.set(func(s *sluiced) { s.answer.OpenMetadata = false })
	eventually(t, "the guard again", v.isGuarded)
}

// The guard stands before the VM has enrolled: users may be faster than sluiced.
func TestGuardDoesNotWaitForSluiced(t *testing.T) {
	s := newSluiced(t, api.RoleLogin)
	s.stop()
	v := newVM(t, s)
	v.boot(func(a *Agent) { a.pace.guard = time.Hour })
	eventually(t, "the guard", v.isGuarded)
}
