#!/usr/bin/env bash
# launch/run says the right line to each MPI, GPU and Slurm job, and is transparent to codes and signals.
set -euo pipefail
# shellcheck source=tests/launch/script_driver.sh
source "$(dirname "${BASH_SOURCE[0]}")/script_driver.sh"
# shellcheck source=launch/host.sh
source "$here/launch/host.sh"

fake 4/mpirun <<<'echo "mpirun (Open MPI) 4.1.4"'
fake 5/mpirun <<<'echo "mpirun (Open MPI) 5.0.11"'
fake other/mpirun <<<'echo "HYDRA build details:"'
fake cpu/gatefold <<<'echo "found   no CUDA device (this build has no CUDA part)"'
fake gpu/gatefold <<<'echo "found   4 CUDA devices"'
fake 4/nvidia-smi <<<'for gpu in 0 1 2 3; do echo "NVIDIA H200, 143771 MiB, 580.65"; done'
fake pmix/srun <<<'printf "MPI plugin types are...\n\tnone\n\tpmix\nspecific pmix plugin versions available: pmix_v4\n"'
fake plain/srun <<<'printf "MPI plugin types are...\n\tnone\n\tpmi2\n"'
printf 'a slots=1\nb slots=08' >"$scratch/odd-hosts"
printf '# none\n \t\n' >"$scratch/no-hosts"
printf '# two\nnode0 slots=2\nnode1 slots = 6 max_slots=8\n\n' >"$scratch/hosts"

cores=$("${clean[@]}" bash -c "source '$here/launch/host.sh' && usable_cores")
many=$((cores + 1))
root=(--allow-run-as-root)
if [[ $EUID == 0 ]]; then shown_root='--allow-run-as-root '; else shown_root=''; fi

# dry NAME WORDS PATH-FOLDERS NAME=VALUE… -- ARGUMENT…: of `launch/run --dry-run`.
started_by=
dry() {
  local name=$1 words=$2 path=$PATH folder environment=() build=$scratch/cpu
  for folder in $3; do path=$scratch/$folder:$path; done
  shift 3
  while [[ $1 != -- ]]; do environment+=("$1") && shift; done
  shift
  if [[ $words == *gpu/gatefold* ]]; then build=$scratch/gpu; fi
  case_of "$name" "${code:-0}" "$words" $started_by "${clean[@]}" PATH="$path" "${environment[@]}" \
    "$here/launch/run" --dry-run "${root[@]}" --build "$build" "$@"
}
refused() { # CODE NAME…
  local code=$1
  shift
  dry "$@"
}

bound="--map-by slot --bind-to core -x OMP_NUM_THREADS=1"
if ((cores > 1)); then
  whole="--map-by slot:PE=$cores --bind-to core -x OMP_NUM_THREADS=$cores"  # one rank a node
else
  whole=$bound
