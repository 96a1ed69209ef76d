package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/sluicehpc/sluice/api"
	"github.com/sluicehpc/sluice/internal/diag"
	"github.com/sluicehpc/sluice/slurm/directive"
	"github.com/sluicehpc/sluice/staging"
	"github.com/sluicehpc/sluice/staging/files"
)

// scriptName stands for the job's script in messages where Slurm does not tell its name.
const scriptName = "script"

const rootRefused = "root may not submit jobs with #SLUICE lines: submit as the user whom the data is for"

// parse reads a script and judges what needs no cloud: syntax, what this
// version serves, roots and file systems.
func (c *Controller) parse(file, script string) (directive.Script, error) {
	s, err := directive.Parse(cmp.Or(file, scriptName), []byte(script))
	if err != nil {
		return s, err
	}
	return s, c.judge(s).Err()
}

// judge is parse's half for a parsed script, symbols replaced or not.
func (c *Controller) judge(s directive.Script) diag.List {
	list := directive.Unsupported(s)
	outside := s.Outside(c.Config.Roots)
	list = append(list, outside...)
	seen := map[directive.Pos]bool{}
	for _, d := range outside {
		seen[directive.Pos{Line: d.Line, Column: d.Column, EndColumn: d.EndColumn}] = true
	}
	absolute := func(at directive.Pos, key, value string) {
		if strings.HasPrefix(value, "/") && !seen[at] {
			list = append(list, s.Diagnostic(at, key+"="+value+" is absolute, which this version of the controller does not serve",
				"write a path relative to the job's directory"))
		}
	}
	fs := func(at directive.Pos, name string) {
		if _, ok := c.Config.FileSystem(name); ok {
			return
		}
		var names []string
		for _, fs := range c.Config.FileSystems {
			names = append(names, fs.Name)
		}
		hint := "file systems here: " + strings.Join(names, ", ")
		if near := diag.Nearest(name, names); near != "" {
			hint = "did you mean " + near + "?"
		}
		list = append(list, s.Diagnostic(at, "this cluster has no file system "+name, hint))
	}
	for _, in := range s.StageIns {
		absolute(in.Of("to"), "to", in.To)
		fs(in.Of("fs"), in.FS)
	}
	for _, out := range s.StageOuts {
		absolute(out.Of("from"), "from", out.From)
		fs(out.Of("fs"), out.FS)
	}
	return list
}

// bucketDiagnostic says what is wrong with a place that policy grants. ok is
// false when err is no verdict.
func bucketDiagnostic(s directive.Script, g grant, err error) (d diag.Diagnostic, ok bool) {
	var e *staging.Error
	if !errors.As(staging.BucketError(g.Place, err), &e) {
		return diag.Diagnostic{}, false
	}
	return s.Diagnostic(g.at, e.Message, e.Hint), true
}

// jobProcess judges a script from memory: slurmctld stands still meanwhile.
func (c *Controller) jobProcess(_ context.Context, in api.JobProcess) (any, error) {
	if in.HasUID && in.UID == 0 {
		return api.Verdict{Errors: []string{rootRefused}}, nil
	}
	var v api.Verdict
	s, err := c.parse(in.File, in.Script)
	if err != nil {
		v.Errors = errorTexts(err)
		return v, nil
	}
	grants, unknown, refused := c.permitEarly(in, s)
	for _, d := range refused {
		v.Errors = append(v.Errors, d.Error())
	}
	for _, g := range grants {
		err, known := c.buckets.remembered(g.Place)
		if d, ok := bucketDiagnostic(s, g, err); known && err != nil && ok {
			v.Errors = append(v.Errors, d.Error())
		}
		if !known || err != nil {
			c.buckets.refresh(c.ctx, &c.wg, g.Place)
		}
		if !known {
			unknown = append(unknown, g.ask)
		}
	}
	for _, a := range unknown {
		v.Notices = append(v.Notices, a.url.String()+" is checked before the job's data is staged")
	}
	return v, nil
}

func errorTexts(err error) []string {
	var list diag.List
	if !errors.As(err, &list) {
		return []string{err.Error()}
	}
	texts := make([]string, len(list))
	for i, d := range list {
		texts[i] = d.Error()
	}
	return texts
}

// firstError is the first of a script's errors for a place of one line: Slurm's Reason.
func firstError(err error) *api.Error {
	var list diag.List
	if errors.As(err, &list) && len(list) > 0 {
		e := &api.Error{Code: api.CodeBadRequest, Message: files.Shorten(list[0].Short()), Hint: list[0].Hint}
		if more := len(list) - 1; more > 0 {
			e.Hint = fmt.Sprintf("%s (and %d more)", e.Hint, more)
		}
		return e
	}
	return &api.Error{Code: api.CodeBadRequest, Message: files.Shorten(err.Error())}
}
