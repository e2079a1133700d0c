#!/usr/bin/env bash
# installed.sh BUILD MODEL MPIRUN…: what is installed from BUILD is the program that was built, whole,
# runs on the stand-ins, and brings none of them along.
set -euo pipefail
build=$1 model=$2
shift 2

prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT
cmake --install "$build" --prefix "$prefix" >/dev/null
build_id() { readelf -n "$1" | grep -o 'Build ID: .*'; }
if ! built=$(build_id "$build/gatefold"); then
  echo "$build/gatefold has no build id"
  exit 1
fi
if [[ $built != $(build_id "$prefix/bin/gatefold") ]]; then
  echo "another program was installed than was built"
  exit 1
fi
if find "$prefix" | grep -E 'fake|\.so'; then
  echo "these are no part of what users get"
  exit 1
fi
"$@" -n 3 "$prefix/bin/gatefold" verify --device cuda --layers 0 --model "$model" | tee "$prefix/out"
grep -q 'FakeGPU' "$prefix/out"
