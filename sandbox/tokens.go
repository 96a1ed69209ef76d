package sandbox

import (
	"crypto/rand"
	"net/http"
	"strings"
	"sync"
	"time"
)

// tokens knows which account each access token belongs to. Nothing is authorised by it yet.
type tokens struct {
	mu    sync.Mutex // guards known
	known map[string]tokenOwner
}

type tokenOwner struct {
	email   string
	expires time.Time
}

func newTokens() *tokens { return &tokens{known: map[string]tokenOwner{}} }

// Register is called by the metadata server before it hands a token out.
func (t *tokens) Register(token, email string, _ []string, expires time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	for k, o := range t.known {
		if o.expires.Before(now) {
			delete(t.known, k)
		}
	}
	t.known[token] = tokenOwner{email, expires}
}

// admin is the account of the workstation.
const admin = "admin@" + Project + ".iam.gserviceaccount.com"

// caller returns the account whose token the request carries; without a known one it is the admin's.
func (t *tokens) caller(r *http.Request) string {
	token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	t.mu.Lock()
	defer t.mu.Unlock()
	if o, ok := t.known[token]; ok && time.Now().Before(o.expires) {
		return o.email
	}
	return admin
}

// tokenLife is that of Google's access tokens.
const tokenLife = time.Hour

// ServeHTTP is POST /token, OAuth's token endpoint: everyone who asks is the admin.
func (t *tokens) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	token := "ya29.sandbox-" + rand.Text()
	t.Register(token, admin, nil, time.Now().Add(tokenLife))
	writeJSON(w, map[string]any{"access_token": token, "expires_in": int(tokenLife.Seconds()), "token_type": "Bearer"})
}
