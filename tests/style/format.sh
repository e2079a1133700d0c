#!/usr/bin/env bash
# Every source file is as clang-format 14 leaves it (other versions differ in small things).
set -euo pipefail

formatter=
for name in clang-format-14 clang-format; do
  if "$name" --version 2>/dev/null | grep -q 'version 14\.'; then
    formatter=$name
    break
  fi
done
if [[ -z $formatter ]]; then
  echo "skipped: style.format (clang-format 14 is not installed)"
  exit 77
fi
find runtime parallel layers launch tests -type f \
  \( -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \) -print0 |
  xargs -0 "$formatter" --dry-run -Werror
