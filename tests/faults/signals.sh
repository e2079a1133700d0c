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

# Rank 0 is in the middle of a model: nothing of it stays, though mpirun kills all ranks as soon as
# one has ended.
halfway=(GATEFOLD_ALTER=wait:rename:2:0 -- make-model --shards 3 --layers 0-1
  --config "${model%/tests/*}/configs/smollm2-135m.json" --output "$scratch/models/made")
mkdir "$scratch/models"
for to in "TERM mpirun !0 terminated" "INT mpirun !0 terminated" "HUP mpirun !0 terminated" \
  "TERM 0 143 terminated" "INT 0 130 interrupted" "HUP 0 129 hung.up" "TERM 1 143 terminated"; do
  read -r name who code word <<<"$to"
  signalled "SIG$name for $who, half a model" 3 "$code" "$word while in: writing the model" 0 \
    "$name" "$who" "${halfway[@]}"
  left=$(ls -A "$scratch/models")
  if [[ -n $left ]]; then fails "nothing of the model stays" "$left is left"; fi
  rm -rf "$scratch/models/"* "$scratch/models/".g*
done

# Any rank may be the last that is there to remove what all have written to: rank 0 before the model
# has its name, another one in the middle.
for fault in kill:rename:3:0 kill:pwrite:2:1; do
  lost "$fault, half a converted model" 3 137 "" "" "GATEFOLD_ALTER=$fault" -- \
    convert --model "$model" --output "$scratch/models/made" --shards 3
  left=$(ls -A "$scratch/models")
  if [[ -n $left ]]; then fails "nothing of the converted model stays" "$left is left"; fi
  rm -rf "$scratch/models/"* "$scratch/models/".g*
done

# A file that is not finished doesn't take the place of an older one.
echo old >"$scratch/report.json"
lost "killed before a report has its name" 2 137 "" "" GATEFOLD_ALTER=kill:rename:1:0 -- \
  verify --model "$model" --json "$scratch/report.json"
if [[ $(<"$scratch/report.json") != old ]]; then fails "the older report" "it is gone"; fi
finish
