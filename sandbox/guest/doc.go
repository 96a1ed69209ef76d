// Package guest is what runs inside the sandbox's VMs: PID 1 with the part of systemd that Slurm's and
// Sluice's units need, systemctl, journalctl, mount.lustre and the startup script of Compute Engine.
//
// One binary, cmd/sluice-guest, is all of them; it picks by its name or first argument. PID 1 only
// reaps and forwards signals; its one child is the service manager.
package guest

// Paths inside a VM.
const (
	// Binary is where the launcher binds the guest binary.
	Binary = "/run/sandbox/guest"
	// LustreSocket is where the launcher binds the socket that mount.lustre talks to.
	LustreSocket = "/run/sandbox/lustre.sock"
	// ControlSocket is where systemctl finds the service manager.
	ControlSocket = "/run/systemd/guest.sock"
	// JournalDir has one file for each unit, NAME.log.
	JournalDir = "/var/log/journal"
)

// Path is the PATH of everything that the guest starts.
const Path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
