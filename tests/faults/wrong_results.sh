#!/usr/bin/env bash
# Verification can fail: whatever a distributed layer may do wrong ends in 1 on every rank, and what
# is done right in 0.
set -euo pipefail
# shellcheck source=tests/faults/driver.sh
source "$(dirname "${BASH_SOURCE[0]}")/driver.sh"

wrong="other bits than one device|outside the float64 bound|FAILED"

#      what                                        np code words               environment -- arguments
agreed "nothing is wrong, 1 rank"                   1 0 "$right"               "${real[@]}"
# The fingerprint depends on the CPU, but not on the ranks.
one_rank=$(grep -ohE '[0-9a-f]{16}' "$job"/stdout)
agreed "nothing is wrong, 2 ranks"                  2 0 "$right|$one_rank"     "${real[@]}"
agreed "nothing is wrong, 3 ranks"                  3 0 "$right|$one_rank"     "${real[@]}"
agreed "nothing is wrong, 4 ranks, with biases"     4 0 "$right"               "${biased[@]}"
for np in ${GATEFOLD_FAULT_RANKS-2 4}; do
agreed "ranks 0 and 1 swap gate and up, $np ranks" "$np" 1 "$wrong"              GATEFOLD_FAULT=shards_swapped "${real[@]}"
agreed "the same, with biases, $np ranks"          "$np" 1 "$wrong"              GATEFOLD_FAULT=shards_swapped "${biased[@]}"
agreed "they swap down, too, $np ranks"            "$np" 1 "other weights in"    GATEFOLD_FAULT=shards_exchanged "${real[@]}"
if said "other bits than"; then fails "they swap down, too, $np ranks" "y told it, too"; fi
agreed "every rank loads shard 0, $np ranks"       "$np" 1 "$wrong"              GATEFOLD_FAULT=shard_0_everywhere "${real[@]}"
agreed "gate is taken for up, $np ranks"           "$np" 1 "$wrong"              GATEFOLD_FAULT=gate_up_swapped "${real[@]}"
agreed "every rank adds the bias, $np ranks"       "$np" 1 "$wrong"              GATEFOLD_FAULT=bias_per_rank "${biased[@]}"
agreed "ranks add their own sums only, $np ranks"  "$np" 1 "$wrong"              GATEFOLD_FAULT=sum_skipped "${real[@]}"
agreed "sums are added twice, $np ranks"           "$np" 1 "$wrong"              GATEFOLD_FAULT=sum_twice "${real[@]}"
agreed "rank 1's sums are dropped, $np ranks"      "$np" 1 "$wrong"              GATEFOLD_FAULT=one_rank_dropped:1 "${real[@]}"
agreed "rank 1's y has a NaN, $np ranks"           "$np" 1 "NaN in 2 values|on rank 1: NaN instead of|values : 2 FAILED" GATEFOLD_FAULT=nan:1 "${real[@]}"
agreed "rank 1's y is zero, $np ranks"             "$np" 1 "$wrong|on rank 1"    GATEFOLD_FAULT=y_zero:1 "${real[@]}"
agreed "the last y has one other bit, $np ranks"   "$np" 1 "$wrong|in 1 values|column 575 on rank $((np - 1))" GATEFOLD_FAULT=bit_flipped "${real[@]}"
agreed "rank 1's self-check fails, $np ranks"      "$np" 0 "$right|plain|failed the self-check" GATEFOLD_FAULT=self_check:1 "${real[@]}"
done
# Added in another order the sum is as good for float64, so only the bits can tell.
agreed "rank 1 adds in another order"               4 1 "other bits than one device|on rank" GATEFOLD_FAULT=order_changed:1 "${real[@]}" --dtype f32
if said "float64 bound"; then fails "rank 1 adds in another order" "float64 told it, too"; fi
if ((${#device[@]} == 0)); then  # which only host memory has
agreed "and so it does in shared memory"            4 1 "other bits than one device|(shared memory within a node)" GATEFOLD_FAULT=roots_turned:1 "${real[@]}" --dtype f32
agreed "by messages alone nothing is wrong"         3 0 "$right|$one_rank|(messages alone)" "${real[@]}" "${by_messages[@]}"
osc_sm=/no/such/place \
agreed "nor where shared memory has no place"       3 0 "$right|$one_rank|(messages within a node: /no/such/place can't be used" "${real[@]}"
fi
# A bit of a message that flips on its way: of the sums, then of the finished columns.
agreed "a bit of rank 1's sums flips on its way"    2 1 "other bits than one device" GATEFOLD_ALTER=flip:MPI_Isend:1 "${real[@]}" "${by_messages[@]}"
agreed "a bit of rank 1's columns flips on its way" 2 1 "other bits than one device|in 1 values|on rank 0" GATEFOLD_ALTER=flip:MPI_Isend:2 "${real[@]}" "${by_messages[@]}"
# The benchmark compares what it has timed: here one pass, after one that is not, of tokens that fill
# a message.
bench=(-- bench --tokens 16 --iterations 1 --warmup 0 --hot --model "$model")
agreed "a benchmark with no fault"                  3 0 "$right"               "${bench[@]}"
agreed "a benchmark, each rank its own tokens"      2 0 "$right"               "${bench[@]}" --tp 1 --dp 2
agreed "a benchmark with the sums left out"         3 1 "values : 27648 FAILED" GATEFOLD_FAULT=sum_skipped "${bench[@]}" --dtype f32
agreed "a benchmark with one bit flipped"           2 1 "values : 1 FAILED"    GATEFOLD_ALTER=flip:MPI_Isend:2 "${bench[@]}" "${by_messages[@]}"
agreed "a benchmark that doesn't look"              3 0 "not checked (--no-check)" GATEFOLD_FAULT=sum_skipped "${bench[@]}" --no-check
agreed "the same layer under MPI, with no fault"    2 0 "$right"               GATEFOLD_ALTER=none "${real[@]}"

refuses agreed "a fault that does no harm"          2 1 "FAILED"               GATEFOLD_FAULT=self_check:1 "${real[@]}"
refuses agreed "a fault that nobody knows"          2 1 "$wrong"               GATEFOLD_FAULT=no_such_fault "${real[@]}"
refuses agreed "words that nobody says"             2 0 "no such words"        "${real[@]}"
finish
