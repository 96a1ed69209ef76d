#!/usr/bin/env bash
# Installs the Debian packages that are missing, and downloads the Go modules.
# Nothing else in Sluice installs packages.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(
  debootstrap      # builds the root of the sandbox's VMs
  lua5.4           # tests of burst_buffer.lua
  perl-doc         # some hundred English texts: the demo's corpus
  qemu-user-static # runs the arm64 binaries
  shellcheck       # make lint
  systemd          # systemd-analyze, for make lint; it need not run
  util-linux       # nsenter, setpriv
)

missing=()
for package in "${packages[@]}"; do
  [ "$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null)" = 'install ok installed' ] || missing+=("$package")
done

if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ]; then
    echo "deps: ${missing[*]} not installed, and only root can: run this as root" >&2
    exit 1
  fi
  echo "deps: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  if ! { apt-get update -q && apt-get install -q -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    cat "$log" >&2
    echo "deps: apt-get could not install ${missing[*]}" >&2
    exit 1
  fi
fi

if ! command -v go >/dev/null; then
  echo "deps: Go $(awk '$1 == "go" { print $2 }' go.mod) or newer is needed: see https://go.dev/doc/install" >&2
  exit 1
fi
go mod download
