// Package model is a byte-level neural language model: the last bytes of a text, embedded, go through one hidden layer to the
// probabilities of the next byte.
//
// The design is the feed-forward language model of Bengio et al., "A Neural Probabilistic Language Model" (2003), over
// bytes: h = tanh(W x + b) with x the embeddings of the context, and softmax(V h + c) over the 256 byte values.
package model

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
)

const vocabulary = 256

// Type is the model_type in config.json.
const Type = "sluice-byte-mlp"

// Config is a model's shape.
type Config struct {
	ModelType string `json:"model_type"` // Type
	VocabSize int    `json:"vocab_size"` // 256: every byte is a token
	Context   int    `json:"context"`    // bytes before the predicted one, 1 to 1024
	Embed     int    `json:"embed"`      // values per embedded byte, 1 to 1024
	Hidden    int    `json:"hidden"`     // units of the hidden layer, 1 to 65536
}

// NewConfig fills in what is the same for every model.
func NewConfig(context, embed, hidden int) Config {
	return Config{ModelType: Type, VocabSize: vocabulary, Context: context, Embed: embed, Hidden: hidden}
}

// maxParameters bounds a model to 4 GiB of weights, so that a damaged config.json cannot ask for more.
const maxParameters = 1 << 30

// Validate says what is wrong with the shape, all at once.
func (c Config) Validate() error {
	var errs []error
	if c.ModelType != Type {
		errs = append(errs, fmt.Errorf("model_type %q, want %q", c.ModelType, Type))
	}
	if c.VocabSize != vocabulary {
		errs = append(errs, fmt.Errorf("vocab_size %d, want %d", c.VocabSize, vocabulary))
	}
	for _, f := range []struct {
		name     string
		got, max int
	}{{"context", c.Context, 1024}, {"embed", c.Embed, 1024}, {"hidden", c.Hidden, 65536}} {
		if f.got < 1 || f.got > f.max {
			errs = append(errs, fmt.Errorf("%s %d, want 1 to %d", f.name, f.got, f.max))
		}
	}
	if len(errs) == 0 && c.parameters() > maxParameters {
		errs = append(errs, fmt.Errorf("%d parameters, want at most %d", c.parameters(), maxParameters))
	}
	return errors.Join(errs...)
}

func (c Config) parameters() int {
	return vocabulary*c.Embed + c.Hidden*c.Context*c.Embed + c.Hidden + vocabulary*c.Hidden + vocabulary
}

// Model is the weights and the scratch space to use them. It is not for concurrent use.
type Model struct {
	Config Config
	params []float32 // all weights in the order of views
	w      views

	x, h, dx, dh, logits []float32
}

// views are the named parts of one slice of weights or of their gradient.
type views struct {
	embed   []float32 // [256, Embed]
	hiddenW []float32 // [Hidden, Context*Embed]
	hiddenB []float32 // [Hidden]
	outputW []float32 // [256, Hidden]
	outputB []float32 // [256]
}

func (c Config) split(all []float32) views {
	take := func(n int) []float32 {
		part := all[:n:n]
		all = all[n:]
		return part
	}
	return views{
		embed:   take(vocabulary * c.Embed),
		hiddenW: take(c.Hidden * c.Context * c.Embed),
		hiddenB: take(c.Hidden),
		outputW: take(vocabulary * c.Hidden),
		outputB: take(vocabulary),
	}
}

// New makes a model whose weights depend on the seed alone: small normal values, scaled so that the first loss is about
// ln 256 = 5.55 nats.
func New(c Config, seed uint64) (*Model, error) {
	m, err := newModel(c)
	if err != nil {
		return nil, err
	}
	rng := rand.New(rand.NewPCG(seed, 0x6d6f64656c))
	normal := func(w []float32, deviation float64) {
		for i := range w {
			w[i] = float32(deviation * rng.NormFloat64())
		}
	}
	normal(m.w.embed, 1)
	normal(m.w.hiddenW, 1/math.Sqrt(float64(c.Context*c.Embed)))
	normal(m.w.outputW, 0.1/math.Sqrt(float64(c.Hidden)))
	return m, nil
}

func newModel(c Config) (*Model, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	m := &Model{
		Config: c,
		params: make([]float32, c.parameters()),
		x:      make([]float32, c.Context*c.Embed),
		dx:     make([]float32, c.Context*c.Embed),
		h:      make([]float32, c.Hidden),
		dh:     make([]float32, c.Hidden),
		logits: make([]float32, vocabulary),
	}
	m.w = c.split(m.params)
	return m, nil
}

// Params are all weights. Changing them changes the model.
func (m *Model) Params() []float32 { return m.params }

