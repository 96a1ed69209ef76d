package iam

import (
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
)

// roleJSON is a Role of the API.
type roleJSON struct {
	Name                string   `json:"name,omitempty"`
	Title               string   `json:"title,omitempty"`
	Description         string   `json:"description,omitempty"`
	IncludedPermissions []string `json:"includedPermissions,omitempty"`
	Stage               string   `json:"stage,omitempty"`
	Etag                []byte   `json:"etag,omitempty"`
	Deleted             bool     `json:"deleted,omitempty"`
}

func (r *role) render(name string, full bool) roleJSON {
	j := roleJSON{Name: name, Title: r.title, Description: r.description, Stage: r.stage, Etag: etagOf(r.version), Deleted: r.deleted}
	if j.Stage == "" {
		j.Stage = "GA"
	}
	if full {
		j.IncludedPermissions = r.permissions
	}
	return j
}

type rolesJSON struct {
	Roles         []roleJSON `json:"roles,omitempty"`
	NextPageToken string     `json:"nextPageToken,omitempty"`
}

func listOf(c *call, roles map[string]*role) (any, error) {
	var all []roleJSON
	for _, name := range slices.Sorted(maps.Keys(roles)) {
		if r := roles[name]; !r.deleted || c.r.URL.Query().Get("showDeleted") == "true" {
			all = append(all, r.render(name, c.r.URL.Query().Get("view") == "FULL"))
		}
	}
	part, next, err := page(c, all)
	return rolesJSON{part, next}, err
}

func (s *Server) listPredefined(c *call) (any, error) { return listOf(c, predefined) }

func (s *Server) getPredefined(c *call) (any, error) {
	name := "roles/" + c.role
	r := predefined[name]
	if r == nil {
		return nil, notFound("The role named %s was not found.", name)
	}
	return r.render(name, true), nil
}

func (s *Server) listRoles(c *call) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return listOf(c, s.roles)
}

func (s *Server) roleName(id string) string { return s.projectResource() + "/roles/" + id }

// named is the project's role that the path names. s.mu is held.
func (s *Server) named(c *call) (*role, string, error) {
	name := s.roleName(c.role)
	r := s.roles[name]
	if r == nil {
		return nil, "", notFound("The role named %s was not found.", name)
	}
	return r, name, nil
}

func (s *Server) getRole(c *call) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, name, err := s.named(c)
	if err != nil {
		return nil, err
	}
	return r.render(name, true), nil
}

var roleIDs = regexp.MustCompile(`^[a-zA-Z0-9_.]{3,64}$`)

// Limits of a role (the documentation's).
const (
	maxTitle       = 100  // bytes
	maxPermissions = 3000 // of one role
)

var stages = []string{"", "ALPHA", "BETA", "GA", "DEPRECATED", "DISABLED", "EAP"}

// checkRole judges what somebody gives a role. The permissions come back sorted and each once.
func checkRole(r *role) error {
	if len(r.title) > maxTitle || len(r.description) > maxDescription || len(r.permissions) > maxPermissions {
		return invalid("A role's title has at most %d bytes, its description %d; it has at most %d permissions.", maxTitle, maxDescription, maxPermissions)
	}
	if !slices.Contains(stages, r.stage) {
		return invalid("Invalid value at 'role.stage': %q", r.stage)
	}
	for _, p := range r.permissions {
		if !isKnown(p) {
			return invalid("Permission %s is not valid.", p)
		}
	}
	r.permissions = slices.Compact(slices.Sorted(slices.Values(r.permissions)))
	return nil
}

func (s *Server) createRole(c *call) (any, error) {
	var in struct {
		RoleID string   `json:"roleId"`
		Role   roleJSON `json:"role"`
	}
	if err := c.decode(&in); err != nil {
		return nil, err
	}
	if !roleIDs.MatchString(in.RoleID) {
		return nil, invalid("The role_id %q must be 3 to 64 letters, digits, underscores and periods.", in.RoleID)
	}
	r := &role{title: in.Role.Title, description: in.Role.Description, stage: in.Role.Stage, permissions: in.Role.IncludedPermissions}
	if err := checkRole(r); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	name := s.roleName(in.RoleID)
	if old := s.roles[name]; old != nil && old.deleted {
		return nil, &apiError{http.StatusBadRequest, "FAILED_PRECONDITION", "You can't create a role_id (" + in.RoleID + ") which has been marked for deletion."}
	} else if old != nil {
		return nil, &apiError{http.StatusConflict, "ALREADY_EXISTS", "A role named " + in.RoleID + " in " + s.projectResource() + " already exists."}
	}
	s.roles[name] = r
	return r.render(name, true), nil
}

func (s *Server) patchRole(c *call) (any, error) {
	var in roleJSON
	if err := c.decode(&in); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r, name, err := s.named(c)
	if err != nil {
		return nil, err
	}
	if r.deleted {
		return nil, &apiError{http.StatusBadRequest, "FAILED_PRECONDITION", "You can't update a role which has been marked for deletion."}
	}
	if len(in.Etag) > 0 && !slices.Equal(in.Etag, etagOf(r.version)) {
		return nil, &apiError{http.StatusConflict, "ABORTED", "There were concurrent role changes."}
	}
	next := *r
	mask := c.r.URL.Query().Get("updateMask")
	if mask == "" {
		mask = "title,description,includedPermissions,stage"
	}
	for field := range strings.SplitSeq(mask, ",") {
		switch field {
		case "title":
			next.title = in.Title
		case "description":
			next.description = in.Description
		case "includedPermissions", "included_permissions":
			next.permissions = in.IncludedPermissions
		case "stage":
			next.stage = in.Stage
		default:
			return nil, invalid("Invalid value at 'update_mask': %q", field)
		}
	}
	if err := checkRole(&next); err != nil {
		return nil, err
	}
	next.version++
	*r = next
	return r.render(name, true), nil
}

func (s *Server) deleteRole(c *call) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, name, err := s.named(c)
	if err != nil {
		return nil, err
	}
	r.deleted = true
	r.version++
	return r.render(name, true), nil
}
