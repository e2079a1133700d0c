# launch/: tests of the folder of the same name
gatefold_test(options SOURCES launch/options_test.cpp launch/options_help_test.cpp)
gatefold_test(bench_columns SOURCES launch/bench_columns_test.cpp)
gatefold_test(bench_point SOURCES launch/bench_point_test.cpp launch/counted_new.cpp NP 1 2 3)
gatefold_test(sweep SOURCES launch/sweep_test.cpp)
gatefold_test(outputs SOURCES launch/outputs_test.cpp)
gatefold_test(report SOURCES launch/report_test.cpp)
gatefold_test(bandwidth SOURCES launch/bandwidth_test.cpp)
gatefold_test(machine SOURCES launch/machine_test.cpp)
gatefold_test(movement_bench SOURCES launch/movement_bench_test.cpp NP 1 2 3)
gatefold_test(routing_pattern SOURCES launch/routing_pattern_test.cpp)
gatefold_test(progress_line SOURCES launch/progress_line_test.cpp)
gatefold_test(timing SOURCES launch/timing_test.cpp)
gatefold_test(expert_load SOURCES launch/expert_load_test.cpp)
gatefold_test(weight_reads SOURCES launch/weight_reads_test.cpp NP 1 2 3 4)
# Tests that run the program itself, alone and under mpirun.
foreach(name program bench_program moe_program convert machine_program balance_program odd_input odd_moe_input quantised_program)
  gatefold_test(${name} SOURCES launch/${name}_test.cpp LABELS program TIMEOUT 280)
  add_dependencies(${name} gatefold)
endforeach()
target_sources(odd_moe_input PRIVATE launch/capacity_program_test.cpp)

# What a rank reads of a checkpoint and holds in memory; not where sanitizers hold more.
add_executable(peak_rss launch/peak_rss.cpp)
target_link_libraries(peak_rss PRIVATE gatefold_options)
add_test(NAME launch.reads COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/launch/reads.sh)
set_tests_properties(launch.reads PROPERTIES LABELS "reads" SKIP_RETURN_CODE 77 TIMEOUT 120
  PROCESSORS 4
  ENVIRONMENT "${GATEFOLD_MPI_ENVIRONMENT};GATEFOLD_MPIRUN=${mpirun_line};GATEFOLD_BUILD=${PROJECT_BINARY_DIR}")

# The scripts beside the program.
foreach(script run_script doctor plot_script)
  string(REPLACE "_script" "" name ${script})
  add_test(NAME launch.${name} COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/launch/${script}.sh)
  set_tests_properties(launch.${name} PROPERTIES LABELS "launchers" SKIP_RETURN_CODE 77 TIMEOUT 180
    PROCESSORS 2 ENVIRONMENT "GATEFOLD_BUILD=${PROJECT_BINARY_DIR}")
endforeach()
