# Sourced by launch/run and launch/doctor: what this machine gives to a job, and which MPI it has.
# The caller says in $me how it is called.
# shellcheck shell=bash disable=SC2154

stop() { # CODE MESSAGE…: the exit codes are those of runtime/error.h
  local code=$1
  shift
  printf '%s: %s\n' "$me" "$*" >&2
  exit "$code"
}

expand_list() { # 0-2,7: prints 0 1 2 7, one a line
  local part
  for part in ${1//,/ }; do seq "${part%-*}" "${part#*-}"; done
}

# The CPUs that this process may run on: hardware threads, two of which may share a core.
allowed_cpus() { expand_list "$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)"; }

allowed_cores() {
  local cpu files=() siblings
  for cpu in $(allowed_cpus); do
    files+=("/sys/devices/system/cpu/cpu$cpu/topology/thread_siblings_list")
  done
  # Where the kernel tells no topology, a CPU counts as a core.
  if siblings=$(cat "${files[@]}" 2>/dev/null); then
    sort -u <<<"$siblings" | wc -l
  else
    echo "${#files[@]}"
  fi
}

# The contents of a file of this process's control group and of those around it, one a line.
cgroup_values() { # CONTROLLER FILE
  local path mount
  path=$(awk -F: -v name="$1" '("," $2 ",") ~ ("," name ",") || ($1 == 0 && path == "") { path = $3 }
                               END { print path }' /proc/self/cgroup)
  while true; do
    for mount in /sys/fs/cgroup "/sys/fs/cgroup/$1"; do
      cat "$mount${path%/}/$2" 2>/dev/null || true
    done
    if [[ -z ${path%/} ]]; then return; fi
    path=${path%/*}
  done
}

# How many CPUs' worth of time control groups grant, rounded down; nothing where they don't limit it.
granted_cpus() {
  local period
  read -r period < <(cgroup_values cpu cpu.cfs_period_us) || true
  {
    cgroup_values cpu cpu.max
    cgroup_values cpu cpu.cfs_quota_us | sed "s/\$/ ${period:-100000}/"
  } | awk '$1 ~ /^[0-9]+$/ { n = int($1 / $2); if (n < 1) n = 1; if (!least || n < least) least = n }
           END { if (least) print least }'
}

# Cores that a job on this machine can keep busy.
usable_cores() {
  local cores granted
  cores=$(allowed_cores)
  granted=$(granted_cpus)
  # Slurm may have granted fewer than it confines the job to.
  for granted in $granted ${SLURM_CPUS_ON_NODE-}; do
    if ((granted < cores)); then cores=$granted; fi
  done
  echo "$cores"
}

# The GPUs that the driver shows, one a line; CUDA_VISIBLE_DEVICES hides some.
visible_gpus() {
  local gpus
  gpus=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null) ||
    return 0
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    gpus=$(head -n "$(tr -s ', ' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)" <<<"$gpus") || true
  fi
  if [[ -n $gpus ]]; then printf '%s\n' "$gpus"; fi
}

# The mpirun of the MPI that the program was built with; else the first in PATH; else nothing.
find_mpirun() { # BUILD
  local built
  built=$(sed -n 's/^MPIEXEC_EXECUTABLE:[A-Z]*=//p' "$1/CMakeCache.txt" 2>/dev/null) || true
  if [[ -x $built ]]; then
    echo "$built"
  else
    command -v mpirun || true
  fi
}

# 4.1.4 of `mpirun (Open MPI) 4.1.4`, `mpiexec (OpenRTE) 4.1.4`; nothing for another MPI's.
open_mpi_version() { # MPIRUN
  "$1" --version 2>/dev/null | sed -n '1s/^[a-z]* (Open[ A-Z]*) \([0-9][0-9.]*\).*/\1/p'
}

# Open MPI refuses to run as root unless it is told twice.
root_is_allowed() { [[ -n ${OMPI_ALLOW_RUN_AS_ROOT-} && -n ${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM-} ]]; }

# 4(x2),3: prints 4 4 3, one a line, as Slurm abbreviates what nodes have.
per_node() {
  local part times
  for part in ${1//,/ }; do
    times=1
    if [[ $part == *"(x"* ]]; then times=${part#*"(x"} times=${times%")"}; fi
    for ((; times > 0; --times)); do echo "${part%%"("*}"; done
  done
}

# Has Slurm a PMIx plugin, which srun needs to start the ranks of one MPI job?
srun_has_pmix() {
  local plugins
  plugins=$(srun --mpi=list 2>&1) && grep -qE '(^|[[:space:]])pmix(_v[0-9]+)?([[:space:],]|$)' <<<"$plugins"
}
