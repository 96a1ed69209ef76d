package discovery

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Violation is one thing in an exchange that the description does not have.
type Violation struct {
	Time   time.Time `json:"time"`
	Method string    `json:"method"`        // of HTTP
	URL    string    `json:"url"`           // path and query
	API    string    `json:"api,omitempty"` // the described method, if one was found
	Status int       `json:"status"`
	Reply  bool      `json:"reply"` // the server's doing; otherwise the client's
	Where  string    `json:"where"` // "path", "query NAME", "body.FIELD[0].FIELD" …
	What   string    `json:"what"`
}

// Refused says that the client was wrong and that the server told it so.
func (v Violation) Refused() bool { return !v.Reply && v.Status >= 400 }

func (v Violation) String() string {
	side := "request"
	if v.Reply {
		side = "reply"
	}
	name := v.Method + " " + v.URL
	if v.API != "" {
		name = v.API + " (" + name + ")"
	}
	return fmt.Sprintf("%s: %s: %s %s [%d]", name, side, v.Where, v.What, v.Status)
}

// Key is the same for violations that have one cause: the same method, side, field and complaint.
func (v Violation) Key() string {
	name := v.API
	if name == "" {
		name = v.Method + " " + v.URL
	}
	return fmt.Sprintf("%s\x00%v\x00%s\x00%s", name, v.Reply, v.Where, v.What)
}

// exchange is one request and its reply, as far as they were seen.
type exchange struct {
	method string
	url    *url.URL
	header http.Header
	body   []byte // what was read of it, up to maxBody
	whole  bool   // body is all of it

	status      int // 0: there was no reply
	replyHeader http.Header
	reply       []byte // JSON replies only, up to maxBody
	replyWhole  bool
}

// Checker checks exchanges. It may be used by several goroutines.
type Checker struct {
	*Router
	prose *API

	mu        sync.Mutex
	immutable map[string]string // the first value that was seen, by resource and field
}

// New returns a checker of apis; "prose", the API of what has no document, must be among them for errors to be checked.
func New(apis ...*API) *Checker {
	c := &Checker{Router: NewRouter(apis...), immutable: map[string]string{}}
	for _, api := range apis {
		if api.ID == "prose:v1" {
			c.prose = api
		}
	}
	return c
}

// bucket matches the names that a bucket may have.
var bucket = regexp.MustCompile(`^[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]$`)

// xmlParams are the parameters of object reads through the XML API, which has no description.
var xmlParams = []string{"generation", "userProject"}

// check returns what is wrong.
func (c *Checker) check(e *exchange) []Violation {
	segments, err := split(e.url.EscapedPath())
	if err != nil {
		return []Violation{e.violation(false, "", "path", err.Error())}
	}
	byMethod := c.root.find(segments)
	if byMethod == nil {
		if c.root.literal[segments[0]] != nil || len(segments) < 2 || !bucket.MatchString(segments[0]) {
			return []Violation{e.violation(false, "", "path", "no such route")}
		}
		return c.checkXML(e)
	}
	httpMethod := e.method
	if httpMethod == http.MethodHead {
		httpMethod = http.MethodGet
	}
	if e.continuesUpload() {
		httpMethod = http.MethodPost
	}
	routes := byMethod[httpMethod]
	if len(routes) == 0 {
		has := strings.Join(slices.Sorted(maps.Keys(byMethod)), ", ")
		return []Violation{e.violation(false, "", "method", "this route has only "+has)}
	}
	// Two services may have the same path. The one that fits is meant.
	var best []Violation
	for i, r := range routes {
		if found := c.checkRoute(e, r, segments); i == 0 || len(found) < len(best) {
			best = found
		}
	}
	return best
}

// continuesUpload says that the request belongs to a resumable upload whose URL the service made.
func (e *exchange) continuesUpload() bool {
	return e.url.Query().Has("upload_id") && slices.Contains([]string{http.MethodPut, http.MethodPost, http.MethodDelete}, e.method)
}

func (e *exchange) violation(reply bool, api, where, what string) Violation {
	u := *e.url
	if q := u.Query(); q.Has("access_token") {
		q.Set("access_token", "…")
		u.RawQuery = q.Encode()
	}
	return Violation{Time: time.Now().UTC(), Method: e.method, URL: u.RequestURI(), API: api, Status: e.status, Reply: reply, Where: where, What: what}
}

