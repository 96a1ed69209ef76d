#!/usr/bin/env bash
# Runs each arm64 binary in bin/arm64 on this machine, emulated: it starts, reads its input and answers.
set -euo pipefail
cd "$(dirname "$0")/../bin/arm64"

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export SLUICE_ROOT="$dir"

# run NAME STATUS TEXT ARGUMENT...: the program ends with the status and says the text.
run() {
  local name=$1 status=$2 text=$3 out got=0
  shift 3
  out=$(qemu-aarch64-static "./$name" "$@" 2>&1 </dev/null) || got=$?
  if [ "$got" != "$status" ] || [[ $out != *"$text"* ]]; then
    printf 'smoke-arm64: %s %s: exit status %s (want %s), without %q:\n%s\n' "$name" "$*" "$got" "$status" "$text" "$out" >&2
    exit 1
  fi
  echo "smoke-arm64: $name: ok"
}

for name in *; do
  header=$(od -An -tx1 -j18 -N2 "$name") # e_machine
  [ "$header" = ' b7 00' ] || { echo "smoke-arm64: $name is not for arm64" >&2; exit 1; }
done
printf '#!/bin/bash\n#SLUICE stage_im source=gs://b/p/ name=n\n' >"$dir/job.sh"
run sluice 0 sluice version
run sluice 4 'no such sandbox' sandbox status
run sluiced 0 sluiced --version
run sluiced 1 sluice.yaml --config "$dir/sluice.yaml"
run sluice-agent 2 flag -version
run sluice-hook 0 'did you mean stage_in?' bb job_process --script="$dir/job.sh"
SLURM_JOB_ID=1 SLURM_JOB_UID=1500000001 SLURMD_NODENAME=n1 run sluice-epilog 0 ''
run sluice-prolog 0 'no job id'
run sluice-guest 2 usage
run trainer 0 '' --data ../../docs --out "$dir/out" --steps 20
[ -e "$dir/out/_SUCCESS" ]
