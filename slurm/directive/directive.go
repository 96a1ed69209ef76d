// Package directive reads the #SLUICE lines of job scripts.
package directive

import (
	"path"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/sluicehpc/sluice/internal/diag"
)

// Prefix begins a directive's line. Slurm is told of it as Directive=SLUICE.
const Prefix = "#SLUICE"

// Limits of Parse.
const (
	MaxScript     = 4 << 20 // bytes: Slurm's own default limit (max_script_size)
	MaxDirectives = 1000
	maxLine       = 8 << 10 // bytes of a directive's line
	maxErrors     = 100
)

// Pos is a place in a script: line and columns count from 1, columns in
// characters; EndColumn is the column after the last character.
type Pos struct {
	Line, Column, EndColumn int
}

// Place tells where a directive and its values stand.
type Place struct {
	Pos    // of the verb
	values map[string]Pos
}

// Of returns the place of a key's value, or the verb's if the key is not given.
func (p Place) Of(key string) Pos {
	if at, ok := p.values[key]; ok {
		return at
	}
	return p.Pos
}

// StageIn brings a bucket prefix onto the file system. Either Name or To is set.
type StageIn struct {
	Place
	Source         URL
	Name           string
	To             string // cleaned; relative to the job's directory, or absolute
	Match, Exclude []string
	Mode           string // shared, private
	Engine         string // auto, managed, direct
	Nodes          int    // 0: the engine decides
	AllowEmpty     bool
	FS             string // "": the default one
}

// Variable is the environment variable that holds the data's path in the job.
func (s StageIn) Variable() string { return DataVariable(s.DataName()) }

// DataName is Name, or the last element of To.
func (s StageIn) DataName() string {
	if s.Name != "" {
		return s.Name
	}
	return s.To[strings.LastIndexByte(s.To, '/')+1:]
}

// StageOut brings a path to a bucket prefix.
type StageOut struct {
	Place
	From string // cleaned; relative to the job's directory, or absolute
	To   URL
	On   string // success, failure, always
	Move bool
	FS   string
}

// Checkpoint keeps and exports the job's checkpoints.
type Checkpoint struct {
	Place
	Run         string // "": the job's name
	Dir         string // cleaned, "" for the run's directory itself
	Format      string
	Export      URL // zero: none
	ExportEvery Every
	KeepLast    int
	KeepEvery   int
	KeepBest    Best
	Signal      Signal
	FS          string
}

// Serve hands a run's checkpoint to a deployment.
type Serve struct {
	Place
	Deployment string
	Run        string // "": the job's name
	Checkpoint string // latest, best
}

// URL is a bucket prefix. Prefix is "" for the bucket's root, else it ends in '/'.
type URL struct {
	Bucket, Prefix string
}

func (u URL) String() string {
	if u == (URL{}) {
		return ""
	}
	return "gs://" + u.Bucket + "/" + u.Prefix
}

// Every is a number of steps or a time, or neither.
type Every struct {
	Steps int
	Time  time.Duration
}

// Best names a metric and which end of it is best (min or max).
type Best struct {
	Metric, Order string
}

// Signal is sent that many seconds before the job is stopped.
type Signal struct {
	Name    string // without SIG
	Seconds int
}

// Script is what the directives of a job script ask for, each kind in the
// script's order.
type Script struct {
	File        string
	StageIns    []StageIn
	StageOuts   []StageOut
	Checkpoints []Checkpoint
	Serves      []Serve

	raw   []raw
	lines map[int]string // text of the lines that hold directives
}

// raw is a directive before its values are understood.
type raw struct {
	verb  *verb
	at    Pos
	pairs []pair
}

type pair struct {
	key        *key
	value      string
	keyAt, val Pos
}

// Diagnostic makes an error that points at a place in s.
func (s Script) Diagnostic(at Pos, message, hint string) diag.Diagnostic {
	return diag.Diagnostic{
		File: s.File, Line: at.Line, Column: at.Column, EndColumn: at.EndColumn,
		Message: message, Hint: hint, Text: s.lines[at.Line],
	}
}

// Empty reports that the script asks for nothing.
func (s Script) Empty() bool { return len(s.raw) == 0 }

// DataVariable is the environment variable for staged data of that name:
// SLUICE_DATA_ and the name in upper case, other characters as '_'.
func DataVariable(name string) string {
	var b strings.Builder
	b.WriteString("SLUICE_DATA_")
	for _, r := range name {
		switch {
		case r >= 'a' && r <= 'z':
			b.WriteByte(byte(r - 'a' + 'A'))
		case r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
			b.WriteByte(byte(r))
		default:
			b.WriteByte('_')
		}
	}
	return b.String()
}

// String prints the directives so that parsing them again gives the same ones.
func (s Script) String() string {
	var b strings.Builder
	for _, r := range s.raw {
		b.WriteString(Prefix + " " + r.verb.name)
		for _, p := range r.pairs {
			b.WriteString(" " + p.key.name + "=" + quote(p.value))
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func quote(v string) string {
	if v != "" && !strings.ContainsAny(v, " \t\"'\\") && utf8.ValidString(v) {
		return v
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(v) + `"`
}

// Unsupported lists what the script asks for that the grammar knows and this
// version of the controller cannot serve.
func Unsupported(s Script) diag.List {
	const (
		message = " is not served by this version of the controller"
		hint    = "remove it, or ask the site's admin to update Sluice"
	)
	var list diag.List
	for _, r := range s.raw {
		if r.verb.unserved {
			list = append(list, s.Diagnostic(r.at, r.verb.name+message, hint))
			continue
		}
		for _, p := range r.pairs {
			switch {
			case p.key.unserved:
				list = append(list, s.Diagnostic(p.keyAt, p.key.name+"="+message, hint))
			case contains(p.key.unservedValues, p.value):
				list = append(list, s.Diagnostic(p.val, p.key.name+"="+p.value+message, hint))
			}
		}
	}
	return list
}

// Outside lists the absolute paths of s that lie below none of the roots,
// which are clean absolute paths.
func (s Script) Outside(roots []string) diag.List {
	var list diag.List
	for _, r := range s.raw {
		for _, p := range r.pairs {
			if p.key.kind != kindPath && p.key.kind != kindDir || !strings.HasPrefix(p.value, "/") || below(path.Clean(p.value), roots) {
				continue
			}
			hint := "write a path relative to the job's directory"
			if len(roots) > 0 {
				hint += ", or one below " + strings.Join(roots, ", ")
			}
			list = append(list, s.Diagnostic(p.val, p.key.name+"="+clip(p.value)+" lies outside the job's directory and the site's roots", hint))
		}
	}
	return list
}

func below(dir string, roots []string) bool {
	for _, r := range roots {
		if r == "/" || strings.HasPrefix(dir, r+"/") {
			return true
		}
	}
	return false
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}

// clip bounds a user's text in a message.
func clip(s string) string {
	const limit = 60
	if r := []rune(s); len(r) > limit {
		return string(r[:limit-3]) + "..."
	}
	return s
}
