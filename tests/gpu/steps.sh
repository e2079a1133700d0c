#!/usr/bin/env bash
# tests/gpu/steps.sh STEP BUILD: one step of tests/gpu/check, from the root of the checkout. Exit code
# 77 is a step that had nothing to run on.
set -euo pipefail

build=$2
cores=$(env -u OMP_NUM_THREADS nproc) # which nproc would take for an answer
rehearsal=${GATEFOLD_FAKE_GPU:-0}
fixture=tests/fixtures/smollm2-135m-instruct
if [[ $rehearsal == 1 ]]; then fixture=tests/golden/llama/bf16; fi # stand-ins are slow

# What tests/gpu/pack has fetched, where there is such a folder.
use_packages() {
  local root=$PWD/build-packages/usr
  [[ -d $root ]] || return 0
  local lib=$root/lib/x86_64-linux-gnu
  export PATH=$root/bin:$PATH OPAL_PREFIX=$root CMAKE_PREFIX_PATH=$root
  export LD_LIBRARY_PATH=$lib:$lib/pmix2/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  # Components for networks and compression that this machine has no libraries for.
  export OMPI_MCA_mca_base_component_show_load_errors=0 PMIX_MCA_pcompress_base_silence_warning=1
}

use_stand_ins() {
  [[ $rehearsal == 1 ]] || return 0
  local kernels
  kernels=$(printf '%s:' "$build"/tests/fake_gpu/kernels/*.so)
  export GATEFOLD_FAKE_GPU_KERNELS=${kernels%:} GATEFOLD_FAKE_GPU_DEVICES=1
  export LD_LIBRARY_PATH=$build/tests/fake_gpu/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}

skip() { # WHY
  echo "skipped: $*"
  exit 77
}

launch() { # RANKS COMMAND…
  local ranks=$1
  shift
  mpirun --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 \
    --mca btl_vader_backing_directory /tmp -n "$ranks" "$@"
}

# Where no repository came along: what the same command prints in a checkout tells which it was.
source_hash() {
  find CMakeLists.txt runtime parallel layers launch tests -type f ! -path 'tests/gpu/logs/*' -print0 |
    LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum
}

step_facts() {
  date -u +"date      %Y-%m-%d %H:%M UTC"
  [[ $rehearsal != 1 ]] || echo "REHEARSAL ON STAND-INS: proves logic only, and no speed"
  echo "source    $(git describe --always --dirty 2>/dev/null || source_hash)"
  echo "machine   $(uname -sr), $cores cores, $(. /etc/os-release && echo "$PRETTY_NAME")"
  if [[ $rehearsal != 1 ]]; then
    nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total --format=csv,noheader |
      sed 's/^/GPU       /'
  fi
  local tool
  for tool in "nvcc --version" "g++ --version" "cmake --version" "ninja --version" \
    "mpirun --version"; do
    # shellcheck disable=SC2086
    printf '%-9s %s\n' "${tool%% *}" "$($tool 2>&1 | grep -E '[0-9]\.[0-9]' | head -n 1)"
  done
}

# CMake's options for libraries that lie beside Python's packages instead of the toolkit.
library_options() {
  local toolkit site
  toolkit=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
  site=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null || true)
  found() { [[ -e $toolkit/include/$1 || -e /usr/include/$1 || -e /usr/local/include/$1 ]]; }
  if ! found cublasLt.h && [[ -e $site/cu13/include/cublasLt.h ]]; then
    echo "-DCMAKE_CXX_FLAGS=-isystem $site/cu13/include"
    echo "-DCMAKE_CUDA_FLAGS=-isystem $site/cu13/include"
    echo "-DCUDA_cublas_LIBRARY=$site/cu13/lib/libcublas.so.13"
    echo "-DCUDA_cublasLt_LIBRARY=$site/cu13/lib/libcublasLt.so.13"
  fi
  if ! found nccl.h; then
    if [[ -e $site/nccl/include/nccl.h ]]; then
      echo "-DNCCL_INCLUDE_DIR=$site/nccl/include"
      echo "-DNCCL_LIBRARY=$site/nccl/lib/libnccl.so.2"
    else
      echo "-DGATEFOLD_NCCL=OFF"
    fi
  fi
  found dnnl.hpp || echo "-DGATEFOLD_ONEDNN=OFF"
}

step_build() {
  local architecture=90 options targets=(gatefold gpu_tests)
  if [[ $rehearsal == 1 ]]; then
    targets+=(fake_gpu_all)
  else
    architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
  fi
  mapfile -t options < <(library_options)
  cmake --preset cuda-release -B "$build" -DCMAKE_CUDA_ARCHITECTURES="$architecture" "${options[@]}"
  cmake --build "$build" --parallel "$cores" --target "${targets[@]}"
  "$build/gatefold" --version
}

# ctest of tests with label gpu. A test that is skipped has proved nothing.
gpu_tests() { # CTEST-ARGUMENT…
  local report
  report=$(mktemp)
  ctest --test-dir "$build" -L '^gpu$' --no-tests=error --output-on-failure "$@" | tee "$report"
  if grep -q '\*\*\*Skipped\|\*\*\*Not Run' "$report"; then
    echo "tests were skipped, though there is a GPU"
    return 1
  fi
}

# Those in which NCCL has several ranks on one GPU.
nccl_tests='^(nccl|callers_gpu)'

step_tests() { gpu_tests -R "${GATEFOLD_CHECK_TESTS:-.}" -E "$nccl_tests"; }

# The same layer on 1 to 8 ranks of one GPU: no bit may differ.
# same_bits TOKENS MODEL-OPTION…: verifies layer after layer on 1, 2, 4 and 8 ranks that share a GPU.
same_bits() {
  local tokens=$1 ranks scratch found first=''
  shift
  scratch=$(mktemp -d)
  for ranks in 1 2 4 8; do
    launch "$ranks" "$build/gatefold" verify --device cuda --comm mpi "$@" \
      --tokens "$tokens" --json "$scratch/$ranks.json"
    found=$(grep -o '"fingerprint": "[^"]*"' "$scratch/$ranks.json")
    first=${first:-$found}
    if [[ $found != "$first" ]]; then
      echo "the bits of $ranks ranks are others than those of one: $found, not $first"
      return 1
    fi
  done
  rm -r "$scratch"
  echo "1, 2, 4 and 8 ranks on one GPU: $first"
}

step_ranks() {
  same_bits 96 --model "$fixture"
  local experts=(--config configs/qwen3-30b-a3b.json --set num_experts=16)
  if [[ $rehearsal == 1 ]]; then
    experts+=(--set hidden_size=64 --set moe_intermediate_size=32 --set num_experts_per_tok=2)
  fi
  same_bits 64 "${experts[@]}"
}

# Several ranks of NCCL on one GPU, each a host of its own to NCCL; NVIDIA supports no such thing.
step_nccl() {
  export NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_MNNVL_ENABLE=0 \
    NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=2 NCCL_RAS_ENABLE=0
  local ranks
  for ranks in 2 4; do
    # shellcheck disable=SC2016
    launch "$ranks" bash -c 'NCCL_HOSTID=rank$OMPI_COMM_WORLD_RANK exec "$@"' - \
      "$build/gatefold" verify --device cuda --comm nccl --model "$fixture" --tokens 70
  done
  gpu_tests -R "$nccl_tests"
}

step_speed() { "$build/tests/gpu_speed"; }

# The program's own benchmark: of one rank, and of two that share the GPU through host memory.
step_bench() {
  [[ $rehearsal != 1 ]] || exec >/dev/null # times of a stand-in are no speeds
  local inputs=(--config configs/llama-3.1-8b.json --tokens 512 --dtype bf16) shared=()
  if [[ $rehearsal == 1 ]]; then
    # Stand-ins take long to read a quarter of a gigabyte, which cold weights are judged by.
    inputs=(--model "$fixture" --layers 0 --tokens 70 --iterations 1 --warmup 0 --hot)
    shared=(--hot)
  fi
  launch 1 "$build/gatefold" bench --device cuda "${inputs[@]}"
  launch 2 "$build/gatefold" bench --device cuda --comm mpi --model "$fixture" --layers 0 \
    --tokens 70 --iterations 3 "${shared[@]}"
}

step_pytorch() {
  [[ $rehearsal != 1 ]] || skip "a rehearsal has no GPU for PyTorch"
  # Its own libraries, not the packages'.
  env -u LD_LIBRARY_PATH python3 -c 'import torch' 2>/dev/null || skip "python3 has no torch"
  env -u LD_LIBRARY_PATH python3 tests/gpu/pytorch_mlp.py
}

step_sanitizer() {
  [[ $rehearsal != 1 ]] || skip "compute-sanitizer needs a GPU"
  command -v compute-sanitizer >/dev/null || skip "compute-sanitizer is not installed"
  compute-sanitizer --tool memcheck --error-exitcode 99 "$build/tests/cuda_device" \
    --gtest_filter='*Tiles*:*Joins*:*Adds*'
}

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
use_packages
[[ $1 == build ]] || use_stand_ins
"step_$1"
