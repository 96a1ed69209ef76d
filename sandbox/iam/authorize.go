package iam

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
)

// Reason is why a call is refused, in the words of google.rpc.ErrorInfo.
type Reason string

// The reasons: the first three are 401, the others 403.
const (
	NoCredentials Reason = "CREDENTIALS_MISSING"
	BadToken      Reason = "ACCESS_TOKEN_TYPE_UNSUPPORTED" // unknown, or of an account that is gone or disabled
	ExpiredToken  Reason = "ACCESS_TOKEN_EXPIRED"
	ShortScope    Reason = "ACCESS_TOKEN_SCOPE_INSUFFICIENT"
	Denied        Reason = "IAM_PERMISSION_DENIED"
)

// Error is a refusal. Each service has its own words and form for it.
type Error struct {
	Reason     Reason
	Caller     string // email, "" for nobody
	Permission string
	Resource   string
}

// Code is the HTTP status: 401 where nobody is known to call, 403 otherwise.
func (e *Error) Code() int {
	if e.Reason == ShortScope || e.Reason == Denied {
		return http.StatusForbidden
	}
	return http.StatusUnauthorized
}

// Messages that all services share.
const (
	signIn      = " Expected OAuth 2 access token, login cookie or other valid authentication credential. See https://developers.google.com/identity/sign-in/web/devconsole-project."
	MissingText = "Request is missing required authentication credential." + signIn
	InvalidText = "Request had invalid authentication credentials." + signIn
	ScopeText   = "Request had insufficient authentication scopes."
)

// Error is the refusal in the words of most services.
func (e *Error) Error() string {
	switch e.Reason {
	case NoCredentials:
		return MissingText
	case BadToken, ExpiredToken:
		return InvalidText
	case ShortScope:
		return ScopeText
	}
	if strings.HasPrefix(e.Permission, "iam.serviceAccounts.") {
		return fmt.Sprintf("Permission '%s' denied on resource (or it may not exist).", e.Permission)
	}
	return fmt.Sprintf("Permission '%s' denied on resource '%s' (or it may not exist).", e.Permission, e.Resource)
}

// Write answers with the refusal in the form of the services whose errors are a google.rpc.Status.
func (e *Error) Write(w http.ResponseWriter) {
	info := map[string]any{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": e.Reason, "domain": "googleapis.com"}
	service, _, _ := strings.Cut(e.Permission, ".")
	status := "UNAUTHENTICATED"
	switch e.Reason {
	case Denied:
		status = "PERMISSION_DENIED"
		info["domain"] = "iam.googleapis.com"
		info["metadata"] = map[string]string{"permission": e.Permission, "resource": e.Resource}
	case ShortScope:
		status = "PERMISSION_DENIED"
		info["metadata"] = map[string]string{"service": service + ".googleapis.com"}
	default:
		info["metadata"] = map[string]string{"service": service + ".googleapis.com"}
		e.Challenge(w)
	}
	writeJSON(w, e.Code(), map[string]any{"error": map[string]any{
		"code": e.Code(), "message": e.Error(), "status": status, "details": []any{info},
	}})
}

// Challenge sets the header that goes with a 401.
func (e *Error) Challenge(w http.ResponseWriter) {
	v := `Bearer realm="https://accounts.google.com/"`
	if e.Reason != NoCredentials {
		v += `, error="invalid_token"`
	}
	w.Header().Set("WWW-Authenticate", v)
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	body, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json; charset=UTF-8")
	w.WriteHeader(code)
	w.Write(append(body, '\n')) // an error means that the client is gone
}

// Authorize decides on a call: whoever its token speaks for needs the permission on the resource ("projects/P/…", Bucket or Object). The
// error, if any, is an *Error.
func (s *Server) Authorize(r *http.Request, permission, resource string) error {
	return s.authorize(r, access{permission: permission, resource: resource})
}

// AuthorizeList decides on a listing of the objects of a bucket whose names begin with prefix.
func (s *Server) AuthorizeList(r *http.Request, bucket, prefix string) error {
	return s.authorize(r, access{permission: "storage.objects.list", resource: Bucket(bucket), listPrefix: prefix})
}

// Authenticate decides on a call that every account may make.
func (s *Server) Authenticate(r *http.Request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	g, reason := s.caller(r)
	if g == nil {
		return &Error{Reason: reason}
	}
	return nil
}

// Check decides on what an account does without a token: a service's agent, or a service in an account's name.
func (s *Server) Check(email, permission, resource string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.accounts[email]
	if a == nil || a.disabled || !s.allowed(email, access{permission: permission, resource: resource}) {
		return &Error{Reason: Denied, Caller: email, Permission: permission, Resource: resource}
	}
	return nil
}

// Caller is the email of whoever calls, or "".
func (s *Server) Caller(r *http.Request) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g, _ := s.caller(r); g != nil {
		return g.account.email
	}
	return ""
}

// Exists reports whether there is a service account (its email) that something may run as.
func (s *Server) Exists(email string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.accounts[email] != nil
}

// access is what somebody wants to do.
type access struct {
	permission, resource string
	listPrefix           string // of a listing
}

