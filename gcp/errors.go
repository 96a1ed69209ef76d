package gcp

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/api/googleapi"
)

// Code returns the HTTP status of a service's answer, or 0 when err does not come from one.
func Code(err error) int {
	if e, ok := errors.AsType[*googleapi.Error](err); ok {
		return e.Code
	}
	return 0
}

// Reason returns the answer's machine-readable reason ("notFound", "conditionNotMet"), or "".
func Reason(err error) string {
	if e, ok := errors.AsType[*googleapi.Error](err); ok {
		for _, item := range e.Errors {
			if item.Reason != "" {
				return item.Reason
			}
		}
	}
	return ""
}

// Status returns the answer's canonical status ("ABORTED", "ALREADY_EXISTS"), or "" when the
// service names none.
func Status(err error) string {
	e, ok := errors.AsType[*googleapi.Error](err)
	if !ok {
		return ""
	}
	var body struct {
		Error struct {
			Status string `json:"status"`
		} `json:"error"`
	}
	if json.Unmarshal([]byte(e.Body), &body) != nil {
		return ""
	}
	return body.Error.Status
}

// IsNotFound reports whether the resource does not exist.
func IsNotFound(err error) bool { return Code(err) == 404 }

// IsAlreadyExists reports whether a resource of that name exists already.
func IsAlreadyExists(err error) bool {
	if Code(err) != 409 {
		return false
	}
	r := Reason(err) // "conflict" is Cloud Storage's word for a bucket that exists
	return Status(err) == "ALREADY_EXISTS" || r == "alreadyExists" || r == "conflict"
}

// IsConflict reports whether the call lost against another one that is still at work (ABORTED):
// Managed Lustre answers so to a second transfer of an instance.
func IsConflict(err error) bool { return Code(err) == 409 && !IsAlreadyExists(err) }

// IsPreconditionFailed reports whether a fingerprint, generation or other condition did not hold.
func IsPreconditionFailed(err error) bool { return Code(err) == 412 }

// Wrap says for a person what was being done when err came back ("create instance n-1"), with the
// service's own message, its status and, where there is one, what to do next. err stays inside
// for errors.Is and errors.As. Wrap(nil, …) is nil.
func Wrap(err error, doing string) error {
	if err == nil {
		return nil
	}
	return &wrapped{doing, err}
}

type wrapped struct {
	doing string
	err   error
}

func (w *wrapped) Unwrap() error { return w.err }

func (w *wrapped) Error() string {
	e, ok := errors.AsType[*googleapi.Error](w.err)
	if !ok {
		return w.doing + ": " + w.err.Error()
	}
	message := strings.TrimSuffix(strings.TrimSpace(e.Message), ".")
	if message == "" {
		message = "the service answered without a message"
	}
	status := fmt.Sprintf("HTTP %d", e.Code)
	for _, s := range []string{Status(w.err), Reason(w.err)} {
		if s != "" {
			status += " " + s
			break
		}
	}
	text := fmt.Sprintf("%s: %s (%s)", w.doing, message, status)
	if h := hints[e.Code]; h != "" {
		text += "; " + h
	}
	return text
}

var hints = map[int]string{
	401: "check the credentials that this machine gets from the metadata server",
	403: "check the roles of the service account and the project's quota",
	429: "the project asks more often than it may; try again later",
}
