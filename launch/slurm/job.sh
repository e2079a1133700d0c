# Sourced by verify.sbatch and bench.sbatch, within a Slurm job: a folder for it, what it ran on, and
# a sweep over its nodes. The caller says in $root where the checkout is.
# shellcheck shell=bash disable=SC2154

# What somebody who reads the results later has to know. No other variables: some hold secrets.
record_environment() {
  date --utc +%FT%TZ
  scontrol show job "$SLURM_JOB_ID" 2>/dev/null || true
  scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null || true
  git -C "$root" describe --always --dirty 2>/dev/null || true
  "$build/gatefold" --version || true
  env | grep -E '^(SLURM|OMPI|PMIX|PRTE|UCX|FI|NCCL|CUDA|OMP|KMP|DNNL|ONEDNN|GATEFOLD)_|^PATH=|^LD_LIBRARY_PATH=' |
    sort
}

begin() { # NAME
  trap 'stopped=143' TERM
  stopped=''
  build=${GATEFOLD_BUILD:-$root/build}
  folder=$PWD/gatefold-$1-$SLURM_JOB_ID
  mkdir -p "$folder"
  record_environment >"$folder/environment.txt" 2>&1
  "$root/launch/doctor" --build "$build" >"$folder/doctor.txt" 2>&1 || true
  launcher=${GATEFOLD_LAUNCHER-}
  if [[ -z $launcher ]]; then
    launcher=mpirun
    # shellcheck source=launch/host.sh
    if (me=begin && source "$root/launch/host.sh" && srun_has_pmix); then launcher=srun; fi
  fi
  echo "results: $folder (started by $launcher)"
}

# on_nodes N COMMAND…: one size of the sweep; sets status. Its name is in the folder's files.
on_nodes() {
  local nodes=$1 log child
  shift
  log=$folder/nodes-$nodes.log
  status=0
  "$root/launch/run" --launcher "$launcher" --nodes "$nodes" --build "$build" -- "$@" \
    --json "$folder/nodes-$nodes.json" "${outputs[@]}" >"$log" 2>&1 &
  child=$!
  trap 'stopped=143; kill -TERM "$child"' TERM
  wait "$child" || status=$?
  # A signal ends a wait, not what is waited for.
  if [[ -n $stopped ]]; then wait "$child" || status=$?; fi
  trap 'stopped=143' TERM
  cat "$log"
}

# Sizes 1, 2, 4 and so on up to all nodes, as long as the program runs, whether it verifies or not.
sweep_nodes() { # COMMAND…
  local nodes code=0 sizes=()
  for ((nodes = 1; nodes <= SLURM_JOB_NUM_NODES; nodes *= 2)); do sizes+=("$nodes"); done
  if ((sizes[-1] != SLURM_JOB_NUM_NODES)); then sizes+=("$SLURM_JOB_NUM_NODES"); fi
  for nodes in "${sizes[@]}"; do
    outputs=()
    if [[ $1 == bench ]]; then outputs=(--csv "$folder/nodes-$nodes.csv"); fi
    printf '\nnodes: %s\n' "$nodes"
    on_nodes "$nodes" "$@"
    if ((code == 0)); then code=$status; fi
    if [[ -n $stopped ]]; then
      echo "stopped at $nodes node(s) by SIGTERM (as before the time limit); what was finished is in $folder"
      exit "$stopped"
    fi
    if ((status > 1)); then break; fi
  done
  exit "$code"
}
