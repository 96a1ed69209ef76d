package storage

import (
	"bytes"
	"encoding/json"
)

// patch changes v as body says: a JSON merge patch (RFC 7396) of its writable fields; other fields in it are ignored, as
// Cloud Storage does. With replace, writable fields that body leaves out are cleared.
func patch[T any](v *T, body json.RawMessage, writable map[string]bool, replace bool) (*T, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	current, err := decodeObject(data)
	if err != nil {
		return nil, err
	}
	change, err := decodeObject(body)
	if err != nil {
		return nil, &apiError{400, "parseError", "Parse Error: " + err.Error()}
	}
	for name := range change {
		if !writable[name] {
			delete(change, name)
		}
	}
	if replace {
		for name := range writable {
			delete(current, name)
		}
	}
	merge(current, change)
	if data, err = json.Marshal(current); err != nil {
		return nil, err
	}
	out := new(T)
	if err := json.Unmarshal(data, out); err != nil {
		return nil, invalid("Invalid value: %v.", err)
	}
	return out, nil
}

func decodeObject(data []byte) (map[string]any, error) {
	m := map[string]any{}
	if len(bytes.TrimSpace(data)) == 0 {
		return m, nil
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	err := d.Decode(&m)
	if m == nil {
		m = map[string]any{} // the document was null
	}
	return m, err
}

func merge(current, change map[string]any) {
	for name, value := range change {
		switch value := value.(type) {
		case nil:
			delete(current, name)
		case map[string]any:
			inner, ok := current[name].(map[string]any)
			if !ok {
				inner = map[string]any{}
			}
			merge(inner, value)
			current[name] = inner
		default:
			current[name] = value
		}
	}
}
