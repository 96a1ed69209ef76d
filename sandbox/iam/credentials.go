package iam

import (
	"encoding/json"
	"mime"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// maxLife is how long a generated token lives at most.
const maxLife = time.Hour

// target is the account of which a credential is asked for. delegates, a chain of accounts in between, are not part of the sandbox.
func (s *Server) target(c *call, delegates []string) (*account, error) {
	if len(delegates) > 0 {
		return nil, invalid("The sandbox knows no delegates.")
	}
	if c.project != "-" {
		return nil, invalid("Invalid resource name: the project of a service account must be the wildcard -.")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	a, err := s.find(c)
	if err == nil && a.disabled {
		err = &apiError{http.StatusBadRequest, "FAILED_PRECONDITION", "The service account is disabled."}
	}
	return a, err
}

var durations = regexp.MustCompile(`^([0-9]{1,9})(?:\.0{1,9})?s$`)

func (s *Server) generateAccessToken(c *call) (any, error) {
	var in struct {
		Delegates []string `json:"delegates"`
		Scope     []string `json:"scope"`
		Lifetime  string   `json:"lifetime"`
	}
	if err := c.decode(&in); err != nil {
		return nil, err
	}
	life := maxLife
	if in.Lifetime != "" {
		m := durations.FindStringSubmatch(in.Lifetime)
		if m == nil {
			return nil, invalid("Invalid value at 'lifetime' (type.googleapis.com/google.protobuf.Duration), %q", in.Lifetime)
		}
		n, err := strconv.Atoi(m[1])
		if err != nil {
			return nil, invalid("Invalid value at 'lifetime': %v", err)
		}
		life = time.Duration(n) * time.Second
	}
	if life <= 0 || life > maxLife {
		return nil, invalid("The lifetime must be above 0 and at most %ds; a longer one needs the constraint constraints/iam.allowServiceAccountCredentialLifetimeExtension.", int(maxLife.Seconds()))
	}
	if len(in.Scope) == 0 {
		return nil, invalid("Scope required.")
	}
	for _, scope := range in.Scope {
		if u, err := url.Parse(scope); err != nil || u.Scheme != "https" || u.Host == "" {
			return nil, invalid("Invalid OAuth scope: %q", scope)
		}
	}
	a, err := s.target(c, in.Delegates)
	if err != nil {
		return nil, err
	}
	token, expires, err := s.Mint(a.email, in.Scope, life)
	if err != nil {
		return nil, err
	}
	return map[string]string{"accessToken": token, "expireTime": timestamp(expires)}, nil
}

func (s *Server) generateIDToken(c *call) (any, error) {
	var in struct {
		Delegates                  []string `json:"delegates"`
		Audience                   string   `json:"audience"`
		IncludeEmail               bool     `json:"includeEmail"`
		OrganizationNumberIncluded bool     `json:"organizationNumberIncluded"`
	}
	if err := c.decode(&in); err != nil {
		return nil, err
	}
	if in.Audience == "" {
		return nil, invalid("Audience required.")
	}
	a, err := s.target(c, in.Delegates)
	if err != nil {
		return nil, err
	}
	token, err := s.IdentityToken(a.email, in.Audience, in.IncludeEmail, nil)
	if err != nil {
		return nil, err
	}
	return map[string]string{"token": token}, nil
}

// boundaryRule is one of a credential access boundary's: the permissions of roles on a bucket and its objects, where a condition holds.
type boundaryRule struct {
	bucket string
	roles  []string
	holds  condition
}

// within reports whether one of the rules allows an access. s.mu is held.
func (s *Server) within(rules []boundaryRule, a access) bool {
	bucket, ok := bucketOf(a.resource)
	at := a.attributes()
	return ok && slices.ContainsFunc(rules, func(r boundaryRule) bool {
		return r.bucket == bucket && r.holds(at) &&
			slices.ContainsFunc(r.roles, func(role string) bool { return s.grantsPermission(role, a.permission) })
	})
}

// The words of the token service (RFC 8693).
const (
	exchangeGrant   = "urn:ietf:params:oauth:grant-type:token-exchange"
	accessTokenType = "urn:ietf:params:oauth:token-type:access_token"
)

// exchangeRequest is an ExchangeTokenRequest. A form names its fields with underscores.
type exchangeRequest struct {
	GrantType          string `json:"grantType"`
	Audience           string `json:"audience"`
	Scope              string `json:"scope"`
	RequestedTokenType string `json:"requestedTokenType"`
	SubjectToken       string `json:"subjectToken"`
	SubjectTokenType   string `json:"subjectTokenType"`
	Options            string `json:"options"`
	ActorToken         string `json:"actorToken"`
	ActorTokenType     string `json:"actorTokenType"`
}

func (c *call) exchangeRequest() (exchangeRequest, error) {
	kind, _, _ := mime.ParseMediaType(c.r.Header.Get("Content-Type"))
	if kind != "application/x-www-form-urlencoded" {
		var in exchangeRequest
		err := c.decode(&in)
		return in, err
	}
	form, err := url.ParseQuery(string(c.body))
	return exchangeRequest{
		GrantType: form.Get("grant_type"), RequestedTokenType: form.Get("requested_token_type"), SubjectToken: form.Get("subject_token"),
		SubjectTokenType: form.Get("subject_token_type"), Options: form.Get("options"),
	}, err
}

// exchange is the token service: it takes an access token and gives back one that can do less.
func (s *Server) exchange(c *call) (any, error) {
	in, err := c.exchangeRequest()
	if err != nil {
		return nil, &oauthError{"invalid_request", err.Error()}
	}
	switch {
	case in.GrantType != exchangeGrant:
		return nil, &oauthError{"unsupported_grant_type", "The grant type must be " + exchangeGrant + "."}
	case in.SubjectTokenType != accessTokenType || in.RequestedTokenType != accessTokenType:
		return nil, &oauthError{"invalid_request", "The sandbox exchanges access tokens for access tokens only."}
	case in.Options == "":
		return nil, &oauthError{"invalid_request", "The options with the access boundary are missing."}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	rules, err := s.parseBoundary(in.Options)
	if err != nil {
		return nil, &oauthError{"invalid_request", err.Error()}
	}
	g, _ := s.redeem(in.SubjectToken)
	switch {
	case g == nil:
		return nil, &oauthError{"invalid_grant", "The subject token is invalid or has expired."}
	case g.boundary != nil:
		return nil, &oauthError{"invalid_request", "The subject token is downscoped already."}
	case !slices.Contains(g.scopes, cloudPlatform):
		return nil, &oauthError{"invalid_scope", "The subject token needs the scope " + cloudPlatform + "."}
	}
	token := NewToken()
	s.keep(token, &grant{account: g.account, scopes: g.scopes, boundary: rules, expires: g.expires})
	return map[string]any{
		"access_token": token, "issued_token_type": accessTokenType, "token_type": "Bearer",
		"expires_in": int(g.expires.Sub(s.now()) / time.Second),
	}, nil
}

// Limits of a boundary.
const (
	maxRules      = 10
	maxExpression = 2048 // characters
)

var boundaryBuckets = regexp.MustCompile(`^//storage\.googleapis\.com/projects/_/buckets/([a-z0-9][-_.a-z0-9]{1,220}[a-z0-9])$`)

// parseBoundary reads the options of an exchange. s.mu is held.
func (s *Server) parseBoundary(options string) ([]boundaryRule, error) {
	var in struct {
		AccessBoundary struct {
			Rules []struct {
				Resource    string   `json:"availableResource"`
				Permissions []string `json:"availablePermissions"`
				Condition   *Expr    `json:"availabilityCondition"`
			} `json:"accessBoundaryRules"`
		} `json:"accessBoundary"`
	}
	d := json.NewDecoder(strings.NewReader(options))
	d.DisallowUnknownFields()
	if err := d.Decode(&in); err != nil {
		return nil, invalid("The options are not what they should be: %v", err)
	}
	if n := len(in.AccessBoundary.Rules); n == 0 || n > maxRules {
		return nil, invalid("An access boundary has 1 to %d rules, not %d.", maxRules, n)
	}
	var rules []boundaryRule
	for _, r := range in.AccessBoundary.Rules {
		m := boundaryBuckets.FindStringSubmatch(r.Resource)
		if m == nil {
			return nil, invalid("The available resource %q is not a bucket: //storage.googleapis.com/projects/_/buckets/NAME.", r.Resource)
		}
		rule := boundaryRule{bucket: m[1], holds: func(attributes) bool { return true }}
		for _, p := range r.Permissions {
			name, ok := strings.CutPrefix(p, "inRole:")
			if !ok || s.role(name) == nil {
				return nil, invalid("The available permission %q is not inRole:ROLE.", p)
			}
			rule.roles = append(rule.roles, name)
		}
		if len(rule.roles) == 0 {
			return nil, invalid("A rule must have available permissions.")
		}
		if r.Condition != nil {
			if utf8.RuneCountInString(r.Condition.Expression) > maxExpression {
				return nil, invalid("The expression of an availability condition is longer than %d characters.", maxExpression)
			}
			var err error
			if rule.holds, err = parseCondition(r.Condition.Expression); err != nil {
				return nil, invalid("The availability condition %q could not be compiled: %v", r.Condition.Expression, err)
			}
		}
		rules = append(rules, rule)
	}
	return rules, nil
}
