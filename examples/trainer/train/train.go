// Package train fits a byte-level language model to a directory of files, data-parallel over the ranks of a job, and saves it.
package train

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"math/bits"
	"time"

	"github.com/sluicehpc/sluice/examples/trainer/collective"
	"github.com/sluicehpc/sluice/examples/trainer/corpus"
	"github.com/sluicehpc/sluice/examples/trainer/model"
	"github.com/sluicehpc/sluice/internal/clock"
)

// Span is how many bytes of a window are predicted, fewer at a file's end. Reading one window for many predictions keeps the
// file system out of the training's way.
const Span = 32

// maxBatch keeps the number of bytes in a step exact in a float32.
const maxBatch = 1 << 16

// Options is everything that a run depends on. All but Progress and Mode must be the same on every rank.
type Options struct {
	Data         string       // directory of the corpus
	Out          string       // directory of the results; rank 0 has made it
	Model        model.Config // shape of the model
	Steps        int          // optimizer steps, from 1
	Batch        int          // windows in a step, over all ranks together: from the number of ranks to 65536
	LearningRate float64      // Adam's, above 0; warmed up over 10 steps, then falling in a straight line to a tenth
	LogEvery     int          // steps in a log window, from 1
	Seed         uint64       // of the weights and of the order of the data

	Progress io.Writer   // gets a line a second on rank 0
	Mode     fs.FileMode // of the files written
	Clock    clock.Clock
}

func (o *Options) validate(ranks int) error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(o.Steps >= 1, "steps %d, want at least 1", o.Steps)
	check(o.Batch >= ranks && o.Batch <= maxBatch, "batch %d, want %d (the number of tasks) to %d", o.Batch, ranks, maxBatch)
	check(o.LearningRate > 0 && o.LearningRate <= 1, "learning rate %g, want above 0 and at most 1", o.LearningRate)
	check(o.LogEvery >= 1, "log-every %d, want at least 1", o.LogEvery)
	errs = append(errs, o.Model.Validate())
	return errors.Join(errs...)
}

// Run trains and saves. Given the same options, corpus and number of ranks the weights are the same, bit for bit, on the same
// processor architecture; with another number of ranks they differ by rounding only, since step s always uses the windows s*Batch to
// (s+1)*Batch-1 and each window depends on its number and the seed alone.
//
// Nothing in Out is complete before the marker exists: see saveAll. When ctx ends Run returns its cause within a step.
func Run(ctx context.Context, o Options, g *collective.Group) (*Metrics, error) {
	if err := o.validate(g.Size); err != nil {
		return nil, err
	}
	if g.Rank == 0 {
		if err := removeOld(o.Out); err != nil {
			return nil, err
		}
	}
	data, err := corpus.Open(o.Data)
	if err != nil {
		return nil, err
	}
	defer data.Close()
	if err := g.Agree(ctx, "the corpus", fmt.Sprintf("%d files, %d bytes, fingerprint %s", data.Files(), data.Size(), data.Fingerprint())); err != nil {
		return nil, err
	}
	if err := g.Agree(ctx, "the command line", fmt.Sprintf("steps %d, batch %d, seed %d, lr %g, model %+v", o.Steps, o.Batch, o.Seed, o.LearningRate, o.Model)); err != nil {
		return nil, err
	}
	m, err := model.New(o.Model, o.Seed)
	if err != nil {
		return nil, err
	}
	t := &trainer{Options: o, g: g, data: data, m: m, adam: newAdam(len(m.Params()))}
	if err := t.loop(ctx); err != nil {
		return nil, err
	}
	sum := sha256.New()
	if err := binary.Write(sum, binary.LittleEndian, m.Params()); err != nil {
		return nil, err
	}
	if err := g.Agree(ctx, "the checksum of the weights", fmt.Sprintf("%x", sum.Sum(nil))); err != nil {
		return nil, err
	}
	return &t.metrics, t.saveAll(ctx)
}

// trainer is a run under way.
type trainer struct {
	Options
	g       *collective.Group
	data    *corpus.Corpus
	m       *model.Model
	adam    *adam
	metrics Metrics
}

func (t *trainer) loop(ctx context.Context) error {
	log, err := t.openLog()
	if err != nil {
		return err
	}
	defer log.Close()
	n := len(t.m.Params())
	// The last two values travel with the gradient: the sum of the losses and the number of bytes predicted.
	grad := make([]float32, n+2)
	window := make([]byte, t.Model.Context+Span)
	started := t.Clock.Now()
	for step := range t.Steps {
		clear(grad)
		first, end := share(t.Batch, t.g.Rank, t.g.Size)
		for i := first; i < end; i++ {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			at := place(t.Seed, uint64(step)*uint64(t.Batch)+uint64(i), t.data.Size())
			filled, err := t.data.Window(window, at, t.Model.Context)
			if err != nil {
				return err
			}
			grad[n] += float32(t.m.Gradient(window[:filled], grad[:n]))
			grad[n+1] += float32(filled - t.Model.Context)
		}
		if err := t.g.Sum(ctx, grad); err != nil {
			return err
		}
		loss, bytes := float64(grad[n]/grad[n+1]), int64(grad[n+1])
		if math.IsNaN(loss) || math.IsInf(loss, 0) {
			return fmt.Errorf("step %d: the loss is %g: try a smaller learning rate than %g", step+1, loss, t.LearningRate)
		}
		t.adam.step(t.m.Params(), grad[:n], 1/grad[n+1], rate(t.LearningRate, step, t.Steps))
		if err := log.add(loss, bytes); err != nil {
			return err
		}
	}
	if err := log.Close(); err != nil {
		return err
	}
	t.metrics = Metrics{
		Steps:     t.Steps,
		FirstLoss: mean(log.losses[:min(t.LogEvery, t.Steps)]),
		LastLoss:  mean(log.losses[max(0, t.Steps-t.LogEvery):]),
		Tokens:    log.tokens,
		Seconds:   t.Clock.Now().Sub(started).Seconds(),
		WorldSize: t.g.Size,
		Seed:      t.Seed,
		DataFiles: t.data.Files(),
		DataBytes: t.data.Size(),
	}
	return nil
}

// share is the part of a step's windows that a rank computes.
func share(batch, rank, size int) (first, end int) {
	return batch * rank / size, batch * (rank + 1) / size
}

// place is the byte at which the predicted part of a window begins, 0 <= place < size: a hash of the seed and the window's number
// (SplitMix64, Steele, Lea and Flood 2014), so that any window can be found without drawing those before it.
func place(seed, number uint64, size int64) int64 {
	mix := func(z uint64) uint64 {
		z += 0x9e3779b97f4a7c15
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		return z ^ z>>31
	}
	hi, _ := bits.Mul64(mix(mix(seed)+number), uint64(size))
	return int64(hi)
}

// rate is the learning rate of a step: rising for ten steps, then falling to a tenth.
func rate(top float64, step, steps int) float64 {
	const warm = 10
	return top * min(1, float64(step+1)/warm) * (1 - 0.9*float64(step)/float64(steps))
}

func mean(v []float64) float64 {
	var sum float64
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

// eta is the time left at the mean speed so far.
func eta(elapsed time.Duration, done, all int) time.Duration {
	return (elapsed / time.Duration(done) * time.Duration(all-done)).Round(time.Second)
}
