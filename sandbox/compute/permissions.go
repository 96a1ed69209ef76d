package compute

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	api "google.golang.org/api/compute/v1"

	"github.com/sluicehpc/sluice/sandbox/iam"
)

// projectPrefix begins the patterns of all methods.
const projectPrefix = "/compute/v1/projects/{project}"

// permissions is what a method (its pattern, below projectPrefix) needs on the resource that its path names. What making an instance needs
// beside that, instancePermissions says.
var permissions = map[string]string{
	"GET ":                            "compute.projects.get",
	"POST /setCommonInstanceMetadata": "compute.projects.setCommonInstanceMetadata",

	"GET /zones":            "compute.zones.list",
	"GET /zones/{zone}":     "compute.zones.get",
	"GET /regions":          "compute.regions.list",
	"GET /regions/{region}": "compute.regions.get",

	"POST /zones/{zone}/instances":                    "compute.instances.create",
	"POST /zones/{zone}/instances/bulkInsert":         "compute.instances.create",
	"POST /regions/{region}/instances/bulkInsert":     "compute.instances.create",
	"GET /zones/{zone}/instances":                     "compute.instances.list",
	"GET /aggregated/instances":                       "compute.instances.list",
	"GET /zones/{zone}/instances/{name}":              "compute.instances.get",
	"DELETE /zones/{zone}/instances/{name}":           "compute.instances.delete",
	"POST /zones/{zone}/instances/{name}/setMetadata": "compute.instances.setMetadata",
	"POST /zones/{zone}/instances/{name}/setLabels":   "compute.instances.setLabels",
	"POST /zones/{zone}/instances/{name}/start":       "compute.instances.start",
	"POST /zones/{zone}/instances/{name}/stop":        "compute.instances.stop",
	"GET /zones/{zone}/instances/{name}/serialPort":   "compute.instances.getSerialPortOutput",

	"GET /zones/{zone}/operations":                  "compute.zoneOperations.list",
	"GET /zones/{zone}/operations/{name}":           "compute.zoneOperations.get",
	"POST /zones/{zone}/operations/{name}/wait":     "compute.zoneOperations.get",
	"DELETE /zones/{zone}/operations/{name}":        "compute.zoneOperations.delete",
	"GET /regions/{region}/operations":              "compute.regionOperations.list",
	"GET /regions/{region}/operations/{name}":       "compute.regionOperations.get",
	"POST /regions/{region}/operations/{name}/wait": "compute.regionOperations.get",
	"DELETE /regions/{region}/operations/{name}":    "compute.regionOperations.delete",
	"GET /global/operations":                        "compute.globalOperations.list",
	"GET /global/operations/{name}":                 "compute.globalOperations.get",
	"POST /global/operations/{name}/wait":           "compute.globalOperations.get",
	"DELETE /global/operations/{name}":              "compute.globalOperations.delete",
	"GET /aggregated/operations":                    "compute.globalOperations.list",

	"GET /zones/{zone}/machineTypes":        "compute.machineTypes.list",
	"GET /zones/{zone}/machineTypes/{name}": "compute.machineTypes.get",
	"GET /aggregated/machineTypes":          "compute.machineTypes.list",

	"GET /global/images":               "compute.images.list",
	"POST /global/images":              "compute.images.create",
	"GET /global/images/{name}":        "compute.images.get",
	"DELETE /global/images/{name}":     "compute.images.delete",
	"GET /global/images/family/{name}": "compute.images.getFromFamily",

	"GET /regions/{region}/instanceTemplates":           "compute.instanceTemplates.list",
	"POST /regions/{region}/instanceTemplates":          "compute.instanceTemplates.create",
	"GET /regions/{region}/instanceTemplates/{name}":    "compute.instanceTemplates.get",
	"DELETE /regions/{region}/instanceTemplates/{name}": "compute.instanceTemplates.delete",
	"GET /global/instanceTemplates":                     "compute.instanceTemplates.list",
	"POST /global/instanceTemplates":                    "compute.instanceTemplates.create",
	"GET /global/instanceTemplates/{name}":              "compute.instanceTemplates.get",
	"DELETE /global/instanceTemplates/{name}":           "compute.instanceTemplates.delete",

	"GET /global/networks":                     "compute.networks.list",
	"GET /global/networks/{name}":              "compute.networks.get",
	"GET /regions/{region}/subnetworks":        "compute.subnetworks.list",
	"GET /regions/{region}/subnetworks/{name}": "compute.subnetworks.get",
	"GET /aggregated/subnetworks":              "compute.subnetworks.list",
}

