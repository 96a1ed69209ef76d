// Package iam gets short-lived credentials for other accounts, and asks and changes who may do what, over Google's REST interfaces.
//
// One endpoint stands for iam, iamcredentials, sts, cloudresourcemanager and Google's key set: see gcp.Endpoints.
package iam

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"time"

	"golang.org/x/oauth2"
	"google.golang.org/api/googleapi"
	"google.golang.org/api/option"
	htransport "google.golang.org/api/transport/http"

	"github.com/sluicehpc/sluice/gcp"
)

// CloudPlatform is the scope with which an account's roles alone decide.
const CloudPlatform = "https://www.googleapis.com/auth/cloud-platform"

const (
	// callTimeout bounds one HTTP exchange.
	callTimeout = 30 * time.Second
	// maxAnswer bounds an answer's body, in bytes.
	maxAnswer = 8 << 20
)

// Client calls the services. All methods may be called at the same time. Calls that may be repeated are, while a
// service is overloaded or unreachable, until ctx ends.
type Client struct {
	http      *http.Client
	plain     *http.Client // without credentials of its own
	endpoints gcp.Endpoints
}

// NewClient returns a client with the application's default credentials.
func NewClient(ctx context.Context, endpoints gcp.Endpoints, opts ...option.ClientOption) (*Client, error) {
	hc, _, err := htransport.NewClient(ctx, append([]option.ClientOption{option.WithScopes(CloudPlatform)}, opts...)...)
	if err != nil {
		return nil, fmt.Errorf("IAM client: %w", err)
	}
	return &Client{http: hc, plain: &http.Client{}, endpoints: endpoints}, nil
}

// KeySetURL is where the public keys of Google's identity tokens are.
func KeySetURL(endpoints gcp.Endpoints) string {
	return at(endpoints.IAM, "https://www.googleapis.com") + "/oauth2/v3/certs"
}

func at(endpoint, google string) string {
	if endpoint == "" {
		return google
	}
	return strings.TrimSuffix(endpoint, "/")
}

func (c *Client) credentials() string {
	return at(c.endpoints.IAM, "https://iamcredentials.googleapis.com")
}
func (c *Client) sts() string { return at(c.endpoints.IAM, "https://sts.googleapis.com") }
func (c *Client) iam() string { return at(c.endpoints.IAM, "https://iam.googleapis.com") }
func (c *Client) projects() string {
	return at(c.endpoints.IAM, "https://cloudresourcemanager.googleapis.com")
}
func (c *Client) storage() string { return at(c.endpoints.Storage, "https://storage.googleapis.com") }

var (
	accountEmail = regexp.MustCompile(`^[a-z0-9][-a-z0-9._]*@[-a-z0-9._]+$`)
	projectName  = regexp.MustCompile(`^[a-z0-9][-a-z0-9.:]*$`)
	bucketName   = regexp.MustCompile(`^[a-z0-9][-_.a-z0-9]*$`)
)

func check(re *regexp.Regexp, what, name string) error {
	if !re.MatchString(name) {
		return fmt.Errorf("%q is no %s", name, what)
	}
	return nil
}

// MaxLifetime is the longest life of a token that GenerateAccessToken gets without an organisation policy.
const MaxLifetime = time.Hour

// GenerateAccessToken returns a token of a service account (its email), on which this process's account must hold
// iam.serviceAccounts.getAccessToken. Scopes nil means CloudPlatform; lifetime is at most MaxLifetime, and 0 is MaxLifetime.
func (c *Client) GenerateAccessToken(ctx context.Context, account string, scopes []string, lifetime time.Duration) (*oauth2.Token, error) {
	doing := "get a token of " + account
	if err := check(accountEmail, "service account's email", account); err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	if scopes == nil {
		scopes = []string{CloudPlatform}
	}
	if lifetime == 0 {
		lifetime = MaxLifetime
	}
	in := map[string]any{"scope": scopes, "lifetime": fmt.Sprintf("%ds", int(lifetime.Seconds()))}
	var out struct {
		AccessToken string    `json:"accessToken"`
		ExpireTime  time.Time `json:"expireTime"`
	}
	path := c.credentials() + "/v1/projects/-/serviceAccounts/" + url.PathEscape(account) + ":generateAccessToken"
	if err := c.read(ctx, "POST", path, in, &out); err != nil {
		return nil, gcp.Wrap(err, doing)
	}
	if out.AccessToken == "" {
		return nil, fmt.Errorf("%s: the service answered without one", doing)
	}
	return &oauth2.Token{AccessToken: out.AccessToken, TokenType: "Bearer", Expiry: out.ExpireTime}, nil
}

