# faults/: verification can fail, and a fault of one rank ends all. Each script is a table of cases.
add_executable(gatefold_with_faults
  faults/gatefold_with_faults.cpp faults/fault.cpp faults/weight_faults.cpp faults/sum_faults.cpp
  faults/expert_faults.cpp faults/mishap.cpp)
target_link_libraries(gatefold_with_faults PRIVATE gatefold_launch gatefold_options)

# Another version of the program, for ranks that were not installed alike.
add_executable(gatefold_of_another_version
  ${PROJECT_SOURCE_DIR}/launch/main.cpp ${PROJECT_SOURCE_DIR}/launch/program.cpp)
target_include_directories(gatefold_of_another_version PRIVATE ${PROJECT_BINARY_DIR}/generated)
add_dependencies(gatefold_of_another_version gatefold_revision)
target_compile_definitions(gatefold_of_another_version PRIVATE GATEFOLD_VERSION="0.0.0-other")
target_link_libraries(gatefold_of_another_version PRIVATE
  gatefold_launch fmt::fmt gatefold_options)

add_library(pmpi_alter SHARED faults/pmpi_alter.cpp)
target_link_libraries(pmpi_alter PRIVATE MPI::MPI_CXX ${CMAKE_DL_LIBS} gatefold_options)

function(gatefold_fault_test name timeout)
  add_test(NAME faults.${name} COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/faults/${name}.sh)
  set_tests_properties(faults.${name} PROPERTIES LABELS "faults" TIMEOUT ${timeout} PROCESSORS 4
    ENVIRONMENT "${GATEFOLD_MPI_ENVIRONMENT};GATEFOLD_MPIRUN=${mpirun_line};GATEFOLD_BUILD=${PROJECT_BINARY_DIR}")
endfunction()
gatefold_fault_test(wrong_results 240)
gatefold_fault_test(other_weights 240)
gatefold_fault_test(lost_ranks 240)
gatefold_fault_test(named_ranks 240)
gatefold_fault_test(moe_results 240)
gatefold_fault_test(moe_lost 300)
gatefold_fault_test(signals 120)
gatefold_fault_test(disagreement 120)
gatefold_fault_test(mpi_errors 120)
if(GATEFOLD_CUDA)
  gatefold_fault_test(no_gpu 120)
  set_tests_properties(faults.no_gpu PROPERTIES LABELS "faults;cuda" SKIP_RETURN_CODE 77 RUN_SERIAL ON)
endif()