func (c *Checker) checkXML(e *exchange) (found []Violation) {
	add := func(reply bool, where, what string) {
		found = append(found, e.violation(reply, "storage XML", where, what))
	}
	if e.method != http.MethodGet && e.method != http.MethodHead {
		add(false, "method", "only reads of objects go through the XML API here")
	}
	for name := range e.url.Query() {
		if !slices.Contains(xmlParams, name) {
			add(false, "query "+name, "no such parameter")
		}
	}
	if e.status >= 400 && e.status != http.StatusBadGateway && e.method != http.MethodHead {
		if t := mediaType(e.replyHeader); t != "application/xml" {
			add(true, "Content-Type", fmt.Sprintf("is %q, errors are application/xml", t))
		}
	}
	return found
}

func (c *Checker) checkRoute(e *exchange, r route, segments []string) (found []Violation) {
	complain := func(reply bool) func(where, what string) {
		return func(where, what string) { found = append(found, e.violation(reply, r.ID, where, what)) }
	}
	ask := &values{api: r.api, method: r.method, request: true, add: complain(false)}
	ask.path(r, segments)
	query := e.url.Query()
	ask.query(r, e, query)
	ask.requestBody(r, e, query)
	if e.status == 0 { // the connection was cut
		return found
	}
	answer := &values{api: r.api, method: r.method, partial: query.Has("fields"), add: complain(true), any: map[string]*schema{}}
	if c.prose != nil {
		for name, s := range c.prose.Schemas {
			if strings.HasPrefix(name, "google.") {
				answer.any[name] = s
			}
		}
	}
	if e.status >= 400 {
		c.errorReply(answer, r, e, query)
	} else {
		c.reply(answer, r, e, query)
	}
	return found
}

func (v *values) path(r route, segments []string) {
	for name, value := range r.pathParams(segments) {
		if p := r.Parameters[name]; p != nil {
			v.text(p, value, "path "+name)
		}
	}
}

// uploadParams are the parameters of uploads that the documents leave out.
var uploadParams = []string{"uploadType", "upload_id"}

func (v *values) query(r route, e *exchange, query url.Values) {
	for _, name := range slices.Sorted(maps.Keys(query)) {
		where := "query " + name
		p := r.Parameters[name]
		if p == nil || p.Location != "query" {
			p = r.api.Parameters[name]
		}
		switch {
		case r.form == upload && slices.Contains(uploadParams, name):
			continue
		case name == "$alt" && slices.Contains([]string{"json", "json;enum-encoding=int"}, query.Get(name)): // of every newer service
			continue
		case p == nil:
			v.add(where, "no such parameter")
			continue
		case len(query[name]) > 1 && !p.Repeated:
			v.add(where, "is given more than once")
		}
		for _, value := range query[name] {
			v.parameter(r, p, name, value)
		}
	}
	for name, p := range r.Parameters {
		if p.Location == "query" && (p.Required || bool(p.Description)) && !query.Has(name) {
			v.add("query "+name, "is required")
		}
	}
	switch alt := query.Get("alt"); {
	case alt == "media" && !r.Download:
		v.add("query alt", "this method has no media")
	case alt == "proto":
		v.add("query alt", "is not JSON")
	}
}

func (v *values) parameter(r route, p *schema, name, value string) {
	where := "query " + name
	switch {
	case name == "fields" && r.Response != nil:
		v.selection(r.Response, value)
	case p.Format == "google-fieldmask" && r.Request != nil:
		v.mask(r.Request, value, where)
	case p.Type == "boolean":
		if value != "true" && value != "false" {
			v.addf(where, "%q is no boolean", value)
		}
	case p.Type == "integer" || p.Type == "number":
		v.number(p, json.Number(value), where)
	default:
		v.text(p, value, where)
	}
}

func mediaType(h http.Header) string {
	t, _, _ := mime.ParseMediaType(h.Get("Content-Type"))
	return t
}

