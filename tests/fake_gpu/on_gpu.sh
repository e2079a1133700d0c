#!/usr/bin/env bash
# on_gpu.sh PROBE COMMAND…: the command on a real GPU; without one, exit 77 with the reason.
set -euo pipefail

probe=$1
shift
"$probe"
exec "$@"
