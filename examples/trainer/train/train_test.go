package train

import (
	"math"
	"testing"

	"github.com/sluicehpc/sluice/examples/trainer/collective"
)

func TestShare(t *testing.T) {
	for _, c := range [][2]int{{1, 1}, {7, 3}, {16, 2}, {5, 5}} {
		next := 0
		for rank := range c[1] {
			first, end := share(c[0], rank, c[1])
			if first != next || end <= first {
				t.Errorf("batch %d, rank %d of %d: got %d to %d, want a beginning at %d", c[0], rank, c[1], first, end, next)
			}
			next = end
		}
		if next != c[0] {
			t.Errorf("batch %d over %d ranks: %d windows are computed", c[0], c[1], next)
		}
	}
}

func TestPlace(t *testing.T) {
	const size, draws = 10, 10_000
	var seen [size]int
	for i := range uint64(draws) {
		seen[place(3, i, size)]++ // out of range would panic
	}
	for at, n := range seen {
		if n < draws/size*8/10 || n > draws/size*12/10 {
			t.Errorf("byte %d is drawn %d times of %d", at, n, draws)
		}
	}
	if place(1, 0, 1) != 0 {
		t.Error("the only byte is not drawn")
	}
	if place(1, 7, math.MaxInt64) == place(2, 7, math.MaxInt64) {
		t.Error("two seeds draw the same place")
	}
}

func TestRate(t *testing.T) {
	const top, steps = 0.5, 1000
	highest := 0.0
	for step := range steps {
		highest = max(highest, rate(top, step, steps))
	}
	if first, last := rate(top, 0, steps), rate(top, steps-1, steps); first > top/9 || last > top/9 || highest < 0.98*top || highest > top {
		t.Errorf("got %g at first, %g at most, %g at last", first, highest, last)
	}
}

// TestAdam finds the lowest point of a bowl that is a hundred times steeper one way than the other.
func TestAdam(t *testing.T) {
	at := []float32{3, -2}
	a := newAdam(2)
	for range 2000 {
		a.step(at, []float32{2 * (at[0] - 1), 200 * (at[1] - 1)}, 0.5, 0.01)
	}
	for i, v := range at {
		if math.Abs(float64(v-1)) > 0.02 {
			t.Errorf("coordinate %d ends at %g, want 1", i, v)
		}
	}
	first := newAdam(1)
	w := []float32{0}
	first.step(w, []float32{1e-3}, 1, 0.01) // the first step has the length of the rate, whatever the gradient's
	if math.Abs(float64(w[0]+0.01)) > 1e-4 {
		t.Errorf("the first step goes to %g, want -0.01", w[0])
	}
}

func TestValidate(t *testing.T) {
	g := &collective.Group{Config: collective.Config{Size: 4}}
	if _, err := Run(t.Context(), Options{Batch: 3}, g); err == nil {
		t.Error("a batch smaller than the number of ranks: got no error")
	}
}
