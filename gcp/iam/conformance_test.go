package iam_test

import (
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"golang.org/x/oauth2"
	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/iam"
	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
	sandbox "github.com/sluicehpc/sluice/sandbox/iam"
)

// TestConformance makes every call but those on buckets, whose service is another; both sides are held against the descriptions.
func TestConformance(t *testing.T) {
	server := sandbox.New(sandbox.Options{Project: project})
	hs := httptest.NewServer(discoverytest.Strict(t, server, "iam", "iamcredentials", "sts", "cloudresourcemanager"))
	t.Cleanup(hs.Close)
	admin, _, err := server.Mint(server.Admin(), nil, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	c, err := iam.NewClient(ctx, gcp.Endpoints{IAM: hs.URL}, option.WithTokenSource(oauth2.StaticTokenSource(&oauth2.Token{AccessToken: admin})))
	if err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	account, err := c.CreateServiceAccount(ctx, project, "research-data", "Data")
	must(err)
	_, err = c.CreateServiceAccount(ctx, project, "research-data", "Data")
	must(err)
	role, err := c.CreateRole(ctx, project, "sluiceController", "Sluice's controller", iam.Names(iam.ControllerPermissions))
	must(err)
	_, err = c.CreateRole(ctx, project, "sluiceController", "Sluice's controller", iam.Names(iam.ControllerPermissions[1:]))
	must(err)
	_, err = c.ProjectNumber(ctx, project)
	must(err)
	member := "serviceAccount:" + account
	must(c.GrantProject(ctx, project, iam.Binding{Role: role, Members: []string{member}}))
	must(c.GrantAccount(ctx, account, iam.Binding{Role: "roles/iam.serviceAccountTokenCreator", Members: []string{"serviceAccount:" + server.Admin()}}))
	missing, err := c.TestProject(ctx, project, iam.Names(iam.ControllerPermissions))
	must(err)
	if len(missing) > 0 {
		t.Errorf("an owner lacks %q", missing)
	}
	_, err = c.TestAccount(ctx, account, iam.Names(slices.Concat(iam.DataAccountPermissions, iam.NodeAccountPermissions)))
	must(err)
	token, err := c.DataToken(ctx, iam.DataToken{Account: account, Bucket: "research-x", Prefix: "a/b/", Write: true})
	must(err)
	if token.AccessToken == "" || time.Until(token.Expiry) > iam.DefaultDataLifetime {
		t.Errorf("got a token until %v", token.Expiry)
	}
	if _, err := c.GenerateAccessToken(ctx, "nobody@"+project+".iam.gserviceaccount.com", nil, 0); err == nil {
		t.Error("got a token of an account that is not there")
	}
}

const project = "sluice-sandbox"
