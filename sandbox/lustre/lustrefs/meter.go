package lustrefs

import (
	"io/fs"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// A Meter holds a directory tree to a number of bytes. Several processes write to the tree, so it
// counts what is there again once a second, and always before it refuses.
type Meter struct {
	dir string

	mu      sync.Mutex
	used    int64     // bytes; mu guards it and counted
	counted time.Time // when used was counted
}

// NewMeter returns a meter of dir.
func NewMeter(dir string) *Meter { return &Meter{dir: dir} }

// Take asks for n bytes more. It returns ENOSPC when the tree would then hold more than capacity
// bytes; a capacity of 0 is no limit.
func (m *Meter) Take(capacity, n int64) error {
	if capacity <= 0 {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if time.Since(m.counted) > time.Second || m.used+n > capacity {
		m.used, m.counted = usage(m.dir), time.Now()
	}
	if m.used+n > capacity {
		return syscall.ENOSPC
	}
	m.used += n
	return nil
}

// Free returns how many of capacity bytes are left.
func (m *Meter) Free(capacity int64) int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.used, m.counted = usage(m.dir), time.Now()
	return max(0, capacity-m.used)
}

// usage is the disk space of all files below dir, each once, in bytes. What disappears meanwhile is not counted.
func usage(dir string) int64 {
	var total int64
	linked := map[uint64]bool{} // inodes with several names
	filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return nil
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok || linked[st.Ino] {
			return nil
		}
		if st.Nlink > 1 {
			linked[st.Ino] = true
		}
		total += st.Blocks * 512
		return nil
	})
	return total
}
