#!/usr/bin/env bash
# A real Slurm of two nodes: what launch/slurm submits, by srun and by mpirun, and how jobs end there.
set -euo pipefail
# shellcheck source=tests/cluster/machines.sh
source "$(dirname "${BASH_SOURCE[0]}")/machines.sh"
enter_machines ip mpirun slurmctld slurmd sbatch srun munged python3

# Nodes have four CPUs for Slurm, whatever this machine has.
slurm_conf() {
  cat <<CONF
ClusterName=gatefold
SlurmctldHost=head(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$scratch/munge.socket
CredType=cred/munge
TmpFS=$scratch/tmp.%n
StateSaveLocation=$scratch/state
SlurmdSpoolDir=$scratch/spool.%n
SlurmctldPidFile=$scratch/slurmctld.pid
SlurmdPidFile=$scratch/slurmd.%n.pid
SlurmctldLogFile=$scratch/slurmctld.log
SlurmdLogFile=$scratch/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=2
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
NodeName=node[0-1] CPUs=4
PartitionName=all Nodes=ALL Default=YES
CONF
}

both_idle() { [[ $(sinfo --noheader --Node --states=idle --format=%N | sort -u | wc -l) == 2 ]]; }

start_slurm() {
  mkdir -m 755 "$scratch/state" "$scratch/munge" "$scratch"/tmp.node{0,1}
  head -c 128 /dev/urandom >"$scratch/munge/key"
  chmod 400 "$scratch/munge/key"
  munged --force --key-file "$scratch/munge/key" --socket "$scratch/munge.socket" \
    --pid-file "$scratch/munge/pid" --log-file "$scratch/munge/log" --seed-file "$scratch/munge/seed"
  slurm_conf >"$scratch/slurm.conf"
  export SLURM_CONF=$scratch/slurm.conf
  slurmctld
  on node0 slurmd -N node0
  on node1 slurmd -N node1
  wait_for "both nodes are idle" both_idle
}

add_node node0 10
add_node node1 11
if ! start_slurm; then
  tail -n 30 "$scratch"/*.log "$scratch/munge/log"
  exit 1
fi
program=$GATEFOLD_BUILD/gatefold
export GATEFOLD_ROOT=$here GATEFOLD_BUILD
jobs=$scratch/jobs
mkdir "$jobs"
# submit NAME SBATCH-ARGUMENT…: in a folder of its own; sets job and folder.
submit() {
  folder=$jobs/$1
  mkdir "$folder"
  job=$(sbatch --parsable --chdir="$folder" --output="$folder/out" "${@:2}")
}

has_ended() { # JOB
  scontrol -o show job "$1" >"$scratch/job"
  ! grep -qE 'JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING|SUSPENDED)' "$scratch/job"
}

# ended JOB FOLDER: what the job said, and its own code (0:15 is 143).
ended() {
  local code tenths
  for ((tenths = 0; tenths < 1200; ++tenths)); do
    if has_ended "$1"; then break; fi
    sleep 0.1
  done
  cat "$2/out"
  grep -oE 'JobState=[A-Z_]+' "$scratch/job"
  code=$(sed -n 's/.* ExitCode=\([0-9]*:[0-9]*\).*/\1/p' "$scratch/job")
  if ((${code#*:} > 0)); then return $((128 + ${code#*:})); fi
  return "${code%:*}"
}
export -f ended has_ended
export scratch

# batch NAME CODE WORDS SBATCH-ARGUMENT…
batch() {
  submit "${1// /-}" "${@:4}"
  limit=100 case_of "$1" "$2" "$3" bash -c 'ended "$@"' ended "$job" "$folder"
}

# swept NAME whole|limited POINTS: CSV and JSON hold the same points, right ones: all of POINTS, each
# TOKENS/TP, or the first of them, which a time limit left.
read -r -d '' reader <<'PYTHON' || true
import csv, json, sys

name, limited = sys.argv[1], sys.argv[2] == "limited"
wanted = sys.argv[3].split()
with open(name + ".csv", newline="") as file:
    header, *rows = csv.reader(file)
with open(name + ".json") as file:
    report = json.load(file)
points = [dict(zip(header, row, strict=True)) for row in rows]
found = [f"{point['tokens']}/{point['tp']}" for point in points]
assert found and found == wanted[: len(found)], f"{found} are not the first of {wanted}"
assert (len(found) < len(wanted)) == limited, f"{len(found)} of {len(wanted)} points"
assert all(point["wrong"] == "0" and float(point["time_us"]) > 0 for point in points), points
# A limit may come between the two files, of which JSON is written first.
rows = report["rows"]
assert len(points) <= len(rows) <= len(points) + limited, f"{len(rows)} rows in JSON"
assert all(row["time_us"] == float(point["time_us"]) for row, point in zip(rows, points)), rows
assert report["environment"]["points"] == f"{len(rows)} of {len(wanted)}", report["environment"]
PYTHON
swept() { python3 -c "$reader" "$folder/gatefold-bench-$job/$1" "${@:2}"; }

# A time limit of a minute, told 55 s before: it comes when Slurm looks, every 30 s, and meanwhile
# other jobs run.
submit limited --nodes=1 --time=1 --signal=B:TERM@55 "$here/launch/slurm/bench.sbatch" \
  --model "$model" --tokens 1-1999:+2 --iterations 100 --hot
limited=$job limited_folder=$folder

#     what                                  code words
case_of "srun --mpi=pmix on two nodes"        0 "ranks     4 = |$right" \
  srun --mpi=pmix -N 2 --ntasks-per-node=2 "$program" verify --model "$model"
case_of "plain srun"                         64 "started 4 processes but this one is alone|!MPI_ERRORS_ARE_FATAL" \
  srun -N 2 --ntasks-per-node=2 "$program" verify --model "$model"
batch "verify on 1 and 2 nodes, by srun"      0 "started by srun|ranks     2 = |ranks     4 = |$right" \
  "$here/launch/slurm/verify.sbatch"
holds "a folder of the job" test -s "$folder/gatefold-verify-$job/nodes-2.json" -a \
  -s "$folder/gatefold-verify-$job/environment.txt"
export GATEFOLD_LAUNCHER=mpirun
batch "verify on 1 and 2 nodes, by mpirun"    0 "started by mpirun|ranks     2 = |ranks     4 = |$right" \
  "$here/launch/slurm/verify.sbatch" --config "$here/configs/qwen3-30b-a3b.json" --tokens 8
batch "bench on 1 and 2 nodes"                0 "ranks     2$|ranks     4$|shared memory within a node, messages between nodes|0 OK" \
  "$here/launch/slurm/bench.sbatch" --model "$model" --tokens 8 --iterations 3
holds "CSV and JSON of one node" swept nodes-1 whole "8/2"
holds "CSV and JSON of two" swept nodes-2 whole "8/4"
batch "a sweep over tokens and ranks"         0 "speed-up  eff  #wrong|values : 0 OK" --nodes=1 \
  "$here/launch/slurm/bench.sbatch" --config "$here/configs/qwen3-0.6b.json" --tokens 1,64,512 --tp 1,2 --iterations 5
holds "all its points are there and right" swept nodes-1 whole "1/1 64/1 512/1 1/2 64/2 512/2"
batch "the program's code"                   66 "nowhere/config.json" "$here/launch/slurm/verify.sbatch" --model nowhere
batch "mpirun -n 1 in a job of 8"             0 "ranks     1 = |$right" -n 8 --wrap \
  "$here/launch/run -n 1 --build $GATEFOLD_BUILD -- verify --model $model"
unset GATEFOLD_LAUNCHER


limit=100 case_of "a time limit" 143 "stopped at 1 node|terminated while in: |JobState=FAILED" \
  bash -c 'ended "$@"' ended "$limited" "$limited_folder"
job=$limited folder=$limited_folder
holds "what was finished is in its CSV and JSON" swept nodes-1 limited "$(printf '%d/2 ' {1..1999..2})"
holds "nothing is left of them" nothing_left node0 node1

# lost LAUNCHER PATTERN WORDS: node1 loses the processes that match, in mid-run.
lost() {
  cat >"$scratch/two" <<JOB
#!/bin/bash
exec "$here/launch/run" --launcher $1 --build "$GATEFOLD_BUILD" -- \
  bench --model "$model" --tokens 16 --iterations 1000000 --hot --no-check --timeout 4
JOB
  submit "lost-$1" -N 2 --ntasks-per-node=2 "$scratch/two"
  wait_for_traffic node1
  lose node1 "$2"
  limit=60 case_of "a node of $1 is lost" '!0' "$3" bash -c 'ended "$@"' ended "$job" "$folder"
  holds "nothing is left of it on the other" nothing_left node0
}
lost mpirun 'orted|/gatefold bench' "lost communication with a remote daemon"
lost srun 'slurmstepd|/gatefold bench' 'gatefold: no .* for 4 s .*the benchmark.*peer'
finish
