#!/usr/bin/env bash
# Starts training from the newest intact iteration.
#   resume.sh ROOT COMMAND…      COMMAND gets --load ROOT --ckpt-step N; if ROOT has no iterations, it gets neither
# If ROOT has iterations but none of them is intact, nothing is started: starting over is your decision.
set -euo pipefail
root=$1
shift
mkdir -p "$root"
code=0
report=$(ckpt validate --newest-valid "$root" --json) || code=$?
((code <= 1)) || exit "$code"
read -r step n_skipped < <(
  python3 -c 'import json, sys; a = json.load(sys.stdin); print("-" if a["iteration"] is None else a["iteration"], len(a["skipped"]))' <<< "$report"
)
if [[ $step != - ]]; then
  exec "$@" --load "$root" --ckpt-step "$step"
elif ((n_skipped == 0)); then
  exec "$@"
fi
exit 1