// forward leaves the probabilities of the byte after ctx in m.logits.
func (m *Model) forward(ctx []byte) {
	e := m.Config.Embed
	for i, b := range ctx {
		copy(m.x[i*e:(i+1)*e], m.w.embed[int(b)*e:])
	}
	for j := range m.h {
		m.h[j] = float32(math.Tanh(float64(m.w.hiddenB[j] + dot(m.w.hiddenW[j*len(m.x):], m.x))))
	}
	top := float32(math.Inf(-1))
	for k := range m.logits {
		m.logits[k] = m.w.outputB[k] + dot(m.w.outputW[k*len(m.h):], m.h)
		top = max(top, m.logits[k])
	}
	var sum float32
	for k, v := range m.logits {
		p := float32(math.Exp(float64(v - top)))
		m.logits[k] = p
		sum += p
	}
	for k := range m.logits {
		m.logits[k] /= sum
	}
}

// Gradient adds the gradient of the loss to grad, which has the order and length of Params, and returns the loss: the sum of
// -ln p over the bytes of window after its first Config.Context ones, in nats.
func (m *Model) Gradient(window []byte, grad []float32) float64 {
	g, k := m.Config.split(grad), m.Config.Context
	var loss float64
	for i := k; i < len(window); i++ {
		loss += m.backward(window[i-k:i], window[i], g)
	}
	return loss
}

func (m *Model) backward(ctx []byte, target byte, g views) float64 {
	m.forward(ctx)
	p := m.logits
	loss := nats(p[target])
	p[target]-- // p is now the gradient of the logits
	clear(m.dh)
	for k, d := range p {
		g.outputB[k] += d
		row := k * len(m.h)
		accumulate(d, m.h, m.w.outputW[row:], g.outputW[row:], m.dh)
	}
	clear(m.dx)
	for j, h := range m.h {
		d := m.dh[j] * (1 - h*h)
		g.hiddenB[j] += d
		row := j * len(m.x)
		accumulate(d, m.x, m.w.hiddenW[row:], g.hiddenW[row:], m.dx)
	}
	e := m.Config.Embed
	for i, b := range ctx {
		ge := g.embed[int(b)*e:][:e]
		for j, d := range m.dx[i*e : (i+1)*e] {
			ge[j] += d
		}
	}
	return loss
}

// nats is -ln p, with p kept above zero so that one impossible byte does not make a mean infinite.
func nats(p float32) float64 { return -math.Log(math.Max(float64(p), 1e-30)) }

// accumulate goes back through one row w of a layer's weights whose output has the gradient d: it adds the row's gradient to gw
// and the input's to din. All have at least len(in) values.
func accumulate(d float32, in, w, gw, din []float32) {
	w, gw, din = w[:len(in)], gw[:len(in)], din[:len(in)]
	for i, v := range in {
		gw[i] += d * v
		din[i] += d * w[i]
	}
}

// dot multiplies b with the first len(b) values of a. Four sums at once keep the processor's adders busy.
func dot(a, b []float32) float32 {
	a = a[:len(b)]
	var s0, s1, s2, s3 float32
	i := 0
	for ; i+4 <= len(b); i += 4 {
		s0 += a[i] * b[i]
		s1 += a[i+1] * b[i+1]
		s2 += a[i+2] * b[i+2]
		s3 += a[i+3] * b[i+3]
	}
	for ; i < len(b); i++ {
		s0 += a[i] * b[i]
	}
	return (s0 + s1) + (s2 + s3)
}

// Loss is the mean of -ln p over the bytes of text, in nats per byte; the context before its beginning is zeros. It returns NaN
// for an empty text.
func (m *Model) Loss(text []byte) float64 {
	k := m.Config.Context
	padded := append(make([]byte, k), text...)
	var sum float64
	for i, b := range text {
		m.forward(padded[i : i+k])
		sum += nats(m.logits[b])
	}
	return sum / float64(len(text))
}

// Generate continues the prompt by n bytes. The temperature, from 0 up, divides the logits: 0 always takes the likeliest byte, 1 samples as the
// model was trained. It stops with ctx's error.
func (m *Model) Generate(ctx context.Context, prompt []byte, n int, temperature float64, rng *rand.Rand) ([]byte, error) {
	k := m.Config.Context
	text := append(make([]byte, k), prompt...)
	from := len(text)
	for range n {
		if err := ctx.Err(); err != nil {
			return text[from:], err
		}
		m.forward(text[len(text)-k:])
		text = append(text, pick(m.logits, temperature, rng))
	}
	return text[from:], nil
}

func pick(p []float32, temperature float64, rng *rand.Rand) byte {
	best := 0
	for k, v := range p {
		if v > p[best] {
			best = k
		}
	}
	if !(temperature > 0) {
		return byte(best)
	}
	weight := func(v float32) float64 { return math.Pow(float64(v/p[best]), 1/temperature) }
	var sum float64
	for _, v := range p {
		sum += weight(v)
	}
	at := rng.Float64() * sum
	for k, v := range p {
		if at -= weight(v); at < 0 {
			return byte(k)
		}
	}
	return byte(best)
}
