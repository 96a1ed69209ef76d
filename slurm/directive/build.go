package directive

import "path"

// build makes the typed directives from the raw ones and reports what two
// directives cannot both ask for. It must cope with raw directives that lack
// keys, since all errors of a script are reported at once.
func (p *parser) build() {
	variables := map[string]Pos{}
	destinations := map[URL]Pos{}
	for _, r := range p.script.raw {
		place := Place{Pos: r.at, values: map[string]Pos{}}
		for _, pr := range r.pairs {
			place.values[pr.key.name] = pr.val
		}
		switch r.verb.name {
		case "stage_in":
			s := StageIn{
				Place: place, Source: r.url("source"), Name: r.value("name"), To: r.path("to"),
				Match: r.all("match"), Exclude: r.all("exclude"),
				Mode: r.value("mode"), Engine: r.value("engine"), Nodes: r.count("nodes"),
				AllowEmpty: r.value("allow_empty") == "yes", FS: r.value("fs"),
			}
			if s.Name != "" || s.To != "" {
				name := s.Variable()
				at := place.Of("name")
				if s.Name == "" {
					at = place.Of("to")
				}
				if before, twice := variables[name]; twice {
					p.errorf(at, "choose another name", "%s is already the variable of the data in line %d", name, before.Line)
				} else {
					variables[name] = at
				}
			}
			p.script.StageIns = append(p.script.StageIns, s)
		case "stage_out":
			s := StageOut{
				Place: place, From: r.path("from"), To: r.url("to"),
				On: r.value("on"), Move: r.value("move") == "yes", FS: r.value("fs"),
			}
			if s.To != (URL{}) {
				if before, twice := destinations[s.To]; twice {
					p.errorf(place.Of("to"), "give each stage_out a destination of its own", "%s is already the destination of line %d", clip(s.To.String()), before.Line)
				} else {
					destinations[s.To] = place.Of("to")
				}
			}
			p.script.StageOuts = append(p.script.StageOuts, s)
		case "checkpoint":
			every, _ := parseEvery(r.value("export_every"))
			signal, _ := parseSignal(r.value("signal"))
			p.script.Checkpoints = append(p.script.Checkpoints, Checkpoint{
				Place: place, Run: r.value("run"), Dir: r.path("dir"), Format: r.value("format"), Export: r.url("export"),
				ExportEvery: every, KeepLast: r.count("keep_last"), KeepEvery: r.count("keep_every"),
				KeepBest: parseBest(r.value("keep_best")), Signal: signal, FS: r.value("fs"),
			})
		case "serve":
			p.script.Serves = append(p.script.Serves, Serve{
				Place: place, Deployment: r.value("deployment"), Run: r.value("run"), Checkpoint: r.value("checkpoint"),
			})
		}
	}
}

// all returns a key's values as written.
func (r raw) all(name string) []string {
	var out []string
	for _, p := range r.pairs {
		if p.key.name == name {
			out = append(out, p.value)
		}
	}
	return out
}

// value returns a key's value, or its default.
func (r raw) value(name string) string {
	if all := r.all(name); len(all) > 0 {
		return all[0]
	}
	if k := r.verb.key(name); k.kind == kindChoice {
		return k.values[0]
	}
	return ""
}

func (r raw) path(name string) string {
	v := r.value(name)
	if v == "" {
		return ""
	}
	return path.Clean(v)
}

func (r raw) url(name string) URL {
	v := r.value(name)
	if v == "" {
		return URL{}
	}
	return parseURL(v)
}

func (r raw) count(name string) int {
	n, _ := parseCount(r.value(name))
	return n
}
