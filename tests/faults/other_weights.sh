#!/usr/bin/env bash
# One weight that differs on one rank, by its lowest bit, is noticed and named on every rank, though
# no bit of y shows it.
set -euo pipefail
# shellcheck source=tests/faults/driver.sh
source "$(dirname "${BASH_SOURCE[0]}")/driver.sh"

# unseen ARGUMENT…: as agreed, ending in 1, and by nothing that is said of y.
unseen() { # NAME NP WORDS NAME=VALUE… -- ARGUMENT…
  agreed "$1" "$2" 1 "other weights in|FAILED|$3" "${@:4}"
  local word
  for word in "bits than one device" "float64 bound" "NaN in"; do
    if said "$word"; then fails "$1" "y told it, too: $word"; fi
  done
}
other() { echo "first: rank $1 read '$2'"; }  # RANK TENSOR
twice="rank 0 read|twice with different values"
mlp=model.layers.0.mlp

# A read that gives something else than the file or the seed has, while the layer is loaded.
#      what                                        np words                                  environment -- arguments
for np in 2 3 4; do
last=$((np - 1))
unseen "a weight of up, last of $np ranks"        $np "$(other $last $mlp.up_proj.weight)"    GATEFOLD_FAULT=low_bit@up:$last "${real[@]}"
unseen "a weight of gate, last of $np ranks"      $np "$(other $last $mlp.gate_proj.weight)"  GATEFOLD_FAULT=low_bit@gate:$last "${real[@]}"
unseen "a weight of down, rank 1 of $np"          $np "$(other 1 $mlp.down_proj.weight)"      GATEFOLD_FAULT=low_bit@down:1 "${real[@]}"
unseen "a weight of up, rank 0 of $np"            $np "$twice"                                GATEFOLD_FAULT=low_bit@up:0 "${real[@]}"
unseen "a seeded weight, rank 1 of $np"           $np "$(other 1 $mlp.up_proj.weight)"        GATEFOLD_FAULT=low_bit@up:1 "${biased[@]}"
# A bias is seldom as small as the smallest weight, so y may show it.
agreed "a seeded bias of up, last of $np ranks"   $np 1 "$(other $last $mlp.up_proj.bias)"    GATEFOLD_FAULT=low_bit@up_bias:$last "${biased[@]}"
agreed "a seeded bias of down, last of $np ranks" $np 1 "$(other $last $mlp.down_proj.bias)"  GATEFOLD_FAULT=low_bit@down_bias:$last "${biased[@]}"
done
unseen "rank 1 of each of two groups"               4 "on ranks 1,3|$(other 1 $mlp.up_proj.weight)" GATEFOLD_FAULT=low_bit@up:1 "${real[@]}" --tp 2
unseen "a rank without tokens"                      4 "on ranks 1,3|$(other 1 $mlp.up_proj.weight)" GATEFOLD_FAULT=low_bit@up:1 "${real[@]}" --tp 2 --token-split 64,0
agreed "a fault that isn't reached"                 2 0 "$right"                              GATEFOLD_FAULT=low_bit@up:7 "${real[@]}"

# Other files on one rank: "there" has the smallest weight of the first or last rows of up, those of
# the first and the last rank, with another lowest bit.
mkdir "$scratch/here"
cp -r "$model" "$scratch/here/model"
size=$(stat -c %s "$model/model.safetensors")
eighth=$((192 * 576 * 2))
flip_smallest() { # FOLDER FIRST_BYTE
  local index value
  cp -r "$scratch/here" "$scratch/$1"
  read -r index value < <(od -An -v -t u2 -w2 -j "$2" -N "$eighth" "$model/model.safetensors" |
    awk '{ size = $1 % 32768; if (NR == 1 || size < least) { least = size; at = NR - 1; low = $1 % 256 } }
         END { print at, low }')
  # shellcheck disable=SC2059
  printf "\\x$(printf %02x $((value ^ 1)))" | dd bs=1 conv=notrunc status=none \
    of="$scratch/$1/model/model.safetensors" seek=$(($2 + 2 * index))
  if cmp -s "$model/model.safetensors" "$scratch/$1/model/model.safetensors"; then
    fails "the file in $1" "it has no other byte"
  fi
}
flip_smallest first_rows $((size - 8 * eighth))
flip_smallest last_rows $((size - eighth))
# folders NP RANK FOLDER: all ranks are here but one, which is there.
folders() {
  local rank
  for ((rank = 0; rank < $1; ++rank)); do
    if ((rank == $2)); then echo "GATEFOLD_FOLDER_$rank=$scratch/$3"; else echo "GATEFOLD_FOLDER_$rank=$scratch/here"; fi
  done
}
up=$mlp.up_proj.weight
#      what                                        np words               environment -- arguments
for np in 2 3 4; do
last=$((np - 1))
mapfile -t own < <(folders $np $last last_rows)
mapfile -t foreign < <(folders $np $last first_rows)
mapfile -t root < <(folders $np 0 last_rows)
rest="rank 1"
if ((np > 2)); then rest="ranks 1-$last"; fi
unseen "its own rows differ, last of $np"         $np "on rank $last, $(other $last $up) [rows 1344-1535, columns 0-575]" "${own[@]}" -- verify --model model
unseen "another's rows differ, last of $np"       $np "on rank $last, $(other $last $up) [rows 0-1535, columns 0-575]"    "${foreign[@]}" -- verify --model model
unseen "the same with one token"                  $np "on rank $last, $(other $last $up)" "${foreign[@]}" -- verify --model model --tokens 1
unseen "the same with fast sums"                  $np "on rank $last, $(other $last $up)" "${foreign[@]}" -- verify --model model --reduce fast
unseen "rank 0's file differs, of $np"            $np "on $rest, $(other 1 $up)"          "${root[@]}" -- verify --model model
done
mapfile -t none < <(folders 4 7 none)
agreed "no file differs"                            3 0 "$right"            "${none[@]}" -- verify --model model
agreed "no file differs, with fast sums"            3 0 "$right"            "${none[@]}" -- verify --model model --reduce fast
agreed "no file differs, with one token"            4 0 "$right"            "${none[@]}" -- verify --model model --tokens 1

refuses unseen "no other weight"                    2 "FAILED"              "${real[@]}"
refuses unseen "a difference that y shows"          2 "other weights"       GATEFOLD_FAULT=shards_swapped "${real[@]}"
finish
