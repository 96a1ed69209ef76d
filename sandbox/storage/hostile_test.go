package storage

import (
	"testing"

	"github.com/sluicehpc/sluice/sandbox/hostile"
)

func victim(t testing.TB) hostile.Target {
	s, err := New(Options{Dir: t.TempDir(), Project: "sluice-sandbox"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	if err := s.CreateBucket("corpus"); err != nil {
		t.Fatal(err)
	}
	o, err := s.Create("corpus", "a/b", CreateOptions{})
	if err == nil {
		if _, err = o.Write([]byte("data")); err == nil {
			_, err = o.Commit()
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	const o1 = "/storage/v1/b/corpus/o/a%2Fb"
	return hostile.Target{
		Service: "storage", Handler: s,
		Paths: []string{
			"/storage/v1/b", "/storage/v1/b/corpus", "/storage/v1/b/corpus/o", o1, o1 + "?alt=media", o1 + "/rewriteTo/b/corpus/o/c", o1 + "/compose",
			"/storage/v1/b/corpus/iam", "/storage/v1/b/corpus/iam/testPermissions?permissions=x", "/upload/storage/v1/b/corpus/o?uploadType=media&name=x",
			"/upload/storage/v1/b/corpus/o?uploadType=multipart", "/upload/storage/v1/b/corpus/o?uploadType=resumable&name=y", "/upload/storage/v1/b/corpus/o?upload_id=x",
			"/corpus/a/b", "/corpus", "/", "/download" + o1,
		},
		Bodies: []string{
			`{"name":"bucket-1","labels":{"a":"b"},"lifecycle":{"rule":[{}]}}`, `{"sourceObjects":[{"name":"a/b"},{"name":"a/b","generation":"1"}],"destination":{"contentType":"x"}}`,
			`{"name":"z","metadata":{"a":null}}`, "--x\r\nContent-Type: application/json\r\n\r\n{\"name\":\"m\"}\r\n--x\r\nContent-Type: text/plain\r\n\r\ndata\r\n--x--\r\n",
		},
	}
}

func TestHostileRequests(t *testing.T) { hostile.Test(t, victim(t)) }

func FuzzHTTP(f *testing.F) { hostile.Fuzz(f, victim(f)) }
