gatefold_test(dtype SOURCES runtime/dtype_test.cpp)
