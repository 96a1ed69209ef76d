package guest

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// stamp is the time in a journal's lines.
const stamp = "2006-01-02T15:04:05.000Z"

// journal returns the write end of a pipe whose lines go, each with its time, to the unit's journal.
// The pipe lives until its last holder is gone, which may be long after the unit's main process. Each
// line goes to also (or nil) too.
func journal(dir, unit string, also io.Writer) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(journalPath(dir, unit), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return nil, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		f.Close()
		return nil, err
	}
	go func() {
		defer f.Close()
		defer r.Close()
		in := bufio.NewReaderSize(r, 64<<10)
		for {
			line, err := in.ReadSlice('\n') // a longer line comes in parts
			if len(line) > 0 {
				text := strings.TrimRight(string(line), "\r\n")
				// A full disk must not stop the service: its lines are lost then.
				_, _ = fmt.Fprintf(f, "%s %s\n", time.Now().UTC().Format(stamp), text)
				if also != nil {
					_, _ = fmt.Fprintf(also, "%s\n", text)
				}
			}
			if err != nil && err != bufio.ErrBufferFull {
				return
			}
		}
	}()
	return w, nil
}

func journalPath(dir, unit string) string { return filepath.Join(dir, unit+".log") }

// tail returns the last n lines of a file, of its last 64 KiB at most.
func tail(path string, n int) []string {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > 64<<10 {
		if _, err := f.Seek(-64<<10, io.SeekEnd); err != nil {
			return nil
		}
	}
	data, err := io.ReadAll(io.LimitReader(f, 64<<10))
	if err != nil || len(data) == 0 {
		return nil
	}
	lines := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	return lines[max(0, len(lines)-n):]
}
