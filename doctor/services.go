package doctor

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/api/local"
	"github.com/sluicehpc/sluice/internal/command"
	"github.com/sluicehpc/sluice/slurm/conf"
)

func sluiced(ctx context.Context, s *Site) Finding {
	var status api.Status
	err := s.Call(ctx, api.OpStatus, api.Ack{}, &status)
	switch {
	case errors.Is(err, local.ErrUnreachable):
		return fail("systemctl status sluiced; journalctl -u sluiced. Jobs and transfers wait and go on when it is back", "it does not answer: %v", err)
	case err != nil:
		return fail("journalctl -u sluiced", "%v", err)
	case s.Version != "" && status.Version != s.Version:
		return warn("systemctl restart sluiced after an upgrade", "sluiced is %s, this program %s", status.Version, s.Version)
	case s.config != nil && status.Cluster != s.config.Cluster:
		return warn("systemctl restart sluiced: it runs with an older sluice.yaml", "sluiced serves the cluster %q, sluice.yaml describes %q", status.Cluster, s.config.Cluster)
	}
	return ok("%s, running since %s", status.Version, status.StartedAt)
}

// ask runs one of Slurm's programs as Slurm's users do.
func (s *Site) ask(ctx context.Context, program string, args ...string) (string, error) {
	out, err := s.Run(ctx, command.Spec{Path: program, Args: args})
	return string(bytes.TrimSpace(out)), err
}

func slurmctld(ctx context.Context, s *Site) Finding {
	out, err := s.ask(ctx, "scontrol", "ping")
	switch {
	case missingProgram(err):
		return fail("install Slurm, or run sluice doctor on the controller VM", "scontrol is not installed")
	case err != nil || !strings.Contains(out, "UP"):
		return fail("systemctl status slurmctld; its log is /var/log/slurm/slurmctld.log", "it does not answer: %s", either(out, err))
	}
	version, err := s.slurmVersion(ctx)
	if err != nil {
		return warn("run slurmctld -V", "it answers, its version is not known: %v", err)
	}
	if s.config != nil {
		if want, err := conf.ParseVersion(s.config.Slurm.Version); err == nil && want != version {
			return fail("write the version into slurm: in sluice.yaml, then sluiced slurm-config and systemctl restart slurmctld",
				"slurmctld is of %s, the files are rendered for %s", version, want)
		}
	}
	return ok("%s answers", version)
}

func (s *Site) slurmVersion(ctx context.Context) (conf.Version, error) {
	out, err := s.ask(ctx, "slurmctld", "-V")
	if err != nil {
		return conf.Version{}, err
	}
	return conf.ParseVersion(out)
}

func slurmdbd(ctx context.Context, s *Site) Finding {
	out, err := s.ask(ctx, "sacctmgr", "--noheader", "--parsable2", "list", "cluster", "format=cluster")
	switch {
	case missingProgram(err):
		return fail("install Slurm's accounting tools", "sacctmgr is not installed")
	case err != nil:
		return fail("systemctl status slurmdbd mariadb; its log is /var/log/slurm/slurmdbd.log", "it does not answer: %v", err)
	case !strings.Contains("\n"+out+"\n", "\n"+s.config.Cluster+"\n"):
		return fail("sacctmgr add cluster "+s.config.Cluster, "it does not know the cluster %s", s.config.Cluster)
	}
	return ok("%s answers, and knows the cluster %s", s.config.Slurm.AccountingHost, s.config.Cluster)
}

// lateAfter is when an agent is late: they report every 10 s.
const lateAfter = 45 * time.Second

