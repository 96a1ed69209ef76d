// Package demo runs Sluice's main job in a sandbox: a corpus is uploaded, a
// two-node job staged in, run and staged out, its output downloaded again.
package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"cloud.google.com/go/storage"
	"github.com/schollz/progressbar/v3"
	"golang.org/x/sync/errgroup"
	"google.golang.org/api/iterator"
	"google.golang.org/api/option"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/examples"
	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/sandbox/cluster"
)

// Bucket, prefixes and user of the demo.
const (
	Bucket       = "research-demo"
	corpusPrefix = "corpus/"
	user         = "alice"
)

// Options of one run. Run is called inside the sandbox's network, on what
// stands for an admin's workstation.
type Options struct {
	Sandbox   string        // its name
	Endpoints gcp.Endpoints // as seen from here
	Report    string        // file to write, or ""
	Output    string        // directory for the downloaded output
	Out       io.Writer
	Terminal  bool // Out is a terminal: draw progress bars
}

// Run uploads, submits, watches, downloads and reports.
func Run(ctx context.Context, o Options) error {
	client, err := storage.NewClient(ctx, option.WithEndpoint(o.Endpoints.Storage+"/storage/v1/"), storage.WithJSONReads())
	if err != nil {
		return err
	}
	defer client.Close()

	d := &demo{Options: o, client: client, began: time.Now()}
	d.say("uploading a text corpus to gs://%s/%s", Bucket, corpusPrefix)
	if err := d.upload(ctx); err != nil {
		return fmt.Errorf("upload the corpus: %w", err)
	}
	d.say("submitting %s as %s with sbatch (two nodes, data staged in before any of them boots)", scriptName, user)
	id, err := d.submit(ctx)
	if err != nil {
		return err
	}
	d.say("job %d is submitted; following it as its user would, with: sluice job watch %d", id, id)
	if err := d.onLogin(ctx, nil, o.Out, "sluice", "job", "watch", strconv.Itoa(int(id))); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("job %d did not end well: %w\n  its output:\n%s", id, err, d.jobOutput(ctx, id))
	}
	report, err := d.report(ctx, id)
	if err != nil {
		return err
	}
	d.say("downloading %s to %s", report.Destination, o.Output)
	if err := d.download(ctx, report); err != nil {
		return fmt.Errorf("download the output: %w", err)
	}
	if o.Report != "" {
		if err := write(o.Report, report); err != nil {
			return fmt.Errorf("write the report: %w", err)
		}
	}
	d.table(report)
	return nil
}

type demo struct {
	Options
	client    *storage.Client
	began     time.Time
	submitted time.Time
}

const scriptName = "train.sh"

func (d *demo) say(format string, args ...any) {
	fmt.Fprintf(d.Out, "[%6.1f s] %s\n", time.Since(d.began).Seconds(), fmt.Sprintf(format, args...))
}

// uploads is how many objects are uploaded at a time, each through a buffer of
// chunkSize bytes.
const (
	uploads   = 8
	chunkSize = 2 << 20
)

