// Package packaging holds what a VM's image takes from Sluice beside the
// binaries: systemd units.
package packaging

import "embed"

// Units are the systemd units, below systemd/.
//
//go:embed systemd/*.service
var Units embed.FS
