# Sourced by the tests of this folder: starts jobs, each in a folder of its own, and says how they
# ended. GATEFOLD_BUILD and GATEFOLD_MPIRUN come from tests.cmake.
# shellcheck shell=bash disable=SC2034

here=$(cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
model=${here%/faults}/fixtures/smollm2-135m-instruct
program=$GATEFOLD_BUILD/gatefold
with_faults=$GATEFOLD_BUILD/tests/gatefold_with_faults
# What jobs compute on: GATEFOLD_TEST_DEVICE is cpu, if unset, or cuda.
device=()
# For faults of messages: what ranks of a node share in memory never becomes one.
by_messages=(--comm mpi)
if [[ ${GATEFOLD_TEST_DEVICE-cpu} == cuda ]]; then device=(--device cuda --comm mpi) by_messages=(); fi
# Shared memory goes into the job's own folder, so that none outlives a killed rank.
read -ra mpirun <<<"${GATEFOLD_MPIRUN/--mca btl_vader_backing_directory \/tmp/}"

scratch=$(mktemp -d "${TMPDIR:-/tmp}/gatefold-faults.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
cases=0
failed=0

# What jobs verify, and what they say when all is well.
cat >"$scratch/biased.json" <<'END'
{"model_type": "gatefold_ffn", "hidden_size": 192, "intermediate_size": 320, "gated": true,
 "activation": "silu", "bias": true, "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
END
real=(-- verify --model "$model")
biased=(-- verify --config "$scratch/biased.json")
right="Out of bounds values : 0 OK"

# start NP NAME=VALUE… -- ARGUMENT…: a job of NP ranks; sets status, seconds and job. GATEFOLD_FAULT
# among the values takes the program that has faults, GATEFOLD_ALTER preloads the layer under MPI.
# survivors=1 keeps mpirun from ending the others when a rank is lost. It gives the others 1 s to
# end before it kills them; quick_end=1 makes that none, patience=1 makes it 3.
start() {
  local ranks=$1 environment=() flags=() binary=$program
  shift
  cases=$((cases + 1))
  job=$scratch/$cases
  mkdir "$job" "$job/tmp"
  while [[ $1 != -- ]]; do
    case $1 in
      quick_end=1) flags+=(--mca odls_base_sigkill_timeout 0) ;;
      patience=1) flags+=(--mca odls_base_sigkill_timeout 3) ;;
      survivors=1) flags+=(--mca orte_abort_on_non_zero_status 0) ;;
      GATEFOLD_FAULT=*) binary=$with_faults environment+=(-x "$1") ;;
      GATEFOLD_ALTER=*)
        environment+=(-x "$1" -x "GATEFOLD_PRELOAD=$GATEFOLD_BUILD/tests/libpmpi_alter.so") ;;
      *) environment+=(-x "$1") ;;
    esac
    shift
  done
  shift
  # GATEFOLD_JOB marks the processes of this job, should any stay behind.
  TMPDIR=$job/tmp "${mpirun[@]}" "${flags[@]}" --mca btl_vader_backing_directory "$job/tmp" \
    --mca osc_sm_backing_directory "${osc_sm:-$job/tmp}" \
    -x GATEFOLD_JOB="$job" "${environment[@]}" -n "$ranks" "$here/rank.sh" "$job" "$binary" "$@" "${device[@]}" \
    >"$job/stdout" 2>"$job/stderr" </dev/null &
  watch_job $!
}

# Waits for a job to end; sets status, seconds and how many of them came after its fault (late).
# Open MPI's own mpirun sometimes stays, or breaks, after a rank was lost: what counts is when the
# ranks have ended.
watch_job() { # PID
  local begin=${EPOCHREALTIME/./} quiet=0 tenths=0 fault=-1
  while kill -0 "$1" 2>/dev/null; do
    if [[ ! -e $job/number ]] || any_left; then
      quiet=0
      tenths=$(((${EPOCHREALTIME/./} - begin) / 100000))
    else
      quiet=$((quiet + 1))
    fi
    if ((fault < 0)) && grep -qs planted "$job"/stderr.*; then
      fault=$tenths
      if [[ -n ${signal-} ]]; then send_signal "$1"; fi
    fi
    if ((quiet == 20 || tenths > 400)); then
      echo "the driver ended mpirun (after $tenths tenths of a second)" >>"$job/stderr"
      kill -KILL "$1"
    fi
    sleep 0.1
  done
  seconds=$((tenths / 10)).$((tenths % 10))
  late=$(((tenths - fault) / 10))
  status=0
  wait "$1" 2>/dev/null || status=$?
  if ((quiet >= 20)); then status=$(told_status); fi
}

