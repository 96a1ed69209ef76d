package staging

import "time"

// meter measures a rate over the last seconds.
type meter struct {
	samples []sample
}

type sample struct {
	at    time.Time
	bytes int64
}

const window = 5 * time.Second

func (m *meter) add(at time.Time, bytes int64) {
	if n := len(m.samples); n > 0 && bytes < m.samples[n-1].bytes {
		m.samples = nil // another phase begins
	}
	m.samples = append(m.samples, sample{at, bytes})
	for len(m.samples) > 2 && at.Sub(m.samples[1].at) > window {
		m.samples = m.samples[1:]
	}
}

func (m *meter) last() int64 {
	if len(m.samples) == 0 {
		return 0
	}
	return m.samples[len(m.samples)-1].bytes
}

// rate is in bytes a second; 0 when nothing was heard for a while.
func (m *meter) rate(now time.Time) float64 {
	n := len(m.samples)
	if n < 2 || now.Sub(m.samples[n-1].at) > window {
		return 0
	}
	first, last := m.samples[0], m.samples[n-1]
	d := last.at.Sub(first.at).Seconds()
	if d <= 0 {
		return 0
	}
	return float64(last.bytes-first.bytes) / d
}
