package iam

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// Permissions of routes that are none.
const (
	everyAccount = "(every account)"
	everybody    = "(everybody)"
)

// route is one method. permission is what it needs on what the path names: {account}, {role} or {project}.
type route struct {
	method, path, permission string
	handle                   func(*Server, *call) (any, error)
}

var routes = []route{
	{"GET", "/oauth2/v3/certs", everybody, (*Server).certs},
	{"POST", "/v1/token", everybody, (*Server).exchange}, // the token is in the body

	{"GET", "/v1/projects/{project}", "resourcemanager.projects.get", (*Server).getProject},
	{"POST", "/v1/projects/{project}:getIamPolicy", "resourcemanager.projects.getIamPolicy", (*Server).getPolicy},
	{"POST", "/v1/projects/{project}:setIamPolicy", "resourcemanager.projects.setIamPolicy", (*Server).setPolicy},
	{"POST", "/v1/projects/{project}:testIamPermissions", everyAccount, (*Server).testPermissions},

	{"GET", "/v1/projects/{project}/serviceAccounts", "iam.serviceAccounts.list", (*Server).listAccounts},
	{"POST", "/v1/projects/{project}/serviceAccounts", "iam.serviceAccounts.create", (*Server).createAccount},
	{"GET", "/v1/projects/{project}/serviceAccounts/{account}", "iam.serviceAccounts.get", (*Server).getAccount},
	{"PATCH", "/v1/projects/{project}/serviceAccounts/{account}", "iam.serviceAccounts.update", (*Server).patchAccount},
	{"DELETE", "/v1/projects/{project}/serviceAccounts/{account}", "iam.serviceAccounts.delete", (*Server).deleteAccount},
	{"POST", "/v1/projects/{project}/serviceAccounts/{account}:disable", "iam.serviceAccounts.disable", (*Server).disableAccount},
	{"POST", "/v1/projects/{project}/serviceAccounts/{account}:enable", "iam.serviceAccounts.enable", (*Server).enableAccount},
	{"POST", "/v1/projects/{project}/serviceAccounts/{account}:getIamPolicy", "iam.serviceAccounts.getIamPolicy", (*Server).getPolicy},
	{"POST", "/v1/projects/{project}/serviceAccounts/{account}:setIamPolicy", "iam.serviceAccounts.setIamPolicy", (*Server).setPolicy},
	{"POST", "/v1/projects/{project}/serviceAccounts/{account}:testIamPermissions", everyAccount, (*Server).testPermissions},
	{"POST", "/v1/projects/{project}/serviceAccounts/{account}:generateAccessToken", "iam.serviceAccounts.getAccessToken", (*Server).generateAccessToken},
	{"POST", "/v1/projects/{project}/serviceAccounts/{account}:generateIdToken", "iam.serviceAccounts.getOpenIdToken", (*Server).generateIDToken},

	{"GET", "/v1/roles", everyAccount, (*Server).listPredefined},
	{"GET", "/v1/roles/{role}", everyAccount, (*Server).getPredefined},
	{"GET", "/v1/projects/{project}/roles", "iam.roles.list", (*Server).listRoles},
	{"POST", "/v1/projects/{project}/roles", "iam.roles.create", (*Server).createRole},
	{"GET", "/v1/projects/{project}/roles/{role}", "iam.roles.get", (*Server).getRole},
	{"PATCH", "/v1/projects/{project}/roles/{role}", "iam.roles.update", (*Server).patchRole},
	{"DELETE", "/v1/projects/{project}/roles/{role}", "iam.roles.delete", (*Server).deleteRole},
}

// Handles reports whether a path (escaped) is of one of IAM's services, on a port that has other services too.
func Handles(path string) bool {
	switch {
	case path == "/oauth2/v3/certs", path == "/v1/token", path == "/v1/roles", strings.HasPrefix(path, "/v1/roles/"):
		return true
	}
	rest, ok := strings.CutPrefix(path, "/v1/projects/")
	if !ok {
		return false
	}
	_, kind, deep := strings.Cut(rest, "/")
	kind, _, _ = strings.Cut(kind, "/")
	return !deep || kind == "serviceAccounts" || kind == "roles"
}

