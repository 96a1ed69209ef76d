// Package description is the Managed Lustre API, version 1, as a discovery document, to hold our client and the sandbox against.
//
// Google publishes none with its Go module. This one was written from the documentation of the API, in the documents' format
// with one addition: x-immutable marks fields that never change after an instance was made.
package description

import _ "embed"

// Document is the discovery document, JSON.
//
//go:embed lustre.json
var Document string
