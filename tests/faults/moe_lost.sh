#!/usr/bin/env bash
# A mixture of experts ends soon where a rank is lost while rows travel, and with 70 on all ranks
# where a message about them was altered on its way: nobody waits for rows that don't come.
set -euo pipefail
# shellcheck source=tests/faults/driver.sh
source "$(dirname "${BASH_SOURCE[0]}")/driver.sh"

# Of 4 experts each token has 4, so that every message's size is known.
cat >"$scratch/moe.json" <<END
{"model_type": "qwen2_moe", "hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 4,
 "intermediate_size": 64, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "norm_topk_prob": true,
 "hidden_act": "silu", "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
END
work=(-- verify --config "$scratch/moe.json" --tokens 60 --expert-blocks 4)
ended="terminated while in: "
silence="no (answer|progress).* for 3 s .*"
loading="(the GEMM self-check|loading weights)"
forward="(loading weights|the distributed forward pass)"

lost  "killed while experts are loaded"   3 137 "$ended$loading"               "0|2"  GATEFOLD_FAULT=kill@loading "${work[@]}"
lost  "killed before rows go out"         3 137 "$ended$forward"               "0|2"  GATEFOLD_FAULT=kill@dispatch "${work[@]}"
lost  "killed after they went out"        3 137 "$ended"                       "0|2"  GATEFOLD_FAULT=kill@sent "${work[@]}"
lost  "killed before sums come home"      3 137 "$ended$forward"               "0|2"  GATEFOLD_FAULT=kill@combine "${work[@]}"
lost  "stopped before rows go out"        3 75  "$silence$forward|$ended"      "0|2"  GATEFOLD_FAULT=stop@dispatch "${work[@]}"
lost  "stopped before sums come home"     3 75  "$silence$forward|$ended"      "0|2"  GATEFOLD_FAULT=stop@combine "${work[@]}"
lost  "stopped, all rows to all ranks"    3 75  "$silence$forward|$ended"      "0|2"  GATEFOLD_FAULT=stop@exchange "${work[@]}" --dispatcher allgather
lost  "an exception before sums come home" 3 70 "a planted exception"          1      GATEFOLD_FAULT=throw@combine "${work[@]}"
lost  "half of the rows"                  3 70  "a message from rank 1 has .* bytes instead" "0|2" GATEFOLD_FAULT=message_halved "${work[@]}"
alone "killed before rows go out"         3 "75|143" "$silence|$ended"         "0|2"  GATEFOLD_FAULT=kill@dispatch "${work[@]}"
alone "killed before sums come home"      3 "75|143" "$silence|$ended"         "0|2"  GATEFOLD_FAULT=kill@combine "${work[@]}"
alone "stopped before sums come home"     3 "75|143" "$silence|$ended"         "0|2"  GATEFOLD_FAULT=stop@combine "${work[@]}"
agreed "asleep before rows go out"        3 0   "$right"                       GATEFOLD_FAULT=sleep@dispatch "${work[@]}" --timeout 3
agreed "asleep before sums come home"     3 0   "$right"                       GATEFOLD_FAULT=sleep@combine "${work[@]}" --timeout 3

# The same through memory that the ranks share, where rows and sums need no message.
lost  "killed while its sums are awaited"  3 137 "$ended$forward"              "0|2"  GATEFOLD_FAULT=kill@weigh "${work[@]}"
lost  "stopped while its sums are awaited" 3 75  "no answer from rank 1 for 3 s in the sums of a step|$silence|$ended" "0|2" GATEFOLD_FAULT=stop@weigh "${work[@]}"
alone "killed while its sums are awaited" 3 "75|143" "$silence|$ended"         "0|2"  GATEFOLD_FAULT=kill@weigh "${work[@]}"
lost  "an exception instead of sums"      3 70  "a planted exception"          1      GATEFOLD_FAULT=throw@weigh "${work[@]}"
agreed "asleep while its sums are awaited" 3 0   "$right"                      GATEFOLD_FAULT=sleep@weigh "${work[@]}" --timeout 3

# together NAME NP CODE WORDS …: as agreed, in time and with one line in all.
together() {
  local before=$failed problems=()
  agreed "$@" --timeout "$timeout"
  if ((failed > before)); then return; fi
  once "$1" "gatefold: "
  check_loss "" ""
  if ((${#problems[@]} > 0)); then fails "$1" "${problems[@]}"; fi
}
# What one rank can tell, it tells all, though groups for experts and for the shared one aren't the same ranks.
planted="gatefold: rank 1: |a planted exception"
together "an exception while experts are loaded"  3 70 "$planted" GATEFOLD_FAULT=throw@loading "${work[@]}"
together "the same, rank 0 and 1 share a tp group" 4 70 "$planted" GATEFOLD_FAULT=throw@loading "${work[@]}" --tp 2 --ep 4
together "the same, they share experts, too"      4 70 "$planted" GATEFOLD_FAULT=throw@loading "${work[@]}" --tp 4 --ep 2
# What rank 1 says of a step, 8 bytes a number: whether it has failed, its rows, three sizes of memory, what a
# capacity has dropped, of each of 3 groups rows, rows of its experts, roots and sums, and rows to another host.
counts="the count matrix of a dispatch"
for at in 0 8 40 48 144; do
together "rank 1's counts are altered at byte $at"  3 70 "$counts" GATEFOLD_ALTER=poke:MPI_Isend:1 "GATEFOLD_POKE=152:$at:7" "${work[@]}" "${by_messages[@]}"
done
together "the second peer gets other counts"      3 70 "$counts"  GATEFOLD_ALTER=poke:MPI_Isend:2 GATEFOLD_POKE=152:80:1000000000 "${work[@]}" "${by_messages[@]}"
together "a negative count"                       2 70 "$counts"  GATEFOLD_ALTER=poke:MPI_Isend:1 GATEFOLD_POKE=120:48:-1 "${work[@]}" "${by_messages[@]}"
together "less than nothing dropped"            2 70 "$counts"  GATEFOLD_ALTER=poke:MPI_Isend:1 GATEFOLD_POKE=120:40:-1 "${work[@]}" "${by_messages[@]}"
# 20 rows of 4 ids and 4 weights: ids ascend.
ids="a token from rank 1 came with expert ids out of order or range"
for dispatcher in alltoall allgather; do
together "an id beyond the experts, $dispatcher"  3 70 "gatefold: rank 0: |$ids" GATEFOLD_ALTER=poke:MPI_Isend:1 GATEFOLD_POKE=640:12:4 "${work[@]}" "${by_messages[@]}" --dispatcher $dispatcher
together "a negative id, $dispatcher"             3 70 "gatefold: rank 2: |$ids" GATEFOLD_ALTER=poke:MPI_Isend:2 GATEFOLD_POKE=640:32:-1 "${work[@]}" "${by_messages[@]}" --dispatcher $dispatcher
together "an id twice, $dispatcher"               3 70 "gatefold: rank 0: |$ids" GATEFOLD_ALTER=poke:MPI_Isend:1 GATEFOLD_POKE=640:4:0 "${work[@]}" "${by_messages[@]}" --dispatcher $dispatcher
done
agreed "a weight of a row is altered"             3 1  "other bits than one device in|FAILED" GATEFOLD_ALTER=poke:MPI_Isend:1 GATEFOLD_POKE=640:16:1065353216 "${work[@]}" "${by_messages[@]}"
agreed "nothing is altered"                       3 0  "$right"   GATEFOLD_ALTER=poke:MPI_Isend:1 GATEFOLD_POKE=641:4:0 "${work[@]}" "${by_messages[@]}"

refuses agreed "counts that are as they were"     3 70 "$counts"  GATEFOLD_ALTER=poke:MPI_Isend:1 GATEFOLD_POKE=153:0:7 "${work[@]}" "${by_messages[@]}"
finish
