package compute

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"strings"
)

// decode reads a JSON object into v, a pointer to a struct of the API, as strictly as Google's
// front end: unknown fields are refused, 64-bit numbers may come as strings or as numbers.
func decode(body []byte, v any) *apiError {
	if len(bytes.TrimSpace(body)) == 0 {
		body = []byte("{}")
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	var raw any
	if err := d.Decode(&raw); err != nil {
		return badJSON("%v", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return badJSON("Unexpected data after the end of the object.")
	}
	if _, ok := raw.(map[string]any); !ok {
		return badJSON("An object is expected.")
	}
	normal, bad := normalise(raw, reflect.TypeOf(v).Elem(), "", false)
	if bad != nil {
		return bad
	}
	clean, err := json.Marshal(normal)
	if err != nil {
		return badJSON("%v", err)
	}
	if err := json.Unmarshal(clean, v); err != nil {
		return badJSON("%v", err)
	}
	return nil
}

func badJSON(format string, args ...any) *apiError {
	return &apiError{400, "badRequest", "Invalid JSON payload received. " + fmt.Sprintf(format, args...)}
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

// normalise brings raw into the form that t's json tags ask for; quoted says that the tag wants
// a number as a string. Null means absent.
func normalise(raw any, t reflect.Type, path string, quoted bool) (any, *apiError) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Implements(unmarshaler) || reflect.PointerTo(t).Implements(unmarshaler) {
		return raw, nil
	}
	switch value := raw.(type) {
	case map[string]any:
		out := make(map[string]any, len(value))
		for key, item := range value {
			if item == nil {
				continue
			}
			at := strings.TrimPrefix(path+"."+key, ".")
			itemType, itemQuoted := t, false
			switch t.Kind() {
			case reflect.Struct:
				f, q, ok := field(t, key)
				if !ok {
					return nil, badJSON("Unknown name \"%s\": Cannot find field.", at)
				}
				itemType, itemQuoted = f, q
			case reflect.Map:
				itemType = t.Elem()
			case reflect.Interface:
			default:
				return nil, badJSON("Unknown name \"%s\": Cannot find field.", at)
			}
			v, err := normalise(item, itemType, at, itemQuoted)
			if err != nil {
				return nil, err
			}
			out[key] = v
		}
		return out, nil
	case []any:
		if t.Kind() != reflect.Slice {
			return raw, nil // the decoder names the mismatch
		}
		out := make([]any, 0, len(value))
		for i, item := range value {
			if item == nil {
				return nil, badJSON("null is no value of \"%s\".", path)
			}
			v, err := normalise(item, t.Elem(), fmt.Sprintf("%s[%d]", path, i), false)
			if err != nil {
				return nil, err
			}
			out = append(out, v)
		}
		return out, nil
	case json.Number:
		if quoted {
			return value.String(), nil
		}
	case string:
		switch t.Kind() {
		case reflect.Int, reflect.Int32, reflect.Int64, reflect.Uint64, reflect.Float64:
			if !quoted {
				return json.Number(value), nil
			}
		}
	}
	return raw, nil
}

// field finds the field of struct type t whose JSON name is name, and whether its tag says ",string".
func field(t reflect.Type, name string) (reflect.Type, bool, bool) {
	for f := range t.Fields() {
		tag, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if tag == name && tag != "-" && tag != "" {
			return f.Type, strings.Contains(options, "string"), true
		}
	}
	return nil, false, false
}
