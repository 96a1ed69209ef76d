package demo

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// corpusPattern is where Debian's package perl-doc puts its texts, some two
// hundred files of English prose and code.
const corpusPattern = "/usr/share/perl/5.*/pod/*.pod"

// largeBytes is the size that the corpus's one large file at least has.
const largeBytes = 64 << 20

// text is one object of the corpus.
type text struct {
	name string // below the corpus's prefix
	size int64
	open func() (io.ReadCloser, error)
}

// corpus returns the texts, and one large file made of all of them, again and
// again until it is large enough.
func corpus() ([]text, error) {
	paths, err := filepath.Glob(corpusPattern)
	if err != nil {
		return nil, err
	}
	var texts []text
	var parts [][]byte
	seen := map[string]bool{} // Debian has the directory under two names, one a link to the other
	for _, path := range paths {
		if seen[filepath.Base(path)] {
			continue
		}
		seen[filepath.Base(path)] = true
		data, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) || len(data) == 0 {
			continue
		}
		if err != nil {
			return nil, err
		}
		parts = append(parts, data)
		texts = append(texts, text{
			name: "pod/" + strings.TrimSuffix(filepath.Base(path), ".pod") + ".txt",
			size: int64(len(data)),
			open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil },
		})
	}
	if len(texts) < 100 {
		return nil, fmt.Errorf("corpus: %d texts at %s, more than 100 expected\n  run make deps, which installs perl-doc", len(texts), corpusPattern)
	}
	return append(texts, large(parts)), nil
}

func large(parts [][]byte) text {
	var all int64
	for _, p := range parts {
		all += int64(len(p))
	}
	const heading = "\n\nreading %06d\n\n"
	each := all + int64(len(fmt.Sprintf(heading, 0)))
	rounds := int((largeBytes + each - 1) / each)
	return text{
		name: "all.txt",
		size: each * int64(rounds),
		open: func() (io.ReadCloser, error) {
			var readers []io.Reader
			for round := range rounds {
				readers = append(readers, strings.NewReader(fmt.Sprintf(heading, round)))
				for _, p := range parts {
					readers = append(readers, bytes.NewReader(p))
				}
			}
			return io.NopCloser(io.MultiReader(readers...)), nil
		},
	}
}
