// Package users resolves users and groups through getent and id, so that the
// site's NSS sources (OS Login, LDAP) are asked even by a static binary. It is
// the only way: os/user is banned.
package users

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/internal/command"
)

// User is one passwd entry.
type User struct {
	Name  string
	UID   uint32
	GID   uint32
	Home  string
	Shell string
}

// ErrUnknown is wrapped when no source knows the user or group.
var ErrUnknown = errors.New("unknown user or group")

// lookupTimeout bounds one getent: a directory server may be slow, not absent.
const lookupTimeout = 10 * time.Second

// ByID returns the user with that uid.
func ByID(ctx context.Context, uid uint32) (User, error) {
	return passwd(ctx, strconv.FormatUint(uint64(uid), 10))
}

// ByName returns the user with that name. A name of digits only is refused:
// getent would take it for a uid.
func ByName(ctx context.Context, name string) (User, error) {
	if name == "" || strings.HasPrefix(name, "-") || strings.Trim(name, "0123456789") == "" {
		return User{}, fmt.Errorf("user %q: %w", name, ErrUnknown)
	}
	return passwd(ctx, name)
}

func passwd(ctx context.Context, key string) (User, error) {
	out, err := getent(ctx, "passwd", key)
	if err != nil {
		return User{}, fmt.Errorf("user %q: %w", key, err)
	}
	f := strings.Split(strings.TrimSuffix(out, "\n"), ":")
	if len(f) < 7 {
		return User{}, fmt.Errorf("user %q: getent answered %q", key, out)
	}
	uid, err1 := strconv.ParseUint(f[2], 10, 32)
	gid, err2 := strconv.ParseUint(f[3], 10, 32)
	if err := errors.Join(err1, err2); err != nil {
		return User{}, fmt.Errorf("user %q: %w", key, err)
	}
	return User{Name: f[0], UID: uint32(uid), GID: uint32(gid), Home: f[5], Shell: f[6]}, nil
}

// GroupIDs returns all groups of the user, the primary one first.
func GroupIDs(ctx context.Context, name string) ([]uint32, error) {
	u, err := ByName(ctx, name)
	if err != nil {
		return nil, err
	}
	out, err := getent(ctx, "initgroups", name)
	if err != nil && !errors.Is(err, ErrUnknown) {
		return nil, fmt.Errorf("groups of %q: %w", name, err)
	}
	gids := []uint32{u.GID}
	words := strings.Fields(out)
	for i, w := range words {
		if i == 0 {
			continue // the name
		}
		g, err := strconv.ParseUint(w, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("groups of %q: %w", name, err)
		}
		if uint32(g) != u.GID {
			gids = append(gids, uint32(g))
		}
	}
	return gids, nil
}

// GroupID returns the gid of the group with that name.
func GroupID(ctx context.Context, name string) (uint32, error) {
	if name == "" || strings.HasPrefix(name, "-") || strings.Trim(name, "0123456789") == "" {
		return 0, fmt.Errorf("group %q: %w", name, ErrUnknown)
	}
	out, err := getent(ctx, "group", name)
	if err != nil {
		return 0, fmt.Errorf("group %q: %w", name, err)
	}
	f := strings.Split(strings.TrimSuffix(out, "\n"), ":")
	if len(f) < 3 {
		return 0, fmt.Errorf("group %q: getent answered %q", name, out)
	}
	gid, err := strconv.ParseUint(f[2], 10, 32)
	if err != nil {
		return 0, fmt.Errorf("group %q: %w", name, err)
	}
	return uint32(gid), nil
}

func getent(ctx context.Context, database, key string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	out, err := command.Run(ctx, command.Spec{Path: "getent", Args: []string{database, key}})
	var ce *command.Error
	if errors.As(err, &ce) && ce.Exit == 2 { // getent(1): key not found
		return "", ErrUnknown
	}
	return string(out), err
}
