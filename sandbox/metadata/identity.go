package metadata

import (
	"net/url"
	"path"
	"strconv"
	"strings"
	"time"
)

// identity returns an identity token of the caller's account; in full, it says which VM asks.
func (s *Server) identity(c caller, query url.Values) ([]byte, error) {
	audience := query.Get("audience")
	if audience == "" {
		return nil, errNoAudience
	}
	if s.cfg.Identities == nil {
		return nil, errNoPath
	}
	full := strings.EqualFold(query.Get("format"), "full")
	var more map[string]any
	if full && c.instance != 0 {
		more = map[string]any{"google": map[string]any{"compute_engine": c.engine(strings.EqualFold(query.Get("licenses"), "true"))}}
	}
	token, err := s.cfg.Identities.IdentityToken(c.account, audience, full, more)
	return []byte(token), err
}

// engine is what an identity token says of the VM.
func (c caller) engine(licenses bool) map[string]any {
	in := c.view.Instance
	engine := map[string]any{
		"project_id":     c.view.Project.Name,
		"project_number": c.view.Project.Id,
		"zone":           last(in.Zone),
		"instance_id":    strconv.FormatUint(in.Id, 10),
		"instance_name":  in.Name,
	}
	if created, err := time.Parse(time.RFC3339, in.CreationTimestamp); err == nil {
		engine["instance_creation_timestamp"] = created.Unix()
	}
	if licenses {
		ids := []string{}
		for _, d := range in.Disks {
			for _, l := range d.Licenses {
				ids = append(ids, path.Base(l))
			}
		}
		engine["license_id"] = ids
	}
	return engine
}