func (d *demo) upload(ctx context.Context) error {
	texts, err := corpus()
	if err != nil {
		return err
	}
	bucket := d.client.Bucket(Bucket)
	if err := bucket.Create(ctx, cluster.Project, nil); err != nil && !gcp.IsAlreadyExists(err) {
		return fmt.Errorf("create bucket %s: %w", Bucket, err)
	}
	var total int64
	for _, t := range texts {
		total += t.size
	}
	var bar *progressbar.ProgressBar
	if d.Terminal {
		bar = progressbar.NewOptions64(total, progressbar.OptionSetWriter(d.Out), progressbar.OptionShowBytes(true), progressbar.OptionUseIECUnits(true),
			progressbar.OptionSetWidth(30), progressbar.OptionSetDescription("  uploading"), progressbar.OptionClearOnFinish())
	} else {
		bar = progressbar.DefaultBytesSilent(total)
	}
	began := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(uploads)
	for _, t := range texts {
		group.Go(func() error {
			r, err := t.open()
			if err != nil {
				return err
			}
			defer r.Close()
			w := bucket.Object(corpusPrefix + t.name).NewWriter(ctx)
			w.ContentType = "text/plain; charset=utf-8"
			w.ChunkSize = chunkSize
			if _, err := io.Copy(io.MultiWriter(w, bar), r); err != nil {
				return errors.Join(fmt.Errorf("%s: %w", t.name, err), w.Close())
			}
			return w.Close()
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	bar.Finish()
	seconds := time.Since(began).Seconds()
	d.say("%d objects, %.1f MiB in %.1f s (%.0f MiB/s)", len(texts), float64(total)/(1<<20), seconds, float64(total)/(1<<20)/seconds)
	return nil
}

// onLogin runs a command on the login VM as the demo's user.
func (d *demo) onLogin(ctx context.Context, stdin io.Reader, stdout io.Writer, args ...string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, self, append([]string{"sandbox", "exec", "--name", d.Sandbox, "--vm", cluster.Login, "--user", user, "--"}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, &stderr
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return nil
}

func (d *demo) submit(ctx context.Context) (uint32, error) {
	script := strings.ReplaceAll(examples.TrainScript, "BUCKET", Bucket)
	if err := d.onLogin(ctx, strings.NewReader(script), nil, "sh", "-c", "cat > "+scriptName); err != nil {
		return 0, err
	}
	var out bytes.Buffer
	d.submitted = time.Now()
	if err := d.onLogin(ctx, nil, &out, "sbatch", "--parsable", scriptName); err != nil {
		return 0, err
	}
	id, _, _ := strings.Cut(strings.TrimSpace(out.String()), ";") // ID[;CLUSTER]
	n, err := strconv.ParseUint(id, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("sbatch printed %q, a job id was expected", out.String())
	}
	return uint32(n), nil
}

// jobOutput is the end of the job's own output file, for an error.
func (d *demo) jobOutput(ctx context.Context, id uint32) string {
	var out bytes.Buffer
	if err := d.onLogin(ctx, nil, &out, "tail", "-n", "20", fmt.Sprintf("slurm-%d.out", id)); err != nil {
		return err.Error()
	}
	return out.String()
}

func (d *demo) report(ctx context.Context, id uint32) (*Report, error) {
	var out bytes.Buffer
	if err := d.onLogin(ctx, nil, &out, "sluice", "job", "show", "--json", strconv.Itoa(int(id))); err != nil {
		return nil, err
	}
	var job api.Job
	if err := json.Unmarshal(out.Bytes(), &job); err != nil {
		return nil, fmt.Errorf("sluice job show: %w", err)
	}
	out.Reset()
	if err := d.onLogin(ctx, nil, &out, "sacct", "--noheader", "--parsable2", "--allocations", "--format=State", "--jobs", strconv.Itoa(int(id))); err != nil {
		return nil, err
	}
	r := &Report{
		Job:       ReportJob{ID: id, State: strings.TrimSpace(out.String()), User: job.User, Nodes: job.Nodes},
		Endpoints: ReportEndpoints{Storage: d.Endpoints.Storage, Compute: d.Endpoints.Compute, Lustre: d.Endpoints.Lustre},
	}
	for _, t := range job.Transfers {
		stage := ReportStage{Engine: t.Engine, Objects: t.Objects, Bytes: t.Bytes, Verified: t.Verified}
		switch t.Kind {
		case "stage_in":
			r.StageIn, r.Source = stage, t.Source
		case "stage_out":
			r.StageOut, r.Destination = stage, t.Destination
		}
	}
	return r, r.Timeline.fill(d.submitted, job.Events)
}

// download fetches every object of the job's output; the client checks each one's CRC32C.
func (d *demo) download(ctx context.Context, r *Report) error {
	bucketName, prefix, ok := strings.Cut(strings.TrimPrefix(r.Destination, "gs://"), "/")
	if !ok {
		return fmt.Errorf("stage-out's destination %q is not a gs:// URL", r.Destination)
	}
	if err := os.RemoveAll(d.Output); err != nil {
		return err
	}
	if err := os.MkdirAll(d.Output, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(d.Output)
	if err != nil {
		return err
	}
	defer root.Close()
	var objects, downloaded atomic.Int64
	it := d.client.Bucket(bucketName).Objects(ctx, &storage.Query{Prefix: prefix})
	for {
		attrs, err := it.Next()
		if errors.Is(err, iterator.Done) {
			break
		}
		if err != nil {
			return err
		}
		if err := d.downloadOne(ctx, root, attrs, strings.TrimPrefix(attrs.Name, prefix)); err != nil {
			return fmt.Errorf("%s: %w", attrs.Name, err)
		}
		objects.Add(1)
		downloaded.Add(attrs.Size)
	}
	d.say("%d objects, %.1f MiB, checksums equal", objects.Load(), float64(downloaded.Load())/(1<<20))

	if _, err := root.Stat("_SUCCESS"); err != nil {
		return fmt.Errorf("the training's last file is missing: %w", err)
	}
	metrics, err := os.ReadFile(filepath.Join(d.Output, "metrics.json"))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(metrics, &r.Train); err != nil {
		return fmt.Errorf("metrics.json: %w", err)
	}
	return nil
}

func (d *demo) downloadOne(ctx context.Context, root *os.Root, attrs *storage.ObjectAttrs, name string) (err error) {
	if dir := filepath.Dir(name); dir != "." {
		if err := root.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	f, err := root.Create(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	reader, err := d.client.Bucket(attrs.Bucket).Object(attrs.Name).Generation(attrs.Generation).NewReader(ctx)
	if err != nil {
		return err
	}
	defer reader.Close()
	_, err = io.Copy(f, reader)
	return err
}

var momentWords = map[string]string{
	api.EventSubmitted:       "submitted with sbatch",
	api.EventStageInStarted:  "stage-in started",
	api.EventStageInDone:     "stage-in verified (no node so far)",
	api.EventResumeRequested: "nodes requested",
	api.EventNodesReady:      "nodes ready, Lustre mounted",
	api.EventJobStarted:      "job started",
	api.EventJobEnded:        "job ended, nodes free",
	api.EventStageOutDone:    "stage-out verified",
}

func (d *demo) table(r *Report) {
	w := d.Out
	fmt.Fprintf(w, "\njob %d %s on %s\n\n", r.Job.ID, r.Job.State, strings.Join(r.Job.Nodes, ", "))
	fmt.Fprintf(w, "  %-36s %12s %10s\n", "WHAT", "AT (UTC)", "SINCE")
	var first time.Time
	for i, m := range r.Timeline.moments() {
		at, err := time.Parse(api.TimeFormat, *m.at)
		if err != nil {
			continue
		}
		if i == 0 {
			first = at
		}
		fmt.Fprintf(w, "  %-36s %12s %8.2f s\n", momentWords[m.name], at.Format("15:04:05.000"), at.Sub(first).Seconds())
	}
	for _, s := range []struct {
		name  string
		stage ReportStage
		url   string
	}{{"stage-in", r.StageIn, r.Source}, {"stage-out", r.StageOut, r.Destination}} {
		fmt.Fprintf(w, "\n  %-9s %d objects, %.1f MiB, %d verified by CRC32C, engine %s, %s", s.name, s.stage.Objects, float64(s.stage.Bytes)/(1<<20), s.stage.Verified, s.stage.Engine, s.url)
	}
	fmt.Fprintf(w, "\n  training  loss %.3f → %.3f in %d steps\n", r.Train.FirstLoss, r.Train.LastLoss, r.Train.Steps)
	fmt.Fprintf(w, "\nWhere to look next:\n  the job's output      %s\n  the report            %s\n  write your own job    docs/users.md\n  keep a sandbox up     bin/sluice sandbox up, then bin/sluice sandbox exec --vm login --user alice -- bash\n", d.Output, d.Report)
}
