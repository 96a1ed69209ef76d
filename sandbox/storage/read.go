package storage

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// serveXML answers GET and HEAD of /BUCKET/OBJECT, the only calls of the XML API that the sandbox has. path is escaped.
func (s *Server) serveXML(c *call, path string) error {
	bucket, name, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	var err error
	if c.bucket, err = url.PathUnescape(bucket); err != nil {
		return invalid("bad path: %v", err)
	}
	if c.object, err = url.PathUnescape(name); err != nil {
		return invalid("bad path: %v", err)
	}
	if c.object == "" || c.r.Method != http.MethodGet && c.r.Method != http.MethodHead {
		return &apiError{http.StatusNotImplemented, "notImplemented", "The sandbox implements only object reads of the XML API."}
	}
	if err := s.authorize(c.r, "storage.objects.get", c.bucket, c.object); err != nil {
		return err
	}
	p, err := headerPreconditions(c.r.Header)
	if err != nil {
		return err
	}
	return s.hide(c, s.serveData(c, p))
}

// serveData sends the object's data, or a range of it. Headers that describe the object are the same in both APIs.
func (s *Server) serveData(c *call, p Preconditions) error {
	generation, err := generationOf(c.q.Get("generation"))
	if err != nil {
		return err
	}
	f, o, err := s.openData(c.r.Context(), c.bucket, c.object, generation)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := p.checkRead(o); err != nil {
		return err
	}
	part, partial, err := parseRange(c.r.Header.Get("Range"), o.size)
	if err != nil {
		c.w.Header().Set("Content-Range", fmt.Sprintf("bytes */%d", o.size))
		return err
	}
	h := c.w.Header()
	setObjectHeaders(h, o)
	status := http.StatusOK
	if partial {
		status = http.StatusPartialContent
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", part.start, part.start+part.length-1, o.size))
		if _, err := f.Seek(part.start, io.SeekStart); err != nil {
			return err
		}
	} else {
		part.length = o.size
	}
	h.Set("Content-Length", strconv.FormatInt(part.length, 10))
	c.w.WriteHeader(status)
	if c.r.Method != http.MethodHead {
		// What goes wrong from here on reaches the client as a body shorter than its Content-Length.
		io.CopyN(c.w, f, part.length)
	}
	return nil
}

func setObjectHeaders(h http.Header, o *object) {
	attrs := &o.attrs
	contentType := attrs.ContentType
	if contentType == "" {
		contentType = "application/octet-stream"
	}
	h.Set("Content-Type", contentType)
	h.Set("Accept-Ranges", "bytes")
	h.Set("Last-Modified", o.updated.Format(http.TimeFormat))
	h.Set("X-Goog-Generation", strconv.FormatInt(o.generation, 10))
	h.Set("X-Goog-Metageneration", strconv.FormatInt(o.metageneration, 10))
	h.Set("X-Goog-Storage-Class", attrs.StorageClass)
	h.Set("X-Goog-Stored-Content-Length", strconv.FormatInt(o.size, 10))
	h.Add("X-Goog-Hash", "crc32c="+encodeCRC(o.crc32c))
	if o.md5 != nil {
		h.Add("X-Goog-Hash", "md5="+base64.StdEncoding.EncodeToString(o.md5))
		h.Set("Etag", `"`+hex.EncodeToString(o.md5)+`"`)
	} else {
		h.Set("X-Goog-Component-Count", strconv.FormatInt(o.components, 10))
		h.Set("Etag", `"`+o.etag()+`"`)
	}
	encoding := "identity"
	if attrs.ContentEncoding != "" {
		encoding = attrs.ContentEncoding
		h.Set("Content-Encoding", encoding)
	}
	h.Set("X-Goog-Stored-Content-Encoding", encoding)
	for name, value := range map[string]string{
		"Cache-Control": attrs.CacheControl, "Content-Disposition": attrs.ContentDisposition, "Content-Language": attrs.ContentLanguage,
	} {
		if value != "" {
			h.Set(name, value)
		}
	}
	for name, value := range attrs.Metadata {
		h.Set("X-Goog-Meta-"+name, value)
	}
}
