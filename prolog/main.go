package prolog

import (
	"fmt"
	"syscall"
)

// Main runs the hook of that name so that nothing it does by mistake drains a
// node: a panic is a line in slurmd's log and exit code 0.
func Main(name string, run func(Hook) int) (code int) {
	// A bare write, because os.Stderr would end the program with SIGPIPE when slurmd has closed its end.
	say := func(line string) { syscall.Write(2, []byte(name+": "+line+"\n")) }
	defer func() {
		if r := recover(); r != nil {
			say(fmt.Sprintf("internal error, the job is not held up: %v", r))
			code = 0
		}
	}()
	h := New()
	h.Say = say
	return run(h)
}
