// Package gcp holds what all clients of Google's services share: endpoints, the retry policy and the meaning of errors.
package gcp

import (
	"os"

	"google.golang.org/api/option"
)

// Endpoints says where the services are, as URLs without a path ("http://10.128.0.1:8080").
// An empty one is Google's own.
type Endpoints struct {
	Compute string // SLUICE_ENDPOINT_COMPUTE
	Lustre  string // SLUICE_ENDPOINT_LUSTRE
	Storage string // SLUICE_ENDPOINT_STORAGE
	// IAM stands for iam, iamcredentials, sts, cloudresourcemanager and the key
	// set of Google's identity tokens (www.googleapis.com); SLUICE_ENDPOINT_IAM.
	IAM string
}

// EndpointsFromEnv reads the endpoints from the environment variables named at the fields.
func EndpointsFromEnv() Endpoints {
	return Endpoints{
		Compute: os.Getenv("SLUICE_ENDPOINT_COMPUTE"),
		Lustre:  os.Getenv("SLUICE_ENDPOINT_LUSTRE"),
		Storage: os.Getenv("SLUICE_ENDPOINT_STORAGE"),
		IAM:     os.Getenv("SLUICE_ENDPOINT_IAM"),
	}
}

// ClientOptions returns the options for a Google client at endpoint (empty: Google's own).
// Credentials are always the application's default ones: on a VM, the metadata server's.
func ClientOptions(endpoint string) []option.ClientOption {
	if endpoint == "" {
		return nil
	}
	return []option.ClientOption{option.WithEndpoint(endpoint)}
}
