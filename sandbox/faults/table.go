package faults

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Key is a row of the table of faults: one key, or a family of keys.
type Key struct {
	// Name is the key. Words in capitals stand for a name, of which * may be a part or all; what stands in brackets may be left out.
	Name string
	// Value is what may be set: words in capitals stand for a value, | separates choices.
	Value string
	// Effect says in one sentence what happens.
	Effect string
	// Example is a whole KEY=VALUE that works.
	Example string
	// Modifiers says which may follow the value: see Modifiers.
	Modifiers []string

	check func(value string) error
}

// The keys, as they stand in the table. Functions of Set take them with the names for their words in capitals.
const (
	APILatency = "api.SERVICE[.METHOD].latency"
	APILost    = "api.SERVICE[.METHOD].lost"
	APIStatus  = "api.SERVICE[.METHOD].status"

	ClockSkew = "clock.skew"

	ComputeHostError   = "compute.instance.VM.host-error"
	ComputeMaintenance = "compute.instance.VM.maintenance"
	ComputePreempt     = "compute.instance.VM.preempt"
	ComputeInsertDelay = "compute.insert.delay"
	ComputeQuota       = "compute.quota.METRIC"
	ComputeStockout    = "compute.stockout.ZONE[.MACHINE_TYPE]"

	NetworkCut = "network.cut.VM.PEER"

	OperationBulkLeftover = "operation.compute.bulkInsert.leftover"
	OperationBulkPartial  = "operation.compute.bulkInsert.partial"
	OperationError        = "operation.SERVICE[.METHOD].error"
	OperationHang         = "operation.SERVICE[.METHOD].hang"
	OperationLustreFailed = "operation.lustre.transfer.failed"

	Seed = "seed"

	StorageDeny = "storage.deny"
)

// The sets of modifiers that rows accept.
var (
	occasions = []string{"count", "for", "p", "skip"} // each occasion counts
	events    = []string{"count", "for"}              // things that happen to a VM by themselves
	levels    = []string{"for"}                       // states, not occasions
)

// QuotaMetrics are those of ComputeQuota.
var QuotaMetrics = []string{"CPUS", "GPUS_ALL_REGIONS", "INSTANCES", "PREEMPTIBLE_CPUS"}

// table is sorted by name.
var table = slices.SortedFunc(slices.Values(slices.Concat(keys, lustreKeys)), func(a, b Key) int { return strings.Compare(a.Name, b.Name) })

var keys = []Key{
	{APILatency, "DURATION|SHORTEST-LONGEST", "The request waits before it is handled; with two durations each waits differently.",
		"api.storage.objects.get.latency=100ms-2s", occasions, checkLatency},
	{APILost, "request|reply|half", "The connection is cut: before the request is handled, after it was handled and without the reply, or in the middle of the reply.",
		"api.compute.instances.bulkInsert.lost=reply,count=1", occasions, oneOf("request", "reply", "half")},
	{APIStatus, "403|408|429|500|502|503|504", "The request is refused with this HTTP status in the service's form, and not handled; 403 is Compute Engine's rateLimitExceeded, 502 an HTML page.",
		"api.lustre.status=503,count=5", occasions, checkStatus},

	{ClockSkew, "[-]DURATION", "The cloud's clock runs this much ahead, or behind: Date headers, tokens, times of operations and objects.",
		"clock.skew=-90s", levels, checkSkew},

	{ComputeInsertDelay, "DURATION", "New instances stay in PROVISIONING this long.",
		"compute.insert.delay=20s", levels, checkDuration},
	{ComputeHostError, "on", "As soon as it runs, the VM's host fails: it dies at once and, with automaticRestart, comes again; once without count.",
		"compute.instance.compute-1.host-error=on", events, oneOf("on")},
	{ComputeMaintenance, "on|NOTICE", "As soon as it runs, the VM is told of maintenance and, after the notice (60m with GPUs, else 60s), migrated or ended as onHostMaintenance says; once without count.",
		"compute.instance.compute-*.maintenance=5s", events, checkOnOrDuration},
	{ComputePreempt, "on|GRACE", "As soon as it runs, the VM is preempted: it is told, after preemptionNoticeDuration asked to shut down, and ended at the latest GRACE (30s) later as instanceTerminationAction says; once without count.",
		"compute.instance.compute-1.preempt=on", events, checkOnOrDuration},
	{ComputeQuota, "NUMBER", "The most that the project may use; METRIC is " + words(QuotaMetrics) + ".",
		"compute.quota.CPUS=8", levels, checkCount},
	{ComputeStockout, "on|details", "No VM can be started in the zone: ZONE_RESOURCE_POOL_EXHAUSTED, with details _WITH_DETAILS.",
		"compute.stockout.us-central1-a.a3-highgpu-8g=on", occasions, oneOf("on", "details")},

	{NetworkCut, "on", "No packet passes between the two VMs; PEER may be apis, the addresses of Google's APIs, the metadata server and DNS.",
		"network.cut.compute-1.controller=on,for=30s", levels, oneOf("on")},

	{OperationError, "CODE[/STATUS]|/STATUS", "The operation fails with this code in error.errors, this httpErrorStatusCode, or both, and does nothing.",
		"operation.compute.instances.bulkInsert.error=QUOTA_EXCEEDED/403,count=1", occasions, checkOperationError},
	{OperationHang, "before|after", "The operation stays RUNNING until the fault is cleared or over: before it does anything, or after it did all.",
		"operation.lustre.instances.importData.hang=after,for=30s", occasions, oneOf("before", "after")},
	{OperationBulkLeftover, "NUMBER", "A bulkInsert that is rolled back leaves this many of its VMs behind.",
		"operation.compute.bulkInsert.leftover=1", occasions, checkCount},
	{OperationBulkPartial, "NUMBER", "Only this many VMs of a bulkInsert come up; the rest is ZONE_RESOURCE_POOL_EXHAUSTED.",
		"operation.compute.bulkInsert.partial=1,count=1", occasions, checkCount},
	{OperationLustreFailed, "NUMBER", "This many objects of a transfer are not copied; the operation says so in its counters only.",
		"operation.lustre.transfer.failed=2", occasions, checkCount},

	{Seed, "NUMBER", "What the generators of p and of ranges start with; each fault has its own.",
		"seed=42", nil, checkSeed},

	{StorageDeny, "BUCKET", "Every call on the bucket is refused with 403.",
		"storage.deny=results", levels, checkBucket},
}