// actAs is the permission to have something run as a service account.
const actAs = "iam.serviceAccounts.actAs"

// authorize decides on a call: whoever sends it needs a permission on a resource. A method without a permission is nobody's.
func (s *Server) authorize(r *http.Request, permission, resource string) *apiError {
	if s.cfg.IAM == nil {
		return nil
	}
	refused, ok := errors.AsType[*iam.Error](s.cfg.IAM.Authorize(r, permission, resource))
	switch {
	case !ok:
		return nil
	case refused.Reason == iam.NoCredentials:
		return &apiError{refused.Code(), "required", refused.Error()}
	case refused.Code() == http.StatusUnauthorized:
		return &apiError{refused.Code(), "authError", refused.Error()}
	case refused.Reason == iam.ShortScope:
		return &apiError{refused.Code(), "insufficientPermissions", refused.Error()}
	}
	return &apiError{refused.Code(), "forbidden", "Required '" + permission + "' permission for '" + resource + "'"}
}

// authorizeMethod decides on a call by its method.
func (s *Server) authorizeMethod(r *http.Request) *apiError {
	_, resource, _ := strings.Cut(r.URL.Path, "/compute/v1/projects/"+r.PathValue("project"))
	project := r.PathValue("project")
	if project == fmt.Sprint(s.cfg.ProjectNumber) {
		project = s.cfg.Project
	}
	return s.authorize(r, permissions[strings.Replace(r.Pattern, projectPrefix, "", 1)], "projects/"+project+resource)
}

// authorizeInstance decides on what an instance that is to be made brings with it.
func (r *request) authorizeInstance(in *api.Instance, template string) *apiError {
	s := r.s
	needs := []struct {
		permission, resource string
		needed               bool
	}{
		{"compute.instances.setMetadata", "instances", in.Metadata != nil && len(in.Metadata.Items) > 0},
		{"compute.instances.setLabels", "instances", len(in.Labels) > 0},
		{"compute.instances.setTags", "instances", in.Tags != nil && len(in.Tags.Items) > 0},
		{"compute.instances.setServiceAccount", "instances", len(in.ServiceAccounts) > 0},
		{"compute.disks.create", "disks", true},
	}
	for _, n := range needs {
		if !n.needed {
			continue
		}
		if err := s.authorize(r.Request, n.permission, s.resource(r.scope, n.resource)); err != nil {
			return err
		}
	}
	if template != "" {
		if err := s.authorize(r.Request, "compute.instanceTemplates.useReadOnly", s.referenced(template)); err != nil {
			return err
		}
	}
	for _, d := range in.Disks {
		if d == nil || d.InitializeParams == nil {
			continue // what is wrong with it, is said later
		}
		if err := s.authorize(r.Request, "compute.images.useReadOnly", s.referenced(d.InitializeParams.SourceImage)); err != nil {
			return err
		}
	}
	for _, nic := range in.NetworkInterfaces {
		subnetwork := s.resource("regions", s.region, "subnetworks", "default")
		if err := s.authorize(r.Request, "compute.subnetworks.use", subnetwork); err != nil {
			return err
		}
		if nic != nil && len(nic.AccessConfigs) > 0 {
			if err := s.authorize(r.Request, "compute.subnetworks.useExternalIp", subnetwork); err != nil {
				return err
			}
		}
	}
	return r.authorizeAccounts(in)
}

// authorizeAccounts decides on who may have an instance's service account do what they say.
func (r *request) authorizeAccounts(in *api.Instance) *apiError {
	access := r.s.cfg.IAM
	if access == nil {
		return nil
	}
	for _, a := range in.ServiceAccounts {
		if a == nil || a.Email == "" {
			continue // refused later
		}
		email := a.Email
		if email == "default" {
			email = r.s.DefaultServiceAccount()
		}
		if err := r.s.authorize(r.Request, actAs, access.Account(email)); err != nil {
			return err
		}
		if !access.Exists(email) {
			return &apiError{http.StatusNotFound, "notFound", "The resource '" + access.Account(email) + "' of type 'serviceAccount' was not found."}
		}
	}
	return nil
}

// referenced is the resource that a reference names; a wrong one is found out later.
func (s *Server) referenced(reference string) string {
	parts, ok := s.relative(reference)
	if !ok {
		return s.resource()
	}
	return s.resource(parts...)
}
