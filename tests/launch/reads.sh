#!/usr/bin/env bash
# A rank reads its share of a checkpoint and no more, and holds little else in memory.
set -euo pipefail

program=$GATEFOLD_BUILD/gatefold
peak_rss=$GATEFOLD_BUILD/tests/peak_rss
read -ra mpirun <<<"$GATEFOLD_MPIRUN"
if ! strace -o /dev/null true 2>/dev/null; then
  echo "skipped: launch.reads (strace is not installed, or may not trace here)"
  exit 77
fi

scratch=$(mktemp -d "${TMPDIR:-/tmp}/gatefold-reads.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
hidden=1024 width=4096 tokens=16
weights=$((3 * hidden * width * 2))
cat >"$scratch/config.json" <<END
{"model_type": "llama", "hidden_size": $hidden, "intermediate_size": $width, "hidden_act": "silu",
 "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
END
"$program" make-model --quiet --config "$scratch/config.json" --output "$scratch/model" >/dev/null
header=$(($(stat -c %s "$scratch/model/model.safetensors") - weights))

failed=0
expect() { # WHAT FOUND LEAST MOST
  if (($2 >= $3 && $2 <= $4)); then return; fi
  echo "$1: $2 bytes, expected $3 to $4"
  failed=1
}

# Bytes that pread64 had from model.safetensors.
bytes_read() { # TRACE
  awk '/pread64\([0-9]+<[^>]*model\.safetensors>/ {
         if (/<unfinished \.\.\.>$/) pending[$1] = 1; else if ($NF ~ /^[0-9]+$/) sum += $NF }
       /pread64 resumed/ && pending[$1] { sum += $NF; pending[$1] = 0 }
       END { printf "%d\n", sum }' "$1"
}

# Twice as much where the CPU can't multiply bf16.
widened=1
if [[ $("$program" inspect --model "$scratch/model") == *"widened to"* ]]; then widened=2; fi

run=(run --quiet --model "$scratch/model" --tokens "$tokens")
for np in 1 2 4; do
  share=$((weights / np))
  # shellcheck disable=SC2016
  "${mpirun[@]}" -n "$np" bash -c \
    'exec strace -f -y -s 0 -e trace=pread64,read,openat -o "$0.$OMPI_COMM_WORLD_RANK" "$@"' \
    "$scratch/trace$np" "$program" "${run[@]}" >/dev/null
  "${mpirun[@]}" -n "$np" "$peak_rss" "$scratch/peak$np" "$program" "${run[@]}" >/dev/null
  for ((rank = 0; rank < np; rank++)); do
    # The header is read to open the file, and its length before it.
    expect "rank $rank of $np reads" "$(bytes_read "$scratch/trace$np.$rank")" "$share" \
      $((share + share / 50 + 2 * header))
    if grep -qE '(^|[ ])read\([0-9]+<[^>]*model\.safetensors>' "$scratch/trace$np.$rank"; then
      echo "rank $rank of $np reads the file other than by pread64"
      failed=1
    fi
    # x, y and their copies on the device, the hidden values, and fp32 sums of every block.
    activations=$((tokens * (8 * hidden * 4 + 8 * hidden * 4 + width * 4)))
    expect "rank $rank of $np holds" $(($(cat "$scratch/peak$np.$rank") * 1024)) "$share" \
      $((share * widened + activations + 64 * 1024 * 1024))
  done
done

# A stack of experts is written in pieces: making it takes less memory than the stack itself.
stack=$((32 * 2 * 1024 * 1024 * 2))
cat >"$scratch/stacked.json" <<END
{"model_type": "qwen3_5_moe_text", "hidden_size": 1024, "moe_intermediate_size": 1024,
 "shared_expert_intermediate_size": 64, "num_experts": 32, "num_experts_per_tok": 2,
 "num_hidden_layers": 1, "dtype": "bfloat16"}
END
"${mpirun[@]}" -n 1 "$peak_rss" "$scratch/peak" "$program" make-model --quiet \
  --config "$scratch/stacked.json" --output "$scratch/stacked" >/dev/null
expect "make-model with a stack of $stack bytes holds" $(($(cat "$scratch/peak.0") * 1024)) 1 \
  $((80 * 1024 * 1024))
exit "$failed"
