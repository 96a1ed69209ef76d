package storage

import (
	"encoding/xml"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	raw "google.golang.org/api/storage/v1"

	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/iam"
)

// refusal is an apiError that IAM gave cause for.
type refusal struct {
	*apiError
	cause *iam.Error
}

func (r *refusal) Unwrap() error { return r.apiError }

// refuse puts IAM's refusal into the service's words.
func refuse(cause *iam.Error, bucket, object string) error {
	kind := "project"
	switch {
	case object != "":
		kind = "Storage object"
	case bucket != "":
		kind = "Storage bucket"
	}
	who := cause.Caller
	if who == "" {
		who = "Anonymous caller"
	}
	e := &apiError{cause.Code(), "forbidden", fmt.Sprintf("%s does not have %s access to the Google Cloud %s. Permission '%[2]s' denied on resource (or it may not exist).",
		who, cause.Permission, kind)}
	switch cause.Reason {
	case iam.NoCredentials:
		e.reason = "required"
	case iam.BadToken, iam.ExpiredToken:
		e.reason, e.message = "authError", "Invalid Credentials"
	case iam.ShortScope:
		e.message = "Provided scope(s) are not authorized"
	}
	return &refusal{e, cause}
}

// xmlError is the refusal as the XML API says it.
func (r *refusal) xmlError() any {
	body := struct {
		XMLName xml.Name `xml:"Error"`
		Code    string
		Message string
		Details string
	}{Code: "AccessDenied", Message: "Access denied.", Details: r.message}
	if r.code == http.StatusUnauthorized {
		body.Code, body.Message = "AuthenticationRequired", "Authentication required."
	}
	return body
}

// authorize is the one place where a request is allowed or refused: permission on object (or on bucket, where object is
// empty, or on the project, where both are).
func (s *Server) authorize(r *http.Request, permission, bucket, object string) error {
	resource := "projects/" + s.project
	switch {
	case object != "":
		resource = iam.Object(bucket, object)
	case bucket != "":
		resource = iam.Bucket(bucket)
	}
	return s.judge(r, bucket, object, permission, func() error { return s.iam.Authorize(r, permission, resource) })
}

// authorizeList is authorize for a listing of the objects whose names begin with prefix.
func (s *Server) authorizeList(r *http.Request, bucket, prefix string) error {
	return s.judge(r, bucket, "", "storage.objects.list", func() error { return s.iam.AuthorizeList(r, bucket, prefix) })
}

func (s *Server) judge(r *http.Request, bucket, object, permission string, ask func() error) error {
	if denied, on := s.faults.Get(faults.StorageDeny); on && bucket == denied {
		request := permission
		if r != nil {
			request = r.Method + " " + r.URL.Path
		}
		s.faults.Note(faults.StorageDeny, nil, request, "refused with 403")
		return &apiError{http.StatusForbidden, "forbidden", "The caller does not have " + permission + " access to the Google Cloud Storage bucket " + bucket + "."}
	}
	if s.iam == nil {
		return nil
	}
	err := ask()
	cause, ok := errors.AsType[*iam.Error](err)
	if !ok {
		return err
	}
	if cause.Reason == iam.Denied && bucket != "" {
		// Whoever is somebody learns that a bucket does not exist.
		if _, err := findBucket(r.Context(), s.db, bucket); err != nil {
			return err
		}
	}
	return refuse(cause, bucket, object)
}

// authorizeWrite is authorize for a new object. A caller who may not delete it may make it only where the name is free, which p sees to.
func (s *Server) authorizeWrite(r *http.Request, bucket, name string, p *Preconditions) error {
	if err := s.authorize(r, "storage.objects.create", bucket, name); err != nil {
		return err
	}
	p.occupied = s.authorize(r, "storage.objects.delete", bucket, name)
	return nil
}

// admit decides on a call before its handler runs, as far as its path and parameters tell what it is about.
func (s *Server) admit(c *call, rt route) error {
	switch {
	case rt.permission == everyAccount || rt.late:
		if s.iam == nil {
			return nil
		}
		if cause, ok := errors.AsType[*iam.Error](s.iam.Authenticate(c.r)); ok {
			if cause.Permission = rt.permission; rt.permission == everyAccount {
				cause.Permission = "storage.buckets.get"
			}
			return refuse(cause, c.bucket, c.object)
		}
		return nil
	case rt.permission == "storage.objects.list":
		return s.authorizeList(c.r, c.bucket, c.q.Get("prefix"))
	}
	return s.authorize(c.r, rt.permission, c.bucket, c.object)
}

// hide keeps from callers who may not list a bucket which objects it has: what is not there looks forbidden, as in the service.
func (s *Server) hide(c *call, err error) error {
	if e, ok := errors.AsType[*apiError](err); !ok || e.code != http.StatusNotFound || e == errNoBucket || e == errNoUpload || c.bucket == "" || c.object == "" {
		return err
	}
	if denied := s.authorizeList(c.r, c.bucket, ""); denied != nil {
		return denied
	}
	return err
}

var errNoIAM = &apiError{http.StatusNotImplemented, "notImplemented", "This server has no IAM."}

// policyJSON is a bucket's policy as the API shows it.
func policyJSON(bucket string, p iam.Policy) map[string]any {
	bindings := p.Bindings
	if bindings == nil {
		bindings = []iam.Binding{}
	}
	return map[string]any{
		"kind": "storage#policy", "resourceId": iam.Bucket(bucket), "version": p.Version, "etag": p.Etag, "bindings": bindings,
	}
}

func (s *Server) getPolicy(c *call) error {
	if s.iam == nil {
		return errNoIAM
	}
	if _, err := findBucket(c.r.Context(), s.db, c.bucket); err != nil {
		return err
	}
	version := 0
	if v := c.q.Get("optionsRequestedPolicyVersion"); v != "" {
		var err error
		if version, err = strconv.Atoi(v); err != nil {
			return invalid("Invalid value for optionsRequestedPolicyVersion: %q.", v)
		}
	}
	p, err := s.iam.GetPolicy(iam.Bucket(c.bucket), version)
	if err != nil {
		return invalid("%v", err)
	}
	return c.reply(policyJSON(c.bucket, p))
}

func (s *Server) setPolicy(c *call) error {
	if s.iam == nil {
		return errNoIAM
	}
	var in struct {
		iam.Policy
		Kind       string `json:"kind"`
		ResourceID string `json:"resourceId"`
	}
	if err := c.body(&in); err != nil {
		return err
	}
	if _, err := findBucket(c.r.Context(), s.db, c.bucket); err != nil {
		return err
	}
	p, err := s.iam.SetPolicy(iam.Bucket(c.bucket), in.Policy)
	if errors.Is(err, iam.ErrStale) {
		return errPrecondition
	}
	if err != nil {
		return invalid("%v", err)
	}
	return c.reply(policyJSON(c.bucket, p))
}

func (s *Server) testPermissions(c *call) error {
	if s.iam == nil {
		return errNoIAM
	}
	if _, err := findBucket(c.r.Context(), s.db, c.bucket); err != nil {
		return err
	}
	have, err := s.iam.TestPermissions(c.r, iam.Bucket(c.bucket), c.q["permissions"])
	if err != nil {
		return invalid("%v", err)
	}
	return c.reply(&raw.TestIamPermissionsResponse{Kind: "storage#testIamPermissionsResponse", Permissions: have})
}
