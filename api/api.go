// Package api holds the requests and responses that Sluice's processes
// exchange: hooks and people with sluiced over a Unix socket, agents with
// sluiced over HTTPS. It depends on the standard library only, so that hooks
// stay small.
package api

import (
	"encoding/json"
	"errors"
	"fmt"
)

// Version is the protocol's version. A peer one version behind or ahead is
// understood: nodes boot from old images for months.
const Version = 1

// SluicedSocket and AgentSocket are where the daemons listen for local callers.
const (
	SluicedSocket = "/run/sluice/sluiced.sock"
	AgentSocket   = "/run/sluice/agent.sock"
)

// MaxMessage bounds one JSON message in bytes. A job script travels in one
// (Slurm's own limit on scripts is 4 MiB).
const MaxMessage = 8 << 20

// Request is one call: an operation and its body.
type Request struct {
	Version int             `json:"v"`
	Op      string          `json:"op"`
	Body    json.RawMessage `json:"body,omitempty"`
}

// Response answers a Request: Error, or Body of the operation's type.
type Response struct {
	Version int             `json:"v"`
	Error   *Error          `json:"error,omitempty"`
	Body    json.RawMessage `json:"body,omitempty"`
}

// Code classifies an Error; the command line maps it to an exit code.
type Code string

const (
	CodeBadRequest  Code = "bad_request" // the input is wrong; repeating it cannot help
	CodeNotFound    Code = "not_found"
	CodeDenied      Code = "denied"      // refused by policy or by who the caller is
	CodeUnavailable Code = "unavailable" // try again later
	CodeFailed      Code = "failed"
	// CodeUnenrolled says to an agent that its certificate is not known (any more): it has to enrol.
	CodeUnenrolled Code = "unenrolled"
)

// Error is a refusal in words for a person, with a hint that says what to do next.
type Error struct {
	Code    Code   `json:"code"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

func (e *Error) Error() string {
	if e.Hint != "" {
		return e.Message + "\n  " + e.Hint
	}
	return e.Message
}

// Errorf makes an Error without a hint.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// CodeOf returns err's code, or CodeFailed if it has none.
func CodeOf(err error) Code {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return CodeFailed
}

// AsError returns err as an *Error, keeping a code that it already has.
func AsError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return &Error{Code: CodeFailed, Message: err.Error()}
}