func agents(ctx context.Context, s *Site) Finding {
	var list api.Nodes
	if err := s.Call(ctx, api.OpNodeList, api.Ack{}, &list); err != nil {
		return warn("see the check of sluiced", "not known: %v", err)
	}
	var late, bad, refused []string
	reporting, controller := 0, false
	for _, n := range list.Nodes {
		controller = controller || n.Role == api.RoleController
		if r := n.Refusal; r != nil {
			refused = append(refused, fmt.Sprintf("%s: %s (%d times, last from %s at %s)", n.Name, r.Why, r.Count, r.From, r.At))
		}
		if n.SeenAt == "" {
			continue // no VM, or one that boots
		}
		reporting++
		seen, err := time.Parse(api.TimeFormat, n.SeenAt)
		switch age := s.Now().Sub(seen); {
		case err == nil && age > lateAfter:
			late = append(late, fmt.Sprintf("%s (%s ago)", n.Name, age.Round(time.Second)))
		case n.State == "not_ready":
			bad = append(bad, n.Name+because(n))
		}
	}
	switch {
	case len(refused) > 0:
		return fail("somebody may try to pass for that VM: see the audit log; for a VM whose disk was replaced: sluice node reenroll NAME",
			"enrolments were refused: %s", strings.Join(refused, "; "))
	case len(late) > 0:
		return fail("on that VM: systemctl status sluice-agent", "not heard from in time: %s", strings.Join(late, ", "))
	case len(bad) > 0:
		return fail("sluice node list; on that VM: journalctl -u sluice-agent", "not ready: %s", strings.Join(bad, ", "))
	case !controller:
		return fail("systemctl status sluice-agent here: it mounts the file systems", "the controller's own agent has not reported")
	}
	return ok("%d report, the last word of each is younger than %s", reporting, lateAfter)
}

func because(n api.Node) string {
	var why []string
	if n.Reason != "" {
		why = append(why, n.Reason)
	}
	for _, m := range n.Mounts {
		if m.State != "ok" {
			why = append(why, fmt.Sprintf("%s is %s %s", m.Name, m.State, m.Detail))
		}
	}
	if len(why) == 0 {
		return ""
	}
	return " (" + strings.TrimSpace(strings.Join(why, "; ")) + ")"
}

// staleAfter is when a transfer that has not ended is worth a look: Slurm's own limit on a stage-in is as long.
const staleAfter = 24 * time.Hour

func transfers(ctx context.Context, s *Site) Finding {
	var list api.Transfers
	if err := s.Call(ctx, api.OpTransferList, api.JobList{All: true, Limit: 10000}, &list); err != nil {
		return warn("see the check of sluiced", "not known: %v", err)
	}
	known, running := map[string]bool{}, 0
	var stale []string
	for _, t := range list.Transfers {
		known[t.Operation] = true
		switch t.State {
		case "DONE", "FAILED", "CANCELLED":
			continue
		}
		running++
		if queued, err := time.Parse(api.TimeFormat, t.QueuedAt); err == nil && s.Now().Sub(queued) > staleAfter {
			stale = append(stale, fmt.Sprintf("%s (%s since %s)", t.ID, t.State, t.QueuedAt))
		}
	}
	if len(stale) > 0 {
		return warn("sluice transfer list --all; sluice transfer show ID says what it waits for", "left over: %s", strings.Join(stale, ", "))
	}
	// An instance copies for one at a time: a transfer of somebody else holds ours up.
	client, err := s.Lustre(ctx, s.config)
	if err != nil {
		return warn("see the check of the instance", "%d at work; the instances' own are not known: %v", running, err)
	}
	for _, fs := range s.config.FileSystems {
		parent, _, _ := strings.Cut(fs.Instance, "/instances/")
		ops, err := client.ListOperations(ctx, parent, fmt.Sprintf("metadata.target=%q", fs.Instance))
		if err != nil {
			return warn("see the check of the instance", "%d at work; the operations of %s are not known: %v", running, fs.Instance, err)
		}
		for _, op := range ops {
			if !op.Done && op.Metadata != nil && op.Metadata.Transfer != nil && !known[op.Name] {
				return warn("wait for it, or end it: gcloud lustre operations cancel", "%s runs on file system %s and is not sluiced's: transfers wait for it", op.Name, fs.Name)
			}
		}
	}
	return ok("%d at work, none left over", running)
}

