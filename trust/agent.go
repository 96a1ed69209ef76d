package trust

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/sluicehpc/sluice/api"
)

// Agent is who an agent's certificate says it is.
type Agent struct {
	Cluster  string
	Role     api.Role
	Instance string // Compute Engine's numeric id of the VM, which is never given twice
	Node     string // the VM's name, and Slurm's name of the node
}

// scheme of the URI in an agent's certificate: sluice://CLUSTER/ROLE/INSTANCE.
const scheme = "sluice"

func (a Agent) uris() []*url.URL {
	return []*url.URL{{Scheme: scheme, Host: a.Cluster, Path: "/" + string(a.Role) + "/" + a.Instance}}
}

// AgentOf reads an agent's certificate, whose chain has been verified before.
func AgentOf(c *x509.Certificate) (Agent, error) {
	if len(c.URIs) != 1 || c.URIs[0].Scheme != scheme || c.Subject.CommonName == "" {
		return Agent{}, errors.New("the certificate is not an agent's")
	}
	u := c.URIs[0]
	role, instance, ok := strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	a := Agent{Cluster: u.Host, Role: api.Role(role), Instance: instance, Node: c.Subject.CommonName}
	if !ok || a.Cluster == "" || a.Instance == "" || !a.Role.Valid() {
		return Agent{}, fmt.Errorf("the certificate is not an agent's: %s", u)
	}
	return a, nil
}

// KeyHash is the SHA-256 of a public key (its SubjectPublicKeyInfo) in hex.
func KeyHash(subjectPublicKeyInfo []byte) string {
	sum := sha256.Sum256(subjectPublicKeyInfo)
	return hex.EncodeToString(sum[:])
}

// Audience is what an identity token must be made out to when it comes with a
// request for a certificate. It names the cluster's authority and the key, so
// that a token enrols nobody else and nowhere else.
func Audience(authority, keyHash string) string { return "sluice:enroll:" + authority + ":" + keyHash }

// ParseRequest reads an agent's request for a certificate (PEM) and checks that
// its sender holds the key, which must be ECDSA P-256. Nothing else that the
// request says counts.
func ParseRequest(data []byte) (key *ecdsa.PublicKey, keyHash string, err error) {
	block, rest := pem.Decode(data)
	if block == nil || block.Type != "CERTIFICATE REQUEST" || len(strings.TrimSpace(string(rest))) > 0 {
		return nil, "", errors.New("the request for a certificate is not one block of PEM")
	}
	r, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, "", fmt.Errorf("the request for a certificate: %w", err)
	}
	if err := r.CheckSignature(); err != nil {
		return nil, "", fmt.Errorf("the request for a certificate: %w", err)
	}
	key, ok := r.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, "", errors.New("the request for a certificate: its key is not ECDSA P-256")
	}
	return key, KeyHash(r.RawSubjectPublicKeyInfo), nil
}

// ClientTLS is how an agent calls the sluiced whose authority has the given
// fingerprint. c is nil for a call without a certificate.
func ClientTLS(authority string, c *Credentials) (*tls.Config, error) {
	want := strings.ToLower(authority)
	if b, err := hex.DecodeString(want); err != nil || len(b) != sha256.Size {
		return nil, fmt.Errorf("fingerprint of sluiced %q is not a SHA-256 in hex", authority)
	}
	config := &tls.Config{
		MinVersion: tls.VersionTLS13,
		// The pinned authority replaces the machine's own; VerifyConnection runs on resumed sessions too.
		InsecureSkipVerify: true,
		VerifyConnection:   func(s tls.ConnectionState) error { return verifyServer(s.PeerCertificates, want, time.Now()) },
	}
	if c != nil && len(c.chain) > 0 {
		cert := tls.Certificate{Certificate: [][]byte{c.chain[0].Raw}, PrivateKey: c.key, Leaf: c.chain[0]}
		config.Certificates = []tls.Certificate{cert}
	}
	return config, nil
}

// verifyServer checks sluiced's chain: its certificate, and the pinned authority that signed it.
func verifyServer(chain []*x509.Certificate, authority string, now time.Time) error {
	if len(chain) != 2 {
		return fmt.Errorf("sluiced showed %d certificates, want its own and its authority's", len(chain))
	}
	ca := chain[1]
	if got := fingerprint(ca.Raw); got != authority {
		return fmt.Errorf("the authority of sluiced's certificate has the fingerprint %s, want %s", got, authority)
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	_, err := chain[0].Verify(x509.VerifyOptions{Roots: roots, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	return err
}
