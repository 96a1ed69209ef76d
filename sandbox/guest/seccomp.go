package guest

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// KernelFile says which kernel's system calls a VM's programs have ("4.18"); without it they have the host's.
const KernelFile = "/run/sandbox/kernel"

// firstAfter is the first system call that a kernel does not have; since Linux 5.1 all architectures number new
// ones alike. Kernel 4.18 (Rocky 8) thus has no pidfd_open, clone3, openat2, faccessat2 and so on.
var firstAfter = map[string]uint32{"4.18": 424}

// ErrUnknownKernel is wrapped when a kernel cannot be imitated.
var ErrUnknownKernel = errors.New("kernel that cannot be imitated")

// KnownKernel returns ErrUnknownKernel unless a VM can be made to look like one with that kernel; "" is the host's own.
func KnownKernel(version string) error {
	if _, ok := firstAfter[version]; !ok && version != "" {
		return fmt.Errorf("%w: %q (known: 4.18, that of Rocky 8)", ErrUnknownKernel, version)
	}
	return nil
}

// condition is a comparison of the lower half of a system call's argument.
type condition struct {
	argument int
	values   []uint32 // equal to one of them; for maskAll, the mask itself
	kind     conditionKindOf
}

type conditionKindOf int

const (
	always  conditionKindOf = iota
	oneOf                   // the argument is one of the values
	noneOf                  // … none of them
	maskAny                 // … has one of the bits of values[0]
	maskAll                 // … has all of them
)

// refusal is a system call that ends with an error.
type refusal struct {
	call  uint32
	when  condition
	errno unix.Errno
}

const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

// refusals are what the Restrict… directives come to.
func (h *Hardening) refusals() []refusal {
	var all []refusal
	add := func(call int, when condition, errno unix.Errno) {
		all = append(all, refusal{uint32(call), when, errno})
	}
	if h.FamiliesOnly || len(h.Families) > 0 {
		c := condition{argument: 0, kind: oneOf}
		if h.FamiliesOnly {
			c.kind = noneOf
		}
		for _, f := range h.Families {
			c.values = append(c.values, uint32(f))
		}
		add(unix.SYS_SOCKET, c, unix.EAFNOSUPPORT)
	}
	if h.RestrictNamespaces {
		add(unix.SYS_UNSHARE, condition{0, []uint32{namespaces}, maskAny}, unix.EPERM)
		add(unix.SYS_CLONE, condition{0, []uint32{namespaces}, maskAny}, unix.EPERM)
		add(unix.SYS_CLONE3, condition{}, unix.ENOSYS) // its flags are out of reach; callers fall back to clone
		add(unix.SYS_SETNS, condition{}, unix.EPERM)
	}
	if h.RestrictRealtime {
		add(unix.SYS_SCHED_SETSCHEDULER, condition{1, []uint32{unix.SCHED_FIFO, unix.SCHED_RR, unix.SCHED_DEADLINE}, oneOf}, unix.EPERM)
	}
	if h.LockPersonality {
		add(unix.SYS_PERSONALITY, condition{0, []uint32{0, 0xffffffff}, noneOf}, unix.EPERM)
	}
	if h.MemoryDenyWriteExecute {
		add(unix.SYS_MMAP, condition{2, []uint32{unix.PROT_WRITE | unix.PROT_EXEC}, maskAll}, unix.EPERM)
		add(unix.SYS_MPROTECT, condition{2, []uint32{unix.PROT_EXEC}, maskAny}, unix.EPERM)
		add(unix.SYS_PKEY_MPROTECT, condition{2, []uint32{unix.PROT_EXEC}, maskAny}, unix.EPERM)
	}
	return all
}

// Offsets in the kernel's struct seccomp_data.
const (
	callOffset = 0
	archOffset = 4
	argsOffset = 16
)

func load(offset uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
}

// jump skips so many instructions when the comparison holds, or when it does not.
func jump(op uint16, k uint32, holds, not int) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | op | unix.BPF_K, K: k, Jt: uint8(holds), Jf: uint8(not)}
}

func give(value uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: value}
}

func fail(errno unix.Errno) unix.SockFilter { return give(unix.SECCOMP_RET_ERRNO | uint32(errno)) }

// filter returns the program for the kernel, or nil when it would allow everything. after is the first call that
// does not exist, 0 for none.
func (h *Hardening) filter(after uint32) []unix.SockFilter {
	refusals := h.refusals()
	if len(refusals) == 0 && after == 0 && !h.NativeSystemCalls {
		return nil
	}
	foreign := give(unix.SECCOMP_RET_ALLOW)
	if h.NativeSystemCalls {
		foreign = give(unix.SECCOMP_RET_KILL_PROCESS)
	}
	p := []unix.SockFilter{load(archOffset), jump(unix.BPF_JEQ, nativeArch, 1, 0), foreign, load(callOffset)}
	if after > 0 {
		p = append(p, jump(unix.BPF_JGE, after, 0, 1), fail(unix.ENOSYS))
	}
	for _, r := range refusals {
		body := r.when.test(fail(r.errno))
		p = append(p, jump(unix.BPF_JEQ, r.call, 0, len(body)))
		p = append(p, body...)
	}
	return append(p, give(unix.SECCOMP_RET_ALLOW))
}

// test returns what runs for a call that is looked for: refused when the condition holds, else on with the call's number loaded.
func (c condition) test(refused unix.SockFilter) []unix.SockFilter {
	if c.kind == always {
		return []unix.SockFilter{refused}
	}
	body := []unix.SockFilter{load(argsOffset + 8*uint32(c.argument))} // both architectures are little-endian
	switch c.kind {
	case oneOf, noneOf:
		for i, v := range c.values {
			left := len(c.values) - 1 - i
			if c.kind == oneOf {
				last := 0
				if left == 0 {
					last = 1 // past the refusal
				}
				body = append(body, jump(unix.BPF_JEQ, v, left, last))
			} else {
				body = append(body, jump(unix.BPF_JEQ, v, left+1, 0))
			}
		}
	case maskAny:
		body = append(body, jump(unix.BPF_JSET, c.values[0], 0, 1))
	case maskAll:
		body = append(body, unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: c.values[0]}, jump(unix.BPF_JEQ, c.values[0], 0, 1))
	}
	return append(body, refused, load(callOffset))
}

// seccomp installs the filter; the process must be root or have given up new privileges.
func seccomp(program []unix.SockFilter) error {
	if program == nil {
		return nil
	}
	f := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&f)), 0, 0); err != nil {
		return fmt.Errorf("installing the filter of system calls: %w", err)
	}
	return nil
}

// vmKernel returns the first system call that the VM's programs do not have, 0 for none.
func vmKernel() (uint32, error) {
	text, err := os.ReadFile(KernelFile)
	if os.IsNotExist(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	version := strings.TrimSpace(string(text))
	if err := KnownKernel(version); err != nil {
		return 0, err
	}
	return firstAfter[version], nil
}
