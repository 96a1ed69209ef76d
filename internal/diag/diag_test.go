package diag

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

func TestPicture(t *testing.T) {
	for _, test := range []struct {
		name string
		d    Diagnostic
		want string
	}{
		{"all of it", Diagnostic{"a.sh", 3, 9, 17, `unknown verb "stage_im"`, "did you mean stage_in?", "#SLUICE stage_im x"},
			"a.sh:3:9: unknown verb \"stage_im\"\n   3 | #SLUICE stage_im x\n     |         ^^^^^^^^\n  did you mean stage_in?"},
		{"nothing marked", Diagnostic{"a", 1, 1, 0, "m", "", "x"}, "a:1:1: m\n   1 | x\n     | ^"},
		{"no line", Diagnostic{"a", 1, 1, 2, "m", "h", ""}, "a:1:1: m\n  h"},
		{"tabs keep the caret in place", Diagnostic{"a", 1, 3, 4, "m", "", "\tax"}, "a:1:3: m\n   1 | \tax\n     | \t ^"},
		{"characters, not bytes", Diagnostic{"a", 1, 3, 4, "m", "", "öäx"}, "a:1:3: m\n   1 | öäx\n     |   ^"},
		{"escape sequences are shown, not obeyed", Diagnostic{"a", 1, 1, 2, "m", "", "\x1b[31m\u009b\x7f"}, "a:1:1: m\n   1 | ?[31m??\n     | ^"},
		{"past the end", Diagnostic{"a", 1, 4, 5, "m", "", "ab"}, "a:1:4: m\n   1 | ab\n     |    ^"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := test.d.Error(); got != test.want {
				t.Errorf("got\n%s\nwant\n%s", got, test.want)
			}
		})
	}
}

func TestJSON(t *testing.T) {
	got, err := json.Marshal(Diagnostic{"a", 1, 2, 3, "m", "h", "text"})
	if want := `{"file":"a","line":1,"column":2,"end_column":3,"message":"m","hint":"h"}`; err != nil || string(got) != want {
		t.Errorf("got %s, %v; want %s", got, err, want)
	}
}

func TestListInOrder(t *testing.T) {
	at := func(line, column int) Diagnostic {
		return Diagnostic{File: "a", Line: line, Column: column, Message: fmt.Sprint(line, column)}
	}
	err := List{at(2, 1), at(1, 5), at(1, 2)}.Err()
	var list List
	if !errors.As(fmt.Errorf("wrapped: %w", err), &list) {
		t.Fatalf("%T is no List", err)
	}
	if diff := cmp.Diff(List{at(1, 2), at(1, 5), at(2, 1)}, list); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if want := "a:1:2: 1 2\na:1:5: 1 5\na:2:1: 2 1"; err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
	if err := (List{}).Err(); err != nil {
		t.Errorf("an empty list is the error %v", err)
	}
}

func TestNearest(t *testing.T) {
	words := []string{"stage_in", "stage_out", "checkpoint", "serve", "on", "no"}
	for word, want := range map[string]string{
		"stage_im": "stage_in", "stagein": "stage_in", "satge_in": "stage_in", "stage_otu": "stage_out", "chekpoint": "checkpoint",
		"o": "on", "serv": "serve", "frobnicate": "", "": "", strings.Repeat("stage_in", 20): "",
	} {
		if got := Nearest(word, words); got != want {
			t.Errorf("Nearest(%q) = %q, want %q", word, got, want)
		}
	}
	if got := Nearest("x", nil); got != "" {
		t.Errorf("without candidates: %q", got)
	}
}

func FuzzPicture(f *testing.F) {
	f.Add("#SLUICE\tstage_im", 9, 17)
	f.Add("\x1b\xff", 1, 0)
	f.Fuzz(func(t *testing.T, text string, column, end int) {
		if column < 1 || column > 1000 || end > 1000 {
			return
		}
		got := Diagnostic{File: "a", Line: 1, Column: column, EndColumn: end, Message: "m", Text: text}.Error()
		if !utf8.ValidString(got) {
			t.Errorf("%q is not UTF-8", got)
		}
		for _, r := range got {
			if r < ' ' && r != '\n' && r != '\t' {
				t.Errorf("%q has the control character %q", got, r)
			}
		}
		if lines := strings.Count(got, "\n"); text != "" && lines != 2 {
			t.Errorf("%q has %d lines", got, lines+1)
		}
	})
}

func FuzzNearest(f *testing.F) {
	f.Add("stage_im", "stage_in")
	f.Fuzz(func(t *testing.T, a, b string) {
		if distance(a, b) != distance(b, a) {
			t.Errorf("distance(%q, %q) depends on the order", a, b)
		}
		if a != "" && len(a) <= 64 && Nearest(a, []string{a}) != a {
			t.Errorf("Nearest(%q) is not itself", a)
		}
	})
}
