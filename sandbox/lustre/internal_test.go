package lustre

import (
	"path"
	"strings"
	"testing"

	api "github.com/sluicehpc/sluice/gcp/lustre"
)

func TestFilter(t *testing.T) {
	item := map[string]any{"name": "a b", "done": true, "metadata": map[string]any{"apiVersion": "v1", "target": `x"y`}, "labels": map[string]string{"my-key_1": "v"}}
	for text, want := range map[string]bool{
		``:                                 true,
		`name="a b"`:                       true,
		`name = "a b"`:                     true,
		`name!="a b"`:                      false,
		`done=true`:                        true,
		`done=false`:                       false,
		`metadata.apiVersion="v1"`:         true,
		`metadata.api_version="v1"`:        true,
		`metadata.target="x\"y"`:           true,
		`labels.my-key_1=v AND done=true`:  true,
		`labels.my-key_1=v AND done=false`: false,
		`labels.other=v`:                   false,
		`labels.other!=v`:                  true,
	} {
		match, err := parseFilter(text)
		if err != nil || match(item) != want {
			t.Errorf("%s: %v, want %v", text, err, want)
		}
	}
	for _, bad := range []string{`name`, `name=`, `name:x`, `name="a`, `a=b OR c=d`, `a=b AND`, `a=b c=d`, `(a=b)`, `-a=b`} {
		if _, err := parseFilter(bad); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
}

func FuzzFilter(f *testing.F) {
	f.Add(`metadata.apiVersion="v1" AND done!=true`)
	f.Fuzz(func(t *testing.T, s string) {
		if match, err := parseFilter(s); err == nil {
			match(map[string]any{"a": []any{1, nil}})
		}
	})
}

// FuzzCheckName holds accepted names to what a path below a directory is.
func FuzzCheckName(f *testing.F) {
	for _, s := range []string{"a/b", "../a", "a//b", "a/", "/", "a/../../b", strings.Repeat("x", 256), "a\x00b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if checkName(s) != nil {
			return
		}
		if s == "" || path.Clean(s) != s || path.IsAbs(s) || strings.HasPrefix(s, "../") || s == ".." || s == "." {
			t.Errorf("%q was accepted", s)
		}
	})
}

func FuzzTransferRequest(f *testing.F) {
	f.Add("gs://bucket/x/", "/data", "sa@p.iam.gserviceaccount.com")
	f.Add("gs://b", "/../x", "projects/-/serviceAccounts/a@b")
	f.Fuzz(func(t *testing.T, uri, dir, account string) {
		r := transferRequest{verb: "import", gcs: &api.GcsPath{URI: uri}, lustre: &api.LustrePath{Path: dir}, serviceAccount: account}
		_, prefix, dir, err := r.check("n")
		if err != nil {
			return
		}
		if prefix != "" && !strings.HasSuffix(prefix, "/") || !strings.HasPrefix(dir, "/") || strings.Contains(dir+"/", "/../") {
			t.Errorf("%q %q was accepted as %q %q", uri, dir, prefix, dir)
		}
	})
}
