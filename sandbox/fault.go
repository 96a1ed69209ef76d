package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strings"

	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/iam"
)

// journal writes what faults do into the sandbox's log.
func journal(log *slog.Logger) func(faults.Entry) {
	return func(e faults.Entry) {
		log.Info("fault", "key", e.Fault, "value", e.Value, "request", e.Request, "what", e.What)
	}
}

// serviceOf names the service that a path of the APIs belongs to. There is no mux: names of objects may look like anything, "//" and
// ".." included.
func serviceOf(path string) string {
	switch {
	case strings.HasPrefix(path, "/compute/v1/"):
		return "compute"
	case iam.Handles(path):
		return "iam"
	case strings.HasPrefix(path, "/v1/projects/"):
		return "lustre"
	case strings.HasPrefix(path, "/v3/projects/"):
		return "monitoring"
	}
	return "storage"
}

// fronted puts the front before the APIs.
func (o *outer) fronted(apis http.Handler) http.Handler {
	handlers := map[string]http.Handler{}
	for _, service := range faults.Services() {
		handlers[service] = o.front.Handler(service, apis)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handlers[serviceOf(r.URL.EscapedPath())].ServeHTTP(w, r)
	})
}

// takeEffect returns once a change of the faults holds in the network and on the mounts.
func (o *outer) takeEffect(ctx context.Context) error {
	return errors.Join(o.cuts.apply(), o.settle(ctx))
}

// faultRoutes adds what Client's methods below ask.
func (o *outer) faultRoutes(mux *http.ServeMux) {
	answer := func(w http.ResponseWriter, err error) {
		switch {
		case errors.Is(err, faults.ErrUnknownKey), errors.Is(err, faults.ErrBadValue):
			http.Error(w, err.Error(), http.StatusBadRequest)
		case err != nil:
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}
	mux.HandleFunc("GET /faults", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, o.faults.List()) })
	mux.HandleFunc("GET /faultlog", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, o.faults.Log()) })
	mux.HandleFunc("DELETE /faults", func(w http.ResponseWriter, r *http.Request) {
		o.faults.ClearAll()
		answer(w, o.takeEffect(r.Context()))
	})
	mux.HandleFunc("PUT /faults/{key}", func(w http.ResponseWriter, r *http.Request) {
		var value string
		if err := json.NewDecoder(io.LimitReader(r.Body, 1<<16)).Decode(&value); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		err := o.faults.Set(r.PathValue("key"), value)
		if err == nil {
			err = o.takeEffect(r.Context())
		}
		answer(w, err)
	})
	mux.HandleFunc("DELETE /faults/{key}", func(w http.ResponseWriter, r *http.Request) {
		err := o.faults.Clear(r.PathValue("key"))
		if err == nil {
			err = o.takeEffect(r.Context())
		}
		answer(w, err)
	})
}

// Faults returns the faults that are set, and the seed.
func (c *Client) Faults(ctx context.Context) (faults.List, error) {
	var all faults.List
	err := c.call(ctx, http.MethodGet, "/faults", nil, &all)
	return all, err
}

// FaultLog returns the journal of the faults.
func (c *Client) FaultLog(ctx context.Context) (faults.Log, error) {
	var log faults.Log
	err := c.call(ctx, http.MethodGet, "/faultlog", nil, &log)
	return log, err
}

// SetFault sets a fault of package faults, in place of an earlier one of the same key.
func (c *Client) SetFault(ctx context.Context, key, value string) error {
	return c.call(ctx, http.MethodPut, "/faults/"+url.PathEscape(key), value, nil)
}

// ClearFault takes a fault out.
func (c *Client) ClearFault(ctx context.Context, key string) error {
	return c.call(ctx, http.MethodDelete, "/faults/"+url.PathEscape(key), nil, nil)
}

// ClearFaults takes all faults out.
func (c *Client) ClearFaults(ctx context.Context) error {
	return c.call(ctx, http.MethodDelete, "/faults", nil, nil)
}
