package trust

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/internal/clock"
)

// at is a clock that a test moves.
type at struct {
	clock.Clock
	mu  sync.Mutex // guards now
	now time.Time
}

func newClock() *at { return &at{Clock: clock.System, now: time.Now()} }

func (c *at) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *at) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

func openCA(t *testing.T, cluster string, c clock.Clock) *CA {
	t.Helper()
	ca, err := OpenCA(filepath.Join(t.TempDir(), "tls"), cluster, c)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

var node = Agent{Cluster: "c", Role: api.RoleCompute, Instance: "4711", Node: "n1"}

// enrolled returns credentials with a certificate of ca for a.
func enrolled(t *testing.T, ca *CA, a Agent) *Credentials {
	t.Helper()
	c, err := LoadCredentials(filepath.Join(t.TempDir(), "agent.pem"), a.Instance)
	if err != nil {
		t.Fatal(err)
	}
	certify(t, ca, c, a)
	return c
}

func certify(t *testing.T, ca *CA, c *Credentials, a Agent) {
	t.Helper()
	request, _, err := c.Request()
	if err != nil {
		t.Fatal(err)
	}
	key, _, err := ParseRequest(request)
	if err != nil {
		t.Fatal(err)
	}
	chain, _, err := ca.Sign(key, a)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Accept(chain, ca.Fingerprint()); err != nil {
		t.Fatal(err)
	}
}

func TestAuthorityIsKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tls")
	if _, err := Fingerprint(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("before the first start: got %v, want fs.ErrNotExist", err)
	}
	first, err := OpenCA(dir, "c", clock.System)
	if err != nil {
		t.Fatal(err)
	}
	second, err := OpenCA(dir, "c", clock.System)
	if err != nil || second.Fingerprint() != first.Fingerprint() {
		t.Errorf("second call: %v, want the same authority", err)
	}
	if fp, err := Fingerprint(dir); err != nil || fp != first.Fingerprint() {
		t.Errorf("Fingerprint: got %s, %v, want %s", fp, err, first.Fingerprint())
	}
	for path, want := range map[string]fs.FileMode{dir: 0o700, filepath.Join(dir, caName): 0o600} {
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != want {
			t.Errorf("%s: %v, %v, want mode %v", path, st.Mode(), err, want)
		}
	}
	if _, err := OpenCA(dir, "other", clock.System); err == nil || !strings.Contains(err.Error(), "cannot be renamed") {
		t.Errorf("another cluster's authority: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, caName), []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenCA(dir, "c", clock.System); err == nil {
		t.Error("a damaged authority was replaced or accepted")
	}
}

// handshake connects a client with config to sluiced and returns what each side says.
func handshake(t *testing.T, server, client *tls.Config) (peer *x509.Certificate, serverErr, clientErr error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := l.Accept()
		if err != nil {
			serverErr = err
			return
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		s := tls.Server(conn, server)
		if serverErr = s.Handshake(); serverErr == nil {
			if certs := s.ConnectionState().PeerCertificates; len(certs) > 0 {
				peer = certs[0]
			}
			_, serverErr = s.Write([]byte{1})
		}
	}()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	c := tls.Client(conn, client)
	if clientErr = c.Handshake(); clientErr == nil {
		_, clientErr = c.Read(make([]byte, 1)) // TLS 1.3: the server judges a client after the client's handshake
	}
	conn.Close()
	<-done
	return peer, serverErr, clientErr
}

func clientTLS(t *testing.T, fingerprint string, c *Credentials) *tls.Config {
	t.Helper()
	config, err := ClientTLS(fingerprint, c)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

func TestAgentAndSluicedKnowEachOther(t *testing.T) {
	ca := openCA(t, "c", clock.System)
	c := enrolled(t, ca, node)
	peer, serverErr, clientErr := handshake(t, ca.ServerTLS([]string{"ctl", "10.0.0.2"}), clientTLS(t, strings.ToUpper(ca.Fingerprint()), c))
	if serverErr != nil || clientErr != nil {
		t.Fatal(serverErr, clientErr)
	}
	got, err := AgentOf(peer)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(node, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	// Who has no certificate is let in, to enrol.
	if peer, serverErr, clientErr := handshake(t, ca.ServerTLS(nil), clientTLS(t, ca.Fingerprint(), nil)); peer != nil || serverErr != nil || clientErr != nil {
		t.Errorf("without a certificate: %v, %v, %v", peer, serverErr, clientErr)
	}
}

func TestStrangersCertificates(t *testing.T) {
	ca, other := openCA(t, "c", clock.System), openCA(t, "c", clock.System)
	past := newClock()
	past.add(-life - time.Hour)
	aged, err := OpenCA(filepath.Join(t.TempDir(), "aged"), "c", past)
	if err != nil {
		t.Fatal(err)
	}
	agedNow := *aged
	agedNow.clock = clock.System
	for name, tt := range map[string]struct {
		server *CA
		agent  *Credentials
	}{
		"another authority's agent": {ca, enrolled(t, other, node)},
		"an expired certificate":    {&agedNow, enrolled(t, aged, node)},
	} {
		if _, serverErr, _ := handshake(t, tt.server.ServerTLS(nil), clientTLS(t, tt.server.Fingerprint(), tt.agent)); serverErr == nil {
			t.Errorf("%s: sluiced accepts it", name)
		}
	}

	// TLS as the server would do it for an agent that plays sluiced.
	fake := func(c *Credentials) *tls.Config {
		return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{c.chain[0].Raw, c.chain[1].Raw}, PrivateKey: c.key}}}
	}
	// A self-made certificate in front of the real authority's, which everybody can have.
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	der, err := sign(template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	for name, server := range map[string]*tls.Config{
		"another authority's sluiced":             other.ServerTLS(nil),
		"an agent that plays sluiced":             fake(enrolled(t, ca, node)),
		"a chain that the authority did not sign": {Certificates: []tls.Certificate{{Certificate: [][]byte{der, ca.cert.Raw}, PrivateKey: key}}},
		"the authority's certificate as its own":  {Certificates: []tls.Certificate{{Certificate: [][]byte{ca.cert.Raw}, PrivateKey: ca.key}}},
	} {
		if _, _, clientErr := handshake(t, server, clientTLS(t, ca.Fingerprint(), nil)); clientErr == nil {
			t.Errorf("%s: the agent accepts it", name)
		}
	}
	if _, _, err := handshake(t, ca.ServerTLS(nil), &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12}); err == nil {
		t.Error("TLS 1.2 is accepted")
	}
	for _, bad := range []string{"", "abcd", strings.Repeat("xy", 32), strings.Repeat("ab", 33)} {
		if _, err := ClientTLS(bad, nil); err == nil {
			t.Errorf("fingerprint %q is accepted", bad)
		}
	}
}

