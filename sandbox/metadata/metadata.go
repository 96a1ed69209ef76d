// Package metadata is the sandbox's metadata server: it tells each VM, known by its address, who it is.
package metadata

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/sandbox/compute"
)

// Instances knows the VMs; *compute.Server is one.
type Instances interface {
	ByAddress(netip.Addr) (compute.View, bool)
	Project() compute.ProjectView
}

// Tokens is told of each access token before it is handed out.
type Tokens interface {
	Register(token, email string, scopes []string, expires time.Time)
}

// Identities signs who an account is; more are claims beside the usual ones. *iam.Server does.
type Identities interface {
	IdentityToken(email, audience string, withEmail bool, more map[string]any) (string, error)
}

// Config says who is served what.
type Config struct {
	Instances  Instances
	Tokens     Tokens     // or nil
	Identities Identities // or nil: no identity tokens
	// Workstation are the addresses from which the admin's workstation asks. It gets the project,
	// the zone and a token of WorkstationAccount.
	Workstation        []netip.Addr
	WorkstationAccount string      // email; default admin@PROJECT.iam.gserviceaccount.com
	Clock              clock.Clock // default clock.System
}

// Server answers at http://169.254.169.254/ like Google's metadata server.
type Server struct {
	cfg Config

	mu     sync.Mutex // guards everything below
	tokens map[holder]token
}

type holder struct {
	instance uint64 // 0 for the workstation
	email    string
}

type token struct {
	value   string
	expires time.Time
}

const (
	tokenLife = time.Hour
	// tokenRest is what a token is still good for when a new one takes its place, as in the real server.
	tokenRest = 5 * time.Minute
)

// New makes a server.
func New(cfg Config) *Server {
	if cfg.Clock == nil {
		cfg.Clock = clock.System
	}
	if cfg.WorkstationAccount == "" {
		cfg.WorkstationAccount = "admin@" + cfg.Instances.Project().Project.Name + ".iam.gserviceaccount.com"
	}
	return &Server{cfg: cfg, tokens: map[holder]token{}}
}

var (
	errStranger   = errors.New("this address is no VM's")
	errNoPath     = errors.New("no such path")
	errNoAudience = errors.New("non-empty audience parameter required")
)

// ServeHTTP answers one request. Those with wait_for_change block until the value changes.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Metadata-Flavor", "Google")
	w.Header().Set("Server", "Metadata Server for VM")
	if r.Header.Get("X-Forwarded-For") != "" {
		http.Error(w, "X-Forwarded-For is not allowed", http.StatusForbidden)
		return
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		http.Error(w, "only GET is allowed", http.StatusMethodNotAllowed)
		return
	}
	if r.URL.Path == "/" {
		w.Header().Set("Content-Type", "application/text")
		fmt.Fprintln(w, "computeMetadata/")
		return
	}
	if r.Header.Get("Metadata-Flavor") != "Google" {
		http.Error(w, "the header Metadata-Flavor: Google is missing", http.StatusForbidden)
		return
	}
	query := r.URL.Query()
	var timeout <-chan time.Time
	wait := query.Get("wait_for_change") == "true"
	if v := query.Get("timeout_sec"); wait && v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 0 || n > 24*60*60 {
			http.Error(w, "timeout_sec must be a number of seconds", http.StatusBadRequest)
			return
		}
		timeout = s.cfg.Clock.After(time.Duration(n) * time.Second)
	}
	if alt := query.Get("alt"); alt != "" && alt != "json" && alt != "text" {
		http.Error(w, "alt must be json or text", http.StatusBadRequest)
		return
	}
	known := query.Get("last_etag")
	for {
		a, err := s.answer(r)
		switch {
		case errors.Is(err, errStranger):
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		case errors.Is(err, errNoAudience):
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		case err != nil:
			http.Error(w, err.Error(), http.StatusNotFound)
			return
		case a.redirect:
			u := *r.URL
			u.Path += "/"
			http.Redirect(w, r, u.RequestURI(), http.StatusMovedPermanently)
			return
		}
		if known == "" {
			known = a.etag
		}
		if wait && a.etag == known {
			select {
			case <-a.changed:
				continue
			case <-timeout:
			case <-r.Context().Done():
				return
			}
		}
		w.Header().Set("Content-Type", a.contentType)
		w.Header().Set("ETag", a.etag)
		w.Write(a.body) // an error means that the client is gone
		return
	}
}

