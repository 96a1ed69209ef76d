package storage

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"strconv"
)

// ErrPrecondition is what errors of unmet preconditions are, under errors.Is. Errors for what does not exist are fs.ErrNotExist.
var ErrPrecondition = errors.New("precondition not met")

// apiError is an error with the code and reason that the API gives it.
type apiError struct {
	code    int    // HTTP status
	reason  string // the JSON API's reason, such as "notFound"
	message string
}

func (e *apiError) Error() string {
	return fmt.Sprintf("storage: %s (%d %s)", e.message, e.code, e.reason)
}

// Is makes the errors of the in-process interface testable without their codes.
func (e *apiError) Is(target error) bool {
	return target == fs.ErrNotExist && e.code == http.StatusNotFound ||
		target == ErrPrecondition && e.code == http.StatusPreconditionFailed
}

func invalid(format string, args ...any) error {
	return &apiError{http.StatusBadRequest, "invalid", fmt.Sprintf(format, args...)}
}

func notFound(format string, args ...any) error {
	return &apiError{http.StatusNotFound, "notFound", fmt.Sprintf(format, args...)}
}

func conflict(message string) error {
	return &apiError{http.StatusConflict, "conflict", message}
}

var errNoBucket = &apiError{http.StatusNotFound, "notFound", "The specified bucket does not exist."}

func noObject(bucket, name string) error { return notFound("No such object: %s/%s", bucket, name) }

var (
	errPrecondition = &apiError{http.StatusPreconditionFailed, "conditionNotMet", "At least one of the pre-conditions you specified did not hold."}
	errNotModified  = &apiError{http.StatusNotModified, "notModified", "Not Modified"}
	errRange        = &apiError{http.StatusRequestedRangeNotSatisfiable, "requestedRangeNotSatisfiable", "The requested range cannot be satisfied."}
)

// asAPIError gives any other error the code 500.
func asAPIError(err error) *apiError {
	var e *apiError
	if errors.As(err, &e) {
		return e
	}
	return &apiError{http.StatusInternalServerError, "backendError", err.Error()}
}

func writeJSONError(w http.ResponseWriter, err error) {
	e := asAPIError(err)
	if e.code == http.StatusNotModified {
		w.WriteHeader(e.code)
		return
	}
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
		} `json:"error"`
	}
	body.Error.Code, body.Error.Message = e.code, e.message
	body.Error.Errors = []item{{Message: e.message, Domain: "global", Reason: e.reason}}
	if r, ok := errors.AsType[*refusal](err); ok && e.code == http.StatusUnauthorized {
		body.Error.Errors[0].Location, body.Error.Errors[0].LocationType = "Authorization", "header"
		r.cause.Challenge(w)
	}
	data, _ := json.Marshal(body) // strings and ints only
	writeError(w, e.code, "application/json; charset=UTF-8", data)
}

// xmlCodes are the XML API's names for the JSON API's reasons, where the status alone does not give one.
var xmlCodes = map[int]string{
	http.StatusBadRequest:                   "InvalidArgument",
	http.StatusMethodNotAllowed:             "MethodNotAllowed",
	http.StatusForbidden:                    "AccessDenied",
	http.StatusNotFound:                     "NoSuchKey",
	http.StatusNotImplemented:               "NotImplemented",
	http.StatusPreconditionFailed:           "PreconditionFailed",
	http.StatusRequestedRangeNotSatisfiable: "InvalidRange",
}

func writeXMLError(w http.ResponseWriter, err error) {
	e := asAPIError(err)
	if e.code == http.StatusNotModified {
		w.WriteHeader(e.code)
		return
	}
	if r, ok := errors.AsType[*refusal](err); ok {
		if e.code == http.StatusUnauthorized {
			r.cause.Challenge(w)
		}
		data, _ := xml.Marshal(r.xmlError()) // strings only
		writeError(w, e.code, "application/xml; charset=UTF-8", append([]byte(xml.Header), data...))
		return
	}
	body := struct {
		XMLName xml.Name `xml:"Error"`
		Code    string
		Message string
	}{Code: xmlCodes[e.code], Message: e.message}
	if body.Code == "" {
		body.Code = "InternalError"
	}
	if errors.Is(err, errNoBucket) {
		body.Code = "NoSuchBucket"
	}
	data, _ := xml.Marshal(body) // strings only
	writeError(w, e.code, "application/xml; charset=UTF-8", append([]byte(xml.Header), data...))
}

func writeError(w http.ResponseWriter, code int, contentType string, body []byte) {
	h := w.Header()
	// What was set for the object does not hold for the error.
	for _, name := range []string{"Content-Encoding", "Content-Disposition", "Content-Language", "Cache-Control", "Etag", "Last-Modified", "X-Goog-Hash"} {
		h.Del(name)
	}
	h.Set("Content-Type", contentType)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(code)
	w.Write(body)
}
