package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"

	"github.com/sluicehpc/sluice/sandbox/faults"
)

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
	mux.HandleFunc("DELETE /faults", func(http.ResponseWriter, *http.Request) { o.faults.ClearAll() })
	mux.HandleFunc("PUT /faults/{key}", func(w http.ResponseWriter, r *http.Request) {
		var value string
		if err := json.NewDecoder(io.LimitReader(r.Body, 1<<16)).Decode(&value); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		answer(w, o.faults.Set(r.PathValue("key"), value))
	})
	mux.HandleFunc("DELETE /faults/{key}", func(w http.ResponseWriter, r *http.Request) { answer(w, o.faults.Clear(r.PathValue("key"))) })
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