type answer struct {
	body        []byte
	contentType string
	etag        string
	redirect    bool // a directory was asked for without its last slash
	changed     <-chan struct{}
}

// answer finds what the path holds now.
func (s *Server) answer(r *http.Request) (answer, error) {
	c, err := s.caller(r)
	if err != nil {
		return answer{}, err
	}
	a := answer{changed: c.changed}
	rest, ok := strings.CutPrefix(r.URL.Path+"/", "/computeMetadata/")
	if !ok {
		return a, errNoPath
	}
	slash := strings.HasSuffix(r.URL.Path, "/")
	path := strings.Trim(rest, "/")
	switch c.credential(path) {
	case "token":
		a.body, err = s.token(c)
		a.contentType, a.etag = "application/json", etag(a.body)
		return a, err
	case "identity":
		a.body, err = s.identity(c, r.URL.Query())
		a.contentType, a.etag = "text/html", etag(a.body)
		return a, err
	}
	var at any = names(map[string]any{"v1": c.tree})
	for name := range strings.SplitSeq(path, "/") {
		if path == "" {
			break
		}
		d, ok := at.(dir)
		if !ok {
			return a, errNoPath
		}
		if at, ok = d.entries[name]; !ok {
			return a, errNoPath
		}
	}
	query := r.URL.Query()
	recursive := query.Get("recursive") == "true"
	d, isDir := at.(dir)
	switch {
	case isDir && !recursive && !slash:
		a.redirect = true
		return a, nil
	case isDir && !recursive:
		at = d.listing()
	case !isDir && slash:
		return a, errNoPath
	}
	asJSON := query.Get("alt") == "json" || recursive && query.Get("alt") == ""
	if asJSON {
		a.body, err = json.Marshal(jsonOf(at))
		a.contentType = "application/json"
	} else {
		a.body = []byte(textOf(at))
		a.contentType = "application/text"
	}
	a.etag = etag(a.body)
	return a, err
}

func etag(body []byte) string {
	h := fnv.New64a()
	h.Write(body)
	return fmt.Sprintf("%016x", h.Sum64())
}

// credential is which one of the caller's account's credentials a path is: "token", "identity" or "".
func (c caller) credential(path string) string {
	rest, ok := strings.CutPrefix(path, "v1/instance/service-accounts/")
	account, name, _ := strings.Cut(rest, "/")
	if ok && c.account != "" && (account == "default" || account == c.account) && (name == "token" || name == "identity") {
		return name
	}
	return ""
}

// caller is who asks.
type caller struct {
	view     compute.View // of a VM
	instance uint64       // 0 for the workstation
	account  string       // email, or ""
	scopes   []string
	tree     dir
	changed  <-chan struct{}
}

func (s *Server) caller(r *http.Request) (caller, error) {
	ap, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return caller{}, errStranger
	}
	address := ap.Addr().Unmap()
	if v, ok := s.cfg.Instances.ByAddress(address); ok {
		c := caller{view: v, instance: v.Instance.Id, changed: v.Changed}
		if len(v.Instance.ServiceAccounts) > 0 {
			c.account, c.scopes = v.Instance.ServiceAccounts[0].Email, v.Instance.ServiceAccounts[0].Scopes
		}
		c.tree = instanceTree(v, c)
		return c, nil
	}
	if slices.Contains(s.cfg.Workstation, address) {
		p := s.cfg.Instances.Project()
		c := caller{
			account: s.cfg.WorkstationAccount,
			scopes:  []string{"https://www.googleapis.com/auth/cloud-platform"},
			changed: p.Changed,
		}
		c.tree = workstationTree(p, c)
		return c, nil
	}
	return caller{}, errStranger
}

// token returns the caller's access token as JSON, a new one when the old one nears its end.
func (s *Server) token(c caller) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.cfg.Clock.Now()
	key := holder{c.instance, c.account}
	t, ok := s.tokens[key]
	if !ok || t.expires.Sub(now) < tokenRest {
		for k, old := range s.tokens {
			if old.expires.Before(now) {
				delete(s.tokens, k)
			}
		}
		t = token{value: "ya29.sandbox-" + rand.Text() + rand.Text(), expires: now.Add(tokenLife)}
		if s.cfg.Tokens != nil {
			s.cfg.Tokens.Register(t.value, c.account, c.scopes, t.expires)
		}
		s.tokens[key] = t
	}
	return json.Marshal(map[string]any{
		"access_token": t.value,
		"expires_in":   int(t.expires.Sub(now) / time.Second),
		"token_type":   "Bearer",
	})
}
