package remote

import (
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
	"time"

	"github.com/sluicehpc/sluice/internal/atomicfile"
)

// DefaultDir is where sluiced keeps its certificate (below $SLUICE_ROOT when that is set).
const DefaultDir = "/var/lib/sluice/tls"

// pemName holds certificate and key in one file, so that no crash can part them.
const pemName = "sluiced.pem"

// validFor is long because agents pin the certificate: it must outlive the cluster.
const validFor = 20 * 365 * 24 * time.Hour

// Certificate returns the certificate kept in dir and the SHA-256 of its DER
// form in hex, by which agents know it. The first call makes it (ECDSA P-256,
// self-signed, for the given host names and addresses) with mode 0600; later
// calls return the same one, whatever the hosts. A damaged file is an error and
// never replaced, since every agent would then refuse sluiced.
func Certificate(dir string, hosts []string) (tls.Certificate, string, error) {
	cert, err := load(dir)
	if errors.Is(err, fs.ErrNotExist) {
		if err := create(dir, hosts); err != nil {
			return tls.Certificate{}, "", fmt.Errorf("make the certificate in %s: %w", dir, err)
		}
		cert, err = load(dir)
	}
	if err != nil {
		return tls.Certificate{}, "", fmt.Errorf("read the certificate (if it is lost, remove %s and start the agents with the new fingerprint): %w",
			filepath.Join(dir, pemName), err)
	}
	return cert, fingerprint(cert.Certificate[0]), nil
}

// Fingerprint returns the fingerprint of the certificate kept in dir. It is
// fs.ErrNotExist where no sluiced ever ran.
func Fingerprint(dir string) (string, error) {
	cert, err := load(dir)
	if err != nil {
		return "", fmt.Errorf("read the certificate in %s: %w", dir, err)
	}
	return fingerprint(cert.Certificate[0]), nil
}

func fingerprint(der []byte) string {
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:])
}

func load(dir string) (tls.Certificate, error) {
	data, err := os.ReadFile(filepath.Join(dir, pemName))
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.X509KeyPair(data, data)
}

func create(dir string, hosts []string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "sluiced"},
		NotBefore:    now.Add(-time.Hour), // a VM's clock may be behind
		NotAfter:     now.Add(validFor),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, h)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	data := append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})...)
	return atomicfile.Write(filepath.Join(dir, pemName), data, 0o600)
}
