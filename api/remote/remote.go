// Package remote speaks the api over HTTPS between agents and sluiced: an
// api.Request is posted and answered by an api.Response, over TLS 1.3 in which
// both sides show a certificate; only who wants to enrol has none yet. Whom the
// certificates belong to is package trust's matter.
package remote

import "github.com/sluicehpc/sluice/api"

// Where calls are posted.
const (
	Path      = "/v1/call"
	EnrolPath = "/v1/enroll" // api.OpAgentEnrol, without a certificate
)

func path(op string) string {
	if op == api.OpAgentEnrol {
		return EnrolPath
	}
	return Path
}
