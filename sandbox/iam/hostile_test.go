package iam

import (
	"testing"
	"time"

	"github.com/sluicehpc/sluice/sandbox/hostile"
)

func victim(t testing.TB) hostile.Target {
	s := New(Options{})
	token, _, err := s.Mint(s.Admin(), nil, 24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	const p = "/v1/projects/sluice-sandbox"
	return hostile.Target{
		Service: "iam", Handler: s, Header: map[string]string{"Authorization": "Bearer " + token},
		Paths: []string{
			p, p + ":getIamPolicy", p + ":setIamPolicy", p + ":testIamPermissions", p + "/serviceAccounts", p + "/serviceAccounts/a@sluice-sandbox.iam.gserviceaccount.com",
			p + "/serviceAccounts/a@sluice-sandbox.iam.gserviceaccount.com:setIamPolicy", "/v1/projects/-/serviceAccounts/a@sluice-sandbox.iam.gserviceaccount.com:generateAccessToken",
			p + "/roles", p + "/roles?roleId=r_1", p + "/roles/r_1", "/v1/token", "/v1/roles", "/oauth2/v3/certs",
		},
		Bodies: []string{
			`{"accountId":"a-1234567","serviceAccount":{"displayName":"x"}}`, `{"policy":{"bindings":[{"role":"roles/owner","members":["serviceAccount:x"],"condition":{"expression":"(((("}}],"etag":"!!"}}`,
			`{"permissions":["storage.objects.get","*",""]}`, `{"scope":["x"],"lifetime":"99999999999s","delegates":["x"]}`, `{"roleId":"r_1","role":{"includedPermissions":["x"],"stage":"?"}}`,
			`{"grantType":"urn:ietf:params:oauth:grant-type:token-exchange","requestedTokenType":"urn:ietf:params:oauth:token-type:access_token","subjectToken":"` + token + `","subjectTokenType":"urn:ietf:params:oauth:token-type:access_token","options":"%7B%22accessBoundary%22%3A%7B%7D%7D"}`,
		},
	}
}

func TestHostileRequests(t *testing.T) { hostile.Test(t, victim(t)) }

func FuzzHTTP(f *testing.F) { hostile.Fuzz(f, victim(f)) }
