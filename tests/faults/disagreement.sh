#!/usr/bin/env bash
# What only one rank sees ends all of them, with one code and one line that names the rank.
set -euo pipefail
# shellcheck source=tests/faults/driver.sh
source "$(dirname "${BASH_SOURCE[0]}")/driver.sh"

work=(-- verify --model "$model")

# together NAME NP CODE WORDS …: as agreed, and one line in all.
together() {
  agreed "$@"
  once "$1" "gatefold: "
}

# Ranks that were started differently.
#        what                              np code words                                  environment -- arguments
together "another --blocks on rank 1"       3 64 "rank 1 has --blocks 4, rank 0 has 8"    GATEFOLD_ARGUMENTS_1=--blocks=4 "${work[@]}"
together "another --seed on rank 2"         3 64 "rank 2 has --seed 7, rank 0 has 0"      GATEFOLD_ARGUMENTS_2=--seed=7 "${work[@]}"
together "another --dtype on rank 1"        2 64 "rank 1 has --dtype f32, rank 0 has model" GATEFOLD_ARGUMENTS_1=--dtype=f32 "${work[@]}"
together "another --tokens on rank 0"       2 64 "rank 1 has --tokens 64, rank 0 has 5"   GATEFOLD_ARGUMENTS_0=--tokens=5 "${work[@]}"
together "another --set on rank 1"          2 64 "rank 1 has --set hidden_act=gelu, rank 0 has none" GATEFOLD_ARGUMENTS_1=--set=hidden_act=gelu "${work[@]}"
together "another --timeout on rank 1"      2 64 "rank 1 has --timeout 9, rank 0 has 300" GATEFOLD_ARGUMENTS_1=--timeout=9 "${work[@]}"
together "a bad flag on rank 1 alone"       2 64 "rank 1: |--blocks 'x'"                  GATEFOLD_ARGUMENTS_1=--blocks=x "${work[@]}"
together "another version on rank 1"        2 64 "rank 1 has gatefold 0.0.0-other, rank 0 has" GATEFOLD_PROGRAM_1="$GATEFOLD_BUILD/tests/gatefold_of_another_version" "${work[@]}"
together "a number too large, on all"       2 64 "--tokens '99999999999999999999'"        "${work[@]}" --tokens 99999999999999999999
together "an option twice, on all"          2 64 "--tokens"                               "${work[@]}" --tokens 1 --tokens 2
together "tp that doesn't divide the ranks" 3 64 "--tp 2 does not divide 3 ranks"         "${work[@]}" --tp 2

# Ranks that see other files under the same name.
mkdir "$scratch/here" "$scratch/there"
rank_1_there=(GATEFOLD_FOLDER_0="$scratch/here" GATEFOLD_FOLDER_1="$scratch/there" -- verify)
copy_to() { cp -r "$model" "$scratch/here/$1" && cp -r "$model" "$scratch/there/$1"; }

copy_to same
agreed   "two copies of a model"            2 0  "$right"                                 "${rank_1_there[@]}" --model same
copy_to weight
# The last weight of up, in rank 1's half, becomes 1 in its copy.
printf '\x80\x3f' | dd of="$scratch/there/weight/model.safetensors" bs=1 conv=notrunc status=none \
  seek=$(($(stat -c %s "$model/model.safetensors") - 2))
agreed   "rank 1 has another weight"        2 1  "other bits than one device|FAILED"      "${rank_1_there[@]}" --model weight
copy_to config
sed -i 's/"silu"/"gelu"/' "$scratch/there/config/config.json"
together "rank 1 has another config.json"   2 65 "rank 1 has a config.json with hash"     "${rank_1_there[@]}" --model config
copy_to header
# "format": "pt" in the metadata becomes "xt": the tensors lie where they lay.
printf 'x' | dd of="$scratch/there/header/model.safetensors" bs=1 conv=notrunc status=none seek=35
together "rank 1 has another header"        2 65 "rank 1 has model files with header hash" "${rank_1_there[@]}" --model header
copy_to short
truncate -s -2 "$scratch/there/short/model.safetensors"
together "rank 1 has a truncated file"      2 65 "rank 1: short/model.safetensors"        "${rank_1_there[@]}" --model short
copy_to no_weights
rm "$scratch/there/no_weights/"*.safetensors
together "rank 1 has no weights"            2 66 "rank 1: no_weights"                     "${rank_1_there[@]}" --model no_weights
cp -r "$model" "$scratch/here/gone"
together "rank 1 has no model"              2 66 "rank 1: gone/config.json"               "${rank_1_there[@]}" --model gone
together "nobody has the model"             2 66 "rank 0: nobody/config.json"             "${rank_1_there[@]}" --model nobody

# Processes that a launcher of another MPI library started, each a world of one.
alone_among="the launcher started 4 processes but this one is alone"
single "one of 4, says Open MPI"   64 "$alone_among" OMPI_COMM_WORLD_SIZE=4     "${work[@]}"
single "one of 4, says PMI"        64 "$alone_among" PMI_SIZE=4                 "${work[@]}"
single "one of 4, says srun"       64 "$alone_among" SLURM_STEP_NUM_TASKS=4     "${work[@]}"
single "one in a batch shell"       0 "$right"       SLURM_NTASKS=4             "${work[@]}"
single "one of one"                 0 "$right"       OMPI_COMM_WORLD_SIZE=1     "${work[@]}"
finish
