#!/usr/bin/env bash
# A rank that stops is named, whatever operation the others are in; one that they wait for without
# need, because it waits itself, isn't.
set -euo pipefail
# shellcheck source=tests/faults/driver.sh
source "$(dirname "${BASH_SOURCE[0]}")/driver.sh"

cat >"$scratch/moe.json" <<END
{"model_type": "qwen2_moe", "hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 4,
 "intermediate_size": 64, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "norm_topk_prob": true,
 "hidden_act": "silu", "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
END
work=(-- verify --model "$model")
moe=(-- verify --config "$scratch/moe.json" --tokens 60 --expert-blocks 4)
bench=(-- bench --model "$model" --tokens 16 --iterations 1000000 --no-check)
named="gatefold: no .*answer from rank 1 "

declare -A others=([2]=0 [3]="0|2" [4]="0|2|3")
for ranks in 2 3 4; do
  stopped() { lost "stopped before $1, $ranks ranks" "$ranks" 75 "$named" "${others[$ranks]}" "${@:2}"; }
  stopped "a barrier"     GATEFOLD_ALTER=stop:MPI_Ibarrier:2 "${bench[@]}"
  stopped "a broadcast"   GATEFOLD_ALTER=stop:MPI_Ibcast:4 "${work[@]}"
  stopped "an all-gather" GATEFOLD_ALTER=stop:MPI_Irecv:10 "${work[@]}"
  stopped "an all-reduce" GATEFOLD_ALTER=stop:MPI_Allreduce:1 "${work[@]}" --reduce fast
  stopped "a dispatch"    GATEFOLD_FAULT=stop@dispatch "${moe[@]}"
  stopped "a node's sum"  GATEFOLD_FAULT=stop@adding "${work[@]}"
done

refuses lost "a rank that only sleeps" 3 75 "$named" "0|2" GATEFOLD_FAULT=sleep@loading "${work[@]}"
finish
