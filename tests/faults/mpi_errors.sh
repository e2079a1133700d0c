#!/usr/bin/env bash
# Every MPI call is checked: an error that one returns on one rank ends the job with 70 and the
# call's name.
set -euo pipefail
# shellcheck source=tests/faults/driver.sh
source "$(dirname "${BASH_SOURCE[0]}")/driver.sh"

work=(-- verify --model "$model" --comm mpi)
fast=(-- verify --model "$model" --reduce fast)

# Which call of the function fails on rank 1, and what names it where that isn't its own name.
while read -r function call what; do
  lost "$function fails, call $call" 2 70 "gatefold: .*${what:-$function} .*failed" 1 \
    "GATEFOLD_ALTER=fail:$function:$call" "${work[@]}"
done <<'END'
MPI_Comm_rank 1
MPI_Comm_dup 1
MPI_Comm_set_errhandler 1
MPI_Comm_size 1
MPI_Comm_split 1
MPI_Get_library_version 1
MPI_Irecv 1
MPI_Irecv 10
MPI_Isend 1
MPI_Isend 2
MPI_Testall 1 an exchange
MPI_Testall 20 an exchange
MPI_Ibcast 1
MPI_Ibcast 4
END
lost   "MPI_Allreduce fails"      2 70 "MPI_Allreduce failed" 1 GATEFOLD_ALTER=fail:MPI_Allreduce "${fast[@]}"
lost   "MPI_Init_thread fails"    2 '!0' ""                  "" GATEFOLD_ALTER=fail:MPI_Init_thread "${work[@]}"
agreed "MPI allows one thread"    2 0 "Out of bounds values : 0 OK|MPI offers no MPI_THREAD_MULTIPLE" GATEFOLD_ALTER=funneled "${work[@]}"
finish
