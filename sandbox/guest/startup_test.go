package guest

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
)

// TestStartupScript does not serve a hostname: the test would change the machine's.
func TestStartupScript(t *testing.T) {
	for _, tc := range []struct {
		name, script, want string
		code               int
	}{
		{"bash", "#!/bin/bash\necho one\necho two >&2\nprintf three", "startup-script: one\nstartup-script: two\nstartup-script: three\nstartup-script exit status 0\n", 0},
		{"no first line", "echo plain; exit 9", "startup-script: plain\nstartup-script exit status 9\n", 9},
		{"none", "", "startup-script: none\n", 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var calls atomic.Int32
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch {
				case calls.Add(1) < 3: // the server comes up after the VM
					w.WriteHeader(http.StatusServiceUnavailable)
				case r.Header.Get("Metadata-Flavor") != "Google":
					w.WriteHeader(http.StatusForbidden)
				case r.URL.Path == "/instance/attributes/startup-script" && tc.script != "":
					fmt.Fprint(w, tc.script)
				default:
					w.WriteHeader(http.StatusNotFound)
				}
			}))
			defer server.Close()
			var out bytes.Buffer
			if code := startupScript(context.Background(), server.URL+"/", &out); code != tc.code || out.String() != tc.want {
				t.Errorf("exit code %d, %q, want %d, %q", code, &out, tc.code, tc.want)
			}
		})
	}
}

func TestJournalctl(t *testing.T) {
	dir := t.TempDir()
	w, err := journal(dir, "x.service", nil)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(w, "one\ntwo\r\n"+strings.Repeat("long", 40_000)+"\nthree")
	w.Close()
	become(t, "the journal ends with the last words", true, func() any {
		lines := tail(journalPath(dir, "x.service"), 1)
		return len(lines) == 1 && strings.HasSuffix(lines[0], "Z three")
	})
	var out, errs bytes.Buffer
	if code := journalctl(dir, []string{"-u", "x", "-n2", "--no-pager"}, &out, &errs); code != 0 || strings.Count(out.String(), "\n") != 2 {
		t.Errorf("exit code %d, %d lines, %s", code, strings.Count(out.String(), "\n"), &errs)
	}
	out.Reset()
	if code := journalctl(dir, []string{"--unit=nobody"}, &out, &errs); code != 0 || out.Len() != 0 {
		t.Errorf("no journal: exit code %d, %q", code, &out)
	}
	if code := journalctl(dir, []string{"-u", "../../etc/passwd"}, &out, &errs); code != 1 {
		t.Errorf("a path as a unit: exit code %d, %q", code, &out)
	}
	if _, err := os.Stat(journalPath(dir, "x.service")); err != nil {
		t.Error(err)
	}
}
