package iam

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"net/http"
	"slices"
	"strings"
	"time"
)

// Policy is who may do what on a project, a bucket or an account.
type Policy struct {
	Version      int             `json:"version"`
	Bindings     []Binding       `json:"bindings,omitempty"`
	Etag         []byte          `json:"etag,omitempty"`
	AuditConfigs json.RawMessage `json:"auditConfigs,omitempty"`
}

// Binding gives a role to members, under a condition if there is one.
type Binding struct {
	Role      string   `json:"role"`
	Members   []string `json:"members,omitempty"`
	Condition *Expr    `json:"condition,omitempty"`
	holds     func(attributes) bool
}

// Expr is a google.type.Expr.
type Expr struct {
	Expression  string `json:"expression"`
	Title       string `json:"title,omitempty"`
	Description string `json:"description,omitempty"`
	Location    string `json:"location,omitempty"`
}

// ErrStale is what SetPolicy returns for a policy that changed meanwhile; its other errors say what is wrong with the policy.
var ErrStale error = &apiError{http.StatusConflict, "ABORTED", "There were concurrent policy changes. Please retry the whole read-modify-write with exponential backoff. The request's ETag did not match the current policy's ETag."}

// stamp gives a policy a new etag and fills in what it is decided by. s.mu is held, or s is not yet shared.
func (s *Server) stamp(p *Policy) {
	s.changes++
	p.Etag = etagOf(s.changes)
	p.Version = 1
	for i := range p.Bindings {
		b := &p.Bindings[i]
		b.holds = func(attributes) bool { return true }
		if b.Condition != nil {
			p.Version = 3
			if c, err := parseCondition(b.Condition.Expression); err == nil {
				b.holds = c
			} else {
				b.holds = func(attributes) bool { return false }
			}
		}
	}
}

// bucketPolicy is that of a bucket, or the one that a new bucket has. s.mu is held.
func (s *Server) bucketPolicy(bucket string) *Policy {
	if p := s.policies[Bucket(bucket)]; p != nil {
		return p
	}
	writers := []string{"projectEditor:" + s.project, "projectOwner:" + s.project}
	readers := []string{"projectViewer:" + s.project}
	p := &Policy{Bindings: []Binding{
		{Role: "roles/storage.legacyBucketOwner", Members: writers},
		{Role: "roles/storage.legacyBucketReader", Members: readers},
		{Role: "roles/storage.legacyObjectOwner", Members: writers},
		{Role: "roles/storage.legacyObjectReader", Members: readers},
	}}
	s.stamp(p)
	s.policies[Bucket(bucket)] = p
	return p
}

// policy is that of a project, bucket or account. s.mu is held.
func (s *Server) policy(resource string) *Policy {
	if bucket, ok := bucketOf(resource); ok {
		return s.bucketPolicy(bucket)
	}
	p := s.policies[resource]
	if p == nil {
		p = &Policy{}
		s.stamp(p)
		s.policies[resource] = p
	}
	return p
}

// withCondition is what the name of a role has behind it where a policy of version 1 is asked for and the binding has a condition.
const withCondition = "_withcond_"