// Keys lists the table.
func Keys() []Key { return slices.Clone(table) }

// Modifiers are what may follow a value, after a comma each.
func Modifiers() [][2]string {
	return [][2]string{
		{"count=N", "only the first N times"},
		{"for=DURATION", "only that long from now on"},
		{"p=SHARE", "only with this probability, above 0 and up to 1"},
		{"skip=N", "not the first N times"},
	}
}

// patterns are the rows' names as expressions: a key matches one, and its groups are the words in capitals.
var patterns = func() map[string]*regexp.Regexp {
	all := map[string]*regexp.Regexp{}
	for _, k := range table {
		all[k.Name] = compile(k.Name)
	}
	return all
}()

var word = regexp.MustCompile(`[A-Z][A-Z_]+`)

func compile(name string) *regexp.Regexp {
	text := regexp.QuoteMeta(name)
	text = strings.NewReplacer(`\[`, `(?:`, `\]`, `)?`).Replace(text)
	text = word.ReplaceAllStringFunc(text, func(w string) string {
		if w == "METHOD" {
			return `([A-Za-z*][A-Za-z.*]*)`
		}
		return `([A-Za-z0-9*_-]+)`
	})
	return regexp.MustCompile(`^` + text + `$`)
}

// lookup finds the row of a key and the names in it; a name that was left out is *.
func lookup(key string) (*Key, []string, error) {
	for i := range table {
		row := &table[i]
		m := patterns[row.Name].FindStringSubmatch(key)
		if m == nil {
			continue
		}
		names := m[1:]
		for i := range names {
			if names[i] == "" {
				names[i] = "*"
			}
		}
		if err := checkNames(row.Name, names); err != nil {
			return nil, nil, fmt.Errorf("%w %q: %w", ErrUnknownKey, key, err)
		}
		return row, names, nil
	}
	return nil, nil, fmt.Errorf("%w %q: did you mean %s?", ErrUnknownKey, key, nearest(key))
}

// checkNames refuses names that can match nothing.
func checkNames(row string, names []string) error {
	for i, w := range word.FindAllString(row, -1) {
		switch w {
		case "SERVICE":
			services := Services()
			if strings.HasPrefix(row, "operation.") {
				services = []string{"compute", "lustre"}
			}
			if !slices.ContainsFunc(services, func(s string) bool { return match(names[i], s) }) {
				return fmt.Errorf("SERVICE is %s, or * for all", words(services))
			}
		case "METHOD":
			var known []string
			for _, s := range Services() {
				if match(names[0], s) {
					known = append(known, Methods(s)...)
				}
			}
			if !slices.ContainsFunc(known, func(m string) bool { return match(names[i], m) }) {
				return fmt.Errorf("METHOD is one of %s", words(known))
			}
		case "METRIC":
			if !slices.Contains(QuotaMetrics, names[i]) {
				return fmt.Errorf("METRIC is %s", words(QuotaMetrics))
			}
		}
	}
	return nil
}