// sluiced runs for months: its certificate is replaced before it ends, and so are agents'.
func TestRenewal(t *testing.T) {
	now := newClock()
	ca := openCA(t, "c", now)
	own := &serverCert{ca: ca}
	first, err := own.current()
	if err != nil {
		t.Fatal(err)
	}
	now.add(life / 3)
	if c, err := own.current(); err != nil || c != first {
		t.Errorf("after a third of its life: %v, want the same certificate", err)
	}
	now.add(life / 3)
	if c, err := own.current(); err != nil || c == first || !c.Leaf.NotAfter.After(first.Leaf.NotAfter) {
		t.Errorf("after two thirds: %v, want a new certificate", err)
	}

	c := enrolled(t, ca, node)
	if c.Old(now.Now()) {
		t.Error("a new certificate counts as old")
	}
	now.add(life * 2 / 3)
	if !c.Old(now.Now()) {
		t.Error("after two thirds of its life: not old")
	}
	_, before, err := c.Request()
	if err != nil {
		t.Fatal(err)
	}
	certify(t, ca, c, node)
	if _, after, err := c.Request(); err != nil || after != before || c.Old(now.Now()) {
		t.Errorf("renewed: key %s, before %s, %v, want the same key and a young certificate", after, before, err)
	}
	now.add(2 * life)
	if _, ok := c.Agent(ca.Fingerprint(), now.Now()); ok {
		t.Error("an expired certificate counts")
	}
}

