#!/usr/bin/env bash
# Verification of a mixture of experts can fail: whatever routing, exchange or experts may do wrong
# ends in 1 on every rank, with a line that says what and where.
set -euo pipefail
# shellcheck source=tests/faults/driver.sh
source "$(dirname "${BASH_SOURCE[0]}")/driver.sh"

cat >"$scratch/moe.json" <<END
{"model_type": "deepseek_v3", "hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64,
 "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
 "routed_scaling_factor": 2.5, "norm_topk_prob": true, "first_k_dense_replace": 0, "hidden_act": "silu",
 "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
END
cat >"$scratch/plain.json" <<END
{"model_type": "mixtral", "hidden_size": 128, "intermediate_size": 64, "num_local_experts": 8,
 "num_experts_per_tok": 2, "hidden_act": "silu", "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
END
work=(-- verify --config "$scratch/moe.json" --expert-blocks 4)
plain=(-- verify --config "$scratch/plain.json" --expert-blocks 4)
bits="other bits than one device in|first at token"
routes="other experts or weights than one device for"
bound="outside the float64 bound in"

agreed "nothing is wrong, 1 rank"                   1 0 "$right"                    "${work[@]}"
one_rank=$(grep -ohE '[0-9a-f]{16}' "$job"/stdout)
agreed "nothing is wrong, 2 ranks"                  2 0 "$right|$one_rank"          "${work[@]}"
agreed "nothing is wrong, ranks share experts"      4 0 "$right|$one_rank"          "${work[@]}" --ep 2 --tp 2
agreed "nothing is wrong, all rows to all ranks"    3 0 "$right|$one_rank"          "${work[@]}" --dispatcher allgather
for np in ${GATEFOLD_FAULT_RANKS-2 4}; do
agreed "rank 1's experts are off by one, $np ranks" "$np" 1 "$bits|$bound|on rank"  GATEFOLD_FAULT=expert_off_by_one:1 "${work[@]}"
agreed "each rank adds the shared expert, $np ranks" "$np" 1 "$bits|$bound|on rank 0" GATEFOLD_FAULT=shared_per_rank "${work[@]}"
agreed "weights are scaled twice, $np ranks"        "$np" 1 "$routes 64 tokens|$bits|$bound" GATEFOLD_FAULT=scaling_twice "${work[@]}"
agreed "the correction bias weighs, $np ranks"      "$np" 1 "$routes 64 tokens|$bits|$bound" GATEFOLD_FAULT=biased_weights "${work[@]}"
agreed "rows go to the wrong experts, $np ranks"    "$np" 1 "$bits|$bound"          GATEFOLD_FAULT=halves_swapped@dispatch:1 "${work[@]}"
agreed "sums come to the wrong tokens, $np ranks"   "$np" 1 "$bits|$bound|on rank 1: " GATEFOLD_FAULT=halves_swapped@combine:1 "${work[@]}"
if said "$routes"; then fails "sums come to the wrong tokens, $np ranks" "it was taken for a wrong route"; fi
agreed "rank 1's rows of y change places, $np ranks" "$np" 1 "$bits|on rank 1: "    GATEFOLD_FAULT=y_turned:1 "${work[@]}"
agreed "a weight of an expert, last of $np ranks"   "$np" 1 "other weights in 1 read on rank $((np - 1))|rank $((np - 1)) read 'model.layers.0.mlp.experts." "GATEFOLD_FAULT=low_bit@experts:$((np - 1))" "${work[@]}"
agreed "a weight of the router, rank 1 of $np"      "$np" 1 "other weights in|rank 1 read 'model.layers.0.mlp.gate.weight'|$routes" GATEFOLD_FAULT=low_bit@router:1 "${work[@]}"
done
agreed "a bit of rank 1's rows flips on its way"    2 1 "$bits|$bound"            GATEFOLD_ALTER=flip:MPI_Isend:1 "${work[@]}" "${by_messages[@]}"
agreed "a bit of rank 1's sums flips on its way"    2 1 "$bits|on rank 0: "       GATEFOLD_ALTER=flip:MPI_Isend:2 "${work[@]}" "${by_messages[@]}"
# No y shows an expert to which no token goes.
one_token=("${work[@]}" --tokens 1 --set num_experts_per_tok=1)
unread="other weights in 1 read on rank 1|rank 1 read 'model.layers.0.mlp.experts."
agreed "a weight of an expert without tokens"       2 1 "$unread"                   GATEFOLD_FAULT=low_bit@experts:1 "${one_token[@]}"
if said "$bits"; then fails "a weight of an expert without tokens" "y told it, too"; fi
agreed "the same where ranks share experts"         4 1 "$unread"                   GATEFOLD_FAULT=low_bit@experts:1 "${one_token[@]}" --ep 2
agreed "one token and nothing wrong"                3 0 "$right"                    "${one_token[@]}"
# Where experts share a token's row, to the bit, the lowest have it.
zeros() { # TOKENS WIDTH: a file of tokens that are zero
  local header='{"x":{"dtype":"BF16","shape":['$1,$2'],"data_offsets":[0,'$(($1 * $2 * 2))']}}'
  while ((${#header} % 8 != 0)); do header+=" "; done
  printf '%b%s' "\\x$(printf %02x ${#header})\\0\\0\\0\\0\\0\\0\\0" "$header"
  head -c $(($1 * $2 * 2)) /dev/zero
}
zeros 8 128 >"$scratch/zeros.safetensors"
tied=("${plain[@]}" --input "$scratch/zeros.safetensors")
agreed "equal experts"                              3 0 "$right"                    "${tied[@]}"
agreed "of equal experts the highest is chosen"     3 1 "$routes 8 tokens"          GATEFOLD_FAULT=ties_to_highest "${tied[@]}"
agreed "the same where none are equal"              3 0 "$right"                    GATEFOLD_FAULT=ties_to_highest "${plain[@]}"

# What a capacity drops.
limited=("${work[@]}" --capacity 11)
dropped="of 192 choices dropped"
agreed "a capacity and nothing wrong, 1 rank"       1 0 "$right|$dropped"           "${limited[@]}"
one_rank=$(grep -ohE '[0-9a-f]{16}' "$job"/stdout)
agreed "a capacity and nothing wrong, 3 ranks"      3 0 "$right|$dropped|$one_rank" "${limited[@]}" --token-split 40,0,24
agreed "the same with filled-up experts"            2 0 "$right|$dropped|$one_rank" "${limited[@]}" --pad
agreed "the least weights are dropped"              4 0 "$right|$dropped"           "${limited[@]}" --drop probability --ep 2 --tp 2
agreed "so are those of each sequence"              2 0 "$right|$dropped"           "${work[@]}" --capacity 3 --drop probability --per-sequence --sequence-length 16
agreed "one row is dropped too many"                2 1 "$routes|$bits|$bound"      GATEFOLD_FAULT=less_capacity "${limited[@]}"
agreed "other rows are dropped"                     2 1 "$routes|$bits|$bound"      GATEFOLD_FAULT=drops_otherwise "${limited[@]}"

# What an even load stands and falls with.
after="after 300 updates of the bias"
agreed "a router's load gets even by its bias"      1 0 "before, 1.1|$after"        -- balance
agreed "a new bias isn't heeded"                    2 0 "before, 3.|$after"         GATEFOLD_FAULT=stale_bias -- balance
agreed "a new bias is heeded the wrong way round"   2 0 "before, 4.|$after"         GATEFOLD_FAULT=reversed_bias -- balance

refuses agreed "a fault that isn't reached"         2 1 "$bits"                     GATEFOLD_FAULT=expert_off_by_one:7 "${work[@]}"
finish
