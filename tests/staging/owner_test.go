package staging_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/sandbox/faults"
	sandboxstorage "github.com/sluicehpc/sluice/sandbox/storage"
	"github.com/sluicehpc/sluice/staging/files"
)

// Whatever owner and mode an import gives, what is published is root's and read-only, and the job's user alone reads it.
func TestImportedOwnersDoNotMatter(t *testing.T) {
	for _, owner := range faults.Owners {
		t.Run(owner, func(t *testing.T) {
			w := newWorld(t)
			w.bucket("corpus", nil)
			want := map[string]string{}
			for _, mode := range []string{"", "0000", "0444", "4777", "2755", "nonsense"} {
				name := "sub/with-" + mode
				o, err := w.storage.Create("corpus", "c4/"+name, sandboxstorage.CreateOptions{Metadata: map[string]string{
					"goog-reserved-posix-uid": fmt.Sprint(bob), "goog-reserved-posix-gid": "20002", "goog-reserved-posix-mode": mode}})
				if err == nil {
					if _, err = o.Write([]byte(mode)); err == nil {
						_, err = o.Commit()
					}
				}
				if err != nil {
					t.Fatal(err)
				}
				want[name] = mode
			}
			if err := w.faults.Set(faults.LustreImportOwner, owner); err != nil {
				t.Fatal(err)
			}
			w.start()
			job := callOf(7, script("stage_in source=gs://corpus/c4/ name=c4"))
			if err := w.call(api.OpSetup, job, nil); err != nil {
				t.Fatal(err)
			}
			if s := w.stage(api.OpDataIn, job); s.Phase != api.StageDone {
				t.Fatalf("stage-in: %+v", s)
			}
			gate := w.env(7)["SLUICE_DATA_C4"]
			if d := cmp.Diff(want, w.tree(gate)); d != "" {
				t.Errorf("staged data (-want +got):\n%s", d)
			}
			for name := range want {
				var st syscall.Stat_t
				if err := syscall.Lstat(filepath.Join(gate, name), &st); err != nil {
					t.Fatal(err)
				}
				if st.Uid != 0 || st.Gid != 0 || st.Mode != syscall.S_IFREG|0o444 {
					t.Errorf("%s is %d:%d %o, want root's with 444", name, st.Uid, st.Gid, st.Mode)
				}
				if path := filepath.Join(gate, name); !reads(alice, 20001, []uint32{20001}, path) {
					t.Errorf("the job's user cannot read %s", name)
				} else if reads(bob, 20002, []uint32{20002}, path) {
					t.Errorf("another user, whom the object names as its owner, can read %s", name)
				}
			}
			filepath.WalkDir(filepath.Join(w.mount, files.Datasets), func(path string, d os.DirEntry, err error) error {
				if err != nil {
					t.Error(err)
					return nil
				}
				if info, err := d.Info(); err != nil || info.Mode()&0o022 != 0 || info.Mode()&(os.ModeSetuid|os.ModeSetgid) != 0 {
					t.Errorf("%s is %v", strings.TrimPrefix(path, w.mount), info.Mode())
				}
				return nil
			})
		})
	}
}