// match reports whether name is what the pattern says, in which each * stands for anything.
func match(pattern, name string) bool {
	first, rest, star := strings.Cut(pattern, "*")
	if !star {
		return pattern == name
	}
	name, ok := strings.CutPrefix(name, first)
	if !ok {
		return false
	}
	for {
		if match(rest, name) {
			return true
		}
		if name == "" {
			return false
		}
		name = name[1:]
	}
}

func words(all []string) string {
	if len(all) < 2 {
		return strings.Join(all, "")
	}
	return strings.Join(all[:len(all)-1], ", ") + " or " + all[len(all)-1]
}

func checkDuration(v string) error {
	d, err := time.ParseDuration(v)
	if err == nil && d < 0 {
		err = errors.New("must not be negative")
	}
	if err != nil {
		return fmt.Errorf("want a duration such as 500ms, 20s or 2m: %w", err)
	}
	return nil
}

func checkOnOrDuration(v string) error {
	if v == "on" {
		return nil
	}
	return checkDuration(v)
}

func checkSkew(v string) error {
	d, err := time.ParseDuration(v)
	if err == nil && d.Abs() > 365*24*time.Hour {
		err = errors.New("more than a year")
	}
	if err != nil {
		return fmt.Errorf("want a duration such as 90s or -10m: %w", err)
	}
	return nil
}

func checkLatency(v string) error {
	_, _, err := latency(v)
	return err
}

// latency reads D or SHORTEST-LONGEST.
func latency(v string) (shortest, longest time.Duration, err error) {
	from, to, both := strings.Cut(v, "-")
	if !both {
		to = from
	}
	for _, d := range []string{from, to} {
		if err := checkDuration(d); err != nil {
			return 0, 0, err
		}
	}
	shortest, _ = time.ParseDuration(from) // both were checked
	longest, _ = time.ParseDuration(to)
	if longest < shortest {
		return 0, 0, errors.New("the first duration must be the shorter one")
	}
	return shortest, longest, nil
}

func checkStatus(v string) error {
	return oneOf("403", "408", "429", "500", "502", "503", "504")(v)
}

var operationCode = regexp.MustCompile(`^([A-Z][A-Z0-9_]*)?(/[45][0-9][0-9])?$`)

func checkOperationError(v string) error {
	if v == "" || !operationCode.MatchString(v) {
		return errors.New("want an error code such as QUOTA_EXCEEDED, an HTTP status such as /503, or both: QUOTA_EXCEEDED/403")
	}
	return nil
}

func checkObject(v string) error {
	bucket, object, ok := strings.Cut(strings.TrimPrefix(v, "gs://"), "/")
	if !strings.HasPrefix(v, "gs://") || !ok || bucket == "" || object == "" {
		return errors.New("want gs://BUCKET/OBJECT")
	}
	return nil
}

func checkBucket(v string) error {
	if v == "" || strings.Contains(v, "/") {
		return errors.New("want the bucket's name alone")
	}
	return nil
}

func oneOf(choices ...string) func(string) error {
	return func(v string) error {
		if !slices.Contains(choices, v) {
			return fmt.Errorf("want %s (clear it to turn it off)", words(choices))
		}
		return nil
	}
}

func checkBytes(v string) error {
	if n, err := strconv.ParseInt(v, 10, 64); err != nil || n <= 0 {
		return errors.New("want a whole number of bytes above 0")
	}
	return nil
}

func checkCount(v string) error {
	if n, err := strconv.ParseInt(v, 10, 32); err != nil || n < 0 {
		return errors.New("want a whole number from 0 up")
	}
	return nil
}

func checkSeed(v string) error {
	if _, err := strconv.ParseUint(v, 10, 64); err != nil {
		return errors.New("want a whole number from 0 up")
	}
	return nil
}

// nearest returns the row's name with the smallest edit distance to key.
func nearest(key string) string {
	best, least := "", -1
	for _, row := range table {
		if d := distance(key, row.Name); least < 0 || d < least {
			best, least = row.Name, d
		}
	}
	return best
}

// distance is the Levenshtein distance of a and b, in bytes; of a long a only the first 100 count.
func distance(a, b string) int {
	if len(a) > 100 {
		a = a[:100]
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := diagonal
			if a[i-1] != b[j-1] {
				cost++
			}
			diagonal = row[j]
			row[j] = min(cost, row[j]+1, row[j-1]+1)
		}
	}
	return row[len(b)]
}
