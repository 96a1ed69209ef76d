package conf

import (
	"fmt"
	"strconv"
	"strings"
)

// Version is Slurm's release, without the patch level: {24, 11}.
type Version struct {
	Year, Month int
}

// ParseVersion reads "24.11", "24.11.5" or `slurmctld -V`'s "slurm-wlm 24.11.5".
func ParseVersion(s string) (Version, error) {
	if i := strings.LastIndexByte(s, ' '); i >= 0 {
		s = s[i+1:]
	}
	parts := strings.Split(strings.TrimSpace(s), ".")
	if len(parts) >= 2 {
		year, err1 := strconv.Atoi(parts[0])
		month, err2 := strconv.Atoi(parts[1])
		if err1 == nil && err2 == nil && year > 0 && month > 0 && month <= 12 {
			return Version{year, month}, nil
		}
	}
	return Version{}, fmt.Errorf("%q is not a version of Slurm such as 24.11", s)
}

func (v Version) String() string { return fmt.Sprintf("%02d.%02d", v.Year, v.Month) }

func (v Version) before(w Version) bool {
	return v.Year < w.Year || v.Year == w.Year && v.Month < w.Month
}

// features are what differs between versions as far as our files are concerned.
type features struct {
	since Version
	// longArguments: the burst buffer functions get uid, gid and job_info.
	longArguments bool
	// polls: slurm_bb_test_data_in and _out exist, and PollInterval.
	polls bool
	// authSlurm: auth/slurm exists.
	authSlurm bool
	// addressFlag: SlurmctldParameters needs cloud_reg_addrs; later it is the
	// only behaviour, and an error in the log.
	addressFlag bool
	// cgroupDisabled: CgroupPlugin=disabled exists.
	cgroupDisabled bool
}

// versions is the table of differences, from Slurm's sources at the tags of
// these releases; a release in between, and one that is newer than all, is
// like the last one before it.
var versions = []features{
	{since: Version{22, 5}, addressFlag: true},
	{since: Version{23, 2}, addressFlag: true, longArguments: true},
	{since: Version{23, 11}, longArguments: true, authSlurm: true},
	{since: Version{24, 5}, longArguments: true, authSlurm: true, cgroupDisabled: true, polls: true},
}

func featuresOf(v Version) (features, error) {
	if v.before(versions[0].since) {
		return features{}, fmt.Errorf("version %s of Slurm is older than %s", v, versions[0].since)
	}
	f := versions[0]
	for _, row := range versions[1:] {
		if !v.before(row.since) {
			f = row
		}
	}
	return f, nil
}

// HasAuthSlurm tells whether this Slurm has auth/slurm; older ones need munge.
func (v Version) HasAuthSlurm() bool {
	f, err := featuresOf(v)
	return err == nil && f.authSlurm
}
