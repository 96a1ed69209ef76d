// Package trust holds the keys and certificates by which sluiced and the agents of its cluster know each other.
//
// sluiced has a certificate authority of its own, and nothing else is trusted.
// Agents know it by the SHA-256 of its certificate, which is no secret and
// travels in the VMs' metadata. Agents get certificates from it when they enrol.
package trust

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sluicehpc/sluice/internal/atomicfile"
	"github.com/sluicehpc/sluice/internal/clock"
)

// DefaultDir is where sluiced keeps its authority (below $SLUICE_ROOT when that is set).
const DefaultDir = "/var/lib/sluice/tls"

// caName holds certificate and key in one file, so that no crash can part them.
const caName = "ca.pem"

const (
	// caLife is long because agents pin the authority: it must outlive the cluster.
	caLife = 20 * 365 * 24 * time.Hour
	// life of the certificates of sluiced and of agents. Both are renewed when
	// half of it is over.
	life = 30 * 24 * time.Hour
	// early is how far back certificates are valid: a VM's clock may be behind.
	early = time.Hour
)

// CA is a cluster's certificate authority. All methods may be called at the same time.
type CA struct {
	cluster string
	cert    *x509.Certificate
	key     crypto.Signer
	clock   clock.Clock
}

// OpenCA returns the authority that is kept in dir, with mode 0600. The first
// call makes it (ECDSA P-256). A damaged file, or another cluster's, is an error
// and never replaced, since every agent would then refuse sluiced.
func OpenCA(dir, cluster string, c clock.Clock) (*CA, error) {
	path := filepath.Join(dir, caName)
	ca, err := loadCA(dir)
	if errors.Is(err, fs.ErrNotExist) {
		if err := createCA(dir, cluster, c.Now()); err != nil {
			return nil, fmt.Errorf("make the certificate authority in %s: %w", dir, err)
		}
		ca, err = loadCA(dir)
	}
	if err != nil {
		return nil, fmt.Errorf("read the certificate authority (if it is lost, remove %s; VMs then have to be made anew): %w", path, err)
	}
	if got := ca.cert.Subject.CommonName; got != caCommonName(cluster) {
		return nil, fmt.Errorf("%s is %q, not cluster %s's: sluice.yaml's cluster cannot be renamed", path, got, cluster)
	}
	ca.cluster, ca.clock = cluster, c
	return ca, nil
}

func caCommonName(cluster string) string { return "sluice cluster " + cluster }

// Fingerprint returns the fingerprint of the authority that is kept in dir. It
// is fs.ErrNotExist where no sluiced ever ran.
func Fingerprint(dir string) (string, error) {
	ca, err := loadCA(dir)
	if err != nil {
		return "", fmt.Errorf("read the certificate authority in %s: %w", dir, err)
	}
	return ca.Fingerprint(), nil
}

// Fingerprint is the SHA-256 of the authority's certificate (DER) in hex.
func (ca *CA) Fingerprint() string { return fingerprint(ca.cert.Raw) }

func fingerprint(der []byte) string {
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:])
}

func loadCA(dir string) (*CA, error) {
	data, err := os.ReadFile(filepath.Join(dir, caName))
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(data, data)
	if err != nil {
		return nil, err
	}
	key, ok := pair.PrivateKey.(crypto.Signer)
	if !ok || !pair.Leaf.IsCA {
		return nil, errors.New("it is not the certificate and key of an authority")
	}
	return &CA{cert: pair.Leaf, key: key}, nil
}

func createCA(dir, cluster string, now time.Time) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: caCommonName(cluster)},
		NotBefore:             now.Add(-early),
		NotAfter:              now.Add(caLife),
		KeyUsage:              x509.KeyUsageCertSign,
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true, // it signs no other authority
	}
	der, err := sign(template, template, &key.PublicKey, key)
	if err != nil {
		return err
	}
	keyPEM, err := encodeKey(key, nil)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return atomicfile.Write(filepath.Join(dir, caName), append(encodeCert(der), keyPEM...), 0o600)
}

func sign(template, parent *x509.Certificate, pub any, signer crypto.Signer) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	template.SerialNumber = serial
	return x509.CreateCertificate(rand.Reader, template, parent, pub, signer)
}

func encodeCert(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func encodeKey(key *ecdsa.PrivateKey, headers map[string]string) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Headers: headers, Bytes: der}), nil
}

// Sign gives an agent a certificate for its public key, as PEM with the
// authority's own behind it, and says when it ends.
func (ca *CA) Sign(pub *ecdsa.PublicKey, a Agent) (chain []byte, until time.Time, err error) {
	if a.Cluster != ca.cluster {
		return nil, until, fmt.Errorf("sign a certificate: agent of cluster %q, this is %q", a.Cluster, ca.cluster)
	}
	now := ca.clock.Now()
	until = now.Add(life)
	der, err := sign(&x509.Certificate{
		Subject:     pkix.Name{CommonName: a.Node},
		URIs:        a.uris(),
		NotBefore:   now.Add(-early),
		NotAfter:    until,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, // so that no agent can play sluiced
	}, ca.cert, pub, ca.key)
	if err != nil {
		return nil, until, fmt.Errorf("sign a certificate for %s: %w", a.Node, err)
	}
	return append(encodeCert(der), encodeCert(ca.cert.Raw)...), until, nil
}

// ServerTLS is how sluiced listens for agents under the given host names and
// addresses. A caller without a certificate is let in: it may want to enrol.
// One that shows a certificate must show a valid one of this authority.
func (ca *CA) ServerTLS(hosts []string) *tls.Config {
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	own := &serverCert{ca: ca, hosts: hosts}
	return &tls.Config{
		MinVersion:     tls.VersionTLS13,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return own.current() },
		ClientAuth:     tls.VerifyClientCertIfGiven,
		ClientCAs:      pool,
		Time:           ca.clock.Now,
	}
}

// serverCert is sluiced's certificate, made at its start and again when it
// grows old. Its key never leaves the process.
type serverCert struct {
	ca    *CA
	hosts []string

	mu   sync.Mutex // guards cert
	cert *tls.Certificate
}

func (s *serverCert) current() (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.ca.clock.Now()
	if s.cert != nil && !old(s.cert.Leaf, now) {
		return s.cert, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: "sluiced"},
		NotBefore:   now.Add(-early),
		NotAfter:    now.Add(life),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, h := range s.hosts {
		if ip := net.ParseIP(h); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, h)
		}
	}
	der, err := sign(template, s.ca.cert, &key.PublicKey, s.ca.key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	s.cert = &tls.Certificate{Certificate: [][]byte{der, s.ca.cert.Raw}, PrivateKey: key, Leaf: leaf}
	return s.cert, nil
}

// old tells whether a certificate is to be renewed: half of its life is over.
func old(c *x509.Certificate, now time.Time) bool {
	return now.After(c.NotBefore.Add(c.NotAfter.Sub(c.NotBefore) / 2))
}
