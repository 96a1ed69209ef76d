package conf

import (
	_ "embed"
	"fmt"
	"path"
	"strings"
	"text/template"
)

//go:embed burst_buffer.lua.tmpl
var luaText string

var luaTemplate = template.Must(template.New("burst_buffer.lua").Parse(luaText))

func (c *Cluster) lua(f features) ([]byte, error) {
	var b strings.Builder
	err := luaTemplate.Execute(&b, map[string]any{
		"Version":       c.Version,
		"Hook":          c.program("sluice-hook"),
		"Environment":   path.Clean(c.EnvironmentDir) + "/",
		"State":         path.Clean(c.StateDir),
		"LongArguments": f.longArguments,
		"Polls":         f.polls,
	})
	if err != nil {
		return nil, fmt.Errorf("render burst_buffer.lua: %w", err)
	}
	return []byte(b.String()), nil
}
