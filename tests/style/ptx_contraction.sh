#!/usr/bin/env bash
# ptx_contraction.sh FILE.ptx…: no kernel holds a fused multiply-add of floats, which rounds once
# where the canonical rule rounds twice.
set -euo pipefail

awk '
  /[.]entry/ { kernel = $0; kernels++ }
  /\tadd[.](rn[.])?f32/ { adds++ }
  /\t(fma|mad)[.][a-z.]*f(16|32|64)/ { print FILENAME ": " kernel ": " $0; fused++ }
  END {
    if (kernels < 50 || adds == 0) print "only " kernels + 0 " kernels with " adds + 0 " sums seen"
    exit fused > 0 || kernels < 50 || adds == 0
  }
' "$@"
