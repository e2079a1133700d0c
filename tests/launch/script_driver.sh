# Sourced by the tests of launch/run and launch/doctor: a table of cases, each of which starts the
# script in an environment of its own and looks at its exit code and at what it says.
# shellcheck shell=bash disable=SC2034

here=$(cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
scratch=$(mktemp -d "${TMPDIR:-/tmp}/gatefold-launch.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
cases=0
failed=0

# What the ones who start the test have set counts for nothing.
clean=(env --default-signal=INT -u OMPI_ALLOW_RUN_AS_ROOT -u OMPI_ALLOW_RUN_AS_ROOT_CONFIRM
  -u OMP_NUM_THREADS -u CUDA_VISIBLE_DEVICES)
for name in ${!SLURM_@}; do clean+=(-u "$name"); done

fake() { # FOLDER/NAME: a program whose text is the standard input
  mkdir -p "$(dirname "$scratch/$1")"
  { echo '#!/bin/bash' && cat; } >"$scratch/$1"
  chmod +x "$scratch/$1"
}

# case_of NAME CODE WORDS COMMAND…: it ends with CODE and says WORDS, parts divided by |; a part that
# begins with ! is not said.
case_of() {
  local name=$1 code=$2 parts status=0 word problems=()
  IFS='|' read -ra parts <<<"$3"
  shift 3
  cases=$((cases + 1))
  "$@" >"$scratch/out" 2>"$scratch/err" </dev/null || status=$?
  if ((status != code)); then problems+=("it ended with $status instead of $code"); fi
  for word in "${parts[@]}"; do
    if [[ $word == !* ]]; then
      if grep -qF -- "${word#!}" "$scratch/out" "$scratch/err"; then problems+=("it said: ${word#!}"); fi
    elif ! grep -qF -- "$word" "$scratch/out" "$scratch/err"; then
      problems+=("it didn't say: $word")
    fi
  done
  if ((${#problems[@]} == 0)); then
    echo "ok      $name"
    return
  fi
  failed=$((failed + 1))
  echo "FAILED  $name"
  printf '    %s\n' "${problems[@]}"
  sed 's/^/    | /' "$scratch/out" "$scratch/err"
}

finish() {
  echo "$cases cases, $failed failed"
  ((failed == 0 && cases > 0))
}
