# layers/: tests of the folder of the same name
gatefold_test(model_config SOURCES layers/model_config_test.cpp)
gatefold_test(model_families SOURCES layers/model_families_test.cpp)
gatefold_test(seeded_source SOURCES layers/seeded_source_test.cpp)
gatefold_test(exact SOURCES layers/exact_test.cpp NP 1 2 3 4 5 6 7 8 LABELS exact TIMEOUT 300)
gatefold_test(reference SOURCES layers/reference_test.cpp layers/reference_bound_test.cpp)
gatefold_test(golden SOURCES layers/golden_test.cpp NP 1 2 3 4)
gatefold_test(linear SOURCES layers/linear_test.cpp NP 1 2 3 4 5 LABELS exact)
gatefold_test(mlp SOURCES layers/mlp_test.cpp NP 1 2 3 4 5 8 LABELS exact)
