# Sourced by launch/quickstart and launch/test: the Debian packages, and the two steps that both
# take. The caller stands in the root of the checkout.
# shellcheck shell=bash disable=SC2034

program_packages=(g++ cmake ninja-build openmpi-bin libopenmpi-dev libdnnl-dev libcli11-dev
  nlohmann-json3-dev libfmt-dev)
test_packages=(libgtest-dev libgmock-dev binutils strace)
# Without one of these a test or a stage says that it is skipped.
optional_test_packages=(ccache clang libclang-rt-14-dev libomp-14-dev clang-format-14 shellcheck
  python3-matplotlib procps iproute2 slurm-wlm slurmd slurmctld slurm-client munge)

stop() { # CODE MESSAGE…: the exit codes are those of runtime/error.h
  local code=$1
  shift
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit "$code"
}

missing_packages() { # NAME…: prints those that aren't installed
  local name
  for name in "$@"; do
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null) == installed ]] ||
      printf '%s\n' "$name"
  done
}

as_root() {
  if [[ $EUID == 0 ]]; then "$@"; else sudo "$@"; fi
}

install_packages() { # NAME…: apt-get is not called when all are there
  local missing why=
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    why="this isn't Debian or Ubuntu, and the packages have other names elsewhere"
    missing=("$@")
  else
    mapfile -t missing < <(missing_packages "$@")
    if ((${#missing[@]} == 0)); then return; fi
    if [[ $EUID != 0 ]] && ! command -v sudo >/dev/null; then
      why="installing needs root or sudo, and there is neither"
    fi
  fi
  if [[ -n $why ]]; then
    stop 69 "can't install ${missing[*]} ($why); have them installed, then build with plain CMake:
  cmake -S . -B build -DGATEFOLD_BUILD_TESTS=OFF && cmake --build build --target gatefold"
  fi
  printf 'installing %s\n' "${missing[*]}"
  # A list that can't be refreshed may still name everything that is wanted.
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq update || true
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
    -o Dpkg::Use-Pty=0 "${missing[@]}" >/dev/null
}

# A cache of another generator, or one that moved with its checkout, is what CMake would refuse.
usable_cache() { # FOLDER
  grep -qsx "CMAKE_GENERATOR:INTERNAL=Ninja" "$1/CMakeCache.txt" &&
    grep -qsxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "$1/CMakeCache.txt"
}

# Configures and builds into FOLDER; quiet, but for the end of the log when it fails.
build_preset() { # PRESET FOLDER TARGET CMAKE-ARGUMENT…
  local preset=$1 folder=$2 target=$3 log=$2/build.log fresh=()
  shift 3
  mkdir -p "$folder"
  if ! usable_cache "$folder"; then fresh=(--fresh); fi
  if ! { cmake --preset "$preset" "${fresh[@]}" "$@" &&
    cmake --build "$folder" --target "$target" --parallel "$(nproc)"; } >"$log" 2>&1; then
    tail -n 60 "$log" >&2
    printf 'the whole log is %s\n' "$log" >&2
    return 1
  fi
}
