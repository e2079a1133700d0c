# gatefold_fuzz(name SOURCES a.cpp … [SEEDS folder] [SECONDS s]): a libFuzzer target, built by the
# target `fuzzers`, and a ctest labelled fuzz that runs it for a while from the seeds. Does nothing
# unless GATEFOLD_FUZZ is on (preset cpu-fuzz, which instruments the libraries too).
if(GATEFOLD_FUZZ)
  add_custom_target(fuzzers)
endif()
function(gatefold_fuzz name)
  if(NOT GATEFOLD_FUZZ)
    return()
  endif()
  cmake_parse_arguments(arg "" "SEEDS;SECONDS" "SOURCES" ${ARGN})
  if(NOT arg_SECONDS)
    set(arg_SECONDS 30)
  endif()
  math(EXPR timeout "${arg_SECONDS} + 60")
  add_executable(${name} EXCLUDE_FROM_ALL ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE gatefold_layers gatefold_options)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  add_dependencies(fuzzers ${name})
  # What it finds worth keeping goes into the first folder, in the build.
  set(found ${CMAKE_CURRENT_BINARY_DIR}/${name}.corpus)
  file(MAKE_DIRECTORY ${found})
  add_test(NAME ${name}
           COMMAND ${name} -max_total_time=${arg_SECONDS} -print_final_stats=1
                   -artifact_prefix=${found}. ${found} ${arg_SEEDS})
  set_tests_properties(${name} PROPERTIES LABELS fuzz TIMEOUT ${timeout})
endfunction()
