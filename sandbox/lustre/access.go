package lustre

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"

	"github.com/sluicehpc/sluice/sandbox/iam"
)

// authorize decides on a call: permission on a resource ("projects/P/locations/…").
func (s *Server) authorize(r *http.Request, permission, resource string) error {
	if s.options.IAM == nil {
		return nil
	}
	return s.options.IAM.Authorize(r, permission, resource)
}

// dataAccount is the account as which a transfer reads or writes the bucket: the one given (whoever calls must be allowed to act as it), or
// the service's own agent.
func (s *Server) dataAccount(r *http.Request, given string) (string, error) {
	access := s.options.IAM
	if access == nil {
		return given, nil
	}
	if given == "" {
		return access.LustreAgent(), nil
	}
	if err := access.Authorize(r, "iam.serviceAccounts.actAs", access.Account(given)); err != nil {
		return "", err
	}
	if !access.Exists(given) {
		return "", &rpcError{codeNotFound, fmt.Sprintf("service account %q was not found", given)}
	}
	return given, nil
}

// bucketAs is the object storage as an account sees it. The service's agent must be allowed to get tokens of any other account.
func (s *Server) bucketAs(account string) (Bucket, error) {
	access := s.options.IAM
	if access == nil {
		return s.options.Bucket, nil
	}
	if agent := access.LustreAgent(); account != agent {
		if err := access.Check(agent, "iam.serviceAccounts.getAccessToken", access.Account(account)); err != nil {
			return nil, &rpcError{codePermissionDenied, fmt.Sprintf("%s cannot get a token of %s: %v", agent, account, err)}
		}
	}
	return guarded{s.options.Bucket, access, account}, nil
}

// guarded asks IAM before every access.
type guarded struct {
	Bucket
	iam     *iam.Server
	account string
}

// deniedError is an access that an account has not.
type deniedError struct{ account, permission, kind string }

func (e *deniedError) Error() string {
	return fmt.Sprintf("%s does not have %s access to the Google Cloud Storage %s. Permission '%[2]s' denied on resource (or it may not exist).",
		e.account, e.permission, e.kind)
}

func (e *deniedError) Is(target error) bool { return target == fs.ErrPermission }

func (g guarded) check(permission, bucket, object string) error {
	resource, kind := iam.Bucket(bucket), "bucket"
	if object != "" {
		resource, kind = iam.Object(bucket, object), "object"
	}
	if g.iam.Check(g.account, permission, resource) == nil {
		return nil
	}
	return &deniedError{g.account, permission, kind}
}

func (g guarded) List(bucket, prefix string) ([]Object, error) {
	if err := g.check("storage.objects.list", bucket, ""); err != nil {
		// That a bucket does not exist is no secret.
		if _, missing := g.Bucket.List(bucket, nothing); errors.Is(missing, fs.ErrNotExist) {
			return nil, missing
		}
		return nil, err
	}
	return g.Bucket.List(bucket, prefix)
}

func (g guarded) Stat(bucket, name string) (Object, error) {
	if err := g.check("storage.objects.get", bucket, name); err != nil {
		return Object{}, err
	}
	return g.Bucket.Stat(bucket, name)
}

func (g guarded) Open(bucket, name string) (io.ReadCloser, error) {
	if err := g.check("storage.objects.get", bucket, name); err != nil {
		return nil, err
	}
	return g.Bucket.Open(bucket, name)
}

func (g guarded) Create(bucket, name string) (ObjectWriter, error) {
	if err := g.check("storage.objects.create", bucket, name); err != nil {
		return nil, err
	}
	if _, err := g.Bucket.Stat(bucket, name); err == nil {
		if err := g.check("storage.objects.delete", bucket, name); err != nil {
			return nil, err
		}
	}
	return g.Bucket.Create(bucket, name)
}
