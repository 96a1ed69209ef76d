package lustre

import (
	"github.com/sluicehpc/sluice/sandbox/faults"
	"github.com/sluicehpc/sluice/sandbox/lustre/lustrefs"
)

// Space says how large and how full an instance is.
type Space struct {
	Filesystem     string
	Capacity, Free int64 // bytes
}

// Space looks at an instance (its name).
func (s *Server) Space(instance string) (Space, bool) {
	s.mu.Lock()
	inst, ok := s.instances[instance]
	if !ok {
		s.mu.Unlock()
		return Space{}, false
	}
	space, dir := Space{Filesystem: inst.Filesystem, Capacity: inst.CapacityGib << 30}, inst.dir
	s.mu.Unlock()
	if limit := s.options.Faults.Int(faults.LustreCapacity); limit > 0 {
		space.Capacity = limit
	}
	space.Free = lustrefs.NewMeter(dir).Free(space.Capacity)
	return space, true
}
