// Package iam is the sandbox's IAM: service accounts, roles and policies, the tokens that speak for accounts, and the decision on every call.
package iam

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	mathrand "math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/sluicehpc/sluice/internal/clock"
)

// Options of a Server.
type Options struct {
	Project string // default "sluice-sandbox"
	Number  uint64 // the project's; default 100000000001
	Clock   clock.Clock
}

// Server is the IAM of one project. Its state is in memory. Its methods may be called concurrently.
type Server struct {
	project string
	number  uint64
	clock   clock.Clock
	keys    func() *keys // made once

	mu       sync.Mutex // guards what follows
	accounts map[string]*account
	roles    map[string]*role   // the project's own, by name; deleted ones stay
	policies map[string]*Policy // by resource: projects/P, projects/_/buckets/B, projects/P/serviceAccounts/E
	grants   map[string]*grant  // by token
	changes  uint64             // counts policies set, for their etags
}

// account is a service account.
type account struct {
	email       string
	id          uint64 // unique for ever
	agent       bool   // a service's own: it is not in the project's list, and nobody can act as it
	displayName string
	description string
	disabled    bool
}

// New makes the IAM of a project with the accounts that every project has, and the workstation's admin, its owner.
func New(o Options) *Server {
	if o.Project == "" {
		o.Project = "sluice-sandbox"
	}
	if o.Number == 0 {
		o.Number = 100000000001
	}
	if o.Clock == nil {
		o.Clock = clock.System
	}
	s := &Server{
		project: o.Project, number: o.Number, clock: o.Clock,
		accounts: map[string]*account{}, roles: map[string]*role{}, policies: map[string]*Policy{}, grants: map[string]*grant{},
	}
	s.keys = sync.OnceValue(newKeys)
	go s.keys() // it takes up to a second
	s.add(&account{email: s.Admin(), displayName: "the workstation's admin"})
	s.add(&account{email: s.DefaultAccount(), displayName: "Compute Engine default service account"})
	for _, service := range []string{"gcp-sa-lustre", "gs-project-accounts"} {
		s.add(&account{email: s.agent(service), agent: true})
	}
	s.policies[s.projectResource()] = &Policy{Bindings: []Binding{{Role: "roles/owner", Members: []string{"serviceAccount:" + s.Admin()}}}}
	s.stamp(s.policies[s.projectResource()])
	return s
}

func (s *Server) add(a *account) *account {
	a.id = 100000000000000000 + mathrand.Uint64N(900000000000000000)
	s.accounts[a.email] = a
	return a
}

// Admin is the account of the workstation.
func (s *Server) Admin() string { return s.email("admin") }

// DefaultAccount is Compute Engine's default service account. Like that of a new organisation it has no role.
func (s *Server) DefaultAccount() string {
	return fmt.Sprintf("%d-compute@developer.gserviceaccount.com", s.number)
}

// LustreAgent is the account as which Managed Lustre itself acts. It has no role.
func (s *Server) LustreAgent() string { return s.agent("gcp-sa-lustre") }

func (s *Server) agent(service string) string {
	return fmt.Sprintf("service-%d@%s.iam.gserviceaccount.com", s.number, service)
}

func (s *Server) email(id string) string { return id + "@" + s.project + ".iam.gserviceaccount.com" }

func (s *Server) projectResource() string { return "projects/" + s.project }

// now is the project's time.
func (s *Server) now() time.Time { return s.clock.Now() }

// grant is what a token stands for.
type grant struct {
	account  *account
	scopes   []string
	boundary []boundaryRule // nil: no boundary
	expires  time.Time
}

// Register makes a token known that somebody hands out for an account. A token of an unknown account opens nothing.
func (s *Server) Register(token, email string, scopes []string, expires time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keep(token, &grant{account: s.accounts[email], scopes: scopes, expires: expires})
}

// keep stores a token and forgets those that have long expired. s.mu is held.
func (s *Server) keep(token string, g *grant) {
	if g.account == nil {
		return
	}
	old := s.now().Add(-time.Hour)
	for t, g := range s.grants {
		if g.expires.Before(old) {
			delete(s.grants, t)
		}
	}
	s.grants[token] = g
}

// Mint returns a new access token of an account; scopes nil is cloud-platform. It returns an error for an account that does not exist.
func (s *Server) Mint(email string, scopes []string, life time.Duration) (token string, expires time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.accounts[email]
	if a == nil {
		return "", time.Time{}, fmt.Errorf("no such service account: %s", email)
	}
	if scopes == nil {
		scopes = []string{cloudPlatform}
	}
	token, expires = NewToken(), s.now().Add(life)
	s.keep(token, &grant{account: a, scopes: scopes, expires: expires})
	return token, expires, nil
}

// NewToken returns a token as Google's look, for Register.
func NewToken() string { return "ya29.sandbox-" + rand.Text() + rand.Text() }

// etagOf is a policy's or role's etag.
func etagOf(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// isProject reports whether the name (id or number) is the project's.
func (s *Server) isProject(name string) bool {
	return name == s.project || name == fmt.Sprint(s.number)
}

// bucketOf returns the bucket of a bucket's or an object's resource.
func bucketOf(resource string) (bucket string, ok bool) {
	rest, ok := strings.CutPrefix(resource, "projects/_/buckets/")
	bucket, _, _ = strings.Cut(rest, "/")
	return bucket, ok
}

// Bucket and Object are the resources of Cloud Storage.
func Bucket(bucket string) string         { return "projects/_/buckets/" + bucket }
func Object(bucket, object string) string { return Bucket(bucket) + "/objects/" + object }
