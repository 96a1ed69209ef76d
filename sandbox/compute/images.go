package compute

import (
	"fmt"

	api "google.golang.org/api/compute/v1"
)

// AddImage registers an image of the project, replacing one of the same name. family may be "".
// It returns an error for names that the real service refuses.
func (s *Server) AddImage(name, family, description string) error {
	if err := checkName("name", name); err != nil {
		return err
	}
	if family != "" {
		if err := checkName("family", family); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addImage(&api.Image{Name: name, Family: family, Description: description, DiskSizeGb: 10, Architecture: "X86_64"})
	return nil
}

// addImage fills in what the server decides. s.mu is held.
func (s *Server) addImage(image *api.Image) {
	image.Kind, image.Id = "compute#image", newID()
	image.SelfLink = s.link("global", "images", image.Name)
	image.CreationTimestamp = timestamp(s.now())
	image.Status, image.SourceType = "READY", "RAW"
	image.LabelFingerprint = fingerprint("labels", image.Labels)
	image.StorageLocations = []string{s.region}
	s.images[image.Name] = image
}

// newest returns the image of a family that was made last and is not deprecated, or nil. s.mu is held.
func (s *Server) newest(family string) *api.Image {
	var best *api.Image
	for _, image := range s.images {
		if image.Family != family || image.Deprecated != nil && image.Deprecated.State != "ACTIVE" {
			continue
		}
		if best == nil || image.CreationTimestamp > best.CreationTimestamp ||
			image.CreationTimestamp == best.CreationTimestamp && image.Name > best.Name {
			best = image
		}
	}
	return best
}

// findImage resolves a reference to an image or a family. s.mu is held.
func (s *Server) findImage(field, reference string) (*api.Image, *apiError) {
	missing := invalid(field, reference, "The referenced image resource cannot be found.")
	parts, ok := s.relative(reference)
	switch {
	case !ok:
		return nil, missing
	case len(parts) == 3 && parts[0] == "global" && parts[1] == "images":
		if image := s.images[parts[2]]; image != nil {
			return image, nil
		}
	case len(parts) == 4 && parts[0] == "global" && parts[1] == "images" && parts[2] == "family":
		if image := s.newest(parts[3]); image != nil {
			return image, nil
		}
	default:
		return nil, invalid(field, reference, "The URL is malformed.")
	}
	return nil, missing
}

func (s *Server) insertImage(r *request) (any, *apiError) {
	image := new(api.Image)
	if err := decode(r.body, image); err != nil {
		return nil, err
	}
	if err := checkName("resource.name", image.Name); err != nil {
		return nil, err
	}
	if image.Family != "" {
		if err := checkName("resource.family", image.Family); err != nil {
			return nil, err
		}
	}
	if err := checkLabels("resource.labels", image.Labels); err != nil {
		return nil, err
	}
	return r.change(func() (*operation, *apiError) {
		if s.images[image.Name] != nil {
			return nil, alreadyExists(s.resource("global", "images", image.Name))
		}
		switch {
		case image.SourceImage != "":
			source, err := s.findImage("resource.sourceImage", image.SourceImage)
			if err != nil {
				return nil, err
			}
			image.SourceImage, image.SourceImageId = source.SelfLink, fmt.Sprint(source.Id)
			image.DiskSizeGb = max(image.DiskSizeGb, source.DiskSizeGb)
		case image.RawDisk == nil && image.SourceDisk == "" && image.SourceSnapshot == "":
			return nil, invalid("resource", "", "One of sourceImage, sourceDisk, sourceSnapshot or rawDisk is required.")
		}
		s.addImage(image)
		return s.begin(r.user(), "global", "compute.images.insert", image.SelfLink, image.Id, nil), nil
	})
}

// findNamedImage finds the request's image. s.mu is held.
func (r *request) findNamedImage() (*api.Image, *apiError) {
	name := r.PathValue("name")
	image := r.s.images[name]
	if image == nil {
		return nil, notFound(r.s.resource("global", "images", name))
	}
	return image, nil
}

func (s *Server) getImage(r *request) (any, *apiError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	image, err := r.findNamedImage()
	if err != nil {
		return nil, err
	}
	return image, nil
}

func (s *Server) getImageFromFamily(r *request) (any, *apiError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	image := s.newest(r.PathValue("name"))
	if image == nil {
		return nil, notFound(s.resource("global", "images", "family", r.PathValue("name")))
	}
	return image, nil
}

func (s *Server) listImages(r *request) (any, *apiError) {
	s.mu.Lock()
	var items []item
	for _, image := range s.images {
		items = append(items, item{"global", image.Name, image.CreationTimestamp, image})
	}
	s.mu.Unlock()
	return list[api.Image](r, "compute#imageList", items)
}

func (s *Server) deleteImage(r *request) (any, *apiError) {
	return r.change(func() (*operation, *apiError) {
		image, err := r.findNamedImage()
		if err != nil {
			return nil, err
		}
		delete(s.images, image.Name)
		return s.begin(r.user(), "global", "compute.images.delete", image.SelfLink, image.Id, nil), nil
	})
}
