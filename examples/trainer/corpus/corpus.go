// Package corpus reads windows of bytes from a directory of files without holding the files in memory.
package corpus

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
)

// maxOpen is how many files stay open between reads; further ones are opened for each read. It stays far below the usual limit
// of 1024 open files a process.
const maxOpen = 256

// Corpus is all regular files below a directory, sorted by name and seen as one row of bytes. It is not for concurrent use.
type Corpus struct {
	files []file
	size  int64 // bytes of all files
	open  int
	sum   string
}

type file struct {
	path  string
	begin int64 // place of the first byte in the row
	size  int64
	f     *os.File // or nil
}

// Open lists dir and everything below it. Symbolic links to files are followed, those to directories are not (dir itself may be
// one). It is an error when there is no file, when all are empty, or when one cannot be opened: a job
// must not train on half of its data.
func Open(dir string) (*Corpus, error) {
	root, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, fmt.Errorf("open corpus: %w", err)
	}
	if info, err := os.Stat(root); err != nil {
		return nil, fmt.Errorf("open corpus: %w", err)
	} else if !info.IsDir() {
		return nil, fmt.Errorf("open corpus: %s is not a directory", dir)
	}
	c := &Corpus{}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			return nil
		}
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		if info.Mode().IsRegular() {
			c.files = append(c.files, file{path: path, size: info.Size()})
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list corpus: %w", err)
	}
	if len(c.files) == 0 {
		return nil, fmt.Errorf("open corpus: no files below %s", dir)
	}
	sort.Slice(c.files, func(i, j int) bool { return c.files[i].path < c.files[j].path })
	hash := sha256.New()
	for i := range c.files {
		f := &c.files[i]
		f.begin = c.size
		c.size += f.size
		rel, err := filepath.Rel(root, f.path)
		if err != nil {
			return nil, fmt.Errorf("list corpus: %w", err)
		}
		fmt.Fprintf(hash, "%q %d\n", rel, f.size)
		if h, err := os.Open(f.path); err != nil {
			c.Close()
			return nil, fmt.Errorf("open corpus: %w", err)
		} else if c.open < maxOpen && f.size > 0 {
			f.f = h
			c.open++
		} else {
			h.Close()
		}
	}
	if c.size == 0 {
		c.Close()
		return nil, fmt.Errorf("open corpus: all %d files below %s are empty", len(c.files), dir)
	}
	c.sum = hex.EncodeToString(hash.Sum(nil)[:8])
	return c, nil
}

// Files is the number of files, at least 1.
func (c *Corpus) Files() int { return len(c.files) }

// Size is the number of bytes in all files, at least 1.
func (c *Corpus) Size() int64 { return c.size }

// Fingerprint is 16 hexadecimal digits that depend on the names and sizes of all files, so that ranks can tell whether they
// see the same corpus.
func (c *Corpus) Fingerprint() string { return c.sum }

// Window fills buf with the bytes around place at, 0 <= at < Size: buf[:before] gets those before it and the rest those from
// it on, all from the file that holds the place. Before the file's beginning there are zeros. It returns how much of buf is filled, less than
// len(buf) where the file ends; at least before+1 when len(buf) > before.
func (c *Corpus) Window(buf []byte, at int64, before int) (int, error) {
	if at < 0 || at >= c.size || before < 0 || before > len(buf) {
		return 0, fmt.Errorf("no window of %d bytes, %d of them before it, at byte %d of %d", len(buf), before, at, c.size)
	}
	// Of the files that begin at or before the place the last one has it: an empty file is never last, its successor
	// begins at the same place.
	f := &c.files[sort.Search(len(c.files), func(i int) bool { return c.files[i].begin > at })-1]
	from := at - f.begin - int64(before)
	pad := 0
	if from < 0 {
		pad, from = int(-from), 0
		clear(buf[:pad])
	}
	n := int(min(int64(len(buf)-pad), f.size-from))
	h := f.f
	if h == nil {
		var err error
		if h, err = os.Open(f.path); err != nil {
			return 0, fmt.Errorf("read corpus: %w", err)
		}
		defer h.Close()
	}
	if _, err := h.ReadAt(buf[pad:pad+n], from); errors.Is(err, io.EOF) {
		return 0, fmt.Errorf("read corpus: %s became shorter than %d bytes", f.path, f.size)
	} else if err != nil {
		return 0, fmt.Errorf("read corpus: %w", err)
	}
	return pad + n, nil
}

// Close closes the files.
func (c *Corpus) Close() {
	for i := range c.files {
		if f := &c.files[i]; f.f != nil {
			f.f.Close()
			f.f = nil
		}
	}
}