// TestProject returns those of the permissions that this process's account has not on a project.
func (c *Client) TestProject(ctx context.Context, project string, permissions []string) (missing []string, err error) {
	if err := check(projectName, "project", project); err != nil {
		return nil, fmt.Errorf("test permissions: %w", err)
	}
	return c.test(ctx, "project "+project, c.projects()+"/v1/projects/"+project+":testIamPermissions", permissions)
}

// TestAccount returns those of the permissions that this process's account has not on a service account (its email).
func (c *Client) TestAccount(ctx context.Context, account string, permissions []string) (missing []string, err error) {
	if err := check(accountEmail, "service account's email", account); err != nil {
		return nil, fmt.Errorf("test permissions: %w", err)
	}
	return c.test(ctx, "service account "+account, c.iam()+"/v1/projects/-/serviceAccounts/"+url.PathEscape(account)+":testIamPermissions", permissions)
}

func (c *Client) test(ctx context.Context, what, path string, permissions []string) ([]string, error) {
	var missing []string
	// The service takes 100 in a call.
	for len(permissions) > 0 {
		n := min(100, len(permissions))
		var out struct{ Permissions []string }
		if err := c.read(ctx, "POST", path, map[string]any{"permissions": permissions[:n]}, &out); err != nil {
			return nil, gcp.Wrap(err, "test permissions on "+what)
		}
		missing = append(missing, without(permissions[:n], out.Permissions)...)
		permissions = permissions[n:]
	}
	return missing, nil
}

// TestBucket returns those of the permissions that the token's owner has not on a bucket; a nil token is this process's.
func (c *Client) TestBucket(ctx context.Context, bucket string, permissions []string, token *oauth2.Token) (missing []string, err error) {
	if err := check(bucketName, "bucket", bucket); err != nil {
		return nil, fmt.Errorf("test permissions: %w", err)
	}
	path := c.storage() + "/storage/v1/b/" + bucket + "/iam/testPermissions?" + url.Values{"permissions": permissions}.Encode()
	var out struct{ Permissions []string }
	err = gcp.Retry(ctx, func(ctx context.Context) error { return c.do(ctx, "GET", path, token, nil, &out) })
	if err != nil {
		return nil, gcp.Wrap(err, "test permissions on gs://"+bucket)
	}
	return without(permissions, out.Permissions), nil
}

func without(all, some []string) []string {
	have := map[string]bool{}
	for _, s := range some {
		have[s] = true
	}
	var rest []string
	for _, a := range all {
		if !have[a] {
			rest = append(rest, a)
		}
	}
	return rest
}

// read makes an exchange that may be repeated.
func (c *Client) read(ctx context.Context, method, path string, in, out any) error {
	return gcp.Retry(ctx, func(ctx context.Context) error { return c.do(ctx, method, path, nil, in, out) })
}

// do makes one exchange of JSON with this process's credentials or, where it is not nil, a token. in and out may be nil.
func (c *Client) do(ctx context.Context, method, path string, token *oauth2.Token, in, out any) error {
	var payload io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		payload = bytes.NewReader(b)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, path, payload)
	if err != nil {
		return err
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if token == nil {
		return exchange(c.http, req, out)
	}
	token.SetAuthHeader(req)
	return exchange(c.plain, req, out)
}

func exchange(c *http.Client, req *http.Request, out any) error {
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := googleapi.CheckResponse(resp); err != nil {
		return err
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(answer, out); err != nil {
		return fmt.Errorf("the answer is not what was asked for: %w", err)
	}
	return nil
}
