package files

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sluicehpc/sluice/internal/command"
)

// DefaultStall is how long an operation may make no progress before it counts
// as hung. Lustre's I/O stops for minutes while an instance is upgraded; the
// caller repeats what hung.
const DefaultStall = time.Minute

// ErrHung is wrapped when the file system did not answer; repeat later.
var ErrHung = errors.New("the file system does not answer")

// User is whom an operation runs as.
type User struct {
	UID, GID uint32
	Groups   []uint32
}

// Client starts the operations. All methods may be called at the same time; each
// is idempotent: repeated after a crash at any moment, it completes its work.
// Failures that the user made are an *Error with Input set.
type Client struct {
	// Program and Args run Main: "/proc/self/exe" and ["fs"] by default.
	Program string
	Args    []string
	Env     []string // nil: command's default
	// Stall replaces DefaultStall.
	Stall time.Duration
	// Check says whether the mount is there and answers; nil: it is.
	Check func(mount string) error
}

// MkdirJob makes a job's directory for its user, and sluiced's own above it.
func (c *Client) MkdirJob(ctx context.Context, mount, jobDir string, uid, gid uint32) error {
	return c.run(ctx, "mkdir-job", request{Root: mount, Path: jobDir, UID: uid, GID: gid}, nil, nil, nil)
}

// Prepare returns the version if it is published already; else it makes the
// transfer's partial directory, or finds it, and returns nil.
func (c *Client) Prepare(ctx context.Context, mount, dataset, version, transfer string) (*Published, error) {
	var pub *Published
	err := c.run(ctx, "prepare", request{Root: mount, Dataset: dataset, Version: version, Transfer: transfer}, nil, nil, func(r reply) {
		if r.Published != nil {
			pub = r.Published
		}
	})
	return pub, err
}

// Verify compares the tree at path with the manifest (entries as JSON lines) and
// returns what differs, in words, at most twenty. progress, if not nil, is
// called with the files that are equal and the bytes read so far.
func (c *Client) Verify(ctx context.Context, mount, path string, manifest []byte, progress func(Progress)) (problems []string, err error) {
	err = c.run(ctx, "verify", request{Root: mount, Path: path}, nil, manifest, func(r reply) {
		if r.Problem != "" {
			problems = append(problems, r.Problem)
		}
		if r.Progress != nil && progress != nil {
			progress(*r.Progress)
		}
	})
	return problems, err
}

// Publish makes a verified partial directory the version, with its manifest beside it.
func (c *Client) Publish(ctx context.Context, mount string, p Published, manifest []byte) error {
	return c.run(ctx, "publish", request{Root: mount, Dataset: p.Dataset, Version: p.Version, Transfer: p.Transfer, Published: &p}, nil, manifest, nil)
}

// Gate makes the tree through which group gid reads a version.
func (c *Client) Gate(ctx context.Context, mount, dataset, version string, gid uint32) error {
	return c.run(ctx, "gate", request{Root: mount, Dataset: dataset, Version: version, GID: gid}, nil, nil, nil)
}

// Link makes, as the job's user, a symbolic link at to in a job's directory.
func (c *Client) Link(ctx context.Context, u User, mount, jobDir, to, target string) error {
	return c.run(ctx, "link", request{Root: mount, Path: jobDir, Below: to, Target: target}, &u, nil, nil)
}

// Manifest lists, as the job's user, the regular files below from in a job's
// directory. prefix is the length of what comes before a path in an object's
// name, in bytes. What is not exported is in skipped (at most a thousand).
func (c *Client) Manifest(ctx context.Context, u User, mount, jobDir, from string, prefix int, progress func(Progress)) (entries []Entry, skipped []Skipped, err error) {
	err = c.run(ctx, "manifest", request{Root: mount, Path: jobDir, Below: from, Prefix: prefix}, &u, nil, func(r reply) {
		switch {
		case r.Entry != nil:
			entries = append(entries, *r.Entry)
		case r.Skipped != nil && len(skipped) < 1000:
			skipped = append(skipped, *r.Skipped)
		case r.Progress != nil && progress != nil:
			progress(*r.Progress)
		}
	})
	if err != nil {
		return nil, nil, err
	}
	return entries, skipped, nil
}

// Hold links the files of a manifest into the transfer's export directory, which
// is root's alone. A file that is not the one that Manifest read, as the job's user,
// is an Error: what the service exports, it reads as root.
func (c *Client) Hold(ctx context.Context, mount, jobDir, from, transfer string, manifest []byte) error {
	return c.run(ctx, "hold", request{Root: mount, Path: jobDir, Below: from, Transfer: transfer}, nil, manifest, nil)
}

