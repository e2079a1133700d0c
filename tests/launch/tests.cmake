# launch/: tests of the folder of the same name
gatefold_test(options SOURCES launch/options_test.cpp)
gatefold_test(report SOURCES launch/report_test.cpp)
gatefold_test(program SOURCES launch/program_test.cpp LABELS program TIMEOUT 280)
list(JOIN GATEFOLD_MPIRUN " " mpirun_text)
target_compile_definitions(program PRIVATE GATEFOLD_MPIRUN="${mpirun_text}")
add_dependencies(program gatefold)
