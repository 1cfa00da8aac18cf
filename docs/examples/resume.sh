#!/usr/bin/env bash
# Starts a training from the newest iteration that is whole.
#   resume.sh ROOT COMMAND…      COMMAND gets --load ROOT --ckpt-step N; without iterations in ROOT, nothing
# Where there are iterations and none of them is whole, nothing is started: to begin anew would be a decision.
set -euo pipefail
root=$1
shift
mkdir -p "$root"
code=0
found=$(ckpt validate --newest-valid "$root" --json) || code=$?
((code <= 1)) || exit "$code"
read -r step n_skipped < <(
  python3 -c 'import json, sys; a = json.load(sys.stdin); print("-" if a["iteration"] is None else a["iteration"], len(a["skipped"]))' <<< "$found"
)
if [[ $step != - ]]; then
  exec "$@" --load "$root" --ckpt-step "$step"
elif ((n_skipped == 0)); then
  exec "$@"
fi
exit 1
