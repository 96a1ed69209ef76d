package idtoken

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/internal/clock"
)

const audience = "sluice:enroll:aa:bb"

var signer, otherSigner = newKey(), newKey()

func newKey() *rsa.PrivateKey {
	k, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		panic(err)
	}
	return k
}

// google is Google's key set.
type google struct {
	*httptest.Server
	mu      sync.Mutex // guards what follows
	keys    map[string]*rsa.PublicKey
	fetches int
	down    bool
}

func newGoogle(t *testing.T) *google {
	g := &google{keys: map[string]*rsa.PublicKey{"k1": &signer.PublicKey}}
	g.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.fetches++
		if g.down || r.URL.Path != "/oauth2/v3/certs" {
			http.Error(w, "no", http.StatusServiceUnavailable)
			return
		}
		var set struct {
			Keys []map[string]string `json:"keys"`
		}
		set.Keys = append(set.Keys, map[string]string{"kty": "EC", "kid": "ec", "crv": "P-256"})
		for kid, k := range g.keys {
			set.Keys = append(set.Keys, map[string]string{"kty": "RSA", "alg": "RS256", "use": "sig", "kid": kid,
				"n": base64.RawURLEncoding.EncodeToString(k.N.Bytes()), "e": "AQAB"})
		}
		json.NewEncoder(w).Encode(set)
	}))
	t.Cleanup(g.Close)
	return g
}

func (g *google) set(f func(*google)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f(g)
}

// at is a clock that a test moves.
type at struct {
	clock.Clock
	now time.Time
}

func (c *at) Now() time.Time { return c.now }

var start = time.Unix(1800000000, 0)

func goodClaims() jwt.MapClaims {
	return jwt.MapClaims{
		"iss": Issuer, "aud": audience, "sub": "117", "azp": "117", "email": "sluice-node@pp.iam.gserviceaccount.com", "email_verified": true,
		"iat": start.Add(-time.Second).Unix(), "exp": start.Add(time.Hour).Unix(),
		"google": map[string]any{"compute_engine": map[string]any{
			"instance_id": "4711", "instance_name": "n1", "zone": "us-central1-a", "project_id": "pp", "project_number": 42,
			"instance_creation_timestamp": start.Add(-time.Minute).Unix(),
		}},
	}
}