// GetPolicy returns the policy of a bucket's resource, an account's or the project's, in the version asked for: 0, 1 or 3.
func (s *Server) GetPolicy(resource string, version int) (Policy, error) {
	if version != 0 && version != 1 && version != 3 {
		return Policy{}, invalid("Requested policy version %d is not supported. Use 0, 1 or 3.", version)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := *s.policy(resource)
	p.Bindings = slices.Clone(p.Bindings)
	for i, b := range p.Bindings {
		p.Bindings[i].Members = slices.Clone(b.Members)
		if b.Condition != nil && version < 3 {
			h := fnv.New64a()
			h.Write([]byte(b.Condition.Expression))
			p.Bindings[i].Role = fmt.Sprintf("%s%s%020x", b.Role, withCondition, h.Sum64())
			p.Bindings[i].Condition = nil
		}
	}
	if version < 3 {
		p.Version = 1
	}
	return p, nil
}

// SetPolicy replaces a policy. With an etag, it must be that of the policy it replaces, or the error is ErrStale.
func (s *Server) SetPolicy(resource string, p Policy) (Policy, error) {
	s.mu.Lock()
	old := s.policy(resource)
	err := error(nil)
	if len(p.Etag) > 0 && !slices.Equal(p.Etag, old.Etag) {
		err = ErrStale
	} else if err = s.clean(&p, strings.HasPrefix(resource, "projects/_/")); err == nil {
		s.stamp(&p)
		s.policies[resource] = &p
	}
	s.mu.Unlock()
	if err != nil {
		return Policy{}, err
	}
	return s.GetPolicy(resource, 3)
}

// maxMembers is how many members all bindings of a policy have together at most.
const maxMembers = 1500

// clean checks a policy that somebody sets, and brings it into one form. s.mu is held.
func (s *Server) clean(p *Policy, bucket bool) error {
	if p.Version != 0 && p.Version != 1 && p.Version != 3 {
		return invalid("Policy version %d is not supported. Use 0, 1 or 3.", p.Version)
	}
	var all []Binding
	total := 0
	for _, b := range p.Bindings {
		if r := s.role(b.Role); r == nil || r.deleted {
			return invalid("Role %s is not supported for this resource.", b.Role)
		}
		if b.Condition != nil {
			if p.Version != 3 {
				return invalid("Conditions are only supported in policies of version 3.")
			}
			if b.Condition.Title == "" {
				return invalid("A condition must have a title.")
			}
			if _, err := parseCondition(b.Condition.Expression); err != nil {
				return invalid("Condition %q could not be compiled: %v", b.Condition.Expression, err)
			}
		}
		i := slices.IndexFunc(all, func(have Binding) bool {
			return have.Role == b.Role && (have.Condition == nil) == (b.Condition == nil) && (b.Condition == nil || *have.Condition == *b.Condition)
		})
		if i < 0 && len(b.Members) > 0 {
			all = append(all, Binding{Role: b.Role, Condition: b.Condition})
			i = len(all) - 1
		}
		for _, m := range b.Members {
			m, err := s.member(m, bucket)
			if err != nil {
				return err
			}
			if !slices.Contains(all[i].Members, m) {
				all[i].Members = append(all[i].Members, m)
				total++
			}
		}
	}
	if total > maxMembers {
		return invalid("The policy has %d members, more than %d.", total, maxMembers)
	}
	p.Bindings = all
	return nil
}

// member checks one, and returns its one form. s.mu is held.
func (s *Server) member(member string, bucket bool) (string, error) {
	if member == "allUsers" || member == "allAuthenticatedUsers" {
		return member, nil
	}
	kind, who, ok := strings.Cut(member, ":")
	bad := invalid("Invalid member %q: it must be of the form \"user:…\", \"serviceAccount:…\", \"group:…\", \"domain:…\", \"allUsers\" or \"allAuthenticatedUsers\".", member)
	if !ok || who == "" || strings.ContainsAny(who, " \t\r\n") {
		return "", bad
	}
	switch kind {
	case "serviceAccount":
		who = strings.ToLower(who)
		if s.accounts[who] == nil {
			return "", invalid("Service account %s does not exist.", who)
		}
	case "user", "group", "domain":
		if (kind == "domain") == strings.Contains(who, "@") {
			return "", bad
		}
		who = strings.ToLower(who)
	case "projectOwner", "projectEditor", "projectViewer":
		if !bucket || !s.isProject(who) {
			return "", bad
		}
		who = s.project
	case "deleted":
	default:
		return "", bad
	}
	return kind + ":" + who, nil
}

// ForgetBucket drops a deleted bucket's policy: the next bucket of that name begins anew.
func (s *Server) ForgetBucket(bucket string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.policies, Bucket(bucket))
}

// forgetAccount marks a deleted account in all policies: one made later with the same email is not meant. s.mu is held.
func (s *Server) forgetAccount(a *account) {
	delete(s.accounts, a.email)
	delete(s.policies, s.Account(a.email))
	for _, p := range s.policies {
		for i := range p.Bindings {
			for j, m := range p.Bindings[i].Members {
				if m == "serviceAccount:"+a.email {
					p.Bindings[i].Members[j] = fmt.Sprintf("deleted:%s?uid=%d", m, a.id)
				}
			}
		}
	}
}

func timestamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
