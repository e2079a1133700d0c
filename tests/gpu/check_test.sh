#!/usr/bin/env bash
# check_test.sh BUILD: tests/gpu/check on the stand-ins: what passes, and that it can fail.
set -euo pipefail
cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

build=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

expect() { # CODE TEXT COMMAND…: what the command must end with, and say or log
  local wanted=$1 text=$2 status=0
  shift 2
  rm -f "$folder"/*.log
  "$@" >"$folder/said.log" 2>&1 || status=$?
  if [[ $status != "$wanted" ]] || ! grep -q -- "$text" "$folder"/*.log; then
    cat "$folder"/*.log
    echo "exit code $status instead of $wanted, or no '$text': $*"
    exit 1
  fi
}

check=(tests/gpu/check --build "$build" --logs "$folder")

# A machine whose nvidia-smi finds nothing.
mkdir "$folder/no_gpu"
printf '#!/bin/sh\nexit 9\n' >"$folder/no_gpu/nvidia-smi"
chmod +x "$folder/no_gpu/nvidia-smi"
expect 69 "no GPU" env -u GATEFOLD_FAKE_GPU PATH="$folder/no_gpu:$PATH" "${check[@]}"
expect 64 "usage" "${check[@]}" no_such_step
expect 64 "usage" "${check[@]}" --build

export GATEFOLD_CHECK_TESTS='^cublas\.gpu$'
expect 0 "1, 2, 4 and 8 ranks on one GPU" "${check[@]}" facts tests ranks
expect 0 "not a speed: FakeGPU" "${check[@]}" speed bench pytorch sanitizer
expect 1 "ranks .* FAILED: exit code" env GATEFOLD_FAKE_GPU_FAIL=launch:5@1 "${check[@]}" ranks
expect 1 "tests .* FAILED: exit code" env GATEFOLD_CHECK_TESTS=none_such "${check[@]}" tests
expect 1 "speed .* FAILED: not finished within [1-3] s" \
  env GATEFOLD_FAKE_GPU_FAIL=hang:1 GATEFOLD_CHECK_SECONDS=3 "${check[@]}" speed
expect 0 "nccl .* reported only" \
  env GATEFOLD_FAKE_GPU_FAIL=nccl_refuse:1 GATEFOLD_CHECK_SECONDS=10 "${check[@]}" nccl
