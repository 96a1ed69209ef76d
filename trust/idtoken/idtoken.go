// Package idtoken verifies the identity tokens that Google's metadata server signs for a VM (format=full).
package idtoken

import (
	"context"
	"crypto/rsa"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"github.com/sluicehpc/sluice/internal/clock"
)

// Issuer is who signs the metadata server's tokens.
const Issuer = "https://accounts.google.com"

// Google's key set: the host, and the path on it or on an endpoint that stands for it.
const (
	googleKeys = "https://www.googleapis.com"
	keysPath   = "/oauth2/v3/certs"
)

const (
	maxToken = 16 << 10 // bytes; the real ones have about 1.5 KiB
	maxKeys  = 1 << 20  // bytes of a key set
	minBits  = 2048     // of an RSA key
	// maxAge is how old a token may be: agents ask for one just before they enrol.
	maxAge = 5 * time.Minute
	// leeway allows for clocks that differ.
	leeway = 30 * time.Second
	// keysLife is for how long a key set is believed; Google announces a key a day before it is used.
	keysLife = time.Hour
	// keysPause is the least time between two fetches: a forged token may name any key.
	keysPause    = 10 * time.Second
	fetchTimeout = 10 * time.Second
)

// ErrUnavailable is wrapped when the key set cannot be had: nothing is said about the token.
var ErrUnavailable = errors.New("the key set of Google cannot be read")

// Instance is the VM that a token is about.
type Instance struct {
	ID      string // decimal
	Name    string
	Zone    string // name
	Project string // id, not number
	Created time.Time
}

// Verifier checks tokens. All methods may be called at the same time.
type Verifier struct {
	url   string
	http  *http.Client
	clock clock.Clock

	fetching sync.Mutex // held while keys are fetched; taken before mu

	mu      sync.Mutex // guards what follows
	keys    map[string]*rsa.PublicKey
	fetched time.Time // the keys
	tried   time.Time // the last fetch
}

// New makes a verifier. endpoint stands for www.googleapis.com; empty is Google's own.
func New(endpoint string, c clock.Clock) *Verifier {
	if endpoint == "" {
		endpoint = googleKeys
	}
	return &Verifier{url: strings.TrimSuffix(endpoint, "/") + keysPath, http: &http.Client{Timeout: fetchTimeout}, clock: c}
}

// claims are the token's that count.
type claims struct {
	jwt.RegisteredClaims
	Google struct {
		Instance *struct {
			ID      string `json:"instance_id"`
			Name    string `json:"instance_name"`
			Zone    string `json:"zone"`
			Project string `json:"project_id"`
			Created int64  `json:"instance_creation_timestamp"` // Unix seconds
		} `json:"compute_engine"`
	} `json:"google"`
}

// Verify returns the VM for which Google signed the token, made out to exactly
// that audience and no longer than five minutes ago. An error is about the
// token, unless it is ErrUnavailable.
func (v *Verifier) Verify(ctx context.Context, token, audience string) (Instance, error) {
	if len(token) > maxToken {
		return Instance{}, fmt.Errorf("identity token: longer than %d bytes", maxToken)
	}
	now := v.clock.Now()
	var c claims
	_, err := jwt.NewParser(
		jwt.WithValidMethods([]string{jwt.SigningMethodRS256.Alg()}),
		jwt.WithIssuer(Issuer),
		jwt.WithAudience(audience),
		jwt.WithExpirationRequired(),
		jwt.WithIssuedAt(),
		jwt.WithLeeway(leeway),
		jwt.WithTimeFunc(func() time.Time { return now }),
		jwt.WithStrictDecoding(),
	).ParseWithClaims(token, &c, func(t *jwt.Token) (any, error) {
		kid, _ := t.Header["kid"].(string)
		return v.key(ctx, kid)
	})
	if errors.Is(err, ErrUnavailable) {
		return Instance{}, err
	}
	switch in := c.Google.Instance; {
	case err != nil:
	case len(c.Audience) != 1:
		err = errors.New("it has several audiences")
	case c.IssuedAt == nil || now.Sub(c.IssuedAt.Time) > maxAge+leeway:
		err = errors.New("it was not signed within the last minutes")
	case in == nil || in.ID == "" || in.Name == "" || in.Zone == "" || in.Project == "" || in.Created == 0:
		err = errors.New("it does not say for which VM it is (format=full)")
	default:
		return Instance{ID: in.ID, Name: in.Name, Zone: in.Zone, Project: in.Project, Created: time.Unix(in.Created, 0)}, nil
	}
	return Instance{}, fmt.Errorf("identity token: %w", err)
}

// key returns the key of that id.
func (v *Verifier) key(ctx context.Context, kid string) (*rsa.PublicKey, error) {
	if k, err := v.known(kid); k != nil || err != nil {
		return k, err
	}
	v.fetching.Lock()
	defer v.fetching.Unlock()
	if k, err := v.known(kid); k != nil || err != nil {
		return k, err // somebody else fetched them meanwhile
	}
	now := v.clock.Now()
	keys, err := v.fetch(ctx)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.tried = now
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	v.keys, v.fetched = keys, now
	if k := keys[kid]; k != nil {
		return k, nil
	}
	return nil, noKey(kid)
}

// known returns the key from memory, nil when the key set is to be fetched
// first, or an error when that cannot help.
func (v *Verifier) known(kid string) (*rsa.PublicKey, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	now := v.clock.Now()
	if v.keys == nil || now.Sub(v.fetched) > keysLife {
		return nil, nil
	}
	if k := v.keys[kid]; k != nil || now.Sub(v.tried) > keysPause {
		return k, nil
	}
	return nil, noKey(kid)
}

func noKey(kid string) error { return fmt.Errorf("there is no key %.64q of Google", kid) }

func (v *Verifier) fetch(ctx context.Context) (map[string]*rsa.PublicKey, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, v.url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := v.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxKeys))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", v.url, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", v.url, resp.Status)
	}
	return parseKeys(body)
}

// parseKeys reads a JSON Web Key Set; what is not an RSA key for RS256 is left out.
func parseKeys(data []byte) (map[string]*rsa.PublicKey, error) {
	var set struct {
		Keys []struct {
			Kid, Kty, Alg, Use, N, E string
		}
	}
	if err := json.Unmarshal(data, &set); err != nil {
		return nil, fmt.Errorf("key set: %w", err)
	}
	keys := map[string]*rsa.PublicKey{}
	for _, k := range set.Keys {
		if k.Kty != "RSA" || k.Kid == "" || k.Alg != "" && k.Alg != "RS256" || k.Use != "" && k.Use != "sig" {
			continue
		}
		n, err1 := base64.RawURLEncoding.DecodeString(k.N)
		e, err2 := base64.RawURLEncoding.DecodeString(k.E)
		if err := errors.Join(err1, err2); err != nil {
			return nil, fmt.Errorf("key set: key %.64q: %w", k.Kid, err)
		}
		modulus, exponent := new(big.Int).SetBytes(n), new(big.Int).SetBytes(e)
		if modulus.BitLen() < minBits || !exponent.IsInt64() || exponent.Int64() < 3 || exponent.Int64() > 1<<31-1 {
			return nil, fmt.Errorf("key set: key %.64q is too weak or odd", k.Kid)
		}
		keys[k.Kid] = &rsa.PublicKey{N: modulus, E: int(exponent.Int64())}
	}
	if len(keys) == 0 {
		return nil, errors.New("key set: no key in it")
	}
	return keys, nil
}
