#!/usr/bin/env bash
# What is not built is a stub file that CMake chooses, never a preprocessor branch.
set -euo pipefail

if grep -rnE --include='*.h' --include='*.cpp' --include='*.cuh' --include='*.cu' \
  '^[[:space:]]*#[[:space:]]*(if|ifdef|ifndef|elif|else|endif)\b' runtime parallel layers launch; then
  echo "a preprocessor branch (see above); put the alternative into a file of its own"
  exit 1
fi