fi
loose="--bind-to none --mca mpi_yield_when_idle 1 -x OMP_NUM_THREADS=1"
#   what                              words                                                     PATH      environment -- arguments
dry "one rank a core"                 "4/mpirun -n $cores ${shown_root}$bound|!--oversubscribe" 4         -- -- verify
dry "one rank with all threads"       "-n 1 ${shown_root}$whole"                                 4         -- -n 1 -- verify
dry "the command's own options"       "gatefold verify -n 9 --tp=3 a\\ b"                       4         -- -n 1 -- verify -n 9 --tp=3 "a b"
dry "more ranks than cores"           "-n $many ${shown_root}--oversubscribe --map-by slot $loose|they share cores" 4 -- -n $many -- verify
dry "the same with Open MPI 5"        "-n $many ${shown_root}--map-by slot:OVERSUBSCRIBE $loose|!--oversubscribe"   5 -- -n $many -- verify
dry "more threads than cores"         "--bind-to none|OMP_NUM_THREADS=$many|they share cores"   4         -- -n 1 --threads $many verify
dry "threads of the environment"      "OMP_NUM_THREADS=$many"                                   4         OMP_NUM_THREADS=$many -- -n 1 verify
dry "--threads before it"             "OMP_NUM_THREADS=1"                                       4         OMP_NUM_THREADS=$many -- -n 1 --threads 1 verify
dry "ranks of hosts"                  "-n 2 ${shown_root}--host a:1\\,b:1 $whole"               4         -- --host a:1,b:1 -- verify
dry "hosts without numbers"           "-n 3 ${shown_root}--host a\\,b\\,c --map-by"             4         -- --host a,b,c -- verify
dry "the first hosts"                 "-n 2 ${shown_root}--host a:1\\,b:1\\,c:1 $whole"         4         -- --host a:1,b:1,c:1 --nodes 2 -- verify
dry "more ranks than hosts take"      "-n 4 |--oversubscribe"                                   4         -- -n 4 --host a:1,b:1 -- verify
dry "ranks of a hostfile"             "-n 8 ${shown_root}--hostfile $scratch/hosts"             4         -- --hostfile "$scratch/hosts" -- verify
dry "a last line without an end"      "-n 9 ${shown_root}--hostfile"                            4         -- --hostfile "$scratch/odd-hosts" -- verify
dry "one a GPU, unbound"              "-n 4 |gpu/gatefold|none"                                 4         -- -- verify --device cuda
dry "a GPU that auto finds"           "-n 4 |gpu/gatefold|none"                                 4         -- -- verify
dry "--device cpu beside GPUs"        "-n $cores |gpu/gatefold|!-n 4 --map"                     4         -- -- verify --device=cpu
dry "hidden GPUs"                     "-n 1 |gpu/gatefold|none"                                 4         CUDA_VISIBLE_DEVICES=2 -- -- verify
job=(SLURM_JOB_ID=1 "SLURM_TASKS_PER_NODE=1(x2),2")
dry "ranks of a Slurm job"            "-n 4 "                                                   4         "${job[@]}" -- -- verify
dry "the first nodes of a job"        "-n 2 ${shown_root}$whole"                                4         "${job[@]}" -- --nodes 2 -- verify
dry "cores that Slurm granted"        "-n 1 ${shown_root}--map-by slot --bind-to core -x OMP_NUM_THREADS=1" 4 SLURM_CPUS_ON_NODE=1 -- -n 1 -- verify
dry "srun"                            "srun --job-name=gatefold-|--mpi=pmix --ntasks=2 --kill-on-bad-exit=1 --nodes=2" pmix "${job[@]}" -- --launcher srun --nodes 2 -- verify
dry "srun, threads"                   "OMP_NUM_THREADS=1|!--cpu-bind|--cpus-per-task=1"                     pmix      "${job[@]}" SLURM_CPUS_PER_TASK=1 -- --launcher srun -- verify

# What ranks write on a pipe of mpirun's ends on this script's terminal, if it has one.
on_terminal() { script --quiet --return --log-out /dev/null --command "$(printf '%q ' "$@")"; }
if command -v script >/dev/null; then
  started_by=on_terminal
  dry "a terminal"                    "-x GATEFOLD_PROGRESS=1"                                  4         -- -n 1 -- verify
  dry "a terminal, srun"              "GATEFOLD_PROGRESS=1 srun"                                pmix      "${job[@]}" -- --launcher srun -- verify
  started_by=
fi
dry "no terminal"                     "!GATEFOLD_PROGRESS"                                      4         -- -n 1 -- verify
dry "no terminal, srun"               "!GATEFOLD_PROGRESS"                                      pmix      "${job[@]}" -- --launcher srun -- verify

#       code what                     words                                                     PATH
refused 69 "another MPI"              "other/mpirun isn't Open MPI's"                           other     -- -- verify
refused 69 "srun without PMIx"        "no PMIx plugin"                                          plain     "${job[@]}" -- --launcher srun -- verify
refused 64 "srun without a job"       "outside a Slurm job"                                     pmix      -- --launcher srun -- verify
refused 64 "copies of itself"         "srun started this 4 times"                               4         SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=1 -- -- verify
refused 64 "no command"               "no command"                                              4         -- --
refused 64 "an unknown option"        "--rank is unknown"                                       4         -- --rank 3 -- verify
refused 64 "no number"                "-n '0' is no number"                                     4         -- -n 0 -- verify
refused 64 "no value"                 "-n has no value"                                         4         -- -n
refused 64 "an empty value"           "--host has no value"                                     4         -- --host "" -- verify
refused 64 "hosts of no number"       "after the colon 'x' is no number"                        4         -- --host a:2,b:x -- verify
refused 64 "hosts of no rank"         "after the colon '0' is no number"                        4         -- --host a:0 -- verify
refused 64 "commas for hosts"         "--host ',,' names no host"                               4         -- --host ,, -- verify
refused 64 "threads of no number"     "OMP_NUM_THREADS: 'abc' is no number"                     4         OMP_NUM_THREADS=abc -- -- verify
refused 64 "no threads"               "OMP_NUM_THREADS: '0' is no number"                       4         OMP_NUM_THREADS=0,2 -- -- verify
refused 64 "more nodes than there are" "--nodes 4 is more than there are (3)"                   4         "${job[@]}" -- --nodes 4 -- verify
refused 64 "nodes of one machine"     "--nodes is for"                                          4         -- --nodes 1 -- verify
refused 66 "no hostfile"              "nowhere can't be opened"                                 4         -- --hostfile nowhere -- verify
refused 66 "a folder for a hostfile"  "can't be opened"                                         4         -- --hostfile "$scratch" -- verify
refused 65 "a hostfile of no host"    "no-hosts names no host"                                  4         -- --hostfile "$scratch/no-hosts" -- verify
refused 66 "no program"               "nowhere/gatefold isn't there"                            4         -- --build nowhere -- verify
if [[ $EUID == 0 ]]; then
  root=()
  refused 64 "root unasked"           "you are root"                                            4         -- -- verify
  refused 64 "root asked half"        "you are root"                                            4         OMPI_ALLOW_RUN_AS_ROOT=1 -- -- verify
  dry "root by the environment"       "--allow-run-as-root"                                     4         OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 -- -- verify
  root=(--allow-run-as-root)
