package trust

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/sluicehpc/sluice/internal/atomicfile"
)

// Credentials are a VM's key and, once it has enrolled, its certificate. They
// live in one file for as long as the VM: a new key would be a second
// enrolment, which sluiced refuses.
type Credentials struct {
	path     string
	instance string
	key      *ecdsa.PrivateKey
	chain    []*x509.Certificate // the agent's, then its authority's; nil before enrolment
}

// instanceHeader marks the key's VM, so that one made from another's disk gets a key of its own.
const instanceHeader = "Instance"

// LoadCredentials reads the file at path, or makes it with a new key (mode
// 0600) when there is none or it is another VM's.
func LoadCredentials(path, instance string) (*Credentials, error) {
	data, err := os.ReadFile(path)
	if err == nil {
		c, err := parseCredentials(path, data)
		if err != nil {
			return nil, fmt.Errorf("read %s (if it is damaged, remove it, and on the controller run sluice node reenroll): %w", path, err)
		}
		if c.instance == instance {
			return c, nil
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("read this VM's key: %w", err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make this VM's key: %w", err)
	}
	c := &Credentials{path: path, instance: instance, key: key}
	return c, c.save()
}

func parseCredentials(path string, data []byte) (*Credentials, error) {
	c := &Credentials{path: path}
	for {
		var block *pem.Block
		if block, data = pem.Decode(data); block == nil {
			break
		}
		switch block.Type {
		case "PRIVATE KEY":
			k, err := x509.ParsePKCS8PrivateKey(block.Bytes)
			if err != nil {
				return nil, err
			}
			key, ok := k.(*ecdsa.PrivateKey)
			if !ok {
				return nil, errors.New("the key is not ECDSA")
			}
			c.key, c.instance = key, block.Headers[instanceHeader]
		case "CERTIFICATE":
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				return nil, err
			}
			c.chain = append(c.chain, cert)
		}
	}
	if c.key == nil {
		return nil, errors.New("no key in it")
	}
	return c, c.check(c.chain)
}

// check says whether a chain is this key's, and an agent's.
func (c *Credentials) check(chain []*x509.Certificate) error {
	if len(chain) == 0 {
		return nil
	}
	if len(chain) != 2 {
		return fmt.Errorf("a chain of %d certificates, want the agent's and its authority's", len(chain))
	}
	if !c.key.PublicKey.Equal(chain[0].PublicKey) {
		return errors.New("the certificate is another key's")
	}
	if err := chain[0].CheckSignatureFrom(chain[1]); err != nil {
		return err
	}
	a, err := AgentOf(chain[0])
	if err == nil && a.Instance != c.instance {
		err = fmt.Errorf("the certificate is instance %s's, this is %s", a.Instance, c.instance)
	}
	return err
}

func (c *Credentials) save() error {
	data, err := encodeKey(c.key, map[string]string{instanceHeader: c.instance})
	if err != nil {
		return fmt.Errorf("write this VM's key: %w", err)
	}
	for _, cert := range c.chain {
		data = append(data, encodeCert(cert.Raw)...)
	}
	return atomicfile.Write(c.path, data, 0o600)
}

// Request returns a request for a certificate (PEM) and the key's hash.
func (c *Credentials) Request() (request []byte, keyHash string, err error) {
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, c.key)
	if err != nil {
		return nil, "", fmt.Errorf("ask for a certificate: %w", err)
	}
	public, err := x509.MarshalPKIXPublicKey(&c.key.PublicKey)
	if err != nil {
		return nil, "", fmt.Errorf("ask for a certificate: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), KeyHash(public), nil
}

// Accept keeps the certificate that sluiced gave, which must be this key's and
// of the authority with that fingerprint.
func (c *Credentials) Accept(chain []byte, authority string) error {
	var list []*x509.Certificate
	for {
		var block *pem.Block
		if block, chain = pem.Decode(chain); block == nil {
			break
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return fmt.Errorf("the certificate that sluiced gave: %w", err)
		}
		list = append(list, cert)
	}
	err := c.check(list)
	if err == nil && (len(list) == 0 || fingerprint(list[1].Raw) != authority) {
		err = errors.New("it is not of the pinned authority")
	}
	if err != nil {
		return fmt.Errorf("the certificate that sluiced gave: %w", err)
	}
	c.chain = list
	return c.save()
}

// Agent is who the certificate says this VM is. It is false when there is no
// certificate of that authority that is valid now.
func (c *Credentials) Agent(authority string, now time.Time) (Agent, bool) {
	if len(c.chain) == 0 || fingerprint(c.chain[1].Raw) != authority || now.After(c.chain[0].NotAfter) {
		return Agent{}, false
	}
	a, err := AgentOf(c.chain[0])
	return a, err == nil
}

// Old tells whether the certificate is to be renewed.
func (c *Credentials) Old(now time.Time) bool { return len(c.chain) > 0 && old(c.chain[0], now) }
