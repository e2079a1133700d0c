#!/usr/bin/env bash
# launch/doctor sees what is wrong with a machine, says what to do, and tells what hurts from what
# stops a run.
set -euo pipefail
# shellcheck source=tests/launch/script_driver.sh
source "$(dirname "${BASH_SOURCE[0]}")/script_driver.sh"

root=()
if [[ $EUID == 0 ]]; then root=(--allow-run-as-root); fi
doctor=("$here/launch/doctor" "${root[@]}" --build)
well="All is well for CPU runs"

# A copy of the program that knows of no mpirun, so that PATH decides.
mkdir "$scratch/copy"
ln -s "$GATEFOLD_BUILD/gatefold" "$scratch/copy/gatefold"
fake old/mpirun <<<'echo "mpirun (Open MPI) 3.1.0"'
fake hydra/mpirun <<<'echo "HYDRA build details:"'
fake ldd/ldd <<<'echo "	libdnnl.so.2 => not found"'
fake gpu/nvidia-smi <<<'echo "NVIDIA H200, 143771 MiB, 580.65"; echo "NVIDIA H200, 143771 MiB, 580.65"'
fake pmix/srun <<<'printf "MPI plugin types are...\n\tnone\n\tpmix\n"'
fake plain/srun <<<'printf "MPI plugin types are...\n\tnone\n\tpmi2\n"'
# shellcheck disable=SC2016  # the fake expands it
fake failing/mpirun <<<'if [[ $1 == --version ]]; then echo "mpirun (Open MPI) 4.1.4"; else echo "no slots"; exit 1; fi'
mkdir "$scratch/bare"
for tool in bash sed seq cat sort wc grep head tail awk tr env ldd paste numfmt df getconf getent uniq \
  taskset dirname hostname timeout; do
  ln -s "$(command -v $tool)" "$scratch/bare/"
done
# As if it were the version that the program was built with.
version=$("$GATEFOLD_BUILD/gatefold" --version | sed -n 's/^MPI .* v//p')
sed -i "s/4\.1\.4/$version/" "$scratch/failing/mpirun"

see() { # NAME CODE WORDS FOLDER-OF-THE-PROGRAM COMMAND…
  case_of "$1" "$2" "$3" "${clean[@]}" "${@:5}" "${doctor[@]}" "$4"
}
path() { echo "PATH=$scratch/$1:$PATH"; }

#   what                     code words                                                     program
see "a machine that is well"    0 "$well|two ranks start and find each other|rank 0 on |launch " "$GATEFOLD_BUILD"
see "no program"               69 "BAD   program|isn't there|1 BAD"                           "$scratch"
see "no mpirun"                69 "BAD   MPI        no mpirun in PATH|!two ranks"              "$scratch/copy" PATH="$scratch/bare"
see "another Open MPI"         69 "BAD   MPI|is Open MPI 3.1.0's, but the program has"        "$scratch/copy" "$(path old)"
see "another MPI"              69 "BAD   MPI|isn't Open MPI's"                                "$scratch/copy" "$(path hydra)"
see "ranks that don't start"   69 "BAD   job        two ranks don't start: no slots"          "$scratch/copy" "$(path failing)"
see "a missing library"        69 "BAD   program|not found: libdnnl.so.2"                     "$GATEFOLD_BUILD" "$(path ldd)"
see "no folder for sockets"    69 "BAD   files      $scratch/nowhere can't be written"        "$GATEFOLD_BUILD" TMPDIR="$scratch/nowhere"
see "few open files"            0 "$well|note  open files 256, less than 1024"                "$GATEFOLD_BUILD" prlimit --nofile=256
see "a small stack"             0 "$well|note  stack      4096"                               "$GATEFOLD_BUILD" prlimit --stack=4194304
see "srun with PMIx"            0 "$well|ok    Slurm      srun has a PMIx plugin"             "$GATEFOLD_BUILD" "$(path pmix)"
see "srun without PMIx"         0 "$well|note  Slurm      srun has no PMIx plugin"            "$GATEFOLD_BUILD" "$(path plain)"
see "GPUs, hidden but for one"  0 "$well|ok    GPUs       1: 1 x NVIDIA H200"                 "$GATEFOLD_BUILD" "$(path gpu)" CUDA_VISIBLE_DEVICES=0
if "$GATEFOLD_BUILD/gatefold" --version | grep -q '^CUDA *not built in'; then
  see "GPUs and no CUDA part"   0 "$well|ok    GPUs       2: 2 x|note  CUDA       the program has no CUDA part" "$GATEFOLD_BUILD" "$(path gpu)"
fi
if (($(nproc) > 1)); then
  see "one CPU of several"      0 "$well|note  cores      1 (this process may use 1 CPUs of"  "$GATEFOLD_BUILD" taskset -c 0
fi
case_of "no folder after --build" 64 "--build has no value" "${clean[@]}" "$here/launch/doctor" --build
case_of "an unknown option" 64 "--bulid is unknown" "${clean[@]}" "$here/launch/doctor" --bulid x
if [[ $EUID == 0 ]]; then
  case_of "root unasked" 0 "$well|note  job        not tried: you are root" "${clean[@]}" "$here/launch/doctor" --build "$GATEFOLD_BUILD"
fi

# What only a namespace of its own can pretend.
inside() { # NAME WORDS SCRIPT
  see "$1" 0 "$well|$2" "$GATEFOLD_BUILD" unshare --mount --uts --net bash -c "ip link set lo up; $3; exec \"\$@\"" inside
}
if ! unshare --mount --uts --net true 2>/dev/null || ! command -v ip >/dev/null; then
  echo "not tested: small /dev/shm, control groups, a host without a name (no root, or no iproute2)"
  finish
  exit
fi
mkdir -p "$scratch/v2" "$scratch/v1/cpu"
echo "150000 100000" >"$scratch/v2/cpu.max"
echo 1073741824 >"$scratch/v2/memory.max"
echo 100000 | tee "$scratch/v1/cpu/cpu.cfs_quota_us" >"$scratch/v1/cpu/cpu.cfs_period_us"
inside "a small /dev/shm" "note  /dev/shm   64MB free of 64MB" "mount -t tmpfs -o size=64m tmpfs /dev/shm"
inside "a full folder for sockets" "note  files      16MB free in /mnt" "mount -t tmpfs -o size=16m tmpfs /mnt; export TMPDIR=/mnt"
inside "a name without an address" "note  names      gatefold-nowhere" "hostname gatefold-nowhere"
inside "a control group's memory" "note  memory     1.0GB to use" "mount --bind '$scratch/v2' /sys/fs/cgroup"
if (($(nproc) > 1)); then
  inside "a control group's time" "note  cores      1 (a control group grants the time of 1 CPUs, of" "mount --bind '$scratch/v2' /sys/fs/cgroup"
  inside "the same, version 1" "note  cores      1 (a control group grants the time of 1 CPUs, of" "mount --bind '$scratch/v1' /sys/fs/cgroup"
fi
finish
