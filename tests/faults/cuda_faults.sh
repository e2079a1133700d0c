#!/usr/bin/env bash
# cuda_faults.sh [experts] COMM…: what GPUs, cuBLASLt and NCCL can do to a job whose ranks talk by COMM
# (mpi, nccl), and with `experts` to a mixture of experts alone. It ends within the deadline and 5 s, with the right code and one line that says why. The
# stand-ins plant the faults: see tests/fake_gpu/README.md.
set -euo pipefail
# shellcheck source=tests/faults/driver.sh
source "$(dirname "${BASH_SOURCE[0]}")/driver.sh"

cat >"$scratch/tiny.json" <<'JSON'
{"model_type": "gatefold_ffn", "hidden_size": 16, "intermediate_size": 32, "gated": true,
 "activation": "silu", "bias": true, "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
JSON
verify=(-- verify --config "$scratch/tiny.json" --tokens 4)
in_step="the distributed forward pass"

# together NAME NP CODE WORDS NAME=VALUE… -- ARGUMENT…: every rank ends by itself with CODE, in time;
# WORDS are said and, unless CODE is 0, one line in all.
together() {
  local before=$failed problems=()
  agreed "$@" --timeout "$timeout"
  if ((failed > before)); then return; fi
  if (($3 != 0)); then once "$1" "gatefold: "; fi
  check_loss "" ""
  if ((${#problems[@]} > 0)); then fails "$1" "${problems[@]}"; fi
}

# by_itself NAME CODE PATTERN RANKS NAME=VALUE… -- ARGUMENT…: of three ranks, RANKS (1: that one;
# 0|2: one of them at least) notice, say PATTERN and end the job with CODE. mpirun ends the others,
# who say where they were. No rank says more than one line of its own.
by_itself() {
  local name=$1 code=$2 pattern=$3 who=$4 problems=() rank own ended=0
  shift 4
  start 3 "$@" --timeout "$timeout"
  if ((status != code)); then problems+=("mpirun ended with $status instead of $code"); fi
  for rank in 0 1 2; do
    own=killed
    if [[ -s $job/status.$rank ]]; then own=$(<"$job/status.$rank"); fi
    if [[ $own == "$code" && "|$who|" == *"|$rank|"* ]]; then ended=1; fi
    # 75: a peer of the one that noticed, a moment later.
    if [[ ! $own =~ ^($code|75|137|143|killed)$ ]]; then problems+=("rank $rank ended with $own"); fi
    if (($(grep -c "gatefold: " "$job/stderr.$rank") > 1)); then
      problems+=("rank $rank said more than one line")
    fi
  done
  if ((ended == 0)); then problems+=("no rank of $who ended with $code"); fi
  check_loss "gatefold: .*$pattern" "$who"
  ends "$name" "${problems[@]}"
}

# last POINT: rank 1's last call of POINT in the last job, which counted them: its part of the step.
last() { sed -n "s/.*rank 1\]: calls of $1: //p" "$job/stderr.1"; }

# The last three name calls: launch:3@1 is the third launch of rank 1.
count=GATEFOLD_FAKE_GPU_COUNT=1
fail=GATEFOLD_FAKE_GPU_FAIL
kill_at=GATEFOLD_FAKE_GPU_KILL
stop_at=GATEFOLD_FAKE_GPU_STOP

at_start() {
  local cuda=("${verify[@]}" --device cuda --comm mpi) auto=("${verify[@]}" --device auto)
  #        what                               np code words
  together "no GPU on one rank"               3  69 "rank 1: no CUDA device (no CUDA-capable|use --device cpu" GATEFOLD_FAKE_GPU_DEVICES=8,1:0 "${cuda[@]}"
  together "no GPU on one rank, any would do" 3  0  "$right|(no CUDA device: " GATEFOLD_FAKE_GPU_DEVICES=8,1:0 "${auto[@]}"
  together "an old driver on one rank"        3  69 "rank 1: no CUDA device (|: 12.4, not 1" GATEFOLD_FAKE_GPU_DRIVER=13000,1:12040 "${cuda[@]}"
  together "no cuBLASLt on one rank"          2  69 "rank 1: cuBLASLt can't be used (" "$fail=cublas_create:1@1" "${cuda[@]}"
  together "no stream on one rank"            2  71 "rank 1: getting hold of the GPU failed (cudaErrorMemoryAllocation" "$fail=stream:1@1" "${cuda[@]}"
  together "too little memory on one rank"    3  71 "rank 1: |bytes of GPU memory could not be had (|use more ranks" GATEFOLD_FAKE_GPU_MEMORY=1000000000,1:36000000 "${cuda[@]}"
  together "no pinned memory on one rank"     2  71 "rank 1: |bytes of pinned host memory could not be had" "$fail=host_malloc:1@1" "${cuda[@]}"
  together "a GEMM fails in the self-check"   2  70 "rank 1: cublasLtMatmul failed (" "$fail=gemm:1@1" "${cuda[@]}"
  together "a GEMM's kernel breaks the GPU"   2  70 "rank 1: |cudaErrorIllegalAddress" "$fail=gemm_kernel:1@1" "${cuda[@]}"
  together "a launch fails while loading"     2  70 "rank 1: the GPU's work failed (cudaErrorLaunchFailure" "$fail=launch:1@1" "${cuda[@]}"
  together "a copy fails"                     2  70 "rank 1: |cudaErrorIllegalAddress" "$fail=copy:1@1" "${cuda[@]}"
  together "no algorithm for a shape"         2  0  "$right|plain bf16 kernel" "$fail=heuristic:1@0" "${cuda[@]}"
  by_itself "a kernel never ends while loading" 75 "no answer from rank 1 for 3 s .* loading weights" "0|2" "$fail=hang:1@1" "${cuda[@]}"
}

# Every call in which one rank can fail while the others wait for it.
in_a_step() { # COMM
  local cuda=("${verify[@]}" --device cuda --comm "$1")
  together "$1: nothing planted"              3  0  "$right" "$count" "${cuda[@]}"
  local gemm launch malloc
  gemm=$(last gemm) launch=$(last launch) malloc=$(last malloc)
  local early=$((launch - 2))  # its peers wait for what it computes
  together  "$1: out of memory at the end of set-up" 3 71 "rank 1: |GPU memory could not be had (" "$fail=malloc:$malloc@1" "${cuda[@]}"
  # The reason comes before an end that may hang.
  by_itself "$1: a GEMM fails"                70 "cublasLtMatmul failed \(.*\); " 1 "$fail=gemm:$gemm@1,nccl_abort:1" "${cuda[@]}"
  by_itself "$1: a GEMM fails, survivors"     70 "cublasLtMatmul failed \(.*\); " 1 survivors=1 "$fail=gemm:$gemm@1" "${cuda[@]}"
  by_itself "$1: a GEMM's kernel breaks the GPU" 70 "\(cudaErrorIllegalAddress.*\); " 1 "$fail=gemm_kernel:$gemm@1" "${cuda[@]}"
  by_itself "$1: a launch fails"              70 "\(cudaErrorLaunchFailure.*\); " 1 "$fail=launch:$early@1" "${cuda[@]}"
  by_itself "$1: the last launch fails"       70 "\(cudaErrorLaunchFailure.*\); " 1 "$fail=launch:$launch@1" "${cuda[@]}"
  by_itself "$1: a kernel never ends"         75 "no (answer|progress) .*$in_step" "0|1|2" "$fail=hang:$early@1" "${cuda[@]}"
  by_itself "$1: a rank stops"                75 "no answer .*$in_step" "0|2" "$stop_at=gemm:$gemm@1" "${cuda[@]}"
  # mpirun's own code, but where it lets the others live.
  lost  "$1: a rank is killed"             3 137 "terminated while in: $in_step" "0|2" "$kill_at=gemm:$gemm@1" "${cuda[@]}"
  alone "$1: a rank is killed, survivors"  3 75  "(no answer|lost its peer)|while in: $in_step" "0|2" "$kill_at=gemm:$gemm@1" "${cuda[@]}"
}

over_nccl() {
  local cuda=("${verify[@]}" --device cuda --comm nccl) any=("${verify[@]}" --device cuda)
  local exchange="an exchange with its peers failed"
  together "two ranks on one GPU"             2  69 "(rank 0 and rank 1 share GPU |; use --comm mpi" GATEFOLD_FAKE_GPU_DEVICES=1 "${cuda[@]}"
  together "two ranks on one GPU, any comm"   2  0  "$right|through host memory (rank 0 and rank 1 share GPU " GATEFOLD_FAKE_GPU_DEVICES=1 "${any[@]}"
  together "a rank never joins"               3  75 "no answer for 1.5 s in the start of NCCL" "$fail=nccl_init:1@2" "${cuda[@]}"
  together "a rank of the second group never joins" 4 75 "gatefold: rank 2: no answer for 1.5 s in the start of NCCL" "$fail=nccl_init:1@3" "${cuda[@]}" --tp 2
  by_itself "a call is refused"               70 "ncclGroupEnd failed \(.*\); " 1 "$fail=nccl_refuse:1@1" "${cuda[@]}"
  by_itself "an asynchronous error"           70 "$exchange \(.*planted: this launch fails.*\); " 1 "$fail=nccl_fail:1@1" "${cuda[@]}"
  by_itself "an asynchronous error, survivors" 70 "$exchange \(.*planted: this launch fails.*\); " 1 survivors=1 "$fail=nccl_fail:1@1" "${cuda[@]}"
  by_itself "an exchange never completes"     75 "no answer for 3 s in an exchange .*$in_step" "0|1|2" "$fail=nccl_stall:1@1" "${cuda[@]}"
  by_itself "an all-reduce never completes"   75 "no answer for 3 s in an all-reduce .*$in_step" "0|1|2" "$fail=nccl_stall:1@1" "${cuda[@]}" --reduce fast
  by_itself "no abort comes back"             75 "no answer .*; ncclCommAbort has not come back for 2 s" "0|1|2" "$fail=nccl_stall:1@1,nccl_abort:1" "${cuda[@]}"
  by_itself "an error, and no abort comes back" 70 "$exchange .*; ncclCommAbort has not come back for 2 s" 1 "$fail=nccl_fail:1@1,nccl_abort:1" "${cuda[@]}"
  lost  "a rank is killed in an exchange"   3 137 "while in: $in_step" "0|2" "$kill_at=nccl_refuse:1@1" "${cuda[@]}"
  alone "a rank is killed in an exchange, survivors" 3 75 "lost its peer|while in: $in_step" "0|2" "$kill_at=nccl_refuse:1@1" "${cuda[@]}"
  alone "and NCCL doesn't say so"           3 75 "no answer for 3 s in an exchange|while in: $in_step" "0|2" GATEFOLD_FAKE_GPU_SILENT_DEATH=1 "$kill_at=nccl_refuse:1@1" "${cuda[@]}"
  alone "a rank is killed as NCCL starts, survivors" 3 75 "no answer|while in: set-up" "0|2" "$kill_at=nccl_init:1@1" "${cuda[@]}"
  together "whole GEMMs, nothing planted"     2  0  "$right" "$count" "${cuda[@]}" --reduce fast
  together "no algorithm for a whole GEMM"    2  70 "rank 1: cuBLASLt has no algorithm for |; use another --dtype" "$fail=heuristic:$(last heuristic)@1" "${cuda[@]}" --reduce fast
}

# While rows go to their experts and sums come home. Of 4 experts each token has 4.
with_experts() { # COMM
  cat >"$scratch/experts.json" <<'JSON'
{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 4,
 "hidden_act": "silu", "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
JSON
  local moe=(-- verify --config "$scratch/experts.json" --tokens 6 --device cuda --comm "$1")
  local mallocs launches pinned back first
  together "$1: experts, nothing planted"      3 0  "$right" "$count" "${moe[@]}"
  mallocs=$(last malloc) launches=$(last launch) pinned=$(last host_malloc)
  # The last ones: indices, what comes home, what comes in, what goes out, sums. What grows asks for
  # more than it needs, and then once again.
  for back in 0 1 2 3 4; do
    first=$((mallocs - back))
    together "$1: no memory for a step, $back before the last" 3 71 "rank 1: |GPU memory could not be had (" "$fail=malloc:$first@1,malloc:$((first + 1))@1" "${moe[@]}"
  done
  if [[ $1 == mpi ]]; then
    together "$1: no pinned memory for a step" 3 71 "rank 1: |pinned host memory could not be had" "$fail=host_malloc:$pinned@1" "${moe[@]}"
  fi
  by_itself "$1: a launch fails in combine"    70 "\(cudaErrorLaunchFailure.*\); " 1 "$fail=launch:$launches@1" "${moe[@]}"
  by_itself "$1: an expert's kernel never ends" 75 "no (answer|progress) .*$in_step" "0|1|2" "$fail=hang:$((launches - 2))@1" "${moe[@]}"
  lost  "$1: a rank is killed at its experts"  3 137 "while in: $in_step" "0|2" "$kill_at=launch:$((launches - 2))@1" "${moe[@]}"
  alone "$1: a rank is killed there, survivors" 3 75 "(no answer|lost its peer)|while in: $in_step" "0|2" "$kill_at=launch:$((launches - 2))@1" "${moe[@]}"
}

# Dispatch is NCCL's first exchange of a layer, combine its second.
experts_over_nccl() {
  local moe=(-- verify --config "$scratch/experts.json" --tokens 6 --device cuda --comm nccl) call
  for call in 1 2; do
    by_itself "NCCL: exchange $call never completes" 75 "no answer for 3 s in an exchange .*$in_step" "0|1|2" "$fail=nccl_stall:$call@1" "${moe[@]}"
    by_itself "NCCL: exchange $call fails"     70 "an exchange with its peers failed \(.*planted.*\); " 1 "$fail=nccl_fail:$call@1" "${moe[@]}"
  done
}

if [[ ${1-} == experts ]]; then
  shift
  for comm; do with_experts "$comm"; done
  if [[ " $* " == *" nccl "* ]]; then experts_over_nccl; fi
  finish
  exit
fi
at_start
for comm; do in_a_step "$comm"; done
if [[ " $* " == *" nccl "* ]]; then over_nccl; fi
finish
