package benchfile

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Machine describes this machine in one line: processor, cores, memory, kernel. What cannot be found out is left out.
func Machine() string {
	cpuinfo, _ := os.ReadFile("/proc/cpuinfo")
	meminfo, _ := os.ReadFile("/proc/meminfo")
	var u unix.Utsname
	kernel := ""
	if unix.Uname(&u) == nil {
		kernel = unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:])
	}
	return describe(string(cpuinfo), string(meminfo), kernel, runtime.GOARCH, runtime.NumCPU())
}

// describe takes the content of /proc/cpuinfo (proc_cpuinfo(5); arm64 has no model name there) and /proc/meminfo.
func describe(cpuinfo, meminfo, kernel, arch string, cores int) string {
	model := field(cpuinfo, "model name")
	if model == "" {
		model = arch
	}
	parts := []string{model, fmt.Sprintf("%d cores", cores)}
	if kib, err := strconv.ParseFloat(strings.TrimSuffix(field(meminfo, "MemTotal"), " kB"), 64); err == nil {
		parts = append(parts, fmt.Sprintf("%.1f GiB memory", kib/(1<<20)))
	}
	if kernel != "" {
		parts = append(parts, kernel)
	}
	return strings.Join(parts, ", ")
}

// field is the value of the first line "name: value", or "".
func field(text, name string) string {
	for line := range strings.Lines(text) {
		key, value, ok := strings.Cut(line, ":")
		if ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
