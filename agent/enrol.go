package agent

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"cloud.google.com/go/compute/metadata"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/remote"
	"github.com/sluicehpc/sluice/trust"
)

// connect makes a new client from what the metadata server and the files say
// now, and enrols this VM first where it has no certificate that counts.
func (a *Agent) connect(ctx context.Context) error {
	id, err := a.identify(ctx)
	if err != nil {
		// After a restart with the metadata server away, the earlier word holds.
		a.mu.Lock()
		id = a.state.Identity
		a.mu.Unlock()
		if id == (identity{}) {
			return fmt.Errorf("find out who this VM is: %w", err)
		}
	}
	path := a.config.Root + credentialsFile
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	c, err := trust.LoadCredentials(path, id.Instance)
	if err != nil {
		return err
	}
	me, valid := c.Agent(id.Fingerprint, a.clock.Now())
	a.mu.Lock()
	valid = valid && !a.unenrolled
	a.mu.Unlock()
	if !valid {
		if me, err = a.enrol(ctx, id, c); err != nil {
			return fmt.Errorf("enrol this VM: %w", err)
		}
	}
	id.Node, id.Role = me.Node, me.Role
	return a.use(id, c)
}

// use makes a new client with what c holds.
func (a *Agent) use(id identity, c *trust.Credentials) error {
	config, err := trust.ClientTLS(id.Fingerprint, c)
	if err != nil {
		return err
	}
	client, err := remote.NewClient(id.Controller, config)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.client != nil {
		a.client.Close() // of idle connections only: calls in flight go on
	}
	a.client, a.credentials, a.unenrolled = client, c, false
	if id != a.state.Identity {
		a.state.Identity = id
		a.save()
		a.log.Info("identity", "node", id.Node, "role", id.Role, "controller", id.Controller)
	}
	a.identified.open()
	return nil
}

// enrol gets a certificate for this VM's key, by a token that the metadata
// server signs for this key and this cluster alone.
func (a *Agent) enrol(ctx context.Context, id identity, c *trust.Credentials) (trust.Agent, error) {
	request, keyHash, err := c.Request()
	if err != nil {
		return trust.Agent{}, err
	}
	audience := url.Values{"audience": {trust.Audience(id.Fingerprint, keyHash)}, "format": {"full"}}
	tctx, cancel := context.WithTimeout(ctx, a.pace.identify)
	token, err := a.metadata.GetWithContext(tctx, "instance/service-accounts/default/identity?"+audience.Encode())
	cancel()
	if _, missing := errors.AsType[metadata.NotDefinedError](err); missing {
		err = errors.New("the metadata server signs no identity token: the VM runs under no service account (one without any role is enough)")
	}
	if err != nil {
		return trust.Agent{}, err
	}
	config, err := trust.ClientTLS(id.Fingerprint, nil)
	if err != nil {
		return trust.Agent{}, err
	}
	client, err := remote.NewClient(id.Controller, config)
	if err != nil {
		return trust.Agent{}, err
	}
	defer client.Close()
	ctx, cancel = context.WithTimeout(ctx, a.pace.enrol)
	defer cancel()
	var answer api.Certificate
	if err := client.Call(ctx, api.OpAgentEnrol, api.EnrolRequest{Token: token, Request: request}, &answer); err != nil {
		return trust.Agent{}, err
	}
	if err := c.Accept(answer.Chain, id.Fingerprint); err != nil {
		return trust.Agent{}, err
	}
	me, ok := c.Agent(id.Fingerprint, a.clock.Now())
	if !ok {
		return me, errors.New("sluiced gave a certificate that is not valid now: is this VM's clock right?")
	}
	a.log.Info("enrolled", "node", me.Node, "role", me.Role, "instance", me.Instance)
	return me, nil
}

// renew gets a new certificate when the present one grows old. Failing is no
// trouble yet: half of its life is left.
func (a *Agent) renew(ctx context.Context) {
	a.mu.Lock()
	id, c := a.state.Identity, a.credentials
	a.mu.Unlock()
	now := a.clock.Now()
	if !c.Old(now) || now.Before(a.renewAfter) {
		return
	}
	var answer api.Certificate
	err := a.call(ctx, a.pace.call, api.OpAgentRenew, api.Ack{}, &answer)
	if err == nil {
		err = c.Accept(answer.Chain, id.Fingerprint)
	}
	if err == nil {
		err = a.use(id, c)
	}
	if err != nil {
		a.renewAfter = now.Add(a.pace.renew)
		a.log.Warn("renew this VM's certificate", "error", err)
		return
	}
	a.log.Info("certificate renewed")
}