// requestBody checks the part of the body that is JSON (or, for tokens, a form).
func (v *values) requestBody(r route, e *exchange, query url.Values) {
	body, contentType := e.body, mediaType(e.header)
	if !e.whole && (e.status == 0 || e.status >= 300) { // refused, or cut off, before it was read
		return
	}
	if r.form == upload {
		switch kind := query.Get("uploadType"); {
		case e.continuesUpload() || kind == "media":
			return
		case kind == "multipart":
			_, params, _ := mime.ParseMediaType(e.header.Get("Content-Type"))
			part, err := multipart.NewReader(bytes.NewReader(body), params["boundary"]).NextRawPart()
			if err == nil {
				contentType = mediaType(http.Header(part.Header))
				body, err = io.ReadAll(part)
			}
			if err != nil {
				v.addf("body", "is not multipart: %v", err)
				return
			}
		case kind != "resumable":
			v.addf("query uploadType", "%q is none of its values", kind)
		}
	}
	if len(bytes.TrimSpace(body)) == 0 {
		if r.Request != nil && r.form == plain {
			v.value(r.Request, map[string]any{}, "body")
		}
		return
	}
	if r.Request == nil {
		v.add("body", "this method has none")
		return
	}
	if !e.whole && r.form == plain {
		return // longer than is kept
	}
	if contentType == "application/x-www-form-urlencoded" && (r.api.ID == "sts:v1" || r.ID == "oauth2.token") {
		form, err := url.ParseQuery(string(body))
		if err != nil {
			v.addf("body", "is no form: %v", err)
			return
		}
		fields := map[string]any{}
		for name := range form {
			fields[camel(name)] = form.Get(name)
		}
		v.value(r.Request, fields, "body")
		return
	}
	if contentType != "application/json" && contentType != "" {
		v.addf("header Content-Type", "is %q, want application/json", contentType)
	}
	raw, err := decode(body)
	if err != nil {
		v.addf("body", "is no JSON: %v", err)
		return
	}
	v.value(r.Request, raw, "body")
}

func decode(body []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	var raw any
	if err := d.Decode(&raw); err != nil {
		return nil, err
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("more than one value")
	}
	return raw, nil
}

// reply checks what is not an error.
func (c *Checker) reply(v *values, r route, e *exchange, query url.Values) {
	switch {
	case e.method == http.MethodHead, e.status == http.StatusNotModified:
		return
	case r.form == upload && (e.status == http.StatusPermanentRedirect || e.replyHeader.Get("X-Http-Status-Code-Override") == "308"):
		return // "resume incomplete", to clients that can and cannot stand that status
	case r.form == upload && query.Get("uploadType") == "resumable" && !e.continuesUpload():
		if e.replyHeader.Get("Location") == "" {
			v.add("header Location", "is missing")
		}
		return
	case (r.form == download || query.Get("alt") == "media") && r.Download:
		return
	case r.Response == nil:
		if e.status != http.StatusNoContent || len(e.reply) > 0 {
			v.addf("status", "is %d, want %d without a body", e.status, http.StatusNoContent)
		}
		return
	case e.status != http.StatusOK && e.status != http.StatusCreated:
		v.addf("status", "is %d, want %d", e.status, http.StatusOK)
		return
	}
	raw, ok := v.replyJSON(e)
	if !ok {
		return
	}
	v.value(r.Response, raw, "body")
	fields, _ := raw.(map[string]any)
	response := v.api.resolve(r.Response)
	if fields == nil || response == nil {
		return
	}
	c.resource(v, r, e, response, fields, "body")
	if items := v.api.resolve(response.Properties["items"]); items != nil && items.Type == "array" {
		list, _ := fields["items"].([]any)
		for i, item := range list {
			if item, ok := item.(map[string]any); ok {
				c.resource(v, r, e, v.api.resolve(items.Items), item, fmt.Sprintf("body.items[%d]", i))
			}
		}
	}
	c.immutables(v, response, fields, "body")
}

func (v *values) replyJSON(e *exchange) (any, bool) {
	if t := mediaType(e.replyHeader); t != "application/json" {
		v.addf("header Content-Type", "is %q, want application/json", t)
		return nil, false
	}
	if !e.replyWhole {
		return nil, false // longer than is kept
	}
	raw, err := decode(e.reply)
	if err != nil {
		v.addf("body", "is no JSON: %v", err)
		return nil, false
	}
	return raw, true
}

// resource checks what every resource has: its kind, and its own address.
func (c *Checker) resource(v *values, r route, e *exchange, s *schema, fields map[string]any, where string) {
	if s == nil || v.partial {
		return
	}
	if kind := s.Properties["kind"]; kind != nil && kind.Default != "" && fields["kind"] == nil {
		v.add(where+".kind", "is missing")
	}
	link, ok := fields["selfLink"].(string)
	if !ok || s.ID == "" {
		return
	}
	u, err := url.Parse(link)
	if err != nil || !u.IsAbs() {
		v.addf(where+".selfLink", "%q is no URL", link)
		return
	}
	segments, err := split(u.EscapedPath())
	if err != nil {
		v.addf(where+".selfLink", "%q is no URL", link)
		return
	}
	for _, target := range c.root.find(segments)[http.MethodGet] {
		if target.Response != nil && target.Response.Ref == s.ID {
			return
		}
	}
	v.addf(where+".selfLink", "%q is not the address of a %s", link, s.ID)
}

