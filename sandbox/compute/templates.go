package compute

import (
	"strings"

	api "google.golang.org/api/compute/v1"
)

func (s *Server) insertTemplate(r *request) (any, *apiError) {
	template := new(api.InstanceTemplate)
	if err := decode(r.body, template); err != nil {
		return nil, err
	}
	if err := checkName("resource.name", template.Name); err != nil {
		return nil, err
	}
	p := template.Properties
	switch {
	case p == nil:
		return nil, required("resource.properties")
	case p.MachineType == "":
		return nil, required("resource.properties.machineType")
	case strings.Contains(p.MachineType, "/"):
		return nil, invalid("resource.properties.machineType", p.MachineType, "Must be the name of a machine type, not a URL.")
	case len(p.Disks) == 0 || !p.Disks[0].Boot:
		return nil, invalid("resource.properties.disks", "", "Boot disk must be the first disk attached to the instance.")
	case len(p.NetworkInterfaces) == 0:
		return nil, invalid("resource.properties.networkInterfaces", "", "At least one network interface is required.")
	}
	if err := checkLabels("resource.properties.labels", p.Labels); err != nil {
		return nil, err
	}
	if err := checkMetadata("resource.properties.metadata", p.Metadata); err != nil {
		return nil, err
	}
	if err := r.authorizeAccounts(&api.Instance{ServiceAccounts: p.ServiceAccounts}); err != nil {
		return nil, err
	}
	return r.change(func() (*operation, *apiError) {
		key := r.scope + "/" + template.Name
		self := s.link(r.scope, "instanceTemplates", template.Name)
		if s.templates[key] != nil {
			return nil, alreadyExists(resource(self))
		}
		template.Kind, template.Id = "compute#instanceTemplate", newID()
		template.SelfLink, template.CreationTimestamp = self, timestamp(s.now())
		if region, ok := strings.CutPrefix(r.scope, "regions/"); ok {
			template.Region = s.link("regions", region)
		}
		s.templates[key] = template
		return s.begin(r.user(), r.scope, "compute.instanceTemplates.insert", self, template.Id, nil), nil
	})
}

// templateProperties resolves a reference to a template and returns a copy of its properties.
// s.mu is held.
func (s *Server) templateProperties(field, reference string) (*api.InstanceProperties, *apiError) {
	parts, ok := s.relative(reference)
	if !ok || len(parts) < 3 || parts[len(parts)-2] != "instanceTemplates" {
		return nil, invalid(field, reference, "The URL is malformed.")
	}
	scope := strings.Join(parts[:len(parts)-2], "/")
	template := s.templates[scope+"/"+parts[len(parts)-1]]
	if template == nil {
		return nil, notFound(s.resource(parts...))
	}
	return clone(template.Properties), nil
}

// template finds the request's. s.mu is held.
func (r *request) template() (*api.InstanceTemplate, *apiError) {
	name := r.PathValue("name")
	template := r.s.templates[r.scope+"/"+name]
	if template == nil {
		return nil, notFound(r.s.resource(r.scope, "instanceTemplates", name))
	}
	return template, nil
}

func (s *Server) getTemplate(r *request) (any, *apiError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	template, err := r.template()
	if err != nil {
		return nil, err
	}
	return template, nil
}

func (s *Server) listTemplates(r *request) (any, *apiError) {
	s.mu.Lock()
	var items []item
	for key, template := range s.templates {
		if key == r.scope+"/"+template.Name {
			items = append(items, item{r.scope, template.Name, template.CreationTimestamp, template})
		}
	}
	s.mu.Unlock()
	return list[api.InstanceTemplate](r, "compute#instanceTemplateList", items)
}

func (s *Server) deleteTemplate(r *request) (any, *apiError) {
	return r.change(func() (*operation, *apiError) {
		template, err := r.template()
		if err != nil {
			return nil, err
		}
		delete(s.templates, r.scope+"/"+template.Name)
		return s.begin(r.user(), r.scope, "compute.instanceTemplates.delete", template.SelfLink, template.Id, nil), nil
	})
}
