// Package remote speaks the api over HTTPS between agents and sluiced: POST
// /v1/call with an api.Request, answered by an api.Response, over TLS 1.3.
//
// In this first form sluiced's certificate is made by itself and agents pin its
// fingerprint; an agent belongs to the cluster when it holds Slurm's key. Both
// go when agents enrol and get certificates of their own.
package remote

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
)

// Path is where calls are posted.
const Path = "/v1/call"

// keyLabel separates this use of Slurm's key from every other.
const keyLabel = "sluice agent v1"

// token proves knowledge of Slurm's key without showing it.
func token(key []byte) (string, error) {
	if len(key) == 0 {
		return "", errors.New("slurm's key is empty")
	}
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(keyLabel))
	return hex.EncodeToString(mac.Sum(nil)), nil
}
