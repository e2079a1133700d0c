#!/usr/bin/env bash
# No shell script here gives shellcheck anything to say.
set -euo pipefail

if ! command -v shellcheck >/dev/null; then
  echo "skipped: style.shellcheck (shellcheck is not installed)"
  exit 77
fi
mapfile -t scripts < <(
  find .ci launch tests -type f -print0 |
    xargs -0 awk 'FNR == 1 { if (/^#!.*[\/ ](ba)?sh( |$)/ || FILENAME ~ /[.](sh|sbatch)$/) print FILENAME
                             nextfile }'
)
if ((${#scripts[@]} < 2)); then
  echo "no shell scripts found, though .ci/run and launch/test are some"
  exit 1
fi
shellcheck -x "${scripts[@]}"
