package hooks

import (
	"fmt"
	"strings"

	"github.com/sluicehpc/sluice/tests/bench"
)

// memorySamples is how often memory is looked at, once a second.
const memorySamples = 20

// memoryScript prints smaps_rollup of each process of the name $1, then "end",
// $2 times.
const memoryScript = `i=0
while [ $i -lt "$2" ]; do
  for pid in $(pgrep -x "$1"); do cat "/proc/$pid/smaps_rollup"; done
  echo end
  i=$((i + 1))
  sleep 1
done`

// parseMemory reads what memoryScript printed: the sums of PSS in MB (10^6 bytes).
func parseMemory(text string) ([]float64, error) {
	var samples []float64
	sum := 0.0
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		switch {
		case len(f) == 1 && f[0] == "end":
			if sum == 0 {
				return nil, fmt.Errorf("memory: no such process")
			}
			samples = append(samples, sum)
			sum = 0
		default:
			bytes, _, err := bench.PSS(line)
			if err != nil {
				return nil, err
			}
			sum += bytes / 1e6
		}
	}
	return samples, nil
}
