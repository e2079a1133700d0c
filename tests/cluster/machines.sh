# Sourced by the tests of this folder: machines within this one, each with a host name, a network
# and a /dev/shm of its own. All of it, daemons and folders too, lives in namespaces of the test and
# is gone with its first process, however that ends. Tests say `skipped: …` where they may not.
# shellcheck shell=bash disable=SC2034

here=$(cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
model=$here/tests/fixtures/smollm2-135m-instruct
right="Out of bounds values : 0 OK"
scratch=/run/gatefold
cases=0
failed=0
declare -A node_pid=()

skip() { # WHY
  echo "skipped: $test_name ($1)"
  exit 77
}

# Goes on inside: the rest of the test is process 1 there.
enter_machines() { # COMMAND…: what the test can't do without
  test_name="cluster.$(basename "$0" .sh)"
  local command why
  if [[ -n ${GATEFOLD_INSIDE-} ]]; then
    set_up_head
    return
  fi
  for command in unshare nsenter pgrep "$@"; do
    if ! PATH=$PATH:/usr/sbin command -v "$command" >/dev/null; then skip "no $command is installed"; fi
  done
  if [[ $EUID != 0 ]]; then skip "making namespaces needs root"; fi
  if ! why=$(unshare --fork --pid --mount --uts --ipc --net bash -c 'mount -t tmpfs tmpfs /mnt &&
      ip link add bridge0 type bridge && ip link add one type veth peer name two' 2>&1); then
    skip "namespaces or networks can't be made here: ${why//$'\n'/; }"
  fi
  GATEFOLD_INSIDE=1 PATH=$PATH:/usr/sbin exec unshare --fork --kill-child --pid --mount-proc --mount \
    --uts --ipc --net "${BASH_SOURCE[1]}"
}

set_up_head() {
  mount -t tmpfs -o size=512m tmpfs /run
  mkdir -p "$scratch/tmp"
  export TMPDIR=$scratch/tmp OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export OMPI_MCA_plm_rsh_agent=$here/tests/cluster/agent.sh GATEFOLD_NODES=$scratch/nodes
  # Each machine takes all cores for its own, so that ranks of two wait for each other on one.
  export OMPI_MCA_mpi_yield_when_idle=1
  mkdir "$GATEFOLD_NODES"
  own_machine head
  ip link add bridge0 type bridge
  ip address add 10.77.0.1/24 dev bridge0
  ip link set bridge0 up
  printf '127.0.0.1 localhost\n10.77.0.1 head\n' >"$scratch/hosts"
  mount --bind "$scratch/hosts" /etc/hosts
}

own_machine() { # NAME
  hostname "$1"
  mount -t tmpfs -o size=256m tmpfs /dev/shm
  ip link set lo up
}

add_node() { # NAME NUMBER: the network knows it as 10.77.0.NUMBER
  local name=$1
  export -f own_machine
  unshare --mount --uts --ipc --net bash -c "own_machine $name && touch $GATEFOLD_NODES/$name.up &&
    exec sleep infinity" &
  node_pid[$name]=$!
  wait_for "$name is up" test -e "$GATEFOLD_NODES/$name.up"
  echo "${node_pid[$name]}" >"$GATEFOLD_NODES/$name"
  ip link add "to_$name" type veth peer name eth0 netns "${node_pid[$name]}"
  ip link set "to_$name" master bridge0 up
  on "$name" ip address add "10.77.0.$2/24" dev eth0
  on "$name" ip link set eth0 up
  echo "10.77.0.$2 $name" >>"$scratch/hosts"
}

at=()
to_node() { # NODE: sets at
  at=(nsenter --target "${node_pid[$1]}" --mount --uts --ipc --net --wd --)
}

on() { # NODE COMMAND…
  to_node "$1"
  "${at[@]}" "${@:2}"
}

# The processes of a node whose command lines match PATTERN.
processes() { # NODE PATTERN
  local pid namespace
  namespace=$(readlink "/proc/${node_pid[$1]}/ns/uts")
  for pid in $(pgrep -f -- "$2" || true); do
    if [[ $(readlink "/proc/$pid/ns/uts") == "$namespace" ]]; then echo "$pid"; fi
  done
}
has_process() { [[ -n $(processes "$@") ]]; }  # NODE PATTERN
no_process() { [[ -z $(processes "$@") ]]; }   # NODE PATTERN
lose() { # NODE PATTERN
  processes "$@" | xargs -r kill -KILL
}

# Waits until a job exchanges step after step: until a node has got 4 MB more.
wait_for_traffic() { # NODE
  local before
  before=$(received "$1")
  wait_for "$1 gets what ranks send" has_received "$1" $((before + 4000000))
}
received() { on "$1" sed -n 's/^ *eth0: *\([0-9]*\).*/\1/p' /proc/net/dev; }  # NODE
has_received() { (($(received "$1") > $2)); }  # NODE BYTES

wait_for() { # WHAT COMMAND…: until it succeeds; 30 s at most
  local what=$1 tenths
  shift
  for ((tenths = 0; tenths < 300; ++tenths)); do
    if "$@" >/dev/null 2>&1; then return; fi
    sleep 0.1
  done
  echo "it never happened that $what"
  return 1
}

# case_of NAME CODE WORDS COMMAND…: it ends with CODE (!0: any other than 0) and says WORDS, patterns
# divided by |; one that begins with ! is not said.
said=$scratch/said
case_of() {
  local name=$1 code=$2 parts word problems=() status=0 begin=$SECONDS
  IFS='|' read -ra parts <<<"$3"
  shift 3
  cases=$((cases + 1))
  if [[ $1 == on ]]; then
    to_node "$2"
    set -- "${at[@]}" "${@:3}"
  fi
  timeout "${limit-60}" "$@" >"$said" 2>&1 </dev/null || status=$?
  seconds=$((SECONDS - begin))
  if [[ $code == "!0" ]]; then
    if ((status == 0)); then problems+=("it ended with 0"); fi
  elif ((status != code)); then
    problems+=("it ended with $status instead of $code")
  fi
  for word in "${parts[@]}"; do
    if [[ $word == !* ]]; then
      if grep -qE -- "${word#!}" "$said"; then problems+=("it said: ${word#!}"); fi
    elif ! grep -qE -- "$word" "$said"; then
      problems+=("it didn't say: $word")
    fi
  done
  verdict "$name" "${problems[@]}"
}

on_ranks() { # NAME CODE WORDS HOSTS ARGUMENT…: a case by launch/run on node0
  case_of "${@:1:3}" on node0 "$here/launch/run" --host "$4" --build "$GATEFOLD_BUILD" -- "${@:5}"
}

# in_mid_run NAME CODE WORDS HOSTS ARGUMENT… -- COMMAND…: the same, and COMMAND happens meanwhile.
in_mid_run() {
  local arguments=() before=$failed job
  while [[ $1 != -- ]]; do arguments+=("$1") && shift; done
  cases=$((cases + 1))
  (on_ranks "${arguments[@]}" && ((failed == before))) &
  job=$!
  "${@:2}"
  wait "$job" || failed=$((failed + 1))
}

verdict() { # NAME PROBLEM…
  local name=$1
  shift
  if (($# == 0)); then
    printf 'ok      %4s s  %s\n' "$seconds" "$name"
    return
  fi
  failed=$((failed + 1))
  printf 'FAILED  %4s s  %s\n' "$seconds" "$name"
  printf '    %s\n' "$@"
  sed 's/^/    | /' "$said" | tail -n 60
}

# Does WHAT hold? A case of its own.
holds() { # NAME COMMAND…
  local name=$1
  shift
  seconds=0
  cases=$((cases + 1))
  if "$@"; then verdict "$name"; else verdict "$name" "it doesn't hold: $*"; fi
}

# No process of a job is left on NODES, and no file in their shared memory.
left_behind() { # NODE…
  local node pid
  for node in "$@"; do
    for pid in $(processes "$node" '/gatefold |orted|slurmstepd'); do
      echo "$node: $(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" || true)"
    done
    on "$node" find /dev/shm -type f -printf "$node: %p\n"
  done
}
nothing_left() { # NODE…
  local tries left
  for ((tries = 0; tries < 30; ++tries)); do
    left=$(left_behind "$@")
    if [[ -z $left ]]; then return; fi
    sleep 0.1
  done
  printf '    %s\n' "$left"
  return 1
}

finish() {
  echo "$cases cases, $failed failed"
  ((failed == 0 && cases > 0))
}
