# parallel/: tests of the folder of the same name
gatefold_test(communicator SOURCES parallel/communicator_test.cpp parallel/mpi_communicator_test.cpp NP 1 2 3 4 5)
gatefold_test(agreement SOURCES parallel/agreement_test.cpp NP 1 2 3 4)
gatefold_test(grid SOURCES parallel/grid_test.cpp NP 1 2 3 4 8)
gatefold_test(tree_sum SOURCES parallel/tree_sum_test.cpp NP 1 2 3 4 5 8 LABELS exact)
gatefold_test(session SOURCES parallel/session_test.cpp LABELS program LINK MPI::MPI_CXX)
