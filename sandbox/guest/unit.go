package guest

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// maxUnitSize bounds a unit file, in bytes.
const maxUnitSize = 1 << 20

// Unit is the part of a systemd unit that the guest understands. The names are systemd's.
type Unit struct {
	Name        string // with its suffix, for example "slurmd.service"
	Description string

	After, Before, Requires, Wants []string
	WantedBy                       []string
	Conditions                     []Condition

	Type                string // simple, exec, notify, oneshot or forking; "" is simple
	ExecStartPre        []Command
	ExecStart           []Command
	ExecStartPost       []Command
	ExecReload          []Command
	ExecStop            []Command
	ExecStopPost        []Command
	Environment         []string // NAME=VALUE
	EnvironmentFile     []string // a leading "-" means that it may be missing
	User, Group         string
	SupplementaryGroups []string
	WorkingDirectory    string // "" is /; "~" is the user's home; a leading "-" means that it may be missing
	UMask               uint32 // 0022 unless set
	PIDFile             string
	RemainAfterExit     bool
	Restart             string // systemd's words; "" is no
	RestartDelay        time.Duration
	TimeoutStart        time.Duration // 0: no limit
	TimeoutStop         time.Duration // 0: no limit
	KillSignal          string        // for example "SIGTERM"
	KillMode            string        // control-group, process, mixed or none
	SuccessExitStatus   []int
	StartLimitBurst     int // starts within StartLimitInterval before Restart gives up
	StartLimitInterval  time.Duration
	Limits              map[string]Limit // by systemd's name without "Limit", for example "NOFILE"
	Directories         []Directory
	Hardening           Hardening
}

// Condition is one Condition… or Assert… line.
type Condition struct {
	Kind   string // PathExists, PathIsDirectory, FileNotEmpty, DirectoryNotEmpty
	Path   string
	Negate bool
	Assert bool // an unmet assertion is a failure, an unmet condition a quiet skip
}

// Command is one Exec… line.
type Command struct {
	Argv          []string // quotes are gone, variables are not expanded yet
	IgnoreFailure bool     // "-"
	FullRights    bool     // "+": User, Group and Hardening do not apply
	OwnUser       bool     // "!": User and Group do not apply
	NoExpand      bool     // ":"
}

// Limit is a pair of resource limits; Infinity is no limit.
type Limit struct{ Soft, Hard uint64 }

// Infinity is the limit that is none.
const Infinity = ^uint64(0)

// Directory is made before a unit starts, owned by its user.
type Directory struct {
	Path     string // absolute
	Mode     uint32
	Variable string // the environment variable that names it, for example RUNTIME_DIRECTORY
	Remove   bool   // when the unit has stopped
}

// directoryKinds says where …Directory= lines lead.
var directoryKinds = map[string]struct {
	base, variable string
	remove         bool
}{
	"RuntimeDirectory":       {"/run", "RUNTIME_DIRECTORY", true},
	"StateDirectory":         {"/var/lib", "STATE_DIRECTORY", false},
	"CacheDirectory":         {"/var/cache", "CACHE_DIRECTORY", false},
	"LogsDirectory":          {"/var/log", "LOGS_DIRECTORY", false},
	"ConfigurationDirectory": {"/etc", "CONFIGURATION_DIRECTORY", false},
}

// newUnit has systemd's defaults.
func newUnit(name string) *Unit {
	return &Unit{
		Name: name, UMask: 0o022, KillSignal: "SIGTERM", KillMode: "control-group",
		RestartDelay: 100 * time.Millisecond, TimeoutStart: 90 * time.Second, TimeoutStop: 90 * time.Second,
		StartLimitBurst: 5, StartLimitInterval: 10 * time.Second, Limits: map[string]Limit{},
	}
}

