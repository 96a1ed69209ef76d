package iam

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"strconv"
	"time"
)

// keys sign identity tokens.
type keys struct {
	private *rsa.PrivateKey
	id      string
	err     error
}

func newKeys() *keys {
	k := &keys{}
	if k.private, k.err = rsa.GenerateKey(rand.Reader, 2048); k.err == nil {
		sum := sha256.Sum256(k.private.N.Bytes())
		k.id = hex.EncodeToString(sum[:20])
	}
	return k
}

// certs is the key set (RFC 7517) with which identity tokens are verified.
func (s *Server) certs(*call) (any, error) {
	k := s.keys()
	if k.err != nil {
		return nil, k.err
	}
	b64 := base64.RawURLEncoding.EncodeToString
	return map[string]any{"keys": []any{map[string]string{
		"kty": "RSA", "alg": "RS256", "use": "sig", "kid": k.id,
		"n": b64(k.private.N.Bytes()), "e": b64(big.NewInt(int64(k.private.E)).Bytes()),
	}}}, nil
}

// identityLife is how long an identity token is valid.
const identityLife = time.Hour

// Issuer is who signs identity tokens.
const Issuer = "https://accounts.google.com"

// IdentityToken signs who an account is, for an audience: a JSON Web Token (RS256) with Google's claims and more.
func (s *Server) IdentityToken(email, audience string, withEmail bool, more map[string]any) (string, error) {
	k := s.keys()
	if k.err != nil {
		return "", k.err
	}
	s.mu.Lock()
	a := s.accounts[email]
	now := s.now()
	s.mu.Unlock()
	if a == nil {
		return "", fmt.Errorf("no such service account: %s", email)
	}
	id := strconv.FormatUint(a.id, 10)
	claims := map[string]any{
		"iss": Issuer, "aud": audience, "sub": id, "azp": id, "iat": now.Unix(), "exp": now.Add(identityLife).Unix(),
	}
	if withEmail {
		claims["email"], claims["email_verified"] = email, true
	}
	maps.Copy(claims, more)
	header, err := json.Marshal(map[string]string{"alg": "RS256", "kid": k.id, "typ": "JWT"})
	if err != nil {
		return "", err
	}
	payload, err := json.Marshal(claims)
	if err != nil {
		return "", err
	}
	b64 := base64.RawURLEncoding.EncodeToString
	signed := b64(header) + "." + b64(payload)
	sum := sha256.Sum256([]byte(signed))
	signature, err := rsa.SignPKCS1v15(rand.Reader, k.private, crypto.SHA256, sum[:])
	if err != nil {
		return "", err
	}
	return signed + "." + b64(signature), nil
}
