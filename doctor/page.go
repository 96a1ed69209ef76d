package doctor

import (
	"fmt"
	"strings"
)

const pageHead = `# What has never run on the real cloud

<!-- Written by go test ./doctor -update from the table in doctor/table.go. -->

Each line is an assumption that the sandbox cannot prove, and what a person would type to prove or refute it. On a site's first day
` + "`sluice doctor --acceptance --bucket gs://B/P/`" + ` tries them all for real (see [doctor.md](doctor.md)); ` + "`--only ID`" + ` tries one.

| id | assumption | rests on it | by hand |
|---|---|---|---|
`

const pageTail = `
In the sandbox's own servers the following are guesses, on which no product code relies: Cloud Storage's ` + "`matchGlob`" + ` wants a literal ` + "`/`" + `
after ` + "`**/`" + `; a gap in a resumable upload answers 400; the operation of an instance whose insert was interrupted by a delete ends with
OPERATION_CANCELED_BY_USER; filters of Compute Engine bind OR tighter than AND; memory of a3-ultragpu, a4 and a4x machines.
`

// Page renders docs/unverified.md.
func Page() string {
	var b strings.Builder
	b.WriteString(pageHead)
	for _, p := range Proofs {
		by := p.Command
		if p.Prove == nil {
			by += " (no program can do it)"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", p.ID, cell(p.Assumption), cell(p.RestsOn), cell(by))
	}
	b.WriteString(pageTail)
	return b.String()
}

// cell keeps a bar from ending a table's cell.
func cell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }
