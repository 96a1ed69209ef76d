// Package examples holds job scripts that work as they are.
package examples

import _ "embed"

// TrainScript is the batch script of the two-node training job; BUCKET in it
// stands for the bucket's name.
//
//go:embed train.sh
var TrainScript string
