#!/usr/bin/env bash
# Includes go launch -> layers -> parallel -> runtime, never upward; a vendor header is included
# only where its backend is; headers name no vendor and no formatting or JSON library.
set -euo pipefail

# shellcheck disable=SC2016
find runtime parallel layers launch -type f \
  \( -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \) -print0 |
  LC_ALL=C sort -z |
  xargs -0 awk '
    BEGIN {
      level["runtime"] = 1; level["parallel"] = 2; level["layers"] = 3; level["launch"] = 4
      allowed["mpi"] = "^parallel/(mpi_communicator.cpp|session.cpp|mpi_windows.(h|cpp)|roll_call.(h|cpp)|mpi_interop.h|mpi_check.h)$"
      allowed["oneDNN"] = "^runtime/(cpu_device|onednn_gemm).cpp$"
      allowed["OpenMP"] = "^runtime/[^/]*.cpp$"
      allowed["CUDA"] = "^runtime/cuda_[a-z_]*[.](h|cpp|cu|cuh)$|^parallel/nccl_(communicator[.]cpp|interop[.]h)$"
      allowed["fmt or JSON"] = "[.](cpp|cu)$"
    }
    function fault(why) {
      printf "%s:%d: %s (%s)\n", FILENAME, FNR, $0, why
      faults++
    }
    function vendor(path) {
      if (path == "parallel/nccl_communicator.h") return ""  # ours, for builds without NCCL too
      if (path ~ /^mpi[^\/]*[.]h$/) return "mpi"
      if (path ~ /(^|\/)dnnl/) return "oneDNN"
      if (path ~ /^omp([-_][^\/]*)?[.]h$/) return "OpenMP"
      if (path ~ /(^|\/)(cuda|cublas|curand|cusparse|cub|nccl|nvtx|nvToolsExt|nvml)/) return "CUDA"
      if (path ~ /^(fmt|nlohmann)\//) return "fmt or JSON"
      return ""
    }
    /^[ \t]*#[ \t]*(include|import)/ {
      path = $0
      sub(/^[ \t]*#[ \t]*[a-z_]+[ \t]*/, "", path)
      quoted = path ~ /^"/
      if (path !~ /^["<]/) { fault("not a file name"); next }
      path = substr(path, 2)
      sub(/[">].*$/, "", path)
      sub(/^gatefold\//, "", path)
      split(FILENAME, own, "/")
      split(path, parts, "/")
      if (parts[1] in level) {
        if (level[parts[1]] > level[own[1]]) fault(own[1] "/ is below " parts[1] "/")
        if (path ~ /\/[.][.]?\//) fault("dots in the path")
      } else if (quoted) {
        fault("own headers are named from the root: runtime/, parallel/, layers/ or launch/")
      }
      name = vendor(path)
      if (name != "" && FILENAME !~ allowed[name]) fault("no place for " name)
    }
    END { exit faults > 0 }
  '
