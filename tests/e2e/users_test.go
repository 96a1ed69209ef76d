package e2e_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/sluicehpc/sluice/sandbox/rootfs"
)

// Users like OS Login's: known to NSS alone, with ids up to 2^32 and names of 32
// characters. Each one's data comes in and goes out under its own id.
func TestUsersOfADirectory(t *testing.T) {
	if passwd := mustOnVM(t, "login", "root", "", "cat", "/etc/passwd", "/etc/group"); strings.Contains(passwd, "alice") {
		t.Errorf("users are in the VMs' /etc/passwd:\n%s", passwd)
	}
	above, long := false, false
	for _, u := range rootfs.Users {
		above, long = above || u.UID > 1<<31, long || len(u.Name) == 32
		if u.Name == "alice" { // whom the other tests are about
			continue
		}
		t.Run(u.Name, func(t *testing.T) {
			bucket := fmt.Sprintf("research-user-%d", u.UID)
			b := newBucket(t, bucket, texts("data/", 3, 100))
			id := submitAs(t, u.Name, stageJob(bucket, `mkdir "$SLUICE_JOB_DIR/result"
cat "$SLUICE_DATA_DATA"/*/*.txt > /dev/null
srun sh -c 'echo "$(id -un) $(id -u) $USER"' > "$SLUICE_JOB_DIR/result/who"
stat -c '%u %g %a' "$SLUICE_JOB_DIR" >> "$SLUICE_JOB_DIR/result/who"`))
			job := waitPhase(t, id, "done")
			if job.User != u.Name {
				t.Errorf("the job's user is %q, want %q", job.User, u.Name)
			}
			want := fmt.Sprintf("%[1]s %[2]d %[1]s\n%[2]d %[2]d 700\n", u.Name, u.UID)
			if got := mustOnVM(t, "login", u.Name, "", "cat", job.Dir+"/result/who"); got != want {
				t.Errorf("on the node: %q, want %q", got, want)
			}
			if got := mustOnVM(t, "login", u.Name, "", "sluice", "job", "list"); !strings.Contains(got, u.Name) {
				t.Errorf("sluice job list does not show the user's own job:\n%s", got)
			}
			if len(listing(t, b, fmt.Sprintf("result/%d/", id))) == 0 {
				t.Error("nothing was staged out")
			}
		})
	}
	if !above || !long {
		t.Errorf("users above 2^31: %v, with 32 characters: %v; want both", above, long)
	}
}

// A user whom the controller cannot resolve is refused in words, not guessed at.
func TestUnresolvableUserIsRefused(t *testing.T) {
	const (
		user   = "ghost"
		entry  = "ghost:x:1500000099:1500000099::/tmp:/bin/bash"
		add    = "echo " + entry + " >>/var/lib/extrausers/passwd"
		remove = "sed -i /^ghost:/d /var/lib/extrausers/passwd"
	)
	asRoot := func(vm string, args ...string) { // after the test too, whose context has ended then
		if out, err := sluice(context.Background(), nil, append([]string{"sandbox", "exec", "--name", sandboxName, "--vm", vm, "--"}, args...)...); err != nil {
			t.Errorf("%s: %s: %v\n%s", vm, strings.Join(args, " "), err, out)
		}
	}
	for _, vm := range []string{"controller", "login"} {
		asRoot(vm, "sh", "-c", add)
		t.Cleanup(func() { asRoot(vm, "sh", "-c", remove) })
	}
	asRoot("controller", "sacctmgr", "--immediate", "add", "user", user, "account=research")
	t.Cleanup(func() { asRoot("controller", "sacctmgr", "--immediate", "delete", "user", user) })

	newBucket(t, "research-ghost", texts("data/", 1, 10))
	id := submitAs(t, user, stageJob("research-ghost", "true"), "--hold")
	mustOnVM(t, "controller", "root", "", "sh", "-c", remove)
	mustOnVM(t, "controller", "root", "", "scontrol", "release", fmt.Sprint(id))
	wait(t, "the reason names the uid", func() (bool, string) {
		_, reason := squeue(t, id)
		return strings.Contains(reason, "uid 1500000099 is not known on the controller"), reason
	})
}
