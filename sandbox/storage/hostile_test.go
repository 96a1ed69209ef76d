package storage

import (
	"testing"

	"github.com/sluicehpc/sluice/sandbox/hostile"
)

func FuzzHTTP(f *testing.F) {
	s, err := New(Options{Dir: f.TempDir(), Project: "sluice-sandbox"})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { s.Close() })
	if err := s.CreateBucket("corpus"); err != nil {
		f.Fatal(err)
	}
	o, err := s.Create("corpus", "a/b", CreateOptions{})
	if err == nil {
		if _, err = o.Write([]byte("data")); err == nil {
			_, err = o.Commit()
		}
	}
	if err != nil {
		f.Fatal(err)
	}
	const o1 = "/storage/v1/b/corpus/o/a%2Fb"
	hostile.Fuzz(f, hostile.Target{
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
	})
}