func (a access) attributes() attributes {
	at := attributes{name: a.resource, listPrefix: a.listPrefix}
	service, _, _ := strings.Cut(a.permission, ".")
	at.service = service + ".googleapis.com"
	if _, ok := bucketOf(a.resource); ok {
		at.kind = "storage.googleapis.com/Bucket"
		if strings.Contains(a.resource, "/objects/") {
			at.kind = "storage.googleapis.com/Object"
		}
	}
	return at
}

// caller is who sends a request, or nil and why not. s.mu is held.
func (s *Server) caller(r *http.Request) (*grant, Reason) {
	header := r.Header.Get("Authorization")
	if header == "" {
		return nil, NoCredentials
	}
	scheme, token, _ := strings.Cut(header, " ")
	if !strings.EqualFold(scheme, "Bearer") || len(r.Header.Values("Authorization")) > 1 {
		return nil, BadToken
	}
	return s.redeem(strings.TrimSpace(token))
}

// redeem is what a token stands for, or nil and why not. s.mu is held.
func (s *Server) redeem(token string) (*grant, Reason) {
	g := s.grants[token]
	switch {
	case g == nil || s.accounts[g.account.email] != g.account || g.account.disabled:
		return nil, BadToken
	case !s.now().Before(g.expires):
		return nil, ExpiredToken
	}
	return g, ""
}

func (s *Server) authorize(r *http.Request, a access) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	refuse := func(reason Reason, email string) error {
		return &Error{Reason: reason, Caller: email, Permission: a.permission, Resource: a.resource}
	}
	g, reason := s.caller(r)
	switch {
	case g == nil && reason == NoCredentials && s.allowed("", a):
		return nil // public
	case g == nil:
		return refuse(reason, "")
	case !scopeAllows(g.scopes, a.permission):
		return refuse(ShortScope, g.account.email)
	case g.boundary != nil && !s.within(g.boundary, a), !s.allowed(g.account.email, a):
		return refuse(Denied, g.account.email)
	}
	return nil
}

const (
	scopePrefix   = "https://www.googleapis.com/auth/"
	cloudPlatform = scopePrefix + "cloud-platform"
)

// serviceScopes are the scopes beside cloud-platform with which a service may be used, without scopePrefix: for everything, and for reads.
var serviceScopes = map[string]struct{ all, read []string }{
	"compute":    {[]string{"compute"}, []string{"compute.readonly"}},
	"storage":    {[]string{"devstorage.full_control", "devstorage.read_write"}, []string{"devstorage.read_only"}},
	"logging":    {[]string{"logging.admin", "logging.write"}, nil},
	"monitoring": {[]string{"monitoring", "monitoring.write"}, []string{"monitoring.read"}},
}

// scopeAllows reports whether scopes allow a permission to be used at all.
func scopeAllows(scopes []string, permission string) bool {
	service, _, _ := strings.Cut(permission, ".")
	verb := permission[strings.LastIndexByte(permission, '.')+1:]
	reads := verb == "get" || verb == "list"
	own := serviceScopes[service]
	return slices.ContainsFunc(scopes, func(scope string) bool {
		name, ok := strings.CutPrefix(scope, scopePrefix)
		return ok && (name == "cloud-platform" || slices.Contains(own.all, name) || reads && (name == "cloud-platform.read-only" || slices.Contains(own.read, name)))
	})
}

// allowed reports whether policies give an account ("" is nobody) an access: that of the bucket or account, or the project's. s.mu is held.
func (s *Server) allowed(email string, a access) bool {
	at := a.attributes()
	if bucket, ok := bucketOf(a.resource); ok {
		return s.binds(s.bucketPolicy(bucket), email, a.permission, at) || s.binds(s.policies[s.projectResource()], email, a.permission, at)
	}
	if a.resource != s.projectResource() && !strings.HasPrefix(a.resource, s.projectResource()+"/") {
		return false
	}
	if s.binds(s.policies[s.projectResource()], email, a.permission, at) {
		return true
	}
	p := s.policies[a.resource] // an account's
	return p != nil && a.resource != s.projectResource() && s.binds(p, email, a.permission, at)
}

// binds reports whether a policy gives an account a permission. s.mu is held.
func (s *Server) binds(p *Policy, email, permission string, at attributes) bool {
	return slices.ContainsFunc(p.Bindings, func(b Binding) bool {
		return s.grantsPermission(b.Role, permission) &&
			slices.ContainsFunc(b.Members, func(m string) bool { return s.isMember(m, email) }) && b.holds(at)
	})
}

// isMember reports whether a member means an account. s.mu is held.
func (s *Server) isMember(member, email string) bool {
	switch member {
	case "allUsers":
		return true
	case "allAuthenticatedUsers":
		return email != ""
	}
	kind, who, _ := strings.Cut(member, ":")
	switch kind {
	case "serviceAccount":
		return email != "" && who == email
	case "projectOwner", "projectEditor", "projectViewer":
		role := "roles/" + strings.ToLower(strings.TrimPrefix(kind, "project"))
		return s.isProject(who) && slices.ContainsFunc(s.policies[s.projectResource()].Bindings, func(b Binding) bool {
			return b.Role == role && b.Condition == nil && slices.Contains(b.Members, "serviceAccount:"+email)
		})
	}
	return false // of other kinds the sandbox has none
}
