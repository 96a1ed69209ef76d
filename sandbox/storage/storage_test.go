package storage

import (
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	gcs "cloud.google.com/go/storage"
	"github.com/fsouza/fake-gcs-server/fakestorage"
	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/sandbox/discovery/discoverytest"
)

func newServer(t testing.TB, dir string) *Server {
	t.Helper()
	s, err := New(Options{Dir: dir, Project: testProject})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// serve starts s on TCP and returns its URL.
func serve(t testing.TB, s *Server) string {
	t.Helper()
	h := httptest.NewServer(discoverytest.Server(t, s, "storage"))
	t.Cleanup(h.Close)
	return h.URL
}

func newClient(t testing.TB, opts ...option.ClientOption) *gcs.Client {
	t.Helper()
	c, err := gcs.NewClient(t.Context(), opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func endpoint(url string, opts ...option.ClientOption) []option.ClientOption {
	return append(opts, option.WithEndpoint(url+"/storage/v1/"), option.WithoutAuthentication())
}

func TestSuite(t *testing.T) {
	url := serve(t, newServer(t, t.TempDir()))
	t.Run("emulator host, XML reads", func(t *testing.T) {
		t.Setenv("STORAGE_EMULATOR_HOST", url)
		suite(t, target{newClient(t), url}, nil)
	})
	t.Run("endpoint, XML reads", func(t *testing.T) {
		suite(t, target{newClient(t, endpoint(url)...), url}, nil)
	})
	t.Run("endpoint, JSON reads", func(t *testing.T) {
		suite(t, target{newClient(t, endpoint(url, gcs.WithJSONReads())...), url}, nil)
	})
}

// fakeFaults are the cases that fake-gcs-server v1.56.1 fails, found by this suite.
var fakeFaults = map[string]string{
	"bucket with objects is not deleted":              "answers 412 instead of 409",
	"bucket names have rules":                         "takes names that are too short",
	"bucket attributes are stored":                    "does not store lifecycle, labels, soft delete or uniform access",
	"bucket has autoclass and hierarchical namespace": "stores neither",
	"hierarchical namespace needs uniform access":     "is not checked",
	"bucket update merges":                            "keeps only some attributes, and no metageneration",
	"bucket update checks metageneration":             "ignores ifMetagenerationMatch",
	"bucket delete checks metageneration":             "ignores ifMetagenerationMatch",
	"reader has its attributes":                       "sends no metageneration",
	"wrong CRC32C is refused":                         "does not check a resumable upload's checksum",
	"read with preconditions":                         "ignores generation preconditions of reads",
	"attributes with preconditions":                   "ignores generation preconditions of get",
	"object update merges metadata":                   "keeps no metageneration",
	"object update checks metageneration":             "ignores ifMetagenerationMatch",
	"delete checks generation":                        "ignores ifGenerationMatch",
	"list with another delimiter":                     "takes a delimiter for one character",
	"list with glob":                                  "ignores matchGlob",
	"bad glob is refused":                             "ignores matchGlob",
	"list in pages":                                   "does not count prefixes into a page",
	"versions":                                        "deletes a bucket that has noncurrent versions",
	"compose":                                         "gives a composite object an MD5 and no component count",
	"compose counts components":                       "has no component count",
	"compose checks preconditions":                    "ignores the destination's ifGenerationMatch",
	"copy checks the destination":                     "ignores ifGenerationMatch",
	"copy checks the source":                          "ignores ifSourceGenerationMatch",
	"move":                                            "is not implemented",
	"bad names are refused":                           "takes names with line breaks",
	"service account":                                 "is not implemented",
	"JSON errors have their shape":                    "has another message",
	"XML errors have their shape":                     "sends plain text",
	"XML HEAD has the object's headers":               "sends neither metageneration nor storage class",
	"XML read with conditions":                        "ignores the condition headers",
	"resumable protocol":                              "ends the upload when asked for its state",
	"resumable upload takes a chunk again":            "appends it a second time",
	"resumable upload keeps whole blocks":             "keeps any length",
	"resumable upload refuses a gap":                  "takes it as data",
	"resumable upload refuses nonsense":               "takes it as data",
	"resumable upload is cancelled":                   "goes on after the cancel",
	"resumable upload checks its checksum header":     "ignores it",
	"bad page token is refused":                       "ignores it",
}

// TestSuiteOnFakeGCSServer holds the suite itself against a server that others wrote.
func TestSuiteOnFakeGCSServer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	url := "http://" + l.Addr().String()
	fake, err := fakestorage.NewServerWithOptions(fakestorage.Options{
		NoListener: true, PublicHost: l.Addr().String(), ExternalURL: url, Scheme: "http",
	})
	if err != nil {
		t.Fatal(err)
	}
	h := &http.Server{Handler: fake.HTTPHandler()}
	go h.Serve(l)
	t.Cleanup(func() { h.Close() })
	t.Setenv("STORAGE_EMULATOR_HOST", url)
	suite(t, target{newClient(t), url}, fakeFaults)
}
