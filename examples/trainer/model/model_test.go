package model

import (
	"bytes"
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func small(t *testing.T) *Model {
	t.Helper()
	m, err := New(NewConfig(3, 4, 5), 1)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestGradient compares the gradient with central differences of the loss: every weight of the hidden layer and the biases, and
// the embeddings and output rows of the bytes that occur.
func TestGradient(t *testing.T) {
	m := small(t)
	for i := range m.params { // away from the small values of the beginning, so that no part of the gradient is near zero
		m.params[i] *= 2
	}
	window := []byte("abcabdacca")
	grad := make([]float32, len(m.params))
	loss := m.Gradient(window, grad)
	if got := m.Gradient(window, make([]float32, len(m.params))); got != loss {
		t.Errorf("the same window has losses %g and %g", loss, got)
	}
	const step = 1.0 / 256
	var checked int
	for i := range m.params {
		old := m.params[i]
		scratch := make([]float32, len(m.params))
		m.params[i] = old + step
		up := m.Gradient(window, scratch)
		m.params[i] = old - step
		down := m.Gradient(window, scratch)
		m.params[i] = old
		want := (up - down) / (2 * step)
		if got := float64(grad[i]); math.Abs(got-want) > 2e-3+2e-3*math.Abs(want) {
			t.Errorf("weight %d: gradient %g, difference quotient %g", i, got, want)
		}
		if math.Abs(want) > 0.05 {
			checked++
		}
	}
	if checked < 50 {
		t.Errorf("only %d of %d weights have a gradient that says something", checked, len(m.params))
	}
}

func TestGradientAdds(t *testing.T) {
	m := small(t)
	one, two := make([]float32, len(m.params)), make([]float32, len(m.params))
	m.Gradient([]byte("abcd"), one)
	m.Gradient([]byte("abcd"), two)
	m.Gradient([]byte("abcd"), two)
	for i := range one {
		if got, want := two[i], 2*one[i]; math.Abs(float64(got-want)) > 1e-6 {
			t.Fatalf("weight %d: got %g, want %g", i, got, want)
		}
	}
}

func TestFirstLoss(t *testing.T) {
	if got, want := small(t).Loss([]byte("any text at all")), math.Log(256); math.Abs(got-want) > 0.2 {
		t.Errorf("got a first loss of %g, want about %g", got, want)
	}
}

func TestNewDependsOnSeed(t *testing.T) {
	a, b := small(t), small(t)
	if diff := cmp.Diff(a.params, b.params); diff != "" {
		t.Errorf("the same seed gives other weights:\n%s", diff)
	}
	c, err := New(a.Config, 2)
	if err != nil {
		t.Fatal(err)
	}
	if cmp.Equal(a.params, c.params) {
		t.Error("another seed gives the same weights")
	}
}

// learn overfits a text by plain gradient descent.
func learn(t *testing.T, text string) *Model {
	m := small(t)
	padded := append(make([]byte, m.Config.Context), text...)
	for range 400 {
		grad := make([]float32, len(m.params))
		m.Gradient(padded, grad)
		for i := range grad {
			m.params[i] -= 0.05 * grad[i]
		}
	}
	return m
}

func TestGenerate(t *testing.T) {
	m := learn(t, "abcdef")
	ctx := context.Background()
	if got, err := m.Generate(ctx, []byte("abc"), 3, 0, nil); err != nil || string(got) != "def" {
		t.Errorf("temperature 0: got %q, %v, want \"def\"", got, err)
	}
	if got := m.Loss([]byte("abcdef")); got > 0.2 {
		t.Errorf("loss of the text that it learned: got %g, want below 0.2", got)
	}
	first, _ := m.Generate(ctx, []byte("abc"), 50, 2, rand.New(rand.NewPCG(1, 2)))
	again, _ := m.Generate(ctx, []byte("abc"), 50, 2, rand.New(rand.NewPCG(1, 2)))
	if len(first) != 50 || !bytes.Equal(first, again) {
		t.Errorf("the same random source gives %q and %q", first, again)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := m.Generate(ended, nil, 1, 0, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: got %v", err)
	}
}

func save(t *testing.T, m *Model, of int) string {
	t.Helper()
	dir := t.TempDir()
	for shard := 1; shard <= of; shard++ {
		if err := m.SaveShard(dir, shard, of, map[string]string{"format": "pt"}, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.SaveIndex(dir, of, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestSaveAndLoad(t *testing.T) {
	m := small(t)
	for _, of := range []int{1, 2, 3, 7} { // 7 is more than there are tensors
		got, err := Load(save(t, m, of))
		if err != nil {
			t.Errorf("%d shards: %v", of, err)
			continue
		}
		if got.Config != m.Config || !cmp.Equal(got.params, m.params) {
			t.Errorf("%d shards: the model that was loaded is another", of)
		}
	}
	if err := m.SaveShard(t.TempDir(), 3, 2, nil, 0o600); err == nil {
		t.Error("shard 3 of 2: got no error")
	}
}

func TestLoadRefuses(t *testing.T) {
	edit := func(file, from, to string) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			path := filepath.Join(dir, file)
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Contains(text, []byte(from)) {
				t.Fatalf("%s has no %q", file, from)
			}
			if err := os.WriteFile(path, bytes.ReplaceAll(text, []byte(from), []byte(to)), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, test := range []struct {
		name   string
		damage func(*testing.T, string)
		want   string
	}{
		{"a shard missing", func(t *testing.T, dir string) { os.Remove(filepath.Join(dir, ShardName(2, 2))) }, "no such file"},
		{"the index missing", func(t *testing.T, dir string) { os.Remove(filepath.Join(dir, IndexFile)) }, "no such file"},
		{"a shard cut short", func(t *testing.T, dir string) { os.Truncate(filepath.Join(dir, ShardName(1, 2)), 500) }, "safetensors"},
		{"another model type", edit(ConfigFile, Type, "llama"), "model_type"},
		{"a huge model", edit(ConfigFile, `"hidden": 5`, `"hidden": 5000000`), "hidden 5000000"},
		{"another shape", edit(ConfigFile, `"context": 3`, `"context": 4`), "the config asks for"},
		{"not JSON", edit(ConfigFile, "}", "]"), "invalid"},
		{"a path out of the directory", edit(IndexFile, "model-", "../model-"), "in file"},
		{"another tensor", edit(IndexFile, "embed.weight", "wte"), "in file \"\""},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := save(t, small(t), 2)
			test.damage(t, dir)
			if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want an error with %q", err, test.want)
			}
		})
	}
}

func TestValidate(t *testing.T) {
	err := NewConfig(0, 2000, 0).Validate()
	for _, want := range []string{"context 0", "embed 2000", "hidden 0"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
	if NewConfig(1024, 1024, 65536).Validate() == nil {
		t.Error("a model of 69 billion weights: got no error")
	}
}

func BenchmarkGradient(b *testing.B) {
	m, err := New(NewConfig(12, 16, 96), 1)
	if err != nil {
		b.Fatal(err)
	}
	window := []byte(strings.Repeat("To be, or not to be, that is the question", 1))
	grad := make([]float32, len(m.params))
	for b.Loop() {
		m.Gradient(window, grad)
	}
	b.ReportMetric(float64(b.N)*float64(len(window)-12)/b.Elapsed().Seconds(), "bytes/s")
}
