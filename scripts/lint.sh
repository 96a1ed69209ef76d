#!/usr/bin/env bash
# gofmt, go vet, staticcheck, shellcheck, systemd-analyze verify.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t go_files < <(git ls-files --cached --others --exclude-standard '*.go')
unformatted=$(gofmt -l "${go_files[@]}")
if [ -n "$unformatted" ]; then
  printf 'gofmt would change:\n%s\n' "$unformatted" >&2
  exit 1
fi
go vet ./...
go tool staticcheck ./...
mapfile -t shell_files < <(git ls-files --cached --others --exclude-standard '*.sh' .ci/run)
shellcheck "${shell_files[@]}"
scripts/verify-units.sh
echo "lint: ok"
