#!/usr/bin/env bash
# A job that is told to end does so at once, and its ranks say what they were doing.
set -euo pipefail
# shellcheck source=tests/faults/driver.sh
source "$(dirname "${BASH_SOURCE[0]}")/driver.sh"

work=(GATEFOLD_FAULT=linger@loading -- verify --model "$model")
ended="terminated while in: (the GEMM self-check|loading weights)"

#         what                         np code  pattern  ranks signal to
signalled "SIGTERM for mpirun"          3 '!0'  "$ended" 0,1,2 TERM   mpirun patience=1 "${work[@]}"
signalled "SIGTERM for rank 0"          3 143   "$ended" 0,1,2 TERM   0      patience=1 "${work[@]}"
signalled "SIGTERM for rank 2"          3 143   "$ended" 0,1,2 TERM   2      patience=1 "${work[@]}"
signalled "SIGINT for mpirun"           3 '!0'  ""       ""    INT    mpirun "${work[@]}"
signalled "SIGHUP for mpirun"           3 '!0'  ""       ""    HUP    mpirun "${work[@]}"
signalled "SIGKILL for mpirun"          3 137   ""       ""    KILL   mpirun "${work[@]}"
signalled "SIGSEGV for rank 1"          3 139   "$ended" "0|2" SEGV   1      "${work[@]}"

# A file that is not finished doesn't take the place of an older one.
echo old >"$scratch/report.json"
lost "killed before a report has its name" 2 137 "" "" GATEFOLD_ALTER=kill:rename:1:0 -- \
  verify --model "$model" --json "$scratch/report.json"
if [[ $(<"$scratch/report.json") != old ]]; then fails "the older report" "it is gone"; fi
finish
