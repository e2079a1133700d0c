# launch/: tests of the folder of the same name
gatefold_test(options SOURCES launch/options_test.cpp)
gatefold_test(outputs SOURCES launch/outputs_test.cpp runtime/file_testing.cpp)
gatefold_test(report SOURCES launch/report_test.cpp)
gatefold_test(weight_reads SOURCES launch/weight_reads_test.cpp NP 1 2 3 4)
# Tests that run the program itself, alone and under mpirun.
list(JOIN GATEFOLD_MPIRUN " " mpirun_text)
foreach(name program odd_input)
  gatefold_test(${name} SOURCES launch/${name}_test.cpp LABELS program TIMEOUT 280)
  target_compile_definitions(${name} PRIVATE GATEFOLD_MPIRUN="${mpirun_text}")
  add_dependencies(${name} gatefold)
endforeach()

# What a rank reads of a checkpoint and holds in memory; not where sanitizers hold more.
add_executable(peak_rss launch/peak_rss.cpp)
target_link_libraries(peak_rss PRIVATE gatefold_options)
list(JOIN GATEFOLD_MPIRUN " " mpirun_line)
add_test(NAME launch.reads COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/launch/reads.sh)
set_tests_properties(launch.reads PROPERTIES LABELS "reads" SKIP_RETURN_CODE 77 TIMEOUT 120
  PROCESSORS 4
  ENVIRONMENT "${GATEFOLD_MPI_ENVIRONMENT};GATEFOLD_MPIRUN=${mpirun_line};GATEFOLD_BUILD=${PROJECT_BINARY_DIR}")
