package model

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"

	"github.com/sluicehpc/sluice/examples/trainer/safetensors"
	"github.com/sluicehpc/sluice/internal/atomicfile"
)

// The files of a saved model. Names and layout are those that Hugging Face's libraries use for sharded weights.
const (
	ConfigFile = "config.json"
	IndexFile  = "model.safetensors.index.json"
)

// maxJSON is the largest config or index that is read, in bytes.
const maxJSON = 16 << 20

// index is the content of IndexFile.
type index struct {
	Metadata  indexMetadata     `json:"metadata"`
	WeightMap map[string]string `json:"weight_map"` // tensor's name to file's name
}

type indexMetadata struct {
	TotalSize int64 `json:"total_size"` // bytes of all tensors
}

// ShardName is the name of the file that holds a shard, which counts from 1 to of.
func ShardName(shard, of int) string {
	return fmt.Sprintf("model-%05d-of-%05d.safetensors", shard, of)
}

// tensors are the weights with their names, in the order of Params.
func (m *Model) tensors() []safetensors.Tensor {
	c := m.Config
	row := func(n ...int64) []int64 { return n }
	return []safetensors.Tensor{
		{Name: "embed.weight", Shape: row(vocabulary, int64(c.Embed)), Data: m.w.embed},
		{Name: "hidden.weight", Shape: row(int64(c.Hidden), int64(c.Context*c.Embed)), Data: m.w.hiddenW},
		{Name: "hidden.bias", Shape: row(int64(c.Hidden)), Data: m.w.hiddenB},
		{Name: "output.weight", Shape: row(vocabulary, int64(c.Hidden)), Data: m.w.outputW},
		{Name: "output.bias", Shape: row(vocabulary), Data: m.w.outputB},
	}
}

// shards deals the tensors out: the largest first, each to the shard that has the fewest bytes. With more shards than tensors
// some stay empty.
func (m *Model) shards(of int) [][]safetensors.Tensor {
	tensors := m.tensors()
	sort.SliceStable(tensors, func(i, j int) bool { return len(tensors[i].Data) > len(tensors[j].Data) })
	shards, values := make([][]safetensors.Tensor, of), make([]int, of)
	for _, t := range tensors {
		least := 0
		for s := range values {
			if values[s] < values[least] {
				least = s
			}
		}
		shards[least] = append(shards[least], t)
		values[least] += len(t.Data)
	}
	return shards
}

// SaveShard writes one shard of the model, 1 to of, into dir, durably and all at once. Metadata is free text about the weights.
func (m *Model) SaveShard(dir string, shard, of int, metadata map[string]string, mode fs.FileMode) error {
	if shard < 1 || shard > of {
		return fmt.Errorf("save model: no shard %d of %d", shard, of)
	}
	var buf bytes.Buffer
	if err := safetensors.Write(&buf, m.shards(of)[shard-1], metadata); err != nil {
		return fmt.Errorf("save model: %w", err)
	}
	if err := atomicfile.Write(filepath.Join(dir, ShardName(shard, of)), buf.Bytes(), mode); err != nil {
		return fmt.Errorf("save model: %w", err)
	}
	return nil
}

// SaveIndex writes ConfigFile and IndexFile into dir. Call it after all shards are saved: whoever finds the index
// may expect them.
func (m *Model) SaveIndex(dir string, of int, mode fs.FileMode) error {
	ix := index{Metadata: indexMetadata{int64(4 * len(m.params))}, WeightMap: map[string]string{}}
	for i, tensors := range m.shards(of) {
		for _, t := range tensors {
			ix.WeightMap[t.Name] = ShardName(i+1, of)
		}
	}
	for _, f := range []struct {
		name  string
		value any
	}{{ConfigFile, m.Config}, {IndexFile, ix}} {
		text, err := json.MarshalIndent(f.value, "", "  ")
		if err == nil {
			err = atomicfile.Write(filepath.Join(dir, f.name), append(text, '\n'), mode)
		}
		if err != nil {
			return fmt.Errorf("save model: %w", err)
		}
	}
	return nil
}

// Load reads the model that SaveShard and SaveIndex wrote into dir. Every tensor must be there with the shape that the config
// gives it, and every shard must be a whole file.
func Load(dir string) (*Model, error) {
	var c Config
	var ix index
	if err := readJSON(filepath.Join(dir, ConfigFile), &c); err != nil {
		return nil, err
	}
	if err := readJSON(filepath.Join(dir, IndexFile), &ix); err != nil {
		return nil, err
	}
	m, err := newModel(c)
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", dir, err)
	}
	tensors := m.tensors()
	if len(ix.WeightMap) != len(tensors) || ix.Metadata.TotalSize != int64(4*len(m.params)) {
		return nil, fmt.Errorf("load %s: the index has %d tensors of %d bytes, the config asks for %d of %d",
			dir, len(ix.WeightMap), ix.Metadata.TotalSize, len(tensors), 4*len(m.params))
	}
	for _, t := range tensors {
		if err := loadTensor(dir, ix.WeightMap[t.Name], t); err != nil {
			return nil, fmt.Errorf("load %s: %w", dir, err)
		}
	}
	return m, nil
}

func loadTensor(dir, file string, t safetensors.Tensor) error {
	if file == "" || file != filepath.Base(file) || !filepath.IsLocal(file) {
		return fmt.Errorf("the index places tensor %q in file %q", t.Name, file)
	}
	f, err := safetensors.Open(filepath.Join(dir, file))
	if err != nil {
		return err
	}
	defer f.Close()
	if got := f.Entries[t.Name].Shape; fmt.Sprint(got) != fmt.Sprint(t.Shape) {
		return fmt.Errorf("%s: tensor %q has shape %v, want %v", file, t.Name, got, t.Shape)
	}
	return f.Read(t.Name, t.Data)
}

func readJSON(path string, value any) error {
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("load model: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxJSON {
		return fmt.Errorf("load model: %s is not a regular file of at most %d bytes", path, maxJSON)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("load model: %w", err)
	}
	if err := json.Unmarshal(text, value); err != nil {
		return fmt.Errorf("load model: %s: %w", path, err)
	}
	return nil
}
