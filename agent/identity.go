package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/trust"
)

// Metadata attributes that sluiced gives its VMs. AttributeRole says what a VM
// is for; sluiced reads it, not the agent.
const (
	AttributeRole        = "sluice-role"
	AttributeController  = "sluice-controller"  // host:port
	AttributeFingerprint = "sluice-fingerprint" // SHA-256 of sluiced's certificate authority in hex
)

// localController is where sluiced listens on the controller VM by default.
const localController = "127.0.0.1:8443"

// identity is who this VM is and whom it reports to.
type identity struct {
	Instance    string `json:"instance"`
	Controller  string `json:"controller"`
	Fingerprint string `json:"fingerprint"`
	// Node and Role are what the VM's certificate says.
	Node string   `json:"node"`
	Role api.Role `json:"role"`
}

// identify asks the metadata server what the command line does not say. The
// controller VM, which is where sluiced keeps its authority, reports to itself.
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
	id := identity{Instance: ask("", "instance/id")}
	own, err := trust.Fingerprint(c.TLSDir)
	switch {
	case err == nil:
		id.Controller = cmp.Or(c.Controller, localController)
		id.Fingerprint = cmp.Or(c.Fingerprint, own)
	case errors.Is(err, fs.ErrNotExist):
		id.Controller = ask(c.Controller, "instance/attributes/"+AttributeController)
		id.Fingerprint = ask(c.Fingerprint, "instance/attributes/"+AttributeFingerprint)
	default:
		failures = append(failures, err)
	}
	id.Fingerprint = strings.ToLower(id.Fingerprint)
	if err := errors.Join(failures...); err != nil {
		return identity{}, err
	}
	return id, nil
}
