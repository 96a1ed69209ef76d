package users

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/internal/command"
)

// fakeGetent puts a getent first in PATH. Its users have uids of OS Login's size.
func fakeGetent(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	script := `#!/bin/sh
case "$1 $2" in
"passwd alice_example_com"|"passwd 2733216754") echo "alice_example_com:x:2733216754:2733216754::/home/alice:/bin/bash" ;;
"group trial") echo "trial:*:2733216999:alice,bob" ;;
"group odd") echo "odd" ;;
"passwd odd") echo "odd:x" ;;
"passwd worse") echo "worse:x:minus:1::/:/bin/sh" ;;
"passwd lonely") echo "lonely:x:3:3::/:/bin/sh" ;;
"passwd broken") echo "no directory" >&2; exit 3 ;;
"initgroups alice_example_com") echo "alice_example_com 100 2733216754 200" ;;
"initgroups "*) exit 2 ;;
*) exit 2 ;;
esac
`
	if err := os.WriteFile(filepath.Join(dir, "getent"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

func TestLookup(t *testing.T) {
	fakeGetent(t)
	ctx := context.Background()
	want := User{Name: "alice_example_com", UID: 2733216754, GID: 2733216754, Home: "/home/alice", Shell: "/bin/bash"}
	for what, f := range map[string]func() (User, error){
		"by name": func() (User, error) { return ByName(ctx, "alice_example_com") },
		"by id":   func() (User, error) { return ByID(ctx, 2733216754) },
	} {
		got, err := f()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	if gid, err := GroupID(ctx, "trial"); err != nil || gid != 2733216999 {
		t.Errorf("group trial: %d, %v, want 2733216999", gid, err)
	}
	if gid, err := GroupID(ctx, "odd"); err == nil || errors.Is(err, ErrUnknown) {
		t.Errorf("a broken answer: %d, %v, want an error that is no verdict", gid, err)
	}
	groups, err := GroupIDs(ctx, "alice_example_com")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]uint32{2733216754, 100, 200}, groups); diff != "" {
		t.Errorf("groups (-want +got):\n%s", diff)
	}
	if groups, err := GroupIDs(ctx, "lonely"); err != nil || len(groups) != 1 || groups[0] != 3 {
		t.Errorf("a user without further groups: %v, %v", groups, err)
	}
}

func TestUnknown(t *testing.T) {
	fakeGetent(t)
	ctx := context.Background()
	// A name of digits would be looked up as a uid, and one with a dash be an option.
	for _, name := range []string{"nobody-here", "", "0", "1000", "-s", "--service=files"} {
		if _, err := ByName(ctx, name); !errors.Is(err, ErrUnknown) {
			t.Errorf("ByName(%q): %v", name, err)
		}
		if _, err := GroupIDs(ctx, name); !errors.Is(err, ErrUnknown) {
			t.Errorf("GroupIDs(%q): %v", name, err)
		}
		if _, err := GroupID(ctx, name); !errors.Is(err, ErrUnknown) {
			t.Errorf("GroupID(%q): %v", name, err)
		}
	}
	if _, err := ByID(ctx, 4711); !errors.Is(err, ErrUnknown) {
		t.Errorf("ByID: %v", err)
	}
}

func TestBadAnswers(t *testing.T) {
	fakeGetent(t)
	for name, want := range map[string]string{"odd": "getent answered", "worse": "invalid syntax", "broken": "no directory"} {
		_, err := ByName(context.Background(), name)
		if err == nil || errors.Is(err, ErrUnknown) || !strings.Contains(err.Error(), want) {
			t.Errorf("ByName(%q): %v, want an error with %q", name, err, want)
		}
	}
	var ce *command.Error
	if _, err := ByName(context.Background(), "broken"); !errors.As(err, &ce) || ce.Exit != 3 {
		t.Errorf("a directory that fails: %v", err)
	}
}

func TestRootIsKnown(t *testing.T) {
	u, err := ByID(context.Background(), 0)
	if err != nil || u.Name != "root" || u.UID != 0 {
		t.Errorf("got %+v, %v", u, err)
	}
}
