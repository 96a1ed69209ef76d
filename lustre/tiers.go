// Package lustre knows Managed Lustre's tiers and sizes, and mounts its file systems.
package lustre

import (
	"fmt"
	"regexp"
)

// A Tier is a performance class of Managed Lustre. It cannot be changed after creation.
// All sizes are in GiB and inclusive.
type Tier struct {
	// Throughput is the instance's perUnitStorageThroughput: MB/s a TiB of capacity. 0 is the
	// dynamic tier, which is chosen by dynamicTierOptions instead.
	Throughput int64
	MinGiB     int64
	MaxGiB     int64
	// Capacities are multiples of StepGiB up to LargeAboveGiB, and multiples of LargeStepGiB
	// above it. LargeAboveGiB is MaxGiB where there is one step.
	StepGiB       int64
	LargeAboveGiB int64
	LargeStepGiB  int64
}

// Tiers are the documented tiers, fastest first. Source: the documentation's page "Performance
// tiers" (newest stored copy, 2026); older copies have lower maxima and one step. For the 125
// tier that page says at most 12,240,000 GiB and the quota page 20,448,000: the smaller is here.
var Tiers = []Tier{
	{Throughput: 1000, MinGiB: 9_000, MaxGiB: 10_008_000, StepGiB: 9_000, LargeAboveGiB: 1_530_000, LargeStepGiB: 72_000},
	{Throughput: 500, MinGiB: 18_000, MaxGiB: 20_016_000, StepGiB: 18_000, LargeAboveGiB: 3_060_000, LargeStepGiB: 144_000},
	{Throughput: 250, MinGiB: 36_000, MaxGiB: 40_032_000, StepGiB: 36_000, LargeAboveGiB: 6_120_000, LargeStepGiB: 288_000},
	{Throughput: 125, MinGiB: 72_000, MaxGiB: 12_240_000, StepGiB: 72_000, LargeAboveGiB: 12_240_000, LargeStepGiB: 72_000},
	{Throughput: 0, MinGiB: 472_000, MaxGiB: 84_016_000, StepGiB: 472_000, LargeAboveGiB: 84_016_000, LargeStepGiB: 472_000},
}

// TierOf returns the tier with that perUnitStorageThroughput (0: the dynamic tier).
func TierOf(throughput int64) (Tier, bool) {
	for _, t := range Tiers {
		if t.Throughput == throughput {
			return t, true
		}
	}
	return Tier{}, false
}

func (t Tier) String() string {
	if t.Throughput == 0 {
		return "dynamic tier"
	}
	return fmt.Sprintf("%d MB/s per TiB tier", t.Throughput)
}

// ValidateCapacity says whether gib is a size that the tier has; the error names the nearest.
func ValidateCapacity(t Tier, gib int64) error {
	if gib < t.MinGiB || gib > t.MaxGiB {
		return fmt.Errorf("capacity %d GiB is outside the %s: it goes from %d to %d GiB", gib, t, t.MinGiB, t.MaxGiB)
	}
	if gib <= t.LargeAboveGiB {
		return multiple(t, gib, t.StepGiB)
	}
	return multiple(t, gib, t.LargeStepGiB)
}

func multiple(t Tier, gib, step int64) error {
	below := gib - gib%step
	if below == gib {
		return nil
	}
	return fmt.Errorf("capacity %d GiB is not a size of the %s, which grows by %d GiB here: take %d or %d",
		gib, t, step, max(below, t.MinGiB), min(below+step, t.MaxGiB))
}

// ValidateGrowth says whether an instance of the tier can be resized from one capacity to another, in GiB.
// It can only grow, and one that was made with the small step never passes that step's end
// (documentation, "Increase capacity").
func ValidateGrowth(t Tier, from, to int64) error {
	if to < from {
		return fmt.Errorf("capacity cannot shrink from %d to %d GiB", from, to)
	}
	if from <= t.LargeAboveGiB && to > t.LargeAboveGiB {
		return fmt.Errorf("an instance of %d GiB in the %s can grow to %d GiB at most, not to %d: create a larger one and move the data", from, t, t.LargeAboveGiB, to)
	}
	return ValidateCapacity(t, to)
}

// Names that Managed Lustre accepts.
var (
	// FSName is the file system's name: up to 8 letters and digits (proto field Instance.filesystem).
	FSName = regexp.MustCompile(`^[A-Za-z0-9]{1,8}$`)
	// InstanceID is the last part of an instance's name (proto field CreateInstanceRequest.instance_id).
	InstanceID = regexp.MustCompile(`^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$`)
	// MountPoint is an instance's mountPoint, which is the source that mount(8) gets: IP@tcp:/FS.
	MountPoint = regexp.MustCompile(`^([0-9]{1,3}(?:\.[0-9]{1,3}){3})@tcp:/([A-Za-z0-9]{1,8})$`)
)