// How far the clock may be off: certificates and identity tokens allow for little, and a lease is 30 s long.
const clockOK, clockBad = 2 * time.Second, 10 * time.Second

func clockDifference(ctx context.Context, s *Site) Finding {
	// Any answer has a Date; this one is a refusal, since no token is sent.
	endpoint, path := "https://compute.googleapis.com", "/compute/v1/projects/p/zones/z"
	if s.config != nil {
		path = "/compute/v1/projects/" + s.config.Project + "/zones/" + s.config.Zone
		if s.config.Endpoints.Compute != "" {
			endpoint = s.config.Endpoints.Compute
		}
	}
	url := endpoint + path
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return warn("see endpoints: in sluice.yaml", "%v", err)
	}
	begun := s.Now()
	resp, err := s.HTTP.Do(req)
	ended := s.Now()
	if err != nil {
		next := "look at the network to " + endpoint
		if errors.As(err, new(*tls.CertificateVerificationError)) {
			next = "a clock that is far off makes certificates invalid too: timedatectl; chronyc tracking"
		}
		return fail(next, "%v", err)
	}
	resp.Body.Close()
	date, err := http.ParseTime(resp.Header.Get("Date"))
	if err != nil {
		return warn("look at "+url+" by hand", "the answer has no Date")
	}
	// Date has whole seconds, cut off; it was written somewhere between the two readings.
	off := begun.Add(ended.Sub(begun) / 2).Sub(date.Add(time.Second / 2))
	text := fmt.Sprintf("%s off from %s (within %s)", off.Round(100*time.Millisecond), req.URL.Host, (ended.Sub(begun)/2 + time.Second/2).Round(100*time.Millisecond))
	switch next := "timedatectl; chronyc tracking: on Compute Engine the source is metadata.google.internal"; {
	case off.Abs() > clockBad:
		return fail(next, "%s", text)
	case off.Abs() > clockOK:
		return warn(next, "%s", text)
	}
	return ok("%s", text)
}

// metadataHost is the metadata server's address.
const metadataHost = "169.254.169.254:80"

// nobody is a uid that no guard lets through.
const nobody = 65534

func metadataAddress(ctx context.Context, s *Site) Finding {
	if err := s.Connect(ctx, 0, metadataHost); err != nil {
		return fail("is this a Compute Engine VM, and do its own firewall rules let root through to "+metadataHost+"?", "root cannot reach the metadata server: %v", err)
	}
	err := s.Connect(ctx, nobody, metadataHost)
	switch {
	case missingProgram(err):
		return warn("install bash", "not known whether others than root reach the metadata server: %v", err)
	case err == nil && !*s.config.GuardMetadata:
		return warn("guard_metadata: true in sluice.yaml; without it the VMs' accounts must have no rights at all", "every user can ask the metadata server for this VM's token, as sluice.yaml has it")
	case err == nil:
		return fail("systemctl status sluice-agent: it keeps everybody but root away from "+metadataHost+" (guard_metadata in sluice.yaml)",
			"every user of this VM can ask the metadata server for its account's token")
	}
	return ok("only root reaches the metadata server")
}

// connect tries it as the uid, in a child of that uid: the guard goes by a socket's owner.
func (s *Site) connect(ctx context.Context, uid uint32, address string) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if uid == 0 {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err == nil {
			conn.Close()
		}
		return err
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	_, err = s.Run(ctx, command.Spec{
		Path: "bash", Args: []string{"-c", `exec 3<>"/dev/tcp/$1/$2"`, "bash", host, port}, Dir: "/",
		Credential: &syscall.Credential{Uid: uid, Gid: uid},
	})
	return err
}

func missingProgram(err error) bool {
	var ce *command.Error
	return errors.As(err, &ce) && errors.Is(ce.Err, os.ErrNotExist)
}

func either(out string, err error) string {
	if err != nil {
		return err.Error()
	}
	return out
}
