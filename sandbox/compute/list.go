package compute

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// item is one thing to be listed.
type item struct {
	scope   string // "zones/Z", "regions/R" or "global"
	name    string
	created string // RFC 3339
	value   any    // *T of the API
}

// maxPage is the most items of a page, and the default.
const maxPage = 500

// page is the answer of a list call.
type page struct {
	Kind          string `json:"kind"`
	ID            string `json:"id"`
	SelfLink      string `json:"selfLink"`
	Items         any    `json:"items,omitempty"`
	NextPageToken string `json:"nextPageToken,omitempty"`
}

// position is where a page ends, inside a page token.
type position struct {
	Order   string `json:"o"`
	Created string `json:"c"`
	Scope   string `json:"s"`
	Name    string `json:"n"`
}

// list answers a list call over items, whose values are of type *T.
func list[T any](r *request, kind string, items []item) (any, *apiError) {
	chosen, next, err := choose[T](r, items)
	if err != nil {
		return nil, err
	}
	p := r.page(kind, next)
	if len(chosen) > 0 {
		values := make([]any, len(chosen))
		for i, it := range chosen {
			values[i] = it.value
		}
		p.Items = values
	}
	return p, nil
}

// aggregate answers an aggregatedList call: items by scope, a warning for a scope without any.
func aggregate[T any](r *request, kind, collection string, items []item, scopes []string) (any, *apiError) {
	chosen, next, err := choose[T](r, items)
	if err != nil {
		return nil, err
	}
	byScope := map[string]map[string]any{}
	for _, scope := range scopes {
		byScope[scope] = map[string]any{"warning": map[string]any{
			"code":    "NO_RESULTS_ON_PAGE",
			"message": "There are no results for scope '" + scope + "' on this page.",
			"data":    []any{map[string]string{"key": "scope", "value": scope}},
		}}
	}
	for _, it := range chosen {
		group := byScope[it.scope]
		if group == nil || group["warning"] != nil {
			group = map[string]any{}
			byScope[it.scope] = group
		}
		values, _ := group[collection].([]any)
		group[collection] = append(values, it.value)
	}
	p := r.page(kind, next)
	p.Items = byScope
	return p, nil
}

func (r *request) page(kind, next string) page {
	self := linkPrefix + strings.TrimPrefix(r.URL.Path, "/compute/v1/")
	return page{Kind: kind, ID: resource(self), SelfLink: self, NextPageToken: next}
}

// choose filters, sorts and cuts items into the page that the request asks for.
func choose[T any](r *request, items []item) ([]item, string, *apiError) {
	q := r.URL.Query()
	size := maxPage
	if v := q.Get("maxResults"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 0 || n > maxPage {
			return nil, "", invalid("maxResults", v, "Must be between 0 and 500.")
		}
		if n > 0 {
			size = n
		}
	}
	order := q.Get("orderBy")
	newest := false
	switch order {
	case "", "name", "name asc":
	case "creationTimestamp desc":
		newest = true
	default:
		return nil, "", invalid("orderBy", order, "Must be one of [name, creationTimestamp desc].")
	}
	compare := func(a, b item) int {
		if newest {
			return cmp.Or(cmp.Compare(b.created, a.created), cmp.Compare(a.scope, b.scope), cmp.Compare(a.name, b.name))
		}
		return cmp.Or(cmp.Compare(a.scope, b.scope), cmp.Compare(a.name, b.name))
	}
	var after *item
	if token := q.Get("pageToken"); token != "" {
		var p position
		body, err := base64.RawURLEncoding.DecodeString(token)
		if err != nil || json.Unmarshal(body, &p) != nil || p.Order != order {
			return nil, "", invalid("pageToken", token, "Must be the nextPageToken of the same list.")
		}
		after = &item{scope: p.Scope, name: p.Name, created: p.Created}
	}
	keep, err := parseFilter(q.Get("filter"), reflect.TypeFor[T]())
	if err != nil {
		return nil, "", invalid("filter", q.Get("filter"), "Invalid list filter expression: "+err.Error()+".")
	}
	slices.SortFunc(items, compare)
	var chosen []item
	for _, it := range items {
		if after != nil && compare(it, *after) <= 0 || !keep(it.value) {
			continue
		}
		if len(chosen) == size {
			end := chosen[size-1]
			body, err := json.Marshal(position{order, end.created, end.scope, end.name})
			if err != nil {
				return nil, "", &apiError{500, "backendError", err.Error()}
			}
			return chosen, base64.RawURLEncoding.EncodeToString(body), nil
		}
		chosen = append(chosen, it)
	}
	return chosen, "", nil
}
