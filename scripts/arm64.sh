#!/usr/bin/env bash
# Builds the binaries for arm64 (A4X machines) into bin/arm64 and runs each
# under qemu's user emulation: they must start, and know their version.
set -euo pipefail
cd "$(dirname "$0")/.."

export CGO_ENABLED=0 GOARCH=arm64
mkdir -p bin/arm64
go build -trimpath -ldflags '-s -w -X github.com/sluicehpc/sluice/internal/version.Version=arm64-smoke' -o bin/arm64/ ./cmd/... ./examples/trainer

qemu=$(command -v qemu-aarch64-static) || {
  echo "arm64: qemu-aarch64-static is missing (make deps)" >&2
  exit 1
}
fail() {
  echo "arm64: $*" >&2
  exit 1
}
# Every binary has a word that it says without a cluster.
says() { # says WANT PROGRAM ARGS...
  local want=$1 program=$2 out
  shift 2
  out=$(timeout 60 "$qemu" "bin/arm64/$program" "$@" 2>&1 </dev/null) || true
  [[ $out == *"$want"* ]] || fail "$program $* said: ${out:-nothing}; want $want"
  echo "arm64: $program runs"
}
says 'sluice version arm64-smoke' sluice --version
says 'sluiced version arm64-smoke' sluiced --version
says 'Usage of' sluice-agent --help
says 'usage: sluice-hook' sluice-hook
says 'no job id in the environment' sluice-prolog
says 'no job id in the environment' sluice-epilog
says 'unknown command' sluice-guest --help
says 'usage: srun trainer' trainer --help
