package agent

import (
	"strings"
	"testing"

	"github.com/sluicehpc/sluice/packaging"
)

// TestDropInWaitsForTheAgent: the drop-in for slurmd.service that images get names the file that the agent makes.
func TestDropInWaitsForTheAgent(t *testing.T) {
	text, err := packaging.Units.ReadFile("systemd/slurmd.service.d/sluice.conf")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"After=sluice-agent.service", "ConditionPathExists=" + slurmdFlag} {
		if !strings.Contains(string(text), "\n"+line+"\n") {
			t.Errorf("the drop-in lacks %s:\n%s", line, text)
		}
	}
}
