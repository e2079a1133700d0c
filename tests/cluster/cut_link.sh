#!/usr/bin/env bash
# Two nodes and the link between them cut, whatever the ranks are doing: the job ends in time and
# names the ranks that are out of reach, and no others.
set -euo pipefail
# shellcheck source=tests/cluster/machines.sh
source "$(dirname "${BASH_SOURCE[0]}")/machines.sh"
enter_machines ip mpirun
add_node node0 10
add_node node1 11

# cut NAME MISSING HOSTS ARGUMENT…: in the middle of steps, or where GATEFOLD_ALTER has a rank of node1 wait.
cut() {
  gone=no
  in_mid_run "$1" 75 "rank [01]\] gatefold: no .*answer from rank $2 |!answer from rank 0|mpirun has not ended" \
    "$3" bench "${@:4}" --tokens 16 --iterations 1000000 --hot --no-check --timeout 3 -- cut_link
  holds "the ranks here ended in time" test "$gone" == yes
  holds "nothing is left of it here" nothing_left node0
  holds "no rank is left there" no_process node1 '/gatefold bench'
  on node1 ip link set eth0 up
}
cut_link() {
  if [[ -n ${GATEFOLD_ALTER-} ]]; then
    wait_for "a rank waits" grep -q planted "$said" && sleep 0.5
  else
    wait_for_traffic node1
  fi
  on node1 ip link set eth0 down
  local tenths
  for ((tenths = 0; tenths < 80; ++tenths)); do  # the deadline and 5 s
    if no_process node0 '^[^ ]*/gatefold bench'; then gone=yes && break; fi
    sleep 0.1
  done
}
# Has a rank wait in place of a call, as GATEFOLD_ALTER says: what launch/run finds as the program.
mkdir "$scratch/altered"
cat >"$scratch/altered/gatefold" <<END
#!/usr/bin/env bash
LD_PRELOAD=$GATEFOLD_BUILD/tests/libpmpi_alter.so exec "$GATEFOLD_BUILD/gatefold" "\$@"
END
chmod +x "$scratch/altered/gatefold"
cut_at() { # CALL: its number and rank, too
  GATEFOLD_ALTER=wait:$1 GATEFOLD_BUILD=$scratch/altered cut "${@:2}"
}
cat >"$scratch/moe.json" <<'END'
{"model_type": "qwen2_moe", "hidden_size": 512, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 4,
 "intermediate_size": 64, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "norm_topk_prob": true,
 "hidden_act": "silu", "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
END
dense=(--model "$model")
cut "steps of a dense layer"         "2, 3" node0:2,node1:2 "${dense[@]}"
cut "steps of a mixture of experts"  "2, 3" node0:2,node1:2 --config "$scratch/moe.json"
cut_at MPI_Ibarrier:20:1  "a barrier"       "1"    node0:1,node1:1 "${dense[@]}"
cut_at MPI_Ibcast:5:2     "a broadcast"     "1, 2" node0:1,node1:2 "${dense[@]}"
cut_at MPI_Allreduce:90:3 "an all-reduce"   "2, 3" node0:2,node1:2 "${dense[@]}" --reduce fast
cut_at MPI_Isend:9:3      "an all-to-all"   "2, 3" node0:2,node1:2 --config "$scratch/moe.json"
finish
