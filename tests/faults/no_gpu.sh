#!/usr/bin/env bash
# NVIDIA's own libraries on a machine without a GPU: --device cuda ends every rank with 69 within 5 s
# and one line, and --device auto works without one and says so. Skipped where there is a GPU.
set -euo pipefail
if "$GATEFOLD_BUILD/tests/gpu_probe" >/dev/null; then
  echo "skipped: faults.no_gpu (this machine has a GPU)"
  exit 77
fi
# shellcheck source=tests/faults/driver.sh
source "$(dirname "${BASH_SOURCE[0]}")/driver.sh"

# refused NAME NP: in time, and one line in all.
refused() {
  agreed "$1" "$2" 69 "no CUDA device (|use --device cpu" -- verify --model "$model" --device cuda
  once "$1" "gatefold: "
  if ((${seconds%.*} >= 5)); then fails "$1" "it took longer than 5 s"; fi
}
refused "--device cuda on 1 rank" 1
refused "--device cuda on 3 ranks" 3
agreed "--device auto on 3 ranks" 3 0 "$right|(no CUDA device: " -- verify --model "$model"
single "--version" 0 "no CUDA device (" -- --version
if ((${seconds%.*} >= 5)); then fails "--version" "it took longer than 5 s"; fi
finish
