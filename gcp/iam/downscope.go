package iam

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/oauth2"
	"google.golang.org/api/googleapi"

	"github.com/sluicehpc/sluice/gcp"
)

// Boundary is a credential access boundary: the most that a token may be used for, whatever its account may do.
type Boundary struct {
	Rules []Rule `json:"accessBoundaryRules"` // 1 to 10; what one of them allows is allowed
}

// Rule of a Boundary.
type Rule struct {
	Resource    string     `json:"availableResource"`    // //storage.googleapis.com/projects/_/buckets/BUCKET
	Permissions []string   `json:"availablePermissions"` // inRole:ROLE
	Condition   *Condition `json:"availabilityCondition,omitempty"`
}

// Condition is an expression in the Common Expression Language, at most 2048 characters long in a Rule.
type Condition struct {
	Title      string `json:"title,omitempty"`
	Expression string `json:"expression"`
}

// maxExpression is the longest expression that the service takes, in characters.
const maxExpression = 2048

// Downscope exchanges a token for one that can do no more than the boundary says. It lives as long as the token does.
// Only Cloud Storage takes it.
func (c *Client) Downscope(ctx context.Context, token *oauth2.Token, b Boundary) (*oauth2.Token, error) {
	const doing = "downscope a token"
	options, err := json.Marshal(map[string]any{"accessBoundary": b})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	form := url.Values{
		"grant_type":           {"urn:ietf:params:oauth:grant-type:token-exchange"},
		"subject_token_type":   {"urn:ietf:params:oauth:token-type:access_token"},
		"requested_token_type": {"urn:ietf:params:oauth:token-type:access_token"},
		"subject_token":        {token.AccessToken},
		"options":              {string(options)},
	}.Encode()
	var out struct {
		AccessToken string `json:"access_token"`
		ExpiresIn   int64  `json:"expires_in"` // absent where the source's expiry is the answer
	}
	var asked time.Time
	err = gcp.Retry(ctx, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, "POST", c.sts()+"/v1/token", strings.NewReader(form))
		if err != nil {
			return err
		}
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		asked = time.Now()
		return explain(exchange(c.plain, req, &out))
	})
	if err != nil {
		return nil, gcp.Wrap(err, doing)
	}
	if out.AccessToken == "" {
		return nil, errors.New(doing + ": the service answered without one")
	}
	expiry := token.Expiry
	if out.ExpiresIn > 0 {
		if t := asked.Add(time.Duration(out.ExpiresIn) * time.Second); expiry.IsZero() || t.Before(expiry) {
			expiry = t
		}
	}
	return &oauth2.Token{AccessToken: out.AccessToken, TokenType: "Bearer", Expiry: expiry}, nil
}

// explain moves the words of OAuth's error form to where those of Google's other services are.
func explain(err error) error {
	e, ok := errors.AsType[*googleapi.Error](err)
	if !ok || e.Message != "" {
		return err
	}
	var body struct {
		Error       string `json:"error"`
		Description string `json:"error_description"`
	}
	if json.Unmarshal([]byte(e.Body), &body) == nil && body.Error != "" {
		e.Message = body.Error + ": " + body.Description
	}
	return e
}

// DataToken says what a token for data may be used for.
type DataToken struct {
	Account string // the service account's email, on which this process's account holds iam.serviceAccounts.getAccessToken
	Bucket  string
	Prefix  string // of the objects' names; "" is the whole bucket
	Write   bool   // to create, replace and delete objects too, not only to list and read them
	// Lifetime is the token's, at most MaxLifetime; 0 is DefaultDataLifetime.
	Lifetime time.Duration
}

// DefaultDataLifetime is how long a token for data lives.
const DefaultDataLifetime = 15 * time.Minute

// The roles that bound tokens for data.
const (
	ObjectViewer = "roles/storage.objectViewer"
	ObjectUser   = "roles/storage.objectUser"
)

// Boundary returns the boundary of the token, or an error where bucket or prefix are none, or the prefix is too long for a condition.
func (d DataToken) Boundary() (Boundary, error) {
	if err := check(bucketName, "bucket", d.Bucket); err != nil {
		return Boundary{}, err
	}
	if !utf8.ValidString(d.Prefix) {
		return Boundary{}, fmt.Errorf("prefix %q is not UTF-8", d.Prefix)
	}
	role := ObjectViewer
	if d.Write {
		role = ObjectUser
	}
	name := "projects/_/buckets/" + d.Bucket
	r := Rule{Resource: "//storage.googleapis.com/" + name, Permissions: []string{"inRole:" + role}}
	if d.Prefix != "" {
		// Reading and writing are asked of the object, listing of the bucket with the prefix as an attribute.
		r.Condition = &Condition{Title: "prefix", Expression: fmt.Sprintf(
			`resource.name.startsWith(%s) || api.getAttribute("storage.googleapis.com/objectListPrefix", "").startsWith(%s)`,
			strconv.Quote(name+"/objects/"+d.Prefix), strconv.Quote(d.Prefix))}
		if utf8.RuneCountInString(r.Condition.Expression) > maxExpression {
			return Boundary{}, fmt.Errorf("prefix of %d bytes in gs://%s is too long for a token's condition", len(d.Prefix), d.Bucket)
		}
	}
	return Boundary{Rules: []Rule{r}}, nil
}

// DataToken returns a token for data: short-lived, and good for one bucket prefix alone.
func (c *Client) DataToken(ctx context.Context, d DataToken) (*oauth2.Token, error) {
	b, err := d.Boundary()
	if err != nil {
		return nil, fmt.Errorf("get a token for data: %w", err)
	}
	if d.Lifetime == 0 {
		d.Lifetime = DefaultDataLifetime
	}
	token, err := c.GenerateAccessToken(ctx, d.Account, nil, d.Lifetime)
	if err != nil {
		return nil, err
	}
	return c.Downscope(ctx, token, b)
}

// mintTimeout bounds what a data source's Token may wait.
const mintTimeout = time.Minute

// DataSource returns a source of DataTokens, for option.WithTokenSource. It gets a new token two minutes before the old one's
// end (a shorter-lived one at its half). Its Token fails once ctx has ended.
func (c *Client) DataSource(ctx context.Context, d DataToken) oauth2.TokenSource {
	early := 2 * time.Minute
	if d.Lifetime > 0 {
		early = min(early, d.Lifetime/2)
	}
	return oauth2.ReuseTokenSourceWithExpiry(nil, &dataSource{ctx, c, d}, early)
}

type dataSource struct {
	ctx    context.Context // oauth2.TokenSource's Token has none
	client *Client
	data   DataToken
}

func (s *dataSource) Token() (*oauth2.Token, error) {
	ctx, cancel := context.WithTimeout(s.ctx, mintTimeout)
	defer cancel()
	return s.client.DataToken(ctx, s.data)
}
