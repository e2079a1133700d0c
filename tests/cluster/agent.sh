#!/usr/bin/env bash
# agent.sh [OPTION…] NODE COMMAND…: what mpirun takes for ssh, to a machine of machines.sh.
set -euo pipefail

while [[ $1 == -* ]]; do shift; done
pid=$(<"$GATEFOLD_NODES/$1")
shift
exec nsenter --target "$pid" --mount --uts --ipc --net --wd -- bash -c "$*"
