package faults

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Managed Lustre's faults. Those whose value is a list of targets make mounts misbehave: INSTANCE names all mounts
// of that instance, INSTANCE/VM those of one VM; an INSTANCE of * is every one.
const (
	// LustreImportCorrupt is a gs://BUCKET/OBJECT whose copy on Lustre gets one flipped byte.
	LustreImportCorrupt = "lustre.import.corrupt"
	// LustreImportOwner is one of Owners: what owner and mode imported files get.
	LustreImportOwner = "lustre.import.owner"
	// LustreExportCorrupt is a gs://BUCKET/OBJECT whose copy in the bucket gets one flipped byte.
	LustreExportCorrupt = "lustre.export.corrupt"
	// LustreTransferRate limits each import and export, in bytes a second (a whole number above 0).
	LustreTransferRate = "lustre.transfer.rate"
	// LustreTransferParallel is "on" when an instance may run more than one transfer at a time.
	LustreTransferParallel = "lustre.transfer.parallel"
	// LustreCapacity is how many bytes each instance may hold (a whole number above 0).
	LustreCapacity = "lustre.capacity"
	// LustreState is a list of INSTANCE:STATE: the state that an instance is in, with its effects.
	LustreState = "lustre.state"
	// LustreHang is the targets that answer nothing; transfers of an INSTANCE stand still.
	LustreHang = "lustre.hang"
	// LustreEIO is the targets on which every call fails with EIO; so do transfers of an INSTANCE.
	LustreEIO = "lustre.eio"
	// LustreENOSPC is the targets that have no room for anything more; imports of an INSTANCE fail.
	LustreENOSPC = "lustre.enospc"
	// LustreEXDEV is the targets on which every directory counts as a project of its own: hard links and renames
	// from one to another fail with EXDEV, as they always do between projects that "lfs project" has set.
	LustreEXDEV = "lustre.exdev"
	// LustreLoseUnsynced is the targets that lose, when their VM dies, the end of what it had not synced.
	LustreLoseUnsynced = "lustre.lose-unsynced"
	// LustrePassthrough is the targets whose kernel reads and writes files itself from their next mount on: faster, and
	// out of reach of every other fault and of the counters.
	LustrePassthrough = "lustre.passthrough"
)

// The values of LustreImportOwner.
const (
	OwnerRoot0644 = "root-0644" // files of root, readable for all; the same as without the fault
	OwnerRoot0600 = "root-0600" // files of root, for root alone
	OwnerMetadata = "metadata"  // as the object's goog-reserved-posix-uid, -gid and -mode say
)

// Owners are the values of LustreImportOwner.
var Owners = []string{OwnerRoot0644, OwnerRoot0600, OwnerMetadata}

// States are those that LustreState can put an instance into.
var States = []string{"CREATING", "DELETING", "UPGRADING", "REPAIRING", "STOPPED", "SUSPENDED", "UPDATING"}

var lustreKeys = []Key{
	{LustreCapacity, "BYTES", "The most that an instance holds; more is refused as on a full disk.",
		"lustre.capacity=1048576", levels, checkBytes},
	{LustreEIO, "INSTANCE[/VM],…", "Every call on these mounts fails with EIO, and so do transfers of an INSTANCE.",
		"lustre.eio=scratch/compute-1,for=30s", levels, checkTargets},
	{LustreENOSPC, "INSTANCE[/VM],…", "These mounts have no room for anything more (ENOSPC); imports into an INSTANCE fail.",
		"lustre.enospc=scratch", levels, checkTargets},
	{LustreEXDEV, "INSTANCE[/VM],…", "Hard links and renames from one directory to another fail with EXDEV.",
		"lustre.exdev=*", levels, checkTargets},
	{LustreExportCorrupt, "gs://BUCKET/OBJECT", "The exported object gets one flipped byte.",
		"lustre.export.corrupt=gs://results/model.bin", nil, checkObject},
	{LustreHang, "INSTANCE[/VM],…", "These mounts answer nothing; transfers of an INSTANCE stand still.",
		"lustre.hang=scratch/compute-1,scratch/login", levels, checkTargets},
	{LustreImportCorrupt, "gs://BUCKET/OBJECT", "The imported file gets one flipped byte.",
		"lustre.import.corrupt=gs://corpus/c4/part-0", nil, checkObject},
	{LustreImportOwner, strings.Join(Owners, "|"), "Owner and mode of imported files: root's and readable for all (as without the fault), root's alone, or as the object's metadata says.",
		"lustre.import.owner=root-0600", levels, checkOwner},
	{LustreLoseUnsynced, "INSTANCE[/VM],…", "When its VM dies, the end of what it had not synced is lost.",
		"lustre.lose-unsynced=*", levels, checkTargets},
	{LustrePassthrough, "INSTANCE[/VM],…", "New mounts are fast, and out of reach of all other faults.",
		"lustre.passthrough=scratch", levels, checkTargets},
	{LustreState, "INSTANCE:STATE,…", "The instance is in this state, with its effects: " + words(States) + ".",
		"lustre.state=scratch:UPGRADING", levels, checkStates},
	{LustreTransferParallel, "on", "An instance may run more than one transfer at a time.",
		"lustre.transfer.parallel=on", levels, oneOf("on")},
	{LustreTransferRate, "BYTES", "The most that each transfer copies in a second.",
		"lustre.transfer.rate=1048576", levels, checkBytes},
}

var target = regexp.MustCompile(`^(\*|[a-z][-a-z0-9]{0,62})(/[a-z][-a-z0-9]{0,62})?$`)

func checkTargets(v string) error {
	for t := range strings.SplitSeq(v, ",") {
		if !target.MatchString(t) {
			return fmt.Errorf("%q: want INSTANCE or INSTANCE/VM, for several with commas; * is every instance", t)
		}
	}
	return nil
}

func checkStates(v string) error {
	for t := range strings.SplitSeq(v, ",") {
		instance, state, _ := strings.Cut(t, ":")
		if !target.MatchString(instance) || strings.Contains(instance, "/") || !slices.Contains(States, state) {
			return fmt.Errorf("%q: want INSTANCE:STATE with one of %s", t, strings.Join(States, ", "))
		}
	}
	return nil
}

func checkOwner(v string) error {
	if !slices.Contains(Owners, v) {
		return errors.New("want " + strings.Join(Owners, ", "))
	}
	return nil
}

// Hits reports whether a fault whose value is targets is on for a VM's mount of an instance; with an empty vm,
// whether it is on for the whole instance.
func (s *Set) Hits(key, instance, vm string) bool {
	v, on := s.Get(key)
	if !on {
		return false
	}
	for t := range strings.SplitSeq(v, ",") {
		i, m, _ := strings.Cut(t, "/")
		if (i == "*" || i == instance) && (m == "" || m == vm) {
			return true
		}
	}
	return false
}

// State returns the state that LustreState puts an instance into, or "".
func (s *Set) State(instance string) string {
	v, _ := s.Get(LustreState)
	for t := range strings.SplitSeq(v, ",") {
		if i, state, _ := strings.Cut(t, ":"); i == "*" || i == instance {
			return state
		}
	}
	return ""
}
