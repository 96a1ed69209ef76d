package directive

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sluicehpc/sluice/internal/diag"
)

// typed compares scripts by what they ask for, wherever it stands.
var typed = cmp.Options{cmpopts.IgnoreTypes(Place{}), cmpopts.IgnoreUnexported(Script{})}

func TestParse(t *testing.T) {
	in := StageIn{Source: URL{"corpus", "c4/"}, Name: "c4", Mode: "shared", Engine: "auto"}
	out := StageOut{From: "out", To: URL{"results", "run/"}, On: "success"}
	for _, test := range []struct {
		name, script string
		want         Script
	}{
		{"nothing", "#!/bin/bash\nsrun hostname\n", Script{}},
		{"both", "#!/bin/bash\n#SBATCH -N2\n#SLUICE stage_in source=gs://corpus/c4/ name=c4\n\n#SLUICE stage_out from=out to=gs://results/run/\nsrun x\n",
			Script{StageIns: []StageIn{in}, StageOuts: []StageOut{out}}},
		{"tabs and many blanks", "#SLUICE\tstage_in \t source=gs://corpus/c4/   name=c4\t", Script{StageIns: []StageIn{in}}},
		{"quoted", `#SLUICE stage_in source="gs://corpus/c4/" name="c4"`, Script{StageIns: []StageIn{in}}},
		{"escapes", `#SLUICE stage_out from="a \"b\" \\c" to=gs://results/run/`,
			Script{StageOuts: []StageOut{{From: `a "b" \c`, To: URL{"results", "run/"}, On: "success"}}}},
		{"comment", "#SLUICE stage_in source=gs://corpus/c4/ name=c4 # mode=private\"", Script{StageIns: []StageIn{in}}},
		{"hash inside a word is no comment", "#SLUICE stage_out from=out#1 to=gs://results/run/",
			Script{StageOuts: []StageOut{{From: "out#1", To: URL{"results", "run/"}, On: "success"}}}},
		{"CRLF", "#!/bin/bash\r\n\r\n#SLUICE stage_in source=gs://corpus/c4/ name=c4\r\nx\r\n", Script{StageIns: []StageIn{in}}},
		{"byte order mark", "\ufeff#SLUICE stage_in source=gs://corpus/c4/ name=c4", Script{StageIns: []StageIn{in}}},
		{"continued", "#SLUICE stage_in \\\n#SLUICE source=gs://corpus/c4/ \\\n#SLUICE   name=c4", Script{StageIns: []StageIn{in}}},
		{"continued with CRLF", "#SLUICE stage_in \\\r\n#SLUICE source=gs://corpus/c4/ name=c4\r\n", Script{StageIns: []StageIn{in}}},
		{"continued after a comment", "#SLUICE stage_in # what \\\n#SLUICE source=gs://corpus/c4/ name=c4", Script{StageIns: []StageIn{in}}},
		{"continued within a value", "#SLUICE stage_in source=gs://corpus/c4/\\\n#SLUICE name=c4", Script{StageIns: []StageIn{in}}},
		{"other words with the same beginning", "#SLUICEFOO x\n#SLUICED\n#SLUICE-x\n# SLUICE y\n##SLUICE z\n", Script{}},
		{"bucket's root", "#SLUICE stage_in source=gs://corpus/ name=all",
			Script{StageIns: []StageIn{{Source: URL{"corpus", ""}, Name: "all", Mode: "shared", Engine: "auto"}}}},
		{"all of stage_in", "#SLUICE stage_in source=gs://my.bucket_1/a/ to=data/./x/ match=**.txt match=*.md exclude={a,b}/* mode=private engine=direct nodes=4 allow_empty=yes fs=scratch",
			Script{StageIns: []StageIn{{Source: URL{"my.bucket_1", "a/"}, To: "data/x", Match: []string{"**.txt", "*.md"}, Exclude: []string{"{a,b}/*"},
				Mode: "private", Engine: "direct", Nodes: 4, AllowEmpty: true, FS: "scratch"}}}},
		{"all of stage_out", "#SLUICE stage_out from=. to=gs://results/ on=always move=yes fs=s",
			Script{StageOuts: []StageOut{{From: ".", To: URL{"results", ""}, On: "always", Move: true, FS: "s"}}}},
		{"checkpoint", "#SLUICE checkpoint run=r-%a dir=ck format=dcp export=gs://results/ck/ export_every=2h30m keep_last=3 keep_every=1000 keep_best=loss:min signal=SIGUSR1@120",
			Script{Checkpoints: []Checkpoint{{Run: "r-%a", Dir: "ck", Format: "dcp", Export: URL{"results", "ck/"}, ExportEvery: Every{Time: 150 * time.Minute},
				KeepLast: 3, KeepEvery: 1000, KeepBest: Best{"loss", "min"}, Signal: Signal{"USR1", 120}}}}},
		{"checkpoint with defaults", "#SLUICE checkpoint export_every=1d", Script{Checkpoints: []Checkpoint{{Format: "auto", ExportEvery: Every{Time: 24 * time.Hour}}}}},
		{"steps", "#SLUICE checkpoint export_every=500", Script{Checkpoints: []Checkpoint{{Format: "auto", ExportEvery: Every{Steps: 500}}}}},
		{"serve", "#SLUICE serve deployment=chat run=r checkpoint=best", Script{Serves: []Serve{{Deployment: "chat", Run: "r", Checkpoint: "best"}}}},
		{"symbols and percent signs", "#SLUICE stage_out from=%x/%4j to=gs://results/%u/%A_%a/100%%/",
			Script{StageOuts: []StageOut{{From: "%x/%4j", To: URL{"results", "%u/%A_%a/100%%/"}, On: "success"}}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Parse("job.sh", []byte(test.script))
			if err != nil {
				t.Fatal(err)
			}
			test.want.File = "job.sh"
			if diff := cmp.Diff(test.want, got, typed); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

const (
	goodIn  = "#SLUICE stage_in source=gs://corpus/c4/ name=c4"
	goodOut = "#SLUICE stage_out from=out to=gs://results/run/"
)

func TestParseErrors(t *testing.T) {
	for _, test := range []struct {
		name, script string
		want         []string // line:column-end: message [hint]
	}{
		{"unknown verb", "#!/bin/sh\n\n#SLUICE stage_im source=gs://corpus/ name=c4",
			[]string{`3:9-17: unknown verb "stage_im" [did you mean stage_in?]`}},
		{"unknown verb unlike any", "#SLUICE frobnicate", []string{`1:9-19: unknown verb "frobnicate" [verbs: stage_in, stage_out, checkpoint, serve]`}},
		{"verb in capitals", "#SLUICE STAGE_IN", []string{`1:9-17: unknown verb "STAGE_IN" [did you mean stage_in?]`}},
		{"no verb", "#SLUICE", []string{`1:1-8: directive without a verb [verbs: stage_in, stage_out, checkpoint, serve]`}},
		{"key instead of a verb", "#SLUICE source=gs://corpus/", []string{`1:9-15: directive begins with the key "source", not with a verb [write a verb after #SLUICE: stage_in, stage_out, checkpoint, serve]`}},
		{"no blank", "#SLUICEstage_in source=gs://corpus/", []string{`1:1-16: no blank after #SLUICE [write #SLUICE stage_in]`}},
		{"unknown key", goodIn + " enigne=auto", []string{`1:49-55: unknown key "enigne" of stage_in [did you mean engine?]`}},
		{"unknown key unlike any", goodOut + " colour=red", []string{`1:49-55: unknown key "colour" of stage_out [keys of stage_out: from, to, on, move, fs]`}},
		{"no equals sign", goodIn + " mode", []string{`1:49-53: "mode" is not key=value [did you mean mode?]`}},
		{"missing key", "#SLUICE stage_out from=out", []string{`1:9-18: missing key: stage_out needs to= [add to=gs://BUCKET/PREFIX/]`}},
		{"missing keys", "#SLUICE stage_in", []string{
			`1:9-17: missing key: stage_in needs source= [add source=gs://BUCKET/PREFIX/]`,
			`1:9-17: missing key: stage_in needs name= or to= [add name=NAME]`}},
		{"duplicate key", goodIn + " name=d4", []string{`1:49-53: duplicate key "name", first given in line 1, column 41 []`}},
		{"excluding keys", goodIn + " to=data", []string{`1:49-51: name= and to= exclude each other [remove one of them]`}},
		{"empty value", "#SLUICE stage_in source=gs://corpus/ name=", []string{`1:43-44: name= has an empty value [write name=NAME]`}},
		{"quote in a bare value", `#SLUICE stage_in source=gs://corpus/ name=c"4"`, []string{`1:44-45: stray quote [put a value with blanks or quotes whole in double quotes; inside them write \" for a quote]`}},
		{"single quotes", `#SLUICE stage_in source=gs://corpus/ name='c4'`, []string{`1:43-44: stray quote [put a value with blanks or quotes whole in double quotes; inside them write \" for a quote]`}},
		{"quote not closed", `#SLUICE stage_in source=gs://corpus/ name="c4 mode=shared`, []string{`1:43-44: stray quote: it is never closed [end the value with a double quote on the same line]`}},
		{"text after a quote", `#SLUICE stage_in source=gs://corpus/ name="c4"x mode=shared`, []string{`1:46-47: stray quote [a blank follows the closing quote; inside quotes write \" for a quote]`}},
		{"quote before the key", `#SLUICE stage_in source=gs://corpus/ "name=c4"`, []string{`1:38-39: stray quote [quotes go around a whole value: key="value"]`}},
		{"escape", `#SLUICE stage_in source=gs://corpus/ name="c\n4"`, []string{`1:45-47: backslash before neither a quote nor a backslash [inside quotes write \\ for a backslash and \" for a quote]`}},
		{"stray backslash", `#SLUICE stage_in \ source=gs://corpus/ name=c4`, []string{`1:18-19: stray backslash [a line is continued by a backslash at its very end]`}},
		{"continued into nothing", goodIn + " \\\nsrun x", []string{`1:49-50: directive is continued, but the next line does not begin with #SLUICE [begin the next line with #SLUICE, or remove the backslash]`}},
		{"continued at the end", goodIn + " \\", []string{`1:49-50: directive is continued, but the next line does not begin with #SLUICE [begin the next line with #SLUICE, or remove the backslash]`}},
		{"error in a continued line", "#SLUICE stage_in source=gs://corpus/ \\\n#SLUICE nam=c4", []string{`2:9-12: unknown key "nam" of stage_in [did you mean name?]`}},
		{"below the first command", "#!/bin/sh\n" + goodIn + "\nsrun x\n" + goodOut, []string{`4:1-8: directive below the script's first command (line 3), where Slurm ignores it [move it above line 3]`}},
		{"below a line of blanks", goodIn + "\n \n" + goodOut, []string{`3:1-8: directive below the script's first command (line 2), where Slurm ignores it [move it above line 2]`}},
		{"columns count characters", "#SLUICE stage_out from=größe to=gs://results/é", []string{`1:33-47: to=gs://results/é does not end in / [write gs://results/é/]`}},
		{"choice", goodIn + " mode=privat", []string{`1:54-60: mode=privat is not one of shared, private [did you mean private?]`}},
		{"count", goodIn + " nodes=0", []string{`1:55-56: nodes=0 is not a whole number from 1 to 1000000000 []`}},
		{"name", "#SLUICE stage_in source=gs://corpus/ name=c4/en", []string{`1:43-48: name=c4/en is not a name [a name is a letter or digit, then up to 62 letters, digits, '_' and '-']`}},
		{"no bucket", "#SLUICE stage_in source=gs:///c4/ name=c4", []string{`1:25-34: source=gs:///c4/ has no bucket [write gs://BUCKET/PREFIX/]`}},
		{"scheme alone", "#SLUICE stage_in source=gs:// name=c4", []string{`1:25-30: source=gs:// has no bucket [write gs://BUCKET/PREFIX/]`}},
		{"other scheme", "#SLUICE stage_in source=s3://corpus/ name=c4", []string{`1:25-37: source=s3://corpus/ is not a gs:// URL [write gs://BUCKET/PREFIX/]`}},
		{"bucket in capitals", "#SLUICE stage_in source=gs://Corpus/ name=c4", []string{`1:25-37: source=gs://Corpus/ names the bucket "Corpus", which cannot exist [bucket names have 3 to 63 lower-case letters, digits, '-', '_' and '.', and begin and end with a letter or digit]`}},
		{"bucket like an address", "#SLUICE stage_in source=gs://10.0.0.1/ name=c4", []string{`1:25-39: source=gs://10.0.0.1/ names a bucket that looks like an address [bucket names have 3 to 63 lower-case letters, digits, '-', '_' and '.', and begin and end with a letter or digit]`}},
		{"no final slash", "#SLUICE stage_in source=gs://corpus name=c4", []string{`1:25-36: source=gs://corpus does not end in / [write gs://corpus/]`}},
		{"pattern", "#SLUICE stage_in source=gs://corpus/*.txt name=c4", []string{`1:25-42: source=gs://corpus/*.txt is a pattern, not a prefix [name the prefix, which ends in /, and choose objects with match=]`}},
		{"dots in a prefix", "#SLUICE stage_in source=gs://corpus/../x/ name=c4", []string{`1:25-42: source=gs://corpus/../x/ has a .. in its prefix [write the prefix out]`}},
		{"dots in a path", "#SLUICE stage_out from=a/../../b to=gs://results/", []string{`1:24-33: from=a/../../b leads out of its directory by .. [write the path without ..]`}},
		{"no directory", "#SLUICE stage_in source=gs://corpus/ to=.", []string{`1:41-42: to=. names no directory [write a name at the end of the path]`}},
		{"control character", "#SLUICE stage_out from=a\x07b to=gs://results/", []string{`1:25-26: directive contains the control character '\a' []`}},
		{"NUL", "#SLUICE stage_out from=a\x00b to=gs://results/", []string{`1:25-26: directive contains the control character '\x00' []`}},
		{"not UTF-8", "#SLUICE stage_out from=a\xffb to=gs://results/", []string{`1:25-26: directive is not UTF-8 text []`}},
		{"unknown symbol", "#SLUICE stage_out from=%z to=gs://results/", []string{`1:24-26: unknown symbol "%z" in from= [symbols: %j %A %a %u %x; write %% for a percent sign]`}},
		{"Slurm's own word", "#SLUICE stage_out from=capacity=5 to=gs://results/", []string{`1:24-34: from= contains "capacity=", which Slurm would read as a request for a burst buffer pool [choose another name]`}},
		{"same variable", goodIn + "\n#SLUICE stage_in source=gs://corpus/d/ to=x/C4", []string{`2:43-47: SLUICE_DATA_C4 is already the variable of the data in line 1 [choose another name]`}},
		{"same destination", goodOut + "\n#SLUICE stage_out from=b to=gs://results/run/ on=failure", []string{`2:29-46: gs://results/run/ is already the destination of line 1 [give each stage_out a destination of its own]`}},
		{"several, in order", "#SLUICE stage_out on=sucess from=out\n#SLUICE stage_in source=gs://corpus name=..\n#SLUICE foo", []string{
			`1:22-28: on=sucess is not one of success, failure, always [did you mean success?]`,
			`2:25-36: source=gs://corpus does not end in / [write gs://corpus/]`,
			`2:42-44: name=.. is not a name [a name is a letter or digit, then up to 62 letters, digits, '_' and '-']`,
			`3:9-12: unknown verb "foo" [verbs: stage_in, stage_out, checkpoint, serve]`}},
		{"glob", goodIn + " match=a[b", []string{`1:55-58: match=a[b has a bracket that is not closed []`}},
		{"best", "#SLUICE checkpoint keep_best=loss", []string{`1:30-34: keep_best=loss is not METRIC:min or METRIC:max [for example loss:min]`}},
		{"signal", "#SLUICE checkpoint signal=USR3@60", []string{`1:27-34: signal=USR3@60 is not SIG@SECONDS [for example USR1@120; signals: HUP, INT, QUIT, USR1, USR2, TERM, CONT, URG, XCPU]`}},
		{"every", "#SLUICE checkpoint export_every=often", []string{`1:33-38: export_every=often is neither a number of steps nor a duration [write 500 for steps, or 30m, 2h, 1d]`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := Parse("job.sh", []byte(test.script))
			var list diag.List
			if !errors.As(err, &list) {
				t.Fatalf("error %v is no diag.List", err)
			}
			var got []string
			for _, d := range list {
				got = append(got, fmt.Sprintf("%d:%d-%d: %s [%s]", d.Line, d.Column, d.EndColumn, d.Message, d.Hint))
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestPicture(t *testing.T) {
	_, err := Parse("train.sh", []byte("#!/bin/sh\n\n#SLUICE stage_im source=gs://corpus/ name=c4\n"))
	want := `train.sh:3:9: unknown verb "stage_im"
   3 | #SLUICE stage_im source=gs://corpus/ name=c4
     |         ^^^^^^^^
  did you mean stage_in?`
	if err == nil || err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
}

func TestLimits(t *testing.T) {
	if _, err := Parse("x", make([]byte, MaxScript+1)); err == nil || !strings.Contains(err.Error(), "longer than 4 MiB") {
		t.Errorf("a script that is too long: %v", err)
	}
	var b strings.Builder
	for i := range MaxDirectives {
		fmt.Fprintf(&b, "#SLUICE stage_in source=gs://corpus/ name=d%d\n", i)
	}
	if s, err := Parse("x", []byte(b.String())); err != nil || len(s.StageIns) != MaxDirectives {
		t.Errorf("%d directives: %v", MaxDirectives, err)
	}
	b.WriteString(goodOut)
	if _, err := Parse("x", []byte(b.String())); err == nil || !strings.Contains(err.Error(), "more than 1000 directives") {
		t.Errorf("one more: %v", err)
	}
	if _, err := Parse("x", []byte(goodOut+strings.Repeat(" ", maxLine))); err == nil || !strings.Contains(err.Error(), "line is longer") {
		t.Errorf("a long line: %v", err)
	}
	_, err := Parse("x", []byte(strings.Repeat("#SLUICE x\n", 2000)))
	if n := len(err.(diag.List)); n != maxErrors {
		t.Errorf("%d errors, want %d", n, maxErrors)
	}
}

func TestExpand(t *testing.T) {
	script := "#SLUICE stage_out from=%x/%4j-%A-%a to=gs://results/%u/100%%/"
	s, err := Parse("job.sh", []byte(script))
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name    string
		symbols Symbols
		from    string
		wantErr string
	}{
		{"plain job", Symbols{JobID: 7, User: "alice", JobName: "train"}, "train/0007-7-4294967294", ""},
		{"array task", Symbols{JobID: 9, ArrayJobID: 7, ArrayTaskID: 0, User: "alice", JobName: "my job"}, "my job/0009-7-0", ""},
		{"hostile name", Symbols{JobID: 7, User: "alice", JobName: "../../etc"}, "", "job.sh:1:24: from=../../etc/0007-7-4294967294 leads out of its directory by .."},
		{"control character in a name", Symbols{JobID: 7, User: "alice", JobName: "a\nb"}, "", "contains a control character"},
		{"symbols in symbols stay", Symbols{JobID: 7, User: "alice", JobName: "%u"}, "%u/0007-7-4294967294", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := s.Expand(test.symbols)
			if test.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), test.wantErr) {
					t.Fatalf("error %v, want %q", err, test.wantErr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			want := []StageOut{{From: test.from, To: URL{"results", "alice/100%/"}, On: "success"}}
			if diff := cmp.Diff(want, got.StageOuts, typed); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	two, err := Parse("job.sh", []byte("#SLUICE stage_in source=gs://corpus/ name=a-%j\n#SLUICE stage_in source=gs://corpus/ name=a-7"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := two.Expand(Symbols{JobID: 7}); err == nil || !strings.Contains(err.Error(), "SLUICE_DATA_A_7 is already") {
		t.Errorf("names that become equal: %v", err)
	}
}

func TestOutside(t *testing.T) {
	s, err := Parse("job.sh", []byte("#SLUICE stage_out from=/lustre/shared/x to=gs://results/\n#SLUICE stage_in source=gs://corpus/ to=/etc/x\n#SLUICE stage_in source=gs://corpus/ to=/lustre/sharedx/y"))
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		roots []string
		want  []int // lines
	}{{nil, []int{1, 2, 3}}, {[]string{"/lustre/shared"}, []int{2, 3}}, {[]string{"/"}, nil}} {
		var got []int
		for _, d := range s.Outside(test.roots) {
			got = append(got, d.Line)
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("roots %v (-want +got):\n%s", test.roots, diff)
		}
	}
}

func TestUnsupported(t *testing.T) {
	s, err := Parse("job.sh", []byte(goodIn+" match=* engine=direct\n"+goodOut+"\n#SLUICE checkpoint\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"job.sh:1:49: match= is not served by this version of the controller",
		"job.sh:1:64: engine=direct is not served by this version of the controller",
		"job.sh:3:9: checkpoint is not served by this version of the controller",
	}
	var got []string
	for _, d := range Unsupported(s) {
		got = append(got, d.Short())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestPlace(t *testing.T) {
	s, err := Parse("job.sh", []byte("#!/bin/sh\n"+goodIn))
	if err != nil {
		t.Fatal(err)
	}
	in := s.StageIns[0]
	want := "job.sh:2:25: bucket corpus does not exist\n   2 | " + goodIn + "\n     |                         ^^^^^^^^^^^^^^^\n  look"
	if got := s.Diagnostic(in.Of("source"), "bucket corpus does not exist", "look").Error(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if in.Of("mode") != in.Pos {
		t.Errorf("a key that is not given stands at %v, want the verb's place", in.Of("mode"))
	}
}

func TestDataVariable(t *testing.T) {
	for name, want := range map[string]string{"c4": "SLUICE_DATA_C4", "my-data_2": "SLUICE_DATA_MY_DATA_2", "größe": "SLUICE_DATA_GR__E"} {
		if got := DataVariable(name); got != want {
			t.Errorf("DataVariable(%q) = %q, want %q", name, got, want)
		}
	}
}

func TestReferenceNamesEverything(t *testing.T) {
	ref := Reference()
	for _, v := range verbs {
		for _, k := range v.keys {
			if !strings.Contains(ref, "| `"+k.name+"` |") {
				t.Errorf("%s of %s is not in the reference", k.name, v.name)
			}
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("#!/bin/sh\n" + goodIn + " mode=shared \\\n#SLUICE nodes=4 # x\n" + goodOut + "\nsrun x\n")
	f.Add("#SLUICE stage_out from=\"a \\\"b\\\\\" to=gs://results/%u/%%/ on=\"always\"")
	f.Add("#SLUICE checkpoint run=r-%a export_every=1d2h keep_best=loss:min signal=USR1@60")
	f.Add("#SLUICE\tserve deployment=x 'run=y' \xff")
	f.Add("#SLUICE \\\r\n#SLUICE \\")
	f.Fuzz(func(t *testing.T, script string) {
		s, err := Parse("f", []byte(script))
		if err != nil {
			list := err.(diag.List)
			lines := strings.Split(strings.TrimPrefix(script, "\ufeff"), "\n")
			for _, d := range list {
				if d.Message == "" || d.Line < 1 || d.Line > len(lines) {
					t.Fatalf("error %+v in a script of %d lines", d, len(lines))
				}
				end := utf8.RuneCountInString(lines[d.Line-1]) + 1
				if d.Column < 1 || d.Column > end || d.EndColumn < d.Column || d.EndColumn > end+1 {
					t.Fatalf("error %+v in a line of %d characters: %q", d, end-1, lines[d.Line-1])
				}
				_ = d.Error()
			}
			return
		}
		again, err := Parse("f", []byte(s.String()))
		if err != nil {
			t.Fatalf("%q is printed as %q, which is wrong: %v", script, s.String(), err)
		}
		if diff := cmp.Diff(s, again, typed); diff != "" {
			t.Errorf("%q is printed as %q (-first +again):\n%s", script, s.String(), diff)
		}
		if e, err := s.Expand(Symbols{JobID: 1, ArrayJobID: 2, ArrayTaskID: 3, User: "u", JobName: "n"}); err == nil {
			for _, in := range e.StageIns {
				if in.Source.Bucket == "" || in.DataName() == "" {
					t.Errorf("%q expands to %+v", script, in)
				}
			}
		}
	})
}

func FuzzDuration(f *testing.F) {
	for _, s := range []string{"1d", "1d12h", "90s", "0s", "-1h", "1d-1h", "99999d", "3650d"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		d, err := parseDuration(s)
		if err == nil && (d <= 0 || d > 3650*24*time.Hour) {
			t.Errorf("parseDuration(%q) = %v", s, d)
		}
	})
}