// call is a request on its way through a handler.
type call struct {
	r                      *http.Request
	project, account, role string // what the path names
	body                   []byte
	by                     *grant // who calls; nil where everybody may
}

// resource is what the path names. s.mu is not needed.
func (c *call) resource(s *Server) string {
	switch {
	case c.account != "":
		return s.Account(c.account)
	case c.role != "" && c.project != "":
		return s.projectResource() + "/roles/" + c.role
	case s.isProject(c.project):
		return s.projectResource()
	}
	return "projects/" + c.project
}

// maxBody bounds a request's body, in bytes.
const maxBody = 1 << 20

// apiError is a refusal that is not for want of a permission.
type apiError struct {
	code    int
	status  string
	message string
}

func (e *apiError) Error() string { return e.message }

func invalid(format string, args ...any) error {
	return &apiError{http.StatusBadRequest, "INVALID_ARGUMENT", fmt.Sprintf(format, args...)}
}

func notFound(format string, args ...any) error {
	return &apiError{http.StatusNotFound, "NOT_FOUND", fmt.Sprintf(format, args...)}
}

// oauthError is a refusal by the token service, in OAuth's own form.
type oauthError struct{ kind, description string }

func (e *oauthError) Error() string { return e.kind + ": " + e.description }

// ServeHTTP answers for all of IAM's services.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	answer, err := s.serve(w, r)
	if err == nil {
		writeJSON(w, http.StatusOK, answer)
		return
	}
	if e, ok := errors.AsType[*Error](err); ok {
		e.Write(w)
		return
	}
	if e, ok := errors.AsType[*oauthError](err); ok {
		writeJSON(w, http.StatusBadRequest, map[string]string{"error": e.kind, "error_description": e.description})
		return
	}
	e, ok := errors.AsType[*apiError](err)
	if !ok {
		e = &apiError{http.StatusInternalServerError, "INTERNAL", err.Error()}
	}
	writeJSON(w, e.code, map[string]any{"error": map[string]any{"code": e.code, "message": e.message, "status": e.status}})
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) (any, error) {
	unknown := &apiError{http.StatusNotFound, "NOT_FOUND", "Method not found."}
	segments := strings.Split(r.URL.EscapedPath(), "/")
	for i := range segments {
		var err error
		// A name with a slash would be two in the resource's.
		if segments[i], err = url.PathUnescape(segments[i]); err != nil || strings.Contains(segments[i], "/") {
			return nil, unknown
		}
	}
	for _, rt := range routes {
		c := &call{r: r}
		if rt.method != r.Method || !c.match(rt.path, segments) {
			continue
		}
		if err := s.admit(c, rt.permission); err != nil {
			return nil, err
		}
		var err error
		if c.body, err = io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody)); err != nil {
			return nil, invalid("Request body could not be read: %v", err)
		}
		return rt.handle(s, c)
	}
	return nil, unknown
}

// match compares a route's path with a request's and fills the names in.
func (c *call) match(path string, segments []string) bool {
	pattern := strings.Split(path, "/")
	if len(pattern) != len(segments) {
		return false
	}
	for i, p := range pattern {
		got := segments[i]
		if i == len(pattern)-1 {
			// The verb is behind the last colon; without one, a name has none.
			name, verb, _ := strings.Cut(p, ":")
			if j := strings.LastIndexByte(got, ':'); j >= 0 && got[j+1:] == verb && verb != "" {
				p, got = name, got[:j]
			} else if verb != "" || j >= 0 {
				return false
			}
		}
		switch {
		case got == "" && i > 0:
			return false
		case p == "{project}":
			c.project = got
		case p == "{account}":
			c.account = got
		case p == "{role}":
			c.role = got
		case p != got:
			return false
		}
	}
	return true
}

