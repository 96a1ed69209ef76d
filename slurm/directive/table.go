package directive

import (
	"fmt"
	"strings"
)

// kind is the grammar of a value.
type kind int

const (
	kindPrefix kind = iota // gs://BUCKET/PREFIX/
	kindName               // [A-Za-z0-9][A-Za-z0-9_-]{0,62}
	kindPath               // a path without ..
	kindDir                // a path whose last element becomes a name
	kindGlob               // Cloud Storage's matchGlob
	kindChoice             // one of values
	kindCount              // 1 to maxCount
	kindEvery              // a number of steps or a duration
	kindBest               // METRIC:min or METRIC:max
	kindSignal             // SIG@SECONDS
)

// shapes shows a value of each kind in hints and in the reference.
var shapes = map[kind]string{
	kindPrefix: "gs://BUCKET/PREFIX/",
	kindName:   "NAME",
	kindPath:   "PATH",
	kindDir:    "PATH",
	kindGlob:   "GLOB",
	kindCount:  "N",
	kindEvery:  "N|DURATION",
	kindBest:   "METRIC:min|max",
	kindSignal: "SIG@SECONDS",
}

// key is one key of a verb.
type key struct {
	name     string
	doc      string
	kind     kind
	values   []string // of a kindChoice, the default first
	required bool
	repeat   bool // may be given more than once
	// unserved marks a key that this version parses and cannot serve;
	// unservedValues marks single values of a kindChoice.
	unserved       bool
	unservedValues []string
}

func (k *key) shape() string {
	if k.kind == kindChoice {
		return strings.Join(k.values, "|")
	}
	return shapes[k.kind]
}

// verb is one verb. Exactly one key of either must be given, when it names any.
type verb struct {
	name     string
	doc      string
	keys     []key
	either   []string
	unserved bool
}

var (
	yesNo = []string{"no", "yes"}
	fsKey = key{name: "fs", kind: kindName, doc: "the file system, where the cluster has several"}
)

// verbs is the grammar: the parser, its hints and the reference follow it.
var verbs = []verb{
	{
		name: "stage_in", doc: "bring a bucket prefix onto the fast file system while the job is pending",
		either: []string{"name", "to"},
		keys: []key{
			{name: "source", kind: kindPrefix, required: true, doc: "what to bring"},
			{name: "name", kind: kindName, doc: "the data's name: SLUICE_DATA_<NAME> holds its path in the job"},
			{name: "to", kind: kindDir, doc: "where to put it; a relative path starts at the job's directory, and its last element is the data's name"},
			{name: "match", kind: kindGlob, repeat: true, unserved: true, doc: "only objects whose name below the prefix matches"},
			{name: "exclude", kind: kindGlob, repeat: true, unserved: true, doc: "no objects whose name below the prefix matches"},
			{name: "mode", kind: kindChoice, values: []string{"shared", "private"}, unservedValues: []string{"private"}, doc: "a read-only copy that jobs share, or a writable one in the job's directory"},
			{name: "engine", kind: kindChoice, values: []string{"auto", "managed", "direct"}, unservedValues: []string{"direct"}, doc: "who moves the bytes"},
			{name: "nodes", kind: kindCount, unserved: true, doc: "how many mover nodes the direct engine uses"},
			{name: "allow_empty", kind: kindChoice, values: yesNo, doc: "whether a prefix without objects is fine"},
			fsKey,
		},
	},
	{
		name: "stage_out", doc: "bring results to a bucket when the job has ended, after its nodes are free",
		keys: []key{
			{name: "from", kind: kindPath, required: true, doc: "what to bring; a relative path starts at the job's directory"},
			{name: "to", kind: kindPrefix, required: true, doc: "where to put it"},
			{name: "on", kind: kindChoice, values: []string{"success", "failure", "always"}, doc: "after which end of the job"},
			{name: "move", kind: kindChoice, values: yesNo, doc: "whether the files are deleted once their copies are verified"},
			fsKey,
		},
	},
	{
		name: "checkpoint", doc: "keep and export the checkpoints that the job writes", unserved: true,
		keys: []key{
			{name: "run", kind: kindName, doc: "the training's name over many jobs; by default the job's name"},
			{name: "dir", kind: kindPath, doc: "where they are written; a relative path starts at the run's directory"},
			{name: "format", kind: kindChoice, values: []string{"auto", "dcp", "megatron", "deepspeed", "orbax", "hf", "lightning", "nemo", "safetensors"}, doc: "what a complete checkpoint looks like"},
			{name: "export", kind: kindPrefix, doc: "where complete checkpoints are copied to"},
			{name: "export_every", kind: kindEvery, doc: "export one checkpoint every N steps or every so often"},
			{name: "keep_last", kind: kindCount, doc: "how many of the newest stay"},
			{name: "keep_every", kind: kindCount, doc: "every so many steps, one stays"},
			{name: "keep_best", kind: kindBest, doc: "the best one by this metric stays"},
			{name: "signal", kind: kindSignal, doc: "ask the job for a checkpoint before it is stopped"},
			fsKey,
		},
	},
	{
		name: "serve", doc: "hand the run's checkpoint to a deployment when the job has succeeded", unserved: true,
		keys: []key{
			{name: "deployment", kind: kindName, required: true, doc: "which deployment"},
			{name: "run", kind: kindName, doc: "whose checkpoints; by default the job's name"},
			{name: "checkpoint", kind: kindChoice, values: []string{"latest", "best"}, doc: "which one"},
		},
	},
}

func verbNamed(name string) *verb {
	for i := range verbs {
		if verbs[i].name == name {
			return &verbs[i]
		}
	}
	return nil
}

func (v *verb) key(name string) *key {
	for i := range v.keys {
		if v.keys[i].name == name {
			return &v.keys[i]
		}
	}
	return nil
}

func verbNames() []string {
	names := make([]string, len(verbs))
	for i, v := range verbs {
		names[i] = v.name
	}
	return names
}

func (v *verb) keyNames() []string {
	names := make([]string, len(v.keys))
	for i, k := range v.keys {
		names[i] = k.name
	}
	return names
}

// Reference is the grammar's table of verbs and keys in Markdown, for the
// user's documentation.
func Reference() string {
	var b strings.Builder
	for i, v := range verbs {
		if i > 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "### %s\n%s%s.%s\n\n| key | value | |\n|---|---|---|\n", v.name, strings.ToUpper(v.doc[:1]), v.doc[1:], later(v.unserved))
		for _, k := range v.keys {
			notes := k.doc
			if k.required {
				notes += " (required)"
			}
			if k.repeat {
				notes += " (may be repeated)"
			}
			notes += later(k.unserved)
			if len(k.unservedValues) > 0 {
				notes += " `" + strings.Join(k.unservedValues, "`, `") + "`:" + later(true)
			}
			fmt.Fprintf(&b, "| `%s` | `%s` | %s |\n", k.name, strings.ReplaceAll(k.shape(), "|", `\|`), notes)
		}
		if len(v.either) > 0 {
			fmt.Fprintf(&b, "\nExactly one of `%s` is required.\n", strings.Join(v.either, "` and `"))
		}
	}
	return b.String()
}

func later(unserved bool) string {
	if unserved {
		return " *Not served by this version.*"
	}
	return ""
}
