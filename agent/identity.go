package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/remote"
)

// Metadata attributes that sluiced gives its VMs.
const (
	AttributeRole        = "sluice-role"
	AttributeController  = "sluice-controller"  // host:port
	AttributeFingerprint = "sluice-fingerprint" // SHA-256 of sluiced's certificate in hex
)

// localController is where sluiced listens on the controller VM by default.
const localController = "127.0.0.1:8443"

// identity is who this VM is and whom it reports to.
type identity struct {
	Node        string   `json:"node"`
	Instance    string   `json:"instance"`
	Role        api.Role `json:"role"`
	Controller  string   `json:"controller"`
	Fingerprint string   `json:"fingerprint"`
}

// identify asks the metadata server what the command line does not say. The
// controller VM, which is where sluiced keeps its certificate, reports to
// itself and needs no attributes.
func (a *Agent) identify(ctx context.Context) (identity, error) {
	ctx, cancel := context.WithTimeout(ctx, a.pace.identify)
	defer cancel()
	c := a.config
	var failures []error
	ask := func(said, suffix string) string {
		if said != "" {
			return said
		}
		v, err := a.metadata.GetWithContext(ctx, suffix)
		v = strings.TrimSpace(v)
		if err == nil && v == "" {
			err = errors.New("empty")
		}
		if err != nil {
			failures = append(failures, fmt.Errorf("metadata %s: %w", suffix, err))
		}
		return v
	}
	id := identity{
		Node:     ask(c.Node, "instance/name"),
		Instance: ask(c.Instance, "instance/id"),
	}
	own, err := remote.Fingerprint(c.CertDir)
	switch {
	case err == nil:
		id.Role = cmp.Or(c.Role, api.RoleController)
		id.Controller = cmp.Or(c.Controller, localController)
		id.Fingerprint = cmp.Or(c.Fingerprint, own)
	case errors.Is(err, fs.ErrNotExist):
		id.Role = api.Role(ask(string(c.Role), "instance/attributes/"+AttributeRole))
		id.Controller = ask(c.Controller, "instance/attributes/"+AttributeController)
		id.Fingerprint = ask(c.Fingerprint, "instance/attributes/"+AttributeFingerprint)
	default:
		failures = append(failures, err)
	}
	if err := errors.Join(failures...); err != nil {
		return identity{}, err
	}
	switch id.Role {
	case api.RoleController, api.RoleLogin, api.RoleCompute:
		return id, nil
	}
	return identity{}, fmt.Errorf("role %q is not controller, login or compute", id.Role)
}
