#!/usr/bin/env bash
# contraction.sh OBJDUMP ARCHIVE…: no object holds a fused multiply-add, which rounds once where
# the canonical rule rounds twice.
set -euo pipefail

objdump=$1
shift
status=0
for archive in "$@"; do
  "$objdump" -d --no-show-raw-insn "$archive" | awk -v archive="$archive" '
    /^[^ ]+[.]o:/ { object = $1 }
    /^[0-9a-f]+ <.*>:$/ { symbol = $2 }
    /^ +[0-9a-f]+:\t/ { instructions++ }
    /\tvf[n]?m(add|sub)/ { print archive " " object " " symbol " " $0; fused++ }
    END {
      if (instructions == 0) print archive ": no instructions seen"
      exit fused > 0 || instructions == 0
    }
  ' || status=1
done
exit "$status"
