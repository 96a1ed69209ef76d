package staging

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"strings"

	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/storage"
	"github.com/sluicehpc/sluice/staging/files"
)

// Bucket is what staging needs of Cloud Storage; *storage.Client is it.
type Bucket interface {
	ListPrefix(ctx context.Context, p storage.Place) iter.Seq2[storage.Object, error]
	Check(ctx context.Context, p storage.Place) error
}

// Error is a failure in words for a person. Its message is one line that
// stands for itself: it ends in squeue's Reason.
type Error struct {
	Message string
	Hint    string
	Err     error // the cause, or nil
}

func (e *Error) Error() string { return e.Message }
func (e *Error) Unwrap() error { return e.Err }

// Listing is a dataset's content at one moment.
type Listing struct {
	Version string // fingerprint of names, generations, sizes and checksums
	Entries []files.Entry
	Objects int64 // all objects, those that stand for directories included
	Bytes   int64
}

// DatasetID names a bucket prefix: stable, and readable in a path.
func DatasetID(bucket, prefix string) string {
	sum := sha256.Sum256([]byte("gs://" + bucket + "/" + prefix))
	slug := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-' || r == '_' || r == '.' {
			return r
		}
		return '-'
	}, strings.ToLower(bucket+"-"+strings.TrimSuffix(prefix, "/")))
	if len(slug) > 60 {
		slug = slug[:60]
	}
	return strings.Trim(slug, "-._") + "-" + hex.EncodeToString(sum[:6])
}

// List lists a place. An object whose name cannot be a file's is an error, and
// so are two that cannot both be: nothing has moved yet.
func List(ctx context.Context, b Bucket, p storage.Place, allowEmpty bool) (Listing, error) {
	url := p.String()
	var l Listing
	h := sha256.New()
	bad := func(name, why string) error {
		return &Error{
			Message: files.Shorten(fmt.Sprintf("%s: object %.80q cannot be a file: %s", url, name, why)),
			Hint:    "rename or delete the object, or stage in a prefix without it",
		}
	}
	known := map[string]bool{} // files; directories that files imply end in a slash
	for o, err := range b.ListPrefix(ctx, p) {
		if err != nil {
			return Listing{}, BucketError(p, err)
		}
		path := strings.TrimPrefix(o.Name, p.Prefix)
		fmt.Fprintf(h, "%q %d %d %08x\n", path, o.Generation, o.Size, o.CRC32C)
		l.Objects++
		l.Bytes += o.Size
		if path == "" && o.Size == 0 {
			continue // the prefix itself as a directory
		}
		e := files.Entry{Path: path, Size: o.Size, CRC32C: o.CRC32C}
		if strings.HasSuffix(path, "/") {
			if o.Size != 0 {
				return Listing{}, bad(o.Name, "its name ends in a slash and it is not empty")
			}
			e = files.Entry{Path: strings.TrimSuffix(path, "/"), Dir: true}
		}
		if why := files.CheckName(e.Path); why != "" {
			return Listing{}, bad(o.Name, why)
		}
		if !e.Dir {
			known[e.Path] = true
		} else {
			known[e.Path+"/"] = true
		}
		for i := strings.LastIndexByte(e.Path, '/'); i > 0; i = strings.LastIndexByte(e.Path[:i], '/') {
			if known[e.Path[:i+1]] {
				break
			}
			known[e.Path[:i+1]] = true
		}
		l.Entries = append(l.Entries, e)
	}
	for _, e := range l.Entries {
		if !e.Dir && known[e.Path+"/"] {
			return Listing{}, bad(p.Prefix+e.Path, "other objects have it as their directory")
		}
	}
	if len(l.Entries) == 0 && !allowEmpty {
		return Listing{}, &Error{
			Message: files.Shorten(url + ": no object has this prefix"),
			Hint:    "check the prefix, or write allow_empty=yes",
		}
	}
	l.Version = hex.EncodeToString(h.Sum(nil)[:16])
	return l, nil
}

// BucketError says in words why a place cannot be used.
func BucketError(p storage.Place, err error) error {
	e := &Error{Err: err}
	denied, _ := gcp.IsDenied(err)
	switch {
	case errors.Is(err, storage.ErrNotFound):
		e.Message, e.Hint = p.String()+": bucket does not exist", "check the bucket's name"
	case errors.Is(err, storage.ErrAccount):
		e.Message = fmt.Sprintf("%s: sluiced may not act as %s%s", p, p.Account, lacks(denied))
		e.Hint = "ask the site's admin to give sluiced's service account roles/iam.serviceAccountTokenCreator on " + p.Account
	case errors.Is(err, storage.ErrDenied):
		e.Message = fmt.Sprintf("%s: the bucket may not be read as %s%s", p, p.Account, lacks(denied))
		e.Hint = fmt.Sprintf("ask the site's admin to give %s roles/storage.objectUser on gs://%s", p.Account, p.Bucket)
	default:
		return fmt.Errorf("list %s: %w", p, err)
	}
	e.Message = files.Shorten(e.Message)
	return e
}

// lacks names the permission that is missing.
func lacks(d gcp.Denied) string {
	if d.Permission == "" {
		return ""
	}
	return ": it lacks " + d.Permission
}

// denied makes a refusal for want of a permission final, with the permission's
// name; other errors pass.
func denied(err error) error {
	d, ok := gcp.IsDenied(err)
	if _, said := errors.AsType[*Error](err); said || !ok {
		return err
	}
	e := &Error{Err: err, Hint: "ask the site's admin to give sluiced's service account the roles of docs/permissions.md; sluice status shows what it lacks"}
	switch {
	case d.Permission == "":
		e.Message = "sluiced lacks a permission: " + d.Message
	case d.Resource == "":
		e.Message = "sluiced lacks " + d.Permission
	default:
		e.Message = fmt.Sprintf("sluiced lacks %s on %s", d.Permission, d.Resource)
	}
	e.Message = files.Shorten(e.Message)
	return e
}