// immutables remembers the values that never change, and complains when one did. Resources lie at any depth.
func (c *Checker) immutables(v *values, s *schema, fields map[string]any, where string) {
	name, _ := fields["name"].(string)
	uid, _ := fields["uid"].(string)
	for key, raw := range fields {
		p := s.Properties[key]
		if p == nil || name == "" || uid == "" || !p.Immutable {
			continue
		}
		text, _ := json.Marshal(raw) // it came from JSON
		id := strings.Join([]string{v.api.ID, name, uid, key}, "\x00")
		c.mu.Lock()
		before, seen := c.immutable[id]
		if !seen {
			c.immutable[id] = string(text)
		}
		c.mu.Unlock()
		if seen && before != string(text) {
			v.addf(where+"."+key, "was %s and is %s, but never changes", before, text)
		}
	}
	for key, raw := range fields {
		at := where + "." + key
		p := v.api.resolve(s.Properties[key])
		switch raw := raw.(type) {
		case map[string]any:
			if typeName, ok := raw["@type"].(string); ok {
				p = v.api.Schemas[typeName[strings.LastIndexByte(typeName, '.')+1:]]
			}
			if p != nil {
				c.immutables(v, p, raw, at)
			}
		case []any:
			if p == nil {
				continue
			}
			item := v.api.resolve(p.Items)
			for i, raw := range raw {
				if raw, ok := raw.(map[string]any); ok && item != nil {
					c.immutables(v, item, raw, fmt.Sprintf("%s[%d]", at, i))
				}
			}
		}
	}
}

// statusOf has the HTTP status of each google.rpc.Code (google/rpc/code.proto).
var statusOf = map[string]int{
	"CANCELLED": 499, "UNKNOWN": 500, "INVALID_ARGUMENT": 400, "DEADLINE_EXCEEDED": 504, "NOT_FOUND": 404, "ALREADY_EXISTS": 409,
	"PERMISSION_DENIED": 403, "RESOURCE_EXHAUSTED": 429, "FAILED_PRECONDITION": 400, "ABORTED": 409, "OUT_OF_RANGE": 400,
	"UNIMPLEMENTED": 501, "INTERNAL": 500, "UNAVAILABLE": 503, "DATA_LOSS": 500, "UNAUTHENTICATED": 401,
}

// errorReply checks an error's body.
func (c *Checker) errorReply(v *values, r route, e *exchange, query url.Values) {
	media := r.form == download || query.Get("alt") == "media"
	switch {
	case c.prose == nil, e.method == http.MethodHead:
		return
	case media && mediaType(e.replyHeader) != "application/json": // in words, then
		return
	case e.status == http.StatusBadGateway && mediaType(e.replyHeader) == "text/html": // Google's front end found no service
		return
	case e.status == 499 && e.continuesUpload(): // a cancelled upload
		return
	}
	raw, ok := v.replyJSON(e)
	if !ok {
		return
	}
	in := *v
	in.api, in.method = c.prose, nil
	if (r.api.ID == "sts:v1" || r.ID == "oauth2.token") && e.status < 500 {
		in.value(&schema{Ref: "OAuthError"}, raw, "body")
		return
	}
	in.value(&schema{Ref: "Error"}, raw, "body")
	body, _ := raw.(map[string]any)
	fields, _ := body["error"].(map[string]any)
	if fields == nil {
		v.add("body.error", "is missing")
		return
	}
	if code, _ := fields["code"].(json.Number); code.String() != strconv.Itoa(e.status) {
		v.addf("body.error.code", "is %v, the status is %d", fields["code"], e.status)
	}
	if message, _ := fields["message"].(string); message == "" {
		v.add("body.error.message", "is missing")
	}
	status, hasStatus := fields["status"].(string)
	list, _ := fields["errors"].([]any)
	switch older := r.api.ServicePath != ""; {
	case hasStatus && statusOf[status] != e.status && slices.Contains(slices.Collect(maps.Values(statusOf)), e.status):
		v.addf("body.error.status", "is %q, the status is %d", status, e.status)
	case !older && !hasStatus:
		v.add("body.error.status", "is missing")
	case older && len(list) == 0:
		v.add("body.error.errors", "is missing")
	}
	for i, item := range list {
		item, _ := item.(map[string]any)
		for _, name := range []string{"message", "domain", "reason"} {
			if text, _ := item[name].(string); text == "" {
				v.addf(fmt.Sprintf("body.error.errors[%d].%s", i, name), "is missing")
			}
		}
	}
	details, _ := fields["details"].([]any)
	for i, d := range details {
		if d, _ := d.(map[string]any); d["@type"] == nil {
			v.addf(fmt.Sprintf("body.error.details[%d].@type", i), "is missing")
		}
	}
}
