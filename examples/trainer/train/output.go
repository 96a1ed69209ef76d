package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/sluicehpc/sluice/examples/trainer/model"
	"github.com/sluicehpc/sluice/internal/atomicfile"
)

// The files that a run writes beside the model's.
const (
	MetricsFile = "metrics.json"  // Metrics
	LogFile     = "metrics.jsonl" // one LogLine per log window, written while the run goes on
	MarkerFile  = "_SUCCESS"      // empty, and the last of all: whoever finds it may take everything else as complete
)

// Metrics is what a run did.
type Metrics struct {
	Steps     int     `json:"steps"`
	FirstLoss float64 `json:"first_loss"` // nats per byte, mean over the first LogEvery steps (or all, when there are fewer)
	LastLoss  float64 `json:"last_loss"`  // nats per byte, mean over the last LogEvery steps (or all)
	Tokens    int64   `json:"tokens"`     // bytes predicted in all steps by all ranks
	Seconds   float64 `json:"seconds"`    // wall time of the steps
	WorldSize int     `json:"world_size"` // ranks
	Seed      uint64  `json:"seed"`
	DataFiles int     `json:"data_files"`
	DataBytes int64   `json:"data_bytes"`
}

// LogLine is a line of LogFile.
type LogLine struct {
	Step    int     `json:"step"`         // last step of the window, from 1
	Loss    float64 `json:"loss"`         // nats per byte, mean over the window
	TokensS float64 `json:"tokens_per_s"` // bytes predicted per second of wall time, all ranks
	Time    string  `json:"time"`         // UTC with nanoseconds
}

const timeFormat = "2006-01-02T15:04:05.000000000Z"

// removeOld removes what an earlier run left in dir, the marker first.
func removeOld(dir string) error {
	shards, err := filepath.Glob(filepath.Join(glob(dir), "model-*-of-*.safetensors"))
	if err != nil {
		return err
	}
	paths := []string{filepath.Join(dir, MarkerFile), filepath.Join(dir, model.IndexFile), filepath.Join(dir, model.ConfigFile),
		filepath.Join(dir, MetricsFile), filepath.Join(dir, LogFile)}
	for _, path := range append(paths, shards...) {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove an earlier run's output: %w", err)
		}
	}
	return atomicfile.SyncDir(dir)
}

// glob escapes a path for filepath.Glob.
func glob(path string) string {
	var out []rune
	for _, r := range path {
		switch r {
		case '*', '?', '[', '\\':
			out = append(out, '\\')
		}
		out = append(out, r)
	}
	return string(out)
}

// saveAll writes the results: each rank its shard; after all of them rank 0 the index, the config and the metrics, and then the
// marker. Every file is complete and durable before the next appears.
func (t *trainer) saveAll(ctx context.Context) error {
	meta := map[string]string{"format": "pt", "step": fmt.Sprint(t.Steps)}
	if err := t.m.SaveShard(t.Out, t.g.Rank+1, t.g.Size, meta, t.Mode); err != nil {
		return err
	}
	if err := t.g.Barrier(ctx); err != nil {
		return err
	}
	if t.g.Rank == 0 {
		if err := t.m.SaveIndex(t.Out, t.g.Size, t.Mode); err != nil {
			return err
		}
		text, err := json.MarshalIndent(t.metrics, "", "  ")
		if err != nil {
			return err
		}
		if err := atomicfile.Write(filepath.Join(t.Out, MetricsFile), append(text, '\n'), t.Mode); err != nil {
			return err
		}
		if err := atomicfile.Write(filepath.Join(t.Out, MarkerFile), nil, t.Mode); err != nil {
			return err
		}
	}
	return t.g.Barrier(ctx)
}

// log collects the losses on every rank, and on rank 0 writes them to LogFile and to the progress.
type log struct {
	t      *trainer
	file   *os.File // or nil
	losses []float64
	tokens int64

	started, logged, shown    time.Time
	loggedStep, shownStep     int
	loggedTokens, shownTokens int64
}

func (t *trainer) openLog() (*log, error) {
	now := t.Clock.Now()
	l := &log{t: t, started: now, logged: now, shown: now}
	if t.g.Rank > 0 {
		return l, nil
	}
	var err error
	l.file, err = os.OpenFile(filepath.Join(t.Out, LogFile), os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, t.Mode)
	fmt.Fprintf(t.Progress, "%d ranks, %d files, %d bytes, %d parameters\n", t.g.Size, t.data.Files(), t.data.Size(), len(t.m.Params()))
	return l, err
}

// add is called after each step with its loss and the bytes predicted in it.
func (l *log) add(loss float64, tokens int64) error {
	l.losses = append(l.losses, loss)
	l.tokens += tokens
	if l.file == nil {
		return nil
	}
	step, last := len(l.losses), len(l.losses) == l.t.Steps
	now := l.t.Clock.Now()
	if step-l.loggedStep == l.t.LogEvery || last {
		line, err := json.Marshal(LogLine{step, mean(l.losses[l.loggedStep:]), perSecond(l.tokens-l.loggedTokens, now.Sub(l.logged)), now.UTC().Format(timeFormat)})
		if err != nil {
			return err
		}
		if _, err := l.file.Write(append(line, '\n')); err != nil {
			return fmt.Errorf("write the log: %w", err)
		}
		l.logged, l.loggedStep, l.loggedTokens = now, step, l.tokens
	}
	if now.Sub(l.shown) >= time.Second || last {
		fmt.Fprintf(l.t.Progress, "step %d/%d  loss %.3f  %.0f tokens/s  %v left\n", step, l.t.Steps,
			mean(l.losses[l.shownStep:]), perSecond(l.tokens-l.shownTokens, now.Sub(l.shown)), eta(now.Sub(l.started), step, l.t.Steps))
		l.shown, l.shownStep, l.shownTokens = now, step, l.tokens
	}
	return nil
}

func perSecond(n int64, d time.Duration) float64 {
	return float64(n) / max(d.Seconds(), 1e-9)
}

// Close makes the log file durable. It may be called twice.
func (l *log) Close() error {
	if l.file == nil {
		return nil
	}
	f := l.file
	l.file = nil
	return errors.Join(f.Sync(), f.Close())
}