// admit finds out who calls, whether they may, and gives the account its email where the path has its number.
func (s *Server) admit(c *call, permission string) error {
	if permission == everybody {
		return nil
	}
	s.mu.Lock()
	g, reason := s.caller(c.r)
	if c.account != "" {
		for _, a := range s.accounts {
			if strconv.FormatUint(a.id, 10) == c.account {
				c.account = a.email
			}
		}
	}
	s.mu.Unlock()
	if g == nil {
		return &Error{Reason: reason, Permission: "iam"}
	}
	c.by = g
	// "-" is the account's own project.
	if c.project != "" && !s.isProject(c.project) && (c.project != "-" || c.account == "") {
		return &Error{Reason: Denied, Caller: g.account.email, Permission: permission, Resource: c.resource(s)}
	}
	if permission == everyAccount {
		return nil
	}
	return s.Authorize(c.r, permission, c.resource(s))
}

// decode reads the body, which may be empty, and refuses fields that the message has not.
func (c *call) decode(v any) error {
	if len(c.body) == 0 {
		return nil
	}
	d := json.NewDecoder(strings.NewReader(string(c.body)))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return invalid("Invalid JSON payload received. %v", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return invalid("Invalid JSON payload received. There is more than one value.")
	}
	return nil
}

func (s *Server) getProject(*call) (any, error) {
	return map[string]string{
		"projectId": s.project, "projectNumber": strconv.FormatUint(s.number, 10), "name": s.project, "lifecycleState": "ACTIVE",
	}, nil
}

// version reads which version of a policy is asked for.
func (c *call) version() (int, error) {
	var in struct {
		Options struct {
			RequestedPolicyVersion int `json:"requestedPolicyVersion"`
		} `json:"options"`
	}
	if err := c.decode(&in); err != nil {
		return 0, err
	}
	if v := c.r.URL.Query().Get("options.requestedPolicyVersion"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil {
			return 0, invalid("Invalid value at 'options.requested_policy_version': %q", v)
		}
		return n, nil
	}
	return in.Options.RequestedPolicyVersion, nil
}

func (s *Server) getPolicy(c *call) (any, error) {
	v, err := c.version()
	if err != nil {
		return nil, err
	}
	if err := s.exists(c); err != nil {
		return nil, err
	}
	return s.GetPolicy(c.resource(s), v)
}

func (s *Server) setPolicy(c *call) (any, error) {
	var in struct {
		Policy     *Policy `json:"policy"`
		UpdateMask string  `json:"updateMask"`
	}
	if err := c.decode(&in); err != nil {
		return nil, err
	}
	if in.Policy == nil {
		return nil, invalid("The policy is missing.")
	}
	if err := s.exists(c); err != nil {
		return nil, err
	}
	return s.SetPolicy(c.resource(s), *in.Policy)
}

func (s *Server) testPermissions(c *call) (any, error) {
	var in struct {
		Permissions []string `json:"permissions"`
	}
	if err := c.decode(&in); err != nil {
		return nil, err
	}
	if err := s.exists(c); err != nil {
		return nil, err
	}
	have, err := s.TestPermissions(c.r, c.resource(s), in.Permissions)
	if err != nil {
		return nil, err
	}
	return testedPermissions{have}, nil
}

type testedPermissions struct {
	Permissions []string `json:"permissions,omitempty"`
}

// maxTested is how many permissions one call may ask for.
const maxTested = 100

// TestPermissions returns those of the permissions that the caller has on a resource. Names that are no permission's are an error.
func (s *Server) TestPermissions(r *http.Request, resource string, permissions []string) ([]string, error) {
	if len(permissions) == 0 || len(permissions) > maxTested {
		return nil, invalid("The number of permissions must be between 1 and %d.", maxTested)
	}
	var have []string
	for _, p := range permissions {
		if !isKnown(p) {
			return nil, invalid("Permission %s is not valid for this resource.", p)
		}
		if s.Authorize(r, p, resource) == nil {
			have = append(have, p)
		}
	}
	return have, nil
}

// exists refuses an account that is not there. Whoever got here may know.
func (s *Server) exists(c *call) error {
	if c.account == "" {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.find(c)
	return err
}