func signed(t *testing.T, claims jwt.MapClaims, kid string, key *rsa.PrivateKey) string {
	t.Helper()
	token := jwt.NewWithClaims(jwt.SigningMethodRS256, claims)
	token.Header["kid"] = kid
	s, err := token.SignedString(key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestVerify(t *testing.T) {
	g := newGoogle(t)
	got, err := New(g.URL, &at{now: start}).Verify(t.Context(), signed(t, goodClaims(), "k1", signer), audience)
	if err != nil {
		t.Fatal(err)
	}
	want := Instance{ID: "4711", Name: "n1", Zone: "us-central1-a", Project: "pp", Created: start.Add(-time.Minute)}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func raw(v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return base64.RawURLEncoding.EncodeToString(data)
}

func TestVerifyRefuses(t *testing.T) {
	g := newGoogle(t)
	good := signed(t, goodClaims(), "k1", signer)
	with := func(change func(jwt.MapClaims)) string {
		c := maps.Clone(goodClaims())
		change(c)
		return signed(t, c, "k1", signer)
	}
	vm := func(c jwt.MapClaims) map[string]any {
		return c["google"].(map[string]any)["compute_engine"].(map[string]any)
	}
	// Everybody can read Google's public key; it must not do as a secret.
	hs256 := func(secret []byte) string {
		text := raw(map[string]string{"alg": "HS256", "typ": "JWT", "kid": "k1"}) + "." + raw(goodClaims())
		mac := hmac.New(sha256.New, secret)
		mac.Write([]byte(text))
		return text + "." + base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
	}
	der, err := x509.MarshalPKIXPublicKey(&signer.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(good, ".")
	changed := goodClaims()
	vm(changed)["instance_name"] = "n2"
	ps256 := func() string {
		token := jwt.NewWithClaims(jwt.SigningMethodPS256, goodClaims())
		token.Header["kid"] = "k1"
		s, err := token.SignedString(signer)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	for _, tt := range []struct{ name, token, want string }{
		{"forged: another key", signed(t, goodClaims(), "k1", otherSigner), "signature is invalid"},
		{"forged: an unknown key", signed(t, goodClaims(), "k2", otherSigner), "no key"},
		{"forged: no key id", signed(t, goodClaims(), "", signer), "no key"},
		{"forged: the elliptic key's id", signed(t, goodClaims(), "ec", signer), "no key"},
		{"forged: alg none", raw(map[string]string{"alg": "none", "kid": "k1"}) + "." + raw(goodClaims()) + ".", "signing method none is invalid"},
		{"forged: HS256 with the public key (PEM)", hs256(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})), "signing method HS256 is invalid"},
		{"forged: HS256 with the public key (DER)", hs256(der), "signing method HS256 is invalid"},
		{"another algorithm of the same key", ps256(), "signing method PS256 is invalid"},
		{"changed", parts[0] + "." + raw(changed) + "." + parts[2], "signature is invalid"},
		{"no signature", parts[0] + "." + parts[1] + ".", "signature is invalid"},
		{"expired", with(func(c jwt.MapClaims) { c["exp"] = start.Add(-time.Minute).Unix() }), "expired"},
		{"without an end", with(func(c jwt.MapClaims) { delete(c, "exp") }), "exp"},
		{"six minutes old", with(func(c jwt.MapClaims) { c["iat"] = start.Add(-6 * time.Minute).Unix() }), "within the last minutes"},
		{"from the future", with(func(c jwt.MapClaims) { c["iat"] = start.Add(2 * time.Minute).Unix() }), "used before issued"},
		{"of no time", with(func(c jwt.MapClaims) { delete(c, "iat") }), "within the last minutes"},
		{"not valid yet", with(func(c jwt.MapClaims) { c["nbf"] = start.Add(2 * time.Minute).Unix() }), "not valid yet"},
		{"another issuer", with(func(c jwt.MapClaims) { c["iss"] = "https://accounts.example.com" }), "issuer"},
		{"the issuer without https", with(func(c jwt.MapClaims) { c["iss"] = "accounts.google.com" }), "issuer"},
		{"replayed: another key's or cluster's audience", with(func(c jwt.MapClaims) { c["aud"] = audience + "c" }), "audience"},
		{"no audience", with(func(c jwt.MapClaims) { delete(c, "aud") }), "aud"},
		{"several audiences", with(func(c jwt.MapClaims) { c["aud"] = []string{audience, "x"} }), "several audiences"},
		{"format=standard", with(func(c jwt.MapClaims) { delete(c, "google") }), "format=full"},
		{"no instance id", with(func(c jwt.MapClaims) { delete(vm(c), "instance_id") }), "format=full"},
		{"no creation time", with(func(c jwt.MapClaims) { delete(vm(c), "instance_creation_timestamp") }), "format=full"},
		{"no project", with(func(c jwt.MapClaims) { delete(vm(c), "project_id") }), "format=full"},
		{"empty", "", "malformed"},
		{"no token", "x.y.z", "malformed"},
		{"long", strings.Repeat("x", maxToken+1), "longer"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := New(g.URL, &at{now: start})
			in, err := v.Verify(t.Context(), tt.token, audience)
			if err == nil || errors.Is(err, ErrUnavailable) || in != (Instance{}) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %+v, %v, want an error with %q", in, err, tt.want)
			}
		})
	}
}

// Clocks of VMs and of Google are not quite equal.
func TestLeeway(t *testing.T) {
	g := newGoogle(t)
	for _, d := range []time.Duration{-20 * time.Second, 20 * time.Second, 5 * time.Minute} {
		v := New(g.URL, &at{now: start.Add(d)})
		if _, err := v.Verify(t.Context(), signed(t, goodClaims(), "k1", signer), audience); err != nil {
			t.Errorf("%v later: %v", d, err)
		}
	}
}

func TestKeysAreCachedAndRotate(t *testing.T) {
	g := newGoogle(t)
	now := &at{now: start}
	v := New(g.URL, now)
	verify := func(kid string, key *rsa.PrivateKey) error {
		c := goodClaims()
		c["iat"], c["exp"] = now.now.Unix(), now.now.Add(time.Hour).Unix()
		_, err := v.Verify(t.Context(), signed(t, c, kid, key), audience)
		return err
	}
	fetches := func() (n int) { g.set(func(g *google) { n = g.fetches }); return n }
	for range 3 {
		if err := verify("k1", signer); err != nil {
			t.Fatal(err)
		}
	}
	if n := fetches(); n != 1 {
		t.Errorf("%d fetches for three tokens, want 1", n)
	}
	// Forged key ids cannot make sluiced ask Google again and again, nor lock others out.
	for range 5 {
		if err := verify("forged", otherSigner); err == nil || errors.Is(err, ErrUnavailable) {
			t.Errorf("a forged key id: %v", err)
		}
	}
	if n := fetches(); n != 1 {
		t.Errorf("%d fetches after forged key ids at once, want 1", n)
	}
	g.set(func(g *google) { g.keys["k2"] = &otherSigner.PublicKey })
	now.now = now.now.Add(keysPause + time.Second)
	if err := verify("k2", otherSigner); err != nil {
		t.Errorf("a new key of Google's: %v", err)
	}
	g.set(func(g *google) { delete(g.keys, "k1") })
	now.now = now.now.Add(keysLife + time.Second)
	if err := verify("k1", signer); err == nil || errors.Is(err, ErrUnavailable) {
		t.Errorf("a key that Google took back: %v", err)
	}
	g.set(func(g *google) { g.down = true })
	if err := verify("k2", otherSigner); err != nil {
		t.Errorf("a known key while Google is away: %v", err)
	}
	now.now = now.now.Add(keysLife + time.Second)
	if err := verify("k2", otherSigner); !errors.Is(err, ErrUnavailable) {
		t.Errorf("old keys while Google is away: %v, want ErrUnavailable", err)
	}
}

func TestParseKeysRefuses(t *testing.T) {
	weak, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	n := func(k *rsa.PrivateKey) string { return base64.RawURLEncoding.EncodeToString(k.N.Bytes()) }
	for name, set := range map[string]string{
		"no JSON": "x", "empty": `{"keys":[]}`, "no base64": `{"keys":[{"kty":"RSA","kid":"a","n":"*","e":"AQAB"}]}`,
		"weak":       `{"keys":[{"kty":"RSA","kid":"a","n":"` + n(weak) + `","e":"AQAB"}]}`,
		"exponent 1": `{"keys":[{"kty":"RSA","kid":"a","n":"` + n(signer) + `","e":"AQ"}]}`,
		"encryption": `{"keys":[{"kty":"RSA","kid":"a","use":"enc","n":"` + n(signer) + `","e":"AQAB"}]}`,
	} {
		if keys, err := parseKeys([]byte(set)); err == nil {
			t.Errorf("%s: %v", name, keys)
		}
	}
}

func FuzzVerify(f *testing.F) {
	f.Add("a.b.c")
	f.Add(raw(map[string]string{"alg": "RS256", "kid": "k1"}) + "." + raw(goodClaims()) + ".AAAA")
	f.Add(raw(map[string]any{"alg": []int{1}, "kid": 7}) + "." + raw([]int{1}) + ".AAAA")
	v := New("http://127.0.0.1:1", &at{now: start})
	v.keys, v.fetched, v.tried = map[string]*rsa.PublicKey{"k1": &signer.PublicKey}, start, start
	f.Fuzz(func(t *testing.T, token string) {
		if in, err := v.Verify(t.Context(), token, audience); err == nil {
			t.Errorf("accepted: %+v", in)
		}
	})
}

func FuzzParseKeys(f *testing.F) {
	f.Add([]byte(`{"keys":[{"kty":"RSA","kid":"a","n":"AQAB","e":"AQAB"}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		keys, err := parseKeys(data)
		for kid, k := range keys {
			if err != nil || kid == "" || k.N.BitLen() < minBits {
				t.Errorf("%q: %v, %v", kid, k, err)
			}
		}
	})
}