func TestCredentialsLiveAsLongAsTheVM(t *testing.T) {
	ca := openCA(t, "c", clock.System)
	path := filepath.Join(t.TempDir(), "agent.pem")
	hash := func(instance string) (string, *Credentials) {
		t.Helper()
		c, err := LoadCredentials(path, instance)
		if err != nil {
			t.Fatal(err)
		}
		_, h, err := c.Request()
		if err != nil {
			t.Fatal(err)
		}
		return h, c
	}
	first, c := hash("4711")
	if _, ok := c.Agent(ca.Fingerprint(), time.Now()); ok {
		t.Error("a certificate before enrolment")
	}
	if again, _ := hash("4711"); again != first {
		t.Error("another start before enrolment has another key: a lost answer could not be asked for again")
	}
	certify(t, ca, c, node)
	again, c := hash("4711")
	if a, ok := c.Agent(ca.Fingerprint(), time.Now()); again != first || !ok || a != node {
		t.Errorf("after a restart: %v, %v, want %v and the same key", a, ok, node)
	}
	if _, ok := c.Agent(strings.Repeat("ab", 32), time.Now()); ok {
		t.Error("the certificate counts for another authority")
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v, want mode 0600", st.Mode(), err)
	}
	// A VM that was made from this one's disk.
	cloned, c := hash("4712")
	if _, ok := c.Agent(ca.Fingerprint(), time.Now()); ok || cloned == first {
		t.Error("a clone has the key or the certificate of its origin")
	}
	if err := os.WriteFile(path, []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadCredentials(path, "4712"); err == nil || !strings.Contains(err.Error(), "reenroll") {
		t.Errorf("a damaged file: %v", err)
	}
}

func TestAcceptRefusesForeignCertificates(t *testing.T) {
	ca, other := openCA(t, "c", clock.System), openCA(t, "c", clock.System)
	c := enrolled(t, ca, node)
	stranger := enrolled(t, ca, node)
	request, _, err := c.Request()
	if err != nil {
		t.Fatal(err)
	}
	key, _, err := ParseRequest(request)
	if err != nil {
		t.Fatal(err)
	}
	signed := func(ca *CA, a Agent) []byte {
		chain, _, err := ca.Sign(key, a)
		if err != nil {
			t.Fatal(err)
		}
		return chain
	}
	another := node
	another.Instance = "4712"
	good := signed(ca, node)
	leaf, _ := pem.Decode(good)
	for name, chain := range map[string][]byte{
		"nothing":             nil,
		"no PEM":              []byte("x"),
		"another key's":       append(encodeCert(stranger.chain[0].Raw), encodeCert(stranger.chain[1].Raw)...),
		"another authority's": signed(other, node),
		"another VM's":        signed(ca, another),
		"alone":               encodeCert(leaf.Bytes),
		"mixed":               append(encodeCert(leaf.Bytes), encodeCert(other.cert.Raw)...),
	} {
		if err := c.Accept(chain, ca.Fingerprint()); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if err := c.Accept(good, ca.Fingerprint()); err != nil {
		t.Error(err)
	}
	foreign := node
	foreign.Cluster = "d"
	if _, _, err := ca.Sign(key, foreign); err == nil {
		t.Error("signed for another cluster")
	}
}

func TestParseRequestRefuses(t *testing.T) {
	request := func(key any) []byte {
		der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
		if err != nil {
			t.Fatal(err)
		}
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	}
	p256, err1 := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	p224, err2 := ecdsa.GenerateKey(elliptic.P224(), rand.Reader)
	weak, err3 := rsa.GenerateKey(rand.Reader, 1024)
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	good := request(p256)
	if _, _, err := ParseRequest(good); err != nil {
		t.Fatal(err)
	}
	// The signature is over another key: the sender does not hold the one it names.
	block, _ := pem.Decode(good)
	block.Bytes[len(block.Bytes)-1] ^= 1
	forged := pem.EncodeToMemory(block)
	for name, data := range map[string][]byte{
		"empty": nil, "no PEM": []byte("x"), "another kind": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: block.Bytes}),
		"RSA": request(weak), "P-224": request(p224), "forged": forged, "two": append(append([]byte{}, good...), good...),
	} {
		if _, _, err := ParseRequest(data); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestAgentOfRefuses(t *testing.T) {
	for name, c := range map[string]*x509.Certificate{
		"no URI":      {Subject: pkix.Name{CommonName: "n1"}},
		"two URIs":    {Subject: pkix.Name{CommonName: "n1"}, URIs: append(node.uris(), node.uris()...)},
		"no name":     {URIs: node.uris()},
		"other words": {Subject: pkix.Name{CommonName: "n1"}, URIs: []*url.URL{{Scheme: "https", Host: "c", Path: "/compute/1"}}},
		"a role":      {Subject: pkix.Name{CommonName: "n1"}, URIs: []*url.URL{{Scheme: scheme, Host: "c", Path: "/admin/1"}}},
		"no instance": {Subject: pkix.Name{CommonName: "n1"}, URIs: []*url.URL{{Scheme: scheme, Host: "c", Path: "/compute/"}}},
	} {
		if a, err := AgentOf(c); err == nil {
			t.Errorf("%s: %+v", name, a)
		}
	}
}

func FuzzParseRequest(f *testing.F) {
	f.Add([]byte("-----BEGIN CERTIFICATE REQUEST-----\nMAA=\n-----END CERTIFICATE REQUEST-----\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if key, hash, err := ParseRequest(data); err == nil && (key == nil || len(hash) != 64) {
			t.Errorf("%v, %q", key, hash)
		}
	})
}
