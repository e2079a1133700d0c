#!/usr/bin/env bash
# Two nodes with a network between them: right, over a slow link too; and where a daemon is lost, the
# job ends.
set -euo pipefail
# shellcheck source=tests/cluster/machines.sh
source "$(dirname "${BASH_SOURCE[0]}")/machines.sh"
enter_machines ip mpirun
add_node node0 10
add_node node1 11

lose_daemon() { wait_for_traffic node1 && lose node1 orted; }
both="shared memory within a node, messages between nodes"
experts=(verify --config "$here/configs/qwen3-30b-a3b.json" --tokens 12)

#        what                                 code words                           hosts
on_ranks "a dense layer on 2 + 2"                0 "ranks     4 = tp 4|rank 1 +node0|rank 2 +node1|$both|$right" node0:2,node1:2 verify --model "$model" --verbose
on_ranks "a dense layer on 1 + 2"                0 "ranks     3 = tp 3|$both|$right" node0:1,node1:2 verify --model "$model" --tp 3
on_ranks "experts on 2 + 2"                      0 "ranks     4 = |$both|$right"    node0:2,node1:2 "${experts[@]}" --tp 2 --ep 4
on_ranks "experts on 1 + 2"                      0 "ranks     3 = |$both|$right"    node0:1,node1:2 "${experts[@]}"
on_ranks "bench"                                 0 "ranks     4$|$both|0 OK"        node0:2,node1:2 bench --model "$model" --tokens 8 --iterations 3
on_ranks "the program's code"                   66 "nowhere/config.json"            node0:1,node1:1 verify --model nowhere
holds "nothing is left of them" nothing_left node0 node1

# Slow is not lost: 5 ms each way, or 20 Mbit/s where the kernel knows no delay.
slow() { on node1 tc qdisc add dev eth0 root "$@" 2>/dev/null; }
if ! slow netem delay 5ms && ! slow tbf rate 20mbit burst 32kbit latency 400ms; then
  echo "not tested: a slow link (this kernel has neither netem nor tbf)"
else
  on_ranks "a slow link"                         0 "$right"                         node0:2,node1:2 verify --model "$model" --timeout 5
  on node1 tc qdisc del dev eth0 root
fi

job=(bench --model "$model" --tokens 16 --iterations 1000000 --hot --no-check --timeout 3)
in_mid_run "a daemon is lost" 205 "lost communication with a remote daemon" node0:2,node1:2 "${job[@]}" \
  -- lose_daemon
holds "nothing is left of it on the other" nothing_left node0
finish
