#!/usr/bin/env bash
# misuse.sh PROGRAM: a table of what the stand-in libcudart must find, and how a program hears of it.
set -uo pipefail

program=$1
failures=0

# check SETTINGS CASE STDOUT STDERR: stdout's lines joined by spaces, or -; a pattern of stderr
check() {
  local settings=$1 case=$2 wanted_out=$3 wanted_err=$4 out err
  err=$(mktemp)
  # shellcheck disable=SC2086
  out=$(env $settings "$program" "$case" 2>"$err" | paste -sd ' ')
  if [[ $wanted_out != - && $out != "$wanted_out" ]] ||
    { [[ -n $wanted_err ]] && ! grep -qE -- "$wanted_err" "$err"; }; then
    printf 'FAILED: %s %s\n  wanted "%s" and /%s/\n  got "%s" and\n' \
      "$settings" "$case" "$wanted_out" "$wanted_err" "$out"
    cat "$err"
    ((failures++))
  fi
  rm -f "$err"
}

ok=cudaSuccess
broken="cudaErrorLaunchFailure cudaErrorLaunchFailure"
bad=cudaErrorInvalidValue
prefix='FAKE GPU \[rank 0\]: '

check "" nothing "$ok $ok $ok" '^FAKE GPU: results prove logic only$'
check "GATEFOLD_FAKE_GPU=0" nothing "" 'is a stand-in for tests'
check "" one_branch_waits "$ok $broken" 'one_branch_waits.*: divergent barrier: thread .*cuh:11, .*cuh:14$'
check "" some_leave_early "$ok $broken" 'divergent barrier: .*waits at .*cuh:20, .*has ended$'
check "" lane_outside_its_mask "$ok $broken" 'the mask leaves out the calling lane'
check "" trap "$ok $broken" '__trap\(\) at .*cuh:37 in thread \(5,0,0\) of block \(0,0,0\)$'
check "" unchecked_launch "cudaErrorLaunchFailure $broken" 'no cudaGetLastError after the launch of'
check "" no_barrier "$ok poison: seen $ok $ok $ok" ''
check "" no_barrier_below "$ok poison: seen $ok $ok $ok" ''
check "GATEFOLD_FAKE_GPU_SEED=2" no_barrier "$ok poison: seen $ok $ok $ok" ''
check "GATEFOLD_FAKE_GPU_DELAY_MS=5000" missing_wait "$ok $ok $ok $ok value: -1 $ok $ok $ok" ''
check "" outside "$bad $bad $bad $bad $ok $ok" "${prefix}cudaMemcpy: destination leaves its allocation"
check "" wrong_way "$bad $bad $bad $ok $ok" "the direction isn't the pointers'"
check "" twice_freed "$ok $bad $bad $ok $ok" 'cudaFree: not the start of a live allocation'
check "" call_in_host_function "$ok cudaErrorNotPermitted $ok $ok $ok $ok" 'host function on a stream calls'

fail=GATEFOLD_FAKE_GPU_FAIL
check "$fail=malloc:1" nothing "cudaMalloc: cudaErrorMemoryAllocation" ''
check "$fail=malloc:2,malloc:1@1" nothing "$ok $ok $ok" ''
check "$fail=malloc:2,malloc:1@1 PMI_RANK=1" nothing "cudaMalloc: cudaErrorMemoryAllocation" ''
check "$fail=launch:1" nothing "$ok $broken" 'fill.* fails, as asked'
check "$fail=copy:1" copy "cudaErrorIllegalAddress cudaErrorIllegalAddress cudaErrorIllegalAddress cudaErrorIllegalAddress" 'a copy fails, as asked'
check "GATEFOLD_FAKE_GPU_MEMORY=255" nothing "cudaMalloc: cudaErrorMemoryAllocation" ''
check "GATEFOLD_FAKE_GPU_MEMORY=256" nothing "$ok $ok $ok" ''
check "GATEFOLD_FAKE_GPU_MEMORY=0,0:256" nothing "$ok $ok $ok" ''
check "GATEFOLD_FAKE_GPU_DEVICES=0" nothing "cudaMalloc: cudaErrorNoDevice" ''
check "CUDA_VISIBLE_DEVICES=" nothing "cudaMalloc: cudaErrorNoDevice" ''
check "CUDA_VISIBLE_DEVICES=7" nothing "$ok $ok $ok" ''
check "CUDA_VISIBLE_DEVICES=8" nothing "cudaMalloc: cudaErrorNoDevice" ''
check "GATEFOLD_FAKE_GPU_DRIVER=12080" nothing "cudaMalloc: cudaErrorInsufficientDriver" ''
check "GATEFOLD_FAKE_GPU_KERNELS=" nothing "cudaErrorInvalidDeviceFunction $ok $ok" 'has the kernel _ZN6misuse4fill'

if [[ -z ${LD_PRELOAD-} ]]; then
  check "GATEFOLD_FAKE_GPU_CLOSED=1" nothing "$ok $ok $ok" ''
  check "GATEFOLD_FAKE_GPU_CLOSED=1" host_reads - 'the host reads or writes device memory'
  check "" write_past_shared "$ok $broken" 'wrote past its 40 bytes of dynamic shared memory'
  check "" one_too_many "$ok cudaErrorIllegalAddress cudaErrorIllegalAddress" 'wrote beside a device allocation of 256 bytes'
else
  check "" write_past_shared - 'misuse_kernels.cuh:42'
  check "" one_too_many - 'misuse_kernels.cuh:48'
  check "" after_free - 'heap-use-after-free|misuse_kernels.cuh:48'
  check "" misaligned - 'misuse_kernels.cuh:53.*misaligned address'
fi

((failures == 0))