# With what the first rank ended, as mpirun said before it stayed; 137 if it said nothing.
told_status() {
  local told
  told=$(sed -nE 's/^ *Exit code: +([0-9]+)$/\1/p; s/.* exited on signal ([0-9]+) .*/128+\1/p' "$job/stderr" | head -n 1)
  echo $((${told:-137}))
}

# Are there processes of the job? JOB/left names them, as /proc/PID/environ.
any_left() {
  # grep minds processes that end while it looks.
  grep -lszxF "GATEFOLD_JOB=$job" /proc/[0-9]*/environ >"$job/left" || true
  [[ -s $job/left ]]
}

# What a job said: on standard output, and each rank on standard error.
said() { grep -qF -- "$1" "$job"/stdout "$job"/stderr.*; }

# ends NAME PROBLEM…: the line of a case, and all there is to know of it where there is a problem.
ends() {
  local name=$1
  shift
  if (($# == 0)); then
    printf 'ok      %5s s  %s\n' "$seconds" "$name"
    return
  fi
  fails "$name" "$@"
}

fails() {
  failed=$((failed + 1))
  printf 'FAILED  %5s s  %s\n' "$seconds" "$1"
  shift
  printf '    %s\n' "$@"
  tail -n 40 "$job"/std* 2>/dev/null | sed 's/^/    | /'
}

# agreed NAME NP CODE WORDS NAME=VALUE… -- ARGUMENT…: every rank of the job ends with CODE, and
# WORDS (parts divided by |) are said. A NAME that GATEFOLD_FAULT_SKIP matches is left out.
agreed() {
  local name=$1 ranks=$2 code=$3 words=$4 problems=() rank word
  shift 4
  if [[ -n ${GATEFOLD_FAULT_SKIP-} && $name =~ $GATEFOLD_FAULT_SKIP ]]; then return; fi
  start "$ranks" quick_end=1 "$@"
  if ((status != code)); then problems+=("mpirun ended with $status instead of $code"); fi
  for ((rank = 0; rank < ranks; ++rank)); do
    local own=nothing
    if [[ -s $job/status.$rank ]]; then own=$(<"$job/status.$rank"); fi
    if [[ $own != "$code" ]]; then problems+=("rank $rank ended with $own instead of $code"); fi
  done
  IFS='|' read -ra words <<<"$words"
  for word in "${words[@]}"; do
    if ! said "$word"; then problems+=("nobody said: $word"); fi
  done
  ends "$name" "${problems[@]}"
}

timeout=3
# once NAME WORDS: of the last job's ranks, just one has said WORDS.
once() {
  local times
  times=$(cat "$job"/stderr.* | grep -cF -- "$2" || true)
  if ((times != 1)); then fails "$1" "said $times times: $2"; fi
}

# single NAME CODE WORDS NAME=VALUE… -- ARGUMENT…: the program by itself, without mpirun.
single() {
  local name=$1 code=$2 told=$3 environment=() problems=() begin=${EPOCHREALTIME/./}
  shift 3
  cases=$((cases + 1))
  job=$scratch/$cases
  mkdir "$job"
  while [[ $1 != -- ]]; do environment+=("$1") && shift; done
  shift
  status=0
  env "${environment[@]}" timeout 20 "$program" "$@" >"$job/stdout" 2>"$job/stderr.0" || status=$?
  seconds=$(((${EPOCHREALTIME/./} - begin) / 1000000)).0
  if ((status != code)); then problems+=("it ended with $status instead of $code"); fi
  if ! said "$told"; then problems+=("it didn't say: $told"); fi
  ends "$name" "${problems[@]}"
}

# What holds wherever something dies: RANKS (0,2: both of them, 0|2: one at least, since mpirun may
# kill a rank before it can say a word) say what matches PATTERN, the job ends within the timeout and
# 5 s of the fault, and nothing is left behind. Adds to problems.
check_loss() { # PATTERN RANKS
  local pattern=$1 rank speakers=() silent=()
  if [[ -n $pattern ]]; then IFS='|,' read -ra speakers <<<"$2"; fi
  if ((late >= timeout + 5)); then problems+=("it took longer than $((timeout + 5)) s"); fi
  for rank in "${speakers[@]}"; do
    if ! grep -qE -- "\[rank $rank\] .*($pattern)" "$job/stderr.$rank"; then silent+=("$rank"); fi
  done
  if [[ $2 == *"|"* ]] && ((${#silent[@]} < ${#speakers[@]})); then silent=(); fi
  for rank in "${silent[@]}"; do problems+=("rank $rank didn't say: $pattern"); done
  mapfile -t -O "${#problems[@]}" problems < <(leftovers)
}

# lost NAME NP CODE PATTERN RANKS NAME=VALUE… -- ARGUMENT…: a job in which something dies; mpirun
# ends with CODE (!0: any but 0).
lost() {
  local name=$1 ranks=$2 code=$3 pattern=$4 who=$5 problems=()
  shift 5
  start "$ranks" GATEFOLD_LOSE=1 "$@" --timeout "$timeout"
  if [[ $code == "!0" ]]; then
    if ((status == 0)); then problems+=("mpirun ended with 0"); fi
  elif ((status != code)); then
    problems+=("mpirun ended with $status instead of $code")
  fi
  check_loss "$pattern" "$who"
  ends "$name" "${problems[@]}"
}

# alone NAME NP CODES PATTERN RANKS NAME=VALUE… -- ARGUMENT…: a job in which something dies and
# mpirun does nothing about it: one of RANKS ends by itself, with one of CODES (75|143), which ends
# the others.
alone() {
  local name=$1 ranks=$2 codes=$3 pattern=$4 who=$5 problems=() rank ended_well=0
  shift 5
  start "$ranks" survivors=1 "$@" --timeout "$timeout"
  for rank in ${who//[,|]/ }; do
    local own=nothing
    if [[ -s $job/status.$rank ]]; then own=$(<"$job/status.$rank"); fi
    if [[ $own =~ ^($codes)$ ]]; then
      ended_well=1
    elif [[ $own != nothing ]]; then
      problems+=("rank $rank ended with $own, not $codes")
    fi
  done
  if ((ended_well == 0)); then problems+=("no rank ended with $codes"); fi
  check_loss "$pattern" "$who"
  ends "$name" "${problems[@]}"
}

# signalled NAME NP CODE PATTERN RANKS SIGNAL WHOM NAME=VALUE… -- ARGUMENT…: as lost, for a job that
# gets SIGNAL, sent to mpirun or to a rank, as soon as its fault says that it is there.
signalled() {
  local signal=$6 whom=$7 first=("${@:1:5}")
  shift 7
  lost "${first[@]}" "$@"
}

send_signal() { # PID of mpirun
  local to=$1
  if [[ $whom != mpirun ]]; then to=$(<"$job/pid.$whom"); fi
  kill "-$signal" "$to"
  signal=
}

# What is there of a job that has ended: processes, and shared memory outside its folder.
leftovers() {
  local tries process
  for ((tries = 0; tries < 20; ++tries)); do
    if ! any_left; then break; fi
    sleep 0.1
  done
  while read -r process; do
    kill -KILL "$(basename "${process%/environ}")" 2>/dev/null || true
    echo "$process is left behind ($(tr '\0' ' ' 2>/dev/null <"${process%/environ}/cmdline" || true))"
  done <"$job/left"
  # Open MPI names its segments after the job's number.
  if [[ -e $job/number ]]; then
    find /dev/shm -name "*$(printf %x "$(<"$job/number")")*" -printf '%p is left behind\n'
  fi
}

# The driver is worth something only if it can say no.
refuses() { # agreed|lost ARGUMENT…
  local before=$failed
  "$@" >"$scratch/refused"
  if ((failed > before)); then
    failed=$before
    printf 'ok      %5s s  noticed: %s\n' "$seconds" "$2"
  else
    failed=$((before + 1))
    printf 'FAILED  %5s s  not noticed: %s\n' "$seconds" "$2"
  fi
}

finish() {
  echo "$cases jobs, $failed failed"
  ((failed == 0 && cases > 0))
}
