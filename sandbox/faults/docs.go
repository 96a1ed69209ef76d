package faults

import (
	"fmt"
	"slices"
	"strings"
)

// Markdown is the page docs/faults.md.
func Markdown() string {
	var b strings.Builder
	b.WriteString(`# The sandbox's faults

<!-- Made from sandbox/faults/table.go: go test ./sandbox/faults -update -->

A fault is a key with a value, set in a running sandbox:

` + "```bash" + `
sluice sandbox fault set api.compute.status=503,count=5 compute.stockout.us-central1-a=on
sluice sandbox fault list
sluice sandbox fault log
sluice sandbox fault clear api.compute.status     # without a key: all
` + "```" + `

Words in capitals in a key stand for a name, of which ` + "`*`" + ` may be a part or all; what stands in brackets may be left out and
then means all. Where several faults fit, the one with the longest key acts.

| key | value | what happens | example |
|---|---|---|---|
`)
	for _, k := range table {
		fmt.Fprintf(&b, "| `%s` | `%s`%s | %s | `%s` |\n", k.Name, strings.ReplaceAll(k.Value, "|", `\|`), footnote(k), k.Effect, k.Example)
	}
	b.WriteString("\n¹ may be followed by")
	for i, m := range Modifiers() {
		if i > 0 {
			b.WriteString(",")
		}
		fmt.Fprintf(&b, " `,%s` (%s)", m[0], m[1])
	}
	b.WriteString(`. ² by ` + "`,count=N` and `,for=DURATION`" + `. ³ by ` + "`,for=DURATION`" + `.

What is random (p, ranges) comes from generators that one seed starts. ` + "`fault list` and `fault log`" + ` show it, ` + "`seed=N`" + ` sets it. A fault
draws its numbers in the order of its occasions, so the same seed and the same order of calls give the same faults. The journal
(` + "`fault log`" + `) has every fault that was done, with its time, request and what was done.

## Methods

`)
	for _, s := range Services() {
		fmt.Fprintf(&b, "- %s: %s\n", s, strings.Join(Methods(s), ", "))
	}
	return b.String()
}

func footnote(k Key) string {
	switch len(k.Modifiers) {
	case len(occasions):
		return " ¹"
	case len(events):
		return " ²"
	case len(levels):
		return " ³"
	}
	return ""
}

// Complete lists what a key may begin with, for a shell's completion: whole keys end in =.
func Complete() []string {
	var all []string
	for _, k := range table {
		names := []string{k.Name}
		if strings.Contains(k.Name, "SERVICE") {
			names = nil
			for _, s := range Services() {
				if key := strings.ReplaceAll(strings.Replace(k.Name, "SERVICE", s, 1), "[.METHOD]", ""); CheckKey(key) == nil {
					names = append(names, key)
				}
			}
		}
		for _, name := range names {
			if at := word.FindStringIndex(name); at != nil {
				all = append(all, name[:at[0]])
			} else {
				all = append(all, name+"=")
			}
		}
	}
	return slices.Compact(all)
}
