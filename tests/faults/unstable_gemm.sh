#!/usr/bin/env bash
# A library whose bits depend on more than a row and its tile's height is found by the self-check:
# the plain kernel takes its place on every rank, the header says so, and the result is right. Only
# the stand-in for cuBLASLt can be told to be like that.
set -euo pipefail
# shellcheck source=tests/faults/driver.sh
source "$(dirname "${BASH_SOURCE[0]}")/driver.sh"

fallen="$right|plain|failed the self-check"
#      what                                        np code words     environment -- arguments
agreed "bits depend on the place in a tile"         2 0 "$fallen"    GATEFOLD_FAKE_GPU_GEMM_BY_PLACE=1 "${biased[@]}"
agreed "bits depend on the rows beside"             3 0 "$fallen"    GATEFOLD_FAKE_GPU_GEMM_BY_CONTENT=1 "${biased[@]}"
agreed "bits depend on the call"                    2 0 "$fallen"    GATEFOLD_FAKE_GPU_GEMM_BY_CALL=1 "${biased[@]}"
agreed "they do on rank 1 only"                     2 0 "$fallen"    GATEFOLD_FAKE_GPU_GEMM_BY_CALL=0,1:1 "${biased[@]}"
# These are the same for every row of a batch, whoever multiplies it.
agreed "bits depend on the height of a tile"        4 0 "$right"     GATEFOLD_FAKE_GPU_GEMM_BY_COLUMNS=1 "${biased[@]}"
agreed "the same, where groups share the tokens"    4 0 "$right"     GATEFOLD_FAKE_GPU_GEMM_BY_COLUMNS=1 "${biased[@]}" --tp 2 --token-split 60,4

refuses agreed "a library that is stable"           2 0 "$fallen"    GATEFOLD_FAKE_GPU_GEMM_BY_COLUMNS=0 "${biased[@]}"
finish
