package e2e_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"cloud.google.com/go/storage"
	"golang.org/x/oauth2"
	"google.golang.org/api/iterator"
	"google.golang.org/api/option"
)

// status is what `sluice sandbox status --json` promises.
type status struct {
	Name  string `json:"name"`
	PID   int    `json:"pid"`
	Slurm string `json:"slurm"`
	VMs   []struct {
		Name    string `json:"name"`
		Address string `json:"address"`
		State   string `json:"state"`
	} `json:"vms"`
	Endpoints     map[string]string `json:"endpoints"`
	HostEndpoints map[string]string `json:"host_endpoints"`
}

func sandboxStatus(t *testing.T) status {
	t.Helper()
	out, err := sluice(t.Context(), nil, "sandbox", "status", "--name", sandboxName, "--json")
	if err != nil {
		t.Fatalf("sandbox status: %v\n%s", err, out)
	}
	var s status
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		t.Fatalf("sandbox status: %v\n%s", err, out)
	}
	return s
}

// admin is a token of the owner of the sandbox's project.
func admin(t *testing.T) oauth2.TokenSource {
	t.Helper()
	out, err := sluice(t.Context(), nil, "sandbox", "token", "--name", sandboxName)
	if err != nil {
		t.Fatalf("sandbox token: %v\n%s", err, out)
	}
	return oauth2.StaticTokenSource(&oauth2.Token{AccessToken: strings.TrimSpace(out)})
}

// storageClient is Google's own client on the sandbox's forward to this host.
func storageClient(t *testing.T) *storage.Client {
	t.Helper()
	c, err := storage.NewClient(t.Context(), option.WithEndpoint(sandboxStatus(t).HostEndpoints["storage"]+"/storage/v1/"),
		option.WithTokenSource(admin(t)), storage.WithJSONReads())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// get asks one of the sandbox's APIs through its forward to this host.
func get(t *testing.T, url string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := oauth2.NewClient(t.Context(), admin(t)).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("GET %s: %s %v\n%s", url, resp.Status, err, body)
	}
	return string(body)
}

// newBucket makes a bucket that holds the given objects.
func newBucket(t *testing.T, name string, objects map[string][]byte) *storage.BucketHandle {
	t.Helper()
	b := storageClient(t).Bucket(name)
	if err := b.Create(t.Context(), "sluice-sandbox", nil); err != nil {
		t.Fatalf("create bucket %s: %v", name, err)
	}
	for object, data := range objects {
		w := b.Object(object).NewWriter(t.Context())
		if _, err := io.Copy(w, bytes.NewReader(data)); err != nil {
			t.Fatalf("upload %s: %v", object, err)
		}
		if err := w.Close(); err != nil {
			t.Fatalf("upload %s: %v", object, err)
		}
	}
	return b
}

// listing returns name → attributes of the objects below prefix.
func listing(t *testing.T, b *storage.BucketHandle, prefix string) map[string]*storage.ObjectAttrs {
	t.Helper()
	all := map[string]*storage.ObjectAttrs{}
	it := b.Objects(t.Context(), &storage.Query{Prefix: prefix})
	for {
		attrs, err := it.Next()
		if errors.Is(err, iterator.Done) {
			return all
		}
		if err != nil {
			t.Fatalf("list %s: %v", prefix, err)
		}
		all[attrs.Name] = attrs
	}
}

// texts makes n objects below prefix, of different sizes and contents.
func texts(prefix string, n, size int) map[string][]byte {
	objects := map[string][]byte{}
	for i := range n {
		name := fmt.Sprintf("%spart-%03d/text-%03d.txt", prefix, i%3, i)
		objects[name] = []byte(strings.Repeat(fmt.Sprintf("line %d of %s\n", i, name), 1+(size+i)/40))
	}
	return objects
}
