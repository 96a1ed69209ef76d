package remote

import (
	"context"
	"crypto/hmac"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/sluicehpc/sluice/api"
)

// Limits of the server. A handler may take as long as its caller waits.
const (
	readTimeout  = 10 * time.Second // for the headers, and again for the body
	writeTimeout = 10 * time.Second // for the answer, from when it is known
	idleTimeout  = 2 * time.Minute
	stopTimeout  = 5 * time.Second // for calls in flight when ctx ends
	maxHeader    = 16 << 10        // bytes
	maxStrangers = 64              // connections an address
)

// Server answers agents.
type Server struct {
	// Key is the contents of Slurm's key file; callers must prove that they hold it.
	Key []byte
	// Handle answers one request. ctx ends when the caller hangs up.
	Handle func(ctx context.Context, req api.Request) (any, error)
	// Log gets what goes wrong with connections; nil: nobody.
	Log *log.Logger
}

// Serve answers callers on l until ctx ends or l fails, and closes l. When ctx
// ends, calls in flight get a few seconds to end.
func (s Server) Serve(ctx context.Context, l net.Listener, cert tls.Certificate) error {
	defer l.Close()
	handler, err := s.Handler()
	if err != nil {
		return err
	}
	logger := s.Log
	if logger == nil {
		logger = log.New(io.Discard, "", 0)
	}
	var fresh sync.Map // connections that carried no call yet
	guests := strangers{byAddress: map[string][]net.Conn{}}
	calls, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	srv := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: readTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          logger,
		BaseContext:       func(net.Listener) context.Context { return calls },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, knownKey{}, func() { guests.leave(c) })
		},
		ConnState: func(c net.Conn, s http.ConnState) {
			if s == http.StateNew {
				fresh.Store(c, nil)
				guests.come(c)
			} else {
				fresh.Delete(c)
			}
			if s == http.StateClosed || s == http.StateHijacked {
				guests.leave(c)
			}
		},
		TLSConfig: &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}},
	}
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(done)
		// Shutdown would give these five seconds.
		fresh.Range(func(c, _ any) bool { c.(net.Conn).Close(); return true })
		timer := time.AfterFunc(stopTimeout, cancel) // handlers that wait see their ctx end
		defer timer.Stop()
		sctx, scancel := context.WithTimeout(calls, 2*stopTimeout)
		defer scancel()
		if srv.Shutdown(sctx) != nil {
			srv.Close()
		}
	})
	err = srv.ServeTLS(l, "", "")
	if !stop() {
		<-done
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	srv.Close()
	return fmt.Errorf("serve agents on %s: %w", l.Addr(), err)
}

// knownKey is where a call's context keeps what to do once its caller is known.
type knownKey struct{}

// strangers are the connections whose callers have not proved yet that they hold
// the key. Each address may have a few: then the oldest makes room, so that a
// flood from a VM neither uses up this process's files nor keeps the VM's agent out.
type strangers struct {
	mu        sync.Mutex            // guards byAddress
	byAddress map[string][]net.Conn // oldest first
}

func address(c net.Conn) string {
	host, _, err := net.SplitHostPort(c.RemoteAddr().String())
	if err != nil {
		return c.RemoteAddr().String()
	}
	return host
}

func (s *strangers) come(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := address(c)
	list := append(s.byAddress[a], c)
	if len(list) > maxStrangers {
		oldest := list[0]
		list = list[1:]
		if t, ok := oldest.(*tls.Conn); ok {
			oldest = t.NetConn() // without a farewell, for which it would wait
		}
		oldest.Close()
	}
	s.byAddress[a] = list
}

func (s *strangers) leave(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := address(c)
	list := s.byAddress[a]
	if i := slices.Index(list, c); i >= 0 {
		list = slices.Delete(list, i, i+1)
	}
	if len(list) == 0 {
		delete(s.byAddress, a)
	} else {
		s.byAddress[a] = list
	}
}

// Handler returns the HTTP half alone; it fails when Key is empty.
func (s Server) Handler() (http.Handler, error) {
	tok, err := token(s.Key)
	if err != nil {
		return nil, err
	}
	want := []byte("Bearer " + tok)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != Path {
			reply(w, http.StatusNotFound, nil, api.Errorf(api.CodeNotFound, "only %s is served here", Path))
			return
		}
		if r.Method != http.MethodPost {
			w.Header().Set("Allow", http.MethodPost)
			reply(w, http.StatusMethodNotAllowed, nil, api.Errorf(api.CodeBadRequest, "%s must be posted", Path))
			return
		}
		// Before the body: a stranger costs no memory.
		if !hmac.Equal([]byte(r.Header.Get("Authorization")), want) {
			w.Header().Set("Connection", "close")
			reply(w, http.StatusUnauthorized, nil, &api.Error{Code: api.CodeDenied,
				Message: "the caller does not hold this cluster's key", Hint: "compare slurm.key on this VM with the controller's"})
			return
		}
		if known, ok := r.Context().Value(knownKey{}).(func()); ok {
			known()
		}
		s.answer(w, r)
	}), nil
}

func (s Server) answer(w http.ResponseWriter, r *http.Request) {
	// http.Server's own ReadTimeout would also end handlers that wait longer.
	control := http.NewResponseController(w)
	control.SetReadDeadline(time.Now().Add(readTimeout))
	msg, err := io.ReadAll(http.MaxBytesReader(w, r.Body, api.MaxMessage))
	if err != nil {
		status := http.StatusBadRequest
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			status = http.StatusRequestEntityTooLarge
		}
		reply(w, status, nil, api.Errorf(api.CodeBadRequest, "read the request: %v", err))
		return
	}
	control.SetReadDeadline(time.Time{})
	var req api.Request
	if err := json.Unmarshal(msg, &req); err != nil {
		reply(w, http.StatusBadRequest, nil, api.Errorf(api.CodeBadRequest, "request is not JSON: %v", err))
		return
	}
	if req.Version < api.Version-1 || req.Version > api.Version+1 {
		reply(w, http.StatusBadRequest, nil, api.Errorf(api.CodeBadRequest, "request speaks version %d, this daemon %d", req.Version, api.Version))
		return
	}
	out, err := s.Handle(r.Context(), req)
	reply(w, http.StatusOK, out, err)
}

// reply writes an api.Response. A refusal by the handler has status 200: the
// call itself worked, and the error says what did not.
func reply(w http.ResponseWriter, status int, out any, err error) {
	resp := api.Response{Version: api.Version}
	if err != nil {
		resp.Error = api.AsError(err)
	} else if resp.Body, err = json.Marshal(out); err != nil {
		resp.Error = api.Errorf(api.CodeFailed, "encode answer: %v", err)
	}
	msg, err := json.Marshal(resp)
	if err != nil {
		msg, status = nil, http.StatusInternalServerError
	}
	http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(msg)
}