// ParseUnit reads a unit and its drop-ins, in this order, as one. A directive that the guest does not know is an
// error with its line, as is a value that it cannot read: what a unit says must hold, or be known not to.
func ParseUnit(name string, files ...io.Reader) (*Unit, error) {
	p := &unitParser{unit: newUnit(name), directories: map[string][]string{}, modes: map[string]uint32{}}
	for _, f := range files {
		if err := p.file(f); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	if err := p.finish(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return p.unit, nil
}

type unitParser struct {
	unit          *Unit
	directories   map[string][]string // by key, for example RuntimeDirectory
	modes         map[string]uint32
	preserve      bool
	timeoutsGiven bool
}

func (p *unitParser) file(r io.Reader) error {
	data, err := io.ReadAll(io.LimitReader(r, maxUnitSize+1))
	if err != nil {
		return err
	}
	if len(data) > maxUnitSize {
		return fmt.Errorf("larger than %d bytes", maxUnitSize)
	}
	if !utf8.Valid(data) || strings.ContainsRune(string(data), 0) {
		return errors.New("not a text file")
	}
	section := ""
	lines := strings.Split(string(data), "\n")
	for i := 0; i < len(lines); i++ {
		at := i + 1
		line := strings.TrimRight(lines[i], "\r")
		if isComment(line) {
			continue
		}
		for strings.HasSuffix(line, `\`) && i+1 < len(lines) {
			i++
			next := strings.TrimRight(lines[i], "\r")
			if isComment(next) { // comments may stand between continued lines
				continue
			}
			line = strings.TrimSuffix(line, `\`) + " " + next
		}
		line = strings.TrimSpace(line)
		switch {
		case line == "":
		case strings.HasPrefix(line, "[") && strings.HasSuffix(line, "]"):
			section = line[1 : len(line)-1]
		default:
			key, value, ok := strings.Cut(line, "=")
			if !ok {
				return fmt.Errorf("line %d: no = in %q", at, line)
			}
			key, value = strings.TrimSpace(key), strings.TrimSpace(value)
			if err := p.set(section, key, value); err != nil {
				return fmt.Errorf("line %d: %s=: %w", at, key, err)
			}
		}
	}
	return nil
}

func isComment(line string) bool {
	t := strings.TrimLeft(line, " \t")
	return strings.HasPrefix(t, "#") || strings.HasPrefix(t, ";")
}

func (p *unitParser) set(section, key, value string) error {
	u := p.unit
	switch section {
	case "Unit", "Service", "Install":
	default:
		if strings.HasPrefix(section, "X-") { // by systemd's rule, for other programs
			return nil
		}
		return fmt.Errorf("unknown section [%s]", section)
	}
	directory, isMode := strings.CutSuffix(key, "Mode")
	if _, ok := directoryKinds[directory]; ok && section == "Service" {
		if isMode {
			mode, err := parseMode(value)
			p.modes[directory] = mode
			return err
		}
		list := p.directories[directory]
		err := appendWords(&list, p, value)
		p.directories[directory] = list
		return err
	}
	name, _ := strings.CutPrefix(key, "Limit")
	if _, ok := rlimits[name]; ok && section == "Service" && name != key {
		limit, err := parseLimit(value)
		u.Limits[name] = limit
		return err
	}
	if kind, ok := conditionKind(key); ok && section == "Unit" {
		if value == "" {
			u.Conditions = nil
			return nil
		}
		c := Condition{Kind: kind, Assert: strings.HasPrefix(key, "Assert")}
		c.Path, c.Negate = strings.CutPrefix(value, "!")
		c.Path = p.specifiers(c.Path)
		u.Conditions = append(u.Conditions, c)
		return nil
	}
	if section == "Service" {
		if known, err := u.Hardening.set(key, value); known {
			return err
		}
	}
	switch section + "." + key {
	case "Unit.Description":
		u.Description = p.specifiers(value)
	case "Unit.After":
		return appendWords(&u.After, p, value)
	case "Unit.Before":
		return appendWords(&u.Before, p, value)
	case "Unit.Requires", "Unit.BindsTo", "Unit.Requisite":
		return appendWords(&u.Requires, p, value)
	case "Unit.Wants":
		return appendWords(&u.Wants, p, value)
	case "Install.WantedBy", "Install.RequiredBy":
		return appendWords(&u.WantedBy, p, value)
	case "Unit.StartLimitBurst", "Service.StartLimitBurst":
		return parseInt(value, &u.StartLimitBurst)
	case "Unit.StartLimitIntervalSec", "Service.StartLimitInterval":
		return parseSpan(value, &u.StartLimitInterval)
	case "Service.Type":
		switch value {
		case "simple", "exec", "notify", "oneshot", "forking":
			u.Type = value
		case "idle":
			u.Type = "simple"
		case "notify-reload":
			u.Type = "notify"
		default:
			return fmt.Errorf("type %q is not supported (simple, exec, notify, oneshot, forking)", value)
		}
	case "Service.ExecStartPre":
		return p.command(&u.ExecStartPre, value)
	case "Service.ExecStart":
		return p.command(&u.ExecStart, value)
	case "Service.ExecStartPost":
		return p.command(&u.ExecStartPost, value)
	case "Service.ExecReload":
		return p.command(&u.ExecReload, value)
	case "Service.ExecStop":
		return p.command(&u.ExecStop, value)
	case "Service.ExecStopPost":
		return p.command(&u.ExecStopPost, value)
	case "Service.Environment":
		return appendWords(&u.Environment, p, value)
	case "Service.EnvironmentFile":
		if value == "" {
			u.EnvironmentFile = nil
			return nil
		}
		u.EnvironmentFile = append(u.EnvironmentFile, p.specifiers(value))
	case "Service.User":
		u.User = p.specifiers(value)
	case "Service.Group":
		u.Group = p.specifiers(value)
	case "Service.SupplementaryGroups":
		return appendWords(&u.SupplementaryGroups, p, value)
	case "Service.WorkingDirectory":
		u.WorkingDirectory = p.specifiers(value)
	case "Service.UMask":
		mode, err := parseMode(value)
		u.UMask = mode
		return err
	case "Service.PIDFile":
		u.PIDFile = p.specifiers(value)
		if u.PIDFile != "" && !filepath.IsAbs(u.PIDFile) {
			u.PIDFile = filepath.Join("/run", u.PIDFile)
		}
	case "Service.RemainAfterExit":
		return parseBool(value, &u.RemainAfterExit)
	case "Service.RuntimeDirectoryPreserve":
		p.preserve = value == "yes" || value == "true" || value == "restart" || value == "1"
	case "Service.Restart":
		switch value {
		case "no", "always", "on-success", "on-failure", "on-abnormal", "on-abort", "on-watchdog":
			u.Restart = value
		default:
			return fmt.Errorf("unknown word %q", value)
		}
	case "Service.RestartSec":
		return parseSpan(value, &u.RestartDelay)
	case "Service.TimeoutSec":
		p.timeoutsGiven = true
		if err := parseSpan(value, &u.TimeoutStart); err != nil {
			return err
		}
		u.TimeoutStop = u.TimeoutStart
	case "Service.TimeoutStartSec":
		p.timeoutsGiven = true
		return parseSpan(value, &u.TimeoutStart)
	case "Service.TimeoutStopSec":
		return parseSpan(value, &u.TimeoutStop)
	case "Service.KillSignal":
		if !strings.HasPrefix(value, "SIG") {
			value = "SIG" + value
		}
		if signalByName(value) == 0 {
			return fmt.Errorf("unknown signal %q", value)
		}
		u.KillSignal = value
	case "Service.KillMode":
		switch value {
		case "control-group", "process", "mixed", "none":
			u.KillMode = value
		default:
			return fmt.Errorf("unknown word %q", value)
		}
	case "Service.SuccessExitStatus":
		words, err := splitWords(value)
		if err != nil {
			return err
		}
		for _, w := range words {
			n, err := strconv.Atoi(w)
			if err != nil {
				return err
			}
			u.SuccessExitStatus = append(u.SuccessExitStatus, n)
		}
	default:
		if _, ok := ignored[section+"."+key]; !ok && !strings.HasPrefix(key, "X-") {
			return fmt.Errorf("unknown in [%s]", section)
		}
	}
	return nil
}

func (p *unitParser) command(list *[]Command, value string) error {
	if value == "" { // an empty line clears the list, as drop-ins do
		*list = nil
		return nil
	}
	var c Command
prefixes:
	for value != "" {
		switch value[0] {
		case '-':
			c.IgnoreFailure = true
		case '+':
			c.FullRights = true
		case '!':
			c.OwnUser = true
		case ':':
			c.NoExpand = true
		default:
			break prefixes
		}
		value = value[1:]
	}
	words, err := splitWords(value)
	if err != nil {
		return err
	}
	if len(words) == 0 {
		return errors.New("no program")
	}
	for _, w := range words {
		c.Argv = append(c.Argv, p.specifiers(w))
	}
	if strings.ContainsAny(c.Argv[0], "$") {
		return errors.New("the program's name may not be a variable")
	}
	*list = append(*list, c)
	return nil
}

// specifiers expands systemd's %-letters; unknown ones stay as they are.
func (p *unitParser) specifiers(s string) string {
	if !strings.Contains(s, "%") {
		return s
	}
	stem := strings.TrimSuffix(p.unit.Name, filepath.Ext(p.unit.Name))
	prefix, instance, _ := strings.Cut(stem, "@")
	values := map[byte]string{
		'%': "%", 'n': p.unit.Name, 'N': stem, 'p': prefix, 'i': instance, 'I': instance,
		't': "/run", 'S': "/var/lib", 'C': "/var/cache", 'L': "/var/log", 'E': "/etc", 'T': "/tmp", 'V': "/var/tmp",
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+1 < len(s) {
			if v, ok := values[s[i+1]]; ok {
				b.WriteString(v)
				i++
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func (p *unitParser) finish() error {
	u := p.unit
	if u.Type == "" {
		u.Type = "simple"
	}
	if u.Type == "oneshot" && !p.timeoutsGiven {
		u.TimeoutStart = 0
	}
	keys := make([]string, 0, len(p.directories))
	for k := range p.directories {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	for _, key := range keys {
		kind := directoryKinds[key]
		mode, ok := p.modes[key]
		if !ok {
			mode = 0o755
		}
		for _, d := range p.directories[key] {
			d, _, _ = strings.Cut(d, ":") // a second part asks for a symlink
			if d == "" || filepath.IsAbs(d) || filepath.Clean(d) != strings.TrimSuffix(d, "/") || strings.HasPrefix(filepath.Clean(d), "..") || filepath.Clean(d) == "." {
				return fmt.Errorf("%s=: %q is not a plain relative path", key, d)
			}
			u.Directories = append(u.Directories, Directory{
				Path: filepath.Join(kind.base, d), Mode: mode, Variable: kind.variable, Remove: kind.remove && !p.preserve,
			})
		}
	}
	if strings.HasSuffix(u.Name, ".service") {
		if len(u.ExecStart) == 0 && u.Type != "oneshot" {
			return errors.New("no ExecStart=")
		}
		if len(u.ExecStart) > 1 && u.Type != "oneshot" {
			return errors.New("more than one ExecStart=, which only Type=oneshot may have")
		}
	}
	return nil
}

func conditionKind(key string) (kind string, ok bool) {
	kind, isCondition := strings.CutPrefix(key, "Condition")
	if !isCondition {
		var isAssert bool
		if kind, isAssert = strings.CutPrefix(key, "Assert"); !isAssert {
			return "", false
		}
	}
	switch kind {
	case "PathExists", "PathIsDirectory", "FileNotEmpty", "DirectoryNotEmpty":
		return kind, true
	}
	return "", false
}

// appendWords adds the value's words to the list; an empty value clears it.
func appendWords(list *[]string, p *unitParser, value string) error {
	if value == "" {
		*list = nil
		return nil
	}
	words, err := splitWords(value)
	for _, w := range words {
		*list = append(*list, p.specifiers(w))
	}
	return err
}

func parseMode(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 8, 12)
	return uint32(n), err
}

func parseInt(s string, to *int) error {
	n, err := strconv.Atoi(s)
	*to = n
	return err
}

func parseBool(s string, to *bool) error {
	switch strings.ToLower(s) {
	case "yes", "true", "on", "1":
		*to = true
	case "no", "false", "off", "0":
		*to = false
	default:
		return fmt.Errorf("%q is neither yes nor no", s)
	}
	return nil
}

var spanUnits = map[string]time.Duration{
	"": time.Second, "s": time.Second, "sec": time.Second, "second": time.Second, "seconds": time.Second,
	"ms": time.Millisecond, "msec": time.Millisecond, "us": time.Microsecond, "usec": time.Microsecond,
	"m": time.Minute, "min": time.Minute, "minute": time.Minute, "minutes": time.Minute,
	"h": time.Hour, "hr": time.Hour, "hour": time.Hour, "hours": time.Hour, "d": 24 * time.Hour, "day": 24 * time.Hour, "days": 24 * time.Hour,
}

// parseSpan reads systemd's time spans ("90", "1min 30s", "500ms"); "infinity" is 0.
func parseSpan(s string, to *time.Duration) error {
	if s == "infinity" {
		*to = 0
		return nil
	}
	var total time.Duration
	rest := strings.TrimSpace(s)
	if rest == "" {
		return errors.New("no time span")
	}
	for rest != "" {
		digits := strings.TrimLeft(rest, "0123456789.")
		number := rest[:len(rest)-len(digits)]
		digits = strings.TrimLeft(digits, " ")
		after := strings.TrimLeft(digits, "abcdefghijklmnopqrstuvwxyz")
		unit, ok := spanUnits[digits[:len(digits)-len(after)]]
		n, err := strconv.ParseFloat(number, 64)
		if !ok || err != nil || n*float64(unit) > float64(100*365*24*time.Hour) {
			return fmt.Errorf("%q is not a time span", s)
		}
		total += time.Duration(n * float64(unit))
		rest = strings.TrimLeft(after, " ")
	}
	*to = total
	return nil
}

func parseLimit(s string) (Limit, error) {
	soft, hard, two := strings.Cut(s, ":")
	if !two {
		hard = soft
	}
	var l Limit
	var err error
	if l.Soft, err = parseLimitNumber(soft); err != nil {
		return l, err
	}
	l.Hard, err = parseLimitNumber(hard)
	return l, err
}

func parseLimitNumber(s string) (uint64, error) {
	if s == "infinity" {
		return Infinity, nil
	}
	shift := 0
	for i, suffix := range "KMGT" {
		if t, ok := strings.CutSuffix(s, string(suffix)); ok {
			s, shift = t, 10*(i+1)
			break
		}
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, err
	}
	if n > Infinity>>shift {
		return 0, fmt.Errorf("%q is too large", s)
	}
	return n << shift, nil
}

// splitWords splits like systemd: blanks part words, '…' and "…" keep them together, and a
// backslash escapes (\n, \t, \s for a blank, \xHH; any other character stands for itself).
func splitWords(s string) ([]string, error) {
	var words []string
	var word strings.Builder
	in := false // inside a word
	var quote byte
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case c == '\\':
			if i+1 >= len(s) {
				return nil, errors.New("a backslash at the end")
			}
			i++
			in = true
			switch s[i] {
			case 'n':
				word.WriteByte('\n')
			case 't':
				word.WriteByte('\t')
			case 's':
				word.WriteByte(' ')
			case 'x':
				if i+2 >= len(s) {
					return nil, errors.New(`\x needs two digits`)
				}
				n, err := strconv.ParseUint(s[i+1:i+3], 16, 8)
				if err != nil || n == 0 {
					return nil, fmt.Errorf(`\x%s is not a byte`, s[i+1:i+3])
				}
				word.WriteByte(byte(n))
				i += 2
			default:
				word.WriteByte(s[i])
			}
		case quote != 0:
			if c == quote {
				quote = 0
			} else {
				word.WriteByte(c)
			}
		case c == '"' || c == '\'':
			quote, in = c, true
		case c == ' ' || c == '\t' || c == '\n':
			if in {
				words = append(words, word.String())
				word.Reset()
				in = false
			}
		default:
			word.WriteByte(c)
			in = true
		}
	}
	if quote != 0 {
		return nil, fmt.Errorf("a %c without its partner", quote)
	}
	if in {
		words = append(words, word.String())
	}
	return words, nil
}

// expand puts variables in: ${NAME} inside a word, and a word that is $NAME alone becomes as many
// words as its value has. Variables that are not set are empty. "$$" is a dollar.
func expand(argv []string, env map[string]string) []string {
	var out []string
	for i, w := range argv {
		if name, ok := strings.CutPrefix(w, "$"); ok && i > 0 && isName(name) {
			out = append(out, strings.Fields(env[name])...)
			continue
		}
		var b strings.Builder
		for j := 0; j < len(w); j++ {
			if w[j] != '$' || j+1 >= len(w) {
				b.WriteByte(w[j])
				continue
			}
			if w[j+1] == '$' {
				b.WriteByte('$')
				j++
				continue
			}
			if end := strings.IndexByte(w[j:], '}'); w[j+1] == '{' && end > 0 && isName(w[j+2:j+end]) {
				b.WriteString(env[w[j+2:j+end]])
				j += end
				continue
			}
			n := j + 1
			for n < len(w) && isName(w[j+1:n+1]) {
				n++
			}
			if n == j+1 {
				b.WriteByte('$')
				continue
			}
			b.WriteString(env[w[j+1:n]])
			j = n - 1
		}
		out = append(out, b.String())
	}
	return out
}

func isName(s string) bool {
	for i := 0; i < len(s); i++ {
		c := s[i]
		if !(c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || i > 0 && c >= '0' && c <= '9') {
			return false
		}
	}
	return s != ""
}

// parseEnvironmentFile reads NAME=VALUE lines; quotes around a value are removed.
func parseEnvironmentFile(data []byte) []string {
	var env []string
	for _, line := range strings.Split(string(data), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' || line[0] == ';' {
			continue
		}
		name, value, ok := strings.Cut(line, "=")
		name = strings.TrimSpace(name)
		if !ok || !isName(name) || strings.ContainsRune(value, 0) {
			continue
		}
		value = strings.TrimSpace(value)
		if words, err := splitWords(value); err == nil && len(value) > 0 && (value[0] == '"' || value[0] == '\'') && len(words) == 1 {
			value = words[0]
		}
		env = append(env, name+"="+value)
	}
	return env
}
