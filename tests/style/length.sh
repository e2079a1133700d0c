#!/usr/bin/env bash
# A source file of more than 600 lines, or an interface header of more than 150, has a second thing
# in it.
set -euo pipefail

find runtime parallel layers launch tests .ci -type f \
  \( -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' -o -name '*.py' -o -name '*.sh' \
  -o -name '*.cmake' -o -name CMakeLists.txt -o -path 'launch/*' \) -print0 |
  xargs -0 awk '
    FNR == 1 { most = FILENAME ~ /^(runtime|parallel|layers|launch).*[.]h$/ ? 150 : 600 }
    FNR == most + 1 { print FILENAME " has more than " most " lines"; long++ }
    END { exit long > 0 }'
