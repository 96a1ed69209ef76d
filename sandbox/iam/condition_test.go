package iam

import (
	"strconv"
	"strings"
	"testing"
)

func TestConditions(t *testing.T) {
	at := attributes{name: "projects/_/buckets/b/objects/in/x", service: "storage.googleapis.com", kind: "storage.googleapis.com/Object", listPrefix: `a"b\`}
	for expression, want := range map[string]bool{
		`resource.name == "projects/_/buckets/b/objects/in/x"`:                                                    true,
		`resource.name != 'x' && resource.service == 'storage.googleapis.com'`:                                    true,
		`resource.type == "storage.googleapis.com/Bucket"`:                                                        false,
		`!(resource.name.endsWith("/x")) || resource.name.startsWith('projects/_')`:                               true,
		`!resource.name.endsWith("/x")`:                                                                           false,
		`resource.name.startsWith("y") || resource.name.startsWith("z") && "a" == "a"`:                            false,
		`api.getAttribute("storage.googleapis.com/objectListPrefix", "") == "a\"b\\"`:                             true,
		`api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith(r'a"b\')`:                     true,
		`api.getAttribute("other", "default") == "default"`:                                                       true,
		`"\x41\u00e9\U0001F600\101\n" == "Aé😀A\n"`:                                                                true,
		" ( ( resource.name\n.\tstartsWith ( \"projects\" ) ) ) ":                                                 true,
		`resource.name.startsWith(` + strconv.Quote("projects/_/buckets/b/objects/in/\x01\u2028\U0010FFFF") + `)`: false,
	} {
		c, err := parseCondition(expression)
		if err != nil {
			t.Errorf("%s: %v", expression, err)
			continue
		}
		if got := c(at); got != want {
			t.Errorf("%s: got %t, want %t", expression, got, want)
		}
	}
	for _, bad := range []string{
		"", "true", "resource", "resource.", "resource.name", "resource.owner == 'x'", "resource.name ==", "resource.name == 'x", "resource.name.contains('x')",
		"resource.name.startsWith('x'", "resource.name.startsWith('x') &&", "resource.name == 'x' 'y'", `resource.name == "\q"`, `resource.name == "\xf"`,
		`resource.name == "\uD800"`, `resource.name == "\U00110000"`, "resource.name == 'a\nb'", "resource.name == '\xff'", "api.getAttribute('x') == ''",
		"api.getAttribute('x', ''", strings.Repeat("!", 100) + "resource.name == ''", strings.Repeat("(", 100) + "resource.name == ''", "request.time < timestamp('x')",
	} {
		if _, err := parseCondition(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

// FuzzCondition: no text makes the parser fail other than by an error, and a quoted text means itself.
func FuzzCondition(f *testing.F) {
	f.Add(`resource.name.startsWith("x") || !(api.getAttribute('a', "").endsWith(r'b') && resource.type != "\u0041")`)
	f.Add(`in/"); true || ("`)
	f.Fuzz(func(t *testing.T, text string) {
		if c, err := parseCondition(text); err == nil {
			c(attributes{name: text})
		}
		text = strings.ToValidUTF8(text, "")
		c, err := parseCondition("resource.name == " + strconv.Quote(text))
		if err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		if !c(attributes{name: text}) || c(attributes{name: text + "x"}) {
			t.Errorf("%q does not mean itself", text)
		}
	})
}
