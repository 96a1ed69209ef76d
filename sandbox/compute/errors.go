package compute

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	api "google.golang.org/api/compute/v1"
)

// apiError is a call's refusal, in Compute Engine's form.
type apiError struct {
	code    int    // HTTP status
	reason  string // "notFound", "invalid" …
	message string
}

func (e *apiError) Error() string { return e.message }

func (e *apiError) write(w http.ResponseWriter) {
	type item struct {
		Message      string `json:"message"`
		Domain       string `json:"domain"`
		Reason       string `json:"reason"`
		Location     string `json:"location,omitempty"`
		LocationType string `json:"locationType,omitempty"`
	}
	var body struct {
		Error struct {
			Code    int    `json:"code"`
			Message string `json:"message"`
			Errors  []item `json:"errors"`
			Status  string `json:"status,omitempty"`
		} `json:"error"`
	}
	body.Error.Code, body.Error.Message = e.code, e.message
	body.Error.Errors = []item{{Message: e.message, Domain: "global", Reason: e.reason}}
	if e.code == http.StatusUnauthorized {
		body.Error.Status = "UNAUTHENTICATED"
		body.Error.Errors[0].Location, body.Error.Errors[0].LocationType = "Authorization", "header"
		w.Header().Set("WWW-Authenticate", `Bearer realm="https://accounts.google.com/"`)
	}
	writeJSON(w, e.code, body)
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json; charset=UTF-8")
	w.WriteHeader(status)
	w.Write(append(body, '\n')) // an error means that the client is gone
}

func notFound(resource string) *apiError {
	return &apiError{404, "notFound", fmt.Sprintf("The resource '%s' was not found", resource)}
}

func alreadyExists(resource string) *apiError {
	return &apiError{409, "alreadyExists", fmt.Sprintf("The resource '%s' already exists", resource)}
}

// invalid refuses the value of a field ("resource.name") and says why.
func invalid(field, value, why string) *apiError {
	return &apiError{400, "invalid", fmt.Sprintf("Invalid value for field '%s': '%s'. %s", field, value, why)}
}

func required(field string) *apiError {
	return &apiError{400, "required", fmt.Sprintf("Required field '%s' not specified", field)}
}

func notReady(resource string) *apiError {
	return &apiError{400, "resourceNotReady", fmt.Sprintf("The resource '%s' is not ready", resource)}
}

func conditionNotMet(message string) *apiError {
	return &apiError{412, "conditionNotMet", message}
}

// opError is why an operation failed: what its error field says.
type opError struct {
	code       string // "RESOURCE_ALREADY_EXISTS" …, or "" when only the status says it
	message    string
	httpStatus int64 // or 0 when only the code says it
}

func (e *opError) Error() string { return e.code + ": " + e.message }

func (e *opError) api() *api.OperationErrorErrors {
	return &api.OperationErrorErrors{Code: e.code, Message: e.message}
}

func opAlreadyExists(resource string) *opError {
	return &opError{"RESOURCE_ALREADY_EXISTS", fmt.Sprintf("The resource '%s' already exists", resource), 409}
}

// opInternal is err as an operation says it: as it is when it is one of an operation, else as an internal error.
func opInternal(err error) *opError {
	if e, ok := errors.AsType[*opError](err); ok {
		return e
	}
	return &opError{"INTERNAL_ERROR", "Internal error: " + err.Error(), 500}
}

func opCancelled(resource string) *opError {
	return &opError{"OPERATION_CANCELED_BY_USER", fmt.Sprintf("The resource '%s' was deleted before it was ready", resource), 409}
}
