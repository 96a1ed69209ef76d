package front

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// refusal is how the services say an HTTP status.
type refusal struct {
	reason  string // of Compute Engine and Cloud Storage
	status  string // google.rpc.Code
	xml     string // of Cloud Storage's XML API
	message string
}

var refusals = map[int]refusal{
	400: {"badRequest", "INVALID_ARGUMENT", "InvalidArgument", "Bad Request"},
	403: {"rateLimitExceeded", "PERMISSION_DENIED", "AccessDenied", "Rate Limit Exceeded"},
	408: {"requestTimeout", "DEADLINE_EXCEEDED", "RequestTimeout", "The request took too long to arrive."},
	414: {"uriTooLong", "INVALID_ARGUMENT", "InvalidURI", "The requested URL is too large to process."},
	429: {"rateLimitExceeded", "RESOURCE_EXHAUSTED", "TooManyRequests", "Too many requests. Please retry later."},
	500: {"backendError", "INTERNAL", "InternalError", "Internal error encountered."},
	503: {"backendError", "UNAVAILABLE", "ServiceUnavailable", "The service is currently unavailable."},
	504: {"backendError", "DEADLINE_EXCEEDED", "GatewayTimeout", "Deadline exceeded."},
}

// gatewayPage is what Google's front ends answer when they have no service to ask.
const gatewayPage = `<!DOCTYPE html>
<html lang=en>
  <meta charset=utf-8>
  <title>Error 502 (Server Error)!!1</title>
  <p><b>502.</b> <ins>That’s an error.</ins>
  <p>The server encountered a temporary error and could not complete your request.<p>Please try again in 30 seconds.
`

// refuse answers with a status in the service's form; message may be "".
func (h *handler) refuse(w http.ResponseWriter, r *http.Request, code int, message string) {
	e, ok := refusals[code]
	if !ok {
		e = refusals[500]
	}
	if message == "" {
		message = e.message
	}
	contentType, body := "application/json; charset=UTF-8", any(nil)
	type item struct {
		Message string `json:"message"`
		Domain  string `json:"domain"`
		Reason  string `json:"reason"`
	}
	type inner struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
		Errors  []item `json:"errors,omitempty"`
		Status  string `json:"status,omitempty"`
	}
	type outer struct {
		Error inner `json:"error"`
	}
	var text []byte
	switch {
	case code == http.StatusBadGateway:
		contentType, text = "text/html; charset=UTF-8", []byte(gatewayPage)
	case h.service == "metadata":
		contentType, text = "text/html; charset=UTF-8", fmt.Appendf(nil, "%d %s\n", code, message)
	case h.service == "storage" && !isJSON(r.URL.EscapedPath()):
		contentType = "application/xml; charset=UTF-8"
		text, _ = xml.Marshal(struct {
			XMLName xml.Name `xml:"Error"`
			Code    string
			Message string
		}{Code: e.xml, Message: message}) // strings only
		text = append([]byte(xml.Header), text...)
	case h.service == "compute" || h.service == "storage":
		domain := "global"
		if e.reason == "rateLimitExceeded" {
			domain = "usageLimits"
		}
		body = outer{inner{code, message, []item{{message, domain, e.reason}}, ""}}
	default:
		body = outer{inner{code, message, nil, e.status}}
	}
	if body != nil {
		text, _ = json.MarshalIndent(body, "", "  ") // strings and numbers only
		text = append(text, '\n')
	}
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Content-Length", strconv.Itoa(len(text)))
	w.WriteHeader(code)
	_, _ = w.Write(text) // the client may be gone
}

// isJSON says whether a path is of Cloud Storage's JSON API; all others are the XML API's.
func isJSON(path string) bool {
	for _, prefix := range []string{"/storage/v1/", "/download/storage/v1/", "/upload/storage/v1/", "/resumable/upload/storage/v1/"} {
		if strings.HasPrefix(path, prefix) {
			return true
		}
	}
	return false
}
