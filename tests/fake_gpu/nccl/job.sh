#!/usr/bin/env bash
# job.sh MPIRUN… -- JOB: whatever fails under NCCL, the job ends within the deadline and 5 s, with the
# right code and a line that says why.
set -euo pipefail

scratch=$(mktemp -d "${TMPDIR:-/tmp}/gatefold-nccl.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
output=$scratch/output
# Shared memory goes into a folder of its own, so that none outlives a killed rank.
mpirun=()
for argument; do
  shift
  if [[ $argument == -- ]]; then break; fi
  if [[ $argument == /tmp ]]; then argument=$scratch; fi
  mpirun+=("$argument")
done
job=$1
failed=0

# ends NAME CODE WORDS FAIL ARGUMENT…: with CODE (two or more: one of them, as 70|75), saying WORDS.
ends() {
  local name=$1 code=$2 words=$3 fail=$4 status=0 begin=$SECONDS
  shift 4
  GATEFOLD_FAKE_GPU_FAIL=$fail timeout -k 1 30 "${mpirun[@]}" -n 3 "$job" "$@" \
    >"$output" 2>&1 </dev/null || status=$?
  if [[ $status =~ ^($code)$ ]] && grep -qF -- "$words" "$output" && ((SECONDS - begin <= 8)); then
    printf 'ok      %2d s  %s\n' "$((SECONDS - begin))" "$name"
    return
  fi
  failed=$((failed + 1))
  printf 'FAILED  %2d s  %s: code %d\n' "$((SECONDS - begin))" "$name" "$status"
  sed 's/^/    | /' "$output"
}

ends "nothing planted"             0       "all have met"                      ""
ends "a rank never joins"          75      "the start of NCCL"                 nccl_init:1@2
ends "a call is refused"           70      "rank 1] gatefold: ncclAllReduce failed" nccl_refuse:2@1
ends "an asynchronous error"       "70|75" "planted: this launch fails"        nccl_fail:2@1
ends "a barrier never completes"   75      "no answer for 2 s in a barrier during the test's barriers" nccl_stall:2@1
ends "an abort never comes back"   75      "ncclCommAbort has not come back for 1 s, ending the job" nccl_stall:2@1,nccl_abort:1
ends "a rank is killed"            137     "planted"                           "" kill 1
ends "a rank stops"                75      "no answer for 2 s in a barrier"    "" stop 1
# mpirun lets the others live, who end by themselves; then it gives the first one's code.
mpirun+=(--mca orte_abort_on_non_zero_status 0)
ends "a rank is killed, and the others live" "75|137" "lost its peer, rank 1" "" kill 1
export GATEFOLD_FAKE_GPU_SILENT_DEATH=1
ends "a rank is killed, and NCCL doesn't say so" "75|137" "no answer for 2 s in a barrier" "" kill 1
((failed == 0))
