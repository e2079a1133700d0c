#!/usr/bin/env bash
# A source file of more than 600 lines has a second thing in it.
set -euo pipefail

find runtime parallel layers launch tests .ci -type f \
  \( -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' -o -name '*.py' -o -name '*.sh' \
  -o -name '*.cmake' -o -name CMakeLists.txt -o -path 'launch/*' \) -print0 |
  xargs -0 awk 'FNR == 601 { print FILENAME " has more than 600 lines"; long++ }
                END { exit long > 0 }'
