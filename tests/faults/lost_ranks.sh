#!/usr/bin/env bash
# A rank that dies, stops or throws ends the job soon, with an exit status other than 0 and a line
# of the others that says where they were.
set -euo pipefail
# shellcheck source=tests/faults/driver.sh
source "$(dirname "${BASH_SOURCE[0]}")/driver.sh"

work=(-- verify --model "$model")
ended="terminated while in: "
silence="no (answer|progress).* for 3 s .*"
# A rank may still be a step behind the one that is lost.
loading="(the GEMM self-check|loading weights)"
forward="(loading weights|the distributed forward pass)"

# mpirun ends the others, who say where they were.
#     what                               np code   pattern                          ranks  environment -- arguments
lost  "killed before MPI_Init"            3 137   ""                                ""     GATEFOLD_ALTER=kill:MPI_Init_thread "${work[@]}"
lost  "killed while groups are made"      3 137   "$ended(the start of MPI|set-up)" "0|2"  GATEFOLD_ALTER=kill:MPI_Comm_split "${work[@]}"
lost  "killed while loading"              3 137   "$ended$loading"                  "0|2"  GATEFOLD_FAULT=kill@loading "${work[@]}"
lost  "killed before the exchange"        3 137   "$ended$forward"                  "0|2"  GATEFOLD_FAULT=kill@exchange "${work[@]}"
lost  "killed in mid exchange"            3 137   "$ended"                          "0|2"  GATEFOLD_FAULT=kill@sent "${work[@]}"
lost  "killed as it adds"                 3 137   "$ended"                          "0|2"  GATEFOLD_FAULT=kill@adding "${work[@]}"
lost  "killed before MPI_Finalize"        3 137   ""                                ""     GATEFOLD_ALTER=kill:MPI_Finalize "${work[@]}"
lost  "segmentation fault"                3 139   "$ended$forward"                  "0|2"  GATEFOLD_FAULT=segfault@exchange "${work[@]}"
lost  "exit 0 while loading"              3 '!0'  "$ended$loading"                  "0|2"  GATEFOLD_FAULT=exit@loading "${work[@]}"
lost  "exit 0 before the exchange"        3 '!0'  "$ended$forward"                  "0|2"  GATEFOLD_FAULT=exit@exchange "${work[@]}"
lost  "an exception in mid exchange"      3 70    "a planted exception"             1      GATEFOLD_FAULT=throw@sent "${work[@]}"
# What a rank can tell itself, it tells all.
agreed "an exception while loading"       3 70    "gatefold: rank 1: |a planted exception" GATEFOLD_FAULT=throw@loading "${work[@]}"
# A message that is too short is no error for MPI; one that never comes is a matter for the deadline.
lost  "half a message"                    3 70    "a message from rank 1 has .* bytes instead" 0 GATEFOLD_FAULT=message_halved "${work[@]}"
lost  "an exchange left out"              3 '!0'  "$silence|$ended|bytes instead"   "0|2"  GATEFOLD_FAULT=exchange_left_out "${work[@]}"
# A stopped process is alive but silent: only the deadline tells.
lost  "stopped before MPI_Init"           3 75    "$silence"                        "0|2"  GATEFOLD_ALTER=stop:MPI_Init_thread "${work[@]}"
lost  "stopped while loading"             3 75    "$silence$loading|$ended"         "0|2"  GATEFOLD_FAULT=stop@loading "${work[@]}"
lost  "stopped before the exchange"       3 75    "$silence$forward|$ended"         "0|2"  GATEFOLD_FAULT=stop@exchange "${work[@]}"
lost  "stopped as it adds"                3 75    "no answer from rank 1 for 3 s in the sum of a node's ranks during the dist|$ended" "0|2" GATEFOLD_FAULT=stop@adding "${work[@]}"
lost  "stopped before MPI_Finalize"       3 '!0'  "$silence|$ended"                 "0|2"  GATEFOLD_ALTER=stop:MPI_Finalize "${work[@]}"
# mpirun lets the others live on, so that they have to end by themselves.
#     what                               np codes pattern
alone "killed before MPI_Init"            3 "75|143" "$silence|$ended"              "0|2"  GATEFOLD_ALTER=kill:MPI_Init_thread "${work[@]}"
alone "killed while groups are made"      3 "75|143" "$silence|$ended"              "0|2"  GATEFOLD_ALTER=kill:MPI_Comm_split "${work[@]}"
alone "killed while loading"              3 "75|143" "$silence$loading|$ended"      "0|2"  GATEFOLD_FAULT=kill@loading "${work[@]}"
alone "killed before the exchange"        3 "75|143" "$silence$forward|$ended"      "0|2"  GATEFOLD_FAULT=kill@exchange "${work[@]}"
alone "killed in mid exchange"            3 "75|143" "$silence$forward|$ended"      "0|2"  GATEFOLD_FAULT=kill@sent "${work[@]}"
alone "killed as it adds"                 3 "75|143" "$silence$forward|$ended"      "0|2"  GATEFOLD_FAULT=kill@adding "${work[@]}"
alone "exit 0 before the exchange"        3 "75|143" "$silence$forward|$ended"      "0|2"  GATEFOLD_FAULT=exit@exchange "${work[@]}"
alone "stopped before the exchange"       3 "75|143" "$silence$forward|$ended"      "0|2"  GATEFOLD_FAULT=stop@exchange "${work[@]}"
# The result is out by then, and the others end as they would have.
alone "killed before MPI_Finalize"        3 "0|75|143" ""                           "0|2"  GATEFOLD_ALTER=kill:MPI_Finalize "${work[@]}"
# Slow is not lost.
agreed "asleep for half the deadline while loading"  3 0 "0 OK" GATEFOLD_FAULT=sleep@loading "${work[@]}" --timeout 3
agreed "asleep for half the deadline as it adds"     3 0 "0 OK" GATEFOLD_FAULT=sleep@adding "${work[@]}" --timeout 3
agreed "asleep for half the deadline in an exchange" 3 0 "0 OK" GATEFOLD_FAULT=sleep@exchange "${work[@]}" --timeout 3

refuses lost  "a job that ends well"              3 137 "$ended" 0,2 GATEFOLD_FAULT=sleep@loading "${work[@]}"
refuses alone "a rank that says nothing"          3 "0" "$silence" 0 GATEFOLD_FAULT=sleep@loading "${work[@]}"
finish
