// Package version names the build.
package version

import "runtime/debug"

// Version is set by the linker (-X); "dev" otherwise.
var Version = "dev"

// String is Version with the Go release that built it.
func String() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return Version + " (" + info.GoVersion + ")"
	}
	return Version
}
