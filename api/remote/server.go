package remote

import (
	"context"
	"crypto/tls"
	"crypto/x509"
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
	maxEnrol     = 64 << 10        // bytes of a stranger's request
)

// Handler answers one request. ctx ends when the caller hangs up.
type Handler func(ctx context.Context, req api.Request) (any, error)

// Server answers agents.
type Server struct {
	// TLS must verify the certificates of those who show one.
	TLS *tls.Config
	// Admit says who answers the calls of a certificate's holder, or why nobody does.
	Admit func(*x509.Certificate) (Handler, error)
	// Enrol answers callers without a certificate; from is their address.
	Enrol func(ctx context.Context, from string, req api.Request) (any, error)
	// Log gets what goes wrong with connections; nil: nobody.
	Log *log.Logger
}

// Serve answers callers on l until ctx ends or l fails, and closes l. When ctx
// ends, calls in flight get a few seconds to end.
func (s Server) Serve(ctx context.Context, l net.Listener) error {
	defer l.Close()
	logger := s.Log
	if logger == nil {
		logger = log.New(io.Discard, "", 0)
	}
	var fresh sync.Map // connections that carried no call yet
	guests := strangers{byAddress: map[string][]net.Conn{}}
	calls, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	srv := &http.Server{
		Handler:           s.Handler(),
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
		TLSConfig: s.TLS,
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
	err := srv.ServeTLS(l, "", "")
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

// strangers are the connections whose callers have not proved yet that they
// belong to the cluster. Each address may have a few: then the oldest makes room, so that a
// flood from a VM neither uses up this process's files nor keeps the VM's agent out.
type strangers struct {
	mu        sync.Mutex            // guards byAddress
	byAddress map[string][]net.Conn // oldest first
}

// host is an address without its port.
func host(addr string) string {
	h, _, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	return h
}

func (s *strangers) come(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := host(c.RemoteAddr().String())
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
	a := host(c.RemoteAddr().String())
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

// Handler returns the HTTP half alone.
func (s Server) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != Path && r.URL.Path != EnrolPath {
			reply(w, http.StatusNotFound, nil, api.Errorf(api.CodeNotFound, "only %s and %s are served here", Path, EnrolPath))
			return
		}
		if r.Method != http.MethodPost {
			w.Header().Set("Allow", http.MethodPost)
			reply(w, http.StatusMethodNotAllowed, nil, api.Errorf(api.CodeBadRequest, "%s must be posted", r.URL.Path))
			return
		}
		if r.URL.Path == EnrolPath {
			answer(w, r, maxEnrol, func(ctx context.Context, req api.Request) (any, error) {
				if req.Op != api.OpAgentEnrol {
					return nil, api.Errorf(api.CodeBadRequest, "only %s is answered here", api.OpAgentEnrol)
				}
				return s.Enrol(ctx, host(r.RemoteAddr), req)
			})
			return
		}
		// Before the body: a stranger costs no memory.
		handle, err := s.admit(r)
		if err != nil {
			w.Header().Set("Connection", "close")
			reply(w, http.StatusUnauthorized, nil, err)
			return
		}
		if known, ok := r.Context().Value(knownKey{}).(func()); ok {
			known()
		}
		answer(w, r, api.MaxMessage, handle)
	})
}

func (s Server) admit(r *http.Request) (Handler, error) {
	// Only verified chains count, whatever TLS was told to accept.
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
		return nil, &api.Error{Code: api.CodeUnenrolled, Message: "the caller shows no certificate of this cluster", Hint: "a VM's agent enrols at " + EnrolPath}
	}
	return s.Admit(r.TLS.PeerCertificates[0])
}

// answer reads one request of at most limit bytes and has it answered.
func answer(w http.ResponseWriter, r *http.Request, limit int64, handle Handler) {
	// http.Server's own ReadTimeout would also end handlers that wait longer.
	control := http.NewResponseController(w)
	control.SetReadDeadline(time.Now().Add(readTimeout))
	msg, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
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
	out, err := handle(r.Context(), req)
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
