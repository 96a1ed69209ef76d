// Package packaging holds what a VM's image takes from Sluice beside the
// binaries: systemd units, and drop-ins for the units of others.
package packaging

import "embed"

// Units are the systemd units and drop-ins, below systemd/ as they lie in /etc/systemd/system.
//
//go:embed systemd
var Units embed.FS
