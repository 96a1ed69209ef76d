package lustre

import (
	"strings"
	"testing"
)

func TestValidateCapacity(t *testing.T) {
	for _, tt := range []struct {
		name       string
		throughput int64
		gib        int64
		says       string // "" is a size of the tier
	}{
		{"smallest", 1000, 9_000, ""},
		{"second", 1000, 18_000, ""},
		{"end of the small step", 1000, 1_530_000, ""},
		{"small step above its end", 1000, 1_539_000, "72000"},
		{"first of the large step", 1000, 1_584_000, ""},
		{"largest", 1000, 10_008_000, ""},
		{"above the largest", 1000, 10_080_000, "from 9000 to 10008000"},
		{"below the smallest", 1000, 0, "from 9000"},
		{"negative", 1000, -9_000, "from 9000"},
		{"between", 1000, 9_001, "take 9000 or 18000"},
		{"500", 500, 20_016_000, ""},
		{"250", 250, 40_032_000, ""},
		{"125", 125, 12_240_000, ""},
		{"125 with the step of 250", 125, 36_000, "from 72000"},
		{"dynamic", 0, 472_000, ""},
		{"dynamic largest", 0, 84_016_000, ""},
		{"dynamic between", 0, 500_000, "take 472000 or 944000"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tier, ok := TierOf(tt.throughput)
			if !ok {
				t.Fatalf("no tier of %d", tt.throughput)
			}
			err := ValidateCapacity(tier, tt.gib)
			if (err == nil) != (tt.says == "") || err != nil && !strings.Contains(err.Error(), tt.says) {
				t.Errorf("got %v, want %q", err, tt.says)
			}
		})
	}
	if _, ok := TierOf(200); ok {
		t.Error("there is a tier of 200")
	}
	for _, tier := range Tiers {
		for _, gib := range []int64{tier.MinGiB, tier.LargeAboveGiB, tier.MaxGiB} {
			if err := ValidateCapacity(tier, gib); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestValidateGrowth(t *testing.T) {
	tier, _ := TierOf(1000)
	for _, tt := range []struct {
		from, to int64
		says     string
	}{
		{9_000, 9_000, ""},
		{9_000, 1_530_000, ""},
		{18_000, 9_000, "shrink"},
		{1_530_000, 1_584_000, "1530000 GiB at most"},
		{1_584_000, 1_656_000, ""},
		{9_000, 9_500, "take 9000 or 18000"},
	} {
		err := ValidateGrowth(tier, tt.from, tt.to)
		if (err == nil) != (tt.says == "") || err != nil && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%d to %d: got %v, want %q", tt.from, tt.to, err, tt.says)
		}
	}
}

func TestNames(t *testing.T) {
	for name, want := range map[string]bool{"scratch": true, "A1": true, "": false, "scratches": false, "a-b": false, "a\n": false} {
		if got := FSName.MatchString(name); got != want {
			t.Errorf("FSName %q = %v", name, got)
		}
	}
	for name, want := range map[string]bool{"a": true, "a-1": true, "a-": false, "1a": false, strings.Repeat("a", 63): true, strings.Repeat("a", 64): false} {
		if got := InstanceID.MatchString(name); got != want {
			t.Errorf("InstanceID %q = %v", name, got)
		}
	}
	for name, want := range map[string]bool{"10.0.0.5@tcp:/fs": true, "10.0.0.5@o2ib:/fs": false, "10.0.0.5@tcp:/fs/x": false, "h@tcp:/fs": false} {
		if got := MountPoint.MatchString(name); got != want {
			t.Errorf("MountPoint %q = %v", name, got)
		}
	}
}