// Unlink removes, as the job's user, the files of the manifest that did not
// change since it was made.
func (c *Client) Unlink(ctx context.Context, u User, mount, jobDir, from string, manifest []byte) error {
	return c.run(ctx, "unlink", request{Root: mount, Path: jobDir, Below: from}, &u, manifest, nil)
}

// Remove deletes a job's directory, a partial or an export directory with all below it.
func (c *Client) Remove(ctx context.Context, mount, path string) error {
	return c.run(ctx, "remove", request{Root: mount, Path: path}, nil, nil, nil)
}

// Sweep removes the partial and export directories of all transfers but those in keep.
func (c *Client) Sweep(ctx context.Context, mount string, keep []string) (removed []string, err error) {
	err = c.run(ctx, "sweep", request{Root: mount, Keep: keep}, nil, nil, func(r reply) {
		if r.Removed != "" {
			removed = append(removed, r.Removed)
		}
	})
	return removed, err
}

// Lines renders entries as a manifest.
func Lines(entries []Entry) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	for _, e := range entries {
		enc.Encode(e) // strings and numbers into memory: cannot fail
	}
	return b.Bytes()
}

// ParseLines reads what Lines wrote.
func ParseLines(manifest []byte) ([]Entry, error) {
	var entries []Entry
	dec := json.NewDecoder(bytes.NewReader(manifest))
	for {
		var e Entry
		err := dec.Decode(&e)
		if errors.Is(err, io.EOF) {
			return entries, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read a manifest: %w", err)
		}
		entries = append(entries, e)
	}
}

func (c *Client) run(ctx context.Context, op string, r request, u *User, manifest []byte, each func(reply)) error {
	if c.Check != nil {
		if err := c.Check(r.Root); err != nil {
			return err
		}
	}
	r.Parent = os.Getpid()
	in, err := encodeLines(r, manifest)
	if err != nil {
		return fmt.Errorf("fs %s: %w", op, err)
	}
	spec := command.Spec{Path: c.Program, Args: append([]string{}, c.Args...), Env: c.Env, Dir: "/", Stdin: in}
	if spec.Path == "" {
		spec.Path, spec.Args = "/proc/self/exe", []string{"fs"}
	}
	spec.Args = append(spec.Args, op)
	if u != nil {
		spec.Credential = &syscall.Credential{Uid: u.UID, Gid: u.GID, Groups: u.Groups}
	}
	stall := c.Stall
	if stall == 0 {
		stall = DefaultStall
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timer := time.AfterFunc(stall, func() { cancel(ErrHung) })
	defer timer.Stop()
	out := &replies{each: func(r reply) {
		timer.Reset(stall)
		if each != nil {
			each(r)
		}
	}}
	spec.Stdout = out
	_, err = command.Run(ctx, spec)
	out.mu.Lock()
	defer out.mu.Unlock()
	switch {
	case out.err != nil:
		return out.err
	case out.failure != nil:
		return out.failure
	case err == nil && out.done:
		return nil
	case errors.Is(context.Cause(ctx), ErrHung):
		return fmt.Errorf("%s at %s: %w", op, filepath.Join(r.Root, r.Path), ErrHung)
	case err == nil:
		return fmt.Errorf("fs %s ended without a word", op)
	}
	return fmt.Errorf("fs %s: %w", op, err)
}

// maxLine bounds one reply in bytes.
const maxLine = 1 << 20

// replies parses a child's output as it comes.
type replies struct {
	each func(reply)

	mu      sync.Mutex // guards what follows
	rest    []byte
	done    bool
	failure *Error
	err     error
}

func (o *replies) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.rest = append(o.rest, p...)
	for {
		i := bytes.IndexByte(o.rest, '\n')
		if i < 0 {
			break
		}
		var r reply
		if err := json.Unmarshal(o.rest[:i], &r); err != nil && o.err == nil {
			o.err = fmt.Errorf("fs: reply %.80q: %w", o.rest[:i], err)
		}
		o.rest = o.rest[i+1:]
		if r.Error != nil {
			o.failure = r.Error
		}
		o.done = o.done || r.Done
		o.each(r)
	}
	if len(o.rest) > maxLine && o.err == nil {
		o.err = errors.New("fs: a reply is too long")
		o.rest = nil
	}
	return len(p), nil
}

// Shorten keeps a message short enough for squeue's Reason: its first line, at
// most 200 bytes.
func Shorten(message string) string {
	message, _, _ = strings.Cut(message, "\n")
	if len(message) <= 200 {
		return message
	}
	return strings.ToValidUTF8(message[:197], "") + "…"
}
