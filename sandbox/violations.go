package sandbox

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"sync"

	"github.com/sluicehpc/sluice/sandbox/discovery"
)

// checked holds what goes through h against Google's descriptions, when the sandbox is to do that. What is not as they
// say is appended to a file, once for each cause.
func (o *outer) checked(h http.Handler) (http.Handler, error) {
	if o.cfg.CheckAPIs == "" {
		return h, nil
	}
	apis, err := discovery.LoadAll(o.cfg.CheckAPIs)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(paths(o.cfg.Paths).violations(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	var (
		mu   sync.Mutex // guards seen, and writes of f
		seen = map[string]bool{}
	)
	return discovery.New(apis...).Handler(h, func(v discovery.Violation) {
		mu.Lock()
		defer mu.Unlock()
		if seen[v.Key()] {
			return
		}
		seen[v.Key()] = true
		if err := json.NewEncoder(f).Encode(v); err != nil {
			o.log.Error("recording a violation", "error", err)
		}
	}), nil
}

func (o *outer) serveViolations(w http.ResponseWriter, _ *http.Request) {
	f, err := os.Open(paths(o.cfg.Paths).violations())
	if errors.Is(err, fs.ErrNotExist) {
		http.Error(w, "this sandbox does not check its APIs", http.StatusNotFound)
		return
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer f.Close()
	all := []discovery.Violation{}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var v discovery.Violation
		if err := json.Unmarshal(lines.Bytes(), &v); err != nil {
			http.Error(w, fmt.Sprintf("reading the violations: %v", err), http.StatusInternalServerError)
			return
		}
		all = append(all, v)
	}
	writeJSON(w, all)
}

// Violations returns what was not as Google describes its APIs so far, once for each cause. It is an error when the
// sandbox was not started to check that.
func (c *Client) Violations(ctx context.Context) ([]discovery.Violation, error) {
	var all []discovery.Violation
	err := c.call(ctx, http.MethodGet, "/violations", nil, &all)
	return all, err
}
