// Package files does staging's work on a mounted file system, each operation in
// a child process that may hang, be killed or be abandoned without the daemon noticing.
//
// The parent's half is Client. The child's half is Main, which `sluiced fs OP`
// calls: the request is the first line of its standard input, further lines are
// a manifest; on its standard output it writes replies, one JSON object a line.
//
// Every path of a request is relative to the mount and is walked component by
// component without following symbolic links, because users write below it.
package files

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Where things are, relative to the file system's root.
const (
	Base     = ".sluice"
	Jobs     = Base + "/jobs"
	Datasets = Base + "/datasets"
	Exports  = Base + "/exports"
)

// JobDir is a job's directory.
func JobDir(cluster string, jobID uint32) string {
	return fmt.Sprintf("%s/%s-%d", Jobs, cluster, jobID)
}

// ExportDir is what a transfer exports: hard links that root made to the files that
// the job's user could read, out of everybody's reach.
func ExportDir(transfer string) string { return Exports + "/" + transfer }

// DatasetDir holds all versions of a dataset.
func DatasetDir(id string) string { return Datasets + "/" + id }

// VersionDir is a published version: root's alone; users come through a gate.
func VersionDir(id, version string) string { return DatasetDir(id) + "/" + version }

// PartialDir is where a transfer's import goes before it is published.
func PartialDir(id, version, transfer string) string {
	return VersionDir(id, version) + partialMark + transfer
}

// GateDir is the tree of hard links through which group gid reads a version.
func GateDir(id, version string, gid uint32) string {
	return fmt.Sprintf("%s/gates/%s/%d", DatasetDir(id), version, gid)
}

// ManifestFile lies beside a published version and says what is in it.
func ManifestFile(id, version string) string { return VersionDir(id, version) + ".manifest" }

const partialMark = ".partial-"

// Entry is one regular file of a manifest.
type Entry struct {
	Path   string `json:"path"` // relative, with slashes
	Size   int64  `json:"size"` // bytes
	CRC32C uint32 `json:"crc32c"`
	// Dir marks a directory that an object with a final slash stands for.
	Dir bool `json:"dir,omitempty"`
	// MTime is the modification time in nanoseconds, and Inode the file's number, in
	// manifests of job directories.
	MTime int64  `json:"mtime,omitempty"`
	Inode uint64 `json:"inode,omitempty"`
}

// Published describes a published version; it is the first line of its manifest.
type Published struct {
	Dataset     string `json:"dataset"`
	Version     string `json:"version"`
	Source      string `json:"source"` // gs://…
	Transfer    string `json:"transfer"`
	InstanceUID string `json:"instance_uid"`
	Objects     int64  `json:"objects"`
	Bytes       int64  `json:"bytes"`
	VerifyLevel string `json:"verify_level"`
	VerifiedAt  string `json:"verified_at"`
}

// Skipped is something that is not exported, and why.
type Skipped struct {
	Path string `json:"path"`
	Why  string `json:"why"`
}

// Limits of the kernel and of Cloud Storage, in bytes.
const (
	maxName       = 255
	maxPath       = 4000 // below PATH_MAX with the mount and dataset in front
	MaxObjectName = 1024
)

// CheckName says why a relative path of an object cannot be a file's, or "".
func CheckName(path string) string {
	switch {
	case path == "":
		return "it is empty"
	case !utf8.ValidString(path):
		return "it is not UTF-8"
	case strings.ContainsRune(path, 0):
		return "it has a NUL character"
	case len(path) > maxPath:
		return fmt.Sprintf("it is longer than %d bytes", maxPath)
	}
	for part := range strings.SplitSeq(path, "/") {
		switch {
		case part == "":
			return "it has an empty component (two slashes, or one at the start)"
		case part == "." || part == "..":
			return "it has a component " + part
		case len(part) > maxName:
			return fmt.Sprintf("a component is longer than %d bytes", maxName)
		}
	}
	return ""
}

// request is the first line of a child's input.
type request struct {
	Root      string     `json:"root"` // the mount
	Parent    int        `json:"parent"`
	Path      string     `json:"path,omitempty"`
	Below     string     `json:"below,omitempty"`
	Target    string     `json:"target,omitempty"`
	Dataset   string     `json:"dataset,omitempty"`
	Version   string     `json:"version,omitempty"`
	Transfer  string     `json:"transfer,omitempty"`
	UID       uint32     `json:"uid,omitempty"`
	GID       uint32     `json:"gid,omitempty"`
	Keep      []string   `json:"keep,omitempty"`
	Prefix    int        `json:"prefix,omitempty"` // bytes of the object prefix
	Published *Published `json:"published,omitempty"`
}

// reply is one line of a child's output. The last one is Done or Error.
type reply struct {
	Progress  *Progress  `json:"progress,omitempty"`
	Entry     *Entry     `json:"entry,omitempty"`
	Skipped   *Skipped   `json:"skipped,omitempty"`
	Published *Published `json:"published,omitempty"`
	Problem   string     `json:"problem,omitempty"`
	Removed   string     `json:"removed,omitempty"`
	Done      bool       `json:"done,omitempty"`
	Error     *Error     `json:"error,omitempty"`
}

// Progress counts what an operation has done so far.
type Progress struct {
	Objects int64 `json:"objects"`
	Bytes   int64 `json:"bytes"`
}

// Error is a child's failure in words. Input is set when repeating the operation
// cannot help, because what the user gave or made is wrong; Missing when a
// version that should be published is not there.
type Error struct {
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
	Input   bool   `json:"input,omitempty"`
	Missing bool   `json:"missing,omitempty"`
}

func (e *Error) Error() string { return e.Message }
