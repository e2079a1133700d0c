#!/usr/bin/env bash
# rank.sh JOB PROGRAM ARGUMENT…: one rank of a job, started by mpirun. Its stderr goes to
# JOB/stderr.<rank> and its exit status to JOB/status.<rank>; GATEFOLD_ARGUMENTS_<rank>,
# GATEFOLD_FOLDER_<rank> and GATEFOLD_PROGRAM_<rank> make one rank differ from the others.
set -euo pipefail

job=$1
program=$2
shift 2
rank=$OMPI_COMM_WORLD_RANK
exec 2>"$job/stderr.$rank"
echo $$ >"$job/pid.$rank"
echo "$PMIX_NAMESPACE" >"$job/number"

arguments=GATEFOLD_ARGUMENTS_$rank folder=GATEFOLD_FOLDER_$rank other=GATEFOLD_PROGRAM_$rank
read -ra more <<<"${!arguments-}"
cd "${!folder-.}"
program=${!other-$program}
if [[ -n ${GATEFOLD_PRELOAD-} ]]; then export LD_PRELOAD=$GATEFOLD_PRELOAD; fi

# Where a rank is lost, mpirun is to see that for itself.
if [[ -n ${GATEFOLD_LOSE-} ]]; then exec "$program" "$@" "${more[@]}"; fi
trap : TERM  # goes to the program, too, whose status is still to be noted
status=0
"$program" "$@" "${more[@]}" || status=$?
# Whole or not at all: a peer that sees the file ends, and mpirun then ends this rank.
echo "$status" >"$job/own.$rank"
mv "$job/own.$rank" "$job/status.$rank"
# mpirun ends the others once it sees a status other than 0: it has to wait until all are known.
for ((tries = 0; tries < 500; ++tries)); do
  known=("$job"/status.*)
  if ((${#known[@]} >= OMPI_COMM_WORLD_SIZE)); then break; fi
  sleep 0.02
done
exit "$status"