fi
ln -s "$(command -v bash)" "$(command -v dirname)" "$scratch/plain"
for tool in sed seq cat sort wc grep head tail awk tr env; do ln -s "$(command -v $tool)" "$scratch/plain/"; done
case_of "no mpirun at all" 69 "no mpirun in PATH" "${clean[@]}" PATH="$scratch/plain" \
  "$here/launch/run" --allow-run-as-root --build "$scratch/cpu" -- verify

# One CPU of those that this test may have.
one=$(allowed_cpus | head -n 1)
case_of "an affinity of one CPU" 0 "-n 1 |OMP_NUM_THREADS=1" "${clean[@]}" PATH="$scratch/4:$PATH" \
  taskset -c "$one" "$here/launch/run" --dry-run --allow-run-as-root --build "$scratch/cpu" -- verify

# From here on with the MPI that is there.
started=("${clean[@]}" OMPI_MCA_btl_vader_backing_directory="$scratch" "$here/launch/run" "${root[@]}"
  -n 2 --build)
model=$here/tests/fixtures/smollm2-135m-instruct
case_of "two ranks verify" 0 "mpi|ranks     2|0 OK" "${started[@]}" "$GATEFOLD_BUILD" -- verify --model "$model" --tokens 3
case_of "the program refuses" 64 "--tokens 'x'" "${started[@]}" "$GATEFOLD_BUILD" -- verify --model "$model" --tokens x
case_of "the program's file is missing" 66 "nowhere/config.json" "${started[@]}" "$GATEFOLD_BUILD" -- verify --model nowhere

# signalled NAME CODE SIGNAL…: launch/run gets SIGNAL once both ranks are there, and nothing stays.
fake lingering/gatefold <<FAKE
echo \$\$ >>"$scratch/pids"
trap 'echo terminated; exit 143' TERM
for ((tenths = 0; tenths < 200; ++tenths)); do sleep 0.1; done
FAKE
interrupted() { # SIGNAL
  local tenths pid status=0
  rm -f "$scratch/pids"
  "${started[@]}" "$scratch/lingering" -- verify &
  for ((tenths = 0; tenths < 100; ++tenths)); do
    if [[ -e $scratch/pids ]] && (($(wc -l <"$scratch/pids") == 2)); then break; fi
    sleep 0.1
  done
  kill "-$1" $!
  local since=$SECONDS
  wait $! || status=$?
  if ((SECONDS > since + 10)); then echo "the end came $((SECONDS - since)) s after the signal"; fi
  sleep 0.3
  while read -r pid; do
    # One that has ended has no command line, though nobody may have asked how it ended.
    if [[ -n $(tr -d '\0' 2>/dev/null <"/proc/$pid/cmdline") ]]; then echo "$pid is left behind"; fi
  done <"$scratch/pids"
  return "$status"
}
sweep() {
  local tenths status=0
  rm -rf "$scratch/sweep" && mkdir "$scratch/sweep"
  "${started[@]}" "$GATEFOLD_BUILD" -- bench --model "$model" --iterations 1 --warmup 0 --hot --tokens 1-900:+1 \
    --csv "$scratch/sweep/csv" --json "$scratch/sweep/json" &
  for ((tenths = 0; tenths < 300; ++tenths)); do
    if [[ -e $scratch/sweep/csv ]] && (($(wc -l <"$scratch/sweep/csv") > 3)); then break; fi
    sleep 0.1
  done
  kill "-$1" $!
  wait $! || status=$?
  ls -A "$scratch/sweep"
  tail -n 1 "$scratch/sweep/json"
  awk -F, 'NR == 1 { columns = NF } END { if (NR > 3 && NF >= columns) print "whole" }' "$scratch/sweep/csv"
  return "$status"
}
case_of "SIGINT in a sweep" 130 "whole|}|!.gatefold-" sweep INT
case_of "SIGTERM" 143 "!left behind|!after the signal" interrupted TERM
case_of "SIGINT" 130 "!left behind|!after the signal" interrupted INT
case_of "SIGHUP" 129 "!left behind|!after the signal" interrupted HUP
finish
