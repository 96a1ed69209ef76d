package iam

import (
	"encoding/base64"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Account is the resource of a service account.
func (s *Server) Account(email string) string {
	return s.projectResource() + "/serviceAccounts/" + email
}

// find is the account that the path names. s.mu is held.
func (s *Server) find(c *call) (*account, error) {
	a := s.accounts[c.account]
	if a == nil || a.agent {
		return nil, notFound("Unknown service account: %s", c.account)
	}
	return a, nil
}

// accountJSON is a ServiceAccount of the API.
type accountJSON struct {
	Name           string `json:"name,omitempty"`
	ProjectID      string `json:"projectId,omitempty"`
	UniqueID       string `json:"uniqueId,omitempty"`
	Email          string `json:"email,omitempty"`
	DisplayName    string `json:"displayName,omitempty"`
	Description    string `json:"description,omitempty"`
	Etag           string `json:"etag,omitempty"`
	OAuth2ClientID string `json:"oauth2ClientId,omitempty"`
	Disabled       bool   `json:"disabled,omitempty"`
}

func (s *Server) render(a *account) accountJSON {
	id := strconv.FormatUint(a.id, 10)
	return accountJSON{
		Name: s.Account(a.email), ProjectID: s.project, UniqueID: id, Email: a.email, DisplayName: a.displayName,
		Description: a.description, Etag: base64.StdEncoding.EncodeToString([]byte("account")), OAuth2ClientID: id, Disabled: a.disabled,
	}
}

// page cuts the wanted part out of all; a page token is the number of entries before the page.
func page[T any](c *call, all []T) (part []T, next string, err error) {
	size, start := 100, 0
	q := c.r.URL.Query()
	if v := q.Get("pageSize"); v != "" {
		if size, err = strconv.Atoi(v); err != nil || size < 0 {
			return nil, "", invalid("Invalid value at 'page_size': %q", v)
		}
		if size == 0 || size > 100 {
			size = 100
		}
	}
	if v := q.Get("pageToken"); v != "" {
		if start, err = strconv.Atoi(v); err != nil || start < 0 || start > len(all) {
			return nil, "", invalid("The page token %q is invalid.", v)
		}
	}
	part = all[start:]
	if len(part) > size {
		part, next = part[:size], strconv.Itoa(start+size)
	}
	return part, next, nil
}

func (s *Server) listAccounts(c *call) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []accountJSON
	for _, email := range slices.Sorted(maps.Keys(s.accounts)) {
		if a := s.accounts[email]; !a.agent {
			all = append(all, s.render(a))
		}
	}
	part, next, err := page(c, all)
	return struct {
		Accounts      []accountJSON `json:"accounts,omitempty"`
		NextPageToken string        `json:"nextPageToken,omitempty"`
	}{part, next}, err
}

var accountIDs = regexp.MustCompile(`^[a-z](?:[-a-z0-9]{4,28}[a-z0-9])$`)

// Limits of an account's words, in bytes.
const (
	maxDisplayName = 100
	maxDescription = 256
)

func checkWords(a accountJSON) error {
	if len(a.DisplayName) > maxDisplayName || len(a.Description) > maxDescription {
		return invalid("A display name has at most %d bytes, a description %d.", maxDisplayName, maxDescription)
	}
	return nil
}

func (s *Server) createAccount(c *call) (any, error) {
	var in struct {
		AccountID      string      `json:"accountId"`
		ServiceAccount accountJSON `json:"serviceAccount"`
	}
	if err := c.decode(&in); err != nil {
		return nil, err
	}
	if !accountIDs.MatchString(in.AccountID) {
		return nil, invalid("Service account ID %q must be 6 to 30 lower-case letters, digits and dashes, begin with a letter and not end with a dash.", in.AccountID)
	}
	if err := checkWords(in.ServiceAccount); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	email := s.email(in.AccountID)
	if s.accounts[email] != nil {
		return nil, &apiError{http.StatusConflict, "ALREADY_EXISTS", "Service account " + in.AccountID + " already exists within project projects/" + s.project + "."}
	}
	return s.render(s.add(&account{email: email, displayName: in.ServiceAccount.DisplayName, description: in.ServiceAccount.Description})), nil
}

func (s *Server) getAccount(c *call) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a, err := s.find(c)
	if err != nil {
		return nil, err
	}
	return s.render(a), nil
}

func (s *Server) patchAccount(c *call) (any, error) {
	var in struct {
		ServiceAccount accountJSON `json:"serviceAccount"`
		UpdateMask     string      `json:"updateMask"`
	}
	if err := c.decode(&in); err != nil {
		return nil, err
	}
	if err := checkWords(in.ServiceAccount); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	a, err := s.find(c)
	if err != nil {
		return nil, err
	}
	next := *a
	for field := range strings.SplitSeq(in.UpdateMask, ",") {
		switch field {
		case "displayName", "display_name":
			next.displayName = in.ServiceAccount.DisplayName
		case "description":
			next.description = in.ServiceAccount.Description
		default:
			return nil, invalid("Field %q of a service account cannot be updated.", field)
		}
	}
	*a = next
	return s.render(a), nil
}

func (s *Server) deleteAccount(c *call) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a, err := s.find(c)
	if err != nil {
		return nil, err
	}
	s.forgetAccount(a)
	return struct{}{}, nil
}

func (s *Server) disableAccount(c *call) (any, error) { return s.setDisabled(c, true) }
func (s *Server) enableAccount(c *call) (any, error)  { return s.setDisabled(c, false) }

func (s *Server) setDisabled(c *call, disabled bool) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a, err := s.find(c)
	if err != nil {
		return nil, err
	}
	a.disabled = disabled
	return struct{}{}, nil
}
