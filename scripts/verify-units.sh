#!/usr/bin/env bash
# systemd-analyze verify on the units and drop-ins that we ship, as they lie on a VM: with a slurmd.service of
# Slurm's and the programs that they start, stand-ins all.
set -euo pipefail
cd "$(dirname "$0")/.."

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
units="$root/etc/systemd/system"
mkdir -p "$units" "$root/usr/lib/systemd"
cp -r packaging/systemd/. "$units"
cp -r /usr/lib/systemd/system "$root/usr/lib/systemd/" # the targets
printf '[Service]\nExecStart=/usr/sbin/slurmd -D\n' >"$units/slurmd.service"
mapfile -t programs < <(sed -n 's/^Exec[A-Za-z]*=[-+!@:]*\([^ ]*\).*/\1/p' "$units"/*.service)
for program in "${programs[@]}"; do
  mkdir -p "$root$(dirname "$program")"
  install -m 755 /dev/null "$root$program"
done

mapfile -t names < <(cd "$units" && printf '%s\n' *.service)
found=$(systemd-analyze verify --man=no --recursive-errors=no --root="$root" "${names[@]}" 2>&1) || true
if [ -n "$found" ]; then
  printf 'systemd-analyze verify:\n%s\n' "${found//$root/}" >&2
  exit 1
fi
